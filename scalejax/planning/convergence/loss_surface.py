"""Final loss of a language model over its parameters, tokens, batch and learning rate.

    L = E + A N^-a S^s + sum over k of C_k lr^p_k B^q_k N^u_k D^v_k S^w_k

Every term is a power law, so L is convex in the logarithms: at given N and D there is one best
batch and rate, and each term extrapolates beyond the data as it is. N is the number of parameters
without embeddings (experts included), S = experts over experts of a token (1 where dense), D the
tokens, B the tokens of an update. The first two terms are those of Hoffmann et al. 2022, arXiv
2203.15556, equation 2. The terms of the sum, as they come out of the fit, are missing tokens (which
the rate trades off), the noise of small batches, the heat of high rates, and too few updates. The
best batch and rate come from a `Valley`, fitted only to runs near the best of their size and
tokens: far from the best the sum is less steep than the runs are, and would shift the best rate to
compensate. Whether a run diverges is a logistic regression on the same logarithms.

Arithmetic alone: `experiments/loss_model` finds the constants.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares
from scipy.special import expit

from scalejax.core import serialization
from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.planning.convergence.hyperbola import Estimate

Floats = NDArray[np.float64]

_PUBLISHED = Path(__file__).parent / "published" / "loss_surface.json"
_ORIGIN = np.log([2e-3, 524288.0, 4e8, 2e10, 1.0])
"""Logarithms of (rate, batch in tokens, parameters, tokens, sparsity) at which constants hold."""
_COLUMNS = ("learning_rate", "batch_tokens", "parameters", "tokens", "sparsity")
_START = np.array(
    [
        # ln C, then exponents of rate, batch, parameters, tokens, sparsity
        [-1.5, -0.2, 0.1, 0.0, -0.3, 0.0],  # missing tokens
        [-3.5, 0.4, -0.7, 0.3, 0.0, 0.0],  # noise of small batches
        [-4.0, 1.0, 0.0, 0.7, -0.3, 0.0],  # heat of high rates
        [-4.0, -0.3, 0.7, 0.0, -0.7, 0.0],  # too few updates
    ]
)
_START_BASE = np.array([1.3, -0.3, 0.25, 0.05])  # E, ln A, a, s
_PRIOR = 0.05
"""Weight of the start in a fit: a constant that the runs do not determine stays there."""
_EXPONENT_DEVIATION, _COEFFICIENT_DEVIATION = 0.05, 1.0
"""Assumed deviations of the exponents, and of the logarithms of the coefficients, of another corpus
from those of a known one."""
_TOLERANCE = 0.02
"""Mean error of the largest runs up to which a ladder counts as having foretold them."""
_LEAST_RUNGS = 3
_SCATTER = 0.004
"""Scale of a run's ln loss about its surface in a fit, beyond which the loss function is linear."""
DIVERGED = 1.2
"""Loss, over the least of runs of equal size and tokens, above which a run counts as diverged: four
of 1,360 published runs lie between 1.15 and 2."""
DIVERGES_ABOVE = 0.1
"""Probability of divergence above which a run is said to diverge: the share of the published dense
runs that did, so that the two errors are about equally likely."""
NEAR = 0.006
"""Width of the normal weights in the fit of a valley, over the loss relative to the least of a
cell. Chosen by sizes left out within those that remain
(`experiments/loss_model/fit.py`)."""
_LEAST_WEIGHT = 1e-3
"""Weight below which a run is left out of the fit of a valley."""
_NOISE = 0.0015
"""Scale of a run's ln loss about its valley in a fit, beyond which the loss function is linear:
0.08 to 0.18 % in each of the published cells (same source)."""
AGREED = 0.005
"""Loss of the sum at the valley's best over the sum's least, less one, up to which the valley alone
decides the best batch and rate: 0.30 % at most in the published cells."""
VALLEY_DEVIATION = 0.3
"""Assumed deviation of the exponents of a valley from those of `_START_VALLEY` in a fit."""
_START_VALLEY = np.array(
    [
        *(0.0, -0.5, 0.25, 0.0),  # ln of the best rate at the origin, exponents of N, D, S
        *(0.0, 0.0, 0.5, 0.0),  # the same for the best batch
        *(-4.6, 0.0, 0.0),  # ln of the curvature over the rate at the origin, exponents of N, D
        *(-4.6, 0.0, 0.0),  # over the batch
        0.0,  # inverse hyperbolic tangent of the correlation
    ]
)
_VALLEY_PARTS = np.cumsum([4, 4, 3, 3])
_VALLEY_COEFFICIENTS = [0, 4, 8, 11, 14]
_MOST_CORRELATION = 0.999
FITTED = 1.1
"""Loss, over the least of runs of equal size and tokens, up to which a run is fitted."""
_Z90 = 1.2815515655446004
_LEAST_TOKENS, _MOST_TOKENS = 1e7, 1e18
"""Range in which the tokens to a loss are searched."""
_SCALES = 0.3, 3.0
"""Range of the scale of an anchor: nats per token differ by less between tokenizers and texts."""
_ROUNDING = 1 + 1e-9
_NEARLY = 1.05
"""Factor up to which a size counts as equal to that of the nearest run."""
_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRun:
    """A pretraining run of a decoder: the quantities that its final loss depends on."""

    parameters: float
    """Parameters without embeddings, all experts included."""
    tokens: float
    """Tokens trained on."""
    batch_tokens: float
    """Tokens of an update."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    sparsity: float = 1.0
    """Width of all experts over that of a token's, shared ones included in both; 1 where dense."""
    loss: float | None = None
    """Final loss, nats per token; None if it is not known."""

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens", "batch_tokens", "learning_rate", "loss"):
            require_above(name, getattr(self, name), 0)
        require_at_least("sparsity", self.sparsity, 1)

    @property
    def cell(self) -> tuple[float, float, float]:
        """Key shared by runs that differ only in batch and rate."""
        return self.parameters, self.sparsity, self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The batch and learning rate of least loss."""

    batch_tokens: float
    """Tokens of an update."""
    learning_rate: float
    """Peak learning rate."""
    loss: float
    """Final loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Valley:
    """Where loss is least over batch and rate, and how it rises away from there:

        ln L = ln L_least + (k_lr x^2 + 2 r sqrt(k_lr k_B) x y + k_B y^2) / 2

    x and y are ln lr and ln B less those of the best; ln lr_best, ln B_best, ln k_lr and ln k_B are
    linear in ln N and ln D (the first two in ln S too) about `_ORIGIN`. The valley does not include
    L_least.
    """

    rate: tuple[float, ...]
    """ln of the best rate at the origin over the origin's, then exponents of parameters, tokens and
    sparsity."""
    batch: tuple[float, ...]
    """The same for the best batch."""
    rate_curvature: tuple[float, ...]
    """ln of the curvature of ln loss over ln rate, exponents of parameters and tokens."""
    batch_curvature: tuple[float, ...]
    """The same over ln batch."""
    correlation: float
    """r, above -1 and below 1; negative if the best rate rises with the batch."""

    def rise(self, run: LanguageRun) -> float:
        """ln loss of `run` above that of the best batch and rate of its size and tokens."""
        return float(_rises(_valley_vector(self), _logarithms([run]))[0])

    def least(self, sizes: Sequence[float], batch_tokens: float | None) -> tuple[float, float]:
        """Rate and batch of least loss at (parameters, tokens, sparsity), and at that batch if it
        is given."""
        n, d, s = np.log(sizes) - _ORIGIN[2:]
        log_rate = float(np.dot(self.rate, (1, n, d, s)) + _ORIGIN[0])
        log_batch = float(np.dot(self.batch, (1, n, d, s)) + _ORIGIN[1])
        if batch_tokens is None:
            return math.exp(log_rate), math.exp(log_batch)
        curvatures = np.subtract(self.batch_curvature, self.rate_curvature)
        slope = -self.correlation * math.exp(0.5 * float(np.dot(curvatures, (1, n, d))))
        return math.exp(log_rate + slope * (math.log(batch_tokens) - log_batch)), batch_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Constants of a loss surface."""

    base: tuple[float, ...]
    """E, ln A, a, s."""
    terms: tuple[tuple[float, ...], ...]
    """ln C and the exponents of each term of the sum."""
    valley: Valley | None = None
    """Where the best batch and rate are; if None, or if the two disagree, they are where the sum of
    `terms` is least."""

    def loss(self, run: LanguageRun) -> float:
        """Final loss of `run`, if it does not diverge."""
        return float(_losses(_vector(self), _logarithms([run]))[0])

    def best(
        self,
        parameters: float,
        tokens: float,
        sparsity: float = 1.0,
        *,
        batch_tokens: float | None = None,
    ) -> Optimum:
        """The best rate, and the best batch unless it is given.

        If the sum of `terms` has a much higher loss at the valley's best than at its own, the two
        disagree, and rate and batch shift to those of the sum (`AGREED`): as the sum is convex, the
        loss is at most 0.67 % above its least.

        The more the least loss at a given batch is above that of the best batch, the more its rate
        is that of `terms`, by the weight that such a run had in the fit of `valley`.
        """
        sizes = [parameters, tokens, sparsity]
        if self.valley is None:
            return self._at(*_least(self.terms, sizes, batch_tokens), sizes)
        agreement, free = self._free(self.valley, sizes)
        if batch_tokens is None:
            return free
        found, batch = self.valley.least(sizes, batch_tokens)
        other = self._at(*_least(self.terms, sizes, batch_tokens), sizes)
        off = max(0.0, other.loss / free.loss - 1)
        share = agreement * float(_nearness(np.array(off), NEAR))
        rate = other.learning_rate * (found / other.learning_rate) ** share
        return self._at(rate, batch, sizes)

    def disagreement(self, parameters: float, tokens: float, sparsity: float = 1.0) -> float:
        """Loss of the sum at the valley's best over the sum's least, less one; 0 without a
        valley."""
        sizes = [parameters, tokens, sparsity]
        if self.valley is None:
            return 0.0
        least = self._at(*_least(self.terms, sizes, None), sizes)
        return self._at(*self.valley.least(sizes, None), sizes).loss / least.loss - 1

    def _free(self, valley: Valley, sizes: Sequence[float]) -> tuple[float, Optimum]:
        """The valley's share in the best batch and rate, 0..1, and the optimum."""
        beyond = self.disagreement(*sizes) - AGREED
        there = valley.least(sizes, None)
        if beyond <= 0:
            return 1.0, self._at(*there, sizes)
        share = float(_nearness(np.array(beyond), AGREED))
        least = _least(self.terms, sizes, None)
        rate, batch = (b * (v / b) ** share for v, b in zip(there, least, strict=True))
        return share, self._at(rate, batch, sizes)

    def _at(self, rate: float, batch: float, sizes: Sequence[float]) -> Optimum:
        """A rate and a batch with their loss, at (parameters, tokens, sparsity)."""
        parameters, tokens, sparsity = sizes
        run = LanguageRun(
            parameters=parameters,
            tokens=tokens,
            batch_tokens=batch,
            learning_rate=rate,
            sparsity=sparsity,
        )
        return Optimum(batch_tokens=batch, learning_rate=rate, loss=self.loss(run))

    def least_loss(self, parameters: float, sparsity: float = 1.0) -> float:
        """Loss below which no number of tokens goes: the first two terms."""
        floor, log_a, a, s = self.base
        log_n = math.log(parameters) - _ORIGIN[2]
        return floor + math.exp(log_a - a * log_n + s * math.log(sparsity))

    def tokens_to(
        self,
        loss: float,
        parameters: float,
        sparsity: float = 1.0,
        *,
        batch_tokens: float | None = None,
    ) -> float | None:
        """Tokens until `loss`, at the best rate and the best or the given batch; None if no number
        of tokens reaches it."""

        def excess(log_tokens: float) -> float:
            best = self.best(parameters, math.exp(log_tokens), sparsity, batch_tokens=batch_tokens)
            return best.loss - loss

        # Beyond the minimum of the curve more tokens only add noise: look no further.
        logs = np.linspace(math.log(_LEAST_TOKENS), math.log(_MOST_TOKENS), 60)
        low = float(logs[0])
        for high in logs[1:]:
            if excess(float(high)) <= 0:
                if excess(low) <= 0:
                    return math.exp(low)
                return math.exp(cast(float, brentq(excess, low, float(high), xtol=1e-7)))
            low = float(high)
        return None


