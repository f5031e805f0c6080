"""Fits the rates of fused attention to AIConfigurator's measurements, and leaves rows out.

    python experiments/attention_rates/fit.py            # the errors
    python experiments/attention_rates/fit.py --write    # and the files of the catalogue

A measured layer is causal attention of a prompt, forward: rotary embedding and the writing of keys
and values (a pass over queries, keys and values), then the kernel. Its time is written as

    seconds = fixed + io x bytes / bandwidth + FLOP / (peak u) x (1 + s / tokens)

with u and s by head size; only these go to the catalogue. FLOP are those of the triangle.

The ledger mixes two kinds of row on Hopper and on Blackwell of data centres: where the cache of
keys and values is fp8 the kernel multiplies in fp8 (shares up to 0.996 of the bf16 peak are no
bf16), and the column that tells them apart is not in it. So there each row is slow or fast by a
mixture of two with a ratio by head size, of which the slow one is bf16; pairs of rows of equal
settings, one of each kind, are left out of every fit and say whether this holds.
"""

import argparse
import csv
import gzip
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from scalejax.hardware import load_attention_rates, load_chip
from scalejax.hardware.catalogue import CATALOGUE

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "2026" / "attention_forward_times.csv.gz"
SYSTEMS = {
    "a100-80gb": ("a100_sxm", "a100-80gb"),
    "h100": ("h100_sxm", "h100"),
    "h200": ("h200_sxm", "h200"),
    "b200": ("b200_sxm", "b200"),
    "b300": ("b300_sxm", "b300"),
    "gb200": ("gb200", "gb200"),
    "gb300": ("gb300", "gb300"),
    "l40s": ("l40s", "l40s"),
    "rtx-pro-6000-server": ("rtx_pro_6000_server", "rtx-pro-6000-server"),
}
"""Name of the rates: system of the ledger, chip of the catalogue."""
OF_TWO_KINDS = ("h100", "h200", "b200", "b300", "gb200", "gb300")
HEAD_SIZES = (64, 128, 256)
FOLDS = 5
FREEDOM = 4  # of Student's t, whose tails leave outliers alone

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Measured layers, each array [rows]."""

    batch: Floats
    tokens: Floats
    heads: Floats
    kv_heads: Floats
    head_size: Floats
    seconds: Floats

    def at(self, mask: NDArray[np.bool_]) -> "Rows":
        """Those of a mask."""
        return Rows(**{name: getattr(self, name)[mask] for name in Rows.__dataclass_fields__})

    @property
    def flop(self) -> Floats:
        """Two products of scores, half of each."""
        return 2 * self.batch * self.heads * self.tokens**2 * self.head_size

    @property
    def moved_bytes(self) -> Floats:
        """Queries, keys and values read and written, then queries read and the result written."""
        row = 2 * (self.heads + 2 * self.kv_heads) + 2 * self.heads
        return 2 * self.batch * self.tokens * self.head_size * row

    def settings(self) -> list[tuple[float, ...]]:
        """What a row states."""
        names = ("batch", "tokens", "heads", "kv_heads", "head_size")
        return list(zip(*(getattr(self, name) for name in names), strict=True))


def read(system: str) -> Rows:
    """bf16 layers of one system without a window."""
    found: list[tuple[float, ...]] = []
    with gzip.open(LEDGER, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["system"], row["dtype"], row["window"]) != (system, "bfloat16", "0"):
                continue
            sizes = ("batch", "sequence", "heads", "kv_heads", "head_dim")
            found.append((*(float(row[name]) for name in sizes), float(row["microseconds"]) * 1e-6))
    columns = np.array(found).T
    return Rows(**dict(zip(Rows.__dataclass_fields__, columns, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Constants of one chip."""

    fixed_seconds: float
    io: float
    """Passes over the bytes at the peak bandwidth."""
    sizes: tuple[int, ...]
    """Head sizes."""
    share: Floats
    """u, by head size."""
    half_tokens: Floats
    """s, by head size."""
    speedup: Floats
    """Rate of the fast kind over that of the slow one, by head size."""
    slow_weight: float
    """Share of rows that are slow."""
    width: float
    """Spread of the logarithm of a row about the form."""

    def times(self, rows: Rows, peak: float, bandwidth: float) -> tuple[Floats, Floats]:
        """Seconds of each row, were it slow, and were it fast; head sizes between those of the fit
        are interpolated in the logarithms."""
        at = np.log2(rows.head_size)
        known = np.log2(np.array(self.sizes, float))

        def of_size(values: Floats) -> Floats:
            return np.exp(np.interp(at, known, np.log(np.maximum(values, 1e-9))))

        beside = self.fixed_seconds + self.io * rows.moved_bytes / bandwidth
        kernel = rows.flop / (peak * of_size(self.share))
        kernel = kernel * (1 + of_size(self.half_tokens) / rows.tokens)
        return beside + kernel, beside + kernel / of_size(self.speedup)

    def slow_probability(self, rows: Rows, peak: float, bandwidth: float) -> Floats:
        """Probability of each row to be slow."""
        slow, fast = self.times(rows, peak, bandwidth)
        one = self.slow_weight * _density(np.log(rows.seconds / slow), self.width)
        other = (1 - self.slow_weight) * _density(np.log(rows.seconds / fast), self.width)
        return one / (one + other + 1e-300)


