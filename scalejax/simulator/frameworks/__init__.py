"""Frameworks, and how the step of each differs from the step that XLA compiles."""

from scalejax.simulator.frameworks.framework import (
    FRAMEWORKS,
    XLA,
    Framework,
    Property,
    framework_named,
    known_framework,
)
from scalejax.simulator.frameworks.kernels import Kernels
from scalejax.simulator.frameworks.software import Software

__all__ = [
    "FRAMEWORKS",
    "XLA",
    "Framework",
    "Kernels",
    "Property",
    "Software",
    "framework_named",
    "known_framework",
]
