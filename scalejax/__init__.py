"""Large-minibatch training in JAX, and what it would cost on hardware that is not here.

The verbs that carry the name of their module are imported from there:
`from scalejax.predict import predict`, and likewise `profile`, `train` and `quickstart`.
Everything here is imported when it is first used, so that `import scalejax` starts no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalejax.config import ResolvedRun, RunConfig, load_config, resolve
    from scalejax.errors import ConfigError, DoesNotFit, ScalejaxError
    from scalejax.hardware import Chip, Cluster, cluster_names, load_cluster
    from scalejax.layout import Layout
    from scalejax.mesh import build_mesh
    from scalejax.predict import Prediction, ScalingPrediction
    from scalejax.profile import profile_function, profile_many
    from scalejax.program import Program
    from scalejax.record import RunRecord
    from scalejax.report import write_report
    from scalejax.scaling_study import study
    from scalejax.step import Step, build_step, init_state

__version__ = "0.1.0"
"""As in pyproject.toml."""

__all__ = [
    "Chip",
    "Cluster",
    "ConfigError",
    "DoesNotFit",
    "Layout",
    "Prediction",
    "Program",
    "ResolvedRun",
    "RunConfig",
    "RunRecord",
    "ScalejaxError",
    "ScalingPrediction",
    "Step",
    "build_mesh",
    "build_step",
    "cluster_names",
    "init_state",
    "load_cluster",
    "load_config",
    "profile_function",
    "profile_many",
    "resolve",
    "study",
    "write_report",
]

_HOMES = {
    "config": ("ResolvedRun", "RunConfig", "load_config", "resolve"),
    "errors": ("ConfigError", "DoesNotFit", "ScalejaxError"),
    "hardware": ("Chip", "Cluster", "cluster_names", "load_cluster"),
    "layout": ("Layout",),
    "mesh": ("build_mesh",),
    "predict": ("Prediction", "ScalingPrediction"),
    "profile": ("profile_function", "profile_many"),
    "program": ("Program",),
    "record": ("RunRecord",),
    "report": ("write_report",),
    "scaling_study": ("study",),
    "step": ("Step", "build_step", "init_state"),
}
"""Module of each public name."""


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"scalejax.{home}"), name)
    raise AttributeError(f"module 'scalejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
