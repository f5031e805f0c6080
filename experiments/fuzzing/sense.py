"""What was accepted must make sense: every number of it lies within the bounds of its kind, a run
that was resumed ends as the one with which nothing was wrong, bit for bit, and a script runs what
was asked for and nothing else.

The bounds are stated here anew, by the words that end a name, and are not those by which scalejax
refuses: of what is told (predictions, plans, strategies, rows of ledgers, comparisons), of hardware
as loaded, and of configs as loaded.
"""

import dataclasses
import json
import math
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalejax.cli.main import split_overrides
from scalejax.config.run import RunConfig, load_config
from scalejax.core.errors import ScalejaxError
from scalejax.hardware import load_cluster

TOLD = "out.json"
"""What a command was asked to write its answer into."""
PRINTED = "stdout.txt"
"""What it printed."""
FITTED = "cluster-fitted.toml"
"""A cluster that it fitted."""
MANIFEST = "manifest.yaml"
"""A manifest of Kubernetes that it wrote."""
CANARY = "canary"
"""A file that a script makes if words of it are taken for commands."""
EXPECTED = "expected.json"
"""What must come of the case if it is accepted: the end of a run, or the words of a script."""

_STEPS, _YEAR_SECONDS = 2**31, 3.2e7
_BOUNDS = {
    # Of hardware: an exabyte per second, a hundred exaFLOP/s, a terahertz, a day, a kilometre of
    # anything that is counted.
    "bytes_per_second": (0, 1e18),
    "flop_per_second": (0, 1e20),
    "hz": (0, 1e12),
    # Of time: as long as a million years for a run, whose steps are at most 2**31.
    "seconds": (0, 1e6 * _YEAR_SECONDS),
    "added_seconds": (-1e6 * _YEAR_SECONDS, 1e6 * _YEAR_SECONDS),  # less, where one is taken away
    "hours": (0, 1e6 * _YEAR_SECONDS / 3600),
    "device_hours": (0, 2**20 * 1e6 * _YEAR_SECONDS / 3600),  # as long, on a million devices
    "days": (0, 1e6 * 366),
    "bytes": (0, 2**63),
    "count": (0, 2**63),
    "devices": (0, 2**40),
    "batch": (1, 2**63),
    "steps": (0, 2**63),
    "epochs": (0, _STEPS),
    # Of parts of a whole.
    "mfu": (0, 1),
    "efficiency": (0, 1),
    "share": (0, 1),
    "latency_fraction": (0, 1e3),  # over the library's: of slow clocks more than 1
    "winograd_share": (0, 2.4),  # of tiles of 2 x 2: those of 4 x 4 save more than all of it
    "fraction": (0, 1),
    "accuracy": (0, 1),
    "probability": (0, 1),
    "rate_of_failures": (0, 1),
    # Of optimizers: none is meant to be negative, a rate above a million trains nothing.
    "learning_rate": (0, 1e6),
    "momentum": (0, 1),
    "beta1": (0, 1),
    "beta2": (0, 1),
    "weight_decay": (0, 1e6),
    "label_smoothing": (0, 1),
    "epsilon": (0, 1e6),
    "price": (0, 1e9),
    "dollars": (0, 1e15),
}
_ROUNDING = 1e-9


def nonsense(argv: list[str], folder: Path) -> str | None:
    """The first number beyond the bounds of its kind, in words; None where all of them make sense.

    Args:
        argv: the command that was accepted.
        folder: where it ran, with its files.
    """
    for where, tree in _accepted(argv, folder):
        for name, value in _numbers(tree):
            if (wrong := beyond(name, value)) is not None:
                return f"{where}: {name}={value!r}, {wrong}"
        if wrong := _out_of_order(tree):
            return f"{where}: {wrong}"
    if not (folder / EXPECTED).is_file():
        return None
    expected = json.loads((folder / EXPECTED).read_text(encoding="utf-8"))
    if "script" in expected:
        return _wrong_script(expected, folder)
    if argv[0] == "train" and (found := ending(folder / "run")) != expected:
        parts = [name for name in expected if found[name] != expected[name]]
        return f"the run ended otherwise than the one with which nothing is wrong: {parts}"
    return None


