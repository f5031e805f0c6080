"""Two columns of a wide Parquet file, here and over HTTP, by scalejax and others, side by side.

    python experiments/input_peers/wide.py --folder FOLDER [--rounds 5] [--petastorm PYTHON]
    python experiments/input_peers/wide.py --folder FOLDER --footer

The file has 1,000 row groups of 40 columns (63 MB). Two tasks: all row groups in a shuffled order,
of the file on this machine; and 44 row groups, 128 kB, of the file on a server that takes 10 ms for
each answer, sends 85 MB/s in it, and counts what it sends. Each loader runs in a fresh process, in
turn, round by round: the time is from opening the file, after imports, until the last number is an
array in memory. All must give the same sum. `--petastorm` names the Python of an environment for it
(README.md). The second command prints what a footer takes.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GROUPS, ROWS, COLUMNS = 1000, 360, 40
WANTED = ["c3", "label"]
SERVED_GROUPS = 44
"""Of 2 columns of 360 rows of 4 bytes: 127 kB."""
DELAY_SECONDS = 0.01
BYTES_PER_SECOND = 85e6
"""Of a request, as of S3: "85-90 MB/s" (its guide "Performance guidelines"; 10 ms: assumed)."""
VERSIONS = {
    "pyarrow": "pyarrow",
    "pyarrow.dataset": "pyarrow",
    "pyarrow.dataset, all at once": "pyarrow",
}
"""Package of a loader of another name."""
Array = np.ndarray


def write(path: Path) -> None:
    """The file: float32 and one int32 column, plain, with checksums of pages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = np.random.default_rng(0)
    table: dict[str, Array] = {
        f"c{number}": generator.normal(size=GROUPS * ROWS).astype(np.float32)
        for number in range(COLUMNS - 1)
    }
    table["label"] = (np.arange(GROUPS * ROWS) % 10).astype(np.int32)
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table(table), path, row_group_size=ROWS, **plain)


def order_of(where: str) -> list[int]:
    """The row groups of a task, in the order in which they are wanted."""
    shuffled = np.random.default_rng(1).permutation(GROUPS).tolist()
    return shuffled[:SERVED_GROUPS] if where.startswith("http") else shuffled


def rows_of(groups: list[int]) -> Array:
    """The rows of row groups, in their order."""
    return (np.array(groups)[:, None] * ROWS + np.arange(ROWS)).ravel()


# Loaders: the wanted columns of the row groups, in their order.


def scalejax_arrays(where: str, groups: list[int]) -> list[Array]:
    """As `data.name = "parquet"` reads them."""
    from scalejax.config.data import ReadingConfig
    from scalejax.data.formats.parquet import find_files
    from scalejax.data.readers.row_group_cache import RowGroups

    found = find_files("data.train", where, WANTED)
    reader = RowGroups(ReadingConfig())
    tables = list(reader.tables(found.field, [found.groups[each] for each in groups], WANTED))
    return [np.concatenate([table[name].to_numpy() for table in tables]) for name in WANTED]


def _opened(where: str) -> Any:
    import fsspec

    return fsspec.filesystem("http").open(where) if where.startswith("http") else where


