"""Trains the text in bfloat16 and in 8-bit formats from the same seeds, and compares the loss on
held-out text.

`python measure.py` trains what is missing in `results/` and prints a table for each format; with
the name of a format and a seed it trains that run alone.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from scalejax import load_config, train

HERE = Path(__file__).parent
SEEDS = range(6)
FORMATS = ("float8", "float8_delayed")
T_95 = 2.571
"""Of Student's distribution with 5 degrees of freedom, 97.5 %."""


def measured(name: str, seed: int) -> list[float]:
    """Held-out losses of a run; its seed draws the network and the order of data."""
    path = HERE / "results" / f"{name}_{seed}.json"
    if not path.exists():
        config = load_config(HERE / "run.toml", {"model.compute_dtype": name, "seed": seed})
        with tempfile.TemporaryDirectory() as folder:
            record = train(config, Path(folder) / "run", device_count=1, predicts=False)
        losses = [each.test_loss for each in record.evaluations if each.test_loss is not None]
        path.write_text(json.dumps({"test_loss": [round(loss, 5) for loss in losses]}) + "\n")
    return json.loads(path.read_text())["test_loss"]


def main() -> None:
    """Train what is missing, and print the table and the mean difference of pairs."""
    if len(sys.argv) == 3:
        measured(sys.argv[1], int(sys.argv[2]))
        return
    for name in FORMATS:
        compare(name)


def compare(name: str) -> None:
    """The table of one format, and its mean difference of pairs."""
    print(f"| seed | bfloat16 | {name} | over bfloat16 |")
    print("|---|---|---|---|")
    gaps = []
    for seed in SEEDS:
        base, ours = (measured(each, seed)[-1] for each in ("bfloat16", name))
        gaps.append(100 * (ours / base - 1))
        print(f"| {seed} | {base:.4f} | {ours:.4f} | {gaps[-1]:+.2f} % |")
    mean = statistics.mean(gaps)
    half = T_95 * statistics.stdev(gaps) / len(gaps) ** 0.5
    print(f"mean {mean:+.2f} %, 95 % interval {mean - half:+.2f} to {mean + half:+.2f} %")


if __name__ == "__main__":
    main()
