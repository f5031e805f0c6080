"""Faults of a store under runs that read from it: the same samples, or one line and its code.

    python experiments/store_faults/campaign.py [--faults 100] [--seed 0]

A server on this machine has the same data as Parquet, tokens, NumPy arrays, ArrayRecord and a
folder of images. Each fault is one of the kinds of tests/support/store_server.py, drawn with the
format it meets, the request it begins with and how many it lasts, or for ever, by the seed; and
further ones replace a shard, or remove it, in mid-run. A process of its own reads an epoch of
training batches, shuffled, and prints a hash of all samples in their order. It must be that of the
run without a fault, with exit code 0; or the process must end with one line that names the file,
and the code that the table of ends gives the kind of fault. Nothing else counts.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
FORMATS = ("parquet", "tokens", "numpy", "array_record", "image_folder")
SECONDS = {"SCALEJAX_STORE_SECONDS": "6", "SCALEJAX_STORE_STALL_SECONDS": "0.3"}
"""Deadlines of the runs; those of users are five minutes and half a minute."""
LIMIT_SECONDS = 60
"""A process that takes longer hangs."""
COMPLETED, REFUSED, DAMAGED, TRANSIENT = 0, 2, 4, 75
OF_HEAD = ("429", "500", "502", "503", "504", "404", "stall", "reset")
"""Faults that answers without a body have."""
BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of the store."""

    number: int
    """Number in the campaign."""
    kind: str
    """As the server names it; "replaced" and "removed" are of the file itself."""
    data: str
    """Format of the data that meets it."""
    first: int
    """Requests before it."""
    count: int | None
    """Requests that it lasts; None for ever."""
    workers: int
    """Processes that read."""


