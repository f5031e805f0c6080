"""Peak memory of a program on a chip, and whether it fits."""

from dataclasses import dataclass

from scalejax.hardware import Chip
from scalejax.simulator.program import MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """Memory that a program needs on a device, and memory that the device has."""

    peak_bytes: int
    """Most bytes held at once: the program's, as assigned by the compiler, plus the runtime's own
    reserve."""
    memory_bytes: int
    """Memory of the chip."""
    host_bytes: int = 0
    """Host memory that a device needs for what the program offloads."""
    host_memory_bytes: int | None = None
    """Host memory available to a device; None if unknown."""

    @property
    def fits(self) -> bool:
        """Whether the program can run at all, as far as is known."""
        fits_host = self.host_memory_bytes is None or self.host_bytes <= self.host_memory_bytes
        return self.peak_bytes <= self.memory_bytes and fits_host


def memory_verdict(
    memory: MemoryUse, chip: Chip, host_memory_bytes: int | None = None
) -> MemoryVerdict:
    """Peak memory on `chip` of a program that uses `memory`, compared with the memory of the chip;
    likewise what the program holds on the host, where a device has `host_memory_bytes`.

    Left out: fragmentation of the allocator. PyTorch's reserved 5 to 17 % more than is predicted
    to be in use (experiments/published_memory).
    """
    peak_bytes = memory.peak_bytes
    if chip.cuda is not None or chip.tpu is not None:
        peak_bytes -= memory.kernel_bytes  # workspace of the substitute CPU, not of this chip
    return MemoryVerdict(
        peak_bytes=peak_bytes + chip.runtime_reserve_bytes,
        memory_bytes=chip.memory_bytes,
        host_bytes=memory.host_bytes,
        host_memory_bytes=host_memory_bytes,
    )