def pyarrow_arrays(where: str, groups: list[int]) -> list[Array]:
    """A `ParquetFile`, row group by row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(_opened(where), pre_buffer=True)
    tables = [file.read_row_group(each, columns=WANTED) for each in groups]
    return [pa.concat_tables(tables)[name].to_numpy() for name in WANTED]


def dataset_arrays(where: str, groups: list[int], *, at_once: bool) -> list[Array]:
    """Fragments of `pyarrow.dataset`, a row group each; or one of all, put in order after."""
    import fsspec
    import pyarrow as pa
    import pyarrow.dataset as ds

    filesystem = fsspec.filesystem("http") if where.startswith("http") else None
    (fragment,) = ds.dataset(where, format="parquet", filesystem=filesystem).get_fragments()
    if at_once:
        table = fragment.subset(row_group_ids=sorted(groups)).to_table(columns=WANTED)
        places = np.argsort(np.argsort(groups))
        return [table[name].to_numpy()[rows_of(places.tolist())] for name in WANTED]
    tables = [fragment.subset(row_group_ids=[each]).to_table(columns=WANTED) for each in groups]
    return [pa.concat_tables(tables)[name].to_numpy() for name in WANTED]


def pandas_arrays(where: str, groups: list[int]) -> list[Array]:
    """`read_parquet`, which reads the columns whole."""
    import pandas as pd  # type: ignore[import-not-found]  a peer

    frame = pd.read_parquet(where, columns=WANTED)
    return [frame[name].to_numpy()[rows_of(groups)] for name in WANTED]


def polars_arrays(where: str, groups: list[int]) -> list[Array]:
    """`scan_parquet`, the columns whole."""
    import polars as pl  # type: ignore[import-not-found]  a peer

    frame = pl.scan_parquet(where).select(WANTED).collect()
    return [frame[name].to_numpy()[rows_of(groups)] for name in WANTED]


def polars_slices(where: str, groups: list[int]) -> list[Array]:
    """`scan_parquet`, a slice for each row group."""
    import polars as pl  # type: ignore[import-not-found]  a peer

    scan = pl.scan_parquet(where).select(WANTED)
    frames = pl.collect_all([scan.slice(each * ROWS, ROWS) for each in groups])
    frame = pl.concat(frames)
    return [frame[name].to_numpy() for name in WANTED]


def datasets_arrays(where: str, groups: list[int]) -> list[Array]:
    """Hugging Face `datasets`, streaming the columns whole (else it makes Arrow files first)."""
    import datasets  # type: ignore

    stream = datasets.load_dataset(
        "parquet", data_files=where, columns=WANTED, streaming=True, split="train"
    ).with_format("numpy")
    batches = list(stream.iter(batch_size=ROWS * 10))
    whole = {name: np.concatenate([each[name] for each in batches]) for name in WANTED}
    return [whole[name][rows_of(groups)] for name in WANTED]


def petastorm_arrays(where: str, groups: list[int]) -> list[Array]:
    """Petastorm's batch reader with threads, in an order of its own."""
    from petastorm import make_batch_reader  # type: ignore

    del groups
    with make_batch_reader(
        f"file://{where}", schema_fields=WANTED, num_epochs=1, shuffle_row_groups=True, seed=1
    ) as reader:
        batches = list(reader)
    return [np.concatenate([getattr(each, name) for each in batches]) for name in WANTED]


LOADERS: dict[str, Callable[[str, list[int]], list[Array]]] = {
    "scalejax": scalejax_arrays,
    "pyarrow": pyarrow_arrays,
    "pyarrow.dataset": functools.partial(dataset_arrays, at_once=False),
    "pyarrow.dataset, all at once": functools.partial(dataset_arrays, at_once=True),
    "pandas": pandas_arrays,
    "polars": polars_arrays,
    "polars, slices": polars_slices,
    "datasets": datasets_arrays,
    "petastorm": petastorm_arrays,
}
IMPORTS = {
    "scalejax": "scalejax.data.readers.row_group_cache, fsspec.implementations.http",
    "pandas": "pandas, pyarrow.parquet",
    "polars": "polars",
    "polars, slices": "polars",
    "datasets": "datasets",
    "petastorm": "petastorm",
}
"""What a loader imports before the clock starts; others `pyarrow.dataset` and fsspec's HTTP."""


