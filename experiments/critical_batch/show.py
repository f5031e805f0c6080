"""What `results.json` says: critical batches, and the noise scale beside that of SGD.

    python experiments/critical_batch/show.py

Prints the tables of the README and draws steps.png.
"""

import json
from pathlib import Path
from statistics import fmean, mean

from matplotlib import pyplot
from measure import EXAMPLES, TARGET, best_rate, beyond_edge

from scalejax.planning.convergence import Hyperbola, fit
from scalejax.planning.convergence.points import Point, point_of_runs
from scalejax.training.noise_scale import averaged

HERE = Path(__file__).parent
Grids = dict[int, dict[float, list[float | None]]]
Curves = dict[int, list[list[tuple[int, float | None]]]]


def best_points(grids: Grids) -> tuple[dict[int, float], list[Point]]:
    """The best rate of each batch, and samples to target with it; where it is inside the grid."""
    rates = {
        batch: rate
        for batch, grid in grids.items()
        if (rate := best_rate(grid)) is not None and not beyond_edge(grid)
    }
    reached = {
        batch: [steps * batch for steps in grids[batch][rate] if steps is not None]
        for batch, rate in rates.items()
    }
    return rates, [point_of_runs(samples, batch) for batch, samples in reached.items()]


def print_steps(rates: dict[str, dict[int, float]], points: dict[str, list[Point]]) -> None:
    """Steps to target and the rate that needed the fewest."""
    print(f"| batch | {' | '.join(points)} |")
    print("|---|" + "---|" * len(points))
    for batch in sorted({each.global_batch for of in points.values() for each in of}):
        cells = []
        for name, of in points.items():
            steps = [each.samples / batch for each in of if each.global_batch == batch]
            cells.append(f"{steps[0]:.0f} ({rates[name][batch]:.2g})" if steps else "not tuned")
        print(f"| {batch} | {' | '.join(cells)} |")


def print_critical(curves: dict[str, Hyperbola]) -> None:
    """Critical batches with their ranges."""
    print("\n| optimizer | critical batch | p10 to p90 | steps at batch 2048 by the fit |")
    print("|---|---|---|---|")
    for name, curve in curves.items():
        at = curve.critical_batch
        steps = curve.steps(2048).p50
        print(f"| {name} | {at.p50:.0f} | {at.p10:.0f} to {at.p90:.0f} | {steps:.0f} |")


def print_noise(noise: Curves, critical: float) -> None:
    """The noise scale by where in training it is taken, means of seeds."""
    columns = "first tenth", "mean over steps", "mean over progress", "last tenth"
    print(f"\n| batch | {' | '.join(columns)} | over progress / critical batch of SGD |")
    print("|---|" + "---|" * (len(columns) + 1))
    found = []
    for batch, runs in noise.items():
        rows = []
        for curve in runs:
            scales = [scale for _, scale in curve if scale is not None]
            tenth = max(1, len(scales) // 10)
            over_progress = averaged(scales, batch)
            assert over_progress is not None  # noqa: S101  it was measured
            parts = (fmean(scales[:tenth]), fmean(scales), over_progress, fmean(scales[-tenth:]))
            rows.append(parts)
        means = [mean(column) for column in zip(*rows, strict=True)]
        found.append(means)
        cells = " | ".join(f"{each:.0f}" for each in means)
        print(f"| {batch} | {cells} | {means[2] / critical:.2f} |")
    means = [mean(column) for column in zip(*found, strict=True)]
    cells = " | ".join(f"{each:.0f}" for each in means)
    print(f"| all | {cells} | {means[2] / critical:.2f} |")


def draw(points: dict[str, list[Point]], curves: dict[str, Hyperbola], noise: Curves) -> None:
    """Steps to target with their hyperbolas; the noise scale in training."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    batches = [2 ** (each / 4) for each in range(16, 45)]
    for color, (name, of) in enumerate(points.items()):
        at = curves[name].critical_batch
        label = f"{name}: {at.p50:.0f} ({at.p10:.0f} to {at.p90:.0f})"
        drawn = [curves[name].steps(round(batch)).p50 for batch in batches]
        left.plot(batches, drawn, color=f"C{color}", linewidth=1)
        marks = [(each.global_batch, each.samples / each.global_batch) for each in of]
        left.plot(*zip(*marks, strict=True), "o", color=f"C{color}", label=label, markersize=4)
    left.set(xscale="log", yscale="log", xlabel="global batch, samples", ylabel="steps to target")
    left.legend(title="critical batch (p10 to p90)", fontsize=8)
    left.set_title(f"Fashion-MNIST, MLP, to a test loss of {TARGET}", fontsize=10)
    shown = {batch: runs for batch, runs in noise.items() if batch in (16, 64, 256, 1024)}
    for color, (batch, runs) in enumerate(shown.items()):
        for number, curve in enumerate(runs):
            end = curve[-1][0]
            line = [(step / end, scale) for step, scale in curve if scale is not None]
            label = f"batch {batch}" if number == 0 else None
            right.plot(*zip(*line, strict=True), color=f"C{color}", linewidth=0.8, label=label)
    at = curves["sgd"].critical_batch
    right.axhline(at.p50, color="black", label="critical batch of SGD")
    right.axhspan(at.p50 / 2, at.p50 * 2, color="black", alpha=0.1, label="a factor of 2")
    right.set(yscale="log", xlabel="part of the steps to target", ylabel="noise scale, samples")
    right.legend(fontsize=7, ncols=2)
    right.set_title("gradient noise scale in training with SGD", fontsize=10)
    figure.savefig(HERE / "steps.png", dpi=80)


def main() -> None:
    """Print and draw."""
    document = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    grids = {
        name: {int(b): {float(r): s for r, s in grid.items()} for b, grid in of.items()}
        for name, of in document["steps"].items()
    }
    noise: Curves = {
        int(batch): [[(step, scale) for step, scale in curve] for curve in runs]
        for batch, runs in document["noise"].items()
    }
    tuned = {name: best_points(of) for name, of in grids.items()}
    rates = {name: of_name[0] for name, of_name in tuned.items()}
    points = {name: of_name[1] for name, of_name in tuned.items()}
    curves = {name: fit(of) for name, of in points.items()}
    print(f"Steps to a test loss of {TARGET} (best rate); an epoch has {EXAMPLES} samples.\n")
    print_steps(rates, points)
    print_critical(curves)
    print_noise(noise, curves["sgd"].critical_batch.p50)
    draw(points, curves, noise)


if __name__ == "__main__":
    main()
