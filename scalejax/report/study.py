"""The folder of a study of warmup: data, figure, tables, the text of its protocol, its commands.

Everything follows from the study and the records of its runs, without clock readings: repeating a
study writes the same bytes.
"""

import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from typing import get_args

from scalejax.config.grid import Fields, fields_of
from scalejax.config.migrate import load_run_file
from scalejax.config.run import RunConfig
from scalejax.config.schedule import ScheduleConfig
from scalejax.config.training import BatchConfig, TrainConfig
from scalejax.core.environment import nvidia_gpus, text_of
from scalejax.core.serialization import flag_text, make_folder, save_text
from scalejax.core.tabular import to_csv
from scalejax.core.units import UNKNOWN, counted
from scalejax.report.figures import PrintWidth, sharpness_panels, study_panels
from scalejax.report.html.charts import save_print
from scalejax.report.terminal.sweep import only_one_trains
from scalejax.sweep.intervals import LEAST_COUNT, Interval, spread_in_words
from scalejax.sweep.plan import value_text
from scalejax.sweep.results import save_table
from scalejax.sweep.study import (
    CellResult,
    FoundRate,
    SharpnessName,
    Study,
    StudyFolder,
    cell_rows,
    lines_of,
    rate_rows,
    run_lines,
    sharpness_lines,
)

SUFFIXES = ("pdf", "svg", "png")
"""Formats of the figure."""
_HEADINGS = ("optimizer", "scaling", "batch", "warmup", "peak rate", "diverged")


def write_study(
    study: Study,
    rates: Sequence[FoundRate],
    results: Sequence[CellResult],
    folder: StudyFolder,
    *,
    width: PrintWidth,
    cores: int | None,
) -> list[str]:
    """Write every file of the study but its sweeps; `cores` is the number per process, on which
    bits depend, or None if an accelerator trains.

    Returns: the names of what is written: figures in each format, tables, texts, and the folder of
        the data.

    Raises:
        ConfigError: if a file cannot be written.
    """
    make_folder(folder.data)
    tables = {
        "cells": lines_of(cell_rows(results)),
        "runs": run_lines(results),
        "rates": lines_of(rate_rows(rates)),
    }
    if measured := sharpness_lines(results):
        tables["sharpness"] = measured
    for name, lines in tables.items():
        save_table(folder.data / f"{name}.parquet", lines)
        save_text(to_csv(lines), folder.data / f"{name}.csv")
    figures = {folder.figure: study_panels(study, results, width)}
    if along := sharpness_panels(study, results, width):
        figures[folder.sharpness] = along
    pictures = {of(suffix): spec for of, spec in figures.items() for suffix in SUFFIXES}
    for path, spec in pictures.items():
        save_print(spec, path)
    texts = {
        folder.table: markdown(study, results),
        folder.latex: latex(study, results),
        folder.protocol: protocol(study, rates, results, cores),
        folder.commands: commands(study, width, cores),
    }
    for path, text in texts.items():
        save_text(text, path)
    return [path.name for path in (*pictures, *texts, folder.data)]


# The table.


def markdown(study: Study, results: Sequence[CellResult]) -> str:
    """The table in Markdown: means with t intervals over seeds, and paired differences."""
    headings = (*_HEADINGS, *_measures(study, results), study.to_baseline)
    sharpness = _sharpness_names(results)
    lines = [_row(headings), _row(["---"] * len(headings))]
    for each in results:
        cells = _cells(study, each, sharpness)
        cells[3] = f"**{cells[3]}**" if each.is_chosen else cells[3]
        lines.append(_row(cells))
    unit = "per cent" if study.measure == "accuracy" else "nats"
    lines += ["", f"In {unit}: {_caption(study, sharpness)}"]
    return "\n".join(lines) + "\n"


def _heading(metric: str) -> str:
    return metric.replace("_", " ")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _measures(study: Study, results: Sequence[CellResult]) -> list[str]:
    """Headings of the columns of results."""
    along = [f"{name.replace('_', ' ')} sharpness" for name in _sharpness_names(results)]
    along = [each.replace("over threshold sharpness", "sharpness over threshold") for each in along]
    return [*(_heading(metric) for metric in study.metrics), *along]


def _sharpness_names(results: Sequence[CellResult]) -> list[SharpnessName]:
    """Measures of sharpness that some runs have."""
    names: tuple[SharpnessName, ...] = get_args(SharpnessName)
    return [name for name in names if any(each.sharpness(name) for each in results)]


