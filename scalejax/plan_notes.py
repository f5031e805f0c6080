"""What a plan says of itself in sentences: target, where its steps come from, what to know.

Knows runs, points and predictions; costs and compares nothing.
"""

from collections.abc import Sequence

from scalejax.config import RunConfig
from scalejax.convergence import ConvergenceData, Hyperbola
from scalejax.optimizer_config import OptimizerConfig, SgdConfig
from scalejax.plan import PlanPoint
from scalejax.predict import RUN_CONDITIONS, STEP_CONDITIONS, Prediction
from scalejax.units import counted, format_count


def is_plain_sgd(optimizer: OptimizerConfig) -> bool:
    """Whether each update is along one gradient."""
    return isinstance(optimizer, SgdConfig) and not optimizer.momentum


def other_optimizer(config: RunConfig, convergence: ConvergenceData | None) -> str | None:
    """What trained the points, where that is known and not what `config` trains with."""
    theirs = None if convergence is None else convergence.optimizer
    return None if theirs == config.optimizer.name else theirs


def target_in_words(convergence: ConvergenceData | None, target: float | None) -> str:
    """What counts as trained."""
    if convergence is None:
        return "the end of its epochs" if target is None else f"{target:g} (assumed)"
    value = convergence.target if convergence.target is not None else target
    words = convergence.metric or "target"
    return words if value is None else f"{words} {value:g}"


def source_in_words(
    config: RunConfig, convergence: ConvergenceData | None, curve: Hyperbola | None
) -> str:
    """Where the steps to target come from, and the critical batch that they are taken to have."""
    if convergence is None or curve is None:
        return f"the run's own {counted(config.train.epochs, 'epoch')}, whatever the batch"
    batches = [point.global_batch for point in convergence.points]
    critical, scale = curve.critical_batch, convergence.noise_scale
    measured = "" if scale is None else f"noise scale {format_count(scale)} samples, "
    is_assumed = scale is None and not convergence.compares_batches
    batch = " to ".join(map(str, sorted({min(batches), max(batches)})))
    return (
        f"{convergence.source}: {counted(len(batches), 'point')}, batch {batch}; "
        f"{measured}critical batch {'ASSUMED to be about ' if is_assumed else ''}"
        f"{format_count(critical.p50)} "
        f"({format_count(critical.p10)} to {format_count(critical.p90)})"
        f"{', as one batch says nothing of it' if is_assumed else ''}"
    )


def notes_of(
    config: RunConfig,
    predictions: Sequence[Prediction],
    convergence: ConvergenceData | None,
    recipe: str | None,
    points: Sequence[PlanPoint],
) -> list[str]:
    """What a reader must know of a plan; what makes its figures others than they look first."""
    notes = []
    if convergence is None:
        epochs = counted(config.train.epochs, "epoch")
        notes.append(
            f"NOBODY MEASURED that the target is reached: what the run trains, {epochs}, is "
            "taken for it at every batch, though large batches need more, or fail; "
            "--convergence FILE gives measured points"
        )
    else:
        if (other := other_optimizer(config, convergence)) is not None:
            notes.append(
                f"the points were trained with {other}, and this run trains with "
                f"{config.optimizer.name}: nobody measured the steps that it needs, and every "
                f"time, range and probability is that of a run which learns as {other} did"
            )
        notes += convergence.notes
        if convergence.noise_scale is not None and not is_plain_sgd(config.optimizer):
            momentum = " with momentum" if isinstance(config.optimizer, SgdConfig) else ""
            notes.append(
                f"the noise scale is likely too small for {config.optimizer.name}{momentum}: it "
                "foretells the critical batch of SGD without momentum, and those of four other "
                "optimizers were 4 to 8 times as large (experiments/critical_batch); the range "
                "is wider upward for that, and steps at several batches narrow it"
            )
        recipes = convergence.recipes
        if recipe is not None:
            notes.append(f"steps are those of the recipe {recipe!r}")
        elif len(recipes) > 1:
            notes.append(
                f"the points are of {len(recipes)} recipes ({', '.join(recipes)}): each batch is "
                "taken to be trained with that of the point nearest to it; --recipe names one"
            )
        if any(point.is_extrapolated for point in points):
            notes.append(
                "~ marks batches beyond the largest that was shown to reach the target, "
                f"{convergence.largest_reached}"
            )
    wanted = (*STEP_CONDITIONS, *RUN_CONDITIONS)
    unknown = [
        name
        for name in wanted
        if any(dict(each.waterfall).get(name) is None for each in predictions)
    ]
    if unknown:
        notes.append(
            f"not known, so not in any time: {', '.join(unknown)} (flags --conditions.NAME say it)"
        )
    notes.append("start-up and evaluations are not counted")
    # Of the utilisation, which is not in a plan, nothing need be known.
    others = [note for each in predictions for note in each.notes if not note.startswith("MFU ")]
    return [*notes, *dict.fromkeys(others)]
