"""Large-minibatch training in JAX, and what it would cost on hardware you do not have.

The verbs (`predict`, `train`, `search`, `cost`, `plan`, `explain`, `timeline`, `compare`,
`calibrate` and `validate`) do what the commands of the same names do. Everything here is imported
on first use, so that `import scalejax` does not start JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from scalejax.core.environment import shorten_absent_plugin

if TYPE_CHECKING:
    from scalejax.api import compare, cost, explain, plan, predict, search, timeline, train
    from scalejax.config.parallelism import Layout
    from scalejax.config.run import ResolvedRun, RunConfig, load_config
    from scalejax.core.errors import ConfigError, DoesNotFit, ScalejaxError
    from scalejax.data.facts import resolve
    from scalejax.hardware import (
        Chip,
        Cluster,
        RunConditions,
        Site,
        cluster_names,
        load_cluster,
        load_site,
    )
    from scalejax.measure.devices import calibrate
    from scalejax.planning.scaling_study import study
    from scalejax.report.html.report import write_report
    from scalejax.simulator.frameworks import Framework
    from scalejax.simulator.predict import Prediction, ScalingPrediction
    from scalejax.simulator.program import Program
    from scalejax.training.mesh import build_mesh
    from scalejax.training.record import RunRecord
    from scalejax.training.step import Step, build_step, init_state
    from scalejax.validation import Validation, validate
    from scalejax.xla import profile_call, profile_function, profile_many

__version__ = "0.2.0"
"""As in pyproject.toml."""

__all__ = [
    "Chip",
    "Cluster",
    "ConfigError",
    "DoesNotFit",
    "Framework",
    "Layout",
    "Prediction",
    "Program",
    "ResolvedRun",
    "RunConditions",
    "RunConfig",
    "RunRecord",
    "ScalejaxError",
    "ScalingPrediction",
    "Site",
    "Step",
    "Validation",
    "build_mesh",
    "build_step",
    "calibrate",
    "cluster_names",
    "compare",
    "cost",
    "explain",
    "init_state",
    "load_cluster",
    "load_config",
    "load_site",
    "plan",
    "predict",
    "profile_call",
    "profile_function",
    "profile_many",
    "resolve",
    "search",
    "study",
    "timeline",
    "train",
    "validate",
    "write_report",
]

_HOMES = {
    "api": ("compare", "cost", "explain", "plan", "predict", "search", "timeline", "train"),
    "config.run": ("ResolvedRun", "RunConfig", "load_config"),
    "data.facts": ("resolve",),
    "core.errors": ("ConfigError", "DoesNotFit", "ScalejaxError"),
    "hardware": (
        *("Chip", "Cluster", "RunConditions", "Site", "cluster_names", "load_cluster"),
        "load_site",
    ),
    "config.parallelism": ("Layout",),
    "training.mesh": ("build_mesh",),
    "simulator.predict": ("Prediction", "ScalingPrediction"),
    "xla": ("profile_call", "profile_function", "profile_many"),
    "simulator.frameworks": ("Framework",),
    "measure.devices": ("calibrate",),
    "validation": ("Validation", "validate"),
    "simulator.program": ("Program",),
    "training.record": ("RunRecord",),
    "report.html.report": ("write_report",),
    "planning.scaling_study": ("study",),
    "training.step": ("Step", "build_step", "init_state"),
}
"""Public names by the module that defines them."""


shorten_absent_plugin()


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"scalejax.{home}"), name)
    raise AttributeError(f"module 'scalejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
