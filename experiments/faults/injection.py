"""Faults: what is done to a run, when, and what must come of it.

`BOUNDS` holds the stated time for each: those of `scalejax launch --help`, and a second for what
is measured from outside.
"""

import contextlib
import os
import random
import re
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launched import Launched

BOUNDS = {
    "kill": 10.0,
    "kill launcher": 10.0,
    "hang": 20.0,
    "hang launcher": 10.0,
    "SIGTERM": 30.0,
    "SIGINT": 30.0,
    "torn": 60.0,
    "full disk": 30.0,
    "clock": 10.0,
}
"""Seconds within which a fault is noticed, by kind: said, or the run ended. Of "hang launcher" and
"clock", within which the run goes on; of "torn", from the start, which is most of it."""
WAIT = 3.0
"""How many times as long to wait before the campaign itself gives up."""
MOMENTS = ("starting", "compiling", "training", "evaluating", "saving")
_VICTIMS = ("first", "second", "launcher")
_PATIENCE_SECONDS = 240.0


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault, and what came of it."""

    index: int
    kind: str
    victim: str
    moment: str
    seconds: float | None = None
    """Until it was noticed."""
    outcome: str = ""
    """"restarted by itself", "exit code N", "went on"."""
    deviations: list[str] = field(default_factory=list)


def draw(index: int, rng: random.Random, kinds: tuple[str, ...]) -> Fault:
    """The fault of that number."""
    kind = kinds[index] if index < len(kinds) else rng.choice(kinds)  # each at least once
    if kind in ("hang launcher", "kill launcher"):
        return Fault(index=index, kind=kind, victim="launcher", moment=rng.choice(MOMENTS))
    if kind == "torn":
        how = rng.choice(("cut", "bits", "gone"))
        return Fault(index=index, kind=kind, victim=how, moment="between")
    if kind == "full disk":
        moment = rng.choice(("training", "evaluating", "saving"))
        return Fault(index=index, kind=kind, victim="folder", moment=moment)
    if kind == "clock":
        victim = rng.choice(("+86400 s", "-86400 s", "+315360000 s"))
        return Fault(index=index, kind=kind, victim=victim, moment=rng.choice(MOMENTS[1:]))
    if kind in ("kill", "hang"):
        moments = MOMENTS if kind == "kill" else MOMENTS[1:]
        return Fault(
            index=index, kind=kind, victim=rng.choice(_VICTIMS[:2]), moment=rng.choice(moments)
        )
    return Fault(index=index, kind=kind, victim=rng.choice(_VICTIMS), moment=rng.choice(MOMENTS))


def wait_for_moment(
    fault: Fault, launched: Launched, checkpoints: Path, rng: random.Random
) -> bool:
    """Return when it is time for `fault`; whether the run still goes on."""
    begun, target = time.monotonic(), None
    delay = rng.random() * 2
    while launched.process.poll() is None and time.monotonic() < begun + _PATIENCE_SECONDS:
        beats = [launched.beat(number) for number in range(2)]
        beat = beats[0]
        is_time = fault.moment == "starting" and time.monotonic() > begun + delay
        if beat is not None and all(beats):
            if target is None and beat.phase in ("training", "waiting for input"):
                target = beat.step + rng.randrange(1, 25)
            is_time |= fault.moment in ("compiling", "evaluating") and beat.phase == fault.moment
            if target is not None:
                is_time |= fault.moment == "training" and beat.step >= target
                is_time |= fault.moment == "saving" and _is_saving(checkpoints)
        if is_time and len(launched.workers()) == 2:
            return True
        time.sleep(0.004)
    return False


def _is_saving(checkpoints: Path) -> bool:
    return checkpoints.is_dir() and any("tmp" in path.name for path in checkpoints.iterdir())


def process_of(fault: Fault, launched: Launched) -> int:
    """The id of the victim."""
    if fault.victim == "launcher":
        return launched.process.pid
    workers = launched.workers()
    return workers[("first", "second").index(fault.victim)]


def send(number: int, process: int) -> None:
    """Send a signal; one that has ended meanwhile gets none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def kill_or_hang(fault: Fault, launched: Launched) -> None:
    """SIGKILL or SIGSTOP a process of the run: it is named, and all begin again."""
    number = ("first", "second").index(fault.victim)
    is_kill = fault.kind == "kill"
    send(signal.SIGKILL if is_kill else signal.SIGSTOP, process_of(fault, launched))
    since = time.monotonic()
    words = "was killed by SIGKILL" if is_kill else "has been stopped for 15 s"
    bound = BOUNDS[fault.kind] * WAIT
    fault.seconds = launched.waits_for(f"process {number} {words}", since, bound)
    if fault.seconds is None:
        fault.deviations.append(f"process {number} was not named: {launched.said[-600:]}")
    fault.outcome = "restarted by itself"


def kill_launcher(fault: Fault, launched: Launched) -> None:
    """SIGKILL: its processes end with it."""
    launched.workers()
    since = time.monotonic()
    launched.process.kill()
    launched.process.wait()
    while launched.left_behind(0.0) and time.monotonic() < since + WAIT * BOUNDS[fault.kind]:
        time.sleep(0.02)
    fault.seconds = time.monotonic() - since
    fault.outcome = "exit code -9"


