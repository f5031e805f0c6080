"""Ledger of published step times, one measurement per row, read from CSV.

Knows the columns and their types; nothing of networks, clusters or predictions.
"""

import csv
import dataclasses
import gzip
import io
import math
import re
import types
import typing
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from scalejax.core.errors import ConfigError, nearest_name, refusal

_Part = TypeVar("_Part")

RowKind = Literal["dense", "expert", "lora"]
"""What was trained: a network with experts, adapters of LoRA, or any other network."""

_MISSPELT = 0.7
"""Similarity, 0..1, above which an unknown column counts as a misspelt missing one: "step_secs"
and "step_seconds" are (0.86), "pipeline_chunks" and "pipeline" are not (0.696)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerModel:
    """Network of a row; None where the row does not state a size."""

    model: str
    """Name of the network: "resnet50", "gpt"."""
    layers: int | None = None
    """Blocks of a transformer."""
    hidden: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values."""
    ffn_hidden: int | None = None
    """Inner width of the feed-forward layers."""
    vocab: int | None = None
    """Size of the vocabulary."""
    seq_len: int | None = None
    """Tokens in a sample."""
    experts: int | None = None
    """Routed experts of a layer."""
    experts_per_token: int | None = None
    """Experts that each token goes through."""
    shared_experts: int | None = None
    """Experts that every token goes through besides."""
    expert_hidden: int | None = None
    """Inner width of each expert."""
    dense_layers: int | None = None
    """First layers without experts."""
    moe_balance: str | None = None
    """How loads of experts were balanced, and what was dropped: "capacity_factor 1.25"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMachine:
    """Machine of a row."""

    hardware: str
    """Name of the device: "v100_sxm2_16gb"."""
    devices_per_node: int | None = None
    """Devices in a node."""
    intra_node_link: str | None = None
    """Link between the devices of a node: "nvlink2_mesh"."""
    node_network_gbit_per_second: float | None = None
    """Rate of all network cards of a node, 1e9 bits per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpread:
    """Parallelism of a row; an axis that is not stated is 1."""

    data: int | None = None
    """Devices along the data axis."""
    fsdp: int | None = None
    """Devices along the axis that shards batch and parameters."""
    tensor: int | None = None
    """Devices along the axis that shards layers."""
    context: int | None = None
    """Devices along the axis that shards sequences."""
    pipeline: int | None = None
    """Pipeline stages."""
    pipeline_chunks: int | None = None
    """Interleaved chunks per pipeline stage."""
    zero_stage: int | None = None
    """State that the data axis shards: 0 none, 1 optimizer, 2 gradients too, 3 parameters too."""
    sequence_parallel: int | None = None
    """1 where activations between the layers are sharded over the tensor axis."""
    expert_parallel: int | None = None
    """Devices over which experts are spread."""
    expert_tensor: int | None = None
    """Devices along the axis that shards each expert."""
    gradient_exchange: str | None = None
    """Gradient synchronisation: "all_reduce" or "parameter_server"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerWork:
    """Batch, precision and recompute of a row."""

    precision: str | None = None
    """Arithmetic: "fp32", "tf32", "fp16", "bf16", "fp8"."""
    per_device_batch: float | None = None
    """Samples per device per update; a part of one where devices share a sample."""
    microbatch: int | None = None
    """Samples per device per forward pass."""
    global_batch: int | None = None
    """Samples per update over all devices."""
    recompute: str | None = None
    """Recompute in the backward pass: "none", "selective", "full"."""
    attention: str | None = None
    """Attention kernel: "unfused" or "flash"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One published measurement."""

    case_id: str
    """Name of the row; several rows may share one."""
    series: str
    """Rows of one series differ in the number of devices."""
    source: str
    """Publication."""
    source_locator: str | None = None
    """Place in the publication."""
    year: int | None = None
    """Year of publication."""
    framework: str | None = None
    """Training framework."""
    assumed: str | None = None
    """Columns that the source does not state."""
    device_count: int
    """Devices in the run."""
    step_seconds: float | None = None
    """Measured time of one update; None where it is not stated."""
    notes: str | None = None
    """Remarks."""
    stalled: int | None = None
    """1 where the source's run stalled for reasons of its own, so that no program explains it."""
    model: LedgerModel
    """Network."""
    machine: LedgerMachine
    """Machine."""
    spread: LedgerSpread
    """Parallelism."""
    work: LedgerWork
    """Batch, precision and recompute of one update."""

    @property
    def kind(self) -> RowKind:
        """What was trained: adapters of LoRA, a network with experts, or any other."""
        words = f"{self.case_id} {self.notes}".lower().replace("_", " ")
        if _LORA.search(words):
            return "lora"
        is_mixture = (self.model.experts or 0) > 1 or self.model.model.endswith("_moe")
        return "expert" if is_mixture else "dense"

    @property
    def states_layout(self) -> bool:
        """Whether it states network, devices, batch, precision, step time and an axis of its
        layout, and its source does not mark it as stalled: what a prediction needs of a row."""
        model, work, spread = self.model, self.work, self.spread
        needed = (model.layers, model.hidden, work.global_batch, work.precision, self.step_seconds)
        axes = (spread.data, spread.fsdp, spread.tensor, spread.pipeline)
        return None not in needed and any(axes) and not self.stalled

    @property
    def family(self) -> str:
        """Short name of the row's source, by which results are grouped."""
        name = next((name for part, name in _FAMILIES if part in self.source), None)
        if name is None:
            repository = self.source.rpartition("/")[2].partition("@")[0] or self.source
            name = re.sub(r"\W+", "_", repository.lower()).strip("_") or "unnamed"
        if name != "vtrain":
            return name
        per_node = self.machine.devices_per_node
        is_single = per_node is not None and self.device_count <= per_node
        return "vtrain_single" if is_single else "vtrain_multi"