def _caption(study: Study, sharpness: Sequence[SharpnessName]) -> str:
    spread = spread_in_words(study.seeds)
    along = ""
    if sharpness:
        along = (
            " Sharpness: the largest eigenvalue of the Hessian of the training loss; the largest "
            "and the last that were measured along a run"
        )
        if "largest_preconditioned" in sharpness:
            along += ", the largest of the Hessian as AdamW preconditions it"
        if "largest_over_threshold" in sharpness:
            along += (
                ", and the largest over that up to which SGD of the rate then is stable (of AdamW "
                "the preconditioned over its own)"
            )
        along += "."
    return (
        f"means over {counted(study.seeds, 'seed')}{spread and f' and {spread}'}, of the runs that "
        f"did not diverge; last column: difference in {_heading(study.metrics[1])} "
        f"{study.to_baseline}, paired over the seeds of which neither diverged, and with how many "
        "seeds only one of the two trains. Bold: the warmup that validation data choose, of those "
        f"of which no run diverged.{along}"
    )


def latex(study: Study, results: Sequence[CellResult]) -> str:
    """The table in LaTeX, one for each optimizer, with the rules of booktabs."""
    sharpness = _sharpness_names(results)
    headings = (*_HEADINGS[1:], *_measures(study, results), study.to_baseline)
    unit = "Per cent: " if study.measure == "accuracy" else ""
    lines = [r"% \usepackage{booktabs}"]
    for optimizer, of_optimizer in groupby(results, lambda each: each.cell.optimizer.name):
        lines += [
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{_tex(optimizer)}. {_tex(unit + _caption(study, sharpness))}}}",
            rf"\label{{tab:warmup-{optimizer.replace('_', '-')}}}",
            rf"\begin{{tabular}}{{lrlrcrrr{'r' * len(sharpness)}}}",
            r"\toprule",
            " & ".join(map(_tex, headings)) + r" \\",
        ]
        for _, of_rule in groupby(of_optimizer, lambda each: each.cell.scaling):
            lines.append(r"\midrule")
            for each in of_rule:
                cells = list(map(_tex, _cells(study, each, sharpness)))
                cells[3] = rf"\textbf{{{cells[3]}}}" if each.is_chosen else cells[3]
                lines.append(" & ".join(cells[1:]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def _tex(text: str) -> str:
    """`text` as LaTeX: special characters escaped, ± and minus in math mode."""
    escaped = re.sub(r"([%_&#$])", r"\\\1", text)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped).replace("±", r"$\pm$")


def _cells(study: Study, each: CellResult, sharpness: Sequence[SharpnessName]) -> list[str]:
    metrics = study.metrics
    lost = f"{len(each.arm.diverged)} of {len(each.arm.rows)}"
    return [
        each.cell.optimizer.name,
        each.cell.scaling,
        str(each.cell.batch),
        each.cell.warmup.text,
        f"{each.peak_rate:.3g}",
        lost,
        *(_number(study, each.over_seeds(metric)) for metric in metrics),
        *(_sharp(each.sharpness(name)) for name in sharpness),
        "reference" if each.baseline is None else _difference(study, each),
    ]


def _sharp(found: Interval | None) -> str:
    """A sharpness with three digits, and its interval with as many decimals."""
    if found is None:
        return UNKNOWN
    return found.in_words(1, max(0, 2 - math.floor(math.log10(max(abs(found.mean), 1e-3)))))


def _difference(study: Study, each: CellResult) -> str:
    """The paired difference, and with how many seeds only one of the two trains."""
    found = _number(study, each.difference(study.metrics[1]), sign="+")
    return "; ".join([found, *only_one_trains(each)])


def _number(study: Study, found: Interval | None, sign: str = "") -> str:
    """A mean and half its interval: per cent with two decimals, or a loss with four."""
    if found is None:
        return UNKNOWN
    factor, decimals = (100, 2) if study.measure == "accuracy" else (1, 4)
    return found.in_words(factor, decimals, sign)


# The protocol.


def protocol(
    study: Study,
    rates: Sequence[FoundRate],
    results: Sequence[CellResult],
    cores: int | None,
) -> str:
    """What was done, in sentences as in the methods section of a paper."""
    parts = [
        ("Data", _data(study, results)),
        ("Network and training", _network(study)),
        ("Optimizers", "\n".join(_optimizers(study, rates))),
        ("Batches, scaling rules and warmups", _grid(study, results)),
        ("Choice and statistics", _statistics(study, results)),
        ("Software and hardware", _software(cores)),
    ]
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in parts)
    return f"# Protocol\n\n{text}\n"


def _given(table: object, without: Sequence[str] = ("name",)) -> str:
    """The fields of a table, in words."""
    fields = table if isinstance(table, dict) else {}
    said = [
        f"{name} = {value_text(value)}"
        for name, value in fields.items()
        if name not in without and value is not None
    ]
    return ", ".join(said)