def run_loader(name: str, where: str) -> None:
    """Print seconds, the sum of all numbers, and the version of a loader's package."""
    default = "pyarrow.dataset, pyarrow.parquet, fsspec.implementations.http"
    for module in IMPORTS.get(name, default).split(", "):
        __import__(module)
    groups = order_of(where)
    began, cpu_began = time.perf_counter(), time.process_time()
    arrays = LOADERS[name](where, groups)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    package = VERSIONS.get(name, name.split(",")[0])
    try:
        said = version(package)
    except PackageNotFoundError:
        said = ""
    # in an order of its own, Petastorm has the same numbers
    total = sum(float(np.sort(each.astype(np.float64)).sum()) for each in arrays)
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "sum": round(total, 6)}
    print(json.dumps(found | {"version": said}))


def measured(python: str, name: str, where: str) -> dict[str, float | str]:
    """What a loader in a fresh process prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, __file__, "--loader", name, "--where", where],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"failed": last}
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(folder: Path, rounds: int, petastorm: str | None) -> None:
    """Print medians, and write them to wide.json."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from store_server import served

    path = folder / "wide.parquet"
    if not path.exists():
        write(path)
    results = []
    limits = {"delay_seconds": DELAY_SECONDS, "bytes_per_second": BYTES_PER_SECOND}
    with served(folder, **limits) as store:
        store.content(path)  # read once, before the first is timed
        for task in (str(path), f"{store.url}/wide.parquet"):
            is_served = task.startswith("http")
            found: dict[str, list[dict[str, float | str]]] = {name: [] for name in LOADERS}
            for turn in range(rounds):
                for name in LOADERS:
                    if name == "petastorm" and turn:  # it takes a minute
                        continue
                    python = petastorm if name == "petastorm" else sys.executable
                    if python is None or (name == "petastorm" and is_served):
                        continue
                    store.sent_bytes, store.asked = 0, []
                    one = measured(python, name, task)
                    found[name].append(one | {"bytes": store.sent_bytes, "asked": len(store.asked)})
            results += [
                _summary("served" if is_served else "here", name, each)
                for name, each in found.items()
                if each
            ]
    for each in results:
        print(each)
    sums = {(each["task"], each["sum"]) for each in results if "sum" in each}
    if len(sums) != 2:
        raise SystemExit(f"the loaders give different numbers: {sums}")
    wanted = SERVED_GROUPS * ROWS * 8
    about = {"file_bytes": path.stat().st_size, "wanted_bytes": wanted, "rounds": rounds}
    (HERE / "wide.json").write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


def _summary(task: str, name: str, each: list[dict]) -> dict[str, float | str]:
    if failed := next((one["failed"] for one in each if "failed" in one), None):
        return {"task": task, "loader": name, "failed": failed}
    seconds = sorted(one["seconds"] for one in each)
    return {
        "task": task,
        "loader": name,
        "version": each[0]["version"],
        "seconds": round(median(seconds), 3),
        "least": round(seconds[0], 3),
        "most": round(seconds[-1], 3),
        "cpu_seconds": round(median(one["cpu_seconds"] for one in each), 3),
        "bytes": int(median(one["bytes"] for one in each)),
        "asked": int(median(one["asked"] for one in each)),
        "sum": each[0]["sum"],
    }


def footer(folder: Path) -> None:
    """Print the bytes of the file's footer, and those that it takes in memory."""
    import pyarrow.parquet as pq

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pq.read_metadata(folder / "wide.parquet")
    held, before = [], resident()
    for _ in range(8):
        held.append(pq.read_metadata(folder / "wide.parquet"))
    each = (resident() - before) / len(held)
    print(f"{held[0].serialized_size} bytes, {each:.0f} in memory")


def main() -> None:
    """Compare, or run one loader."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--petastorm")
    parser.add_argument("--footer", action="store_true")
    parser.add_argument("--loader")
    parser.add_argument("--where")
    flags = parser.parse_args()
    if flags.loader:
        run_loader(flags.loader, flags.where)
    elif flags.footer:
        footer(flags.folder)
    else:
        flags.folder.mkdir(parents=True, exist_ok=True)
        compare(flags.folder, flags.rounds, flags.petastorm)


if __name__ == "__main__":
    main()
