"""The interactive page: one HTML file with a grid of predictions and the script that queries it.

The table in the page is the simulator's (`planning.settings_grid`); what depends only on tokens,
prices and CO2 is computed in the page, as `planning.bill` does. Lays out; predicts nothing.
"""

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import get_args

from scalejax.config.presets import PRESETS
from scalejax.core.serialization import JsonValue, flag_text, save_text
from scalejax.core.units import counted
from scalejax.hardware import Cluster
from scalejax.planning.bill import Rates
from scalejax.planning.search.run import SEARCHED_FIELDS
from scalejax.planning.settings_grid import (
    LayoutEntry,
    Origin,
    Setting,
    SettingsGrid,
    words_of,
)
from scalejax.simulator.frameworks import framework_named
from scalejax.simulator.predict import RUN_CONDITIONS
from scalejax.simulator.transformer import Strategy

_DIGITS = 6
"""Significant digits of times in the table."""
_MOST_NOTES = 12
_NETWORK = "network.bytes_per_second"
_OF_THE_PAGE = ("model.compute_dtype", "batch.global_batch", _NETWORK)
"""Fields that the controls of the page set, regardless of what the command was given."""
ORIGINS = get_args(Origin)
"""Origins of a step, in the order of the table's indices."""
_TERM_WORDS = {
    "compute": "Products and attention, at the rates that the chip reaches with the framework.",
    "memory": "Operations bound by the device's memory bandwidth.",
    "launch": "Gaps between operations.",
    "contention": "Compute that overlapping collectives slow down.",
    "host": "Devices that wait for the host to launch operations.",
    "overhead": "Time of a step outside its operations.",
    "bubble": "Pipeline stages without a microbatch to work on.",
    "stragglers": "Waiting for the slowest device.",
    "input": "Waiting for data.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a page is about, and where it starts."""

    title: str
    """Heading of the page: the network."""
    run: str
    """Argument of the command `predict` for it: a run file."""
    clusters: tuple[str, ...]
    """Its argument for each cluster of the grid: a name or a file."""
    overrides: Mapping[str, JsonValue]
    """Fields of the run, of hardware and of conditions that the command was given."""
    tokens: float
    """Tokens to train on."""
    tokens_source: str
    """Where that number comes from."""
    rates: tuple[Rates, ...]
    """Price and power of a device of each cluster of the grid."""
    start: Setting
    """Setting that the page opens with."""


def write_explorer(grid: SettingsGrid, subject: Subject, path: Path) -> int:
    """Write the page, and return its size in bytes.

    Raises:
        ConfigError: if the file cannot be written.
    """
    text = render(grid, subject)
    save_text(text, path)
    return len(text.encode())


def render(grid: SettingsGrid, subject: Subject) -> str:
    """The page, as HTML with everything inside it."""
    folder = files("scalejax").joinpath("report", "html")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    data = json.dumps(table(grid, subject), separators=(",", ":"), allow_nan=False)
    return Template(read("explorer.html")).substitute(
        title=escape(subject.title),
        data=data.replace("<", "\\u003c"),
        answers=read("explorer_answers.js"),
        script=read("explorer.js"),
    )


def table(grid: SettingsGrid, subject: Subject) -> dict[str, JsonValue]:
    """What the page computes with, as plain data.

    A cell is the index of the reason why a setting has no layout, or a row for each layout:
    its index, step, p10 and p90, MFU, whether it fits, bytes of state, of work and at the peak,
    goodput, origin (index in `ORIGINS`), and then term and seconds in turn.
    """
    axes = grid.axes
    places = {place.cluster.name: at for at, place in enumerate(axes.places)}
    terms: dict[str, int] = {}
    layouts: dict[tuple[str, str], int] = {}
    refusals: dict[str, int] = {}
    cells: dict[str, JsonValue] = {}

    def key(setting: Setting) -> str:
        where = (
            places[setting.cluster],
            axes.device_counts.index(setting.device_count),
            axes.global_batches.index(setting.global_batch),
            axes.compute_dtypes.index(setting.compute_dtype),
            axes.network_multiples.index(setting.network_multiple),
            axes.frameworks.index(setting.framework),
        )
        return ",".join(map(str, where))

    for setting, entries in grid.entries.items():
        rows: list[JsonValue] = []
        for each in entries:
            words = words_of(each), flags_of(each.strategy)
            rows.append(_row(each, layouts.setdefault(words, len(layouts)), terms))
        cells[key(setting)] = rows
    for setting, why in grid.refused.items():
        cells[key(setting)] = refusals.setdefault(why, len(refusals))
    start = subject.start
    return {
        "title": subject.title,
        "run": shlex.quote(subject.run),
        "flags": _flags({k: v for k, v in subject.overrides.items() if k not in _OF_THE_PAGE}),
        "version": version("scalejax"),
        "method": _method(grid),
        "origins": list(ORIGINS),
        "off": _off(grid),
        "tokensPerSample": grid.tokens_per_sample,
        "tokensSource": subject.tokens_source,
        "clusters": [
            {
                **cluster_table(place.cluster, rates),
                "path": shlex.quote(path),
                "networkRate": _given_network(place.cluster, subject.overrides),
                "whyNotCompiled": grid.why_not_compiled.get(place.cluster.name),
            }
            for place, rates, path in zip(axes.places, subject.rates, subject.clusters, strict=True)
        ],
        "devices": list(axes.device_counts),
        "batches": list(axes.global_batches),
        "dtypes": list(axes.compute_dtypes),
        "networks": list(axes.network_multiples),
        "frameworks": [
            {"name": name, "title": framework_named(name).title} for name in axes.frameworks
        ],
        "start": {
            "cluster": start.cluster,
            "devices": start.device_count,
            "batch": start.global_batch,
            "precision": start.compute_dtype,
            "network": start.network_multiple,
            "framework": start.framework,
            "tokens": subject.tokens,
            "grid": subject.rates[0].grid_grams_per_kwh,
        },
        "terms": list(terms),
        "termWords": {name: _TERM_WORDS[name] for name in terms if name in _TERM_WORDS},
        "layouts": [{"words": words, "flags": flags} for words, flags in layouts],
        "refusals": list(refusals),
        "notes": _notes(grid),
        "cells": cells,
    }


def _row(entry: LayoutEntry, layout: int, terms: dict[str, int]) -> list[JsonValue]:
    found = entry.prediction
    row: list[JsonValue] = [
        layout,
        _rounded(found.step_seconds),
        _rounded(found.p10_step_seconds),
        _rounded(found.p90_step_seconds),
        _rounded(found.mfu, 4),
        int(found.fits),
        entry.state_bytes,
        entry.working_bytes,
        found.peak_memory_bytes,
        _rounded(found.goodput),
        ORIGINS.index(entry.origin),
    ]
    for name, seconds in found.waterfall:
        if seconds and name not in RUN_CONDITIONS:
            row += [terms.setdefault(name, len(terms)), _rounded(seconds, 4)]
    return row


def _rounded(value: float | None, digits: int = _DIGITS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def flags_of(strategy: Strategy) -> str:
    """The flags that give `predict` the layout of a strategy, whatever the run file says."""
    layout = strategy.layout
    values: dict[str, JsonValue] = {
        **SEARCHED_FIELDS,
        **{f"layout.{axis}": size for axis, size in layout.axis_sizes.items()},
        "batch.microbatches": strategy.split.microbatches,
        "model.remat": strategy.recompute,
        "layout.zero_stage": strategy.zero_stage,
        "layout.sequence_parallel": strategy.sequence_parallel,
    }
    if layout.context > 1:
        values["layout.context_strategy"] = strategy.context_strategy
    if layout.pipeline > 1:
        values["layout.pipeline_chunks"] = strategy.pipeline_chunks
        values["layout.pipeline_schedule"] = strategy.pipeline_schedule
    return _flags({name: value for name, value in values.items() if value is not None})


def _flags(values: Mapping[str, JsonValue]) -> str:
    """Values by field as shell flags."""
    words = (word for name, value in values.items() for word in (f"--{name}", flag_text(value)))
    return shlex.join(words)


def _given_network(cluster: Cluster, overrides: Mapping[str, JsonValue]) -> float | None:
    """The network rate that the command was given, if any; its multiples have no flag."""
    if cluster.network is None or _NETWORK not in overrides:
        return None
    return cluster.network.bytes_per_second


def cluster_table(cluster: Cluster, rates: Rates) -> dict[str, JsonValue]:
    """A cluster with its figures, each with its source."""
    chip, power, price = cluster.chip, cluster.power, cluster.price
    is_of_file = price is not None and price.dollars_per_device_hour == rates.price_per_device_hour
    source = cluster.sources.get("price.dollars_per_device_hour")
    watts = None
    if rates.watts_per_device is not None and power is not None and power.watts is not None:
        name = "max_watts" if power.training_watts is None else "training_watts"
        where = cluster.sources.get(f"power.{name}", "the cluster's file")
        watts = f"Power: {name} of a device with its share of the node: {where}"
    return {
        "name": cluster.name,
        "title": cluster.title,
        "chip": chip.name,
        "memoryBytes": chip.memory_bytes,
        "price": rates.price_per_device_hour,
        "priceSource": (
            f"{price.in_words.capitalize()}: {source or 'the cluster file'}"
            if price is not None and is_of_file
            else "Price: as given to the command"
            if rates.price_per_device_hour is not None
            else None
        ),
        "watts": rates.watts_per_device,
        "wattsSource": watts,
        "pue": rates.pue,
        "sources": _sources(cluster),
    }


def _sources(cluster: Cluster) -> list[JsonValue]:
    """Lines "field: source" of a cluster and its chip, except prices, power and CUDA's sizes."""
    lines = [
        f"{owner}, {name}: {source}"
        for owner, sources in (
            (cluster.name, cluster.sources),
            (cluster.chip.name, cluster.chip.sources),
        )
        for name, source in sources.items()
        if not name.startswith(("price.", "power.", "cuda."))
    ]
    return [*lines]


def _off(grid: SettingsGrid) -> list[JsonValue] | None:
    """How far the closed form is at most below and above the compiled steps, and how many of these
    there are; None without any."""
    errors = grid.closed_form_errors
    if not errors:
        return None
    return [_rounded(min(0.0, errors[0]), 3), _rounded(max(0.0, errors[-1]), 3), len(errors)]


def _method(grid: SettingsGrid) -> str:
    """Where the numbers are from, and how many of each kind there are."""
    origins = Counter(each.origin for entries in grid.entries.values() for each in entries)
    first = Counter(entries[0].origin for entries in grid.entries.values())
    said, settings = first["compiled"] + first["kernels"], len(grid.entries)
    words = [
        "The numbers come from the simulator, one for each layout of "
        f"{counted(settings, 'setting')}, at every position of the controls; in {said:,} of these "
        "they are what scalejax predict prints."
    ]
    if origins["compiled"]:
        words.append(
            f"{counted(origins['compiled'], 'step')} of XLA's are of compiled programs, each of "
            "which is costed at every rate of the network."
        )
    if origins["kernels"]:
        words.append(
            f"{counted(origins['kernels'], 'step')} of a framework with kernels of its own are in "
            "closed form, as in predict."
        )
    if origins["closed_form"]:
        said = "; ".join(f"{name}: {why}" for name, why in grid.why_not_compiled.items())
        why = f" ({said})" if said else ""
        words.append(
            f"{counted(origins['closed_form'], 'step')} are in closed form and not compiled{why}: "
            f"marked as such, and not what predict prints{_off_in_words(grid)}."
        )
    words.append(
        "Days, dollars, energy and CO2 are computed from them in the page. The layouts are the "
        f"best of {grid.considered:,} that were costed in closed form, in "
        f"{grid.axes.compute_dtypes[0]}, at the network's own rate, as XLA runs them; scalejax "
        "search goes through all."
    )
    return " ".join(words)


def _off_in_words(grid: SettingsGrid) -> str:
    errors = grid.closed_form_errors
    if not errors:
        return ""
    return (
        f"; the closed forms of the compiled ones are off by {100 * errors[0]:+.1f} to "
        f"{100 * errors[-1]:+.1f} %"
    )


def _notes(grid: SettingsGrid) -> list[JsonValue]:
    """Notes of the best predictions, each once."""
    best = [each[0].prediction for each in grid.entries.values()]
    notes = dict.fromkeys(f"{note}." for each in best for note in each.notes)
    return [*list(notes)[:_MOST_NOTES]]


def title_of(name: str) -> str:
    """A network with its number of parameters, if published: "llama3-8b, 8.03 billion
    parameters"."""
    preset = PRESETS.get(name)
    if preset is None:
        return name
    return f"{name}, {preset.parameters / 1e9:.3g} billion parameters"
