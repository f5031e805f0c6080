"""Seconds of one operation on one device: matrix products, convolutions, memory traffic."""