def ending(run: Path) -> dict[str, Any]:
    """How the run in a folder ended: status, figures, and checksums of its final state."""
    from scalejax.training.manifest import read_manifest
    from scalejax.training.record import RunRecord, figures

    saved = (path for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    newest = max(saved, key=lambda path: int(path.name))
    return {
        "status": RunRecord.load(run).status,
        "figures": [list(row) for row in figures(run)],
        "arrays": read_manifest(newest).arrays,
    }


def _wrong_script(expected: dict[str, Any], folder: Path) -> str | None:
    """What a batch script or a manifest says or runs that it must not, in words."""
    if expected["script"] == "slurm":
        text = (folder / PRINTED).read_bytes().decode()
        for line in text.splitlines():
            if line.startswith("#SBATCH") and len(shlex.split(line)) != 2:
                return f"a line of several options: {line}"
        command = ["bash", "-c", text]
    else:
        import yaml

        text = (folder / MANIFEST).read_text(encoding="utf-8")
        documents = list(yaml.safe_load_all(text))
        if [each["kind"] for each in documents] != ["ConfigMap", "JobSet"]:
            return "other documents than a ConfigMap and a JobSet"
        if documents[0]["data"]["run.toml"] != expected["run_toml"]:
            return "another run.toml"
        job = documents[1]["spec"]["replicatedJobs"][0]["template"]["spec"]
        container = job["template"]["spec"]["containers"][0]
        found = {"image": container["image"], "namespace": documents[1]["metadata"]["namespace"]}
        if found != expected["values"]:
            return f"other values: {found}"
        command = container["command"]
    ran = _ran(command, folder)
    if list(folder.rglob(CANARY)):
        return "a word of it was run as a command"
    missing = [word for word in expected["words"] if word not in ran]
    return f"it runs {ran}, without {missing}" if missing else None


def _ran(command: list[str], folder: Path) -> list[str]:
    """The words that `srun` or `scalejax` are given by a script, which finds no other programs."""
    programs, words = folder / "programs", folder / "words"
    programs.mkdir()
    words.touch()
    for name in ("srun", "scalejax"):
        program = programs / name
        program.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shlex.quote(str(words))}\n")
        program.chmod(0o755)
    shell = "/bin/sh" if command[0] == "sh" else "/bin/bash"
    subprocess.run(
        [shell, *command[1:]], cwd=folder, env={"PATH": str(programs)}, capture_output=True,
        timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return [os.fsdecode(word) for word in words.read_bytes().split(b"\0")]


def _accepted(argv: list[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """What there is to be looked at, each as a tree."""
    told = folder / TOLD
    if told.is_file():
        yield TOLD, json.loads(told.read_text(encoding="utf-8"))
    for name in ("cluster.toml", FITTED):
        if (folder / name).is_file():
            yield name, dataclasses.asdict(load_cluster(str(folder / name)))
    if argv[:2] in (["config", "show"], ["schedule", "plot"]) or argv[0] == "sweep":
        _, overrides = split_overrides(argv)
        try:
            config = load_config(folder / "run.toml", overrides)
        except ScalejaxError:  # that the command refuses elsewhere, as flags of its own
            return
        if isinstance(config, RunConfig):
            yield "run.toml", dataclasses.asdict(config)


def _numbers(tree: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a tree, each with the path that leads to it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _numbers(value, name)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield name, tree


def beyond(name: str, value: float) -> str | None:
    """How a number is beyond its bounds; None if it is within."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    last = name.rpartition(".")[2]
    found = [unit for unit in _BOUNDS if last == unit or last.endswith("_" + unit)]
    if not found:
        return None
    least, most = _BOUNDS[max(found, key=len)]
    if least <= value <= most * (1 + _ROUNDING):
        return None
    return f"where {least:g} to {most:g} make sense"


def _out_of_order(tree: Any) -> str | None:
    """Where a band does not hold what it is the band of, in words."""
    if isinstance(tree, list | tuple):
        return next((wrong for each in tree if (wrong := _out_of_order(each))), None)
    if not isinstance(tree, dict):
        return None
    names = ("p10_step_seconds", "step_seconds", "p90_step_seconds")
    band = [float(tree[name]) for name in names if tree.get(name) is not None]
    if len(band) == len(names) and band != sorted(band):
        return f"a band out of order: {dict(zip(names, band, strict=True))}"
    return next((wrong for each in tree.values() if (wrong := _out_of_order(each))), None)