@serialization.document("loss_model")
@dataclass(frozen=True, slots=True, kw_only=True)
class LossModel:
    """A surface and its uncertainty."""

    name: str
    """Name of its runs."""
    surface: Surface
    """Fitted to all runs."""
    cells: tuple[tuple[float, float, float], ...]
    """Parameters, sparsity and tokens of its runs."""
    left_out: tuple[Surface, ...]
    """Surfaces fitted without the runs of each of the cells: their spread is the jackknife's (Efron
    & Tibshirani 1993, chapter 11)."""
    divergence: tuple[float, ...]
    """Logistic regression of divergence: a constant and a slope for each logarithm; empty if no run
    diverged."""
    deviation: float
    """Standard deviation of ln loss of runs whose size and tokens were left out."""
    deviation_beyond: float
    """Further standard deviation of ln loss for each factor e beyond the runs in parameters, tokens
    or sparsity, measured by leaving out the largest sizes and numbers of tokens."""
    batches: tuple[float, float] | None = None
    """Least and most tokens of an update in its runs; None if it holds at any."""
    optimizer: str = "adamw"
    """Name of the optimizer of its runs."""
    scale: float = 1.0
    """Factor of the loss, by which it is anchored to another corpus."""
    scale_deviation: float = 0.0
    """Standard deviation of ln scale."""
    anchored_beyond: tuple[str, ...] = ()
    """Where its anchor lies beyond its runs, in words."""
    context: tuple[str, ...] = ()
    """What all its runs have in common: corpus, optimizer, schedule."""
    shown: dict[str, float] = field(default_factory=dict)
    """Factor beyond the smaller runs, in parameters and tokens by name, up to which it was shown to
    hold, and so up to which it is used beyond its runs; empty without such a limit."""

    def loss(self, run: LanguageRun) -> Estimate:
        """Final loss of `run`, if it does not diverge."""
        middle = self.scale * self.surface.loss(run)
        others = [math.log(each.loss(run) * self.scale / middle) for each in self.left_out]
        spread = math.hypot(_jackknife(others), self._apart(run))
        off = math.exp(_Z90 * spread)
        return Estimate(p10=middle / off, p50=middle, p90=middle * off)

    def best(
        self,
        parameters: float,
        tokens: float,
        sparsity: float = 1.0,
        *,
        batch_tokens: float | None = None,
    ) -> Optimum:
        """See `Surface.best`."""
        found = self.surface.best(parameters, tokens, sparsity, batch_tokens=batch_tokens)
        return replace(found, loss=found.loss * self.scale)

    def tokens_to(
        self,
        loss: float,
        parameters: float,
        sparsity: float = 1.0,
        *,
        batch_tokens: float | None = None,
    ) -> Estimate:
        """Tokens until `loss`, with the band of the loss converted to tokens.

        A percentile that no number of tokens reaches is infinite.

        Raises:
            ConfigError: if the median does not reach it.
        """
        target = loss / self.scale
        middle = self.surface.tokens_to(target, parameters, sparsity, batch_tokens=batch_tokens)
        if middle is None:
            least = self.scale * self.surface.least_loss(parameters, sparsity)
            accepted = (
                f"{parameters:.3g} parameters do not reach it with any number of tokens"
                f"{'' if batch_tokens is None else ' at this batch'}: the least is above "
                f"{least:.4g}; take a larger network"
            )
            raise ConfigError(refusal("target loss", loss, accepted))
        if middle <= _LEAST_TOKENS * _ROUNDING:
            accepted = (
                f"{parameters:.3g} parameters reach it with less than {_LEAST_TOKENS:.3g} tokens, "
                "and no run has so few; ask for a lower loss"
            )
            raise ConfigError(refusal("target loss", loss, accepted))
        best = self.surface.best(parameters, middle, sparsity, batch_tokens=batch_tokens)
        run = LanguageRun(
            parameters=parameters,
            tokens=middle,
            batch_tokens=best.batch_tokens,
            learning_rate=best.learning_rate,
            sparsity=sparsity,
        )
        band = self.loss(run)
        found = [
            self.surface.tokens_to(target * factor, parameters, sparsity, batch_tokens=batch_tokens)
            for factor in (band.p50 / band.p10, band.p50 / band.p90)
        ]
        early, late = (math.inf if each is None else each for each in found)
        return Estimate(p10=early, p50=middle, p90=late)

    def without(self, cell: tuple[float, float, float]) -> "LossModel":
        """The model with the surface that was fitted without the runs of `cell`; itself if it has
        no such runs."""
        if cell not in self.cells:
            return self
        return replace(self, surface=self.left_out[self.cells.index(cell)])

    def ranges_of(self, sparsity: float) -> dict[str, tuple[float, float]]:
        """Ranges of parameters, sparsity and tokens of its runs: of its dense runs if `sparsity` is
        that of a dense network, else of those with experts; of all if it has none of the kind."""
        same = [cell for cell in self.cells if (cell[1] > 1) == (sparsity > 1)] or self.cells
        columns = zip(("parameters", "sparsity", "tokens"), zip(*same, strict=True), strict=True)
        return {what: (min(values), max(values)) for what, values in columns}

    def divergence_probability(self, run: LanguageRun) -> float:
        """Probability that `run` diverges, 0..1; 0 where no run of the surface did."""
        if not self.divergence:
            return 0.0
        return float(expit(_with_constant(_logarithms([run])) @ np.array(self.divergence))[0])

    def require_shown(self, parameters: float, tokens: float, sparsity: float = 1.0) -> None:
        """Refuse parameters or tokens beyond the runs by more than was `shown`.

        Raises:
            ConfigError: if they are.
        """
        ranges = self.ranges_of(sparsity)
        for name, value in (("parameters", parameters), ("tokens", tokens)):
            if (factor := self.shown.get(name)) is None:
                continue
            most = ranges[name][1]
            if value > most * factor * _ROUNDING:
                accepted = (
                    f"the ladder goes to {most:.3g}, and of its own largest runs it foretold those "
                    f"up to {factor:.3g} times as large as what it was fitted to within "
                    f"{_TOLERANCE:.0%}: it holds to {most * factor:.3g}; train a larger rung"
                )
                raise ConfigError(refusal(name, f"{value:.3g}", accepted))

    def beyond(
        self,
        parameters: float,
        tokens: float,
        sparsity: float = 1.0,
        *,
        batch_tokens: float | None = None,
    ) -> tuple[str, ...]:
        """Where such a run lies beyond those that the surface was fitted to, in words; without
        `batch_tokens`, its batch is not checked."""
        found = []
        values = {"parameters": parameters, "tokens": tokens, "sparsity": sparsity}
        ranges = self.ranges_of(sparsity)
        if batch_tokens is not None and self.batches is not None:
            values["batch_tokens"], ranges["batch_tokens"] = batch_tokens, self.batches
        for what, (least, most) in ranges.items():
            value = values[what]
            if value > most * _NEARLY:
                found.append(f"{value / most:.3g} times the most {what} of a run ({most:.3g})")
            elif value * _NEARLY < least:
                found.append(f"{least / value:.3g} times fewer {what} than any run ({least:.3g})")
        return tuple(found)

    def batch_factor(self, batch_tokens: float) -> float:
        """Factor by which a batch is beyond those of its runs, on either side; 1 within them."""
        least, most = self.batches or (batch_tokens, batch_tokens)
        return max(1.0, batch_tokens / most, least / batch_tokens)

    def deviation_of_distance(self, run: LanguageRun) -> float:
        """Deviation of ln loss due to how far `run` is beyond its runs in each quantity."""
        far = [math.log(self.batch_factor(run.batch_tokens))]
        for what, (least, most) in self.ranges_of(run.sparsity).items():
            value = getattr(run, what)
            far.append(max(0.0, math.log(value / most), math.log(least / value)))
        return self.deviation_beyond * math.hypot(*far)

    def _apart(self, run: LanguageRun) -> float:
        """Deviation of ln loss other than that of the constants."""
        return math.hypot(self.deviation, self.scale_deviation, self.deviation_of_distance(run))


