"""Plan of a bench: its benchmarks with their devices, processes and batches.

Refuses everything that can be checked without devices. Knows configs and files; starts no
processes, and needs no JAX.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from scalejax.config.grid import Fields, Grammar, fields_of, flat_fields
from scalejax.config.migrate import load_run_file
from scalejax.config.run import ResolvedRun, load_config
from scalejax.core.errors import (
    ConfigError,
    prefixed,
    refusal,
    require_at_least,
    require_multiple,
)
from scalejax.core.serialization import JsonValue, build, document, plain, stamped
from scalejax.measure.bench.tables import Scaling
from scalejax.planning.scaling_study import resolve_all
from scalejax.sweep.plan import in_words, require_known_conditions, require_told_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How steps are timed: the fields of -P, -V and -E that are not in a run.toml."""

    devices: int = 1
    """Device count, over all processes."""
    processes: int = 1
    """Processes on this machine; the devices are divided evenly among them."""
    scaling: Scaling = "weak"
    """What stays fixed as devices are added: per-device batch (weak) or global batch (strong)."""
    batches: Literal["synthetic", "real"] = "synthetic"
    """Either the first batch of the data, kept on the devices, or batches as in training."""
    steps: int = 100
    """Number of timed steps; 100 as in DLBS and tf_cnn_benchmarks."""
    warmup_steps: int = 10
    """Number of warm-up steps before them, not timed; 10 as in tf_cnn_benchmarks
    (`benchmark_cnn.py`, 2023): max(10, 5 autotune_threshold^2) with a threshold of 1."""

    def __post_init__(self) -> None:
        require_at_least("devices", self.devices, 1)
        require_at_least("processes", self.processes, 1)
        require_at_least("steps", self.steps, 1)
        require_at_least("warmup_steps", self.warmup_steps, 1)
        require_multiple("devices", self.devices, self.processes, "processes")


SETTINGS = tuple(field.name for field in fields(Settings))
"""Names of the fields that are not in a run.toml."""


@document("bench_job")
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Instructions to the processes of a benchmark."""

    settings: Settings
    """How steps are timed."""
    run: ResolvedRun
    """The run whose steps are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One training step to time."""

    settings: Settings
    """How it is timed."""
    fields: Fields
    """Fields replaced in the run.toml."""
    varied: Fields
    """Its values of the fields in which benchmarks of the bench differ, including settings."""
    run: ResolvedRun
    """The run whose steps are timed."""

    @property
    def document(self) -> dict[str, JsonValue]:
        """Everything that determines what is timed, as JSON."""
        return {
            "settings": plain(self.settings),
            "fields": dict(self.fields),
            "config": plain(self.run.config),
        }

    @property
    def name(self) -> str:
        """Folder name: equal for equal benchmarks in any plan."""
        text = json.dumps([self.document["settings"], self.document["config"]], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        place = f"-{self.settings.processes}p" if self.settings.processes > 1 else ""
        return f"{self.settings.devices}{place}-{digest}"

    @property
    def label(self) -> str:
        """Varied fields in words, for display."""
        return in_words(self.varied) or f"devices={self.settings.devices}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """All benchmarks of a bench."""

    text: str
    """Text of the run.toml that they start from."""
    benchmarks: tuple[Benchmark, ...]
    """Benchmarks, in order."""
    repeats: int
    """Number of rounds; each times every benchmark once."""

    @property
    def rounds(self) -> list[tuple[int, Benchmark]]:
        """(round, benchmark) in the order in which they are timed.

        Every second round runs in reverse, so that a machine that slows down over time affects the
        first and the last benchmark equally on average.
        """
        return [
            (number, each)
            for number in range(self.repeats)
            for each in (self.benchmarks if number % 2 == 0 else reversed(self.benchmarks))
        ]

    def to_json(self) -> str:
        """The plan as a JSON document."""
        fields: dict[str, JsonValue] = {
            "repeats": self.repeats,
            "benchmarks": [
                {
                    "name": each.name,
                    "varied": dict(each.varied),
                    "global_batch": each.run.split.global_batch,
                    "per_device_batch": each.run.split.per_device_batch,
                    **each.document,
                }
                for each in self.benchmarks
            ],
        }
        return stamped("bench_plan", 1, fields)


def plan_bench(run_file: Path, grammar: Grammar, *, repeats: int = 1) -> BenchPlan:
    """The benchmarks of `grammar` applied to `run_file`, all built and checked.

    Args:
        run_file: the run.toml that they start from.
        grammar: fields of the run.toml, and `SETTINGS`.
        repeats: number of rounds.

    Raises:
        ConfigError: if a benchmark is invalid, naming it, or two are equal.
    """
    require_at_least("repeats", repeats, 1)
    require_known_conditions(grammar, SETTINGS)
    known = {**flat_fields(load_run_file(run_file)), **fields_of(Settings())}
    expanded = grammar.expanded(known)
    grammar.require_met_conditions(known)
    split = [_split(values) for values in expanded]
    fewest = min(settings.devices for settings, _ in split)
    varied = _varied([{**known, **values} for values in expanded], grammar.named_fields())
    benchmarks = tuple(
        Benchmark(
            settings=settings,
            fields=replaced,
            varied=differing,
            run=_resolved(run_file, replaced, settings, fewest, differing),
        )
        for (settings, replaced), differing in zip(split, varied, strict=True)
    )
    names = (each.name for each in benchmarks)  # equal ones would share a table cell
    require_told_apart(names, "benchmarks", "they may not be equal; --repeats times one more often")
    return BenchPlan(
        text=run_file.read_text(encoding="utf-8"), benchmarks=benchmarks, repeats=repeats
    )


def _split(values: Fields) -> tuple[Settings, Fields]:
    """The settings among the fields of a benchmark, and those of the run.toml."""
    settings = {name: value for name, value in values.items() if name in SETTINGS}
    rest = {name: value for name, value in values.items() if name not in SETTINGS}
    return build(Settings, settings), rest


def _varied(known: list[Fields], names: list[str]) -> list[Fields]:
    """For each benchmark, its values of the `names` in which any two differ."""
    differing = [
        name for name in names if len({json.dumps(values.get(name)) for values in known}) > 1
    ]
    return [{name: values.get(name) for name in differing} for values in known]


def _resolved(
    run_file: Path, replaced: Fields, settings: Settings, fewest: int, varied: Mapping
) -> ResolvedRun:
    """The run on its devices. If the run.toml gives a global batch, weak scaling keeps the
    per-device batch that it means on the `fewest` devices."""
    with prefixed(f"{in_words(varied)}: " if varied else ""):
        config = load_config(run_file, replaced)
        if epochs := config.batch.ramp_epochs:
            accepted = "a benchmark has one batch size; leave it out with -P batch.ramp_epochs=[]"
            raise ConfigError(refusal("batch.ramp_epochs", list(epochs), accepted))
        counts = (fewest, settings.devices)
        return resolve_all(config, counts, settings.scaling)[-1]
