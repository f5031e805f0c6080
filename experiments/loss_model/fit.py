"""Final loss of language models: fits the surface, and tests it on sizes and tokens left out.

    python experiments/loss_model/fit.py            # writes results.json
    python experiments/loss_model/fit.py --write    # and the constants that come with scalejax

Whatever a valley is fitted with (`CHOICES`) is chosen anew in each split, within the runs that are
left. The tables of README.md are printed, by the names of splits; `forms.py` tries other forms.
Runs are those that come with scalejax (`validation/ledgers/steplaw_*`).
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalejax.core import serialization
from scalejax.planning.convergence import loss_surface
from scalejax.planning.convergence.loss_surface import (
    DIVERGED,
    DIVERGES_ABOVE,
    FITTED,
    NEAR,
    VALLEY_DEVIATION,
    LanguageRun,
    LossModel,
    Surface,
    fit_divergence,
    fit_surface,
    relative_loss,
    with_valley,
)
from scalejax.validation.convergence import LossRow
from scalejax.validation.kinds import find_ledger, read_any

HERE = Path(__file__).parent
PUBLISHED = Path(loss_surface.__file__).parent / "published" / "loss_surface.json"
SEED = 26
BEYOND = {"tokens": (45e9, 35e9, 22e9, 15e9), "parameters": (6e8, 5e8, 4e8)}
"""Limits above which all runs are left out."""
FAR = ((1e9, 1, 1e11), (7e9, 1, 2e12), (7e10, 1, 2e12))
"""Parameters, sparsity and tokens of runs such as are asked for."""
_FAR = 0.5
"""Logarithm of a factor beyond the runs, below which an error says little of distance."""
Cell = tuple[float, float, float]
"""Parameters, sparsity and tokens."""
Choice = tuple[float, float]
"""Width of a valley's weights, and how far its curvatures may change with size and tokens."""
WITHIN = 0.01
"""Loss over the best of a cell, less one, up to which runs tell the loss between them."""
GOAL = 0.003
"""What the best batch and rate may lose."""
FACTOR = 2.0
"""How far they may be from those of the best run."""
CHOICES: tuple[Choice, ...] = tuple(
    (width, slopes) for width in (0.004, 0.006, 0.01, 0.015) for slopes in (1e-3, VALLEY_DEVIATION)
)
KEPT = (NEAR, VALLEY_DEVIATION)
"""The choice of what comes with scalejax."""
DRAWS = 2000
CONTEXT = (
    "AdamW, 2,000 updates of warmup whatever the batch, then cosine to a rate of 1e-5 whatever the "
    "peak; sequences of 2,048 tokens; Step Law's corpus and vocabulary of 65,536",
)


def runs_of(ledger: str) -> list[LanguageRun]:
    """Runs of a ledger."""
    rows = read_any(find_ledger(ledger)).rows
    return [row.run for row in rows if isinstance(row, LossRow)]


def fitted(runs: Sequence[LanguageRun]) -> list[LanguageRun]:
    """Runs within 10 % of the best of their size and tokens."""
    return [run for run, off in zip(runs, relative_loss(runs), strict=True) if off < FITTED]


def splits(runs: Sequence[LanguageRun]) -> Iterator[tuple[str, str, Callable[[LanguageRun], bool]]]:
    """(kind, name, whether a run is left out): by size, by size and tokens, and most tokens."""
    dense = [run for run in runs if run.sparsity == 1]
    experts = [run for run in runs if run.sparsity > 1]
    for size in sorted({(run.parameters, run.sparsity) for run in runs}):
        yield "size", f"{size[0]:.3g} x {size[1]:.3g}", lambda run, s=size: run.cell[:2] == s
    for cell in sorted({run.cell for run in runs}):
        yield "size and tokens", str(cell), lambda run, c=cell: run.cell == c
    # Half of the sizes' numbers of tokens, chosen by a seed: one cell of every size at once.
    chosen = np.random.default_rng(SEED)
    for fold in range(3):
        by_size: dict[tuple[float, float], list[tuple[float, float, float]]] = {}
        for cell in sorted({run.cell for run in runs}):
            by_size.setdefault(cell[:2], []).append(cell)
        taken = {cells[int(chosen.integers(len(cells)))] for cells in by_size.values()}
        yield "one of each size", f"seed {SEED}.{fold}", lambda run, t=taken: run.cell in t
    for some in filter(None, (dense, experts)):
        most = max(run.tokens for run in some)
        kind = "experts" if some is experts else "dense"
        yield (
            "most tokens",
            f"{kind}, {most:.3g}",
            lambda run, m=most, k=kind: run.tokens == m and (run.sparsity > 1) == (k == "experts"),
        )
    # Whatever its kind: a run of experts with more parameters than the limit would make of a dense
    # size beyond it one between two others.
    for what, limits in BEYOND.items():
        for most in limits:
            yield (
                "beyond",
                f"above {most:.2g} {what}",
                lambda run, w=what, m=most: getattr(run, w) > m,
            )


