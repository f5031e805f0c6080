"""What was accepted must make sense: every number of it lies within the bounds of its kind.

The bounds are stated here anew, by the words that end a name, and are not those by which scalejax
refuses: of what is told (predictions, plans, strategies, rows of ledgers), of hardware as loaded,
and of configs as loaded.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalejax.cli.main import split_overrides
from scalejax.config.run import RunConfig, load_config
from scalejax.core.errors import ScalejaxError
from scalejax.hardware import load_cluster

TOLD = "out.json"
"""What a command was asked to write its answer into."""

_STEPS, _YEAR_SECONDS = 2**31, 3.2e7
_BOUNDS = {
    # Of hardware: an exabyte per second, a hundred exaFLOP/s, a terahertz, a day, a kilometre of
    # anything that is counted.
    "bytes_per_second": (0, 1e18),
    "flop_per_second": (0, 1e20),
    "hz": (0, 1e12),
    # Of time: as long as a million years for a run, whose steps are at most 2**31.
    "seconds": (0, 1e6 * _YEAR_SECONDS),
    "hours": (0, 1e6 * _YEAR_SECONDS / 3600),
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
            if (wrong := _beyond(name, value)) is not None:
                return f"{where}: {name}={value!r}, {wrong}"
        if wrong := _out_of_order(tree):
            return f"{where}: {wrong}"
    return None


def _accepted(argv: list[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """What there is to be looked at, each as a tree."""
    told = folder / TOLD
    if told.is_file():
        yield TOLD, json.loads(told.read_text(encoding="utf-8"))
    if (folder / "cluster.toml").is_file():
        yield "cluster.toml", dataclasses.asdict(load_cluster(str(folder / "cluster.toml")))
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


def _beyond(name: str, value: float) -> str | None:
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
