"""Where the time of a sample goes in one thread: Pillow's stages, and what is around them.

    python experiments/input_peers/stages.py --folder FOLDER [--images small]

Processor time, medians of 9 passes over 256 images of what `measure.py --prepare` wrote.
"""

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow.parquet as pq
from decoding import SIZE, resized
from PIL import Image

from scalejax.config.data import ParquetConfig
from scalejax.core.environment import limit_cores
from scalejax.data.datasets import open_source
from scalejax.data.transforms.images import decoded

IMAGES, PASSES = 256, 9
BILINEAR = Image.Resampling.BILINEAR


def main() -> None:
    """Measure, and print microseconds a sample."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", choices=("small", "large"), default="small")
    chosen = parser.parse_args()
    limit_cores(1)
    folder = chosen.folder / "files" / chosen.images / "nested"
    file = min(folder.glob("*.parquet"))
    encoded = [row["bytes"] for row in pq.read_table(file)["image"].to_pylist()[:IMAGES]]
    pixels = [Image.open(io.BytesIO(content)).convert("RGB") for content in encoded]
    source = open_source(
        ParquetConfig(train=str(folder), test=str(folder), image_size=SIZE), "train", seed=0
    )
    rows = np.arange(IMAGES)
    stages: dict[str, Callable[[], object]] = {
        "Pillow opens, reads the header": lambda: [Image.open(io.BytesIO(e)) for e in encoded],
        "... and decodes": lambda: [Image.open(io.BytesIO(e)).load() for e in encoded],
        "Pillow resizes": lambda: [p.resize((SIZE, SIZE), BILINEAR) for p in pixels],
        "the decode of the others": lambda: [resized(e) for e in encoded],
        "ours": lambda: [decoded(e, SIZE, 3) for e in encoded],
        "ours, from Parquet into a batch": lambda: source.take(rows),
    }
    found: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(PASSES + 1):  # the first warms up
        for name, stage in stages.items():
            begin = time.process_time()
            stage()
            found[name].append((time.process_time() - begin) / IMAGES)
    for name, seconds in found.items():
        print(f"{median(seconds[1:]) * 1e6:6.0f} us  {name}")


if __name__ == "__main__":
    main()
