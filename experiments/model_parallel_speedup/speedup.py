"""How much sooner is one minibatch done by several devices that share a network?

    python experiments/model_parallel_speedup/speedup.py

Compiles the update of each network for each number of devices of a cluster, and costs it; writes
results.json and speedup.png. Needs the extra scalejax[gpu-target].
"""

import json
import math
import os
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import networks

from scalejax import load_cluster, profile_function
from scalejax.simulator.predict import predict

HERE = Path(__file__).parent
CLUSTER = "dgx-a100-80gb"
COUNTS = (1, 2, 4, 8, 16, 32)
SIDES = (64, 128, 256, 384)
"""Of locally connected networks; a device has at least as many rows as a unit sees below it."""


def parameters(side: int | None) -> int:
    """Weights of a network."""
    if side is None:
        return sum(a * b for a, b in pairwise(networks.WIDTHS))
    return networks.LAYERS * side**2 * networks.FIELD**2 * networks.MAPS**2


def seconds(side: int | None, count: int) -> dict[str, float]:
    """The predicted time of an update, and of that the exposed exchange."""
    builder = f"{HERE / 'networks.py'}:build_{'full' if side is None else side}"
    cluster = load_cluster(CLUSTER)
    program = profile_function(builder, cluster=cluster, mesh_axes={networks.AXIS: count})
    found = predict(program, cluster)
    collective = sum(
        value or 0 for name, value in found.waterfall if name.startswith("communication")
    )
    return {
        "step_seconds": found.step_seconds,
        "collective_seconds": collective,
        "fits": found.fits,
    }


def main() -> None:
    """Cost all, print the speedups, draw them."""
    results = {}
    for side in (None, *SIDES):
        kind = "fully" if side is None else "locally"
        name = f"{kind} connected, {parameters(side) / 1e6:,.0f} M"
        counts = [n for n in COUNTS if side is None or side // n >= networks.FIELD]
        results[name] = {str(count): seconds(side, count) for count in counts}
        one = results[name]["1"]["step_seconds"]
        row = [f"{one / each['step_seconds']:.2f}" for each in results[name].values()]
        print(f"| {name} | {one * 1e3:.2f} | {' | '.join(row)} |", flush=True)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results)


def draw(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Speedup over devices, a line for each network."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for name, found in results.items():
        counts = [int(count) for count in found]
        one = found["1"]["step_seconds"]
        axes.plot(counts, [one / each["step_seconds"] for each in found.values()], "o-", label=name)
    axes.plot(COUNTS, COUNTS, color="grey", linestyle="dotted", label="ideal")
    axes.set(xlabel="devices", ylabel="speedup of one minibatch")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(COUNTS, list(map(str, COUNTS)))
    top = math.ceil(math.log2(max(COUNTS)))
    axes.set_yticks([2**power for power in range(-2, top + 1)])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(HERE / "speedup.png", dpi=110)


if __name__ == "__main__":
    main()
