"""Measurements of this machine: devices, training steps, input rates, and a health check."""
