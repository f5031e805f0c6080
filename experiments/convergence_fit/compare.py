"""Every published convergence point, predicted by a fit that has not seen it.

python experiments/convergence_fit/compare.py ../shared/ledger/convergence_rcp.csv
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from rows import NETWORKS, published_rows

from scalejax.planning.convergence import Estimate, Hyperbola, Point, fit

HERE = Path(__file__).parent
GROUPS = {
    "ResNet-50": ("resnet50",),
    "BERT": ("bert_large",),
    "SSD": ("ssd_resnet34", "retinanet"),
}
"""Networks of the rows that are asked for; "ssd" is two networks in the course of the rounds."""

Method = Callable[[Sequence[Point], Point], Estimate]
"""What points say of another, of which batch, recipe and number of runs may be looked at."""


def by_hyperbola(seen: Sequence[Point], left_out: Point) -> Estimate:
    """What scalejax does."""
    return _asked(fit(seen), left_out)


def without_recipes(seen: Sequence[Point], left_out: Point) -> Estimate:
    """The same, all points taken for one recipe."""
    return _asked(fit([_renamed(point) for point in seen]), left_out)


def same_samples(seen: Sequence[Point], left_out: Point) -> Estimate:
    """No curve: the samples of the points of its recipe, whatever the batch."""
    alike = [point for point in seen if point.recipe == left_out.recipe] or seen
    mean = math.exp(fmean(math.log(point.samples) for point in alike))
    return Estimate(p10=mean, p50=mean, p90=mean)


def squared(seen: Sequence[Point], left_out: Point) -> Estimate:
    """A curve that bends: the hyperbola over the square of the batch."""

    def over_square(point: Point) -> Point:
        return replace(point, global_batch=point.global_batch**2)

    return _asked(fit([over_square(point) for point in seen]), over_square(left_out))


METHODS: dict[str, Method] = {
    "hyperbola": by_hyperbola,
    "one recipe": without_recipes,
    "same samples": same_samples,
    "squared batch": squared,
}


def _asked(hyperbola: Hyperbola, of: Point) -> Estimate:
    return hyperbola.samples(of.global_batch, recipe=of.recipe, run_count=of.run_count)


def _renamed(point: Point) -> Point:
    return replace(point, recipe="")


def left_out(points: Sequence[Point], method: Method) -> list[Estimate]:
    """Each point as the others predict it."""
    return [
        method([*points[:index], *points[index + 1 :]], point) for index, point in enumerate(points)
    ]


def error(estimate: Estimate, point: Point) -> float:
    """(predicted - measured) / measured."""
    return estimate.p50 / point.samples - 1


def main() -> None:
    """Print every row and the medians; write results.json."""
    rows = published_rows(Path(sys.argv[1]))
    points = {name: [row.point for row in rows if row.network == name] for name in NETWORKS}
    found = {
        title: {name: left_out(of, method) for name, of in points.items()}
        for title, method in METHODS.items()
    }
    print("| network | batch | recipe | runs | samples measured | predicted | error | p10 | p90 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, of in points.items():
        for point, estimate in zip(of, found["hyperbola"][name], strict=True):
            print(
                f"| {name} | {point.global_batch} | {point.recipe} | {point.run_count} "
                f"| {point.samples:,.0f} | {estimate.p50:,.0f} | {error(estimate, point):+.1%} "
                f"| {estimate.p10:,.0f} | {estimate.p90:,.0f} |"
            )
    print(f"\n| rows | {' | '.join(METHODS)} | in p10 to p90 |")
    print("|---|" + "---|" * (len(METHODS) + 1))
    groups = {**GROUPS, "all of these": tuple(name for group in GROUPS.values() for name in group)}
    groups |= {name: (name,) for name in NETWORKS if name not in ("resnet50", "bert_large")}
    for title, names in groups.items():
        print(f"| {title} | {summary(names, points, found)} |")
    figures = {
        name: {
            str(point.global_batch): [point.samples, estimate.p10, estimate.p50, estimate.p90]
            for point, estimate in zip(of, found["hyperbola"][name], strict=True)
        }
        for name, of in points.items()
    }
    (HERE / "results.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def summary(
    names: Sequence[str],
    points: dict[str, list[Point]],
    found: dict[str, dict[str, list[Estimate]]],
) -> str:
    """Median absolute error of each method, and how many rows the band holds."""
    cells = []
    for of in found.values():
        errors = [
            abs(error(estimate, point))
            for name in names
            for estimate, point in zip(of[name], points[name], strict=True)
        ]
        cells.append(f"{median(errors):.1%}")
    held = [
        estimate.p10 <= point.samples <= estimate.p90
        for name in names
        for estimate, point in zip(found["hyperbola"][name], points[name], strict=True)
    ]
    return f"{' | '.join(cells)} | {sum(held)} of {len(held)}"


if __name__ == "__main__":
    main()
