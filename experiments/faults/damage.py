"""Does a run whose record or checkpoints are damaged end as if nothing had happened, or say so?

Runs that were cut short, or are completed, are damaged at seeded random places, once or twice, and
resumed. Each must end with the record and the weights of the run that was left alone, bit for bit,
or be refused with a message that names its folder or a file in it; one that is refused as damaged
must then start over, bit for bit. Nonzero exit if any does otherwise.

    python experiments/faults/damage.py --damages 100 --seed 0
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scalejax.api import train
from scalejax.config.run import RunConfig, load_config, resolve
from scalejax.core.errors import Damaged, ScalejaxError
from scalejax.training.evaluation import trained_weights
from scalejax.training.record import (
    Measurement,
    RunFolder,
    figures,
)
from scalejax.training.reporter import Silent

HERE = Path(__file__).parent
FIELDS = {
    "train.epochs": 5,
    "train.evaluate_every_epochs": 1,
    "train.keep_checkpoints": 3,
    "schedule.base_learning_rate": 0.01,
}
KINDS = {
    "alone": {},
    "early stopping": {
        "data.validation_fraction": 0.1,
        "train.early_stopping": {"patience": 50},
    },
}


@dataclass(slots=True, kw_only=True)
class Found:
    """One damage, and what came of it."""

    base: str
    """The run that was damaged."""
    damages: list[str]
    """What was done to it."""
    outcome: str = ""
    """"bit for bit", "refused" with its exit code, or how it deviates."""
    notes: list[str] = field(default_factory=list)
    """What was said of checkpoints that were passed over, and the refusal."""
    deviates: bool = False
    """Whether it ended otherwise."""


_NAMED = re.compile(r"^[a-z_.]+(=\S+)? is (missing|refused|unknown|not a field)", re.MULTILINE)
"""A refusal of a field of run.toml, which is the file that was given."""


class CutShort(Exception):
    """Ends a run as a crash does."""


class Listener(Silent):
    """Keeps what is said of checkpoints, and ends the run at a step."""

    def __init__(self, last_step: int | None = None) -> None:
        self.said: list[str] = []
        self._last_step = last_step

    def say(self, text: str) -> None:
        """Keep it."""
        if "passed over" in text or "starts over" in text:
            self.said.append(text.removeprefix("Note: "))

    def measured(self, measurement: Measurement) -> None:
        """End the run."""
        if measurement.step == self._last_step:
            raise CutShort


# Damages: each changes the folder of a run, and says what it did.

Damage = Callable[[Path, random.Random], str]


def _record(folder: Path) -> Path:
    return folder / "measurements.jsonl"


def _checkpoints(folder: Path) -> list[Path]:
    paths = [path for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()]
    return sorted(paths, key=lambda path: int(path.name))


def _file_of_checkpoint(folder: Path, rng: random.Random) -> Path | None:
    paths = _checkpoints(folder)
    files = (
        sorted(
            path
            for path in rng.choice(paths[-2:]).rglob("*")
            if path.is_file() and path.stat().st_size
        )
        if paths
        else []
    )
    return rng.choice(files) if files else None


def _cut(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(1, len(content)))])
    return "cut"


def _empty(path: Path, rng: random.Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def _delete(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "deleted"


def _zeros(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    begin = rng.randrange(len(content))
    content[begin : begin + 512] = bytes(len(content[begin : begin + 512]))
    path.write_bytes(content)
    return "zeroed in a part"


def _bits(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 41)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return "with bits turned"


def _lines(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    begin = rng.randrange(len(lines))
    del lines[begin : begin + rng.randrange(1, 20)]
    path.write_bytes(b"".join(lines))
    return "without some lines"


def _exchanged(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    first, second = rng.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]
    path.write_bytes(b"".join(lines))
    return "with two lines exchanged"


def _digit(path: Path, rng: random.Random) -> str:
    text = path.read_text()
    places = [found.start() for found in re.finditer(r"[0-9]", text)]
    place = rng.choice(places)
    digit = rng.choice([each for each in "0123456789" if each != text[place]])
    path.write_text(f"{text[:place]}{digit}{text[place + 1 :]}")
    return "with another digit"


def _of(change: Callable[[Path, random.Random], str], name: str) -> Damage:
    """The damage of a file of the run, by its name; "checkpoint" is any file of a newer one."""

    def damage(folder: Path, rng: random.Random) -> str:
        path = _file_of_checkpoint(folder, rng) if name == "checkpoint" else folder / name
        if path is None or not path.exists() or not path.stat().st_size:
            return f"{name} was gone or empty"
        return f"{path.relative_to(folder)} {change(path, rng)}"

    return damage


def _renamed(folder: Path, rng: random.Random) -> str:
    paths = _checkpoints(folder)
    if not paths:
        return "no checkpoint to rename"
    path = rng.choice(paths)
    to = path.with_name(str(int(path.name) + rng.choice((-3, 7, 40))))
    if to.exists():
        return "not renamed"
    path.rename(to)
    return f"checkpoint {path.name} renamed to {to.name}"


def _swapped(folder: Path, rng: random.Random) -> str:
    paths = _checkpoints(folder)
    if len(paths) < 2:
        return "no two checkpoints to swap"
    first, second = rng.sample(paths, 2)
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"checkpoints {first.name} and {second.name} swapped"


def _gone(folder: Path, rng: random.Random) -> str:
    paths = _checkpoints(folder)
    some = rng.sample(paths, rng.randrange(1, len(paths) + 1)) if paths else []
    for path in some:
        shutil.rmtree(path)
    return f"checkpoints {', '.join(path.name for path in some)} deleted"


def _stripped(folder: Path, rng: random.Random) -> str:
    """No checksum is left where they are: with bits turned, nothing else sees them."""
    path = rng.choice(_checkpoints(folder)[-2:])
    names = rng.sample(["manifest.json", "_CHECKPOINT_METADATA"], rng.randrange(1, 3))
    for name in names:
        each = path / name
        how = rng.choice(("emptied", "deleted", "stripped"))
        if how == "deleted":
            each.unlink()
        elif how == "emptied":
            each.write_text("")
        else:
            each.write_text(
                re.sub(r'("(?:arrays|files|checksums)": )\{[^}]*\}+', r"\1{}", each.read_text())
            )
    numbers = max(
        (each for each in path.rglob("*") if "/d/" in str(each)),
        key=lambda each: each.stat().st_size,
    )
    _bits(numbers, rng)
    return f"{' and '.join(names)} of {path.name} stripped, emptied or deleted, and bits turned"


def _older(folder: Path, rng: random.Random) -> str:
    """The newest checkpoint has what another one holds, with its manifest."""
    paths = _checkpoints(folder)
    if len(paths) < 2:
        return "no two checkpoints"
    shutil.rmtree(paths[-1])
    shutil.copytree(paths[0], paths[-1])
    return f"checkpoint {paths[0].name} copied over {paths[-1].name}"


DAMAGES: list[Damage] = [
    *(
        _of(change, "measurements.jsonl")
        for change in (_cut, _empty, _delete, _zeros, _bits, _lines, _exchanged, _digit)
    ),
    *(_of(change, "checkpoint") for change in (_cut, _empty, _delete, _zeros, _bits)),
    *(
        _of(change, name)
        for change in (_cut, _empty, _delete, _digit)
        for name in ("checkpoints.json", "run.toml")
    ),
    *(_of(change, "facts.json") for change in (_empty, _delete, _digit)),
    *(_of(change, "time.jsonl") for change in (_cut, _delete, _zeros)),
    *(_renamed, _swapped, _gone, _stripped, _older) * 2,
]


class Campaign:
    """Runs to be damaged, and how they are when nothing happens to them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.configs = {
            name: load_config(HERE / "run.toml", {**FIELDS, **fields})
            for name, fields in KINDS.items()
        }
        self._undisturbed: dict[str, tuple[Any, ...]] = {}
        self.bases: dict[str, tuple[str, Path]] = {}
        for name, config in self.configs.items():
            whole = place / f"{name}, completed"
            self._undisturbed[name] = self._trained(config, whole, Listener())
            self.bases[whole.name] = (name, whole)
            cut = place / f"{name}, cut short"
            try:
                self._trained(config, cut, Listener(last_step=103))
            except CutShort:
                self.bases[cut.name] = (name, cut)

    def damage(self, index: int, seed: int) -> Found:
        """Damage a run, resume it, and judge it."""
        rng = random.Random(f"{seed}/{index}")
        base = rng.choice(sorted(self.bases))
        name, original = self.bases[base]
        folder = self._place / f"damaged-{index}"
        shutil.copytree(original, folder)
        damages = [DAMAGES[index % len(DAMAGES)]]
        damages += [rng.choice(DAMAGES)] if rng.random() < 0.25 else []
        done = []
        for each in damages:
            try:
                done.append(each(folder, rng))
            except (OSError, IndexError, ValueError, UnicodeDecodeError) as error:  # by the first
                done.append(f"nothing ({type(error).__name__})")
        found = Found(base=base, damages=done)
        self._judge(found, name, folder)
        shutil.rmtree(folder)
        return found

    def _judge(self, found: Found, name: str, folder: Path) -> None:
        """Resume; where it is refused as damaged, begin anew too. Every refusal must name a file of
        the run, or a field of its run.toml."""
        outcomes, outcome = [], None
        for starts_over in (False, True):
            listener = Listener()
            try:
                # As the command that the folder's README names: by its own run.toml.
                config = load_config(RunFolder(path=folder).config)
                outcome = self._trained(
                    config, folder, listener, resume=True, start_over=starts_over
                )
                outcomes.append("begun anew" if starts_over else "bit for bit")
            except ScalejaxError as error:
                found.notes.append(f"{type(error).__name__}: {error}")
                outcomes.append(f"refused ({int(error.exit_code)})")
                if str(folder) not in str(error) and _NAMED.search(str(error)) is None:
                    outcomes.append("without a name")
                    found.deviates = True
                if isinstance(error, Damaged):
                    continue
            except Exception as error:  # noqa: BLE001  any other end is what is looked for
                outcomes.append(f"{type(error).__name__}: {error}"[:400])
                found.deviates = True
            finally:
                found.notes += listener.said
            break
        if outcome is not None and outcome != self._undisturbed[name]:
            parts = zip(("record", "weights"), outcome, self._undisturbed[name], strict=True)
            words = " and ".join(part for part, ours, theirs in parts if ours != theirs)
            outcomes.append(f"other {words}")
            found.deviates = True
        found.outcome = ", ".join(outcomes)

    def _trained(
        self,
        config: RunConfig,
        folder: Path,
        listener: Listener,
        *,
        resume: bool = False,
        start_over: bool = False,
    ) -> tuple[Any, ...]:
        """Train; all that was measured but the time it took, and the bytes of the weights."""
        record = train(
            config,
            folder,
            device_count=1,
            resume=resume,
            start_over=start_over,
            reporter=listener,
            predicts=False,
        )
        if record.status != "completed":
            raise RuntimeError(f"the run ended as {record.status}")
        weights = trained_weights(resolve(self.configs["alone"], 1), folder)
        return figures(folder), [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)]


