"""Gradients that workers make smaller before they push them, and what each keeps back.

Knows workers and bytes; the arithmetic is the tape's.
"""

from collections.abc import Sequence

from scalejax.config.emulation import CompressionConfig
from scalejax.emulation.executor import kept_entries
from scalejax.emulation.instructions import InstructionLog, Operation, Shards, Value


class Compression:
    """What each worker has kept back, for each server."""

    def __init__(
        self,
        config: CompressionConfig,
        instructions: InstructionLog,
        shard_layers: Sequence[Sequence[tuple[int, int]]],
        *,
        samples: int,
    ) -> None:
        """Nothing is kept back yet.

        Args:
            config: the method.
            tape: does the arithmetic.
            shard_layers: of each server, (layers, numbers in each) of its piece of each parameter.
            samples: of a gradient, which is their mean.
        """
        self._method: Operation = config.method
        self._keeps = config.method != "fp16"
        numbers = {"fp16": 0.0, "two_bit": config.threshold / samples, "top_k": config.fraction}
        self._number, self._instructions = numbers[config.method], instructions
        self._sent_bytes = [
            sum(_sent_bytes(config, *piece) for piece in pieces) for pieces in shard_layers
        ]
        self._kept: dict[tuple[int, int], Value] = {}

    def sent(self, worker: int, gradient: Shards) -> Shards:
        """What arrives of `gradient`; the rest is added to the next one."""
        arriving = []
        for server, part in enumerate(gradient):
            kept = self._kept.get((worker, server))
            sent, left = self._instructions.compress(self._method, self._number, part, kept)
            if self._keeps:
                self._kept[worker, server] = left
            arriving.append(sent)
        return tuple(arriving)

    def sent_bytes(self, server: int) -> int:
        """Of its part of a gradient."""
        return self._sent_bytes[server]


def _sent_bytes(config: CompressionConfig, layers: int, elements: int) -> int:
    """Of a piece of one parameter: what `config` makes of each number, in whole words."""
    match config.method:
        case "fp16":
            return 2 * layers * elements
        case "two_bit":  # 16 in a word, as MXNet packs each key
            return 4 * -(-layers * elements // 16)
        case "top_k":  # a value and its place
            return 8 * layers * kept_entries(elements, config.fraction)
