"""This machine, measured: devices, steps, input, and what is wrong with it."""
