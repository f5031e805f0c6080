"""Everything that this folder measures on a machine with a GPU, in two parts of a few minutes.

Each stage is a process of its own with a limit of its own; one that fails or takes too long costs
itself alone, and one that the time left is too short for is skipped. After each stage OUTPUT has
all results so far in PART.tar.gz, the log in PART.log and the stages in PART.json; the clocks of
the GPU are sampled into the archive.

    python3 experiments/gpu_parity/session.py PART OUTPUT --seconds N [--tiny]

PART is first (calibration, ResNet-50 and GPT-2) or second (Llama, operators, compiled PyTorch).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CLOCKS = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"
CASES = {
    "resnet50": [{"batch.per_device_batch": 256}],
    "gpt2": [
        {"data.tokens": 1024, "batch.per_device_batch": 32},
        {"data.tokens": 4096, "batch.per_device_batch": 8},
    ],
    "llama": [
        {"data.tokens": 4096, "batch.per_device_batch": 2},
        {"data.tokens": 8192, "batch.per_device_batch": 1},
    ],
}
_DECODER = {"data.tokens": 64, "data.vocabulary": 512, "batch.per_device_batch": 1}
_WIDTHS = {"model.layers": 2, "model.hidden": 64, "model.heads": 4}
TINY = {
    "resnet50": {"data.image_size": 32, "batch.per_device_batch": 2},
    "gpt2": {**_DECODER, **_WIDTHS},
    "llama": {**_DECODER, **_WIDTHS, "model.kv_heads": 2, "model.ffn_hidden": 160},
}
"""Sizes for a rehearsal on a CPU."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A process to run."""

    name: str
    """Name of its results."""
    command: tuple[str, ...]
    """What runs."""
    limit_seconds: float
    """Time after which it is stopped."""
    least_seconds: float
    """Time left below which it is not begun."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables beside those of all stages."""


def stages(part: str, folder: Path, *, is_tiny: bool) -> list[Stage]:
    """The stages of a part, the most wanted first."""
    python, tiny = sys.executable, ("--tiny",) if is_tiny else ()

    def bench(network: str, limit: float, least: float) -> Stage:
        cases = [TINY[network]] if is_tiny else CASES[network]
        steps = ("--steps", "5", "--warmup-steps", "2") if is_tiny else ("--steps", "40")
        command = (
            *(python, "-m", "scalejax", "bench", str(HERE / f"{network}.toml")),
            *("-E", json.dumps({"cases": cases}), *steps, "--repeats", "1"),
            *("--folder", str(folder / f"bench-{network}")),
        )
        return Stage(f"bench-{network}", command, limit, least)

    def torch(case: str, limit: float, least: float, *words: str) -> Stage:
        name = f"torch-{case}{'-compiled' if words else ''}"
        steps = ("--steps", "4", "--warmup-steps", "1") if is_tiny else ()
        script, output = str(HERE / "torch_steps.py"), str(folder / f"{name}.json")
        command = (python, script, case, output, *words, *steps, *tiny)
        return Stage(name, command, limit, least, (("PYTHONPATH", ""),))

    def operators(kind: str, limit: float, name: str = "", flags: str = "") -> Stage:
        name = name or f"operators-{kind}"
        output = str(folder / f"{name}.json")
        command = (python, str(HERE / "operators.py"), kind, output, *tiny)
        return Stage(name, command, limit, 15, (("XLA_FLAGS", flags),) if flags else ())

    if part == "first":
        calibration = ("calibrate", "--output", str(folder / "calibration"))
        return [
            Stage("calibrate", (python, "-m", "scalejax", *calibration), 180, 60),
            bench("resnet50", 150, 45),
            torch("resnet50", 60, 20),
            bench("gpt2", 110, 35),
            torch("gpt2_1024", 45, 15),
            torch("gpt2_4096", 45, 15),
        ]
    without_graphs = "--xla_gpu_enable_command_buffer="
    script, output = str(HERE / "torch_operators.py"), str(folder / "torch-operators.json")
    return [
        bench("llama", 120, 40),
        torch("llama_4096", 45, 15),
        torch("llama_8192", 45, 15),
        operators("attention", 90),
        operators("launches", 40),
        operators("launches", 40, "operators-launches-without-graphs", without_graphs),
        Stage("torch-operators", (python, script, output, *tiny), 60, 20, (("PYTHONPATH", ""),)),
        torch("gpt2_1024", 90, 40, "--compile"),
        operators("norms", 45),
        torch("resnet50", 120, 60, "--compile"),
        operators("grouped", 110),
        torch("llama_4096", 90, 40, "--compile"),
        torch("gpt2_4096", 90, 40, "--compile"),
    ]


