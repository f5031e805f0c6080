"""Rates of XLA's kernels on the GPU that was measured, for its file in the catalogue.

    python experiments/gpu_parity/fit.py

From the operators of results.json and calibration/ alone; no time of a step is read. The probes of
2026-11-26 left in each operation what a call takes for every array that it is given or returns; it
is estimated from the operation of fewest bytes, and taken out.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

from scalejax import load_cluster
from scalejax.hardware import Attainable, Chip, MeasuredRates
from scalejax.simulator.operations.matmul import (
    Product,
    compulsory_bytes,
    product_flop,
    product_time,
)
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import ConvolutionPass, Operation

HERE = Path(__file__).resolve().parent
LEAST_FLOP = 2**39
"""Of products that are long beside what the probes left in them, and keep the clocks down."""
LEAST_CHANNELS = 64
"""Of convolutions that matrix units are filled by: not the first layer of a network of images."""
SHARES: dict[ConvolutionPass, str] = {
    "forward": "",
    "input_gradient": "input_gradient_share",
    "filter_gradient": "filter_gradient_share",
}


def seconds_per_array(measured: MeasuredRates, launch: float) -> float:
    """Time of a call for each array: the smallest element-wise operation reads one and writes one,
    and takes no longer than a launch itself."""
    size, rate = measured.stream[0]
    return (size / rate - launch) / 2


def memory_rate(measured: MeasuredRates) -> float:
    """Bytes/s of large element-wise operations: of the difference of the two largest."""
    (small, at_small), (large, at_large) = measured.stream[-2:]
    return (large - small) / (large / at_large - small / at_small)


def sustained(measured: MeasuredRates, chip: Chip, aside: float) -> list[float]:
    """Rates of the largest products in bf16 over those of the chip's table of single products."""
    found = []
    for *sizes, rate in measured.matmul["bf16"]:
        batch, m, n, k = shape = (sizes[0], sizes[1], sizes[2], sizes[3])
        flop = product_flop((batch, m, n, k))
        if flop < LEAST_FLOP:
            continue
        moved = compulsory_bytes(shape, "bf16")
        product = Product(shape=shape, flop=flop, moved_bytes=moved, dtype="bf16")
        found.append(product_time(product, chip).busy_seconds / (flop / rate - 3 * aside))
    return found


def convolution(
    sizes: tuple[int, int, int, int, int], size: int, name: ConvolutionPass
) -> Operation:
    """The convolution of a row of the probes, over images of `size` x `size`."""
    samples, positions, inputs, outputs, window = sizes
    image = samples * size**2 * inputs
    moved = 2 * (image + samples * positions * outputs + inputs * outputs * window)
    return Operation(
        name="convolution",
        kind="convolution",
        dtype="bf16",
        flop=2 * math.prod(sizes),
        read_bytes=moved,
        shape=sizes,
        convolution_pass=name,
    )


def convolution_rates(measured: MeasuredRates, chip: Chip, aside: float) -> Attainable:
    """`chip.attainable` with the fraction of convolutions, and the shares of their gradients, at
    which the median of each pass is that measured: by bisection."""
    attainable = chip.attainable
    for name, share in SHARES.items():
        rows = [row for row in measured.convolution[f"{name}_bf16"] if row[2] >= LEAST_CHANNELS]
        field = share or "convolution_fraction"
        low, high = 0.01, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            trial = replace(chip, attainable=replace(attainable, **{field: middle}))
            is_slow = convolution_error(rows, name, trial, aside) > 0
            low, high = (middle, high) if is_slow else (low, middle)
        attainable = replace(attainable, **{field: low})
        print(f"{field} = {low:.3f}")
    return attainable


def convolution_error(
    rows: Sequence[tuple[int, int, int, int, int, float]],
    name: ConvolutionPass,
    chip: Chip,
    aside: float,
) -> float:
    """Median error of the time of one pass, each of three arrays taking `aside`."""
    errors = []
    for samples, positions, inputs, outputs, window, rate in rows:
        sizes = (samples, positions, inputs, outputs, window)
        operation = convolution(sizes, math.isqrt(positions), name)
        seconds = operation_time(operation, chip).busy_seconds
        errors.append(seconds / (operation.flop / rate - 3 * aside) - 1)
    return median(errors)


def main() -> None:
    """Print the rates, as fields of `Attainable`."""
    operators = json.loads((HERE / "results.json").read_text())["operators"]
    measured_chip = load_cluster(str(HERE / "calibration" / "cluster.toml")).chip
    measured, launch = measured_chip.measured, measured_chip.attainable.launch_seconds
    chip = load_cluster("dgx-h200").chip
    if measured is None:
        raise SystemExit("calibration/ holds no measured rates")
    aside = seconds_per_array(measured, launch)
    print(f"of a call for each array: {1e6 * aside:.2f} us")

    (gap,) = (
        row["each"]
        for row in operators["operators-launches"]["rows"]
        if row["operation"] == "add" and row["shape"] == [1024]
    )
    print(f"launch_seconds = {gap:.3g}")
    fraction = memory_rate(measured) / chip.memory_bytes_per_second
    print(f"memory_fraction = {fraction:.3f}")
    ratios = sustained(measured, chip, aside)
    print(f"sustained_fraction = {geometric_mean(ratios):.3f} of {len(ratios)} products, ", end="")
    print(f"{min(ratios):.3f} to {max(ratios):.3f}")
    rows = operators["operators-attention"]["rows"]
    peak = chip.peak("bf16")
    for row in rows:
        if row["heads"] == row["kv_heads"]:
            share = row["both_flop_per_second"] / peak
            print(f"    [{row['tokens']}, {row['head_size']}, {share:.3f}],")
    shares = [row["both_flop_per_second"] / peak for row in rows]
    print(f"attention_fraction = {geometric_mean(shares):.3f}")
    stated = replace(chip.attainable, memory_fraction=round(fraction, 3))
    convolution_rates(measured, replace(chip, attainable=stated), aside)


if __name__ == "__main__":
    main()
