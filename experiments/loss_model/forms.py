"""Other forms of the sum of a loss surface, by sizes and by cells left out.

    python experiments/loss_model/forms.py

Each is fitted and judged like the one that is kept (`fit.py`); its best batch and rate are those of
the sum itself, without a valley.
"""

import csv
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fit import best_of, errors_of, fitted, mean_of, splits, summary_of

from scalejax.planning.convergence.loss_surface import (
    LanguageRun,
    Surface,
    fit_surface,
    relative_loss,
)
from scalejax.validation.convergence import ExpertLossRow, LossRow
from scalejax.validation.kinds import find_ledger, read_any

BASE = (1.3, -0.3, 0.25, 0.05)
TERMS = (
    # ln C, then exponents of rate, batch, parameters, tokens, sparsity, that a fit begins at
    (-1.5, -0.2, 0.1, 0.0, -0.3, 0.0),  # tokens that are missing
    (-3.5, 0.4, -0.7, 0.3, 0.0, 0.0),  # noise of small batches
    (-4.0, 1.0, 0.0, 0.7, -0.3, 0.0),  # heat of high rates
    (-4.0, -0.3, 0.7, 0.0, -0.7, 0.0),  # updates that are too few
)
EDGE = (-6.0, 3.0, -0.5, 1.0, -0.3, 0.0)
"""A fifth term, which rises at the edge of divergence."""
Measure = Callable[[LossRow], float]


def widths(row: LossRow) -> float:
    """Width of all experts over that of a token's."""
    return row.sparsity


def experts(row: LossRow) -> float:
    """Experts over experts of a token."""
    return row.nume / row.topk if isinstance(row, ExpertLossRow) else 1.0


def parameters() -> Measure:
    """All over active parameters."""
    path = find_ledger("steplaw_moe_lr_batch_loss")
    with lzma.open(path, "rt", newline="") as file:
        active = {
            row["exp_name"]: float(row["N"]) / float(row["Na"]) for row in csv.DictReader(file)
        }
    return lambda row: active.get(row.exp_name, 1.0)


@dataclass(frozen=True, slots=True)
class Form:
    """A form of the sum."""

    name: str
    terms: tuple[tuple[float, ...], ...] = TERMS
    measure: Measure = widths
    """Of sparsity."""
    weights: tuple[float, float] | None = None
    """Width and floor of weights by the loss over the best of a cell; None for equal ones."""
    is_of_dense: bool = False
    """Whether experts are left out of it."""

    def fit(self, runs: Sequence[LanguageRun]) -> Surface:
        """To runs."""
        weights = None
        if self.weights:
            width, floor = self.weights
            weights = np.exp(-0.5 * ((relative_loss(runs) - 1) / width) ** 2) + floor
            weights /= weights.mean()
        return fit_surface(runs, start=Surface(base=BASE, terms=self.terms), weights=weights)


def forms() -> list[Form]:
    """Those that are tried."""
    five = (*TERMS, EDGE)
    return [
        Form("kept: four terms, widths of experts"),
        Form("three terms", TERMS[1:]),
        Form("five terms, one for the edge of divergence", five),
        Form("sparsity as all over active parameters", measure=parameters()),
        Form("sparsity as experts over experts of a token", measure=experts),
        Form("weights of 1 %, floor 0.03", weights=(0.01, 0.03)),
        Form("weights of 0.6 %, floor 0.003", weights=(0.006, 0.003)),
        Form("five terms, weights of 0.6 %, floor 0.003", five, weights=(0.006, 0.003)),
        Form("dense runs alone", is_of_dense=True),
    ]


def main() -> None:
    """Print the table."""
    rows = [
        row
        for kind in ("dense", "moe")
        for row in read_any(find_ledger(f"steplaw_{kind}_lr_batch_loss")).rows
        if isinstance(row, LossRow)
    ]
    print(
        "| form | left out | mean error | called run: mean, largest, within 0.3 % "
        "| quadratic: mean, largest, within 0.3 % | rate, batch: largest factor |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for form in forms():
        runs = fitted([replace(row.run, sparsity=form.measure(row)) for row in rows])
        if form.is_of_dense:
            runs = [run for run in runs if run.sparsity == 1]
        for kind in ("size", "size and tokens"):
            errors: dict[bool, list[float]] = {False: [], True: []}
            bests: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for each, _, is_out in splits(runs):
                if each != kind:
                    continue
                surface = form.fit([run for run in runs if not is_out(run)])
                out = [run for run in runs if is_out(run)]
                is_moe = out[0].sparsity > 1
                errors[is_moe] += errors_of(surface, out)
                for cell in sorted({run.cell for run in out}):
                    same = [run for run in out if run.cell == cell]
                    bests[is_moe].append(best_of(surface, same))
            for is_moe, found in bests.items():
                if found:
                    of, name = summary_of(found), "experts" if is_moe else "dense"
                    shown = [
                        f"{mean_of(found, by):.2%}, {of[f'largest_{by}']:.2%}, "
                        f"{of[f'within_0.3_percent_by_{by}']:.0%}"
                        for by in ("called_excess", "excess")
                    ]
                    print(
                        f"| {form.name} | {kind}, {name} | {np.mean(np.abs(errors[is_moe])):.2%} "
                        f"| {' | '.join(shown)} | {of['largest_rate_factor']:.2f}, "
                        f"{of['largest_batch_factor']:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
