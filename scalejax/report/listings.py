"""What commands list, as documents: the catalogue, published networks, fields, schedules.

Knows no terminal; `report.terminal` prints the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from scalejax.config.presets import Preset
from scalejax.config.reference import TableReference
from scalejax.config.run import ResolvedRun
from scalejax.core.serialization import JsonValue, document, plain
from scalejax.core.tabular import Tabular
from scalejax.hardware import Chip, Cluster
from scalejax.simulator.frameworks import Framework


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A published network."""

    name: str
    """The name for `model.name`."""
    network: str
    """Its architecture."""
    parameters: int
    """Parameters, as published."""
    active_parameters: int | None
    """Parameters that a token goes through, of a mixture of experts; None if not published."""
    tokens_per_sample: int | None
    """Tokens of a sample while it was pretrained; None of images."""
    global_batch: int | None
    """Samples per update as published; None if not kept here."""
    total_tokens: int | None
    """Tokens that it was trained on; None if not kept here."""
    source: str
    """Publication."""


@document("models")
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList(Tabular):
    """Published networks by name."""

    models: tuple[ModelRow, ...]
    """The networks."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The networks, a row for each."""
        return [asdict(each) for each in self.models]


def models(presets: Mapping[str, Preset]) -> ModelList:
    """The list of these networks."""
    return ModelList(
        models=tuple(
            ModelRow(
                name=name,
                network=each.network,
                parameters=each.parameters,
                active_parameters=each.active_parameters,
                tokens_per_sample=each.pretraining_tokens,
                global_batch=each.published_batch,
                total_tokens=each.pretraining.total_tokens if each.pretraining else None,
                source=each.source,
            )
            for name, each in presets.items()
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRow:
    """A framework that steps are predicted for."""

    name: str
    """The name for --framework."""
    title: str
    """Its name for people."""
    year: int
    """Year of its software."""


@document("frameworks")
@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkList(Tabular):
    """The frameworks that steps are predicted for."""

    frameworks: tuple[FrameworkRow, ...]
    """The frameworks."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The frameworks, a row for each."""
        return [asdict(each) for each in self.frameworks]


def frameworks(every: Iterable[Framework]) -> FrameworkList:
    """The list of these frameworks."""
    rows = (FrameworkRow(name=each.name, title=each.title, year=each.year) for each in every)
    return FrameworkList(frameworks=tuple(rows))


@document("hardware")
@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareList(Tabular):
    """Entries of the catalogue, whole, with the source of each number."""

    clusters: tuple[Cluster, ...] = ()
    """Clusters, each with its chip, links, network and library."""
    chips: tuple[Chip, ...] = ()
    """Chips."""
    frameworks: tuple[FrameworkRow, ...] = ()
    """Frameworks."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The figures of the tables, a row for each entry."""
        rows: list[dict[str, JsonValue]] = [
            {
                "kind": "cluster",
                "name": each.name,
                "title": each.title,
                "chip": each.chip.name,
                "devices_per_node": each.devices_per_node,
                "link_bytes_per_second": each.link.bytes_per_second,
                "network_bytes_per_second": each.network and each.network.bytes_per_second,
            }
            for each in self.clusters
        ]
        rows += [
            {
                "kind": "chip",
                "name": each.name,
                "title": each.title,
                "memory_bytes": each.memory_bytes,
                "memory_bytes_per_second": each.memory_bytes_per_second,
                "peak_flop_per_second": dict(each.peak_flop_per_second),
            }
            for each in self.chips
        ]
        return [*rows, *({"kind": "framework", **asdict(each)} for each in self.frameworks)]


@document("config_fields")
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldList(Tabular):
    """Fields of a run.toml."""

    tables: tuple[TableReference, ...]
    """The tables, each with its fields."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The fields, a row for each."""
        return [
            {"table": table.title, **asdict(each)} for table in self.tables for each in table.fields
        ]


@document("schedule")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTable(Tabular):
    """The learning rate of a run, update by update."""

    learning_rates: tuple[float, ...]
    """Of each update, the first first."""
    epochs: tuple[float, ...]
    """Epochs before each update."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The updates, a row for each."""
        places = enumerate(zip(self.epochs, self.learning_rates, strict=True), start=1)
        return [
            {"step": step, "epoch": epoch, "learning_rate": rate} for step, (epoch, rate) in places
        ]


@document("resolved_run")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRunTable(Tabular):
    """A run on so many devices."""

    run: ResolvedRun
    """Its config, layout and batches."""
    steps_per_epoch: int
    """Updates in an epoch."""
    total_steps: int
    """Updates in all."""
    peak_learning_rate: float
    """Largest learning rate."""
    notes: tuple[str, ...]
    """What may surprise."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """One row of all fields."""
        row = plain(self)
        return [row] if isinstance(row, dict) else []


def resolved_run(
    run: ResolvedRun, learning_rates: Sequence[float], notes: Iterable[str]
) -> ResolvedRunTable:
    """The table of a run."""
    return ResolvedRunTable(
        run=run,
        steps_per_epoch=run.steps_per_epoch,
        total_steps=run.total_steps,
        peak_learning_rate=max(learning_rates, default=0.0),
        notes=tuple(notes),
    )


@document("calibration")
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated(Tabular):
    """A cluster that was measured on this machine, or fitted to runs."""

    cluster: Cluster
    """The devices of one process."""
    processes: Cluster | None
    """Several processes; None if they were not measured."""
    notes: tuple[str, ...]
    """Caveats."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """All numbers, a row for each cluster."""
        rows = [plain(each) for each in (self.cluster, self.processes) if each is not None]
        return [row for row in rows if isinstance(row, dict)]
