"""Gradients that workers make smaller before they push them, and what each keeps back.

Knows workers and bytes; the arithmetic is the tape's.
"""

from scalejax.emulate.tape import Operation, Shards, Tape, Value
from scalejax.emulation_algorithms import CompressionConfig


class Compression:
    """What each worker has kept back, for each server."""

    def __init__(self, config: CompressionConfig, tape: Tape, *, samples: int) -> None:
        """Nothing is kept back yet.

        Args:
            config: the method.
            tape: does the arithmetic.
            samples: of a gradient, which is their mean.
        """
        self._method: Operation = config.method
        self._keeps = config.method != "fp16"
        numbers = {"fp16": 0.0, "two_bit": config.threshold / samples, "top_k": config.fraction}
        self._number, self._tape = numbers[config.method], tape
        # Of 32 bits: half; two; or a value and its place for each that is sent.
        self._part = {"fp16": 1 / 2, "two_bit": 1 / 16, "top_k": 2 * config.fraction}[config.method]
        self._kept: dict[tuple[int, int], Value] = {}

    def sent(self, worker: int, gradient: Shards) -> Shards:
        """What arrives of `gradient`; the rest is added to the next one."""
        arriving = []
        for server, part in enumerate(gradient):
            kept = self._kept.get((worker, server))
            sent, left = self._tape.compress(self._method, self._number, part, kept)
            if self._keeps:
                self._kept[worker, server] = left
            arriving.append(sent)
        return tuple(arriving)

    def sent_bytes(self, size: int) -> int:
        """Of a gradient of so many."""
        return round(size * self._part)
