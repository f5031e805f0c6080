"""Fits the rates of grouped products to measured layers of experts, and holds layers out.

A measured layer is, on one device: tokens gathered by expert, products with the gate's, the up and
the down matrices, the activation between, and the results added up by token; forward only, in the
kernels of TensorRT-LLM (`moe_torch_flow_cutlass`). Its time is written as the two grouped products
(gate and up run as one), each by the form of `grouped_product_time`, plus the bytes of gather,
activation and sum at a fitted rate, plus a fixed time. The rates of products go to
`scalejax/hardware/grouped_matmul_rates/`; those of the rest are of these kernels, not XLA's.

    python experiments/grouped_products/fit.py            # constants and errors, into results.json
    python experiments/grouped_products/fit.py --write    # and the files of the catalogue
    python experiments/grouped_products/fit.py --surface  # the form against a table interpolated

Reads ../shared/ledger/2026/expert_gemm_forward_times.csv.gz, which is not in the repository.
Deterministic: least squares, no sampling but the expected loads of `expert_load`, which are seeded.
"""

import csv
import gzip
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from scalejax.hardware import Chip, RateType, load_chip
from scalejax.simulator.expert_load import device_load_factor
from scalejax.simulator.operations.matmul import fit_surface

REPOSITORY = Path(__file__).parents[2]
TABLE = REPOSITORY.parent / "shared" / "ledger" / "2026" / "expert_gemm_forward_times.csv.gz"
KERNEL, NONGATED = "moe_torch_flow_cutlass", "moe_torch_flow_nongated"
SYSTEMS = {
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
}
"""Measured systems whose chip is in the catalogue, and its name there."""
CARDS = {"l40s", "rtx_pro_6000_server"}
"""Those of them with GDDR in place of HBM."""
TYPES: dict[str, RateType] = {"bfloat16": "bf16", "fp8": "fp8"}
BYTES = {"bfloat16": 2, "fp8": 1}
TILES = (64, 128)
FOLDS = 5

Floats = NDArray[np.float64]
Row = dict[str, float | str]


def read(system: str, kernel: str, distribution: str) -> list[Row]:
    """Layers measured on one system."""
    with gzip.open(TABLE, "rt", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["system"], row["kernel"], row["distribution"]) == (system, kernel, distribution)
            and row["dtype"] in TYPES
        ]
    found: list[Row] = []
    for row in rows:
        each = {name: float(row[name]) for name in ("tokens", "hidden", "experts", "topk")}
        split = float(row["expert_parallel"])
        found.append(
            {
                **each,
                "dtype": row["dtype"],
                "network": f"{row['hidden']} {row['expert_hidden']} {row['experts']}",
                "width": float(row["expert_hidden"]) / float(row["tensor_parallel"]),
                "split": split,
                "groups": each["experts"] / split,
                "rows": each["tokens"] * each["topk"] / split,
                "seconds": float(row["microseconds"]) * 1e-6,
            }
        )
    return found


def column(rows: list[Row], name: str) -> Floats:
    """One figure of all layers."""
    return np.array([row[name] for row in rows], float)


class Layers:
    """Layers as arrays, with the peaks of the chip that they ran on."""

    def __init__(self, rows: list[Row], chip: Chip, load: Floats | float = 1.0) -> None:
        """Read `rows`; `load` multiplies the rows of a device."""
        self.rows = rows
        self.tokens, self.hidden, self.width = (
            column(rows, name) for name in ("tokens", "hidden", "width")
        )
        self.groups, self.routed = column(rows, "groups"), column(rows, "rows") * load
        self.seconds = column(rows, "seconds")
        self.is_fp8 = np.array([row["dtype"] == "fp8" for row in rows])
        self.bytes = np.where(self.is_fp8, 1.0, 2.0)
        peaks = chip.peak_flop_per_second
        self.peak = np.where(self.is_fp8, peaks["fp8"], peaks["bf16"])
        self.bandwidth = chip.memory_bytes_per_second


def modelled(layers: Layers, constants: Floats, tile: int, *, gated: bool = True) -> Floats:
    """Seconds of layers by the form.

    Args:
        layers: the layers.
        constants: logarithms of the fraction of the peak in bf16 and in fp8, of the fraction of
            the bandwidth, of the time of a group; then for each type of the fixed time and of the
            rate of the rest over the bandwidth.
        tile: rows of a tile.
        gated: whether there is a gate besides the up matrix.
    """
    bf16, fp8, memory, group, fixed_bf16, fixed_fp8, rest_bf16, rest_fp8 = np.exp(constants)
    fraction = np.where(layers.is_fp8, fp8, bf16)
    per_group = np.ceil(np.maximum(layers.routed / layers.groups, 1) / tile) * tile

    def product(outer: Floats, inner: Floats) -> Floats:
        flop = 2 * layers.groups * per_group * outer * inner
        moved = (layers.groups * outer * inner + layers.routed * inner) * layers.bytes
        moved += layers.routed * outer * 2
        arithmetic = flop / (layers.peak * fraction)
        return group * layers.groups + np.maximum(arithmetic, moved / (layers.bandwidth * memory))

    up = (2 if gated else 1) * layers.width
    rest = layers.routed * (2 * layers.hidden + up + layers.width) * 2
    rest += layers.tokens * 2 * layers.hidden * 2
    rate = layers.bandwidth * np.where(layers.is_fp8, rest_fp8, rest_bf16)
    fixed = np.where(layers.is_fp8, fixed_fp8, fixed_bf16)
    return fixed + product(up, layers.hidden) + product(layers.hidden, layers.width) + rest / rate


