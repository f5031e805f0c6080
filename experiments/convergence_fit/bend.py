"""How sharp samples to target bend at the critical batch: what each deviation of ln k makes likely.

python experiments/convergence_fit/bend.py

For every network of MLPerf's reference points the evidence of each k, and from it that of priors.
"""

import math

import numpy as np

from scalejax.planning.convergence import Point, fit
from scalejax.planning.convergence.hyperbola import Floats, bend_prior
from scalejax.validation.convergence import ReferenceRow
from scalejax.validation.kinds import find_ledger, read_any

DEVIATIONS = (0.35, 0.5, math.log(2), 1.0, 1.4)
LEFT_OUT = ("bert", "resnet")
"""Benchmarks that are asked for, which the prior is not to be chosen by."""
LEAST_BATCHES = 4


def curves() -> dict[tuple[str, ...], list[Point]]:
    """Points of each network, data set and target, where there are enough batches."""
    found: dict[tuple[str, ...], list[Point]] = {}
    for row in read_any(find_ledger("convergence_rcp")).rows:
        if isinstance(row, ReferenceRow):
            found.setdefault(row.points_of, []).append(row.point)
    return {
        name: points
        for name, points in found.items()
        if len({point.global_batch for point in points}) >= LEAST_BATCHES
    }


def evidence(points: list[Point]) -> Floats:
    """Probability of the points for each k, over that for k = 1."""
    found = fit(points)
    bends, prior = bend_prior()
    posterior = np.array([found.weights[found.bends == bend].sum() for bend in bends])
    return posterior / prior * prior[0] / posterior[0]


def main() -> None:
    """Print the posterior of k by network, and the evidence of each prior."""
    of = {name: evidence(points) for name, points in curves().items()}
    bends, _ = bend_prior()
    print("evidence over that of k = 1, for k =", " ".join(f"{bend:.2f}" for bend in bends))
    for name, each in of.items():
        print(" ".join(name), " ".join(f"{value:.3g}" for value in each))
    for deviation in DEVIATIONS:
        _, prior = bend_prior(deviation)
        logs = {name: math.log(float(each @ prior)) for name, each in of.items()}
        others = sum(value for name, value in logs.items() if name[-1] not in LEFT_OUT)
        print(f"deviation {deviation:.2f}: ln evidence of all {sum(logs.values()):+.2f}, "
              f"without {' and '.join(LEFT_OUT)} {others:+.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
