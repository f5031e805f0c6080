"""Held-out losses of a decoder with experts beside its dense twin of equal active parameters."""

import argparse
import csv
import statistics
import tempfile
from pathlib import Path

from scalejax import RunRecord, load_config, train
from scalejax.core.serialization import JsonValue

HERE = Path(__file__).parent
EXPERTS: dict[str, JsonValue] = {
    "experts": 16,
    "experts_per_token": 2,
    "expert_hidden": 176,
    "router": {"scores": "sigmoid", "balance": "bias", "bias_update_rate": 0.01},
}
"""Two experts of a token are as wide as the feed-forward layer of the dense twin, 352."""
ASSIGNMENTS = 100_000
"""Of a layer, over which the load of its fullest expert is taken."""


def trained(kind: str, seed: int) -> RunRecord:
    """The record of one run."""
    fields: dict[str, JsonValue] = {"seed": seed}
    if kind == "experts":
        fields["model.moe"] = EXPERTS
    config = load_config(HERE / "run.toml", fields)
    return train(config, Path(tempfile.mkdtemp()) / "run", device_count=1, predicts=False)


def last_load(record: RunRecord) -> float:
    """Load of the fullest expert over the mean, in the last window of `ASSIGNMENTS`.

    The mean over the updates of the window of the largest load of each update: no less than that of
    any one expert in the window.
    """
    per_update = 32 * 64 * 2
    count = -(-ASSIGNMENTS // per_update)
    loads = [each.expert_load for each in record.training if each.expert_load is not None]
    return statistics.mean(loads[-count:])


def main() -> None:
    """Train all runs and write their curves; or print the table of those that were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", action="store_true", help="only print what was kept")
    path = HERE / "results.csv"
    if not parser.parse_args().kept:
        rows = []
        for seed in range(3):
            for kind in ("dense", "experts"):
                record = trained(kind, seed)
                load = f"{last_load(record):.3f}" if kind == "experts" else ""
                rows += [
                    {
                        "network": kind,
                        "seed": seed,
                        "step": each.step,
                        "test_loss": f"{each.test_loss:.4f}",
                        "last_load": load,
                    }
                    for each in record.evaluations
                ]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    last = max(int(row["step"]) for row in rows)
    for kind in ("dense", "experts"):
        ends = [row for row in rows if row["network"] == kind and int(row["step"]) == last]
        losses = [float(row["test_loss"]) for row in ends]
        loads = [row["last_load"] for row in ends if row["last_load"]]
        told = f"; fullest expert {', '.join(loads)} times the mean" if loads else ""
        shown = ", ".join(f"{loss:.3f}" for loss in losses)
        print(f"{kind}: {shown}; mean {statistics.mean(losses):.3f}{told}")


if __name__ == "__main__":
    main()