def _jackknife(logs: Sequence[float]) -> float:
    """Standard deviation from the values found with each of n parts left out."""
    if len(logs) < 2:
        return 0.0
    return float(np.std(logs) * math.sqrt(len(logs) - 1))


@cache
def published_surface() -> LossModel:
    """The surface of 2,089 published runs of dense decoders and of mixtures of experts (Step Law,
    Li et al. 2025, arXiv 2503.04715), as `experiments/loss_model/fit.py` wrote it."""
    return serialization.load(LossModel, _PUBLISHED)


def anchored(model: LossModel, anchors: Sequence[LanguageRun]) -> LossModel:
    """`model` with its losses scaled so that they agree with runs of another corpus or vocabulary.

    One factor scales all losses, the geometric mean over `anchors`: nats per token differ with the
    length of the tokens and the difficulty of the text. The band includes the spread of several
    anchors and their distance from the runs of `model`, but not how the exponents change.

    Raises:
        ConfigError: if there is no run, or one without a loss, or no corpus has such a factor.
    """
    logs = [math.log(each.loss / model.surface.loss(each)) for each in anchors if each.loss]
    if not logs or len(logs) < len(anchors):
        raise ConfigError(refusal("anchor", "no loss", "each needs a loss, and one is needed"))
    # A run differs from the surface by its own scatter, however many agree.
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else model.deviation
    scale = math.exp(float(np.mean(logs)))
    if not _SCALES[0] <= scale <= _SCALES[1]:
        accepted = (
            f"its loss is {scale:.4g} times what {model.name} says, and of another corpus or "
            f"vocabulary that is {_SCALES[0]:g} to {_SCALES[1]:g}; loss is in nats per token"
        )
        raise ConfigError(refusal("anchor loss", anchors[0].loss, accepted))
    # The uncertainty of a surface far from its runs is common to several anchors there.
    apart = float(np.mean([model.deviation_of_distance(each) for each in anchors]))
    beyond = [
        words
        for each in anchors
        for words in model.beyond(
            each.parameters, each.tokens, each.sparsity, batch_tokens=each.batch_tokens
        )
    ]
    return replace(
        model,
        scale=scale,
        scale_deviation=math.hypot(max(spread, model.deviation) / math.sqrt(len(logs)), apart),
        anchored_beyond=tuple(dict.fromkeys(beyond)),
    )


