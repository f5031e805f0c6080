"""Convergence point of one run's record: steps to the target, and the mean gradient noise scale.

Knows the record of a run; no config, and nothing of how it was measured.
"""

from pathlib import Path

from scalejax.core.errors import ConfigError, refusal
from scalejax.planning.convergence.points import ConvergenceData, Point
from scalejax.training.noise_scale import averaged
from scalejax.training.record import RunRecord

NOT_MEASURED = (
    "the run did not measure its gradient noise scale, so that steps at other batches are as good "
    "as unknown: [train.noise_scale] measures it"
)


_AVERAGED = (
    "the noise scale is the mean over the run's progress up to the target; what train prints is "
    "that of the last updates"
)
_COARSE = 0.05
"""Uncertainty of the steps to target, as a fraction, above which a note says so: the usual
scatter of points about their curve (`hyperbola.SCATTER`)."""


def read_run(path: Path, *, target: float | None) -> ConvergenceData:
    """Steps of the run in a folder to a test accuracy, and its mean noise scale until then.

    Args:
        path: the folder.
        target: the test accuracy that counts as trained.

    Raises:
        ConfigError: if there is no run, no target, or the run did not reach it; or if its batch
            grew, so that it is no point of one batch.
    """
    record = RunRecord.load(path)
    best = max((each.test_accuracy for each in record.evaluations), default=None)
    seen = "it has no evaluation yet" if best is None else f"its best is {best:g}"
    if target is None:
        accepted = f"the test accuracy of {path} that counts as trained must be given; {seen}"
        raise ConfigError(refusal("target", None, accepted))
    step = next((e.step for e in record.evaluations if e.test_accuracy >= target), None)
    if step is None:
        raise ConfigError(refusal("target", target, f"{path} did not reach it: {seen}"))
    before = max((e.step for e in record.evaluations if e.step < step), default=0)
    lines = record.training
    batches = sorted({line.global_batch for line in lines if line.global_batch is not None})
    if len(batches) != 1:
        accepted = f"the record of {path} must be of one batch, which did not grow"
        raise ConfigError(refusal("global_batch", batches, accepted))
    scale = averaged((line.noise_scale for line in lines if line.step <= step), batches[0])
    return ConvergenceData(
        name=path.name,
        target=target,
        metric="test accuracy",
        points=(Point(global_batch=batches[0], samples=float(step * batches[0])),),
        noise_scale=scale,
        notes=(
            NOT_MEASURED if scale is None else _AVERAGED,
            *((_coarse(before, step),) if step - before > _COARSE * step else ()),
        ),
        source=str(path),
    )


def _coarse(before: int, step: int) -> str:
    return (
        f"the target was reached between the evaluations after {before} and {step} steps, and "
        f"{step} are taken: up to {(step - before) / step:.0%} too many; "
        "train.evaluate_every_steps evaluates more often"
    )
