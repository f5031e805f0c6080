"""Whether a program fits into the memory of a device."""

from dataclasses import dataclass

from scalejax.hardware import Chip
from scalejax.simulator.program import MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """Memory that a device needs, and memory that it has."""

    peak_bytes: int
    """Most bytes held at once: by the program, as the compiler assigned them, and by the
    runtime for itself."""
    memory_bytes: int
    """What the chip has."""

    @property
    def fits(self) -> bool:
        """Whether the program can run at all."""
        return self.peak_bytes <= self.memory_bytes


def memory_verdict(memory: MemoryUse, chip: Chip) -> MemoryVerdict:
    """What a program that uses `memory` comes to on `chip`.

    Left out: what lies free between the blocks of an allocator. PyTorch's reserved 5 to 17 % more
    than is predicted to be in use (experiments/published_memory).
    """
    peak_bytes = memory.peak_bytes
    if chip.cuda is not None or chip.tpu is not None:
        peak_bytes -= memory.kernel_bytes  # those of a CPU that stood in: the chip has its own
    return MemoryVerdict(
        peak_bytes=peak_bytes + chip.runtime_reserve_bytes,
        memory_bytes=chip.memory_bytes,
    )
