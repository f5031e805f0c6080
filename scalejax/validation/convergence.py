"""Rows of ledgers of convergence: samples to a target, and final losses.

Samples to a target are predicted with the hyperbola of `planning.convergence`, through the other
points of the same benchmark, including those of the ledgers that come with scalejax, but never a
row's own batch or submitter. A single other batch gives a wide band: from equal samples to equal
steps.
Final losses are predicted by the surface of `planning.convergence.loss_surface`, fitted without
runs of the row's size and number of tokens; runs that diverged are skipped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalejax.core.errors import require_above, require_at_least
from scalejax.planning.convergence import Hyperbola, Point, fit
from scalejax.planning.convergence.loss_surface import (
    DIVERGED,
    LanguageRun,
    published_surface,
    relative_loss,
)
from scalejax.validation.summary import Quantity, RowResult
from scalejax.validation.table import MAY_BE_ZERO

ONE_TARGET = ("bert", "resnet")
"""Benchmarks of the same network, data set and target in every round: BERT-large to a masked
accuracy of 0.72, ResNet-50 on ImageNet to 0.759 (`planning/convergence/published/mlperf.csv`)."""
_DIVERGED = "skipped: the run diverged, so that its loss is none of a trained network"
_SEQUENCE_TOKENS = 2048
"""Tokens of a sequence in all runs of Step Law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRow(ABC):
    """Mean work of several runs of a benchmark until its target was reached."""

    quantity: ClassVar[Quantity] = "samples to target"
    others: ClassVar[str]
    """In words, which rows it may be predicted from."""

    round: str
    """Round of MLPerf."""
    benchmark: str
    """Benchmark."""
    global_batch: int
    """Samples per update over all devices."""
    unit: str
    """Unit of the work: "epochs", "samples", "tokens"."""
    mean: float
    """Mean work of the runs that reached the target."""
    std: float | None = field(default=None, metadata=MAY_BE_ZERO)
    """Standard deviation between runs."""
    runs: int = field(metadata=MAY_BE_ZERO)
    """Runs."""
    source: str
    """Publication."""

    @property
    @abstractmethod
    def author(self) -> str:
        """Who published it."""

    @property
    @abstractmethod
    def recipe(self) -> str:
        """Rule that the hyperparameters follow, as far as it is known."""

    @property
    def warmup(self) -> str:
        """Warmup, as published; empty if it is not known."""
        return ""

    @property
    def points_of(self) -> tuple[str, ...]:
        """Key of the rows that share a network, a data set and a target, in one round or in all."""
        one = self.benchmark in ONE_TARGET
        return (self.benchmark,) if one else (self.round, self.benchmark)

    @property
    def counted_in(self) -> str:
        """What the work is counted in: epochs, tokens, or otherwise samples."""
        return self.unit if self.unit in ("epochs", "tokens") else "samples"

    @property
    def point(self) -> Point:
        """Its point on a curve, with samples in the row's unit."""
        return Point(
            global_batch=self.global_batch,
            samples=self.mean,
            run_deviation=None if self.std is None else self.std / self.mean,
            run_count=max(self.runs, 1),
            recipe=self.recipe,
        )

    @abstractmethod
    def is_apart_from(self, other: "SamplesRow") -> bool:
        """Whether `other` may be used to predict it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow(SamplesRow):
    """A reference convergence point of MLPerf (columns of convergence_rcp.csv)."""

    others: ClassVar[str] = "other batch"

    optimizer: str | None = None
    """Optimizer."""
    warmup_epochs: str | None = None
    """Warmup, as published."""

    @property
    def author(self) -> str:
        """Who published it."""
        return "MLCommons"

    @property
    def recipe(self) -> str:
        """The optimizer; not the warmup, which differs between rows of one rule if it is tuned for
        each batch."""
        return self.optimizer or ""

    @property
    def warmup(self) -> str:
        """Warmup, as published; empty if it is not known."""
        return self.warmup_epochs or ""

    def is_apart_from(self, other: SamplesRow) -> bool:
        """Whether `other` has another batch."""
        return other.global_batch != self.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionRow(SamplesRow):
    """Samples to the target by submission to MLPerf (columns of
    mlperf_submission_convergence.csv)."""

    others: ClassVar[str] = "other batch of another submitter"

    org: str
    """Submitter."""
    system: str
    """Its system."""

    @property
    def author(self) -> str:
        """The submitter."""
        return self.org

    @property
    def recipe(self) -> str:
        """Not known: each submitter tunes its own."""
        return ""

    def is_apart_from(self, other: SamplesRow) -> bool:
        """Whether `other` has another submitter and another batch."""
        return other.author != self.org and other.global_batch != self.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """Final loss by rate, batch, parameters and tokens (columns of Step Law's tables)."""

    quantity: ClassVar[Quantity] = "loss"

    lr: float
    """Peak learning rate."""
    bs: int
    """Sequences per update."""
    loss: float = field(metadata={"column": "smooth loss"})
    """Final loss, smoothed over steps."""
    tokens: float = field(metadata={"column": "D"})
    """Tokens trained on."""
    parameters: float = field(metadata={"column": "N"})
    """Parameters of the network, without embeddings, all experts included."""
    exp_name: str
    """Name of the run."""

    def __post_init__(self) -> None:
        counted = (("lr", self.lr), ("bs", self.bs), ("D", self.tokens), ("N", self.parameters))
        for column, value in counted:
            require_above(column, value, 0)

    @property
    def source(self) -> str:
        """Publication, and the run in it."""
        return f"Step Law (Li et al. 2025, arXiv 2503.04715), {self.exp_name}"

    @property
    def sparsity(self) -> float:
        """Width of all experts over that of a token's."""
        return 1.0

    @property
    def run(self) -> LanguageRun:
        """The run, for a loss surface."""
        return LanguageRun(
            parameters=self.parameters,
            tokens=self.tokens,
            batch_tokens=self.bs * _SEQUENCE_TOKENS,
            learning_rate=self.lr,
            sparsity=self.sparsity,
            loss=self.loss,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLossRow(LossRow):
    """Final loss of a mixture of experts."""

    nume: int
    """Experts of a layer."""
    topk: int
    """Experts of a token."""
    moeh: int
    """Width of an expert."""
    sed: int = field(metadata=MAY_BE_ZERO)
    """Width of the shared expert."""

    def __post_init__(self) -> None:
        LossRow.__post_init__(self)
        for column in ("topk", "moeh"):
            require_at_least(column, getattr(self, column), 1)
        require_at_least("nume", self.nume, self.topk)

    @property
    def sparsity(self) -> float:
        """Width of all experts over that of a token's, both with the shared one."""
        return (self.nume * self.moeh + self.sed) / (self.topk * self.moeh + self.sed)


def samples_results(
    rows: Sequence[SamplesRow], ledger: str, known: Sequence[SamplesRow] = ()
) -> list[RowResult]:
    """Prediction and measurement of each row, each from the others of its benchmark.

    Args:
        rows: the rows.
        ledger: its name.
        known: rows of other ledgers that predictions may use too.
    """
    curves: dict[tuple[object, ...], Hyperbola] = {}
    together = list(dict.fromkeys((*rows, *known)))
    return [_samples_result(row, together, ledger, curves) for row in rows]


def _samples_result(
    row: SamplesRow,
    rows: Sequence[SamplesRow],
    ledger: str,
    curves: dict[tuple[object, ...], Hyperbola],
) -> RowResult:
    same = [
        other
        for other in rows
        if other.points_of == row.points_of and other.counted_in == row.counted_in
    ]
    apart = [other for other in same if row.is_apart_from(other)]
    recipe_of = _recipes(same)
    others = [replace(other.point, recipe=recipe_of(other)) for other in apart]
    found, status = None, "ok"
    if not others:
        status = f"skipped: of its benchmark and round there is no {row.others}"
    else:
        key = (row.points_of, row.counted_in, tuple(others))
        if key not in curves:
            curves[key] = fit(others)
        found = curves[key].samples(
            row.global_batch, recipe=recipe_of(row), run_count=max(row.runs, 1)
        )
    unit = row.counted_in
    return RowResult(
        case_id=" ".join((row.round, row.benchmark, str(row.global_batch), row.author)),
        series=" ".join(row.points_of),
        device_count=1,
        measured_seconds=None,
        predicted_seconds=None,
        p10_seconds=None,
        p90_seconds=None,
        status=status,
        is_mapped=found is not None,
        kind=None,
        quantity=row.quantity,
        ledger=ledger,
        family=f"{ledger} {row.benchmark}",
        source=row.source,
        measured_samples=row.mean,
        predicted_samples=found and found.p50,
        p10_samples=found and found.p10,
        p90_samples=found and found.p90,
        samples_unit=unit,
    )


def _recipes(rows: Sequence[SamplesRow]) -> Callable[[SamplesRow], str]:
    """The recipe of a row among those of its curve.

    If several batches share each warmup of the curve, every warmup is a rule of its own; otherwise
    warmup is tuned for each batch.
    """
    batches: dict[str, set[int]] = {}
    for row in rows:
        batches.setdefault(row.warmup, set()).add(row.global_batch)
    is_rule = "" not in batches and all(len(each) > 1 for each in batches.values())
    return lambda row: f"{row.recipe} {row.warmup}".strip() if is_rule else row.recipe


def loss_results(rows: Sequence[LossRow], ledger: str) -> list[RowResult]:
    """Prediction and measurement of the loss of each row."""
    model = published_surface()
    runs = [row.run for row in rows]
    found = []
    for row, run, off in zip(rows, runs, relative_loss(runs), strict=True):
        is_diverged = off > DIVERGED
        estimate = None if is_diverged else model.without(run.cell).loss(run)
        found.append(
            RowResult(
                case_id=row.exp_name,
                series=f"{row.parameters:g} parameters, {row.tokens:g} tokens",
                device_count=1,
                measured_seconds=None,
                predicted_seconds=None,
                p10_seconds=None,
                p90_seconds=None,
                status=_DIVERGED if is_diverged else "ok",
                is_mapped=not is_diverged,
                kind=None,
                quantity=row.quantity,
                ledger=ledger,
                family=ledger,
                source=row.source,
                measured_loss=row.loss,
                predicted_loss=estimate and estimate.p50,
                p10_loss=estimate and estimate.p10,
                p90_loss=estimate and estimate.p90,
            )
        )
    return found
