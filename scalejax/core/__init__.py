"""Foundations: errors, units, serialization, files, environment, process group, progress."""