def _density(residual: Floats, width: float) -> Floats:
    return (1 + (residual / width) ** 2 / FREEDOM) ** (-(FREEDOM + 1) / 2) / width


def fit(rows: Rows, peak: float, bandwidth: float, *, of_two_kinds: bool) -> Fit:
    """The constants of most likelihood."""
    sizes = tuple(size for size in HEAD_SIZES if (rows.head_size == size).any())
    rows = rows.at(np.isin(rows.head_size, sizes))
    count = len(sizes)

    def unpacked(x: Floats) -> Fit:
        shares, halves, speedups = np.split(np.exp(x[2 : 2 + 3 * count]), 3)
        return Fit(
            fixed_seconds=math.exp(x[0]) * 1e-6,
            io=math.exp(x[1]),
            sizes=sizes,
            share=shares,
            half_tokens=halves,
            speedup=speedups,
            slow_weight=float(1 / (1 + math.exp(-x[-2]))) if of_two_kinds else 1.0,
            width=math.exp(x[-1]),
        )

    def loss(x: Floats) -> float:
        if np.abs(x).max() > 20:
            return 1e9
        made = unpacked(x)
        slow, fast = made.times(rows, peak, bandwidth)
        density = made.slow_weight * _density(np.log(rows.seconds / slow), made.width)
        density += (1 - made.slow_weight) * _density(np.log(rows.seconds / fast), made.width)
        # A ratio near one would make one kind of two.
        bound = 50 * (np.maximum(0, math.log(1.05) - np.log(made.speedup)) ** 2).sum()
        bound += 20 * max(0.0, x[1] - 1.5) ** 2
        return float(bound - np.log(density + 1e-12).sum())

    fits: list[tuple[float, Floats]] = []
    for speedup in (1.3, 1.6) if of_two_kinds else (1.3,):
        start = np.log([5.0, 1.0, *[0.5] * count, *[400.0] * count, *[speedup] * count])
        x = np.concatenate([start, [0.3, math.log(0.08)]])
        for method, options in (
            ("Powell", {"maxiter": 6000, "maxfev": 30000}),
            ("Nelder-Mead", {"maxiter": 6000, "maxfev": 6000, "adaptive": True}),
        ):
            found = minimize(loss, x, method=method, options=options)
            x = found.x
        fits.append((loss(x), x))
    return unpacked(min(fits, key=lambda each: each[0])[1])


def errors_of(
    made: Fit, rows: Rows, peak: float, bandwidth: float, *, of_two_kinds: bool
) -> Floats:
    """(predicted - measured) / measured of the rows that are more likely slow than fast."""
    slow, _ = made.times(rows, peak, bandwidth)
    if of_two_kinds:
        chosen = made.slow_probability(rows, peak, bandwidth) > 0.5
        return (slow / rows.seconds - 1)[chosen]
    return slow / rows.seconds - 1


def left_out(
    rows: Rows,
    peak: float,
    bandwidth: float,
    *,
    of_two_kinds: bool,
    group: Callable[[Rows], Floats],
) -> Floats:
    """Errors of rows whose group (sequence, heads) is left out of the fit, in folds."""
    values = group(rows)
    folds = np.searchsorted(np.unique(values), values) % FOLDS
    found = []
    for fold in range(FOLDS):
        out = folds == fold
        if out.any() and not out.all():
            made = fit(rows.at(~out), peak, bandwidth, of_two_kinds=of_two_kinds)
            found.append(errors_of(made, rows.at(out), peak, bandwidth, of_two_kinds=of_two_kinds))
    return np.concatenate(found)


