"""Held-out losses of a decoder with experts beside its dense twin of equal active parameters."""

import argparse
import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any

from scalejax import load_config, train
from scalejax.core.serialization import JsonValue

HERE = Path(__file__).parent
RESULTS = HERE / "results.csv"
STEPS, WINDOW = 1080, 100_000
SIGMOID: dict[str, JsonValue] = {"scores": "sigmoid", "scaling": 2.0}
"""Weights of sum 2: two experts of equal weight are then the dense layer of the twin."""


def biased(rate: float, **fields: JsonValue) -> dict[str, JsonValue]:
    """A router that is balanced by a bias."""
    return {**SIGMOID, "balance": "bias", "bias_update_rate": rate, **fields}


ROUTERS: dict[str, dict[str, JsonValue] | None] = {
    "dense": None,
    "experts": biased(0.01),
    "experts, bias 0.001": biased(0.001),
    "experts, bias 0.03": biased(0.03),
    "experts, bias 0.05": biased(0.05),
    "experts, bias 0.1": biased(0.1),
    "experts, bias by error": biased(0.03, bias_update="error"),
    "experts, weights of sum 1": biased(0.01, scaling=1.0),
    "experts, auxiliary loss": {"scores": "softmax", "scaling": 2.0},
}
"""Networks by name, and their routers."""
BEST = {"dense": 0.006}
"""Learning rates that were best of the grid; 0.003 of all networks with experts."""
GRID = [(name, rate, 0) for name in ("dense", "experts") for rate in (0.003, 0.006, 0.012)]
SEEDS = [(name, BEST.get(name, 0.003), seed) for seed in (0, 1, 2) for name in ("dense", "experts")]
BALANCED = [("experts, bias by error", 0.003, seed) for seed in (0, 1, 2)]
OTHERS = [(name, 0.003, 0) for name in ROUTERS if name not in ("dense", "experts")]
"""Runs: network, learning rate, seed."""


def trained(name: str, rate: float, seed: int) -> list[dict[str, Any]]:
    """The rows of one run: one for each evaluation, and one for each window of assignments."""
    fields: dict[str, JsonValue] = {"seed": seed, "schedule.base_learning_rate": rate}
    if (router := ROUTERS[name]) is not None:
        # Two experts of a token are as wide as the feed-forward layer of the dense twin, 176.
        experts = {"experts": 16, "experts_per_token": 2, "expert_hidden": 88}
        fields["model.moe"] = {**experts, "load_window": WINDOW, "router": router}
    config = load_config(HERE / "run.toml", fields)
    with tempfile.TemporaryDirectory() as folder:
        record = train(config, Path(folder) / "run", device_count=1, predicts=False)
    run = {"network": name, "learning_rate": rate, "seed": seed}
    losses = [
        {**run, "step": each.step, "test_loss": f"{each.test_loss:.4f}"}
        for each in record.evaluations
    ]
    per_window = -(-WINDOW // (32 * 64 * 2))  # whole updates
    ends = [each for each in record.training if each.step % per_window == 0]
    loads = [
        {**run, "step": each.step, "load_of_window": f"{each.expert_load_of_window:.3f}"}
        for each in ends
        if each.expert_load_of_window is not None
    ]
    return losses + loads


def kept() -> dict[tuple[str, float, int], list[dict[str, str]]]:
    """Rows of `results.csv` by run."""
    runs: dict[tuple[str, float, int], list[dict[str, str]]] = {}
    with RESULTS.open() as file:
        for row in csv.DictReader(file):
            run = (row["network"], float(row["learning_rate"]), int(row["seed"]))
            runs.setdefault(run, []).append(row)
    return runs


def write(runs: dict[tuple[str, float, int], list[Any]]) -> None:
    """Keep the rows of all runs."""
    with RESULTS.open("w", newline="") as file:
        names = ["network", "learning_rate", "seed", "step", "test_loss", "load_of_window"]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for rows in runs.values() for row in rows)


def losses_of(rows: list[dict[str, str]]) -> dict[int, float]:
    """Held-out loss by update."""
    return {int(row["step"]): float(row["test_loss"]) for row in rows if row["test_loss"]}


def draw(runs: dict[tuple[str, float, int], list[dict[str, str]]]) -> None:
    """The curves of the best learning rates, and the loads of windows."""
    import matplotlib.pyplot as plt

    figure, (of_losses, of_loads) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, rate, seed), rows in runs.items():
        losses = losses_of(rows)
        if rate == BEST.get(name, 0.003):
            style = "--" if name == "dense" else "-"
            of_losses.plot(losses.keys(), losses.values(), style, label=f"{name}, seed {seed}")
        loads = {int(row["step"]): float(row["load_of_window"] or 0) for row in rows}
        loads = {step: load for step, load in loads.items() if load}
        if loads:
            of_loads.plot(loads.keys(), loads.values(), label=name)
    of_losses.set(xlabel="update", ylabel="held-out loss", ylim=(1.1, 1.8))
    of_loads.set(xlabel="update", ylabel="fullest expert over mean, windows of 100,000")
    of_loads.axhline(1.5, color="grey", linewidth=0.5)
    for axes in (of_losses, of_loads):
        axes.legend(fontsize=6)
    figure.savefig(HERE / "curves.png", dpi=90)


def main() -> None:
    """Train the runs that are missing or were cut short, and print and draw all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", action="store_true", help="only print and draw what was kept")
    wants_only_kept = parser.parse_args().kept
    runs: dict[tuple[str, float, int], list[Any]] = kept()
    for run in () if wants_only_kept else dict.fromkeys([*GRID, *SEEDS, *BALANCED, *OTHERS]):
        if STEPS not in losses_of(runs.get(run, [])):
            runs[run] = trained(*run)
            write(runs)
    for (name, rate, seed), rows in kept().items():
        losses = losses_of(rows)
        loads = [float(row["load_of_window"]) for row in rows if row["load_of_window"]]
        above = sum(load >= 1.5 for load in loads)
        told = f"; {above} of {len(loads)} windows at 1.5 or more" if loads else ""
        told += f", mean of the last ten {statistics.mean(loads[-10:]):.2f}" if loads else ""
        at = {step: losses[step] for step in (216, 540, STEPS) if step in losses}
        shown = ", ".join(f"{loss:.4f} after {step}" for step, loss in at.items())
        print(f"{name}, rate {rate}, seed {seed}: {shown}{told}")
    draw(kept())


if __name__ == "__main__":
    main()
