"""How far off are predictions for device counts that were left out of the fit?

The loop that a buyer would run, by commands of scalejax alone: calibrate the machine, bench a
network on one device, on two and in two processes, fit the constants, and predict the others.
Virtual devices are predicted by a fit to the benchmarks on one device; processes by one to those
and the benchmark in two processes with the smallest batch.

    python experiments/measured_against_predicted/measure.py FOLDER [STAGE ...]

STAGE is calibrate, bench, fit or report; all of them unless told. FOLDER keeps what each leaves.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUN = str(HERE / "cnn.toml")
PLACES = [{"devices": 1}, {"devices": 2}, {"devices": 2, "processes": 2}]
BATCHES = [32, 64, 128]
STAGES = ("calibrate", "bench", "fit", "report")


def scalejax(*words: str) -> None:
    """Say a command, and run it."""
    print("$ scalejax", shlex.join(words), flush=True)
    command = [sys.executable, "-m", "scalejax", *words]
    subprocess.run(command, check=True, env={**os.environ, "COLUMNS": "80"})


def bench(folder: Path, *words: str) -> None:
    """`scalejax bench` of every place and batch."""
    scalejax(
        *("bench", RUN, "--folder", str(folder / "bench")),
        *("-V", f"batch.per_device_batch={json.dumps(BATCHES)}"),
        *("-E", json.dumps({"cases": PLACES})),
        *("-P", "data.train_examples=1024"),
        *("--steps", "40", "--repeats", "2", *words),
    )


def fit(folder: Path, output: Path, kind: str, *words: str) -> None:
    """`scalejax calibrate --from` of a cluster that was calibrated."""
    cluster = str(folder / "calibration" / f"{kind}.toml")
    scalejax("calibrate", "--from", *words, "--cluster", cluster, "--output", str(output))


def given(folder: Path) -> list[str]:
    """Folders of the benchmarks on one device, and of the smallest in two processes."""
    rows = json.loads((folder / "results.json").read_text())
    first = min(rows, key=lambda row: (-row["processes"], row["per_device_batch"]))
    chosen = [row for row in rows if row["devices"] == 1 or row is first]
    return [str(folder / "runs" / row["name"]) for row in chosen]


def main() -> None:
    """Run the stages that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where everything is kept")
    parser.add_argument("stages", nargs="*", choices=[[], *STAGES], help="by default all")
    arguments = parser.parse_args()
    folder, stages = arguments.folder, arguments.stages or STAGES
    outputs = folder / "fitted", folder / "fitted-processes"
    if "calibrate" in stages:
        scalejax("calibrate", "--output", str(folder / "calibration"))
    if "bench" in stages:
        bench(folder)
    if "fit" in stages:
        fit(folder, outputs[0], "cluster", str(folder / "bench"), "--devices", "1")
        fit(folder, outputs[1], "processes", *given(folder / "bench"))
    if "report" in stages:
        fitted = ",".join(str(output / "cluster-fitted.toml") for output in outputs)
        bench(folder, "--report", "--cluster", fitted)
        shutil.copy(folder / "bench" / "results.json", HERE / "results.json")


if __name__ == "__main__":
    main()
