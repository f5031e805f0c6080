"""A search by Optuna: which values the next trial has follows from those before.

Every trial is a sweep of its own, over all seeds and cases, in a folder of its own. The sampler
has a fixed seed, so the same results lead to the same trials: a search that was killed asks
again, finds the trials that are trained, and goes on. Knows no processes and no JAX.
"""

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from scalejax.config.grid import Fields, Grammar
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.serialization import JsonValue
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import SweepPlan, Target, begin_sweep
from scalejax.sweep.results import RunRow, read_rows, save_table

_SEED = 0
"""Of the sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One combination of values, and what it reached."""

    number: int
    """From 0."""
    fields: Fields
    """The values that were chosen."""
    value: float | None
    """Mean of the metric over its runs, after the last epoch, the worst there is for those that
    diverged; None if one is not finished."""


def search(
    plan_of: Callable[[Grammar], SweepPlan],
    grammar: Grammar,
    folder: Path,
    *,
    trials: int,
    target: Target | None,
    train: Callable[[SweepPlan, SweepFolder], list[str]],
) -> tuple[list[Trial], list[str]]:
    """What `trials` trials reached, trained here unless they are trained already.

    Sought is the highest test accuracy, or the best of the target's metric.

    Args:
        plan_of: the sweep of a grammar without ranges.
        grammar: lists and ranges to choose from; every trial has all values of "seed".
        folder: each trial is in a folder in it.
        trials: combinations in all.
        target: its metric is what is sought.
        train: trains the runs of a plan that are not finished; returns what went wrong.

    Raises:
        ConfigError: if Optuna is not installed, a run cannot work, or the folder holds another
            search.
    """
    require_at_least("optuna", trials, 1)
    optuna = _optuna()
    metric = target.metric if target else "test_accuracy"
    direction = "maximize" if metric == "test_accuracy" else "minimize"
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=_SEED))
    space = _space(optuna, grammar)
    found: list[Trial] = []
    problems: list[str] = []
    for number in range(trials):
        asked = study.ask(space)
        fields = {name: _decoded(value) for name, value in asked.params.items()}
        plan = plan_of(_fixed(grammar, fields))
        files = SweepFolder(path=folder / f"trial-{number:04d}")
        begin_sweep(plan, files, resume=files.plan.exists())
        problems += train(plan, files)
        value = _value(read_rows(plan, files), metric)
        state = optuna.trial.TrialState
        study.tell(asked, value, state.FAIL if value is None else state.COMPLETE)
        found.append(Trial(number=number, fields=fields, value=value))
    save_table(
        folder / "trials.parquet",
        [{"trial": trial.number, **trial.fields, metric: trial.value} for trial in found],
    )
    return found, problems


def best_of(trials: Sequence[Trial], target: Target | None) -> Trial | None:
    """The trial with the best value; None if none has one that is finite."""
    sign = -1 if target and target.metric == "test_loss" else 1
    valued = [each for each in trials if each.value is not None and math.isfinite(each.value)]
    return max(valued, key=lambda trial: sign * (trial.value or 0.0), default=None)


def _fixed(grammar: Grammar, fields: Fields) -> Grammar:
    """The grammar of one trial: these values, and all seeds."""
    variables = {name: [value] for name, value in fields.items()}
    seeds = {name: values for name, values in grammar.variables.items() if name == "seed"}
    return dataclasses.replace(grammar, variables=variables | seeds, ranges={})


def _space(optuna: Any, grammar: Grammar) -> dict[str, Any]:
    """Optuna's distribution of each field; values of lists as JSON, since they may be anything."""
    space: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution([json.dumps(each) for each in values])
        for name, values in grammar.variables.items()
        if name != "seed"
    }
    for name, limits in grammar.ranges.items():
        is_whole = isinstance(limits.low, int) and isinstance(limits.high, int)
        kind = (
            optuna.distributions.IntDistribution
            if is_whole
            else (optuna.distributions.FloatDistribution)
        )
        try:
            space[name] = kind(limits.low, limits.high, log=limits.log)
        except ValueError as error:
            raise ConfigError(refusal(f"-V {name}", limits.low, str(error))) from error
    if not space:
        raise ConfigError("optuna needs a -V of a field other than seed to choose values of.")
    return space


def _decoded(value: JsonValue) -> JsonValue:
    return json.loads(value) if isinstance(value, str) else value


def _value(rows: Sequence[RunRow], metric: str) -> float | None:
    if not all(row.is_finished for row in rows):
        return None
    # Trials that failed are left out by Optuna's sampler, which would not shun where runs diverge.
    worst = 0.0 if metric == "test_accuracy" else math.inf
    values = (getattr(row.final, metric, None) for row in rows)
    return mean(worst if value is None else value for value in values)


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            "optuna is not installed: pip install 'scalejax[optuna]', or leave --optuna out to "
            "train every combination."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
