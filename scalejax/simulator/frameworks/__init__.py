"""Differences of other frameworks from XLA, as functions from a program to a program."""
