"""One loader in a fresh process: how fast its batches come, or which images are in them.

    python loaders.py NAME FOLDER TRANSFORM --workers N --epochs E [--check]

Prints one line of JSON. Runs in an environment of its own for each loader, without scalejax in
those of the others.
"""

import argparse
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from decoding import SIZE, TRANSFORMS

BATCH = 64
SEED = 0
WINDOW = 1000
"""Rows that a loader without a global shuffle mixes."""


def torch_batches(folder: Path, transform: str, workers: int, epochs: int) -> Iterator[np.ndarray]:
    """PyTorch's DataLoader over the table of all files, global shuffle."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch  # type: ignore

    # Before the workers fork, so that they share it, and in one piece: of the ways to reach any row
    # the fastest, while all fits in memory.
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("nested/*"))])
    decode = TRANSFORMS[transform]
    contents = table["image"].combine_chunks().field("bytes")
    labels = table["label"].to_numpy()

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(labels)

        def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
            return [(torch.tensor(decode(contents[i].as_py())), labels[i]) for i in indices]

    yield from _torch_epochs(Rows(), workers, epochs)


def datasets_batches(
    folder: Path, transform: str, workers: int, epochs: int
) -> Iterator[np.ndarray]:
    """Hugging Face `datasets` through PyTorch's DataLoader, its way to workers; global shuffle."""
    import datasets  # type: ignore
    import torch  # type: ignore

    decode = TRANSFORMS[transform]
    files = [str(path) for path in sorted(folder.glob("nested/*"))]
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=folder)

    def transformed(batch: dict) -> dict:
        images = [torch.tensor(decode(each["bytes"])) for each in batch["image"]]
        return {"image": images, "label": batch["label"]}

    def tuples(batch: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.tensor([each["label"] for each in batch])
        return torch.stack([each["image"] for each in batch]), labels

    yield from _torch_epochs(rows.with_transform(transformed), workers, epochs, tuples)


def _torch_epochs(
    rows: object, workers: int, epochs: int, collate: Callable | None = None
) -> Iterator[np.ndarray]:
    import torch  # type: ignore

    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(SEED),
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
        collate_fn=collate,
    )
    for _ in range(epochs):
        for images, _ in loader:
            yield images.numpy()


def grain_batches(folder: Path, transform: str, workers: int, epochs: int) -> Iterator[np.ndarray]:
    """Grain's ParquetIterDataset; whole files to a worker, a shuffle within a window of rows."""
    import grain

    decode = TRANSFORMS[transform]
    files = [str(path) for path in sorted(folder.glob("nested/*"))]
    rows = grain.experimental.ParquetIterDataset(files)
    rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=WINDOW, seed=SEED)
    rows = grain.experimental.RepeatIterDataset(rows, epochs)
    rows = rows.map(lambda row: {"image": decode(row["image"]["bytes"]), "label": row["label"]})
    batches = rows.batch(BATCH, drop_remainder=True)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    for batch in batches:
        yield batch["image"]


def petastorm_batches(
    folder: Path, transform: str, workers: int, epochs: int
) -> Iterator[np.ndarray]:
    """Petastorm's batch reader; row groups in any order, and the rows of each in any order."""
    from petastorm import make_batch_reader  # type: ignore
    from petastorm.transform import TransformSpec  # type: ignore

    def transformed(frame: Any) -> Any:
        from decoding import TRANSFORMS  # in the worker, which gets no globals of this file

        frame["image"] = frame["image"].map(TRANSFORMS[transform])
        return frame

    spec = TransformSpec(transformed, edit_fields=[("image", np.uint8, (SIZE, SIZE, 3), False)])
    reader = make_batch_reader(
        f"file://{folder.resolve()}/flat",
        reader_pool_type="process" if workers else "dummy",
        workers_count=max(1, workers),
        shuffle_rows=True,
        seed=SEED + 1,
        num_epochs=epochs,
        transform_spec=spec,
    )
    with reader:
        held = np.empty((0, SIZE, SIZE, 3), np.uint8)
        for group in reader:
            held = np.concatenate([held, group.image])
            while len(held) >= BATCH:
                yield held[:BATCH]
                held = held[BATCH:]


