"""Does a run that lost its power go on by --resume alone, and end as if nothing had happened?

A run trains on a disk that is an image file. At seeded random moments the image is cloned while the
run goes on: what the file system has not written by then is not in the clone, as after a power cut.
Each clone is mounted, which replays its journal, and its run resumed; it must end with the record
and the weights of the run that was left alone, bit for bit. While it is resumed it is cut again.
Nonzero exit if any deviates. Linux, as root, with mkfs.xfs.

    python experiments/power_cuts/run.py --cuts 200 --seed 0 [--command train] [--no-sync]
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from scalejax.api import train
from scalejax.config.run import RunConfig, load_config, resolve
from scalejax.core.errors import Damaged, ScalejaxError
from scalejax.core.serialization import save_toml
from scalejax.sweep.folder import SweepFolder
from scalejax.training.evaluation import trained_weights
from scalejax.training.record import (
    Measurement,
    RunFolder,
    RunRecord,
    StatusChange,
    figures,
)
from scalejax.training.reporter import Silent

HERE = Path(__file__).parent
IMAGE_BYTES = 320 * 2**20  # mkfs.xfs makes none below 300 MiB
OUTER_BYTES = 12 * 2**30  # sparse
CUTS_OF_A_RUN = 4
MOST_DEPTH = 3
SECONDS_AFTER_THE_END = 2.0


@dataclass(slots=True, kw_only=True)
class Cut:
    """One power cut, and what came of it."""

    filesystem: str
    """Of the disk."""
    kind: str
    """"steady" (checkpoints are being saved one after the other) or "any" moment."""
    depth: int
    """Power cuts that the run had had before."""
    step: int
    """Updates made when the image was cloned; the last one if the run had ended."""
    after_seconds: float
    """Since the line of that update."""
    resumed_at: int | None = None
    """Step of the checkpoint that it went on from, 0 if from none."""
    notes: list[str] = field(default_factory=list)
    """What was said of checkpoints that were passed over."""
    deviation: str | None = None
    """How the run ended otherwise; None if bit for bit."""


class Disk:
    """A file system in an image file, mounted at `place`."""

    def __init__(self, image: Path, place: Path, filesystem: str) -> None:
        place.mkdir(exist_ok=True)
        options = "loop,nouuid" if filesystem == "xfs" else "loop"
        _call("mount", "-t", filesystem, "-o", options, image, place)
        self.image, self.place, self.filesystem = image, place, filesystem

    def clone(self, to: Path) -> None:
        """The image at this moment: a reflink is one moment, where a copy would tear."""
        _call("cp", "--reflink=always", self.image, to)

    def close(self) -> None:
        """Unmount it."""
        _call("umount", self.place)


class Watcher(Silent):
    """Knows how far a run is, and clones its disk at the wanted moments beside it."""

    def __init__(self, moments: list[tuple[str, int, float]], clone: "Callable") -> None:
        """Watch a run.

        Args:
            moments: kind, step and seconds after its line of each cut.
            clone: makes the clone of a cut, of its kind, step and seconds.
        """
        self._moments = sorted(moments, key=lambda each: each[1])
        self._clone = clone
        self._threads: list[threading.Thread] = []
        self.said: list[str] = []
        self.begun_at: int | None = None

    def say(self, text: str) -> None:
        """Keep what is said of checkpoints."""
        if "passed over" in text:
            self.said.append(text.removeprefix("Note: "))

    def begin(self, step: int, total_steps: int) -> None:
        """Keep the step that the run goes on from; moments before it are of now."""
        self.begun_at = step

    def measured(self, measurement: Measurement) -> None:
        """Cut at the moments of this step, and of those before it."""
        is_change = isinstance(measurement, StatusChange)
        self.reached(measurement.step, is_end=is_change and measurement.status == "completed")

    def reached(self, step: int, *, is_end: bool) -> None:
        """Cut at the moments of this step, and of those before it; all that are left at the end."""
        while self._moments and (is_end or self._moments[0][1] <= step):
            kind, _, seconds = self._moments.pop(0)
            if is_end:
                seconds *= SECONDS_AFTER_THE_END / 0.1
            arguments = (kind, step, seconds)
            thread = threading.Thread(target=self._cut, args=arguments)
            thread.start()
            self._threads.append(thread)

    def _cut(self, kind: str, step: int, seconds: float) -> None:
        time.sleep(seconds)
        self._clone(kind, step, seconds)

    def join(self) -> None:
        """Wait until all are cloned."""
        for thread in self._threads:
            thread.join()


class Campaign:
    """The runs and their disks, in a folder of their own that is gone at the end."""

    def __init__(self, config: RunConfig, seed: int, place: Path, command: str) -> None:
        self._config, self._seed, self._place = config, seed, place
        self._command = command
        self._outer = place / "outer"
        image = place / "outer.img"
        with image.open("wb") as file:
            file.truncate(OUTER_BYTES)
        _call("mkfs.xfs", "-q", "-m", "reflink=1", image)
        self._outer_disk = Disk(image, self._outer, "xfs")
        self._count = 0
        self.total_steps = resolve(config, 1).total_steps
        self._undisturbed = self._trained(place / "undisturbed", Watcher([], print))

    def chain(self, number: int, filesystem: str, most: int, told: Callable[[Cut], None]) -> None:
        """One run that is cut several times, and each of its clones again, up to `most` times."""
        rng = random.Random(f"{self._seed}/{number}")
        image = self._outer / "disk.img"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        _call(f"mkfs.{filesystem}", "-q", image)
        every = self._config.train.checkpoint_every_steps or 1
        last = self.total_steps
        wanted = [("steady", rng.randrange(3 * every, last)) for _ in range(CUTS_OF_A_RUN // 2)]
        wanted += [("any", rng.randrange(1, last * 5 // 4)) for _ in range(CUTS_OF_A_RUN // 2)]
        waiting: list[tuple[Path, Cut]] = []
        self._session(image, filesystem, 0, _with_delays(wanted, rng), waiting)
        image.unlink()
        while waiting and most > 0:
            clone, cut = waiting.pop(0)
            most -= 1
            again = []
            if cut.depth + 1 < MOST_DEPTH and cut.step < last and rng.random() < 0.5:
                is_steady = rng.random() < 0.75
                end = last if is_steady else last * 5 // 4
                again = [("steady" if is_steady else "any", rng.randrange(cut.step, end))]
            moments = _with_delays(again, rng)
            self._resumed(clone, cut, moments, waiting)
            clone.unlink()
            told(cut)

    def _session(
        self,
        image: Path,
        filesystem: str,
        depth: int,
        moments: list[tuple[str, int, float]],
        waiting: list[tuple[Path, Cut]],
        *,
        resume: bool = False,
    ) -> tuple[Any, Watcher]:
        """Train on the disk of an image, which is cloned meanwhile; the outcome."""
        self._count += 1
        disk = Disk(image, self._place / f"disk-{self._count}", filesystem)
        lock = threading.Lock()

        def clone(kind: str, step: int, seconds: float) -> None:
            with lock:
                to = self._outer / f"cut-{self._count}-{len(waiting)}.img"
                disk.clone(to)
                cut = Cut(
                    filesystem=filesystem,
                    kind=kind,
                    depth=depth,
                    step=step,
                    after_seconds=round(seconds, 4),
                )
                waiting.append((to, cut))

        watcher = Watcher(moments, clone)
        try:
            found = self._trained(disk.place / "runs" / "run", watcher, resume=resume)
        finally:
            watcher.join()
            disk.close()
            disk.place.rmdir()
        return found, watcher

    def _resumed(
        self,
        clone: Path,
        cut: Cut,
        moments: list[tuple[str, int, float]],
        waiting: list[tuple[Path, Cut]],
    ) -> None:
        """Resume the run of a clone, and judge it."""
        try:
            found, watcher = self._session(
                clone, cut.filesystem, cut.depth + 1, moments, waiting, resume=True
            )
        except (ScalejaxError, subprocess.CalledProcessError) as error:
            cut.deviation = f"{type(error).__name__}: {error}"
            return
        cut.resumed_at, cut.notes = watcher.begun_at, watcher.said
        if found != self._undisturbed:
            names = ("record", "weights")
            pairs = zip(names, found, self._undisturbed, strict=True)
            cut.deviation = f"other {' and '.join(name for name, a, b in pairs if a != b)}"

    def _trained(self, folder: Path, watcher: Watcher, *, resume: bool = False) -> tuple[Any, ...]:
        """Train, as `scalejax train` does, which would also predict, or by another command; record
        and weights."""
        if self._command == "train":
            config = load_config(RunFolder(path=folder).config) if resume else self._config
            train(config, folder, device_count=1, resume=resume, reporter=watcher, predicts=False)
            runs = [folder]
        else:
            runs = [folder]
            if self._command == "sweep":
                runs = [SweepFolder(path=folder).run(index).path for index in (0, 1)]
            self._commanded(folder, runs[0], watcher, resume=resume)
        records = [RunRecord.load(run) for run in runs]
        if statuses := [record.status for record in records if record.status != "completed"]:
            raise Damaged(f"a run ended as {statuses[0]}")
        trees = [trained_weights(resolve(self._config, 1), run) for run in runs]
        weights = [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)] for tree in trees]
        return [figures(run) for run in runs], weights

    def _commanded(self, folder: Path, run: Path, watcher: Watcher, *, resume: bool) -> None:
        """Train by `scalejax launch` or `sweep`; a record is watched from outside."""
        run_file = self._place / "run.toml"
        save_toml(self._config, run_file)
        command = [sys.executable, "-m", "scalejax", self._command, str(run_file)]
        command += ["--np=-2"] if self._command == "launch" else ["-V", "seed=[0,1]"]
        command += ["--folder", str(folder), *(["--resume"] if resume else [])]
        path = RunFolder(path=run).measurements
        lines = path.read_text().count("\n") if path.exists() else 0
        seen = path.stat().st_ino if path.exists() else None
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            said: list[str] = []
            listener = threading.Thread(target=lambda: said.extend(process.stderr or ()))
            listener.start()
            while process.poll() is None or listener.is_alive():
                time.sleep(0.005)
                if not path.exists():
                    continue
                if path.stat().st_ino != seen:  # cut back to the checkpoint, as a new file
                    lines, seen = 0, path.stat().st_ino
                whole = path.read_text().splitlines(keepends=True)
                for line in whole[lines:]:
                    if line.endswith("\n"):
                        lines += 1
                        value = json.loads(line)
                        watcher.reached(value["step"], is_end=value.get("status") == "completed")
        words = " ".join("".join(said).split())
        for found in re.findall(r"checkpoint [0-9]+ is passed over: [^.]*\.", words):
            watcher.say(found)
        changes = RunRecord.load(run).statuses if path.exists() else ()
        begun = [change.step for change in changes if change.status in ("started", "resumed")]
        watcher.begin(begun[-1] if begun else 0, self.total_steps)
        if process.returncode:
            raise Damaged(f"exit code {process.returncode}: {words[-600:]}")

    def close(self) -> None:
        """Leave no mount."""
        self._outer_disk.close()


def _with_delays(wanted: list[tuple[str, int]], rng: random.Random) -> list[tuple[str, int, float]]:
    """Each with seconds after the line of its step: a checkpoint takes about a tenth."""
    return [(kind, step, rng.random() * 0.1) for kind, step in wanted]


def _call(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


def _summary(cuts: list[Cut]) -> str:
    lines = ["| file system | moment | cuts | of these of a run cut before | deviate |"]
    lines.append("|---|---|---|---|---|")
    for filesystem in sorted({cut.filesystem for cut in cuts}):
        for kind in ("steady", "any"):
            some = [cut for cut in cuts if (cut.filesystem, cut.kind) == (filesystem, kind)]
            again = sum(cut.depth > 0 for cut in some)
            bad = sum(cut.deviation is not None for cut in some)
            lines.append(f"| {filesystem} | {kind} | {len(some)} | {again} | {bad} |")
    return "\n".join(lines)


def main() -> int:
    """Cut, resume, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=200, help="as many as there are to be in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--filesystems", nargs="+", default=["ext4", "xfs"])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no other run after them")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--command", choices=("train", "launch", "sweep"), default="train")
    parser.add_argument("--no-sync", action="store_true", help="how it is without os.fsync")
    flags = parser.parse_args()
    if flags.no_sync:
        os.fsync = lambda descriptor: None
    console = Console()
    kept = json.loads(flags.results.read_text()) if flags.results.exists() else {}
    cuts = [Cut(**each) for each in kept.get("cuts", [])]
    number, begin = kept.get("runs", 0), time.monotonic()
    config = load_config(HERE / "run.toml", {"train.epochs": flags.epochs})
    memory = Path("/dev/shm")  # a disk that syncs at once: more cuts in the same time
    place = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    campaign = Campaign(config, flags.seed, place, flags.command)
    try:
        while len(cuts) < flags.cuts and time.monotonic() < begin + flags.seconds:
            filesystem = flags.filesystems[number % len(flags.filesystems)]

            def told(cut: Cut) -> None:
                cuts.append(cut)
                said = cut.deviation or "bit for bit"
                console.print(
                    f"{len(cuts)}: {cut.filesystem}, {cut.kind}, at step {cut.step}, "
                    f"resumed at {cut.resumed_at}: {said}",
                    markup=False,
                )

            campaign.chain(number, filesystem, flags.cuts - len(cuts), told)
            number += 1
            versions = {name: version(name) for name in ("scalejax", "jax", "orbax-checkpoint")}
            about = {"seed": flags.seed, "runs": number, **versions, "kernel": os.uname().release}
            rows = ",\n".join(f"  {json.dumps(asdict(cut))}" for cut in cuts)
            text = json.dumps({**about, "cuts": []}, indent=1)
            flags.results.write_text(text.replace("[]", f"[\n{rows}\n ]") + "\n")
    finally:
        campaign.close()
        shutil.rmtree(place)
    print(_summary(cuts))
    print(Counter("deviates" if cut.deviation else "bit for bit" for cut in cuts))
    return int(any(cut.deviation for cut in cuts))


if __name__ == "__main__":
    sys.exit(main())
