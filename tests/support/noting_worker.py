"""One process of a run that notes which examples it is given in each step, and asks itself to stop,
or kills itself.

Usage: python noting_worker.py RUN.toml FOLDER NOTES STOP_STEP FSDP, as `scalejax launch` starts it.

The examples are images whose first two bytes are their index. NOTES is a folder, to which each
process adds a file of lines: step, rows of the global batch, and the examples in them. After
STOP_STEP updates the first process sends itself SIGTERM, as a scheduler does; after LOSS_STEP
updates, a variable, and a copy in memory the first and the last of four processes send themselves
SIGKILL, once.
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
from scalejax.core.elastic import SharedFolder
from scalejax.data.loader.loader import Batches
from scalejax.training.manifest import newest
from scalejax.training.record import RunFolder
from scalejax.training.reporter import PlainLines


def train_and_note(
    run_file: Path, folder: Path, notes: Path, stop_step: int, fsdp: int, devices: int | None = None
) -> None:
    """Train on so many devices, or on all, from where the run in `folder` stopped."""
    is_begun = RunFolder(path=folder).holds_run
    shared = SharedFolder.from_environment()
    stores = [RunFolder(path=folder).checkpoints, *([shared.copies] if shared else [])]
    step = max(newest(each) or 0 for each in stores) if is_begun else 0
    take = Batches.next_beside
    session = len([*notes.glob(f"*-{jax.process_index()}-of-*")])
    name = f"{session}-{step:03}-{jax.process_index()}-of-{jax.process_count()}"
    loss_step = int(os.environ.get("LOSS_STEP", "0"))
    is_victim = jax.process_count() == 4 and jax.process_index() in (0, 3) and not session

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
        if shared and is_victim and 0 < loss_step <= step and newest(shared.copies):
            os.kill(os.getpid(), signal.SIGKILL)
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
