"""Predictions of step time, memory and goodput of a program on a cluster.

Arithmetic on plain data; imports no JAX and measures nothing.
"""