def scalejax_batches(
    folder: Path,
    transform: str,
    workers: int,
    epochs: int,
    *,
    same_decode: bool = False,
    in_threads: bool = False,
) -> Iterator[np.ndarray]:
    """This project's batches, on a device as a step takes them; global shuffle.

    Threads have `workers` cores for the whole process, whereas worker processes have the main
    process besides.
    """
    if in_threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:workers])
    import jax

    from scalejax.config.data import ParquetConfig
    from scalejax.config.input import InputConfig
    from scalejax.data.datasets import open_source
    from scalejax.data.loader.loader import training_batches

    files = str(folder / "nested")
    config = ParquetConfig(train=files, test=files, image_size=SIZE)
    changes: dict[str, Any] = {}
    if transform == "augmented":
        from scalejax.config.input import AugmentationConfig  # type: ignore

        changes["augmentation"] = AugmentationConfig(crop_area=(0.08, 1.0), flip=True)
    if same_decode:
        from same_decode import examples

        source = examples(config, transform)
    else:
        source = open_source(config, "train", seed=SEED, **changes)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {
        "inputs": jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 3), np.uint8, sharding=sharding),
        "targets": jax.ShapeDtypeStruct((BATCH,), np.int32, sharding=sharding),
    }
    how: dict[str, Any] = {} if in_threads else {"workers": workers}
    batches = training_batches(
        source,
        shapes,
        seed=SEED,
        start_step=0,
        stop_step=epochs * (len(source) // BATCH),
        how=InputConfig(**how),
    )
    for batch in batches:
        yield np.asarray(batch["inputs"])


LOADERS: dict[str, Callable[[Path, str, int, int], Iterator[np.ndarray]]] = {
    "torch": torch_batches,
    "datasets": datasets_batches,
    "grain": grain_batches,
    "petastorm": petastorm_batches,
    "scalejax": scalejax_batches,
    "scalejax, same decode": partial(scalejax_batches, same_decode=True),
    "scalejax, threads": partial(scalejax_batches, in_threads=True),
}
"""Batches of uint8 [BATCH, SIZE, SIZE, 3] of each loader."""
PACKAGES = ("grain", "jax", "torch", "datasets", "petastorm", "pyarrow", "pillow", "numpy")


def processor_seconds() -> float:
    """What this process and all below it have used."""
    process = psutil.Process()
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def own_and_ended_seconds() -> float:
    """What this process and those of its children that have ended have used."""
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def versions() -> dict[str, str]:
    """Of what this environment has of the packages that matter."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def checksum(images: np.ndarray) -> int:
    """A sum over images, whatever their order."""
    digests = (hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images)
    return sum(int.from_bytes(digest, "big") for digest in digests)


def main() -> None:
    """Run one loader and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=LOADERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("transform", choices=TRANSFORMS)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    batches = LOADERS[arguments.name](
        arguments.folder, arguments.transform, arguments.workers, arguments.epochs
    )
    first = next(batches)
    first_batch_seconds = time.perf_counter() - began
    samples, total = len(first), checksum(first) if arguments.check else 0
    began, used = time.perf_counter(), processor_seconds()
    for batch in batches:
        samples += len(batch)
        if arguments.check:
            total += checksum(batch)
    seconds = time.perf_counter() - began
    # Workers that have ended are the children that the system counts.
    used = max(processor_seconds(), own_and_ended_seconds()) - used
    print(
        json.dumps(
            {
                "first_batch_seconds": first_batch_seconds,
                "samples": samples,
                "samples_per_second": (samples - len(first)) / seconds,
                "processor_seconds_per_sample": used / (samples - len(first)),
                "checksum": f"{total % 2**64:016x}" if arguments.check else None,
                "versions": versions(),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