START = np.log([0.7, 0.7, 0.8, 1e-7, 3e-5, 3e-5, 0.5, 0.4])
LEAST = np.log([0.2, 0.2, 0.3, 1e-10, 5e-6, 5e-6, 0.05, 0.05])
MOST = np.log([0.95, 0.95, 0.98, 3e-6, 1e-4, 1e-4, 0.98, 0.98])


def fitted(layers: Layers) -> tuple[Floats, int]:
    """Constants and tile of least error in log time; robust, as one layer in ten is a misfit."""
    fits = [
        (
            least_squares(
                lambda x, tile=tile: np.log(modelled(layers, x, tile) / layers.seconds),
                START,
                bounds=(LEAST, MOST),
                loss="soft_l1",
                f_scale=0.1,
            ),
            tile,
        )
        for tile in TILES
    ]
    best, tile = min(fits, key=lambda fit: fit[0].cost)
    return best.x, tile


def errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """Mean, median and p90 of the absolute error, the median signed one, and the number."""
    relative = predicted / measured - 1
    absolute = np.abs(relative)
    return {
        "layers": len(relative),
        "mean": round(float(absolute.mean()), 4),
        "median": round(float(np.median(absolute)), 4),
        "p90": round(float(np.quantile(absolute, 0.9)), 4),
        "bias": round(float(np.median(relative)), 4),
    }


def held_out(rows: list[Row], chip: Chip, by: str) -> dict[str, float]:
    """Errors of layers that no constant was fitted to, in five folds of whole values of `by`."""
    values = sorted({row[by] for row in rows})
    fold = np.array([values.index(row[by]) % FOLDS for row in rows])
    predicted = np.zeros(len(rows))
    for each in range(FOLDS):
        others = [row for row, its in zip(rows, fold, strict=True) if its != each]
        left = [row for row, its in zip(rows, fold, strict=True) if its == each]
        if left:
            constants, tile = fitted(Layers(others, chip))
            predicted[fold == each] = modelled(Layers(left, chip), constants, tile)
    return errors(predicted, column(rows, "seconds"))


def with_surface(rows: list[Row], chip: Chip) -> dict[str, dict[str, float]]:
    """Errors of the form, and of the form times a surface fitted to what it leaves, as plain
    products have: in bf16, networks and tokens held out."""
    rows = [row for row in rows if row["dtype"] == "bfloat16"]
    shapes = [
        (
            int(row["groups"]),
            max(1, round(float(row["rows"]) / float(row["groups"]))),
            int(row["width"]),
            int(row["hidden"]),
        )
        for row in rows
    ]
    found: dict[str, dict[str, float]] = {}
    for by in ("network", "tokens"):
        values = sorted({row[by] for row in rows})
        fold = np.array([values.index(row[by]) % FOLDS for row in rows])
        form, surface = np.zeros(len(rows)), np.zeros(len(rows))
        for each in range(FOLDS):
            inside, out = np.flatnonzero(fold != each), np.flatnonzero(fold == each)
            kept = Layers([rows[i] for i in inside], chip)
            x, tile = fitted(kept)
            left = np.log(kept.seconds / modelled(kept, x, tile))
            fit = fit_surface(tuple(shapes[i] for i in inside), left)
            form[out] = modelled(Layers([rows[i] for i in out], chip), x, tile)
            surface[out] = form[out] * np.exp([fit.at(shapes[i]) for i in out])
        measured = column(rows, "seconds")
        found[f"{by}: form"] = errors(form, measured)
        found[f"{by}: form and surface"] = errors(surface, measured)
    return found


def _as_costed(constants: Floats, chip: Chip) -> Floats:
    """Constants with the fractions of the peak at most that of plain products, as costed."""
    most = np.full(len(constants), np.inf)
    most[:2] = np.log(chip.attainable.matmul_fraction)
    return np.minimum(constants, most)


