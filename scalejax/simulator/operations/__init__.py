"""Seconds of one operation on one device: products, convolutions, memory traffic."""
