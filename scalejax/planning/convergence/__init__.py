"""Samples that a network needs to reach its target, as a function of the global batch.

`Point` is a measurement; `read_data`, `read_run` and `published_data` read points from files and
folders; `fit` fits the hyperbola to them.
Arithmetic on plain data; knows no clock, no device and no JAX.
"""

from scalejax.planning.convergence.hyperbola import Estimate, Hyperbola, fit
from scalejax.planning.convergence.points import ConvergenceData, Point, parse_target
from scalejax.planning.convergence.sources import (
    published_data,
    published_names,
    read_data,
    read_run,
)

__all__ = [
    "ConvergenceData",
    "Estimate",
    "Hyperbola",
    "Point",
    "fit",
    "parse_target",
    "published_data",
    "published_names",
    "read_data",
    "read_run",
]
