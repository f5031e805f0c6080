"""Frameworks, and how the step of each differs from the one that XLA compiles."""

from scalejax.simulator.frameworks.framework import (
    FRAMEWORKS,
    XLA,
    Framework,
    Property,
    framework_named,
)

__all__ = ["FRAMEWORKS", "XLA", "Framework", "Property", "framework_named"]
