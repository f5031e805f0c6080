"""Hyperparameter search with Optuna: the values of each trial depend on earlier results.

Every trial is a sweep over all seeds and cases, in its own folder. The sampler has a fixed seed, so
that equal results lead to equal trials: a search that was killed repeats its suggestions, finds the
trained trials, and continues. Knows neither processes nor JAX.
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
"""Seed of the sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One combination of values with its result."""

    number: int
    """Number of the trial, from 0."""
    fields: Fields
    """The suggested values."""
    value: float | None
    """Mean of the metric over its runs after the last epoch, with the worst value for diverged
    runs; None if a run has not finished."""


def search(
    plan_of: Callable[[Grammar], SweepPlan],
    grammar: Grammar,
    folder: Path,
    *,
    trials: int,
    target: Target | None,
    train: Callable[[SweepPlan, SweepFolder], list[str]],
) -> tuple[list[Trial], list[str]]:
    """Train `trials` trials, except those already trained; returns them and error messages.

    Maximises validation accuracy, or optimises the metric of the target, which is on validation
    data too: nothing is chosen on test data.

    Args:
        plan_of: the sweep of a grammar without ranges.
        grammar: search space of lists and ranges; every trial has all values of "seed".
        folder: folder of the trial folders.
        trials: total number of trials.
        target: its metric is the objective.
        train: trains the unfinished runs of a plan; returns error messages.

    Raises:
        ConfigError: if Optuna is not installed, a run is invalid, or the folder holds another
            search, or if runs have no validation data.
    """
    require_at_least("optuna", trials, 1)
    optuna = _optuna()
    metric = target.metric if target else "validation_accuracy"
    if not metric.startswith("validation"):
        accepted = "it would choose by test data; take the metric of validation data"
        raise ConfigError(refusal("target", metric, accepted))
    is_of_accuracy = metric == "validation_accuracy"
    direction = "maximize" if is_of_accuracy else "minimize"
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=_SEED))
    space = _space(optuna, grammar)
    found: list[Trial] = []
    problems: list[str] = []
    for number in range(trials):
        asked = study.ask(space)
        fields = {name: _decoded(value) for name, value in asked.params.items()}
        plan = plan_of(_fixed(grammar, fields))
        _require_validation(plan)
        files = SweepFolder(path=folder / f"trial-{number:04d}")
        begin_sweep(plan, files, resume=files.plan.exists())
        problems += train(plan, files)
        value = _value(read_rows(plan, files), is_of_accuracy=is_of_accuracy)
        state = optuna.trial.TrialState
        study.tell(asked, value, state.FAIL if value is None else state.COMPLETE)
        found.append(Trial(number=number, fields=fields, value=value))
    save_table(
        folder / "trials.parquet",
        [{"trial": trial.number, **trial.fields, metric: trial.value} for trial in found],
    )
    return found, problems


def best_of(trials: Sequence[Trial], target: Target | None) -> Trial | None:
    """The trial with the best value; None if none has a finite one."""
    sign = -1 if target and not target.is_of_accuracy else 1
    valued = [each for each in trials if each.value is not None and math.isfinite(each.value)]
    return max(valued, key=lambda trial: sign * (trial.value or 0.0), default=None)


def _fixed(grammar: Grammar, fields: Fields) -> Grammar:
    """The grammar of one trial: the given values, and all seeds."""
    variables = {name: [value] for name, value in fields.items()}
    seeds = {name: values for name, values in grammar.variables.items() if name == "seed"}
    return dataclasses.replace(grammar, variables=variables | seeds, ranges={})


def _space(optuna: Any, grammar: Grammar) -> dict[str, Any]:
    """Optuna distribution of each field; list values are encoded as JSON, since they may be of any
    type."""
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


def _require_validation(plan: SweepPlan) -> None:
    """Refuse a search over runs that have only test data to choose by."""
    if not all(planned.run.config.data.has_validation for planned in plan.runs):
        raise ConfigError(
            "--optuna is refused: it chooses by validation data, and the runs have none; hold some "
            "out with --data.validation_fraction 0.1."
        )


def _value(rows: Sequence[RunRow], *, is_of_accuracy: bool) -> float | None:
    if not all(row.is_finished for row in rows):
        return None
    # Optuna's sampler ignores failed trials, and would not avoid regions where runs diverge.
    worst = 0.0 if is_of_accuracy else math.inf
    finals = [row.final for row in rows]
    values = (each and (each.accuracy if is_of_accuracy else each.loss) for each in finals)
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
