"""Gradient compression of workers before a push, with error feedback.

Knows workers and bytes; the instruction log has the values computed.
"""

from collections.abc import Sequence

from scalejax.config.emulation import CompressionConfig
from scalejax.emulation.executor import kept_entries
from scalejax.emulation.instructions import InstructionLog, Operation, Shards, Value


class Compression:
    """Residuals of each worker, for each server."""

    def __init__(
        self,
        config: CompressionConfig,
        instructions: InstructionLog,
        shard_layers: Sequence[Sequence[tuple[int, int]]],
        *,
        samples: int,
    ) -> None:
        """Create the state with empty residuals.

        Args:
            config: the compression method.
            instructions: has the values computed.
            shard_layers: for each server, (layers, elements per layer) of its parameter pieces.
            samples: number of samples that a gradient averages over.
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
        """The compressed `gradient` as received; the residual is added to the next one."""
        arriving = []
        for server, part in enumerate(gradient):
            kept = self._kept.get((worker, server))
            sent, left = self._instructions.compress(self._method, self._number, part, kept)
            if self._keeps:
                self._kept[worker, server] = left
            arriving.append(sent)
        return tuple(arriving)

    def sent_bytes(self, server: int) -> int:
        """Bytes sent for the part of a gradient on `server`."""
        return self._sent_bytes[server]


def _sent_bytes(config: CompressionConfig, layers: int, elements: int) -> int:
    """Compressed bytes of a piece of one parameter, in whole words."""
    match config.method:
        case "fp16":
            return 2 * layers * elements
        case "two_bit":  # 16 in a word, as MXNet packs each key
            return 4 * -(-layers * elements // 16)
        case "top_k":  # a value and its index
            return 8 * layers * kept_entries(elements, config.fraction)
