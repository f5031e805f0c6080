"""What a program costs on a cluster: compute, communication, their overlap, memory."""

from scalejax.cost.communication import collective_seconds
from scalejax.cost.compute import OperationTime, operation_time
from scalejax.cost.memory import MemoryVerdict, memory_verdict
from scalejax.cost.timeline import Timeline, timeline

__all__ = [
    "MemoryVerdict",
    "OperationTime",
    "Timeline",
    "collective_seconds",
    "memory_verdict",
    "operation_time",
    "timeline",
]