def _table_of(study: Study, name: str) -> Fields:
    """A table of the run.toml as given, with the fields that flags replace."""
    table = load_run_file(study.run_file).get(name)
    replaced = {
        field.removeprefix(f"{name}."): value
        for field, value in (study.overrides | study.parameters).items()
        if field.startswith(f"{name}.")
    }
    return (dict(table) if isinstance(table, dict) else {}) | replaced


def _data(study: Study, results: Sequence[CellResult]) -> str:
    run = results[0].arm.rows[0].planned.run
    facts, data = run.dataset, run.config.data
    held_out = (
        f"{data.validation_fraction:g} of the training examples were held out for validation, "
        f"chosen by seed {data.validation_seed}, the same in every run"
        if data.validation_fraction is not None
        else "validation data are a part of their own"
    )
    said = _given(_table_of(study, "data"), ("name", "validation_fraction"))
    return (
        f"The data set is {data.name}{f' ({said})' if said else ''}: {facts.train_examples:,} "
        f"training, {facts.validation_examples:,} validation and {facts.test_examples:,} test "
        f"examples. {held_out[0].upper()}{held_out[1:]}. Of each run, validation data were "
        "evaluated in its course, and test data once, at its end."
    )


def _network(study: Study) -> str:
    config = study.config
    said = _given(_table_of(study, "model"))
    epochs = counted(config.train.epochs, "epoch")
    stops = config.train.early_stopping is not None
    length = (
        f"at most {epochs}, until it stops early," if stops else f"{epochs} whatever the batch,"
    )
    changed = _not_default(config)
    return (
        f"The network is {config.model.name}{f' ({said})' if said else ''}, trained for {length} "
        "so that larger batches make fewer updates. The seed of a run gives its initial parameters "
        f"and the order of its data. {'All else is' if changed else 'All is'} as by default"
        f"{f', but: {changed}' if changed else ''}."
    )


def _not_default(config: RunConfig) -> str:
    """The fields not described elsewhere that differ from their defaults, by dotted name."""
    batch = BatchConfig(
        global_batch=config.batch.global_batch, per_device_batch=config.batch.per_device_batch
    )
    usual = fields_of(
        RunConfig(
            model=config.model,
            data=config.data,
            batch=batch,
            optimizer=config.optimizer,
            schedule=config.schedule,
            train=TrainConfig(epochs=config.train.epochs),
            tracking=config.tracking,
            seed=config.seed,
        )
    )
    found = fields_of(config).items()
    return _given({name: value for name, value in found if usual.get(name) != value})


def _optimizers(study: Study, rates: Sequence[FoundRate]) -> list[str]:
    reference = study.schedule.reference_batch
    lines = []
    for optimizer, found in zip(study.optimizers, rates, strict=True):
        how = "given"
        if found.tried:
            grid = ", ".join(f"{rate:g}" for rate, _ in found.tried)
            how = (
                f"the best of {grid} by validation {study.measure} at the end of one run each, "
                f"with seed 0, without warmup"
            )
            if found.is_at_edge:
                how += "; it is at the edge of those tried, beyond which none was"
        lines.append(
            f"- {optimizer.name} ({_given(optimizer.table)}): learning rate {found.rate:g} at "
            f"batch {reference}, {how}."
        )
        if optimizer.averages:
            lines[-1] += " It averages its iterates in place of a decay of the rate."
    return lines


def _smooth(schedule: ScheduleConfig) -> str:
    """A smooth decay in words."""
    form, share = schedule.decay.replace("_", " "), schedule.decay_share
    power = f" of power {schedule.decay_power:g}" if schedule.decay == "polynomial" else ""
    over = "after the warmup" if share is None else f"over the last {share:.4g} of the run"
    return f"decayed by a {form}{power} {over}, to {schedule.end_learning_rate:g}"


def _grid(study: Study, results: Sequence[CellResult]) -> str:
    schedule = study.schedule
    decay = _smooth(schedule)
    if schedule.decay == "step":
        reached = [e for e in schedule.decay_epochs if e < study.config.train.epochs]
        at = ", ".join(f"{epoch:g}" for epoch in reached)
        decay = f"multiplied by {schedule.decay_factor:g} after epochs {at}"
        if not reached:
            decay = "held after the warmup: the run ends before the epochs at which it would decay"
    elif schedule.decay == "constant":
        decay = "held after the warmup"
    rules = {
        "none": "none (the rate is that of the reference batch)",
        "linear": "linear (the rate times k)",
        "sqrt": "sqrt (the rate times the root of k)",
        "sde": "sde (root of k, with the betas and epsilon of Adam)",
        "legw": "legw (root of k, and k times the epochs of warmup)",
    }
    steps = sorted({(r.cell.batch, r.arm.rows[0].planned.run.total_steps) for r in results})
    batches = ", ".join(f"{batch:,} ({counted(f'{count:,}', 'update')})" for batch, count in steps)
    short = {
        f"{each.cell.warmup.text} at {each.cell.batch:,}"
        for each in results
        if 0 < each.warmup_steps < 1
    }
    below = f" Less than one update, so none: {', '.join(sorted(short))}." if short else ""
    left_out = "".join(f" Left out: {why}." for why in study.left_out)
    return (
        f"Global batches: {batches}. With k the batch over the reference batch of "
        f"{schedule.reference_batch}, the rules are: "
        f"{'; '.join(rules[each] for each in study.scalings)}. Warmups: "
        f"{', '.join(each.text for each in study.warmups)}; a gradual one rises linearly, update "
        "by update, from zero unless it says otherwise, a constant one holds the rate of the "
        "reference batch, and a length with % is a share of the run, else epochs. The rate is "
        f"{decay}.{below}{left_out} At the reference batch, where all rules are the same, "
        "a setting was trained once."
    )


