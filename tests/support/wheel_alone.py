"""The wheel alone, without the tree that it was built from: what it holds, and that it does all.

`python tests/support/wheel_alone.py [--cores 1,2] PYTHON ...` builds it, installs it with its
compiler into a fresh environment of each Python, and in a folder elsewhere runs the quickstart on
so many cores each, with a line of figures, and commands of every kind. Minutes for each Python, and
1.5 GB of disk at a time.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICKSTART = "scalejax quickstart --folder tour --json tour.json"
COMMANDS = (
    "scalejax doctor",
    "scalejax schema run.toml",
    "scalejax config show tour/fashion_gradual_warmup.toml --devices 8",
    "scalejax schedule plot tour/fashion_gradual_warmup.toml --devices 8 --output schedule.png",
    "scalejax train tour/fashion_gradual_warmup.toml --cpu-devices 8 --folder runs/warm",
    "scalejax predict tour/resnet50_modern.toml --cluster dgx-h100 --devices 8,256 --json p.json",
    "scalejax predict tour/fashion_gradual_warmup.toml --cluster dgx-h100 --devices 8",
    "scalejax explain tour/resnet50_modern.toml --cluster dgx-h100 --devices 8",
    "scalejax cost gpt2-124m --tokens 1B --cluster dgx-h100,dgx-b200 --devices 8",
    "scalejax search --model gpt2-124m --cluster dgx-h100 --devices 8 --confirm 0",
    "scalejax plan --target loss=3 --model llama-like:N=100m --cluster dgx-h100 --devices 8",
    "scalejax page gpt2-124m --cluster dgx-h100 --devices 8 --networks 1 --output page.html",
    "scalejax report runs/warm p.json --output report.html",
    "scalejax sweep tour/fashion_gradual_warmup.toml -V 'seed=[0,1]' --train.epochs 1 "
    "--folder sweep",
    "scalejax study warmup tour/fashion_small_batch.toml --batches 256,512 --warmup none,gradual:2 "
    "--scaling linear --seeds 1 --train.epochs 3 --folder study",
    "scalejax launch tour/fashion_gradual_warmup.toml --np -2 --train.epochs 1 --folder runs/two",
    "scalejax bench tour/fashion_gradual_warmup.toml --devices 1,2 --steps 5 --repeats 1 "
    "--folder bench",
    "scalejax data bench tour/fashion_gradual_warmup.toml --output input.toml",
    "scalejax validate hf_cluster_collectives_256MB",
    "scalejax completion bash",
)
"""What is run after the quickstart, whose folder has run files; most of it compiles."""


def build(folder: Path) -> Path:
    """The wheel of this tree, built into a folder.

    Raises:
        ConnectionError: if no package index can be reached for what builds it.
        subprocess.CalledProcessError: if it cannot be built for another reason.
    """
    words = ("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        if "connection broken by" in done.stderr:  # in pip's warnings of what it tries again
            raise ConnectionError("no package index can be reached")
        done.check_returncode()
    (wheel,) = folder.glob("*.whl")
    return wheel


def alone(variables: dict[str, str], cache: Path) -> dict[str, str]:
    """An environment that finds no tree, and nothing that was compiled before."""
    ours = ("PYTHONPATH", "XLA_FLAGS", "JAX_", "SCALEJAX_")
    kept = {name: value for name, value in variables.items() if not name.startswith(ours)}
    return kept | {"SCALEJAX_CACHE": str(cache)}


def timed(
    words: Sequence[str], folder: Path, cores: int | None = None
) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """A command that was run to its end in a folder, its seconds, and those until its first table.

    Args:
        words: the command.
        folder: where; its subfolder `cache` is the cache.
        cores: the first so many of this process's; by default all.
    """
    mine = sorted(os.sched_getaffinity(0))[:cores]
    begin = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=alone(dict(os.environ), folder / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, mine),
    )
    assert process.stdout is not None  # a pipe
    first, lines = 0.0, []
    for line in process.stdout:
        lines.append(line)
        if not first and line.startswith("devices "):
            first = time.monotonic() - begin
    code = process.wait()
    seconds = time.monotonic() - begin
    return subprocess.CompletedProcess(words, code, "".join(lines)), seconds, first


def tried(python: str, wheel: Path, cores: Sequence[int]) -> bool:
    """Install the wheel for a Python, run everything, and print it; whether all went well."""
    with tempfile.TemporaryDirectory(prefix="wheel-alone-") as place:
        home = Path(place)
        subprocess.run([python, "-m", "venv", str(home / "venv")], check=True)
        there = home / "venv" / "bin"
        words = ("install", "--quiet", f"scalejax[gpu-target] @ {wheel.as_uri()}")
        subprocess.run([str(there / "python"), "-m", "pip", *words], check=True)
        show = "import sys, jax; print('Python', *sys.version.split()[:1], 'JAX', jax.__version__)"
        about = subprocess.check_output([str(there / "python"), "-c", show], text=True).strip()
        print(f"{about}: {installed_in_words(home / 'venv')}", flush=True)
        went_well, folder = True, home
        for count in cores:
            folder = home / f"on-{count}"
            folder.mkdir()
            words = [str(there / "scalejax"), *shlex.split(QUICKSTART)[1:]]
            done, seconds, first = timed(words, folder, count)
            if done.returncode:
                print(f"{about}, {count} cores: quickstart ended with {done.returncode}")
                print(done.stdout)
                return False
            runs = json.loads((folder / "tour.json").read_text())["runs"]
            ends = [f"{each['name']} {_reached(each)}" for each in runs]
            said = f"first answer {first:.1f} s, all {seconds:.0f} s; {', '.join(ends)}"
            print(f"{about}, {count} core{'s' if count > 1 else ''}: {said}", flush=True)
        for command in COMMANDS:
            words = [str(there / "scalejax"), *shlex.split(command)[1:]]
            done, seconds, _ = timed(words, folder)
            went_well &= not done.returncode
            if done.returncode or "Traceback" in done.stdout:
                print(f"{command} ended with {done.returncode}:\n{done.stdout}")
        print(f"{about}: {len(COMMANDS)} commands, {'all well' if went_well else 'NOT ALL WELL'}")
    return went_well


def installed_in_words(environment: Path) -> str:
    """Size of the packages of an environment, pip's too, and how much of it is bytecode."""
    files = [each for each in environment.glob("lib/*/site-packages/**/*") if each.is_file()]
    sizes = {each: each.stat().st_size for each in files}
    bytecode = sum(size for each, size in sizes.items() if each.suffix == ".pyc")
    return f"{sum(sizes.values()) / 1e9:.2f} GB, {bytecode / 1e6:.0f} MB of it bytecode"


def _reached(run: dict) -> str:
    found = run["test_accuracy"]
    return run["status"] if found is None else f"{found:.1%}"


def main() -> int:
    """Build it, and try it with each Python; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--cores", default="2")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        cores = [int(each) for each in flags.cores.split(",")]
        return 0 if all([tried(python, wheel, cores) for python in flags.pythons]) else 1


if __name__ == "__main__":
    sys.exit(main())