def measured_best(runs: Sequence[LanguageRun]) -> dict[tuple[float, float, float], float]:
    """The least loss of each size and number of tokens."""
    best: dict[tuple[float, float, float], float] = {}
    for run in runs:
        if run.loss is not None:
            best[run.cell] = min(best.get(run.cell, math.inf), run.loss)
    return best


def relative_loss(runs: Sequence[LanguageRun]) -> Floats:
    """Loss of each run over the least of its size and tokens."""
    best = measured_best(runs)
    return np.array([(run.loss or math.nan) / best[run.cell] for run in runs])


def fit_surface(
    runs: Sequence[LanguageRun],
    near: Surface | None = None,
    *,
    start: Surface | None = None,
    weights: Floats | None = None,
) -> Surface:
    """The surface of least misfit in ln loss, by Huber-like least squares.

    Args:
        runs: runs with losses that did not diverge, such as those up to `FITTED`.
        near: surface of another corpus, whose exponents are assumed to be close to those of `runs`,
            and whose coefficients may be anything; None to fit `runs` alone.
        start: start of a fit without `near`, with as many terms as the surface is to have; None for
            the four of `_START`.
        weights: weight of the squared misfit of each run; None for 1.

    Raises:
        ConfigError: if there are fewer runs than constants, and `near` is None.
    """
    known, prior = _known(near, start)
    if near is None and len(runs) < known.size:
        accepted = f"a surface of {known.size} constants needs as many runs"
        raise ConfigError(refusal("runs", len(runs), accepted))
    found = _fitted(runs, known, prior, np.ones(len(runs)) if weights is None else weights)
    return Surface(base=tuple(map(float, found[:4])), terms=_terms(found))


