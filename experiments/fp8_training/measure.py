"""Trains the text in bfloat16 and in an 8-bit format, and compares the loss on held-out text.

`python measure.py` trains what is missing in `results/` and prints the table; with the name of a
format and a seed it trains that run alone.
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path

from scalejax import load_config, train

HERE = Path(__file__).parent
FORMATS = ("bfloat16", "float8")
SEEDS = (0,)


def measured(name: str, seed: int) -> dict[str, list[float]]:
    """Held-out loss after each epoch, and the loss of every tenth update."""
    path = HERE / "results" / f"{name}_{seed}.json"
    if not path.exists():
        start = time.monotonic()
        config = load_config(HERE / "run.toml", {"model.compute_dtype": name, "seed": seed})
        with tempfile.TemporaryDirectory() as folder:
            record = train(config, Path(folder) / "run", device_count=1, predicts=False)
        found = {
            "test_loss": [round(each.test_loss or math.nan, 5) for each in record.evaluations],
            "training_loss": [round(each.loss or math.nan, 4) for each in record.training],
            "seconds": round(time.monotonic() - start),
        }
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    return json.loads(path.read_text())


def main() -> None:
    """Train what is missing, and print the table."""
    if len(sys.argv) == 3:
        measured(sys.argv[1], int(sys.argv[2]))
        return
    print("| format | held-out loss after each epoch | last, over bfloat16 |")
    print("|---|---|---|")
    for name in FORMATS:
        losses = [measured(name, seed)["test_loss"] for seed in SEEDS]
        bases = [measured("bfloat16", seed)["test_loss"][-1] for seed in SEEDS]
        said = "; ".join(", ".join(f"{each:.4f}" for each in epochs) for epochs in losses)
        gaps = (ours[-1] / base - 1 for ours, base in zip(losses, bases, strict=True))
        print(f"| {name} | {said} | {', '.join(f'{100 * gap:+.2f} %' for gap in gaps)} |")


if __name__ == "__main__":
    main()
