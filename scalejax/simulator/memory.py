"""Peak memory of a program on a chip, and whether it fits."""

from dataclasses import dataclass

from scalejax.hardware import Chip
from scalejax.simulator.program import MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """Memory that a program needs on a device, and memory that the device has."""

    peak_bytes: int
    """Most bytes held at once: the program's, as the compiler assigned them, and the runtime's
    own reserve."""
    memory_bytes: int
    """Memory of the chip."""

    @property
    def fits(self) -> bool:
        """Whether the program can run at all."""
        return self.peak_bytes <= self.memory_bytes


def memory_verdict(memory: MemoryUse, chip: Chip) -> MemoryVerdict:
    """Peak memory on `chip` of a program that uses `memory`, and the memory of the chip.

    Left out: fragmentation of the allocator. PyTorch's reserved 5 to 17 % more than is predicted
    to be in use (experiments/published_memory).
    """
    peak_bytes = memory.peak_bytes
    if chip.cuda is not None or chip.tpu is not None:
        peak_bytes -= memory.kernel_bytes  # of the substitute CPU: the chip has its own
    return MemoryVerdict(
        peak_bytes=peak_bytes + chip.runtime_reserve_bytes,
        memory_bytes=chip.memory_bytes,
    )
