"""Tables of matrix products from AIConfigurator's measurements, and their error on rows left out.

    python experiments/gemm_rates/tabulate.py --write     # the catalogue's tables, then the errors
    python experiments/gemm_rates/tabulate.py             # the errors alone

What was measured is a linear layer: in fp8 and fp4 its input, in bf16, is cast before. The cast is
fitted as a time for each element of the input beside a fixed one, and taken off; products of which
it takes over a third are left out. Of the rest a part that fills the space of shapes goes into the
catalogue, and the errors are those of all other rows, which no table holds.
"""

import argparse
import csv
import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from scalejax.hardware import (
    Chip,
    MatmulForm,
    MatmulTable,
    RateType,
    load_chip,
    load_matmul_table,
)
from scalejax.hardware.catalogue import CATALOGUE
from scalejax.simulator.operations.matmul import (
    Shape,
    compulsory_bytes,
    fit_surface,
    form_seconds,
    log_ratios,
    product_flop,
)

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "2026" / "gemm_times.csv.gz"
TYPES: dict[str, RateType] = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}
BLOCKS = "fp8_block"
LARGEST_CAST_SHARE = 1 / 3
SHAPES_OF_A_TYPE = 220
LARGEST_SHARE_OF_ROWS = 0.75
"""Rows that a table may hold; the errors are those of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One table to make."""

    system: str
    """Name in the ledger."""
    chip: str
    """Chip of the catalogue."""
    base: str | None = None
    """Table of XLA's that it extends."""