def hang_launcher(fault: Fault, launched: Launched) -> None:
    """SIGSTOP for a second: nothing comes of it."""
    send(signal.SIGSTOP, launched.process.pid)
    time.sleep(1)
    since = time.monotonic()
    send(signal.SIGCONT, launched.process.pid)
    fault.seconds = _seconds_until_it_moves(launched, since)
    fault.outcome = "went on"


def jump_clock(fault: Fault, launched: Launched, offset_file: Path) -> None:
    """Set the clock of all processes: nothing comes of it."""
    since = time.monotonic()
    with offset_file.open("r+b") as file:  # in place: it is mapped
        file.write(struct.pack("<q", int(fault.victim.split()[0])))
    fault.seconds = _seconds_until_it_moves(launched, since)
    fault.outcome = "went on"


def _seconds_until_it_moves(launched: Launched, since: float) -> float:
    beats = [launched.beat(number) for number in range(2)]
    while launched.process.poll() is None and time.monotonic() < since + _PATIENCE_SECONDS:
        if [launched.beat(number) for number in range(2)] != beats:
            break
        time.sleep(0.01)
    return time.monotonic() - since


def ask_to_stop(fault: Fault, launched: Launched) -> None:
    """SIGTERM or SIGINT: all save and stop; or, asked of one process alone, all begin again."""
    number = getattr(signal, fault.kind)
    send(number, process_of(fault, launched))
    since = time.monotonic()
    bound = BOUNDS[fault.kind] * WAIT
    if fault.victim == "launcher":
        fault.seconds = launched.ends(since, bound)
        codes: tuple[int, ...] = (128 + number, -number)  # it may not have begun to listen
    else:
        words = f"asked to stop|was killed by {fault.kind}"
        fault.seconds = launched.waits_for(words, since, bound)
        if fault.seconds is not None:
            fault.outcome = "restarted by itself"
            return
        fault.seconds = launched.ends(since, bound)
        codes = (128 + number,)
    fault.outcome = f"exit code {launched.process.poll()}"
    if launched.process.poll() not in (*codes, 0):
        fault.deviations.append(f"{fault.outcome}, not {codes[0]}: {launched.said[-600:]}")


def fill_disk(fault: Fault, launched: Launched, disk: Path) -> None:
    """Leave no room: the run ends, and names the file."""
    since = time.monotonic()
    with (disk / "filler").open("wb", buffering=0) as filler:
        for size in (2**20, 2**12):
            try:
                while True:
                    filler.write(bytes(size))
            except OSError:
                continue
    fault.seconds = launched.ends(since, BOUNDS[fault.kind] * WAIT)
    (disk / "filler").unlink()
    fault.outcome = f"exit code {launched.process.poll()}"
    words = " ".join(launched.said.split())  # lines are as wide as the terminal
    is_named = re.search(
        rf"error: \S*{re.escape(str(launched.folder))}\S* cannot be written", words
    )
    if launched.process.poll() != 2 or is_named is None:
        fault.deviations.append(f"{fault.outcome}: {launched.said[-1500:]}")


def tear(fault: Fault, checkpoints: Path, rng: random.Random) -> Path | None:
    """Damage a file of the newest checkpoint; its folder, None if there is none."""
    steps = [int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal()]
    if not steps:
        return None
    newest = checkpoints / str(max(steps))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    victim = rng.choice(files)
    content = bytearray(victim.read_bytes())
    if fault.victim == "cut":
        victim.write_bytes(content[: rng.randrange(len(content))])
    elif fault.victim == "bits":
        for _ in range(rng.randrange(1, 9)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        victim.write_bytes(content)
    else:
        victim.unlink()
    fault.moment = victim.relative_to(newest).parts[-1][:24]
    return newest


def resume_torn(fault: Fault, launched: Launched, torn: Path) -> bool:
    """Whether the run was refused that has a torn checkpoint and no other; with another one, it
    names the torn one and goes on from that."""
    since = launched.begin
    pattern = r"resumed: at step|error: steps are recorded"
    fault.seconds = launched.waits_for(pattern, since, BOUNDS[fault.kind] * WAIT)
    if launched.waits_for("resumed: at step", since, 0.0) is not None:
        fault.outcome = "went on"
        if f"checkpoint {torn.name} is passed over: " not in launched.said:
            fault.deviations.append(f"checkpoint {torn.name} was not named: {launched.said[-600:]}")
        return False
    fault.outcome = "refused"  # again and again, until the restarts are used up
    words = " ".join(launched.said.split())  # lines are as wide as the terminal
    if fault.seconds is None or "--start-over" not in words:
        fault.deviations.append(f"{fault.outcome}: {launched.said[-600:]}")
    launched.kill()
    return True


ACTIONS: dict[str, Callable[[Fault, Launched], None]] = {
    "kill": kill_or_hang,
    "hang": kill_or_hang,
    "kill launcher": kill_launcher,
    "hang launcher": hang_launcher,
    "SIGTERM": ask_to_stop,
    "SIGINT": ask_to_stop,
}
