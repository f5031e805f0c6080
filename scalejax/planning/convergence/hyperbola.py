"""Samples to target as a hyperbola of the batch, with its posterior uncertainty.

    E(B) = E_min (1 + B / B_crit),   S(B) = E(B) / B = S_min (1 + B_crit / B)

which is (S / S_min - 1) (E / E_min - 1) = 1: below the critical batch B_crit samples stay about the
same, above it steps do. Besides its height the curve has one parameter: the share phi of the
samples at a reference batch R that are needed because the batch is large:

    E(B) = E(R) (1 - phi + phi B / R),   phi = R / (R + B_crit), 0 to 1.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", arXiv 1812.06162,
section 2.4 and appendix D.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.planning.convergence.points import Point

Floats = NDArray[np.float64]

SCATTER = 0.05
"""Scale of the half-Cauchy prior of the relative distance of points from their hyperbola: a few per
cent if hyperparameters are tuned at each batch, as experiments/convergence_fit measures on
published points. The form of the prior follows Gelman 2006, Bayesian Analysis 1(3)."""
NOISE_SCALE_DEVIATION = math.log(2)
"""Standard deviation of ln(B_crit / noise scale): the two agree to about a factor of 2
(McCandlish et al. 2018, arXiv 1812.06162, section 3 and figure 4)."""
AVERAGED_DEVIATION = math.log(5.6)
"""Upward standard deviation of ln(B_crit / noise scale) for optimizers other than plain SGD: the
root mean square over Nesterov, Adam, LAMB and LARS, whose critical batches were 4.0, 5.8, 4.8 and
8.0 times the noise scale of SGD on Fashion-MNIST (experiments/critical_batch, one network)."""
_SHARES, _SCATTERS = 160, 48  # cells of the grid
_LEAST_SCATTER, _MOST_SCATTER = 1e-4, 1.0
_NEGLIGIBLE = 1e-9  # probability relative to the largest
_REFINEMENTS = 6
_TAIL = 9.0  # standard deviations beyond which a normal distribution is negligible


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Percentiles of an uncertain quantity."""

    p10: float
    """10th percentile."""
    p50: float
    """Median."""
    p90: float
    """90th percentile."""

    def divided_by(self, divisor: float) -> "Estimate":
        """Estimate of the quantity divided by `divisor`."""
        return Estimate(p10=self.p10 / divisor, p50=self.p50 / divisor, p90=self.p90 / divisor)


@dataclass(frozen=True, slots=True)
class Hyperbola:
    """Posterior over hyperbolas: a grid of them, each with its weight. Made by `fit`.

    Arrays have a row for each pair of a share phi and a scatter, and a column for each recipe.
    """

    points: tuple[Point, ...]
    """Points of the fit."""
    reference_batch: float
    """R: the geometric mean of the points' batches."""
    weights: Floats
    """Probability of each row."""
    shares: Floats
    """phi of each row."""
    scatters: Floats
    """Standard deviation of points about the curve, in ln samples, of each row."""
    levels: Floats
    """Mean of ln E(R) of each row and recipe."""
    level_variances: Floats
    """Variance of ln E(R) of each row and recipe."""
    recipes: tuple[str, ...]
    """Recipe of each column."""
    run_deviation: float
    """Standard deviation between runs of one batch over their mean; 0 if unknown."""

    def samples(
        self, global_batch: int, *, recipe: str | None = None, run_count: int = 1
    ) -> Estimate:
        """Samples that training with `global_batch` needs to reach the target.

        Args:
            global_batch: samples per update over all devices.
            recipe: which recipe; if None or not among the points, that of the point whose batch
                is nearest, as recipes are tuned for a range of batches.
            run_count: number of runs whose mean is estimated.
        """
        require_at_least("global_batch", global_batch, 1)
        require_at_least("run_count", run_count, 1)
        column = self._column(global_batch, recipe)
        means = self.levels[:, column] + _growth(self.shares, global_batch / self.reference_batch)
        between_runs = self.run_deviation**2 / run_count
        variances = self.level_variances[:, column] + self.scatters**2 + between_runs
        found = [_quantile(self.weights, means, np.sqrt(variances), q) for q in (0.1, 0.5, 0.9)]
        p10, p50, p90 = (math.exp(value) for value in found)
        return Estimate(p10=p10, p50=p50, p90=p90)

    def steps(
        self, global_batch: int, *, recipe: str | None = None, run_count: int = 1
    ) -> Estimate:
        """Updates that training with `global_batch` needs to reach the target."""
        samples = self.samples(global_batch, recipe=recipe, run_count=run_count)
        return samples.divided_by(global_batch)

    @property
    def critical_batch(self) -> Estimate:
        """B_crit, at which twice the minimum samples and twice the minimum steps are needed."""
        order = np.argsort(-self.shares)
        cumulated = np.cumsum(self.weights[order])

        def quantile(q: float) -> float:
            share = float(np.interp(q, cumulated, self.shares[order]))
            return self.reference_batch * (1 - share) / share if share else math.inf

        return Estimate(p10=quantile(0.1), p50=quantile(0.5), p90=quantile(0.9))

    def _column(self, global_batch: int, recipe: str | None) -> int:
        if recipe not in self.recipes:
            nearest = min(
                self.points, key=lambda point: abs(math.log(point.global_batch / global_batch))
            )
            recipe = nearest.recipe
        return self.recipes.index(recipe)


