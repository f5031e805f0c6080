"""Time to train ResNet-50 on ImageNet, as the planner predicts it, beside published times.

    python experiments/time_to_train/compare.py ../shared/ledger

Compiles the programs of the whole runs (six, about 25 s each, remembered); those of the ledger's
rows come with scalejax.
"""

import csv
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import median

from scalejax.config.run import load_config
from scalejax.hardware import load_cluster
from scalejax.planning.convergence import ConvergenceData, fit, published_data
from scalejax.planning.time_to_target.plan import PlanPoint, plan_point
from scalejax.planning.time_to_target.run import ClusterOption, plan_run
from scalejax.simulator.frameworks import framework_named
from scalejax.simulator.predict import predict
from scalejax.validation import LedgerRow, Skipped, compile_cases, read_ledger

HERE = Path(__file__).parent
EXAMPLE = Path(str(files("scalejax").joinpath("config", "examples", "resnet50_modern.toml")))
TRAIN_EXAMPLES = 1_281_167


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A time to train that was published or follows from what was, and the planner's."""

    group: str
    """What the time is."""
    name: str
    """Whose it is."""
    devices: int
    global_batch: int
    measured_seconds: float
    predicted: PlanPoint
    is_fastest: bool = True
    """Whether no other framework was faster on the same hardware, type and batch."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted.run_seconds / self.measured_seconds - 1


def points_without(global_batch: int) -> ConvergenceData:
    """The published points, but for those of a batch: none is predicted by itself."""
    data = published_data("resnet50")
    if data is None:
        raise ValueError("the points of ResNet-50 come with scalejax")
    kept = tuple(point for point in data.points if point.global_batch != global_batch)
    return replace(data, points=kept)


def composed(ledger: Path) -> list[Comparison]:
    """Measured time of a step times the reference's epochs at its batch.

    For every row of the ledger whose batch has a reference convergence point.
    """
    data = published_data("resnet50")
    known = {point.global_batch: point for point in data.points} if data else {}
    rows = [
        row
        for row in read_ledger(ledger / "step_times.csv")
        if row.model.model == "resnet50" and row.work.global_batch in known
    ]
    found = []
    for case in compile_cases(rows):
        if isinstance(case, Skipped):
            raise ValueError(case.reason)
        row, batch = case.row, case.row.work.global_batch or 0
        point = known[batch]
        left = points_without(batch)
        # A recipe is known before a run is: the point left out names its own.
        steps = fit(left.points).steps(batch, recipe=point.recipe, run_count=point.run_count)
        found.append(
            Comparison(
                group="measured step x reference epochs",
                name=f"{row.framework}, {row.machine.hardware}, {row.work.precision}",
                devices=row.device_count,
                global_batch=batch,
                measured_seconds=(row.step_seconds or 0) * point.samples / batch,
                predicted=plan_point(predict(case.program, case.cluster), steps),
                is_fastest=row.step_seconds == fastest(rows, row),
            )
        )
    return found


def fastest(rows: Sequence[LedgerRow], row: LedgerRow) -> float | None:
    """Least time of a step with the hardware, type, batch and devices of `row`."""

    def setting(of: LedgerRow) -> tuple[object, ...]:
        return of.machine.hardware, of.device_count, of.work.precision, of.work.global_batch

    return min(
        (each.step_seconds for each in rows if setting(each) == setting(row) and each.step_seconds),
        default=None,
    )


def whole_runs() -> list[Comparison]:
    """Published times of whole runs: those to a target, and those of so many epochs, each by the
    framework nearest to the one that trained it."""
    with (HERE / "runs.csv").open(encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    found = []
    for row in cells:
        fields = {
            "batch.per_device_batch": int(row["per_device_batch"]),
            "model.compute_dtype": row["compute_dtype"],
        }
        batch = int(row["per_device_batch"]) * int(row["devices"])
        is_to_target = not row["epochs"]
        if not is_to_target:
            fields["train.epochs"] = int(row["epochs"])
        plan = plan_run(
            load_config(EXAMPLE, fields),
            [ClusterOption(cluster=load_cluster(row["cluster"]))],
            [int(row["devices"])],
            convergence=points_without(batch) if is_to_target else None,
            recipe=row["recipe"] or None,
            framework=framework_named(row["framework"]),
        )
        found.append(
            Comparison(
                group="MLPerf run to 75.9 %" if is_to_target else "run of so many epochs",
                name=row["run"],
                devices=int(row["devices"]),
                global_batch=batch,
                measured_seconds=float(row["seconds"]),
                predicted=plan.points[0],
            )
        )
    return found


def print_rows(rows: Sequence[Comparison]) -> None:
    """A Markdown row for each comparison."""
    print("| what | whose | devices | batch | minutes | predicted | p10 to p90 | error |")
    print("|---|---|---|---|---|---|---|---|")
    for each in rows:
        point = each.predicted
        span = "n/a"
        if point.p10_run_seconds is not None and point.p90_run_seconds is not None:
            span = f"{point.p10_run_seconds / 60:.1f} to {point.p90_run_seconds / 60:.1f}"
        fast = "" if each.is_fastest else " (not the fastest)"
        print(
            f"| {each.group} | {each.name}{fast} | {each.devices} | {each.global_batch} "
            f"| {each.measured_seconds / 60:.1f} | {point.run_seconds / 60:.1f} | {span} "
            f"| {each.error:+.1%} |"
        )


def print_summary(rows: Sequence[Comparison]) -> None:
    """Median absolute error, and how many are within 20 %."""
    print("\n| rows | count | median error | within 20 % | in p10 to p90 |")
    print("|---|---|---|---|---|")
    groups: dict[str, Callable[[Comparison], bool]] = {
        name: lambda each, name=name: each.group == name
        for name in dict.fromkeys(each.group for each in rows)
    }
    groups["measured step x reference epochs, the fastest framework of each setting"] = (
        lambda each: each.group.startswith("measured") and each.is_fastest
    )
    groups["all"] = lambda each: True
    for name, belongs in groups.items():
        some = [each for each in rows if belongs(each)]
        errors = [abs(each.error) for each in some]
        held = [
            (each.predicted.p10_run_seconds or 0)
            <= each.measured_seconds
            <= (each.predicted.p90_run_seconds or 0)
            for each in some
        ]
        within = sum(error <= 0.2 for error in errors)
        print(
            f"| {name} | {len(some)} | {median(errors):.1%} | {within} of {len(some)} "
            f"| {sum(held)} of {len(some)} |"
        )


def main() -> None:
    """Compare, print, write results.json."""
    rows = [*whole_runs(), *composed(Path(sys.argv[1]))]
    print_rows(rows)
    print_summary(rows)
    figures = [
        {
            "group": each.group,
            "name": each.name,
            "devices": each.devices,
            "global_batch": each.global_batch,
            "measured_seconds": each.measured_seconds,
            "predicted_seconds": each.predicted.run_seconds,
            "steps": each.predicted.steps,
            "step_seconds": each.predicted.step_seconds,
        }
        for each in rows
    ]
    (HERE / "results.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