def main() -> None:
    """Fit, hold out, print and write."""
    if "--surface" in sys.argv:
        surfaces = {
            name: with_surface(read(system, KERNEL, "balanced"), load_chip(name))
            for system, name in SYSTEMS.items()
        }
        print(json.dumps(surfaces, indent=1))
        path = Path(__file__).parent / "surface.json"
        path.write_text(json.dumps(surfaces, indent=1) + "\n", encoding="utf-8")
        return
    constants: dict[str, tuple[Floats, int]] = {}
    balanced: dict[str, list[Row]] = {}
    results: dict[str, dict[str, object]] = {}
    for system, name in SYSTEMS.items():
        rows = balanced[system] = read(system, KERNEL, "balanced")
        chip = load_chip(SYSTEMS[system])
        constants[system] = x, tile = fitted(Layers(rows, chip))
        bf16, fp8, memory, group, *rest = np.exp(x).tolist()
        results[name] = found = {
            "tile_rows": tile,
            "matmul_fraction": {"bf16": round(bf16, 3), "fp8": round(fp8, 3)},
            "memory_fraction": round(memory, 3),
            "group_seconds": float(f"{group:.2e}"),
            "fixed_seconds": {"bf16": float(f"{rest[0]:.3e}"), "fp8": float(f"{rest[1]:.3e}")},
            "rest_fraction": {"bf16": round(rest[2], 3), "fp8": round(rest[3], 3)},
            "fitted": errors(modelled(Layers(rows, chip), x, tile), column(rows, "seconds")),
            "as_costed": errors(
                modelled(Layers(rows, chip), _as_costed(x, chip), tile), column(rows, "seconds")
            ),
            "networks_held_out": held_out(rows, chip, "network"),
            "tokens_held_out": held_out(rows, chip, "tokens"),
            "types": {
                TYPES[dtype]: errors(modelled(Layers(part, chip), x, tile), column(part, "seconds"))
                for dtype in TYPES
                if (part := [row for row in rows if row["dtype"] == dtype])
            },
        }
        ratio = modelled(Layers(rows, chip), x, tile) / column(rows, "seconds")
        found["share_measured_over_twice_the_form"] = round(float((ratio < 0.5).mean()), 4)
        if nongated := read(system, NONGATED, "balanced"):
            found["without_gate_not_fitted"] = errors(
                modelled(Layers(nongated, chip), x, tile, gated=False),
                column(nongated, "seconds"),
            )
        for distribution, exponent in (("power_law_1.01", 1.01), ("power_law_1.2", 1.2)):
            skewed = read(system, KERNEL, distribution)
            load = np.array(
                [
                    device_load_factor(
                        exponent,
                        experts=int(float(row["experts"])),
                        devices=int(float(row["split"])),
                        experts_per_token=int(float(row["topk"])),
                    )
                    for row in skewed
                ]
            )
            measured = column(skewed, "seconds")
            shared = np.array([row["split"] != 1 for row in skewed])
            found[distribution] = {
                "as_if_balanced": errors(
                    modelled(Layers(skewed, chip), x, tile)[shared], measured[shared]
                ),
                "fullest_device": errors(
                    modelled(Layers(skewed, chip, load), x, tile)[shared], measured[shared]
                ),
                "one_device_as_if_balanced": errors(
                    modelled(Layers(skewed, chip), x, tile)[~shared], measured[~shared]
                ),
            }
        print(name, json.dumps({key: found[key] for key in list(found)[:4]}), flush=True)
        for key in list(found)[6:]:
            print("   ", key, json.dumps(found[key]), flush=True)
    for system, name in SYSTEMS.items():
        others = [
            each for each in SYSTEMS if each != system and (each in CARDS) == (system in CARDS)
        ]
        x = np.median([constants[each][0] for each in others], axis=0)
        tile = int(np.median([constants[each][1] for each in others]))
        rows = balanced[system]
        predicted = modelled(Layers(rows, load_chip(SYSTEMS[system])), x, tile)
        results[name]["chip_held_out"] = errors(predicted, column(rows, "seconds"))
        print(name, "chip held out", json.dumps(results[name]["chip_held_out"]))
    path = Path(__file__).parent / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if "--write" in sys.argv:
        for name, found in results.items():
            _write(name, found)


_SOURCE = (
    "NVIDIA AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0), moe_perf of TensorRT-LLM: "
    "forward layers of experts in bf16 and fp8, balanced; only fitted constants are kept here"
)


def _write(name: str, found: dict[str, object]) -> None:
    fractions, fit = found["matmul_fraction"], "fitted by experiments/grouped_products/fit.py"
    assert isinstance(fractions, dict)  # noqa: S101  # for the type checker
    fixed, rest = found["fixed_seconds"], found["rest_fraction"]
    assert isinstance(fixed, dict)  # noqa: S101  # for the type checker
    assert isinstance(rest, dict)  # noqa: S101  # for the type checker
    text = f'''name = "{name}"
source = "{_SOURCE}"
tile_rows = {found["tile_rows"]}
memory_fraction = {found["memory_fraction"]}
group_seconds = {found["group_seconds"]}

[matmul_fraction]
bf16 = {fractions["bf16"]}
fp8 = {fractions["fp8"]}

[layers]  # seconds, share of the peak bandwidth, beside the products
bf16 = [{fixed["bf16"]}, {rest["bf16"]}]
fp8 = [{fixed["fp8"]}, {rest["fp8"]}]

[sources]
tile_rows = "{fit}: the better of 64 and 128"
memory_fraction = "{fit}"
group_seconds = "{fit}"
"matmul_fraction.bf16" = "{fit}; bounded by 0.95"
"matmul_fraction.fp8" = "{fit}; bounded by 0.95"
"layers.bf16" = "{fit}: TensorRT-LLM's kernels"
"layers.fp8" = "{fit}: TensorRT-LLM's kernels"
'''
    folder = REPOSITORY / "scalejax" / "hardware" / "grouped_matmul_rates"
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