def fit(
    points: Sequence[Point], *, noise_scale: float | None = None, is_plain_sgd: bool = True
) -> Hyperbola:
    """Posterior over hyperbolas through `points`.

    Bayes' rule on a grid of (phi, scatter); given those two, the height of each recipe is normal.
    Points are weighted by 1 / (scatter^2 + standard error^2), so that neither many runs of one
    batch nor a point of few runs outvotes the rest. Without a noise scale the prior of phi is
    uniform: a single point then says that other batches need between the same number of samples
    and the same number of steps. The curve never falls, and samples at the smallest batch never
    fall below E_min, whatever the scatter.

    Args:
        points: at least one; samples and batches.
        noise_scale: an estimate of the critical batch from gradients, good to a factor of about 2.
        is_plain_sgd: whether each update follows a single gradient. If not, the critical batch may
            be farther above the noise scale (`AVERAGED_DEVIATION`).

    Raises:
        ConfigError: if there is no point.
    """
    if not points:
        raise ConfigError(refusal("convergence.points", [], "at least one is needed"))
    reference = math.exp(float(np.mean([math.log(point.global_batch) for point in points])))
    deviation = _run_deviation(points)
    above = NOISE_SCALE_DEVIATION if is_plain_sgd else AVERAGED_DEVIATION

    def log_prior(phi: Floats) -> Floats:
        if noise_scale is None:
            return np.zeros_like(phi)
        off = np.log(reference * (1 - phi) / phi / noise_scale)
        off /= np.where(off > 0, above, NOISE_SCALE_DEVIATION)
        # ln B_crit is normal with two half-widths; the last term is the Jacobian to phi.
        return -0.5 * off**2 - np.log(phi * (1 - phi))

    edges = np.linspace(0.0, 1.0, _SHARES + 1)
    found = _posterior(points, reference, deviation, edges, log_prior)
    for _ in range(_REFINEMENTS):
        edges = _finer_where_likely(edges, found)
        found = _posterior(points, reference, deviation, edges, log_prior)
    return found


def _posterior(
    points: Sequence[Point],
    reference: float,
    deviation: float,
    edges: Floats,
    log_prior: Callable[[Floats], Floats],
) -> Hyperbola:
    """Posterior on the grid of shares midway between `edges`, and of scatters.

    Runs that all reached the target at the same evaluation show a deviation of 0, but only because
    evaluations are rare: `deviation`, that of the other points, is used instead.
    """
    recipes = tuple(dict.fromkeys(point.recipe for point in points))
    scatters = np.geomspace(_LEAST_SCATTER, _MOST_SCATTER, _SCATTERS)
    phi = np.repeat((edges[:-1] + edges[1:]) / 2, _SCATTERS)
    tau = np.tile(scatters, _SHARES)
    # The width of a cell: the distance between its edges, and constant in the logarithm of tau.
    chance = np.repeat(np.log(np.diff(edges)), _SCATTERS) + np.log(tau)
    chance += log_prior(phi) - np.log1p((tau / SCATTER) ** 2)
    levels = np.empty((phi.size, len(recipes)))
    variances = np.empty_like(levels)
    for column, recipe in enumerate(recipes):
        mine = [point for point in points if point.recipe == recipe]
        # Relative standard error of the mean of each point's runs.
        errors = np.array([(p.run_deviation or deviation) / math.sqrt(p.run_count) for p in mine])
        weights = 1 / (tau[:, None] ** 2 + errors**2)
        ratios = np.array([point.global_batch / reference for point in mine])
        heights = np.log([point.samples for point in mine]) - _growth(phi[:, None], ratios)
        total = weights.sum(axis=1)
        level = (weights * heights).sum(axis=1) / total
        misfit = (weights * (heights - level[:, None]) ** 2).sum(axis=1)
        chance += 0.5 * (np.log(weights).sum(axis=1) - np.log(total) - misfit)
        levels[:, column], variances[:, column] = level, 1 / total
    probability = np.exp(chance - chance.max())
    return Hyperbola(
        points=tuple(points),
        reference_batch=reference,
        weights=probability / probability.sum(),
        shares=phi,
        scatters=tau,
        levels=levels,
        level_variances=variances,
        recipes=recipes,
        run_deviation=deviation,
    )


def _finer_where_likely(edges: Floats, found: Hyperbola) -> Floats:
    """Refined edges, half of them placed by probability mass and half evenly."""
    mass = found.weights.reshape(_SHARES, _SCATTERS).sum(axis=1)
    cumulated = np.concatenate(([0.0], np.cumsum(mass)))
    mixed = (cumulated / cumulated[-1] + edges) / 2
    return np.interp(np.linspace(0.0, 1.0, _SHARES + 1), mixed, edges)


def _run_deviation(points: Sequence[Point]) -> float:
    """Relative standard deviation between runs of one batch, pooled over all points."""
    known = [(point.run_deviation, point.run_count - 1) for point in points if point.run_deviation]
    freedom = sum(count for _, count in known)
    if not freedom:
        return 0.0
    return math.sqrt(sum(deviation**2 * count for deviation, count in known) / freedom)


def _growth(phi: Floats, ratio: Floats | float) -> Floats:
    """ln E(B) - ln E(R) at B = ratio R."""
    return np.log(1 - phi + phi * ratio)


def _quantile(weights: Floats, means: Floats, deviations: Floats, q: float) -> float:
    """The q-quantile of a mixture of normal distributions."""
    used = weights > _NEGLIGIBLE * weights.max()
    weights, means, deviations = weights[used], means[used], deviations[used]
    total = weights.sum()

    def excess(value: float) -> float:
        return float((weights * ndtr((value - means) / deviations)).sum() / total - q)

    low = float((means - _TAIL * deviations).min())
    high = float((means + _TAIL * deviations).max())
    return cast(float, brentq(excess, low, high, xtol=1e-9))