def with_valley(
    surface: Surface,
    runs: Sequence[LanguageRun],
    near: Surface | None = None,
    *,
    width: float = NEAR,
    curvature_deviation: float = VALLEY_DEVIATION,
) -> Surface:
    """`surface`, fitted to `runs`, with the valley of those near the best of their cell.

    The least loss of every cell is free, so that the errors of the surface's sum do not move the
    valley.

    Args:
        surface: what the valley is added to.
        runs: runs with losses that did not diverge.
        near: surface of another corpus, whose valley is assumed to be close to that of `runs`. With
            None, or one without a valley, `runs` are fitted alone; if they are fewer than the
            constants, no valley is added.
        width: see `NEAR`.
        curvature_deviation: as `VALLEY_DEVIATION`, for the exponents of the two curvatures.
    """
    weights = _nearness(relative_loss(runs) - 1, width)
    counted = weights > _LEAST_WEIGHT
    cells = sorted(measured_best(runs))
    kept = [run for run, is_near in zip(runs, counted, strict=True) if is_near]
    weights = weights[counted]
    which = np.array([cells.index(run.cell) for run in kept])
    valley = near.valley if near else None
    if valley is None and weights.sum() < _START_VALLEY.size + len(cells):
        return surface
    known = _START_VALLEY if valley is None else _valley_vector(valley)
    prior = np.full(known.size, 1 / (VALLEY_DEVIATION if valley is None else _EXPONENT_DEVIATION))
    prior[[9, 10, 12, 13]] = 1 / (curvature_deviation if valley is None else _EXPONENT_DEVIATION)
    prior[_VALLEY_COEFFICIENTS] = _PRIOR if valley is None else 1 / _COEFFICIENT_DEVIATION
    logs, measured = _logarithms(kept), np.log([run.loss or math.nan for run in kept])
    scale = np.sqrt(weights) / _NOISE
    total = np.bincount(which, weights)

    def misfits(vector: Floats) -> Floats:
        least = measured - _rises(vector, logs)
        means = np.bincount(which, weights * least) / total
        return np.concatenate([(least - means[which]) * scale, prior * (vector - known)])

    found = least_squares(misfits, known, loss="soft_l1", max_nfev=200).x  # type: ignore[arg-type]  a function
    return replace(surface, valley=_valley(found))