def distance(run: LanguageRun, kept: Sequence[LanguageRun]) -> float:
    """Logarithm of how many times the most parameters, or tokens, of `kept` a run has."""
    far = (getattr(run, w) / max(getattr(k, w) for k in kept) for w in BEYOND)
    return max(0.0, math.log(max(far)))


def deviation_by_distance(errors: Sequence[float], far: Sequence[float]) -> float:
    """Root mean square of errors for each factor e beyond, of those that are `_FAR` beyond.

    The scatter of single runs is in it too, so that a band which adds that of runs within the sizes
    is on the safe side.
    """
    slopes = [error / each for error, each in zip(errors, far, strict=True) if each > _FAR]
    return math.sqrt(float(np.mean(np.square(slopes))))


def errors_of(surface: Surface, runs: Sequence[LanguageRun]) -> list[float]:
    """ln predicted - ln measured of each run."""
    return [math.log(surface.loss(run) / run.loss) for run in runs if run.loss]


@dataclass(frozen=True, slots=True)
class Local:
    """ln loss of one cell as a quadratic of ln rate and ln batch, fitted to its own runs near its
    best one: what a batch and rate lose at which no run was made."""

    constants: NDArray[np.floating]
    covariance: NDArray[np.floating]
    """Of the constants."""
    deviation: float
    """Standard deviation of ln loss of a run about it."""
    runs: tuple[LanguageRun, ...]
    """Those that it was fitted to."""

    @classmethod
    def fit(cls, runs: Sequence[LanguageRun], within: float = WITHIN) -> "Local":
        """Least squares to the runs of a cell up to `within` of its best."""
        near = [r for r, off in zip(runs, relative_loss(runs), strict=True) if off < 1 + within]
        features = _quadratic(near)
        measured = np.log([run.loss or math.nan for run in near])
        constants = np.linalg.lstsq(features, measured, rcond=None)[0]
        left = float(np.sum((measured - features @ constants) ** 2))
        variance = left / (len(near) - len(constants))
        covariance = variance * np.linalg.inv(features.T @ features)
        return cls(constants, covariance, math.sqrt(variance), tuple(near))

    def at(self, run: LanguageRun) -> tuple[float, float]:
        """ln loss at the batch and rate of `run`, and its standard error."""
        features = _quadratic([run])[0]
        return float(features @ self.constants), math.sqrt(features @ self.covariance @ features)

    def least(self) -> tuple[float, LanguageRun]:
        """Its least ln loss, and a run there."""
        log_rate, log_batch = _bottom(self.constants)
        run = replace(
            self.runs[0],
            learning_rate=_CENTRE[0] * math.exp(log_rate),
            batch_tokens=_CENTRE[1] * math.exp(log_batch),
        )
        return self.at(run)[0], run


_CENTRE = 2e-3, 524288.0


def _bottom(constants: NDArray[np.floating]) -> NDArray[np.floating]:
    """ln rate and ln batch over those of `_CENTRE` at which a quadratic is stationary."""
    _, rate, batch, *curves = constants
    curvature = np.array([[2 * curves[0], curves[1]], [curves[1], 2 * curves[2]]])
    return np.linalg.solve(curvature, [-rate, -batch])


def _quadratic(runs: Sequence[LanguageRun]) -> NDArray[np.float64]:
    x = np.log([run.learning_rate / _CENTRE[0] for run in runs])
    y = np.log([run.batch_tokens / _CENTRE[1] for run in runs])
    return np.column_stack([np.ones_like(x), x, y, x * x, x * y, y * y])


def _factor(one: float, other: float) -> float:
    return math.exp(abs(math.log(one / other)))


