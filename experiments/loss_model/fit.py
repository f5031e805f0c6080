"""Final loss of language models: fits the surface, and tests it on sizes and tokens left out.

    python experiments/loss_model/fit.py            # writes results.json
    python experiments/loss_model/fit.py --write    # and the constants that come with scalejax

Runs are those that come with scalejax (`validation/ledgers/steplaw_*`).
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalejax.core import serialization
from scalejax.planning.convergence import loss_surface
from scalejax.planning.convergence.loss_surface import (
    DIVERGED,
    DIVERGES_ABOVE,
    FITTED,
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
Bests = list[dict[str, float]]
"""What `best_of` finds of several cells."""
WITHIN = 0.01
"""Loss over the best of a cell, less one, up to which runs tell the loss between them."""
GOAL = 0.003
CHOICES = tuple(
    (width, slopes) for width in (0.004, 0.006, 0.01, 0.015) for slopes in (1e-3, VALLEY_DEVIATION)
)
"""Widths of the valley's weights, and how far its curvatures may change with size and tokens."""
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
    for some in (dense, experts):
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
        _, rate, batch, *curves = self.constants
        curvature = np.array([[2 * curves[0], curves[1]], [curves[1], 2 * curves[2]]])
        log_rate, log_batch = np.linalg.solve(curvature, [-rate, -batch])
        run = replace(
            self.runs[0],
            learning_rate=_CENTRE[0] * math.exp(log_rate),
            batch_tokens=_CENTRE[1] * math.exp(log_batch),
        )
        return self.at(run)[0], run


_CENTRE = 2e-3, 524288.0


def _quadratic(runs: Sequence[LanguageRun]) -> NDArray[np.float64]:
    x = np.log([run.learning_rate / _CENTRE[0] for run in runs])
    y = np.log([run.batch_tokens / _CENTRE[1] for run in runs])
    return np.column_stack([np.ones_like(x), x, y, x * x, x * y, y * y])


def _factor(one: float, other: float) -> float:
    return math.exp(abs(math.log(one / other)))


def best_of(
    surface: Surface, runs: Sequence[LanguageRun], *, valley_alone: bool = False
) -> dict[str, float]:
    """Of runs of one cell: what the batch and rate that the surface (or its valley, whatever its
    sum says) calls best lose, by the local quadratic, to the best run and to the least of that
    quadratic; how far they are from those of the best run; and what the run loses that the valley
    calls best of those that were made."""
    best = min(runs, key=lambda run: run.loss or math.inf)
    log_best = math.log(best.loss or math.nan)
    sizes = best.parameters, best.tokens, best.sparsity
    if valley_alone and surface.valley:
        rate, batch = surface.valley.least(sizes, None)
    else:
        found = surface.best(*sizes)
        rate, batch = found.learning_rate, found.batch_tokens
    there = replace(best, learning_rate=rate, batch_tokens=batch)
    local, wider = Local.fit(runs), Local.fit(runs, 2 * WITHIN)
    log_loss, error = local.at(there)
    least, bottom = local.least()
    called = min(runs, key=surface.valley.rise) if surface.valley else best
    return {
        "excess": math.exp(log_loss - log_best) - 1,
        "standard_error": error,
        "excess_over_least": math.exp(log_loss - least) - 1,
        "excess_by_runs_within_2_percent": math.exp(wider.at(there)[0] - log_best) - 1,
        "rate_factor": _factor(there.learning_rate, best.learning_rate),
        "batch_factor": _factor(there.batch_tokens, best.batch_tokens),
        "rate_factor_to_least": _factor(there.learning_rate, bottom.learning_rate),
        "batch_factor_to_least": _factor(there.batch_tokens, bottom.batch_tokens),
        "called_excess": math.exp(math.log(called.loss or math.nan) - log_best) - 1,
    }


def noise_of(runs: Sequence[LanguageRun], draws: np.random.Generator) -> dict[str, float]:
    """Of one cell: how its runs scatter about its local quadratic, and what that does to the
    measure of a called run. Losses are drawn anew, normal about the quadratic; the run that truly
    is best is called; how often is it more than `GOAL` above the best that was drawn?"""
    local = Local.fit(runs)
    true = np.array([local.at(run)[0] for run in local.runs])
    drawn = true + draws.normal(0, local.deviation, (DRAWS, len(true)))
    excess = drawn[:, true.argmin()] - drawn.min(axis=1)
    log_best = math.log(min(run.loss or math.inf for run in runs))
    return {
        "runs": len(true),
        "deviation": local.deviation,
        "best_run_below_least": local.least()[0] - log_best,
        "truly_best_beyond_goal": float(np.mean(excess > GOAL)),
    }


