"""One process of a run that notes which examples it is given in each step, and asks itself to stop.

Usage: python noting_worker.py RUN.toml FOLDER NOTES STOP_STEP FSDP, as `scalejax launch` starts it.

The examples are images whose first two bytes are their index. NOTES is a folder, to which each
process adds a file of lines: step, rows of the global batch, and the examples in them. After
STOP_STEP updates the first process sends itself SIGTERM, as a scheduler does.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

from scalejax.api import train
from scalejax.config.run import load_config
from scalejax.core import process_group
from scalejax.data.loader.loader import Batches
from scalejax.training.record import RunFolder
from scalejax.training.reporter import PlainLines


def train_and_note(
    run_file: Path, folder: Path, notes: Path, stop_step: int, fsdp: int, devices: int | None = None
) -> None:
    """Train on so many devices, or on all, from where the run in `folder` stopped."""
    is_begun = RunFolder(path=folder).holds_run
    steps = RunFolder(path=folder).checkpoints
    step = max((int(each.name) for each in steps.iterdir()), default=0) if is_begun else 0
    take = Batches.next_beside
    name = f"{step:03}-{jax.process_index()}-of-{jax.process_count()}"

    def take_and_note(self, is_busy):
        nonlocal step
        batch, waited_seconds = take(self, is_busy)
        step += 1
        for shard in batch["inputs"].addressable_shards:
            rows = range(batch["inputs"].shape[0])[shard.index[0]]
            first_bytes = np.asarray(shard.data).reshape(len(rows), -1)[:, :2].astype(int)
            examples = first_bytes @ [256, 1]
            print(json.dumps([step, list(rows), examples.tolist()]), file=lines, flush=True)
        if step == stop_step and jax.process_index() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch, waited_seconds

    Batches.next_beside = take_and_note
    try:
        with (notes / name).open("w") as lines:
            train(
                load_config(run_file, {"layout.fsdp": fsdp}),
                folder,
                device_count=devices,
                resume=is_begun,
                reporter=PlainLines(sys.stderr),
                predicts=False,
            )
    finally:
        Batches.next_beside = take


def main() -> None:
    """Train as the arguments say."""
    run_file, folder, notes, stop_step, fsdp = sys.argv[1:]
    process_group.join(process_group.place_here())
    train_and_note(Path(run_file), Path(folder), Path(notes), int(stop_step), int(fsdp))


if __name__ == "__main__":
    main()
