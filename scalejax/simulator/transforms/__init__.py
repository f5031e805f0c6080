"""Transforms of programs: scale-out to more devices, pipeline parallelism, float8."""
