"""Decisions from predictions: scaling studies, layout search, time to target, explanations.

Composes the simulator with compiled programs; imports no JAX.
"""