def write(name: str, system: str, made: Fit, chip: str) -> None:
    """The file of the catalogue."""
    version = "1.0.0" if system == "a100_sxm" else "1.3.0rc20"
    source = (
        f"NVIDIA AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0), context_attention_perf of "
        f"TensorRT-LLM {version}: causal attention of 1,024 to 16,384 tokens in bf16, forward; "
        f"only fitted constants are kept here"
    )
    fitted = "fitted by experiments/attention_rates/fit.py"
    lines = [f'name = "{name}"', f'source = "{source}"']
    lines += ["both_over_forward = 1.0", f"layer_seconds = {made.fixed_seconds:.3g}"]
    lines += [f"layer_passes = {made.io:.3g}"]
    lines += ["", "by_head_size = [  # head size, share, tokens"]
    lines += [
        f"  [{size}, {share:.3f}, {half:.0f}],"
        for size, share, half in zip(made.sizes, made.share, made.half_tokens, strict=True)
    ]
    lines += ["]", "", "[sources]", f'by_head_size = "{fitted}, of the peak in chips/{chip}.toml"']
    lines += [
        'both_over_forward = "cuDNN forward and backward on an H200 over TensorRT-LLM forward by '
        'these rates: 1.00 in the mean of 10 shapes, experiments/attention_rates/fit.py"'
    ]
    lines += [f'{each} = "{fitted}"' for each in ("layer_seconds", "layer_passes")]
    path = CATALOGUE / "attention_rates" / f"{name}.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Print the errors; write the rates on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*", default=[])
    arguments = parser.parse_args()
    print(
        "| chip | rows | u, s by head size | mean / p90 | sequences out | heads out | pairs | 192 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, (system, chip_name) in SYSTEMS.items():
        if not arguments.names or name in arguments.names:
            _report(name, system, chip_name, writes=arguments.write)
    _against_cudnn()


def _report(name: str, system: str, chip_name: str, *, writes: bool) -> None:
    chip = load_chip(chip_name)
    peak, bandwidth = chip.peak_flop_per_second["bf16"], chip.memory_bytes_per_second
    every = read(system)
    two = name in OF_TWO_KINDS
    counts = Counter(every.settings())
    is_pair = np.array([counts[each] > 1 for each in every.settings()])
    within = np.isin(every.head_size, HEAD_SIZES)
    rows = every.at(within & ~is_pair) if two else every.at(within)
    made = fit(rows, peak, bandwidth, of_two_kinds=two)
    if writes:
        write(name, system, made, chip_name)
    errors = np.abs(errors_of(made, rows, peak, bandwidth, of_two_kinds=two))
    parts = [
        np.abs(left_out(rows, peak, bandwidth, of_two_kinds=two, group=group))
        for group in (lambda each: each.tokens, lambda each: each.heads)
    ]
    pairs = "-"
    if two:
        of_pair: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for index, settings in enumerate(every.settings()):
            if is_pair[index] and settings[-1] in HEAD_SIZES:
                of_pair[settings].append(index)
        slower = [max(found, key=lambda i: every.seconds[i]) for found in of_pair.values()]
        slow, _ = made.times(every, peak, bandwidth)
        off = slow[slower] / every.seconds[slower] - 1
        pairs = f"{np.abs(off).mean():.1%}, bias {np.median(off):+.1%} ({len(off)})"
    between = every.at((every.head_size == 192) & ~is_pair)
    inner = "-"
    if len(between.seconds):
        off = np.abs(errors_of(made, between, peak, bandwidth, of_two_kinds=two))
        inner = f"{off.mean():.1%} ({len(off)})"
    constants = ", ".join(
        f"{size}: {share:.3f}, {half:.0f}"
        for size, share, half in zip(made.sizes, made.share, made.half_tokens, strict=True)
    )
    print(
        f"| {name} | {len(errors)} of {len(rows.seconds)} | {constants} | {errors.mean():.1%} / "
        f"{np.quantile(errors, 0.9):.1%} | {parts[0].mean():.1%} | {parts[1].mean():.1%} "
        f"| {pairs} | {inner} |"
    )


def _against_cudnn() -> None:
    """Measured forward and backward by cuDNN on an H200 over the forward rates of the catalogue."""
    rates = load_attention_rates("h200")
    ratios = [
        share / rates.share(tokens, size)
        for tokens, size, share in load_chip("h200").attainable.attention_by_shape
        if tokens <= 16384
    ]
    logs = np.log(ratios)
    ratio, spread = np.exp(logs.mean()), logs.std()
    print(f"cuDNN, both ways, over forward on H200: {ratio:.3f}, spread {spread:.3f}")


if __name__ == "__main__":
    main()