def choose(runs: Sequence[LanguageRun], terms: Surface) -> dict[str, object]:
    """Nested choice among `CHOICES`: for each size left out that is taken whose best batch and rate
    lose least, in the mean over the cells of the other sizes, each of them left out too; by the
    local quadratics, and by single runs.

    `terms` is any surface: its losses are not looked at.
    """
    sizes = sorted({run.cell[:2] for run in runs})
    cells = {size: sorted({run.cell for run in runs if run.cell[:2] == size}) for size in sizes}

    def left_out(choice: tuple[float, float], *out: tuple[float, float]) -> list[Bests]:
        """Of each size of `out` its cells, by a fit without all of them."""
        seen = [run for run in runs if run.cell[:2] not in out]
        surface = with_valley(terms, seen, width=choice[0], curvature_deviation=choice[1])
        return [
            [
                best_of(surface, [r for r in runs if r.cell == cell], valley_alone=True)
                for cell in cells[size]
            ]
            for size in out
        ]

    alone = {(choice, size): left_out(choice, size)[0] for choice in CHOICES for size in sizes}
    pairs = {
        (choice, pair): left_out(choice, *pair)
        for choice in CHOICES
        for pair in combinations(sizes, 2)
    }
    found: dict[str, object] = {}
    for measure in ("excess", "called_excess"):
        within = {size: dict.fromkeys(CHOICES, 0.0) for size in sizes}
        for (choice, (one, other)), (of_one, of_other) in pairs.items():
            within[one][choice] += sum(each[measure] for each in of_other)
            within[other][choice] += sum(each[measure] for each in of_one)
        taken = {size: min(within[size], key=within[size].__getitem__) for size in sizes}
        chosen = [each for size in sizes for each in alone[taken[size], size]]
        found[f"by {measure}"] = {
            "taken": [f"{n:.3g} x {s:.3g}: {taken[n, s]}" for n, s in sizes],
            **summary_of(chosen),
        }
    found["by itself, largest excess"] = {
        str(choice): max(each["excess"] for size in sizes for each in alone[choice, size])
        for choice in CHOICES
    }
    return found


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


def summary_of(bests: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean and largest of each of the measures of `best_of`, and the share of cells in the goal."""
    found: dict[str, float] = {"cells": len(bests)}
    for name in bests[0]:
        values = [each[name] for each in bests]
        found |= {f"mean_{name}": float(np.mean(values)), f"largest_{name}": max(values)}
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


def main() -> None:
    """Fit, leave out, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    dense = runs_of("steplaw_dense_lr_batch_loss")
    experts = runs_of("steplaw_moe_lr_batch_loss")
    every = [*dense, *experts]
    used = fitted(every)
    results: dict[str, object] = {"runs": len(every), "fitted": len(used)}
    whole = with_valley(fit_surface(used), used)
    results["choice of the valley's form"] = choose(used, whole)
    results["in sample"] = {
        name: float(np.mean(np.abs(errors_of(whole, [r for r in used if (r.sparsity > 1) == moe]))))
        for name, moe in (("dense", False), ("experts", True))
    }
    for name, cells in (("cells", sorted({run.cell for run in used})), ("beyond", FAR)):
        results[f"loss at the best over its least, {name}"] = found = excess_at_best(whole, cells)
        print(f"loss at the best over its least, {name}: {json.dumps(found)}")
    rows, left_out, squares, beyond, far = [], [], [], [], []
    for kind, name, is_out in splits(used):
        seen = [run for run in used if not is_out(run)]
        surface = with_valley(fit_surface(seen), seen)
        if kind == "size and tokens":
            left_out.append(surface)
        for what, moe in (("dense", False), ("experts", True)):
            out = [run for run in used if is_out(run) and (run.sparsity > 1) == moe]
            # Of experts nothing is foretold by runs without any.
            if not out or not any((r.sparsity > 1) == moe for r in used if not is_out(r)):
                continue
            errors = errors_of(surface, out)
            cells = sorted({run.cell for run in out})
            bests = [best_of(surface, [run for run in out if run.cell == c]) for c in cells]
            rows.append(
                {
                    "left_out": kind, "name": name, "what": what, "runs": len(out),
                    "mean_error": float(np.mean(np.abs(errors))), "bias": float(np.mean(errors)),
                    "best": bests,
                }
            )  # fmt: skip
            print(f"{kind}, {name}, {what}: {rows[-1]['mean_error']:.2%}, {rows[-1]['bias']:+.2%}")
            if kind == "size and tokens":
                squares += [each**2 for each in errors]
            if kind == "beyond":
                kept = [r for r in used if not is_out(r) and (r.sparsity > 1) == moe]
                # A root mean square of each cell: mean errors of runs would cancel.
                for cell in cells:
                    same = [run for run in out if run.cell == cell]
                    far.append(distance(same[0], kept))
                    beyond.append(math.sqrt(float(np.mean(np.square(errors_of(surface, same))))))
    summary: dict[str, object] = {}
    for kind in dict.fromkeys(str(row["left_out"]) for row in rows):
        for what in ("dense", "experts"):
            some = [row for row in rows if row["left_out"] == kind and row["what"] == what]
            if not some:
                continue
            weights = [row["runs"] for row in some]
            summary[f"{kind}, {what}"] = {
                "mean_error": float(np.average([r["mean_error"] for r in some], weights=weights)),
                "worst": max(row["mean_error"] for row in some),
            } | summary_of([each for row in some for each in row["best"]])  # fmt: skip
    results["summary"], results["rows"] = summary, rows
    draws = np.random.default_rng(SEED)
    noise = {
        str(cell): noise_of([run for run in used if run.cell == cell], draws)
        for cell in sorted({run.cell for run in used})
    }
    results["noise"] = noise
    chances = np.array([each["truly_best_beyond_goal"] for each in noise.values()])
    print(
        f"cells in which the truly best run is beyond the goal: {chances.sum():.2f} in the mean, "
        f"none with a probability of {np.prod(1 - chances):.2f}"
    )
    results["divergence, dense"] = divergence_errors(dense)
    deviation = math.sqrt(float(np.mean(squares)))
    deviation_beyond = deviation_by_distance(beyond, far)
    results["deviation"], results["deviation_beyond"] = deviation, deviation_beyond
    print(json.dumps(summary, indent=1), results["divergence, dense"], deviation, deviation_beyond)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if arguments.write:
        model = LossModel(
            name="Step Law (Li et al. 2025, arXiv 2503.04715)",
            surface=whole,
            cells=tuple(sorted({run.cell for run in used})),
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