def _known(near: Surface | None, start: Surface | None) -> tuple[Floats, Floats]:
    """Constants that a fit starts from, and the weight of the distance from them."""
    if near is None:
        known = np.concatenate([_START_BASE, _START.ravel()]) if start is None else _vector(start)
        return known, np.full(known.size, _PRIOR)
    known = _vector(near)
    prior = np.full(known.size, 1 / _EXPONENT_DEVIATION)
    prior[[0, 1, *range(4, known.size, _START.shape[1])]] = 1 / _COEFFICIENT_DEVIATION
    return known, prior


def _least(
    terms: Sequence[Sequence[float]], sizes: Sequence[float], batch_tokens: float | None
) -> tuple[float, float]:
    """Rate and batch at which the sum of `terms` is least, at (parameters, tokens, sparsity) and at
    that batch if it is given: Newton's method on a convex function of two logarithms, or one."""
    constants = np.array(terms)
    at = np.log([2e-3, float(batch_tokens or 524288.0), *sizes]) - _ORIGIN
    free = [0] if batch_tokens is not None else [0, 1]
    exponents = constants[:, 1:][:, free]
    for _ in range(_STEPS):
        values = np.exp(constants[:, 0] + constants[:, 1:] @ at)
        gradient = exponents.T @ values
        curvature = exponents.T @ (exponents * values[:, None])
        step = np.linalg.lstsq(curvature + 1e-12 * np.eye(len(free)), -gradient, rcond=None)[0]
        at[free] += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-10:
            break
    rate, batch = np.exp(at[:2] + _ORIGIN[:2])
    return float(rate), float(batch)