def drawn(number: int, seed: int) -> Fault:
    """Fault `number` of the campaign: kinds and formats in turn, the rest by chance."""
    from store_server import LASTING, LIES, PASSING

    kinds = (*PASSING, *LASTING, *LIES, "replaced", "removed")
    chance = random.Random(f"{seed} {number}")
    kind = kinds[number % len(kinds)]
    of_file = kind in ("replaced", "removed")
    data = FORMATS[(number // len(kinds) + number) % len(FORMATS)]
    if kind == "wrong bytes" or of_file:  # formats without checksums cannot tell; see README.md
        data = "parquet" if kind == "wrong bytes" or number % 2 else "tokens"
    return Fault(
        number=number,
        kind=kind,
        data=data,
        first=chance.randrange(2 if data in ("numpy", "array_record") else 12),
        count=None if of_file or chance.random() < 0.3 else chance.randrange(1, 4),
        workers=chance.choice((0, 0, 1)),
    )


def write(folder: Path) -> None:
    """The data, 96 images or as many sequences of tokens."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from parquet_cases import encoded, random_images, write_images

    images, labels = random_images(96), np.arange(96) % 4
    for part in ("train", "test"):
        write_images(folder / f"{part}.parquet", images, labels, rows=8)
        for number, image in enumerate(images):
            path = folder / part / f"class{number % 4}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(image))
        writer = ArrayRecordWriter(str(folder / f"{part}.array_record"), "group_size:1")
        for image, label in zip(images, labels.tolist(), strict=True):
            writer.write(_example(encoded(image), label))
        writer.close()
    import pyarrow.parquet as pq

    for part in ("train", "test"):
        path = folder / f"{part}.parquet"
        pq.write_table(pq.read_table(path), path, row_group_size=8, write_page_checksum=True)
    np.savez(folder / "arrays.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    tokens = np.random.default_rng(0).integers(0, 256, 96 * 16 + 1, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")


def _example(image: bytes, label: int) -> bytes:
    """A `tf.train.Example` of an image and its class (its .proto, fields 1 to 3)."""

    def field(number: int, content: bytes) -> bytes:
        length, head = len(content), b""
        while length > 127:
            head, length = head + bytes([length & 127 | 128]), length >> 7
        return bytes([number << 3 | 2]) + head + bytes([length]) + content

    def entry(name: bytes, feature: bytes) -> bytes:
        return field(1, field(1, name) + field(2, feature))

    bytes_list, int_list = field(1, field(1, image)), field(3, field(1, bytes([label])))
    return field(1, entry(b"image", bytes_list) + entry(b"label", int_list))


def config_of(data: str, where: str, copies: str) -> Any:
    """The data table of a run."""
    from scalejax.config import data as tables

    if data == "parquet":
        reading = tables.ReadingConfig(memory_bytes=2**16)
        return tables.ParquetConfig(
            train=f"{where}/train.parquet",
            test=f"{where}/test.parquet",
            classes=4,
            reading=reading,
            image_size=8,
        )
    if data == "tokens":
        return tables.TokensConfig(
            train=f"{where}/train.bin", test=f"{where}/train.bin", tokens=16, vocabulary=256
        )
    if data == "numpy":
        archive = f"{where}/arrays.npz"
        return tables.NumpyConfig(train=archive, test=archive)
    if data == "array_record":
        return tables.ArrayRecordConfig(
            train=f"{where}/train.array_record",
            test=f"{where}/test.array_record",
            classes=4,
            cache_folder=copies,
            image_size=8,
        )
    return tables.ImageFolderConfig(train=f"{where}/train/", test=f"{where}/test/", image_size=8)


def read(data: str, where: str, copies: str, workers: int) -> None:
    """Print the hash of an epoch's samples in their order; end as `scalejax` does on an error."""
    from scalejax.core.errors import ScalejaxError
    from scalejax.data.datasets import for_process, open_source
    from scalejax.data.loader.sampler import Rows
    from scalejax.data.loader.worker_pool import Workers

    try:
        source = open_source(config_of(data, where, copies), "train", seed=0)
        order = np.random.default_rng(0).permutation(len(source)).astype(np.int64)
        batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        digest = hashlib.sha256()
        if workers:
            pool = Workers(for_process(source, workers), workers, slots=2)
            try:
                wanted = iter([[Rows(indices=each, epoch=0, beside={})] for each in batches])
                taken = (rows for group in pool.groups(wanted) for rows in group)
                _hash(digest, taken)
            finally:
                pool.release()
        else:
            _hash(digest, (source.take(each, 0) for each in batches))
        print(digest.hexdigest())
    except ScalejaxError as error:
        print(error, file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None


def _hash(digest: Any, batches: Any) -> None:
    for number, rows in enumerate(batches):
        for name in ("inputs", "targets"):
            digest.update(np.ascontiguousarray(rows[name]).tobytes())
        print(f"batch {number}", flush=True)


def tried(folder: Path, fault: Fault | None, data: str) -> dict[str, Any]:
    """What a process that reads under a fault prints, and how it ends."""
    from store_server import served

    begun, met, kind = [0], [0], None if fault is None else fault.kind

    def faulty(number: int, method: str, name: str, is_range: bool) -> str | None:
        del number, is_range
        if fault is None or name.endswith("/") or kind in ("replaced", "removed"):
            return None
        if method == "HEAD" and kind not in OF_HEAD:
            return None
        begun[0] += 1
        at = begun[0] - 1
        is_in = at >= fault.first and (fault.count is None or at < fault.first + fault.count)
        met[0] += is_in
        return kind if is_in else None

    slow = {"delay_seconds": 0.03} if kind in ("replaced", "removed") else {}  # still reading
    path = folder / ("train.parquet" if data == "parquet" else "train.bin")
    kept = path.read_bytes()
    with TemporaryDirectory() as copies, served(folder, faulty, **slow) as store:
        workers = 0 if fault is None else fault.workers
        command = [sys.executable, __file__, "--read", data, store.url, copies, str(workers)]
        environment = os.environ | SECONDS | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        began = time.monotonic()
        with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) as process:
            if kind in ("replaced", "removed"):
                _until(process.stdout, "batch 1")
                _replace(path, str(kind), kept)
            try:
                out, said = process.communicate(timeout=LIMIT_SECONDS)
                code = process.returncode
            except subprocess.TimeoutExpired:
                process.kill()
                out, said = process.communicate()
                code = -1
        if kind in ("replaced", "removed"):
            path.write_bytes(kept)
    return {
        "code": code,
        "hash": (out.splitlines() or [""])[-1] if code == 0 else "",
        "said": said.strip(),
        "met": met[0],
        "seconds": round(time.monotonic() - began, 1),
    }


def _until(stream: Any, line: str) -> None:
    for each in stream:
        if each.strip() == line:
            return


def _replace(path: Path, kind: str, content: bytes) -> None:
    if kind == "removed":
        path.unlink()
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".bin":
        path.write_bytes(content[::-1])
        return
    table = pq.read_table(pa.BufferReader(content))
    pq.write_table(table.take(np.arange(len(table))[::-1]), path, row_group_size=8)


def accepted(fault: Fault) -> tuple[int, ...]:
    """Exit codes that may stand for a fault beside 0 with the same samples."""
    if fault.kind in ("404", "403", "another version", "replaced", "removed", "whole"):
        return (REFUSED,)
    if fault.data == "image_folder" and fault.kind in ("short", "empty", "page"):
        return (TRANSIENT, REFUSED)  # no image in each of three reads: its size is not known
    if fault.kind == "wrong bytes":  # of a footer: a file that is no Parquet, at the door
        return (DAMAGED, REFUSED)
    return (TRANSIENT,)


def verdict(fault: Fault, found: dict[str, Any], whole: str) -> str:
    """ "same", "refused", or what is wrong."""
    lines = found["said"].splitlines()
    if found["code"] == COMPLETED:
        if fault.kind in ("replaced", "removed") and found["hash"] == whole:
            return "same"  # all that it needed had been read
        return "same" if found["hash"] == whole else "other samples"
    if found["code"] == -1:
        return "hung"
    if found["code"] not in accepted(fault):
        return f"code {found['code']}"
    if len(lines) != 1 or "http://" not in lines[0]:
        return f"{len(lines)} lines"
    return "one line"


def main() -> None:
    """Run the campaign, or read as one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--read", nargs=4)
    flags = parser.parse_args()
    if flags.read:
        data, where, copies, workers = flags.read
        read(data, where, copies, int(workers))
        return
    results, counts = [], collections.Counter()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        whole = {}
        for data in FORMATS:
            first = tried(folder, None, data)
            if first["code"]:
                raise SystemExit(f"{data}: {first['said']}")
            whole[data] = first["hash"]
        for number in range(flags.faults):
            fault = drawn(number, flags.seed)
            found = tried(folder, fault, fault.data)
            end = verdict(fault, found, whole[fault.data])
            counts[end] += 1
            results.append(asdict(fault) | found | {"verdict": end})
            told = f"{number} {fault.kind}, {fault.data}: {end} ({found['code']}) {found['said']}"
            print(told, flush=True)
    met = sum(each["met"] > 0 or each["kind"] in ("replaced", "removed") for each in results)
    print(f"{dict(counts)}; {met} of {len(results)} met a request")
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(any(end not in ("same", "one line") for end in counts))


if __name__ == "__main__":
    main()
