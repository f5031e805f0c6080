"""Operations of a closed-form program, written down in schedule order.

Knows how an `Operation` is put together; nothing of transformers.
"""

from functools import lru_cache

from scalejax.config.parallelism import AXES, Layout
from scalejax.simulator.program import Collective, CollectiveName, DeviceGroup, Operation

_F32 = "f32"
_KEPT = 65536  # groups of devices that a search meets again
_PADDED_TO = 8  # elements; XLA's cublas_pad_for_gemms


class Writer:
    """Collects operations whose names start alike."""

    def __init__(self, prefix: str, dtype: str, layout: Layout) -> None:
        """Begin.

        Args:
            prefix: of the names, unique in a program.
            dtype: of operands, "bf16", "f16" or "f32".
            layout: whose axes collectives go along.
        """
        self.operations: list[Operation] = []
        """What was written so far."""
        self._prefix = prefix
        self._dtype = dtype
        self._element_bytes = 4 if dtype == _F32 else 2
        self._layout = layout

    def fusion(self, name: str, read: int, write: int) -> None:
        """A fusion that moves so many bytes."""
        self.operations.append(
            Operation(
                name=self._full(name),
                kind="fusion",
                dtype=_F32,
                read_bytes=read,
                write_bytes=write,
            )
        )

    def copy(self, name: str, size: int) -> None:
        """A fusion that reads and writes as many bytes, such as a slice of a stack."""
        self.fusion(name, size, size)

    def matmul(self, name: str, shape: tuple[int, int, int, int], extra_read: int = 0) -> None:
        """A product of (batch, m, n, k), each operand and the result moved once.

        In half precision sides are padded to what matrix units load, as XLA does.
        """
        if self._dtype != _F32:
            batch, *sides = shape
            m, n, k = (-(-side // _PADDED_TO) * _PADDED_TO for side in sides)
            shape = batch, m, n, k
        batch, m, n, k = shape
        size = self._element_bytes * batch
        self.operations.append(
            Operation(
                name=self._full(name),
                kind="matmul",
                dtype=self._dtype,
                flop=2 * batch * m * n * k,
                read_bytes=size * (m + n) * k + extra_read,
                write_bytes=size * m * n,
                shape=shape,
            ),
        )

    def attention(
        self, name: str, shape: tuple[int, int, int, int], products: int, read: int, write: int
    ) -> None:
        """Fused causal attention, which does `products` products of half the scores."""
        batch, queries, keys, size = shape
        self.operations.append(
            Operation(
                name=self._full(name),
                kind="attention",
                dtype=self._dtype,
                flop=products * batch * queries * keys * size,
                read_bytes=read,
                write_bytes=write,
                shape=shape,
            ),
        )

    def start(
        self,
        name: str,
        kind: CollectiveName,
        payload: int,
        axes: tuple[str, ...],
        *,
        dtype: str | None = None,
        buffers: int = 1,
        is_async: bool = True,
    ) -> None:
        """An exchange between the devices along `axes`; nothing where they are one."""
        group = group_of(self._layout, axes)
        if group.size == 1 or not payload:
            return
        own = payload // group.size
        self.operations.append(
            Operation(
                name=self._full(name),
                kind="collective",
                dtype=dtype or self._dtype,
                read_bytes=own if kind == "all_gather" else payload,
                write_bytes=own if kind == "reduce_scatter" else payload,
                collective=Collective(
                    name=kind,
                    payload_bytes=payload,
                    group=group,
                    is_async=is_async,
                    buffer_count=buffers,
                ),
            ),
        )

    def wait(self, name: str) -> None:
        """Stand still until the exchange of that name is done, if there is one."""
        full = self._full(name)
        if any(each.name == full for each in reversed(self.operations)):
            self.operations.append(
                Operation(name=f"{full}.done", kind="wait", dtype=self._dtype, waits_for=full)
            )

    def collective(
        self, name: str, kind: CollectiveName, payload: int, axes: tuple[str, ...]
    ) -> None:
        """An exchange whose result is needed at once."""
        self.start(name, kind, payload, axes)
        self.wait(name)

    def done(self) -> tuple[Operation, ...]:
        """All that was written."""
        return tuple(self.operations)

    def _full(self, name: str) -> str:
        return f"{self._prefix}.{name}"


@lru_cache(maxsize=_KEPT)
def group_of(layout: Layout, axes: tuple[str, ...]) -> DeviceGroup:
    """The devices along `axes`, those of one device left out."""
    sizes = layout.axis_sizes
    used = tuple(axis for axis in AXES if axis in axes and sizes[axis] > 1)
    extents: list[tuple[int, int]] = []
    stride = 1
    for axis in reversed(AXES):
        if axis in used:
            if extents and extents[0][0] * extents[0][1] == stride:
                extents[0] = (extents[0][0] * sizes[axis], extents[0][1])
            else:
                extents.insert(0, (sizes[axis], stride))
        stride *= sizes[axis]
    return DeviceGroup(extents=tuple(extents), axes=used)