def _nearness(off: Floats, width: float) -> Floats:
    """Weight of runs in the fit of a valley; `off` is their loss over the least of their cell, less
    one."""
    return np.exp(-0.5 * (off / width) ** 2)


def _valley_vector(valley: Valley) -> Floats:
    laws = (valley.rate, valley.batch, valley.rate_curvature, valley.batch_curvature)
    return np.array([*(each for law in laws for each in law), math.atanh(valley.correlation)])


def _valley(vector: Floats) -> Valley:
    rate, batch, of_rate, of_batch, correlation = np.split(vector, _VALLEY_PARTS)
    return Valley(
        rate=tuple(map(float, rate)),
        batch=tuple(map(float, batch)),
        rate_curvature=tuple(map(float, of_rate)),
        batch_curvature=tuple(map(float, of_batch)),
        correlation=float(np.clip(np.tanh(correlation[0]), -_MOST_CORRELATION, _MOST_CORRELATION)),
    )


def _rises(vector: Floats, logs: Floats) -> Floats:
    """ln loss of each run above that of its valley."""
    rate, batch, of_rate, of_batch, correlation = np.split(vector, _VALLEY_PARTS)
    sizes = _with_constant(logs[:, 2:])
    curved = np.clip(sizes[:, :3] @ np.stack([of_rate, of_batch], axis=1), -40.0, 20.0)
    x = (logs[:, 0] - sizes @ rate) * np.exp(0.5 * curved[:, 0])
    y = (logs[:, 1] - sizes @ batch) * np.exp(0.5 * curved[:, 1])
    return 0.5 * (x**2 + 2 * np.tanh(correlation[0]) * x * y + y**2)


def _terms(vector: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, each)) for each in vector[4:].reshape(-1, _START.shape[1]))


def _fitted(runs: Sequence[LanguageRun], known: Floats, prior: Floats, weights: Floats) -> Floats:
    """Constants of least misfit, with `prior` as the weight of their distance from `known`."""
    logs, scale = _logarithms(runs), np.sqrt(weights) / _SCATTER
    measured = np.log([run.loss or math.nan for run in runs])

    def misfits(vector: Floats) -> Floats:
        off = np.log(np.maximum(_losses(vector, logs), 0.1)) - measured
        return np.concatenate([off * scale, prior * (vector - known)])

    def slopes(vector: Floats) -> Floats:
        losses = np.maximum(_losses(vector, logs), 0.1)
        slope = _gradients(vector, logs) / losses[:, None] * scale[:, None]
        return np.concatenate([slope, np.diag(prior)])

    return least_squares(misfits, known, jac=slopes, loss="soft_l1", max_nfev=600).x  # type: ignore[arg-type]  a function


def fit_ladder(
    runs: Sequence[LanguageRun],
    near: Surface | None = None,
    *,
    name: str = "the ladder",
    diverged: Sequence[LanguageRun] = (),
    optimizer: str = "adamw",
) -> LossModel:
    """Model of a ladder of small runs, including how far beyond them it may be used.

    Args:
        runs: runs of three sizes or more, with losses.
        near: see `fit_surface`.
        name: what the runs are.
        diverged: runs that diverged, which are used only to fit divergence.
        optimizer: name of their optimizer.

    Raises:
        ConfigError: if there are fewer sizes, or runs than constants without another surface.
    """
    usable = [run for run, off in zip(runs, relative_loss(runs), strict=True) if off < FITTED]
    sizes = {run.parameters for run in usable}
    if len(sizes) < _LEAST_RUNGS:
        accepted = "a ladder needs runs of three sizes, so that two can foretell the third"
        raise ConfigError(refusal("sizes", f"{len(sizes)} of them", accepted))
    cells = sorted({run.cell for run in usable})
    parts = [[run for run in usable if run.cell == cell] for cell in cells]
    left_out = [fit_surface([r for r in usable if r.cell != cell], near) for cell in cells]
    errors = [_error(surface, part) for surface, part in zip(left_out, parts, strict=True)]
    shown, slopes = {}, []
    for what in ("parameters", "tokens"):
        shown[what], found = _shown(usable, what, near)
        slopes += found
    return LossModel(
        name=name,
        surface=with_valley(fit_surface(usable, near), usable, near),
        cells=tuple(cells),
        left_out=tuple(left_out),
        divergence=fit_divergence(runs, diverged),
        deviation=math.sqrt(float(np.mean(np.square(errors)))),
        deviation_beyond=math.sqrt(float(np.mean(np.square(slopes)))) if slopes else 0.0,
        batches=_batches(usable),
        optimizer=optimizer,
        shown=shown,
    )