@dataclass(frozen=True, slots=True)
class Lost:
    """What a batch and rate lose in a cell, by its local quadratic, and where they are."""

    excess: float
    """Loss there over that of the best run, less one."""
    rate_factor: float
    """Factor to the rate of the best run."""
    batch_factor: float
    """Factor to its batch."""

    @classmethod
    def at(cls, place: LanguageRun, best: LanguageRun, local: Local) -> "Lost":
        """At the batch and rate of `place`, in the cell of the run `best`."""
        return cls(
            math.exp(local.at(place)[0] - math.log(best.loss or math.nan)) - 1,
            _factor(place.learning_rate, best.learning_rate),
            _factor(place.batch_tokens, best.batch_tokens),
        )

    @property
    def misses(self) -> bool:
        """Whether it is beyond the goal in loss, rate or batch."""
        return self.excess > GOAL or max(self.rate_factor, self.batch_factor) > FACTOR


def _best_run(runs: Sequence[LanguageRun]) -> LanguageRun:
    return min(runs, key=lambda run: run.loss or math.inf)


def best_of(surface: Surface, runs: Sequence[LanguageRun]) -> dict[str, float]:
    """Of runs of one cell: what the batch and rate that the surface calls best lose, by the local
    quadratic, to the best run and to the least of that quadratic; how far they are from those of
    the best run; and what the run loses that it calls best of those that were made."""
    best = _best_run(runs)
    found = surface.best(best.parameters, best.tokens, best.sparsity)
    there = replace(best, learning_rate=found.learning_rate, batch_tokens=found.batch_tokens)
    local, wider = Local.fit(runs), Local.fit(runs, 2 * WITHIN)
    lost, (log_loss, error), (least, bottom) = (
        Lost.at(there, best, local), local.at(there), local.least(),
    )  # fmt: skip
    called = min(runs, key=surface.valley.rise if surface.valley else surface.loss)
    return {
        "excess": lost.excess,
        "standard_error": error,
        "excess_over_least": math.exp(log_loss - least) - 1,
        "excess_by_runs_within_2_percent": Lost.at(there, best, wider).excess,
        "rate_factor": lost.rate_factor,
        "batch_factor": lost.batch_factor,
        "rate_factor_to_least": _factor(there.learning_rate, bottom.learning_rate),
        "batch_factor_to_least": _factor(there.batch_tokens, bottom.batch_tokens),
        "called_excess": (called.loss or math.nan) / (best.loss or math.nan) - 1,
    }


def noise_of(runs: Sequence[LanguageRun], draws: np.random.Generator) -> dict[str, float]:
    """Of one cell: how its runs scatter about its local quadratic, and what that does to measures
    by single runs. Losses are drawn anew, normal about the quadratic; the truth is called: the run
    that truly is best, or the batch and rate of the quadratic's least. How often is that run more
    than `GOAL` above the best that was drawn, and that place more than `FACTOR` from it? And how
    far is the least of a quadratic from that place, which is fitted to what was drawn?"""
    local = Local.fit(runs)
    true = np.array([local.at(run)[0] for run in local.runs])
    drawn = true + draws.normal(0, local.deviation, (DRAWS, len(true)))
    excess = np.expm1(drawn[:, true.argmin()] - drawn.min(axis=1))
    least, bottom = local.least()
    far = [
        max(_factor(run.learning_rate, bottom.learning_rate),
            _factor(run.batch_tokens, bottom.batch_tokens)) > FACTOR
        for run in local.runs
    ]  # fmt: skip
    again = (np.linalg.pinv(_quadratic(local.runs)) @ drawn.T).T
    places = np.exp(np.array([_bottom(each) for each in again]) - _bottom(local.constants))
    # Half of what lies between the quantiles of one deviation: some draws have no least.
    low, high = np.quantile(places, [0.16, 0.84], axis=0)
    best = _best_run(runs)
    return {
        "runs": len(true),
        "deviation": local.deviation,
        "best_run_below_least": least - math.log(best.loss or math.nan),
        "rate_factor_of_least": _factor(best.learning_rate, bottom.learning_rate),
        "batch_factor_of_least": _factor(best.batch_tokens, bottom.batch_tokens),
        "rate_deviation_of_least": float(high[0] / low[0]) ** 0.5,
        "batch_deviation_of_least": float(high[1] / low[1]) ** 0.5,
        "truly_best_excess": float(np.mean(excess)),
        "truly_best_beyond_goal": float(np.mean(excess > GOAL)),
        "truly_best_beyond_factor": float(np.mean(np.array(far)[drawn.argmin(axis=1)])),
    }


