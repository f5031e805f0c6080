"""ResNet-50 on the cluster of Goyal et al. 2017, 8 to 352 GPUs, with two algorithms.

Compiles the paper's step for each number of GPUs (about 20 s each, remembered), costs it with
halving-doubling between the servers as in the paper, with rings between them, and with one ring
through all GPUs, prints the table, and draws `scaling.png`. Then the same on the ring of NCCL 1.

    python experiments/goyal_network/compare.py
"""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from matplotlib.figure import Figure

from scalejax.config.run import load_config
from scalejax.hardware import Cluster, load_cluster
from scalejax.planning.scaling_study import resolve_all
from scalejax.simulator.frameworks import framework_named
from scalejax.simulator.predict import Prediction, predict
from scalejax.xla import ProfileJob, profile_many

HERE = Path(__file__).parent
DEVICE_COUNTS = (8, 16, 32, 64, 128, 256, 352)
OF_2017 = framework_named("tensorflow-2017")
"""What software of that year made of a P100; Goyal et al. ran Caffe2, of which no step is known."""
ALGORITHMS = {
    "halving_doubling": "halving-doubling",
    "hierarchical": "ring of servers",
    "ring": "ring of GPUs",
}
"""The library's algorithms, as the paper would call them."""
PUBLISHED = {256: 0.90}
"""Efficiency against 8 GPUs: Goyal et al. 2017, arXiv 1706.02677, abstract and section 5.4."""


def with_algorithm(cluster: Cluster, algorithm: str) -> Cluster:
    """The cluster with a library that knows no other algorithm."""
    methods = tuple(m for m in cluster.library.methods if m.algorithm == algorithm)
    return replace(cluster, library=replace(cluster.library, methods=methods))


def predictions(*, rings_by_number: bool) -> dict[str, list[Prediction]]:
    """One prediction for each algorithm and number of GPUs.

    Args:
        rings_by_number: whether the ring within a server goes by the numbers of its GPUs, as that
            of NCCL 1, or along its wires.
    """
    example = files("scalejax").joinpath("config", "examples", "resnet50_goyal2017.toml")
    config = load_config(Path(str(example)))
    cluster = load_cluster("big-basin-goyal2017")
    library = replace(cluster.library, rings_by_number=rings_by_number)
    cluster = replace(cluster, library=library)
    runs = resolve_all(config, DEVICE_COUNTS, "weak")
    programs = profile_many(
        [ProfileJob(run=run, cluster=cluster, framework=OF_2017) for run in runs],
        lambda each: print(f"{each.part}: {'compiled' if each.done else 'compiling'}", flush=True),
    )
    return {
        algorithm: [
            predict(
                program, with_algorithm(cluster, algorithm), train_examples=1_281_167, epochs=90
            )
            for program in programs
        ]
        for algorithm in ALGORITHMS
    }


def efficiencies(found: list[Prediction]) -> list[float]:
    """Throughput per GPU against that of 8; the batch of each GPU is fixed."""
    return [found[0].step_seconds / prediction.step_seconds for prediction in found]


def print_table(found: dict[str, list[Prediction]]) -> None:
    """One Markdown row for each number of GPUs."""
    names = list(ALGORITHMS.values())
    print(f"| GPUs | batch | {' | '.join(f'{n}: step, efficiency, all-reduces' for n in names)} |")
    print("|---|---|" + "---|" * len(names))
    for row in zip(*found.values(), strict=True):
        cells = [
            f"{p.step_seconds * 1e3:.0f} ms, {some[0].step_seconds / p.step_seconds:.1%}, "
            f"{p.communication_seconds * 1e3:.0f} ms"
            for p, some in zip(row, found.values(), strict=True)
        ]
        print(f"| {row[0].device_count} | {row[0].global_batch} | {' | '.join(cells)} |")
    hours = found["halving_doubling"][DEVICE_COUNTS.index(256)].run_seconds
    if hours is not None:
        print(
            f"\n90 epochs on 256 GPUs by halving-doubling: {hours / 60:.0f} minutes; published 60"
        )


def draw(found: dict[str, list[Prediction]], path: Path) -> None:
    """Efficiency over the number of GPUs, one line for each algorithm, and what was published."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for algorithm, some in found.items():
        axes.plot(DEVICE_COUNTS, efficiencies(some), marker="o", label=ALGORITHMS[algorithm])
    axes.plot(list(PUBLISHED), list(PUBLISHED.values()), "k*", markersize=12, label="published")
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEVICE_COUNTS, [str(count) for count in DEVICE_COUNTS])
    axes.set_xlabel("P100, 32 images each, 8 to a server, 50 Gb/s Ethernet")
    axes.set_ylabel("efficiency against 8")
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Compile, cost, print, draw, and keep the figures as JSON."""
    found = predictions(rings_by_number=False)
    print_table(found)
    of_nccl_1 = predictions(rings_by_number=True)
    at = DEVICE_COUNTS.index(256)
    kept = (f"{name} {efficiencies(of_nccl_1[key])[at]:.1%}" for key, name in ALGORITHMS.items())
    print(f"With the ring of NCCL 1 in a server, 256 GPUs keep: {', '.join(kept)}")
    draw(found, HERE / "scaling.png")
    figures = {
        algorithm: {
            p.device_count: {
                "step_seconds": p.step_seconds,
                "communication_seconds": p.communication_seconds,
                "efficiency": efficiency,
            }
            for p, efficiency in zip(some, efficiencies(some), strict=True)
        }
        for algorithm, some in found.items()
    }
    (HERE / "results.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