def _statistics(study: Study, results: Sequence[CellResult]) -> str:
    arms = {id(each.arm): each.arm for each in results}.values()
    distinct = {row.planned.name: row for arm in arms for row in arm.rows}.values()
    lost = sum(row.has_diverged for row in distinct)
    seeds = f"0 to {study.seeds - 1}" if study.seeds > 1 else "0"
    intervals = differences = ""
    if study.seeds > 1:
        by = " (Student's t over seeds)" if study.seeds >= LEAST_COUNT else ""
        intervals = f"Beside means are {spread_in_words(study.seeds)}{by}. "
    if len(study.warmups) > 1:
        differences = (
            f"Differences {study.to_baseline} are paired over the seeds of which neither run "
            "diverged, and beside them is counted with how many seeds only one of the two trains. "
        )
    return (
        f"Each setting was trained with {counted(study.seeds, 'seed')} ({seeds}), "
        f"{counted(len(distinct), 'run')} in all. Whatever was chosen, learning rates and the best "
        f"warmup, was by validation {study.measure} at the end of runs; test data chose nothing. "
        f"{intervals}{differences}A run diverged if its loss was not finite, "
        "if all examples of an evaluation got equal outputs, or if at its end its losses, of "
        "training and of its last evaluation, were far above that of a guess (`divergence_at_end` "
        f"of scalejax); {lost} did. Such a run is in no mean, and is counted beside it."
    )


def _software(cores: int | None) -> str:
    packages = ("scalejax", "jax", "jaxlib", "flax", "optax", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    gpus = nvidia_gpus()
    found = re.search(r"model name\s*:\s*(.+)", text_of("/proc/cpuinfo"))
    chip = found[1].strip() if found else platform.machine()
    where = f"{counted(gpus, 'NVIDIA GPU')}, {chip}" if gpus else chip
    each = "" if cores is None else f" Each process trained with {counted(cores, 'core')}."
    return (
        f"{versions}; Python {platform.python_version()}, {sys.platform}. Written on a "
        f"machine with {where} ({counted(os.cpu_count() or 1, 'core')}). Runs that differ in seed "
        f"and schedule alone were trained in one program, up to twelve of them.{each}"
    )


# The commands.


def flags_of(study: Study, width: PrintWidth, cores: int | None) -> list[str]:
    """The flags of `scalejax study warmup` that give this study, including defaults."""
    optimizers = [
        each.name if each.rate is None else f"{each.name}:{each.rate!r}"
        for each in study.optimizers
    ]
    values = {
        "batches": ",".join(map(str, study.batches)),
        "warmup": ",".join(each.text for each in study.warmups),
        "scaling": ",".join(study.scalings),
        "optimizers": ",".join(optimizers),
        "seeds": str(study.seeds),
        "rates": ",".join(f"{each!r}" for each in study.rates),
        "measure": study.measure,
        "width": width,
        **({} if cores is None else {"cores": str(cores)}),
        **{name: flag_text(value) for name, value in study.overrides.items()},
    }
    return [text for name, value in values.items() for text in (f"--{name}", value)]


def commands(study: Study, width: PrintWidth, cores: int | None) -> str:
    """A script that repeats the study in the folder that it is given."""
    flags = flags_of(study, width, cores)
    pairs = zip(flags[::2], flags[1::2], strict=True)
    lines = [f"  {name} {shlex.quote(value)}" for name, value in pairs]
    return "\n".join(
        [
            "#!/bin/sh",
            "# Makes this study again: sh commands.sh FOLDER, and with --resume continues it.",
            f"# with scalejax {version('scalejax')}, jax {version('jax')}",
            "set -e",
            'folder=$(realpath -m "${1:-again}")',
            "[ $# -eq 0 ] || shift",
            'run=$(realpath "$(dirname "$0")/run.toml")',
            'scalejax study warmup "$run" --folder "$folder" \\',
            *(f"{line} \\" for line in lines),
            '  "$@"',
            "",
        ]
    )