class Chooser:
    """The choice of what a valley is fitted with, by some cells alone."""

    def __init__(self, runs: Sequence[LanguageRun], terms: Surface) -> None:
        """Of all runs; `terms` is any surface: its losses are not looked at."""
        self._terms = terms
        self._cells = {c: [r for r in runs if r.cell == c] for c in sorted({r.cell for r in runs})}
        self._bests = {cell: (_best_run(r), Local.fit(r)) for cell, r in self._cells.items()}
        self._known: dict[tuple[Choice, frozenset[Cell]], dict[Cell, Lost]] = {}

    def scores(self, seen: frozenset[Cell]) -> dict[Choice, tuple[int, float]]:
        """Of each choice how many of the cells `seen`, foretold by those of them of other sizes,
        miss the goal, and the mean of what the best batch and rate lose in them."""
        found = {}
        for choice in CHOICES:
            lost = [
                self._foretold(choice, frozenset(c for c in seen if c[:2] != size))[cell]
                for size in sorted({cell[:2] for cell in seen})
                for cell in sorted(seen)
                if cell[:2] == size
            ]
            excess = float(np.mean([each.excess for each in lost]))
            found[choice] = sum(each.misses for each in lost), excess
        return found

    def chosen(self, seen: frozenset[Cell]) -> Choice:
        """That with which the fewest cells miss the goal; of several, that which loses least."""
        scores = self.scores(seen)
        return min(scores, key=scores.__getitem__)

    def _foretold(self, choice: Choice, kept: frozenset[Cell]) -> dict[Cell, Lost]:
        """All cells but those `kept`, by a fit to these."""
        if (choice, kept) not in self._known:
            runs = [run for cell in sorted(kept) for run in self._cells[cell]]
            valley = fitted_with(self._terms, runs, choice).valley
            found = self._known[choice, kept] = {}
            for cell, (best, local) in self._bests.items():
                n, s, d = cell
                if cell in kept:
                    continue
                if valley is None:  # of too few runs, which foretell nothing
                    found[cell] = Lost(math.inf, math.inf, math.inf)
                    continue
                rate, batch = valley.least((n, d, s), None)
                there = replace(best, learning_rate=rate, batch_tokens=batch)
                found[cell] = Lost.at(there, best, local)
        return self._known[choice, kept]


def fitted_with(surface: Surface, runs: Sequence[LanguageRun], choice: Choice) -> Surface:
    """`surface` with the valley of `runs` by a choice."""
    return with_valley(surface, runs, width=choice[0], curvature_deviation=choice[1])


def excess_at_best(surface: Surface, cells: Sequence[tuple[float, ...]]) -> dict[str, object]:
    """How far the loss at the best batch and rate is above the least of its own sum, of cells
    (parameters, sparsity, tokens)."""
    first = replace(surface, valley=None)
    excess = [
        surface.best(n, tokens, s).loss / first.best(n, tokens, s).loss - 1
        for n, s, tokens in cells
    ]
    return {
        "cells": len(excess),
        "mean": float(np.mean(excess)),
        "largest": max(excess),
        "above_0.05_percent": sum(each > 5e-4 for each in excess),
    }


def mean_of(found: Sequence[dict[str, float]], name: str) -> float:
    """Mean of one of their figures."""
    return float(np.mean([each[name] for each in found]))