def _batches(runs: Sequence[LanguageRun]) -> tuple[float, float]:
    """Least and most tokens of an update."""
    sizes = [run.batch_tokens for run in runs]
    return min(sizes), max(sizes)


def _error(surface: Surface, runs: Sequence[LanguageRun]) -> float:
    """Mean of |ln predicted - ln measured|."""
    off = [math.log(surface.loss(run) / run.loss) for run in runs if run.loss]
    return float(np.mean(np.abs(off)))


def _shown(
    runs: Sequence[LanguageRun], what: str, near: Surface | None
) -> tuple[float, list[float]]:
    """The largest factor in `what` at which smaller runs foretold those with the most of it within
    `_TOLERANCE`, as they did at all smaller factors (1 if at none), and for each factor tried the
    error for each factor e."""
    values = sorted({getattr(run, what) for run in runs})
    largest = [run for run in runs if getattr(run, what) == values[-1]]
    factor, slopes = 1.0, []
    for most in reversed(values[1:-1]):
        rest = [run for run in runs if getattr(run, what) <= most]
        if near is None and len(rest) < _START.size + len(_START_BASE):
            break
        error, beyond = _error(fit_surface(rest, near), largest), values[-1] / most
        slopes.append(error / math.log(beyond))
        if error > _TOLERANCE:
            break
        factor = beyond
    return factor, slopes


def fit_divergence(
    runs: Sequence[LanguageRun], known: Sequence[LanguageRun] = ()
) -> tuple[float, ...]:
    """Logistic regression of whether runs diverged (by `DIVERGED`, or because they are `known` to),
    by Newton's method with a weak normal prior about 0; empty if none did."""
    diverged = np.append(relative_loss(runs) > DIVERGED, np.ones(len(known), bool))
    runs = [*runs, *known]
    if not diverged.any():
        return ()
    features = _with_constant(_logarithms(runs))
    weights = np.zeros(features.shape[1])
    prior = 0.1 * np.eye(weights.size)
    for _ in range(_STEPS):
        chance = expit(features @ weights)
        gradient = features.T @ (chance - diverged) + prior @ weights
        curvature = features.T @ (features * (chance * (1 - chance))[:, None]) + prior
        weights -= np.linalg.solve(curvature, gradient)
    return tuple(map(float, weights))


def _with_constant(logs: Floats) -> Floats:
    return np.column_stack([np.ones(len(logs)), logs])


def _logarithms(runs: Sequence[LanguageRun]) -> NDArray[np.float64]:
    """Logarithms of the quantities that the loss depends on, about `_ORIGIN`."""
    return np.log([[getattr(run, name) for name in _COLUMNS] for run in runs]) - _ORIGIN


def _vector(surface: Surface) -> Floats:
    return np.concatenate([surface.base, np.ravel(surface.terms)])


def _parts(vector: Floats, logs: Floats) -> tuple[Floats, Floats]:
    """The second term of the loss, and the terms of the sum, of each run."""
    _, log_a, a, s = vector[:4]
    terms = vector[4:].reshape(-1, _START.shape[1])
    base = np.exp(log_a - a * logs[:, 2] + s * logs[:, 4])
    # A fit may pass through exponents that overflow.
    return base, np.exp(np.clip(terms[:, 0] + logs @ terms[:, 1:].T, -40.0, 20.0))


def _losses(vector: Floats, logs: Floats) -> Floats:
    base, sizes = _parts(vector, logs)
    return vector[0] + base + sizes.sum(axis=1)


def _gradients(vector: Floats, logs: Floats) -> Floats:
    """Slopes of the losses over the constants."""
    base, sizes = _parts(vector, logs)
    columns = [np.ones_like(base), base, -base * logs[:, 2], base * logs[:, 4]]
    for size in sizes.T:
        columns += [size, *(size * log for log in logs.T)]
    return np.column_stack(columns)
