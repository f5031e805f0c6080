"""Builder of the operations of a closed-form program, in schedule order.

Constructs `Operation`s only; independent of transformers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from scalejax.config.parallelism import AXES, Layout
from scalejax.simulator.program import (
    Collective,
    CollectiveName,
    DeviceGroup,
    ExpertBlocks,
    Loop,
    Operation,
)

_F32, _F32_BYTES = "f32", 4
_CACHE_SIZE = 65536  # entries of the caches
_LAYOUTS_KEPT = 256  # layouts whose collectives are cached; a search tries one after another
_PADDED_TO = 8  # elements; XLA's cublas_pad_for_gemms

UPDATE = "update"
"""Prefix of the names of what follows the last microbatch: sums of gradients, the optimizer, and
gathers of parameters, as opposed to collectives of tokens."""
COMBINED_BYTES = 30 * 1024**2
"""Buffers up to this size are combined into one collective (XLA,
xla/service/gpu/gpu_compiler.cc, kDefaultAllReduceCombineThreshold); an all-reduce copies them."""


def combined(buffers: Iterable[tuple[str, int]]) -> list[list[str]]:
    """Names of the buffers that XLA combines into one collective each, in order of the first. A
    buffer that is too large alone does not end the group before it (CombineInstructionsByKey).

    Args:
        buffers: (name, bytes of the result) of each buffer.
    """
    groups: list[list[str]] = []
    last, held = list[str](), COMBINED_BYTES
    for name, size in buffers:
        if size > COMBINED_BYTES:
            groups.append([name])
        elif held + size <= COMBINED_BYTES:
            last.append(name)
            held += size
        else:
            last, held = [name], size
            groups.append(last)
    return groups


class Writer:
    """Builder that collects operations whose names have a common prefix."""

    def __init__(self, prefix: str, dtype: str, layout: Layout) -> None:
        """Start with no operations.

        Args:
            prefix: prefix of the names, unique in a program.
            dtype: type of operands, "bf16", "f16" or "f32".
            layout: mesh axes of the collectives.
        """
        self.operations: list[Operation | Loop] = []
        """Operations so far."""
        self._prefix = prefix
        self._dtype = dtype
        self._layout = layout
        self._made = _collectives_of(layout)
        self._started: set[str] = set()

    def fusion(self, name: str, read: int, write: int) -> None:
        """Add a fusion that reads and writes the given bytes."""
        self.operations.append(_fusion(self._prefix, name, read, write))

    def narrowing(self, name: str, read: int, write: int) -> None:
        """Add a fusion that converts the float32 that it reads to the type of activations."""
        self.operations.append(_fusion(self._prefix, name, read, write, self._dtype))

    def copy(self, name: str, size: int) -> None:
        """Add a fusion that reads and writes `size` bytes each, such as a slice of a stack."""
        self.operations.append(_fusion(self._prefix, name, size, size))

    def scalars(self, name: str, count: int) -> None:
        """Add `count` operations on one scalar or vector each: a launch and few bytes."""
        self.operations += _scalars(self._prefix, name, count)

    def matmul(
        self,
        name: str,
        shape: tuple[int, int, int, int],
        extra_read: int = 0,
        *,
        is_accumulated: bool = False,
    ) -> None:
        """Add a product of (batch, m, n, k); each operand and the result is moved once.

        In half precision sides are padded to the alignment of matrix units, as XLA does. If
        `is_accumulated`, the result is added to a sum in float32.
        """
        self.operations.append(
            _matmul(self._prefix, name, self._dtype, shape, extra_read, is_accumulated)
        )

    def exact_matmul(self, name: str, shape: tuple[int, int, int, int]) -> None:
        """Add a product of operands in float32, none of which may be rounded."""
        self.operations.append(_exact_matmul(self._prefix, name, shape))

    def attention(
        self,
        name: str,
        shape: tuple[int, int, int, int],
        products: int,
        read: int,
        write: int,
        *,
        is_causal: bool = True,
        value_size: int | None = None,
        scores_share: float = 1.0,
    ) -> None:
        """Add fused attention, which does `products` products of all scores, of half of them if
        causal, and of the share of these that windows leave. Values may differ in size from
        queries and keys."""
        batch, queries, keys, size = shape
        pairs, of_values = batch * queries * keys, products // 2
        flop = pairs * ((products - of_values) * size + of_values * (value_size or size))
        flop *= 1 if is_causal else 2
        flop = round(flop * scores_share)
        made = _attention(self._prefix, name, self._dtype, flop, read, write, shape)
        self.operations.append(made)

    def start(
        self,
        name: str,
        kind: CollectiveName,
        payload: int,
        axes: tuple[str, ...],
        *,
        dtype: str | None = None,
        buffers: int = 1,
        layout: Layout | None = None,
    ) -> None:
        """Start a collective over `axes`, of another `layout` if given; do nothing if they have a
        single device."""
        if not payload:
            return
        made = self._made if layout is None else _collectives_of(layout)
        key = self._prefix, name, kind, payload, axes, dtype or self._dtype, buffers
        if key not in made:
            group = group_of(layout or self._layout, axes)
            full, kept = self._full(name), dtype or self._dtype
            made[key] = _collective(full, kind, payload, group, kept, buffers)
        if (operation := made[key]) is not None:
            self._started.add(name)
            self.operations.append(operation)

    def wait(self, name: str) -> None:
        """Add a wait for the collective of that name, if it was started and not yet waited for."""
        if name in self._started:
            self._started.discard(name)
            self.operations.append(_wait(self._prefix, name, self._dtype))

    @contextmanager
    def repeated(
        self, name: str, count: int, expert_blocks: ExpertBlocks | None = None
    ) -> Iterator[None]:
        """Context whose operations become a loop of `count` runs, over blocks of expert rows if
        given; left out if `count` is 0."""
        outside, self.operations = self.operations, []
        yield
        body, self.operations = tuple(self.operations), outside
        if count:
            loop = Loop(
                name=self._full(name), trip_count=count, body=body, expert_blocks=expert_blocks
            )
            self.operations.append(loop)

    def collective(
        self, name: str, kind: CollectiveName, payload: int, axes: tuple[str, ...]
    ) -> None:
        """Add a collective and a wait for it."""
        self.start(name, kind, payload, axes)
        self.wait(name)

    def done(self) -> tuple[Operation | Loop, ...]:
        """All operations so far."""
        return tuple(self.operations)

    def _full(self, name: str) -> str:
        return f"{self._prefix}.{name}"


# Searches write the same operations again and again: each is made once, and shared.


@lru_cache(maxsize=_CACHE_SIZE)
def _fusion(prefix: str, name: str, read: int, write: int, dtype: str = _F32) -> Operation:
    return Operation(
        name=f"{prefix}.{name}", kind="fusion", dtype=dtype, read_bytes=read, write_bytes=write
    )


@lru_cache(maxsize=_CACHE_SIZE)
def _scalars(prefix: str, name: str, count: int) -> tuple[Operation, ...]:
    return tuple(_fusion(prefix, f"{name}.{index}", 4, 4) for index in range(count))


@lru_cache(maxsize=_CACHE_SIZE)
def _matmul(
    prefix: str,
    name: str,
    dtype: str,
    shape: tuple[int, int, int, int],
    extra_read: int,
    is_accumulated: bool,
) -> Operation:
    element_bytes = _F32_BYTES if dtype == _F32 else 2
    if dtype != _F32:
        batch, *sides = shape
        m, n, k = (-(-side // _PADDED_TO) * _PADDED_TO for side in sides)
        shape = batch, m, n, k
    batch, m, n, k = shape
    written = batch * m * n * (_F32_BYTES if is_accumulated else element_bytes)
    extra_read += written if is_accumulated else 0
    return Operation(
        name=f"{prefix}.{name}",
        kind="matmul",
        dtype=dtype,
        flop=2 * batch * m * n * k,
        read_bytes=element_bytes * batch * (m + n) * k + extra_read,
        write_bytes=written,
        shape=shape,
    )


@lru_cache(maxsize=_CACHE_SIZE)
def _exact_matmul(prefix: str, name: str, shape: tuple[int, int, int, int]) -> Operation:
    batch, m, n, k = shape
    return Operation(
        name=f"{prefix}.{name}",
        kind="matmul",
        dtype="f32_highest",
        flop=2 * batch * m * n * k,
        read_bytes=_F32_BYTES * batch * (m + n) * k,
        write_bytes=_F32_BYTES * batch * m * n,
        shape=shape,
    )


@lru_cache(maxsize=_CACHE_SIZE)
def _attention(
    prefix: str,
    name: str,
    dtype: str,
    flop: int,
    read: int,
    write: int,
    shape: tuple[int, int, int, int],
) -> Operation:
    return Operation(
        name=f"{prefix}.{name}",
        kind="attention",
        dtype=dtype,
        flop=flop,
        read_bytes=read,
        write_bytes=write,
        shape=shape,
    )


@lru_cache(maxsize=_CACHE_SIZE)
def _wait(prefix: str, name: str, dtype: str) -> Operation:
    full = f"{prefix}.{name}"
    return Operation(name=f"{full}.done", kind="wait", dtype=dtype, waits_for=full)


@lru_cache(maxsize=_LAYOUTS_KEPT)
def _collectives_of(layout: Layout) -> dict[tuple[object, ...], Operation | None]:
    """Collectives already made for a layout, by what they were made of; None if the axes have a
    single device."""
    return {}


def _collective(
    name: str, kind: CollectiveName, payload: int, group: DeviceGroup, dtype: str, buffers: int
) -> Operation | None:
    if group.size == 1:
        return None
    own = payload // group.size
    return Operation(
        name=name,
        kind="collective",
        dtype=dtype,
        read_bytes=own if kind == "all_gather" else payload,
        write_bytes=own if kind == "reduce_scatter" else payload,
        collective=Collective(
            name=kind,
            payload_bytes=payload,
            group=group,
            is_async=True,
            buffer_count=buffers,
        ),
    )


@lru_cache(maxsize=_CACHE_SIZE)
def group_of(layout: Layout, axes: tuple[str, ...]) -> DeviceGroup:
    """Device group of the mesh axes `axes`; axes with one device are omitted."""
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