def summary_of(bests: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean and largest of each of the measures of `best_of`, the share of cells in the goal, and
    how many miss it in loss, rate or batch."""
    found: dict[str, float] = {"cells": len(bests)}
    found["misses"] = sum(
        Lost(each["excess"], each["rate_factor"], each["batch_factor"]).misses for each in bests
    )
    for name in bests[0]:
        values = [each[name] for each in bests]
        found |= {f"mean_{name}": mean_of(bests, name), f"largest_{name}": max(values)}
        if "excess" in name:
            found[f"within_0.3_percent_by_{name}"] = float(np.mean(np.array(values) <= GOAL))
    return found


def divergence_errors(runs: Sequence[LanguageRun]) -> dict[str, object]:
    """Runs of each size told apart by a regression to the others."""
    told, found, missed, false = 0, 0, 0, 0
    diverged = relative_loss(runs) > DIVERGED
    for size in sorted({run.parameters for run in runs}):
        weights = fit_divergence([run for run in runs if run.parameters != size])
        model = _model(diverging=weights)
        for run, is_diverged in zip(runs, diverged, strict=True):
            if run.parameters == size:
                said = model.divergence_probability(run) > DIVERGES_ABOVE
                told += said == is_diverged
                found += bool(is_diverged and said)
                missed += bool(is_diverged and not said)
                false += bool(said and not is_diverged)
    return {
        "runs": len(runs),
        "told_apart": told / len(runs),
        "diverged": found + missed,
        "of_diverged_found": found / (found + missed),
        "of_others_called_diverged": false / (len(runs) - found - missed),
    }


def _model(*, diverging: tuple[float, ...]) -> LossModel:
    return LossModel(
        name="", surface=Surface(base=(0, 0, 0, 0), terms=()), cells=(), left_out=(),
        divergence=diverging, deviation=0, deviation_beyond=0,
    )  # fmt: skip


def in_rows(summary: dict[str, dict[str, float]]) -> dict[str, list[str]]:
    """The tables of README.md, as Markdown: errors of losses; the best batch and rate by single
    runs; the same by local quadratics."""
    losses, single, smooth = [], [], []
    for name, of in summary.items():
        cells = f"{of['cells']:.0f}"
        losses.append(f"| {name} | {of['mean_error']:.2%} | {of['worst']:.2%} |")
        by_run = "called_excess"
        single.append(
            f"| {name} | {cells} | {of[f'mean_{by_run}']:.2%}, {of[f'largest_{by_run}']:.2%} "
            f"| {of['mean_truly_best_excess']:.2%} | {of[f'within_0.3_percent_by_{by_run}']:.0%} "
            f"| {of['truly_best_within']:.0%} |"
        )
        smooth.append(
            f"| {name} | {cells} | {of['misses']:.0f} "
            f"| {of['mean_excess']:.2%}, {of['largest_excess']:.2%} "
            f"| {of['mean_excess_over_least']:.2%}, {of['largest_excess_over_least']:.2%} "
            f"| {of['largest_rate_factor']:.2f}, {of['largest_batch_factor']:.2f} | "
            f"{of['largest_rate_factor_to_least']:.2f}, {of['largest_batch_factor_to_least']:.2f} |"
        )
    return {
        "left out | mean error | largest of a row": losses,
        "left out | cells | excess of the called run: mean, largest | mean of the truth "
        "| cells within 0.3 % | of the truth": single,
        "left out | cells | miss the goal | over the best run: mean, largest "
        "| over the least: mean, largest | rate, batch: largest factor to the best run "
        "| to the least": smooth,
    }


def main() -> None:
    """Fit, leave out, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    dense = runs_of("steplaw_dense_lr_batch_loss")
    experts = runs_of("steplaw_moe_lr_batch_loss")
    every = [*dense, *experts]
    used = fitted(every)
    everywhere = frozenset(run.cell for run in used)
    results: dict[str, object] = {"runs": len(every), "fitted": len(used)}
    terms = fit_surface(used)
    whole, chooser = fitted_with(terms, used, KEPT), Chooser(used, terms)
    draws = np.random.default_rng(SEED)
    noise = {
        cell: noise_of([run for run in used if run.cell == cell], draws)
        for cell in sorted(everywhere)
    }
    results["noise"] = {str(cell): found for cell, found in noise.items()}
    for what, name in (("goal", "by single runs"), ("factor", "from the best run")):
        chances = np.array([each[f"truly_best_beyond_{what}"] for each in noise.values()])
        print(
            f"cells in which the truth is beyond the {what} {name}: {chances.sum():.2f} in the "
            f"mean, none with a probability of {np.prod(1 - chances):.2f}"
        )
    cell, found = max(noise.items(), key=lambda item: item[1]["rate_factor_of_least"])
    print(
        f"best run farthest from its own quadratic's least: {cell}, {found['runs']} runs, rate "
        f"{found['rate_factor_of_least']:.2f}, of which one deviation is "
        f"{found['rate_deviation_of_least']:.2f}; largest deviation of a cell "
        f"{max(each['rate_deviation_of_least'] for each in noise.values()):.2f}"
    )
    results["in sample"] = {
        name: float(np.mean(np.abs(errors_of(whole, [r for r in used if (r.sparsity > 1) == moe]))))
        for name, moe in (("dense", False), ("experts", True))
    }
    print(f"in sample: {json.dumps(results['in sample'])}")
    for name, cells in (("cells", sorted(everywhere)), ("beyond", FAR)):
        results[f"loss at the best over its least, {name}"] = found = excess_at_best(whole, cells)
        print(f"loss at the best over its least, {name}: {json.dumps(found)}")
    rows, left_out, squares, beyond, far = [], [], [], [], []
    for kind, name, is_out in splits(used):
        seen = [run for run in used if not is_out(run)]
        choice = chooser.chosen(frozenset(run.cell for run in seen))
        sums = fit_surface(seen)
        surface, kept = fitted_with(sums, seen, choice), fitted_with(sums, seen, KEPT)
        if kind == "size and tokens":
            left_out.append(kept)
        for what, moe in (("dense", False), ("experts", True)):
            out = [run for run in used if is_out(run) and (run.sparsity > 1) == moe]
            # Of experts nothing is foretold by runs without any.
            if not out or not any((r.sparsity > 1) == moe for r in used if not is_out(r)):
                continue
            errors = errors_of(surface, out)
            cells = sorted({run.cell for run in out})
            parts = [[run for run in out if run.cell == cell] for cell in cells]
            rows.append(
                {
                    "left_out": kind, "name": name, "what": what, "runs": len(out),
                    "mean_error": float(np.mean(np.abs(errors))), "bias": float(np.mean(errors)),
                    "choice": choice, "cells": cells,
                    "best": [best_of(surface, part) for part in parts],
                    "best by the choice kept": [best_of(kept, part) for part in parts],
                }
            )  # fmt: skip
            print(
                f"{kind}, {name}, {what}: {rows[-1]['mean_error']:.2%}, {rows[-1]['bias']:+.2%}, "
                f"by {choice[0]:.1%}, {choice[1]}",
                flush=True,
            )
            if kind == "size and tokens":
                squares += [each**2 for each in errors]
            if kind == "beyond":
                near = [r for r in used if not is_out(r) and (r.sparsity > 1) == moe]
                # A root mean square of each cell: mean errors of runs would cancel.
                for part in parts:
                    far.append(distance(part[0], near))
                    beyond.append(math.sqrt(float(np.mean(np.square(errors_of(surface, part))))))
    for title, name in (("chosen within the rest", "best"), ("as kept", "best by the choice kept")):
        summary: dict[str, dict[str, float]] = {}
        for kind in dict.fromkeys(str(row["left_out"]) for row in rows):
            for what in ("dense", "experts"):
                some = [row for row in rows if row["left_out"] == kind and row["what"] == what]
                if not some:
                    continue
                weights = [row["runs"] for row in some]
                truth = [noise[cell] for row in some for cell in row["cells"]]
                mean = float(np.average([row["mean_error"] for row in some], weights=weights))
                summary[f"{kind}, {what}"] = {
                    "mean_error": mean,
                    "worst": max(row["mean_error"] for row in some),
                    "mean_truly_best_excess": mean_of(truth, "truly_best_excess"),
                    "truly_best_within": 1 - mean_of(truth, "truly_best_beyond_goal"),
                } | summary_of([each for row in some for each in row[name]])
        results[f"summary, {title}"] = summary
        for heading, lines in in_rows(summary).items():
            print(
                f"\n{title}:\n| {heading} |",
                "|---" + "|---:" * heading.count("|") + "|",
                *lines,
                sep="\n",
            )
    results["rows"] = rows
    results["misses and mean excess of each choice, of all sizes left out"] = scores = {
        f"{width:.1%}, {slopes}": score
        for (width, slopes), score in chooser.scores(everywhere).items()
    }
    print(f"\nmisses and mean excess of each choice, of all sizes left out: {json.dumps(scores)}")
    results["divergence, dense"] = divergence_errors(dense)
    deviation = math.sqrt(float(np.mean(squares)))
    deviation_beyond = deviation_by_distance(beyond, far)
    results["deviation"], results["deviation_beyond"] = deviation, deviation_beyond
    print(results["divergence, dense"], deviation, deviation_beyond)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if arguments.write:
        model = LossModel(
            name="Step Law (Li et al. 2025, arXiv 2503.04715)",
            surface=whole,
            cells=tuple(sorted(everywhere)),
            left_out=tuple(left_out),
            divergence=fit_divergence(every),
            deviation=deviation,
            deviation_beyond=deviation_beyond,
            batches=(
                min(run.batch_tokens for run in used),
                max(run.batch_tokens for run in used),
            ),
            context=CONTEXT,
        )
        serialization.save(model, PUBLISHED)


if __name__ == "__main__":
    main()
