"""How far off matrix products are that the surface was not fitted to: 5 folds over shapes.

    python experiments/gemm_rates/cross_validate.py

A shape is (batch, m, n, k), with all its types in the same fold. The time that `product_time`
would give with a surface fitted to the other four folds is held against the time measured.
"""

import math
from dataclasses import dataclass

import numpy as np

from scalejax.hardware import MatmulTable, RateType, load_matmul_table, matmul_table_names
from scalejax.simulator.operations.matmul import (
    Floats,
    Shape,
    compulsory_bytes,
    fit_surface,
    form_seconds,
    log_ratios,
    product_flop,
)

FOLDS = 5
SEEDS = 3
"""Ways of dealing the shapes to folds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """(predicted - measured) / measured of each product, left out of the fit."""

    surface: Floats
    """Of form and surface together."""
    form: Floats
    """Of the form alone."""


def folds_of(table: MatmulTable, seed: int) -> dict[Shape, int]:
    """The fold of each shape, as even as can be; the same for all its types."""
    shapes = list(dict.fromkeys(shape for of_type in table.shapes.values() for shape in of_type))
    folds = np.random.default_rng(seed).permutation(len(shapes)) % FOLDS
    return dict(zip(shapes, folds.tolist(), strict=True))


def cross_validated(table: MatmulTable, kind: RateType, seed: int) -> Errors:
    """The errors of every product of one type when its fold is left out."""
    ratios, shapes = log_ratios(table, kind), table.shapes[kind]
    fold_of_shape = folds_of(table, seed)
    folds = np.array([fold_of_shape[shape] for shape in shapes])
    surface_errors, form_errors = np.zeros(len(ratios)), np.zeros(len(ratios))
    for fold in range(FOLDS):
        known = tuple(s for s, f in zip(shapes, folds, strict=True) if f != fold)
        surface = fit_surface(known, ratios[folds != fold])
        for i in np.flatnonzero(folds == fold):
            shape = shapes[i]
            form = form_seconds(table.form, kind, shape)
            measured = form * math.exp(ratios[i])
            seconds = max(form * math.exp(surface.at(shape)), _least_seconds(table, kind, shape))
            surface_errors[i] = seconds / measured - 1
            form_errors[i] = form / measured - 1
    return Errors(surface=surface_errors, form=form_errors)


def _least_seconds(table: MatmulTable, kind: RateType, shape: Shape) -> float:
    """FLOP at the peak, or bytes at the bandwidth, beside the measurement's own time."""
    form = table.form
    return form.aside_seconds + max(
        product_flop(shape) / form.peak_flop_per_second[kind],
        compulsory_bytes(shape, kind) / form.memory_bytes_per_second,
    )


def main() -> None:
    """Print the mean absolute errors by chip and type."""
    print(f"mean absolute error, {FOLDS}-fold cross-validation over shapes, {SEEDS} dealings")
    print("table        type   products   surface   form alone")
    for name in matmul_table_names():
        table = load_matmul_table(name)
        everything: list[Errors] = []
        for kind in table.flop_per_second:
            errors = [cross_validated(table, kind, seed) for seed in range(SEEDS)]
            everything += errors
            _print(name, kind, errors)
        _print(name, "all", everything)


def _print(chip: str, kind: str, errors: list[Errors]) -> None:
    count = sum(len(each.form) for each in errors) // SEEDS
    surface = np.abs(np.concatenate([each.surface for each in errors])).mean()
    form = np.abs(np.concatenate([each.form for each in errors])).mean()
    print(f"{chip:12} {kind:6} {count:8} {surface:9.2%} {form:12.2%}")


if __name__ == "__main__":
    main()