TARGETS = {
    "a100-80gb": Target(system="a100_sxm", chip="a100-80gb"),
    "h100-2026": Target(system="h100_sxm", chip="h100", base="h100"),
    "h200": Target(system="h200_sxm", chip="h200"),
    "b200-2026": Target(system="b200_sxm", chip="b200", base="b200"),
    "b300": Target(system="b300_sxm", chip="b300"),
    "gb200": Target(system="gb200", chip="gb200"),
    "gb300": Target(system="gb300", chip="gb300"),
    "l40s": Target(system="l40s", chip="l40s"),
    "rtx-pro-6000-server": Target(system="rtx_pro_6000_server", chip="rtx-pro-6000-server"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Products of one type on one chip."""

    shapes: tuple[Shape, ...]
    seconds: NDArray[np.float64]
    """Of the product, the cast of its input taken off."""
    cast_seconds: NDArray[np.float64]
    """What was taken off."""
    cast_per_element: float
    cast_fixed: float


def measurements(
    system: str, types: dict[str, RateType] = TYPES
) -> dict[RateType, tuple[tuple[Shape, ...], NDArray[np.float64]]]:
    """(shapes, seconds) by type, of sides that are multiples of 8."""
    found: dict[RateType, list[tuple[Shape, float]]] = {}
    with gzip.open(LEDGER, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = (1, int(row["m"]), int(row["n"]), int(row["k"]))
            if row["system"] == system and row["dtype"] in types and shape[1] % 8 == 0:
                seconds = float(row["microseconds"]) * 1e-6
                found.setdefault(types[row["dtype"]], []).append((shape, seconds))
    return {
        kind: (tuple(shape for shape, _ in rows), np.array([seconds for _, seconds in rows]))
        for kind, rows in found.items()
    }


def without_cast(
    shapes: tuple[Shape, ...], seconds: NDArray[np.float64], kind: RateType, chip: Chip
) -> Measured:
    """The products alone: seconds = ramp + cast + max(FLOP / (peak u), bytes / (bandwidth v)),
    with cast = a + b m k, by the least mean absolute error of the logarithm."""
    flop = np.array([product_flop(shape) for shape in shapes], float)
    moved = np.array([compulsory_bytes(shape, kind) for shape in shapes], float)
    elements = np.array([shape[1] * shape[3] for shape in shapes], float)
    peak, bandwidth = chip.peak_flop_per_second[kind], chip.memory_bytes_per_second
    ramp = chip.attainable.matmul_ramp_seconds

    def parts(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        product = ramp + np.maximum(
            flop / (peak * np.exp(x[0])), moved / (bandwidth * np.exp(x[1]))
        )
        cast = np.exp(x[2]) * 1e-6 + np.exp(x[3]) * 1e-12 * elements
        return product, cast

    def error(x: NDArray[np.float64]) -> float:
        product, cast = parts(x)
        bound = 10 * (max(0.0, x[0]) + max(0.0, x[1]) + max(0.0, -1.0 - x[1]))
        return float(np.abs(np.log(seconds / (product + cast))).mean()) + bound

    if kind == "bf16":
        nothing = np.zeros(len(shapes))
        return Measured(
            shapes=shapes, seconds=seconds, cast_seconds=nothing, cast_per_element=0, cast_fixed=0
        )
    starts = [np.log([u, 0.8, 5.0, b]) for u in (0.5, 0.7) for b in (0.5, 2.0)]
    options = {"maxiter": 4000, "maxfev": 4000}
    best = min(
        (minimize(error, start, method="Nelder-Mead", options=options) for start in starts),
        key=lambda found: found.fun,
    )
    _, cast = parts(best.x)
    kept = cast < LARGEST_CAST_SHARE * seconds
    return Measured(
        shapes=tuple(shape for shape, keep in zip(shapes, kept, strict=True) if keep),
        seconds=(seconds - cast)[kept],
        cast_seconds=cast[kept],
        cast_per_element=float(np.exp(best.x[3]) * 1e-12),
        cast_fixed=float(np.exp(best.x[2]) * 1e-6),
    )


def spread(shapes: tuple[Shape, ...], count: int) -> list[int]:
    """Indices of so many shapes, each the one farthest from those before it; sizes in powers of
    two (Gonzalez 1985)."""
    places = np.log2(np.array(shapes, float))
    chosen = [int(places.sum(axis=1).argmax())]
    gaps = np.linalg.norm(places - places[chosen[0]], axis=1)
    while len(chosen) < min(count, len(shapes)):
        chosen.append(int(gaps.argmax()))
        gaps = np.minimum(gaps, np.linalg.norm(places - places[chosen[-1]], axis=1))
    return sorted(chosen)


def table_of(name: str, target: Target) -> tuple[MatmulTable, dict[RateType, Measured]]:
    """The table, and all that was measured of each type."""
    chip = load_chip(target.chip)
    measured: dict[RateType, Measured] = {
        kind: without_cast(*rows, kind, chip) for kind, rows in measurements(target.system).items()
    }
    shapes: dict[RateType, tuple[Shape, ...]] = {}
    rates: dict[RateType, tuple[float, ...]] = {}
    form = _form(name, target, chip, measured)
    if target.base is not None:
        base = load_matmul_table(target.base)
        for kind in base.shapes:
            below = [
                (shape, rate)
                for shape, rate in zip(base.shapes[kind], base.flop_per_second[kind], strict=True)
                if rate <= form.peak_flop_per_second[kind]
            ]
            shapes[kind] = tuple(shape for shape, _ in below)
            rates[kind] = tuple(rate for _, rate in below)
    for kind, of_type in measured.items():
        known = set(shapes.get(kind, ()))
        count = min(SHAPES_OF_A_TYPE, int(LARGEST_SHARE_OF_ROWS * len(of_type.shapes)))
        for i in spread(of_type.shapes, count):
            shape = of_type.shapes[i]
            if shape in known:
                continue
            rate = product_flop(shape) / (of_type.seconds[i] + form.aside_seconds)
            if rate > form.peak_flop_per_second[kind]:
                continue
            shapes[kind] = (*shapes.get(kind, ()), shape)
            rates[kind] = (*rates.get(kind, ()), rate)
    return MatmulTable(form=form, shapes=shapes, flop_per_second=rates), measured


def _form(name: str, target: Target, chip: Chip, measured: dict[RateType, Measured]) -> MatmulForm:
    attainable = chip.attainable
    if target.base is not None:
        base = load_matmul_table(target.base).form
        peaks = dict(base.peak_flop_per_second)
        peaks |= {kind: chip.peak_flop_per_second[kind] for kind in measured if kind not in peaks}
        return replace(base, name=name, peak_flop_per_second=peaks)
    bf16 = measured["bf16"]
    large = [
        product_flop(shape) / seconds / chip.peak_flop_per_second["bf16"]
        for shape, seconds in zip(bf16.shapes, bf16.seconds, strict=True)
        if min(shape[1:]) >= 4096
    ]
    return MatmulForm(
        name=name,
        source=SOURCE.format(version=VERSION.get(target.system, "1.3.0rc20")),
        peak_flop_per_second={kind: chip.peak_flop_per_second[kind] for kind in measured},
        memory_bytes_per_second=chip.memory_bytes_per_second,
        matmul_fraction=round(float(np.median(large)), 3),
        memory_fraction=0.85,
        fixed_seconds=attainable.matmul_ramp_seconds,
        aside_seconds=0.0,
        sources={},
    )


SOURCE = (
    "NVIDIA AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0), gemm_perf of TensorRT-LLM "
    "{version}: linear layers in CUDA graphs; the cast of inputs taken off by "
    "experiments/gemm_rates/tabulate.py"
)
VERSION = {"a100_sxm": "1.0.0"}


Layer = tuple[float, float, float]
"""Seconds, seconds for each element of the input, and the time of the product over the table's."""


def layers_of(
    target: Target, table: MatmulTable, measured: dict[RateType, Measured]
) -> dict[str, Layer]:
    """What layers of each type took besides the table's products: of fp8 and fp4 the cast that was
    taken off, of fp8 in blocks a cast and a slower product, by the least mean error."""
    found: dict[str, Layer] = {}
    for name, kind in TYPES.items():
        if kind != "bf16" and kind in measured:
            of_type = measured[kind]
            found[name] = (of_type.cast_fixed, of_type.cast_per_element, 1.0)
    blocks = measurements(target.system, {BLOCKS: "fp8"}).get("fp8")
    if blocks is None:
        return found
    shapes, seconds = blocks
    product = predicted(table, "fp8", shapes) - table.form.aside_seconds
    elements = np.array([shape[1] * shape[3] for shape in shapes], float)

    def error(x: NDArray[np.float64]) -> float:
        fixed, of_element, slower = np.exp(x)
        times = fixed * 1e-6 + of_element * 1e-12 * elements + slower * product
        return float(np.abs(np.log(seconds / times)).mean())

    options = {"maxiter": 4000, "maxfev": 4000}
    best = minimize(error, np.log([3.0, 1.0, 1.0]), method="Nelder-Mead", options=options)
    fixed, of_element, slower = np.exp(best.x)
    # Less than a nanosecond, or a femtosecond for each element, is none.
    cast = float(fixed * 1e-6) if fixed > 1e-3 else 0.0
    of_each = float(of_element * 1e-12) if of_element > 1e-3 else 0.0
    found[BLOCKS] = (cast, of_each, float(slower))
    return found


def predicted(table: MatmulTable, kind: RateType, shapes: tuple[Shape, ...]) -> NDArray[np.float64]:
    """Seconds of products by form and surface, what is aside included."""
    surface = fit_surface(table.shapes[kind], log_ratios(table, kind))
    return np.array(
        [form_seconds(table.form, kind, shape) * math.exp(surface.at(shape)) for shape in shapes]
    )


def write(name: str, target: Target, table: MatmulTable, layers: dict[str, Layer]) -> None:
    """Files of the catalogue."""
    form, folder = table.form, CATALOGUE / "matmul_rates"
    source = SOURCE.format(version=VERSION.get(target.system, "1.3.0rc20"))
    if target.base is not None:
        source = f"{load_matmul_table(target.base).form.source}; beyond them {source}"
    lines = [f'name = "{name}"', f'source = "{source}"']
    lines += [f"memory_bytes_per_second = {form.memory_bytes_per_second:.6g}"]
    lines += [f"memory_fraction = {form.memory_fraction}"]
    lines += [f"matmul_fraction = {form.matmul_fraction}"]
    lines += [f"fixed_seconds = {form.fixed_seconds:.2g}"]
    lines += [f"aside_seconds = {form.aside_seconds:.2g}"]
    lines += ["", "[peak_flop_per_second]  # dense, as in the chip's own file"]
    lines += [f"{kind} = {peak / 1e12:g}e12" for kind, peak in form.peak_flop_per_second.items()]
    if layers:
        lines += ["", "[layers]  # seconds, seconds for each element, time over the table's"]
        lines += [
            f"{kind} = [{cast:.3g}, {of_element:.3g}, {slower:.3g}]"
            for kind, (cast, of_element, slower) in layers.items()
        ]
    lines += ["", "[sources]"]
    lines += [
        f'"layers.{kind}" = "fitted by experiments/gemm_rates/tabulate.py: TensorRT-LLM\'s kernels"'
        for kind in layers
    ]
    own = f"as in chips/{target.chip}.toml"
    lines += [f'"peak_flop_per_second.{kind}" = "{own}"' for kind in form.peak_flop_per_second]
    lines += [f'memory_bytes_per_second = "{own}"']
    if target.base is not None:
        stated = f"as in matmul_rates/{target.base}.toml"
        lines += [f'{each} = "{stated}"' for each in ("memory_fraction", "matmul_fraction")]
        lines += [f'{each} = "{stated}"' for each in ("fixed_seconds", "aside_seconds")]
    else:
        lines += [f'memory_fraction = "{own}, or assumed as on H100 and B200 (XLA\'s tables)"']
        lines += [
            'matmul_fraction = "median of bf16 products whose sides are all at least 4,096: '
            'experiments/gemm_rates/tabulate.py"',
            f'fixed_seconds = "{own}: matmul_ramp_seconds"',
            'aside_seconds = "products follow each other in a CUDA graph: nothing is aside"',
        ]
    (folder / f"{name}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns: tuple[RateType, ...] = ("bf16", "tf32", "fp8", "fp4")
    kinds: list[RateType] = [kind for kind in columns if kind in table.shapes]
    by_shape: dict[Shape, dict[RateType, float]] = {}
    for kind in kinds:
        for shape, rate in zip(table.shapes[kind], table.flop_per_second[kind], strict=True):
            by_shape.setdefault(shape, {})[kind] = rate
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["batch", "m", "n", "k", *kinds])
        for shape in by_shape if target.base else sorted(by_shape):
            found = by_shape[shape]
            writer.writerow(
                [*shape, *(f"{found[kind]:.6g}" if kind in found else "" for kind in kinds)]
            )


def left_out(
    table: MatmulTable, measured: Measured, kind: RateType
) -> dict[str, NDArray[np.float64]]:
    """Relative errors on rows that the table does not hold: of the table, and of its form alone;
    and the smallest side of each."""
    surface = fit_surface(table.shapes[kind], log_ratios(table, kind))
    held = set(table.shapes[kind])
    errors: dict[str, list[float]] = {"table": [], "form": [], "smallest_side": []}
    for shape, seconds in zip(measured.shapes, measured.seconds, strict=True):
        if shape in held:
            continue
        form = form_seconds(table.form, kind, shape)
        least = max(
            product_flop(shape) / table.form.peak_flop_per_second[kind],
            compulsory_bytes(shape, kind) / table.form.memory_bytes_per_second,
        )
        predicted = max(form * math.exp(surface.at(shape)) - table.form.aside_seconds, least)
        errors["table"].append(predicted / seconds - 1)
        errors["form"].append((form - table.form.aside_seconds) / seconds - 1)
        errors["smallest_side"].append(min(shape[1:]))
    return {name: np.array(values) for name, values in errors.items()}


def main() -> None:
    """Print the errors; write the tables on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*", default=[])
    arguments = parser.parse_args()
    columns = ("rows in it", "left out", "mean", "p90", "sides from 4,096", "form alone", "cast")
    print("| table | type |", " | ".join(columns), "|")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, target in TARGETS.items():
        if arguments.names and name not in arguments.names:
            continue
        table, measured = table_of(name, target)
        if arguments.write:
            write(name, target, table, layers_of(target, table, measured))
        for kind, of_type in measured.items():
            errors = left_out(table, of_type, kind)
            absolute = np.abs(errors["table"])
            large = absolute[errors["smallest_side"] >= 4096]
            print(
                f"| {name} | {kind} | {len(table.shapes[kind])} | {len(absolute)} "
                f"| {absolute.mean():.1%} | {np.quantile(absolute, 0.9):.1%} "
                f"| {large.mean():.1%} ({len(large)}) | {np.abs(errors['form']).mean():.1%} "
                f"| {of_type.cast_fixed * 1e6:.1f} us + {of_type.cast_per_element * 1e12:.2f} ps |"
            )


if __name__ == "__main__":
    main()
