"""Decisions from predictions: how far to scale, which layout, when a target is reached."""
