"""Parquet images through scalejax and through the loaders that others use, side by side.

    python experiments/input_peers/measure.py --folder FOLDER --prepare    # once
    python experiments/input_peers/measure.py --folder FOLDER [--cases ...] [--rounds 3]

The first installs the others into environments of their own in FOLDER (1.7 GB) and writes the
images there. The second runs every loader in a fresh process, in turn, round by round, adds what
was measured to results.json, and prints medians over all rounds that are in it. Every loader is
first checked, once for each number of workers: that it gives the same images as all others, and
what memory it takes (the peak of the proportional set sizes of its processes together).
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
REQUIREMENTS = {
    "new": ("torch==2.13.0+cpu", "datasets", "grain", "pillow", "psutil", "conformal-clip-data"),
    # Later ones are without the `pieces` of a data set that Petastorm reads.
    "petastorm": (
        *("pyarrow==14.0.2", "numpy<2", "pandas<2.2", "setuptools<70", "pillow", "psutil"),
        *("dill", "diskcache", "future", "packaging", "pyzmq", "six", "fsspec"),
    ),
}
"""What goes into each environment. PyPI's own wheel of PyTorch brings 4 GB of CUDA; `+cpu` does
not."""
ENVIRONMENTS = {
    "torch": "new",
    "datasets": "new",
    "grain": "new",
    "petastorm": "petastorm",
    "scalejax": None,
    "scalejax, same decode": None,
    "scalejax, threads": None,
}
"""Where each loader runs; None for here."""
CASES = {
    "small": ("small", "resized"),
    "augmented": ("small", "augmented"),
    "large": ("large", "resized"),
    "epochs": ("small", "resized"),
}
"""Images and transform."""
EPOCHS = {"epochs": 4}
"""Of a case; of others one."""
Measured = dict[str, float]


def prepare(folder: Path) -> None:
    """Install what is compared, and write the files."""
    for name, requirements in REQUIREMENTS.items():
        if (folder / name / "done").exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        install = [folder / name / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *requirements], check=True)
        if name == "petastorm":  # without PySpark, which it needs to write alone
            subprocess.run([*install, "--no-deps", "petastorm==0.13.1"], check=True)
        (folder / name / "done").touch()
    write = "import sys, pathlib, files; files.write_files(pathlib.Path(sys.argv[1]))"
    python = folder / "new" / "bin" / "python"
    subprocess.run([python, "-c", write, folder / "files"], check=True, cwd=HERE)


@contextlib.contextmanager
def running(
    folder: Path, case: str, loader: str, workers: int, *flags: str
) -> Iterator[subprocess.Popen]:
    """One loader in a process of its own."""
    environment = ENVIRONMENTS[loader]
    python = sys.executable if environment is None else folder / environment / "bin" / "python"
    images, transform = CASES[case]
    script = [HERE / "loaders.py", loader, folder / "files" / images, transform]
    command = [python, "-W", "ignore", *script]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [*map(str, command), "--workers", str(workers), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if environment else None,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    ) as process:
        yield process


def answer(process: subprocess.Popen) -> dict:
    """What a loader printed last."""
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}")
    return json.loads(printed.splitlines()[-1])


def held_bytes(process: psutil.Process) -> int:
    """The proportional set sizes of a process and all below it."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += each.memory_full_info().pss
    return total


def checked(folder: Path, case: str, loader: str, workers: int) -> dict:
    """Which images a loader gives, the memory it takes, and versions."""
    with running(folder, case, loader, workers, "--epochs", "1", "--check") as process:
        peak_bytes = 0
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                peak_bytes = max(peak_bytes, held_bytes(psutil.Process(process.pid)))
            time.sleep(0.1)
        found = answer(process)
    return {
        "checksum": found["checksum"],
        "peak_bytes": peak_bytes,
        "versions": {"python": platform.python_version()} | found["versions"],
    }


def timed(folder: Path, case: str, loader: str, workers: int) -> Measured:
    """How fast its batches come."""
    epochs = str(EPOCHS.get(case, 1))
    with running(folder, case, loader, workers, "--epochs", epochs) as process:
        found = answer(process)
    names = ("samples_per_second", "processor_seconds_per_sample", "first_batch_seconds")
    return {name: float(f"{found[name]:.4g}") for name in names}


def main() -> None:
    """Prepare, or check and measure in turn; print the table, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.folder)
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for number in range(arguments.rounds):
        # Another begins each round, so that none always follows the same one.
        loaders = list(ENVIRONMENTS)
        loaders = loaders[number:] + loaders[:number]
        for case, workers, loader in product(arguments.cases, arguments.workers, loaders):
            chosen = (arguments.folder, case, loader, workers)
            result = results.setdefault(case, {}).setdefault(f"{loader}, {workers}", {"rounds": []})
            if "peak_bytes" not in result:
                result |= checked(*chosen)
            result["rounds"].append(timed(*chosen))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for case, found in results.items():
        report(case, found)


def report(case: str, results: dict) -> None:
    """Print medians of every loader."""
    print(f"{case}\n")
    print("| loader, workers | samples/s | CPU us/sample | first batch, s | memory, MB | images |")
    print("|---|---|---|---|---|---|")
    for name, result in sorted(results.items(), key=lambda each: each[0][-1]):
        rate, processor, first = (
            median(each[key] for each in result["rounds"])
            for key in ("samples_per_second", "processor_seconds_per_sample", "first_batch_seconds")
        )
        print(
            f"| {name} | {rate:.0f} | {processor * 1e6:.0f} | {first:.2f} | "
            f"{result['peak_bytes'] / 1e6:.0f} | {result['checksum'][:8]} |"
        )
    print()


if __name__ == "__main__":
    main()
