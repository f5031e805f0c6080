"""Is a run that hangs noticed in the stated time, and restarted to the same end, by any launcher?

Runs of two processes under `scalejax launch`, srun and mpirun are hit by seeded random hangs: a
process is stopped whole, or only the thread that trains, or what reads its data. Whoever started
them starts them again; each run must end with the record and the weights of the run that was left
alone, bit for bit, and leave no process. Nonzero exit if anything deviates.

    python experiments/faults/hangs.py --hangs 30 --seed 0      # as root, on Linux

Finished hangs are in hangs.json, and a part that is begun again goes on behind them.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

import jax
from campaign import RUN_FILE, SECONDS_TO_VANISH, difference, outcome
from launched import MARK, environment_of, marked

from scalejax.core.errors import ExitCode
from scalejax.core.heartbeat import Beat, read_beat

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LAUNCHERS = ("launch", "srun", "mpirun")
KINDS = ("process", "training thread", "input")
"""What is frozen: all of a process; the thread that trains, while those that exchange heartbeats go
on; the worker that reads its data, for which it then waits."""
PHASES = ("training", "evaluating", "saving")
STUCK_SECONDS = 8
MARGIN_SECONDS = 10.0
"""Time after the limit within which a hang is noticed, as `scalejax launch --help` says."""
EPOCHS = 40
_RANKS = ("SCALEJAX_PROCESS", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_CODE = "import sys; from scalejax.cli.main import main; sys.exit(main())"
_PATIENCE_SECONDS = 300.0
_SEIZE, _INTERRUPT = 0x4206, 0x4207  # <sys/ptrace.h>
_WALL = 0x40000000  # <bits/waitflags.h>


@dataclass(slots=True, kw_only=True)
class Hang:
    """One hang, and what came of it."""

    index: int
    launcher: str
    kind: str
    victim: int
    phase: str
    limit_seconds: float = 0.0
    """Limit of the phase that the process was in."""
    seconds: float | None = None
    """Until the line that names the process."""
    gone_seconds: float | None = None
    """Until every process of the run had ended."""
    said: str = ""
    deviations: list[str] = field(default_factory=list)


def draw(index: int, seed: int) -> Hang:
    """The hang of that number: launchers and kinds in turn, the rest at random."""
    rng = random.Random(f"{seed}/{index}")
    launcher = LAUNCHERS[index % len(LAUNCHERS)]
    kind = KINDS[index // len(LAUNCHERS) % len(KINDS)]
    phases = ("training",) if kind == "input" else PHASES
    return Hang(
        index=index,
        launcher=launcher,
        kind=kind,
        victim=rng.randrange(2),
        phase=rng.choice(phases),
    )


class Started:
    """A run under way: the command of a launcher, and its two processes."""

    def __init__(self, launcher: str, folder: Path, place: Path, slurm: str | None) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[tuple[float, str]] = []
        self._launcher = launcher
        self._folder = folder
        self._beats = folder / "processes" if launcher == "launch" else place / "beats"
        if launcher != "launch":
            self._beats.mkdir(exist_ok=True)
        for path in self._beats.glob("heartbeat-*"):
            path.unlink()
        environment = os.environ | {
            MARK: self.mark,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(place / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": str(ROOT),
        }
        if slurm is not None:
            environment["SLURM_CONF"] = slurm
        self.process = subprocess.Popen(
            self._command(launcher, folder),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _command(self, launcher: str, folder: Path) -> list[str]:
        words = [str(RUN_FILE), "--folder", str(folder), "--stuck-seconds", str(STUCK_SECONDS)]
        words += [f"--train.epochs={EPOCHS}", "--input.workers=1"]
        if (folder / "run.toml").exists():
            words.append("--resume")
        python = [sys.executable, "-c", _CODE]
        if launcher == "launch":
            return [*python, "launch", "--np=-2", *words, "--max-restarts", "1000", "--all-logs"]
        rank = "$OMPI_COMM_WORLD_RANK" if launcher == "mpirun" else "$SLURM_PROCID"
        beats = f'SCALEJAX_HEARTBEAT="{self._beats}/heartbeat-{rank}" exec "$0" "$@"'
        run = {
            "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
            "srun": ["srun", "--ntasks=2", "--quiet"],
        }[launcher]
        return [*run, "sh", "-c", beats, *python, "train", *words]

    def _listen(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.lines.append((time.monotonic(), line.rstrip()))

    @property
    def said(self) -> str:
        """All that it said."""
        return "\n".join(line for _, line in self.lines)

    def beat(self, rank: int) -> Beat | None:
        """The last heartbeat of a process."""
        return read_beat(self._beats / f"heartbeat-{rank}")

    def ranks(self) -> dict[int, int]:
        """Ids of the processes that train, by rank."""
        found = {}
        for process in marked(self.mark):
            words = _read(f"/proc/{process}/cmdline").split("\0")
            variables = environment_of(process)
            rank = next((variables[name] for name in _RANKS if name in variables), None)
            if rank is not None and "train" in words and "python" in Path(words[0]).name:
                found[int(rank)] = process
        return found

    def input_workers(self, process: int) -> list[int]:
        """Ids of the processes that read data for `process`."""
        return [int(each) for each in _read(f"/proc/{process}/task/{process}/children").split()]

    def said_since(self, pattern: str, since: float) -> tuple[float, str] | None:
        """Moment and text of the first line that matches, said after `since`."""
        for moment, line in list(self.lines):
            if moment >= since and re.search(pattern, line):
                return moment, line
        return None

    def close(self) -> None:
        """End it, and all it started."""
        if self.process.poll() is None:
            self.process.kill()
        for process in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        self._listener.join(5)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def freeze(kind: str, process: int, started: Started) -> list[int]:
    """Freeze a process, its main thread, or its input workers; the ids of what was frozen."""
    if kind == "training thread":
        libc = ctypes.CDLL(None, use_errno=True)
        for request in (_SEIZE, _INTERRUPT):
            if libc.ptrace(request, process, None, None):
                raise OSError(ctypes.get_errno(), "ptrace")
        return [process]
    frozen = started.input_workers(process) if kind == "input" else [process]
    if not frozen:
        raise OSError(f"process {process} has no input worker")
    for each in frozen:
        os.kill(each, signal.SIGSTOP)
    return frozen


def reap(process: int) -> bool:
    """Whether a traced thread that was killed is collected: its parent hears of it only then."""
    try:
        found, status = os.waitpid(process, os.WNOHANG | _WALL)
    except ChildProcessError:  # none is traced
        return True
    return found != 0 and not os.WIFSTOPPED(status)


def wait_for_phase(hang: Hang, started: Started, rng: random.Random) -> bool:
    """Return when the victim is in the phase, some updates later; whether the run goes on."""
    begun, target = time.monotonic(), None
    wanted = ("training", "waiting for input") if hang.phase == "training" else (hang.phase,)
    while started.process.poll() is None and time.monotonic() < begun + _PATIENCE_SECONDS:
        beats = [started.beat(rank) for rank in range(2)]
        beat = beats[hang.victim]
        if beat is not None and all(beats):
            if target is None and beat.phase in ("training", "waiting for input"):
                target = beat.step + rng.randrange(30, 60)  # each phase but one was there twice
            # A limit of its own only once the phase has ended twice.
            if target is not None and beat.step >= target and beat.phase in wanted:
                return True
        time.sleep(0.002)
    return False


def hit(hang: Hang, started: Started, rng: random.Random) -> bool:
    """Bring about one hang, and wait until it is noticed and all have gone; whether it was hit."""
    if not wait_for_phase(hang, started, rng):
        return False
    ranks = started.ranks()
    if len(ranks) != 2:
        return False
    try:
        frozen = freeze(hang.kind, ranks[hang.victim], started)
    except OSError:  # it has just ended
        return False
    since = time.monotonic()
    # `launch` itself sees after 15 s that a process is stopped, if its limit is later.
    pattern = (
        r"error: process (\d) (and all others )?ha(s|ve) |process \d has been stopped for 15 s"
    )
    while started.said_since(pattern, since) is None and time.monotonic() < since + 300:
        time.sleep(0.05)
    found = started.said_since(pattern, since)
    is_traced = hang.kind == "training thread"
    while time.monotonic() < since + 400:
        is_traced = is_traced and not reap(frozen[0])
        if not is_traced and not any(is_there(each) for each in ranks.values()):
            break
        time.sleep(0.05)
    hang.gone_seconds = time.monotonic() - since
    judge(hang, found, since, started)
    end = time.monotonic() + SECONDS_TO_VANISH
    while any(map(is_there, frozen)) and time.monotonic() < end:
        time.sleep(0.05)
    if left := [each for each in frozen if is_there(each)]:
        hang.deviations.append(f"left behind: {left}")
    return True


def is_there(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    about = _read(f"/proc/{process}/stat")
    return bool(about) and about.rpartition(")")[2].split()[0] not in "ZX"


def judge(hang: Hang, found: tuple[float, str] | None, since: float, started: Started) -> None:
    """Note what was said, and whether that is what the command promises."""
    if found is None:
        hang.deviations.append(f"not noticed: {started.said[-1500:]}")
        return
    moment, line = found
    hang.seconds = moment - since
    hang.said = re.sub(r".*error: ", "", line)[:200]
    phase = (re.search(r"\(([\w ]+)\)", hang.said) or ["", ""])[1]
    is_silent = "silent" in line or "not answered" in line
    hang.limit_seconds = STUCK_SECONDS * (5 if phase == "saving" and not is_silent else 1)
    if hang.seconds > hang.limit_seconds + MARGIN_SECONDS:
        hang.deviations.append(f"noticed after {hang.seconds:.1f} s")
    if f"process {hang.victim} " not in hang.said and "all others" not in hang.said:
        hang.deviations.append(f"another was named: {hang.said}")
    if "stacks of all threads of process" not in started.said:
        hang.deviations.append("no stacks")


class Campaign:
    """The runs, one for each launcher, in a folder of their own."""

    def __init__(self, place: Path, seed: int) -> None:
        self._place = place
        self._seed = seed
        self._undisturbed = outcome(self._completed("launch", place / "undisturbed"))

    def _completed(self, launcher: str, folder: Path) -> Path:
        started = Started(launcher, folder, self._place, None)
        try:
            if started.process.wait(_PATIENCE_SECONDS):
                raise SystemExit(f"the undisturbed run failed: {started.said[-2000:]}")
        finally:
            started.close()
        return folder

    def run(self, launcher: str, hangs: list[Hang], slurm: str | None) -> Iterator[list[Hang]]:
        """The hangs of a launcher, in one run or more; those of each run that has ended."""
        waiting = list(hangs)
        while waiting:
            folder = self._place / f"{launcher}-{waiting[0].index}"
            yield self._run(launcher, folder, waiting, slurm)

    def _run(
        self, launcher: str, folder: Path, waiting: list[Hang], slurm: str | None
    ) -> list[Hang]:
        done: list[Hang] = []
        started = Started(launcher, folder, self._place, slurm)
        try:
            while waiting:
                hang = waiting[0]
                rng = random.Random(f"{self._seed}/{hang.index}/moment")
                if not hit(hang, started, rng):
                    break
                done.append(waiting.pop(0))
                started = self._again(launcher, folder, started, hang, slurm)
                print(in_words(hang), flush=True)
            code = started.process.wait(_PATIENCE_SECONDS)
            if not done:
                raise SystemExit(f"the run was not hit ({code}): {started.said[-2000:]}")
            if code:
                done[-1].deviations.append(f"exit code {code}: {started.said[-1500:]}")
            elif (differs := difference(outcome(folder), self._undisturbed)) is not None:
                done[-1].deviations.append(f"the run ended otherwise: {differs}")
        finally:
            started.close()
        return done

    def _again(
        self, launcher: str, folder: Path, started: Started, hang: Hang, slurm: str | None
    ) -> Started:
        """The run as it goes on: `launch` starts it again itself."""
        if launcher == "launch":
            return started
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.process.wait(60)
        code = started.process.poll()
        # srun gives the highest code: 137 of the task that was killed.
        if code not in (ExitCode.LOST, 128 + signal.SIGKILL if launcher == "srun" else None):
            hang.deviations.append(f"exit code {code}: {started.said[-1500:]}")
        started.close()
        return Started(launcher, folder, self._place, slurm)


def in_words(hang: Hang) -> str:
    """One line."""
    seconds = "n/a" if hang.seconds is None else f"{hang.seconds:.1f} s"
    bad = "".join(f"\n  DEVIATES: {each}" for each in hang.deviations)
    what = f"{hang.kind} of {hang.victim} at {hang.phase} under {hang.launcher}"
    return f"{hang.index}: {what}: {seconds}, all gone {hang.gone_seconds:.1f} s: {hang.said}{bad}"


@contextlib.contextmanager
def slurm_here() -> Iterator[str | None]:
    """A SLURM of one node: the path of its slurm.conf; None where there is none."""
    if os.geteuid() or not all(map(shutil.which, ("srun", "slurmctld", "munged"))):
        yield None
        return
    folder = Path("/tmp") / f"scalejax-slurm-{os.getpid()}"  # munge's user must reach it
    script = [str(ROOT / "tests" / "support" / "slurm.sh")]
    ports = [str(16000 + os.getpid() % 8000), str(24000 + os.getpid() % 8000)]
    up = subprocess.run([*script, "up", str(folder), *ports], text=True, stdout=subprocess.PIPE)
    try:
        yield None if up.returncode else up.stdout.strip()
    finally:
        subprocess.run([*script, "down", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def table(hangs: list[Hang]) -> list[str]:
    """A line for each launcher and kind."""
    lines = [
        "| launcher | frozen | hangs | noticed after, median s | most | beyond the least limit "
        "| all gone after, most s | named alone | deviate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for launcher in LAUNCHERS:
        for kind in KINDS:
            own = [each for each in hangs if (each.launcher, each.kind) == (launcher, kind)]
            seconds = [each.seconds for each in own if each.seconds is not None]
            if not seconds:
                continue
            beyond = max((each.seconds or 0) - each.limit_seconds for each in own)
            alone = sum("all others" not in each.said for each in own)
            gone = max(each.gone_seconds or 0 for each in own)
            bad = sum(bool(each.deviations) for each in own)
            lines.append(
                f"| {launcher} | {kind} | {len(own)} | {median(seconds):.1f} | {max(seconds):.1f} "
                f"| {beyond:.1f} | {gone:.1f} | {alone} | {bad} |"
            )
    return lines


def make(wanted: list[Hang], done: dict[int, Hang], seed: int, results: Path) -> None:
    """Make these hangs, and write all that are done after each run."""
    with tempfile.TemporaryDirectory(prefix="scalejax-hangs-") as name, slurm_here() as slurm:
        campaign = Campaign(Path(name), seed)
        for launcher in LAUNCHERS:
            left = [each for each in wanted if each.launcher == launcher]
            is_here = {"srun": slurm, "mpirun": shutil.which("mpirun")}.get(launcher, "here")
            if is_here is None:
                print(f"{launcher} is not here")
                continue
            for part in campaign.run(launcher, left, slurm):
                done |= {each.index: each for each in part}
                result = {
                    "seed": seed,
                    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                    "versions": {each: version(each) for each in ("jax", "orbax-checkpoint")},
                    "hangs": [asdict(done[index]) for index in sorted(done)],
                }
                text = json.dumps(result).replace("}, {", "},\n{")
                results.write_text(text + "\n")


def main() -> int:
    """Run it, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hangs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--results", type=Path, default=HERE / "hangs.json")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(number, signal.default_int_handler)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    hangs = [draw(index, arguments.seed) for index in range(arguments.hangs)]
    kept = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    rows = kept.get("hangs", []) if kept.get("seed") == arguments.seed else []
    done = {row["index"]: Hang(**row) for row in rows}
    wanted = [each for each in hangs if each.index not in done]
    wanted = [each for each in wanted if each.launcher in arguments.launchers]
    if wanted:
        make(wanted, done, arguments.seed, arguments.results)
    every = [done[index] for index in sorted(done)]
    print("\n".join(table(every)))
    deviating = sum(bool(each.deviations) for each in every)
    print(f"{len(every)} hangs, {deviating} deviate")
    return 1 if deviating or len(every) < len(hangs) else 0


if __name__ == "__main__":
    sys.exit(main())