def environment_of(folder: Path) -> dict[str, str]:
    """Variables of every stage; scalejax is found in this checkout, and its version beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = folder / "site" / f"scalejax-{project['version']}.dist-info"
    said.mkdir(parents=True, exist_ok=True)
    words = ("Metadata-Version: 2.1", "Name: scalejax", f"Version: {project['version']}", "")
    (said / "METADATA").write_text("\n".join(words))
    paths = (str(ROOT), str(said.parent), os.environ.get("PYTHONPATH", ""))
    # Without it JAX would measure the CPU where it cannot start the GPU.
    platforms = {"JAX_PLATFORMS": "cuda,cpu"} if shutil.which("nvidia-smi") else {}
    return {
        **os.environ,
        **platforms,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "SCALEJAX_CACHE": str(folder / "cache"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "COLUMNS": "100",
    }


def keep(part: str, folder: Path, output: Path, done: list[dict[str, object]]) -> None:
    """Write the results so far."""
    (output / f"{part}.json").write_text(json.dumps(done, indent=1) + "\n")
    partial = output / f"{part}.tar.gz.part"
    with tarfile.open(partial, "w:gz", compresslevel=5) as archive:
        for path in sorted(folder.iterdir()):
            if path.name not in ("site", "cache"):
                archive.add(path, arcname=f"{part}/{path.name}")
    partial.replace(output / f"{part}.tar.gz")


def run(stage: Stage, environment: dict[str, str], log: Path, limit_seconds: float) -> int:
    """Run a stage; returns its exit code, 124 if it was stopped with all its processes."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            stage.command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment | dict(stage.environment),
            start_new_session=True,
        )
        try:
            return process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            return 124


def main() -> None:
    """Run the stages of a part in the time given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("first", "second"))
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    parser.add_argument("--only", nargs="*", help="names of stages; by default all")
    asked = parser.parse_args()
    begin = time.monotonic()
    folder = Path("/tmp") / f"gpu_parity_{asked.part}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    asked.output.mkdir(parents=True, exist_ok=True)
    log, environment = asked.output / f"{asked.part}.log", environment_of(folder)
    monitor = None
    if shutil.which("nvidia-smi"):
        with (folder / "gpu.txt").open("w") as file:
            subprocess.run(("nvidia-smi", "-q"), stdout=file, timeout=30, check=False)
        with (folder / "clocks.csv").open("w") as file:
            monitor = subprocess.Popen(
                ("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,nounits", "-lms", "500"),
                stdout=file,
            )
    packages = subprocess.run(
        (sys.executable, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    (folder / "packages.txt").write_text(packages.stdout)
    done: list[dict[str, object]] = []
    try:
        for stage in stages(asked.part, folder, is_tiny=asked.tiny):
            if asked.only and stage.name not in asked.only:
                continue
            left = asked.seconds - (time.monotonic() - begin)
            started = time.time()
            row: dict[str, object] = {"stage": stage.name}
            if left < stage.least_seconds:
                done.append(row | {"skipped": f"{left:.0f} s were left"})
                continue
            with log.open("a") as file:
                file.write(f"\n==== {stage.name}\n")
            code = run(stage, environment, log, min(stage.limit_seconds, left - 3))
            seconds = time.time() - started
            done.append(row | {"exit_code": code, "started": started, "seconds": seconds})
            print(f"{stage.name}: exit code {code} after {seconds:.0f} s", flush=True)
            keep(asked.part, folder, asked.output, done)
    finally:
        if monitor is not None:
            monitor.terminate()
        keep(asked.part, folder, asked.output, done)
    print(log.read_text(errors="replace")[-9000:] if log.exists() else "nothing ran", flush=True)


if __name__ == "__main__":
    main()