def _summary(found: list[Found]) -> str:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        what = each.damages[0].split()[0].partition("/")[0] if len(each.damages) == 1 else "two"
        rows[what][each.outcome if not each.deviates else "deviates"] += 1
    lines = ["| damaged | damages | what came of it | deviate |", "|---|---|---|---|"]
    for what, outcomes in sorted(rows.items()):
        said = ", ".join(f"{count} {words}" for words, count in outcomes.most_common())
        lines.append(f"| {what} | {outcomes.total()} | {said} | {outcomes['deviates']} |")
    return "\n".join(lines)


def main() -> int:
    """Damage, resume, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "damages.json")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        campaign = Campaign(Path(place))
        found = []
        for index in range(flags.first, flags.first + flags.damages):
            found.append(campaign.damage(index, flags.seed))
            print(f"{index}: {found[-1].base}: {'; '.join(found[-1].damages)}: {found[-1].outcome}")
    versions = {name: version(name) for name in ("scalejax", "jax", "orbax-checkpoint")}
    rows = [asdict(each) for each in found]
    text = json.dumps({"seed": flags.seed, **versions, "damages": rows}, indent=1)
    flags.results.write_text(text + "\n")
    print(_summary(found))
    return int(any(each.deviates for each in found))


if __name__ == "__main__":
    sys.exit(main())