_LORA = re.compile("(?<![a-z])lora(?![a-z])")
_FAMILIES = (
    ("tensorflow/tensorflow", "tensorflow_2017"),
    ("DLPerf", "dlperf"),
    ("DeepLearningExamples", "deep_learning_examples"),
    ("llm-foundry", "llm_foundry"),
    ("JAX-Toolbox", "paxml"),
    ("torchtitan", "torchtitan"),
    ("Megatron-LM", "megatron"),
    ("bigscience", "bloom"),
    ("vTrain", "vtrain"),
)
"""(part of `source`, family); the repository's own name where there is none."""


def read_ledger(path: Path) -> list[LedgerRow]:
    """The rows of a ledger in the format of the project's `step_times.csv`, in order; of one that
    ends in `.gz`, unpacked.

    Columns that are not known are ignored, and those that a row can do without may be missing
    or blank; but one that looks like the missing one misspelt is refused.

    Raises:
        ConfigError: if the file cannot be read, a column is missing or misspelt, or a line is
            malformed: with file, line, column.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{str(path)!r} is no file.") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error
    lines = _lines(path, text)
    rows = [_part(LedgerRow, _Cells(path=path, line=line, values=each)) for line, each in lines]
    if not rows:
        raise ConfigError(f"{path} holds no rows.")
    return rows


def _lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cell by column) of each row below the heading.

    Raises:
        ConfigError: if a line cannot be read, or has another number of cells than the heading.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    heading: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ConfigError(f"{path}, line {line}: this is no CSV: {error}.") from error
        if not any(cell.strip() for cell in cells):
            continue
        if heading is None:
            heading = [cell.strip() for cell in cells]
            _require_columns(path, line, heading)
        elif len(cells) != len(heading):
            missing = f", {heading[len(cells)]!r} is the first one missing"
            raise ConfigError(
                f"{path}, line {line}, column {min(len(cells), len(heading)) + 1}: "
                f"there are {len(cells)} cells, but {len(heading)} columns"
                f"{missing if len(cells) < len(heading) else ''}."
            )
        else:
            yield line, dict(zip(heading, (cell.strip() for cell in cells), strict=True))


def _require_columns(path: Path, line: int, heading: list[str]) -> None:
    columns = list(_columns(LedgerRow))
    for field in columns:
        if field.default is dataclasses.MISSING and field.name not in heading:
            closest = nearest_name(field.name, heading)
            hint = f" (is it {closest!r}?)" if closest else ""
            raise ConfigError(f"{path}, line {line}: the column {field.name!r} is missing{hint}.")
    known = [field.name for field in columns]
    missing = [name for name in known if name not in heading]
    for place, name in enumerate(heading, start=1):
        if name in known:
            continue
        if meant := nearest_name(name.lower(), missing, alike=_MISSPELT):
            accepted = f"no such column is known (did you mean {meant!r}?)"
            refused = refusal("heading", name, accepted)
            raise ConfigError(f"{path}, line {line}, column {place}: {refused}")


def _columns(type_: type) -> Iterator[dataclasses.Field[typing.Any]]:
    """Yield the field of each column, those of nested dataclasses included."""
    hints = typing.get_type_hints(type_)
    for field in dataclasses.fields(type_):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _columns(hints[field.name])
        else:
            yield field


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """One line of the file."""

    path: Path
    line: int
    values: dict[str, str]

    def refuse(self, column: str, accepted: str) -> ConfigError:
        """The refusal of a cell, with its place."""
        place = f"{self.path}, line {self.line}, column {list(self.values).index(column) + 1}"
        return ConfigError(f"{place}: {refusal(column, self.values[column], accepted)}")

    def value(self, column: str, kinds: set[type]) -> str | int | float | None:
        """Value of a cell as one of `kinds`; None if it is blank or the column is missing.

        Raises:
            ConfigError: if it holds something else.
        """
        text = self.values.get(column, "")
        if not text:
            if column in self.values and types.NoneType not in kinds:
                raise self.refuse(column, "it may not be blank")
            return None
        if str in kinds:
            return text
        least = 1 if column == "device_count" else 0
        accepted = "a number above 0" if float in kinds else f"a whole number, {least} or more"
        try:
            number = float(text) if float in kinds else int(text)
        except ValueError as error:
            raise self.refuse(column, f"it must be {accepted}") from error
        is_good = 0 < number < math.inf if float in kinds else number >= least
        if not is_good:
            raise self.refuse(column, f"it must be {accepted}")
        return number


def _part(type_: type[_Part], cells: _Cells) -> _Part:
    """A dataclass whose fields are columns, or dataclasses of columns."""
    values = {}
    for name, hint in typing.get_type_hints(type_).items():
        if dataclasses.is_dataclass(hint):
            values[name] = _part(typing.cast(type, hint), cells)
        else:
            values[name] = cells.value(name, set(typing.get_args(hint) or (hint,)))
    return type_(**values)
