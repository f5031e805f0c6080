"""Does a frozen backbone with a linear head beat raw pixels with one? Trains both, prints both.

    python experiments/six_steps/transfer.py [--folder DIR]

The first two steps of measure.py, at 300 images to train on and 300 to test; features of the
backbone are computed once. Ends with 1 unless the backbone is ahead by more than chance allows.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from measure import STEPS, train
from textiles import write_textiles

AHEAD = 0.2
"""Seven standard errors of an accuracy over 300 images."""


def main() -> int:
    """Train, print, and say whether it holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    folder = (parser.parse_args().folder or Path(tempfile.mkdtemp())).absolute()
    write_textiles(folder / "textiles")
    pixels, backbone = STEPS[0], replace(STEPS[1], flags=("--fine_tuning.cache_features", "true"))
    accuracies = []
    for name, step in (("raw pixels", pixels), ("frozen backbone", backbone)):
        found = train(step, folder)
        accuracies.append(float(str(found["test_accuracy"])))
        print(
            f"{name:16} test accuracy {accuracies[-1]:.3f}, test loss {found['test_loss']:.3f}, "
            f"{found['command_cpu_seconds']:.0f} s of CPU",
            flush=True,
        )
    holds = accuracies[1] >= accuracies[0] + AHEAD
    print(f"{'yes' if holds else 'NO'}: the frozen backbone is ahead by at least {AHEAD}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
