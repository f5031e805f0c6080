"""Fits libraries that send tokens to experts to measured times, and holds settings out.

    python experiments/expert_dispatch/fit.py            # constants and errors, into results.json
    python experiments/expert_dispatch/fit.py --write    # and the files of the catalogue

Reads ../shared/ledger/2026/ (expert_dispatch_combine_deepep.csv.gz, expert_alltoall_trtllm.csv,
nccl_times.csv), which is not in the repository. Dispatch (DeepEP: fp8 with a scale for 128 values)
and combine (bf16) are fitted together, since a program does not tell them apart, and a step has as
many of the one as of the other; their sum is what counts.
"""

import csv
import gzip
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from scalejax.hardware import DispatchLibrary, DispatchRates, load_cluster
from scalejax.simulator.collectives import all_to_all_seconds, find_route, measured_seconds
from scalejax.simulator.collectives.expert_dispatch import dispatch_seconds, expected_reach
from scalejax.simulator.program import RoutedTokens

REPOSITORY = Path(__file__).parents[2]
LEDGER = REPOSITORY.parent / "shared" / "ledger" / "2026"
CLUSTERS = {
    "h100_sxm": "dgx-h100",
    "h200_sxm": "dgx-h200",
    "b200_sxm": "dgx-b200",
    "b300_sxm": "dgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
CHIPS = {
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
}
DEVICES = {"gb200": 4, "gb300": 4}
"""Devices of one node of the table; 8 on others. The table does not say: a tray has 4."""
SMS = "24"
"""Multiprocessors that copy: 24 is the most of the table, and the fastest on each chip."""
FP8_BYTES = 1 + 4 / 128
FIRST_NODES = 2
LARGE_TOKENS = 1024
SMALL_TOKENS = 8
LEAST_SECONDS = 1e-12

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A dispatch and the combine that belongs to it, as measured."""

    network: str
    tokens: RoutedTokens
    hidden: int
    devices: int
    nodes: int
    bytes_each: tuple[float, float]
    seconds: tuple[float, float]


def read(name: str) -> list[dict[str, str]]:
    """Rows of one table of the ledger."""
    path = LEDGER / name
    if name.endswith(".gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def deepep(system: str, nodes: int) -> list[Pair]:
    """DeepEP's normal kernels on one system; what is notified first is counted in."""
    found = []
    for row in read("expert_dispatch_combine_deepep.csv.gz"):
        if (row["system"], int(row["nodes"]), row["sms"]) != (system, nodes, SMS):
            continue
        experts, topk = int(row["experts"]), int(row["topk"])
        found.append(
            Pair(
                f"{row['hidden']} {topk} {experts}",
                RoutedTokens(
                    tokens=int(row["tokens_per_device"]),
                    experts_per_token=topk,
                    experts=experts,
                    most_nodes=min(nodes, 4),  # the benchmark's num_topk_groups
                ),
                int(row["hidden"]),
                DEVICES.get(system, 8) * nodes,
                nodes,
                (FP8_BYTES, 2.0),
                (
                    1e-6 * (float(row["dispatch_us"]) + float(row["dispatch_notify_us"])),
                    1e-6 * (float(row["combine_us"]) + float(row["combine_notify_us"])),
                ),
            )
        )
    return found


def trtllm() -> list[Pair]:
    """TensorRT-LLM's two-sided kernels over NVLink in bf16; preparing is part of the dispatch."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in read("expert_alltoall_trtllm.csv"):
        if (row["kernel"], row["dtype"]) == ("NVLinkTwoSided", "bfloat16"):
            key = (int(row["expert_parallel"]), int(row["tokens"]))
            times.setdefault(key, {})[row["operation"]] = float(row["microseconds"]) * 1e-6
    return [
        Pair(
            str(devices),
            RoutedTokens(tokens=tokens, experts_per_token=8, experts=256),
            7168,
            devices,
            1,
            (2.0, 2.0),
            (
                each["alltoall_dispatch"] + each["alltoall_prepare"],
                each["alltoall_combine"],
            ),
        )
        for (devices, tokens), each in sorted(times.items())
    ]


def modelled(
    pairs: list[Pair],
    rates: DispatchRates,
    cluster: str,
    *,
    fraction: float = 1.0,
    network_seconds: float = 0.0,
) -> Floats:
    """Seconds of dispatch and combine of each pair, shape (pairs, 2), by the simulator."""
    hardware = load_cluster(cluster)
    library = DispatchLibrary(
        name="fit",
        title="being fitted",
        rates=rates,
        network_fraction=fraction,
        network_seconds=network_seconds,
    )
    seconds = []
    for pair in pairs:
        route = find_route(
            hardware,
            members=pair.devices,
            members_per_node=pair.devices // pair.nodes,
            nodes=pair.nodes,
        )
        route = replace(route, link_bytes_per_second=1e15)  # the library's own rate is fitted
        copies = pair.tokens.tokens * pair.tokens.experts_per_token * pair.hidden
        seconds.append(
            [
                dispatch_seconds(round(copies * width), pair.tokens, route, library, chip="any")
                for width in pair.bytes_each
            ]
        )
    return np.array(seconds)


def fitted(pairs: list[Pair]) -> DispatchRates:
    """Rates of least error in log time, of pairs within one node."""
    tokens = np.array([[pair.tokens.tokens] * 2 for pair in pairs], float)
    moved = np.array(
        [[pair.tokens.tokens * pair.hidden * width for width in pair.bytes_each] for pair in pairs]
    )
    reach = np.array([[expected_reach(pair.tokens, pair.devices, 1)[0]] for pair in pairs])
    measured = np.array([pair.seconds for pair in pairs])

    def misfit(x: Floats) -> Floats:
        base, each, rate = np.exp(x)
        return np.log((base + tokens * each + moved * reach / rate) / measured).ravel()

    start = np.log([3e-5, 1e-8, 3e11])
    base, each, rate = np.exp(least_squares(misfit, start, loss="soft_l1", f_scale=0.1).x)
    return DispatchRates(
        base_seconds=float(f"{base:.3g}"),
        token_seconds=float(f"{each:.3g}") if each > LEAST_SECONDS else 0.0,
        link_bytes_per_second=float(f"{rate:.3g}"),
    )


def errors(predicted: Floats, pairs: list[Pair]) -> dict[str, float]:
    """Mean and p90 of the absolute error of sums of dispatch and combine, and of each."""
    measured = np.array([pair.seconds for pair in pairs])
    both = predicted.sum(axis=1) / measured.sum(axis=1) - 1
    large = np.array([pair.tokens.tokens >= LARGE_TOKENS for pair in pairs])
    return {
        "pairs": len(pairs),
        "mean": round(float(np.abs(both).mean()), 4),
        "p90": round(float(np.quantile(np.abs(both), 0.9)), 4),
        "mean_from_1024_tokens": round(float(np.abs(both[large]).mean()), 4),
        "bias_from_1024_tokens": round(float(both[large].mean()), 4),
        "dispatch_mean": round(float(np.abs(predicted[:, 0] / measured[:, 0] - 1).mean()), 4),
        "combine_mean": round(float(np.abs(predicted[:, 1] / measured[:, 1] - 1).mean()), 4),
    }


def held_out(pairs: list[Pair], cluster: str) -> dict[str, float]:
    """Errors of networks (or sizes of the group) that the rates were not fitted to."""
    predicted = np.zeros((len(pairs), 2))
    for network in {pair.network for pair in pairs}:
        out = np.array([pair.network == network for pair in pairs])
        rates = fitted([pair for pair in pairs if pair.network != network])
        left = [pair for pair in pairs if pair.network == network]
        predicted[out] = modelled(left, rates, cluster)
    return errors(predicted, pairs)


def network_fraction(pairs: list[Pair], rates: DispatchRates, cluster: str) -> float:
    """Share of the network's rate with the least error of large sums."""
    large = [pair for pair in pairs if pair.tokens.tokens >= LARGE_TOKENS]
    fractions = np.linspace(0.3, 1.0, 71)
    misfits = [
        errors(modelled(large, rates, cluster, fraction=float(each)), large)["mean"]
        for each in fractions
    ]
    return round(float(fractions[int(np.argmin(misfits))]), 2)


def network_seconds(pairs: list[Pair], rates: DispatchRates, cluster: str) -> float:
    """Half of what the smallest sums take beyond those of one node."""
    small = [pair for pair in pairs if pair.tokens.tokens <= SMALL_TOKENS]
    measured = np.array([pair.seconds for pair in small]).sum(axis=1)
    excess = (measured - modelled(small, rates, cluster).sum(axis=1)) / 2
    return float(f"{np.median(excess):.3g}")


def nccl() -> dict[str, dict[str, object]]:
    """Today's all-to-all by NCCL against nccl_times.csv, from 1 MiB, by system and devices."""
    times: dict[tuple[str, int, int], list[float]] = {}
    for row in read("nccl_times.csv"):
        if row["operation"] == "alltoall" and row["system"] in CLUSTERS:
            key = (row["system"], int(row["devices"]), int(row["message_bytes"]))
            times.setdefault(key, []).append(float(row["microseconds"]) * 1e-6)
    found: dict[str, dict[str, object]] = {}
    for system, name in CLUSTERS.items():
        cluster = load_cluster(name)
        for devices in (2, 4, 8):
            sizes = sorted(b for s, d, b in times if (s, d) == (system, devices) and b >= 2**20)
            if not sizes:
                continue
            route = find_route(cluster, members=devices, members_per_node=devices, nodes=1)
            ratios = {"model": [], "table": []}
            for size in sizes:
                measured = median(times[system, devices, size])
                model = all_to_all_seconds(size, route, cluster.library.methods)
                ratios["model"].append(model / measured - 1)
                table = measured_seconds("all_to_all", size, route, cluster)
                if table is not None:
                    ratios["table"].append(table / measured - 1)
            found[f"{system} {devices}"] = {
                kind: {
                    "mean": round(float(np.abs(each).mean()), 3),
                    "bias": round(float(np.mean(each)), 3),
                    "from_64_MiB": round(
                        float(np.mean([e for e, b in zip(each, sizes, strict=True) if b >= 2**26])),
                        3,
                    ),
                }
                for kind, each in ratios.items()
                if each
            }
    return found


def main() -> None:
    """Fit, hold out, print and write."""
    of_deepep: dict[str, Any] = {}
    rates: dict[str, DispatchRates] = {}
    for system, chip in CHIPS.items():
        pairs = deepep(system, 1)
        cluster = CLUSTERS[system]
        rates[chip] = fitted(pairs)
        of_deepep[chip] = {
            "rates": vars_of(rates[chip]),
            "fitted": errors(modelled(pairs, rates[chip], cluster), pairs),
            "networks_held_out": held_out(pairs, cluster),
        }
    for system, chip in CHIPS.items():
        pairs = deepep(system, 1)
        others = [each for name, each in rates.items() if name != chip]
        middle = _middle(others)
        found = errors(modelled(pairs, middle, CLUSTERS[system]), pairs)
        of_deepep[chip]["chip_held_out"] = found
    first = deepep("h100_sxm", FIRST_NODES)
    fraction = network_fraction(first, rates["h100"], "dgx-h100")
    counting = network_seconds(first, rates["h100"], "dgx-h100")
    of_deepep["network_fraction"] = fraction
    of_deepep["network_seconds"] = counting
    for nodes in (2, 4, 8):
        pairs = deepep("h100_sxm", nodes)
        predicted = modelled(
            pairs, rates["h100"], "dgx-h100", fraction=fraction, network_seconds=counting
        )
        of_deepep[f"h100 over {nodes} nodes"] = errors(predicted, pairs)
    pairs = trtllm()
    nvlink = fitted(pairs)
    of_trtllm = {
        "rates": vars_of(nvlink),
        "fitted": errors(modelled(pairs, nvlink, "gb200-nvl72"), pairs),
        "group_sizes_held_out": held_out(pairs, "gb200-nvl72"),
    }
    results = {
        "deepep": of_deepep,
        "trtllm": of_trtllm,
        "plain_all_to_all_of_gb200": _plain(pairs),
        "nccl": nccl(),
    }
    print(json.dumps(results, indent=1))
    path = Path(__file__).parent / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if "--write" in sys.argv:
        _write_deepep(rates, fraction, counting)
        _write_trtllm(nvlink)


def _plain(pairs: list[Pair]) -> dict[str, float]:
    """A plain all-to-all of all copies over what TensorRT-LLM's kernels measured, by group size."""
    cluster = load_cluster("gb200-nvl72")
    found = {}
    for devices in sorted({pair.devices for pair in pairs}):
        route = find_route(cluster, members=devices, members_per_node=devices, nodes=1)
        ratios = [
            all_to_all_seconds(
                pair.tokens.tokens * 8 * pair.hidden * 2, route, cluster.library.methods
            )
            / pair.seconds[0]
            for pair in pairs
            if pair.devices == devices and pair.tokens.tokens >= LARGE_TOKENS
        ]
        found[f"{devices} devices"] = round(math.exp(float(np.mean(np.log(ratios)))), 3)
    return found


def vars_of(rates: DispatchRates) -> dict[str, float]:
    """Fields of rates, by name."""
    names = ("base_seconds", "token_seconds", "link_bytes_per_second")
    return {name: getattr(rates, name) for name in names}


def _middle(rates: list[DispatchRates]) -> DispatchRates:
    names = ("base_seconds", "token_seconds", "link_bytes_per_second")
    return DispatchRates(**{name: median(getattr(each, name) for each in rates) for name in names})


_FIT = "fitted by experiments/expert_dispatch/fit.py"
_TABLE = "NVIDIA AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0)"


def _lines(rates: DispatchRates) -> str:
    return "\n".join(f"{name} = {value:.3g}" for name, value in vars_of(rates).items()) + "\n"


def _write_deepep(rates: dict[str, DispatchRates], fraction: float, counting: float) -> None:
    names = list(vars_of(rates["h100"]))
    text = f"""name = "deepep"
title = "DeepEP, normal kernels with 24 multiprocessors"
network_fraction = {fraction}
network_seconds = {counting:.3g}

[rates]
{_lines(_middle(list(rates.values())))}
"""
    text += "\n".join(f"[chips.{chip}]\n{_lines(each)}" for chip, each in rates.items())
    text += "\n[sources]\n"
    for name in ("network_fraction", "network_seconds"):
        text += f'{name} = "{_FIT}: 2 nodes of H100, 4 and 8 left out; table of {_TABLE}"\n'
    for name in names:
        text += f'"rates.{name}" = "median of the measured chips below"\n'
    for chip in rates:
        for name in names:
            text += f'"chips.{chip}.{name}" = "{_FIT}: one node; table of {_TABLE}"\n'
    _file("deepep").write_text(text, encoding="utf-8")


def _write_trtllm(rates: DispatchRates) -> None:
    text = f"""name = "trtllm-nvlink"
title = "TensorRT-LLM's two-sided all-to-all over NVLink"
network_fraction = 1.0

[rates]
{_lines(rates)}
[sources]
network_fraction = "unverified: the kernels run within one NVLink domain only"
"""
    for name in vars_of(rates):
        text += f'"rates.{name}" = "{_FIT}: 4 to 64 devices of GB200; table of {_TABLE}"\n'
    _file("trtllm-nvlink").write_text(text, encoding="utf-8")


def _file(name: str) -> Path:
    return REPOSITORY / "scalejax" / "hardware" / "dispatch" / f"{name}.toml"


if __name__ == "__main__":
    main()
