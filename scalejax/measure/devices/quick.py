"""Quick measurement of the local devices as a `Cluster`, in at most about ten seconds.

`train` predicts its own step with it, so that every run folder holds both a prediction and the
measurement. All devices are measured at once, as they will run: virtual devices of one CPU share
its cores. On a CPU, whose rates depend on the shape, the largest products and convolutions of a
program are timed, each alone; smaller ones of the same kind replace those that would take too long.
All probes are called in turn and their times averaged, so that other work on the machine slows them
as it slows a step. Knows no model, and only the shapes and sizes of a program.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
from jax.sharding import Mesh

from scalejax.core.environment import machine_cores
from scalejax.hardware import Attainable, Chip, Cluster, Link, MeasuredRates, RateType
from scalejax.hardware.chip import SLOWEST_UNIT
from scalejax.measure.devices import NAME, probes
from scalejax.measure.devices.collectives import Ring, library_of
from scalejax.measure.devices.machine import memory_bytes, mesh_of, rate_types
from scalejax.measure.devices.probes import Convolution, Probe
from scalejax.measure.devices.timing import (
    ALL,
    compiled_function,
    noise,
    seconds_in_turn,
    seconds_of_function,
    slowest_process,
)
from scalejax.simulator.program import ConvolutionPass, Program
from scalejax.xla.calls import (
    Call,
    ConvolutionCall,
    ElementwiseKind,
    calls_of,
    elementwise_kinds,
)

_CALLS = 7
_SOURCE = "measured by scalejax.measure.devices.quick just before the run"
_PRODUCT = (1, 4096, 4096, 4096)  # 0.2 ms on an H100
_CONVOLUTION = Convolution(samples=4, size=14, channels_in=64, channels_out=64, window=3, stride=1)
_LARGE_CONVOLUTION = replace(_CONVOLUTION, samples=256, size=28, channels_in=128, channels_out=128)
_STREAM_BYTES = 2**30  # read and written: beyond the caches of a GPU
_REDUCED_BYTES = 2**20

_STREAMED = (2**16, 2**20)  # bytes within one core's cache, and within the shared one
_MOST_STREAMED = 2**24  # beyond both

Shape = tuple[ConvolutionPass | None, tuple[int, ...]]
"""Pass and shape of a convolution; None and the shape of a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a CPU's rates are measured for."""

    shapes: tuple[Shape, ...] = ((None, (1, 256, 256, 256)), ("forward", _CONVOLUTION.shape))
    """Products and convolutions to time."""
    smaller: tuple[tuple[Shape, Shape], ...] = ()
    """Shapes that would take too long, each with the one that is timed instead."""
    calls: tuple[tuple[Shape, tuple[tuple[Call, int], ...]], ...] = ()
    """Shapes with the operations of the program that have them, and how often each occurs; other
    shapes are timed with the usual order of dimensions."""
    halved: tuple[tuple[Shape, int], ...] = ()
    """Shapes whose convolutions are timed with fewer samples, and how often samples are halved."""
    flop: tuple[tuple[Shape, float], ...] = ()
    """FLOP of one operation for each of the shapes in `calls`, as the program counts them."""
    temporary_bytes: int = 0
    """Temporary memory of a step, whose first touch is timed."""
    streamed: tuple[int, ...] = (2**22,)
    """Bytes of element-wise operations to time."""
    kinds: tuple[tuple[int, tuple[tuple[ElementwiseKind, float], ...]], ...] = ()
    """Fractions of these bytes that operations of each kind move; for other sizes all kinds are
    timed, and their rates averaged."""
    seconds: float = 0.5
    """How long operations are timed, without compilation."""


SECONDS = 4.0
"""How long the shapes of a program are timed by default."""


def local_cluster(
    mesh: Mesh, program: Program | None = None, text: str = "", seconds: float = SECONDS
) -> Cluster:
    """The devices of `mesh` as a cluster of one node, with rates measured now.

    The first call for a set of devices and, on a CPU, for the shapes of `program` measures; without
    a program it takes a second or two. Later calls in the process return the cached result. With
    several processes, all measure together.

    Ignores the cost of launching a program on a GPU, which overlaps with the previous step.

    Args:
        mesh: the devices.
        program: program whose operations are timed on a CPU.
        text: the compiler's text of it; its operations are timed as written there.
        seconds: how long they are timed, without compilation.
    """
    devices = tuple(mesh.devices.flat)
    if devices[0].platform == "cpu":
        work = Work() if program is None else replace(work_of(program, text), seconds=seconds)
        return _measured_cpu(devices, work)
    return _measured(devices)


_MOST_SHAPES = 16  # each takes the compiler a tenth of a second
_MOST_CALLS = 2  # operations of one shape: a product and its transpose, for example
_SHARE_OF_SHAPES = 0.97  # of the FLOP of a program
_FEWEST_FLOP = 2**14  # about a microsecond of a core, like a launch: fewer show no rate


def work_of(program: Program, text: str = "") -> Work:
    """The shapes of a program with the most FLOP, and its temporary memory.

    Shapes with few FLOP are left out: the launch of their operations takes longer.

    Args:
        program: program whose operations are timed.
        text: the compiler's text of it; its operations are timed as written there.
    """
    flop: Counter[Shape] = Counter()
    runs_of: Counter[Shape] = Counter()
    moved = _STREAMED[-1]
    for item, runs in program.walk():
        moved = max(moved, item.read_bytes + item.write_bytes)
        if item.flop < _FEWEST_FLOP:
            continue
        if item.kind == "matmul" and len(item.shape) == 4 and item.grouped_pass is None:
            shape = None, item.shape
        elif item.kind == "convolution" and len(item.shape) == 5 and item.convolution_groups == 1:
            shape = item.convolution_pass or "forward", item.shape
        else:
            continue
        flop[shape] += runs * item.flop
        runs_of[shape] += runs
    wanted, left = [], _SHARE_OF_SHAPES * flop.total()
    for shape, count in flop.most_common(_MOST_SHAPES):
        if left <= 0:
            break
        wanted.append(shape)
        left -= count
    largest = min(_MOST_STREAMED, 2 ** (moved.bit_length() - 1))
    streamed = tuple(sorted({*_STREAMED, largest}))
    written = calls_of(text) if text else {}
    temporary = program.memory.temporary_bytes
    known = [shape for shape in wanted if shape in written]
    return Work(
        shapes=tuple(wanted) or Work().shapes,
        calls=tuple((shape, written[shape][:_MOST_CALLS]) for shape in known),
        flop=tuple((shape, flop[shape] / runs_of[shape]) for shape in known),
        temporary_bytes=temporary if temporary > _TOUCHED else 0,
        streamed=streamed,
        kinds=_kinds(program, elementwise_kinds(text), streamed) if text else (),
        seconds=SECONDS,
    )


def _kinds(
    program: Program, kind_of: dict[str, ElementwiseKind], streamed: tuple[int, ...]
) -> tuple[tuple[int, tuple[tuple[ElementwiseKind, float], ...]], ...]:
    """For each of `streamed`, by kind, the fractions of the bytes of a program's element-wise
    operations whose bytes are nearest to it."""
    moved: dict[int, Counter[ElementwiseKind]] = {}
    for item, runs in program.walk():
        size = item.read_bytes + item.write_bytes
        if item.flop or item.collective is not None or not size:
            continue
        nearest = min(streamed, key=lambda each: abs(math.log(each / size)))
        kind = kind_of.get(item.name.split("#")[0], "simple")
        moved.setdefault(nearest, Counter())[kind] += runs * size
    found = []
    for size, by_kind in sorted(moved.items()):
        shares = [(kind, round(by_kind[kind] / by_kind.total(), 2)) for kind in sorted(by_kind)]
        found.append((size, tuple((kind, share) for kind, share in shares if share)))
    return tuple(found)


_ROUNDS, _TURN_SECONDS = 100, 4e-3  # of the shapes of a program
_ROUNDS_TOGETHER = 8  # of several processes
_TOUCHED = 2**22  # bytes of memory below which its first touch is not timed
_STREAMED_TOGETHER, _FEWEST_PASSES = 2**24, 4  # bytes of an operation's passes in one program
_ELEMENTWISE: dict[ElementwiseKind, Callable[[jax.Array], jax.Array]] = {
    "simple": probes.scale,
    "transcendental": probes.FUSIONS[1],
    "transposition": probes.FUSIONS[2],
    "reduction": probes.row_sums,
}
_SMALL = "empty call"
_AWAY = (1024,)
"""An array whose program is handed to another thread, like that of a step; the runtime runs
programs on fewer elements on the calling thread."""
_PAIRS, _SIDE = 17, 24  # beyond the sizes up to which the runtime stays on one thread


@cache
def _measured_cpu(devices: tuple[Any, ...], work: Work) -> Cluster:
    """A CPU whose operations take as long as they did here when called in turn."""
    mesh = mesh_of(devices)
    work = _within_budget(mesh, work)
    functions: dict[Any, Probe] = {
        "after a round": (lambda x: x + 1, [_AWAY]),  # meanwhile the last call's memory is freed
        _SMALL: (lambda x: x + 1, [_AWAY]),
        "one": (partial(_pairs, count=1), [(_SIDE, _SIDE)]),
        "pairs": (partial(_pairs, count=_PAIRS), [(_SIDE, _SIDE)]),
        "step": (lambda *arrays: [each + 1 for each in arrays], [_AWAY] * probes.STATE),
    }
    functions |= {
        key: _repeated(probe, _repeats(devices, shape))
        for shape in work.shapes
        for key, probe in _probes(work, shape)
    }
    for size in work.streamed:
        blocks = (size // (8 * probes.TILE**2), probes.TILE, probes.TILE)
        for kind, _ in _shares(work, size):
            function = probes.in_passes(_ELEMENTWISE[kind], _passes(size))
            functions["stream", size, kind] = function, [blocks]
    if len(devices) > 1:
        for size in (4, _REDUCED_BYTES):
            for is_reduced in (False, True):
                functions["sum", size, is_reduced] = probes.reduction(size, is_reduced=is_reduced)
    if work.temporary_bytes:
        functions["touch"] = probes.touch(work.temporary_bytes), [(4,)]
    rounds = _ROUNDS if jax.process_count() == 1 else _ROUNDS_TOGETHER
    found = seconds_in_turn(
        _calls(mesh, functions.values()),
        rounds=rounds,
        seconds=work.seconds,
        turn_seconds=_TURN_SECONDS,
    )
    return _cpu_cluster(devices, work, dict(zip(functions, found, strict=True)))


_REPEATED_FLOP, _MOST_REPEATS = 2**26, 8


def _repeats(devices: tuple[Any, ...], shape: Shape) -> int:
    """How often one call does an operation of a shape, each time on arrays of its own.

    More than once if the devices keep all cores busy: a third of a short call is spent on waking
    threads, which are awake in a step and not used by an empty call. On idle cores the runtime
    would run repetitions side by side.
    """
    if len(devices) < machine_cores():
        return 1
    return max(1, min(_MOST_REPEATS, int(_REPEATED_FLOP / _flop(shape))))


def _repeated(probe: Probe, repeats: int) -> Probe:
    function, shapes = probe

    def several(*arrays: jax.Array) -> list[Any]:
        return [function(*arrays[start::repeats]) for start in range(repeats)]

    return several, [shape for shape in shapes for _ in range(repeats)]


def _of_one(devices: tuple[Any, ...], work: Work, times: dict[Any, float]) -> dict[Any, float]:
    """`times` with that of a single operation if a call did several."""
    found, empty = dict(times), times[_SMALL]
    for shape in work.shapes:
        for key, _ in _probes(work, shape):
            found[key] = empty + (times[key] - empty) / _repeats(devices, shape)
    return found


def _passes(size: int) -> int:
    return max(_FEWEST_PASSES, _STREAMED_TOGETHER // size)


def _shares(work: Work, size: int) -> tuple[tuple[ElementwiseKind, float], ...]:
    """Kinds of element-wise operations to time at a size, and the share of the bytes of each."""
    known = dict(work.kinds)
    if size in known:
        return known[size]
    kinds: tuple[ElementwiseKind, ...] = ("simple", "transcendental", "transposition")
    return tuple((kind, 1 / len(kinds)) for kind in kinds)


def _probes(work: Work, shape: Shape) -> list[tuple[Any, Probe]]:
    """What is timed for a shape: operations of the program that have it, a smaller shape, or the
    shape with the usual order of dimensions."""
    instead, calls = dict(work.smaller).get(shape), dict(work.calls).get(shape, ())
    if instead is not None or not calls:
        return [(instead or shape, _function(instead or shape))]
    times = dict(work.halved).get(shape, 0)
    found = ((call, _halved(shape, call, times)) for call, _ in calls)
    return [((shape, call), (small.run, list(small.operands))) for call, (small, _) in found]


def _halved(shape: Shape, call: Call, times: int) -> tuple[Call, int]:
    """`call` with its samples halved up to `times` times, as far as possible; and the factor by
    which that divides its FLOP."""
    kind, factor = shape[0], 1
    for _ in range(times):
        half = None
        if isinstance(call, ConvolutionCall) and kind is not None:
            half = call.with_half_the_samples(kind)
        if half is None:
            break
        call, factor = half, 2 * factor
    return call, factor


def _with_calls(work: Work, times: dict[Any, float]) -> dict[Any, float]:
    """`times` with those of each shape: the mean over its operations, weighted by how often each
    occurs."""
    found, halved, empty = dict(times), dict(work.halved), times[_SMALL]
    for shape, calls in work.calls:
        timed = [(call, count) for call, count in calls if (shape, call) in times]
        if timed:
            whole = sum(
                count
                * max(0.0, times[shape, call] - empty)
                * _halved(shape, call, halved.get(shape, 0))[1]
                for call, count in timed
            )
            found[shape] = empty + whole / sum(count for _, count in timed)
    return found


_FIRST_FLOP, _FIRST_BYTES = 2**26, 2**26  # parts of larger ones, timed to estimate their time


def _within_budget(mesh: Mesh, work: Work) -> Work:
    """`work` with smaller shapes, and less memory, in place of what takes so long that the rounds
    which several processes make would exceed its seconds."""
    large = [shape for shape in work.shapes if _flop(shape) > _FIRST_FLOP]
    firsts = [_first(work, shape) for shape in large]
    functions = [probe for probe, _ in firsts]
    is_much = work.temporary_bytes > _FIRST_BYTES
    if is_much:
        functions.append((probes.touch(_FIRST_BYTES), [(4,)]))
    if not functions:
        return work
    call_seconds = work.seconds / (_ROUNDS_TOGETHER * (len(work.shapes) + is_much))
    calls = _calls(mesh, functions)
    found = seconds_in_turn(calls, rounds=1, seconds=0.0, turn_seconds=0.0)
    shares = [call_seconds / slowest_process(seconds) for seconds in found]  # of what was timed
    smaller, halved = [], []
    for shape, (_, flop), share in zip(large, firsts, shares, strict=False):
        most = share * flop
        if most >= _flop(shape):
            continue
        times = math.ceil(math.log2(_flop(shape) / most))
        if any(_halved(shape, call, times)[1] > 1 for call in _written(work, shape)):
            halved.append((shape, times))
        else:
            smaller.append((shape, _smaller(shape, max(_FEWEST_FLOP, most))))
    touched = work.temporary_bytes
    if is_much:  # in proportion, but never less than these: few bytes are mapped differently
        touched = min(touched, max(_FIRST_BYTES, int(shares[-1] * _FIRST_BYTES)))
    return replace(work, smaller=tuple(smaller), halved=tuple(halved), temporary_bytes=touched)


def _written(work: Work, shape: Shape) -> list[Call]:
    return [call for call, _ in dict(work.calls).get(shape, ())]


def _first(work: Work, shape: Shape) -> tuple[Probe, float]:
    """A part of an operation of a large shape, timed to estimate how long the whole takes, and the
    FLOP of the part."""
    for call in _written(work, shape):
        times = math.ceil(math.log2(_flop(shape) / _FIRST_FLOP))
        part, factor = _halved(shape, call, times)
        if factor > 1:
            return (part.run, list(part.operands)), _flop(shape) / factor
    smaller = _smaller(shape, _FIRST_FLOP)
    return _function(smaller), _flop(smaller)


def _flop(shape: Shape) -> int:
    kind, sizes = shape
    return 2 * math.prod(sizes) if kind is None else _convolution(sizes).flop


def _smaller(shape: Shape, most_flop: float) -> Shape:
    """A shape of the same kind with at most `most_flop`: sizes are halved, that of samples first,
    then the largest."""
    while _flop(shape) > most_flop:
        kind, sizes = shape
        by_size = sorted(range(1, len(sizes)), key=lambda at: -sizes[at])
        if kind is not None:  # windows are kept
            by_size = [1, *(at for at in by_size if at in (2, 3))]
        for at in (0, *by_size):
            factor = 4 if kind is not None and at == 1 else 2  # positions are height x width
            halved = (*sizes[:at], sizes[at] // factor, *sizes[at + 1 :])
            # Weight gradients, whose inner size is the largest, order their operands differently.
            is_alike = kind is not None or _is_gradient(halved) == _is_gradient(sizes)
            if halved[at] and is_alike:
                shape = kind, halved
                break
        else:
            break
    return shape


def _is_gradient(sizes: tuple[int, ...]) -> bool:
    """Whether `probes.product_of` makes it a weight gradient."""
    _, m, n, k = sizes
    return k > max(m, n)


def _calls(mesh: Mesh, functions: Iterable[Probe]) -> list[Callable[[], Any]]:
    """The compiled probes; threads compile them, but not with several processes, which must do the
    same in the same order."""
    with ThreadPoolExecutor(os.cpu_count() if jax.process_count() == 1 else 1) as pool:
        # Compilation takes most of the time.
        return list(pool.map(lambda probe: _call(mesh, *probe), functions))


def _pairs(x: jax.Array, count: int) -> list[jax.Array]:
    """`count` pairs of tiny products that can start together, as the gradients of a layer can:
    XLA's CPU runtime hands one of each to another thread."""
    y, found = x, []
    for _ in range(count):
        found.append(y.T @ y)
        y = y @ x
    return [y, *found]


def _function(shape: Shape) -> Probe:
    """The product or convolution of a shape; images are assumed to be square, with stride 1."""
    kind, sizes = shape
    if kind is None:
        batch, m, n, k = sizes
        return probes.product_of((batch, m, n, k))
    return probes.convolution_of(_convolution(sizes), kind)


def _convolution(sizes: tuple[int, ...]) -> Convolution:
    samples, positions, channels_in, channels_out, window = sizes
    return Convolution(
        samples=samples,
        size=max(1, round(math.sqrt(positions))),
        channels_in=channels_in,
        channels_out=channels_out,
        window=max(1, round(math.sqrt(window))),
        stride=1,
    )


def _call(
    mesh: Mesh, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> Callable[[], Any]:
    compiled = compiled_function(function, mesh, shapes)
    arguments = [noise(mesh, shape) for shape in shapes]
    return lambda: jax.block_until_ready(compiled(*arguments))


def _cpu_cluster(devices: tuple[Any, ...], work: Work, times: dict[Any, float]) -> Cluster:
    times = _with_calls(work, _of_one(devices, work, times))
    empty = times[_SMALL]

    def seconds(key: Any) -> float:
        """Seconds of a call of a probe, without those of an empty call."""
        return max(times[key] - empty, times[key] / 10)

    launch = max(0.0, seconds("pairs") - seconds("one")) / (2 * (_PAIRS - 1))
    in_place_of = dict(work.smaller)
    timed = {shape: in_place_of.get(shape, shape) for shape in work.shapes}
    # A shape that takes hardly more than an empty call shows no rate.
    resolved = [shape for shape in timed if times[timed[shape]] - empty > times[timed[shape]] / 10]
    products, convolutions = [], {}
    for kind, sizes in resolved or work.shapes:
        instead = timed[kind, sizes]
        flop = dict(work.flop).get((kind, sizes), 0.0) if instead == (kind, sizes) else 0.0
        row = (*sizes, (flop or _flop(instead)) / seconds(instead))
        if kind is None:
            products.append(row)
        else:
            convolutions.setdefault(kind, []).append(row)
    best = max(row[-1] for rows in (products, *convolutions.values()) for row in rows)
    streams = []
    for size in work.streamed:
        rates = []
        for kind, share in _shares(work, size):
            moved = _passes(size) * (size / 2 if kind == "reduction" else size)  # it writes little
            rates.append((moved / seconds(("stream", size, kind)), share))
        if size in dict(work.kinds):
            whole = math.fsum(share for _, share in rates)  # 1, except for rounding
            streams.append((size, whole / math.fsum(share / rate for rate, share in rates)))
        else:
            streams.append((size, math.prod(rate**share for rate, share in rates)))
    # Part of the probe of a step: its additions are launched, and move their arrays.
    additions = probes.STATE * (launch + 8 * math.prod(_AWAY) / streams[0][1])
    touch = ()
    if "touch" in times:
        # Its writes are counted with the operations that write.
        written = work.temporary_bytes / streams[-1][1]
        touch = ((work.temporary_bytes, max(0.0, seconds("touch") - written)),)
    chip = Chip(
        name=devices[0].platform,
        title=devices[0].device_kind,
        peak_flop_per_second={"f32": max(best, SLOWEST_UNIT)},
        memory_bytes=memory_bytes(devices),
        memory_bytes_per_second=max(rate for _, rate in streams),
        attainable=Attainable(
            matmul_fraction=1.0,
            matmul_ramp_seconds=0.0,
            convolution_fraction=1.0,
            memory_fraction=streams[-1][1] / max(rate for _, rate in streams),
            launch_seconds=launch,
            step_overhead_seconds=max(0.0, times["step"] - additions),
        ),
        runtime_reserve_bytes=0,
        measured=MeasuredRates(
            matmul={"f32": tuple(products or [(1, 1024, 1024, 1024, best)])},
            convolution={kind: tuple(rows) for kind, rows in convolutions.items()},
            stream=tuple(streams),
            first_touch=touch,
        ),
        sources={"*": _SOURCE},
    )
    sums = {
        size: max(
            _LEAST_SECONDS,
            (times["sum", size, True] - times["sum", size, False]) / probes.BUFFERS,
        )
        for size in (4, _REDUCED_BYTES)
        if len(devices) > 1
    }
    return _cluster(devices, chip, sums)


_LEAST_SECONDS = 1e-6  # of an all-reduce


def _cluster(devices: tuple[Any, ...], chip: Chip, sums: dict[int, float]) -> Cluster:
    """The cluster of `devices`; `sums` has the seconds of all-reduces by their bytes."""
    count, link_rate, base = len(devices), chip.memory_bytes_per_second, 0.0
    if count > 1:
        sent_bytes = 2 * (count - 1) / count * _REDUCED_BYTES  # by each device of a ring
        beyond_small = sums[_REDUCED_BYTES] - sums[4]
        # If more bytes take no longer, all that is known is that they come from memory.
        link_rate = min(link_rate, sent_bytes / beyond_small) if beyond_small > 0 else link_rate
        base = sums[4]  # measured as a whole, so the base includes its messages
    ring = Ring(base_seconds=base, hop_seconds=0.0, bytes_per_second=link_rate)
    return Cluster(
        name=NAME,
        title=f"{count} x {chip.title}, as measured",
        chip=chip,
        devices_per_node=count,
        link=Link(kind="host", bytes_per_second=link_rate),
        library=library_of(
            NAME,
            "all-reduce of this machine, as measured",
            ring,
            _SOURCE,
            runs_buffers_one_by_one=chip.name == "cpu",  # as XLA's CPU runtime does
        ),
        max_device_count=count,
        sources={"*": _SOURCE},
    )


@cache
def _measured(devices: tuple[Any, ...]) -> Cluster:
    mesh = mesh_of(devices)
    empty = probes.call_seconds(mesh, _CALLS)
    launch = probes.launch_seconds(mesh, 1)
    matmul: dict[RateType, float] = {
        name: probes.matmul_row(mesh, _PRODUCT, dtype, empty, _CALLS, launch)[-1]
        for name, dtype in rate_types(devices[0]).items()
    }
    convolution = probes.convolution_row(mesh, _LARGE_CONVOLUTION, "forward", empty, _CALLS)[-1]
    chip = Chip(
        name=devices[0].platform,
        title=devices[0].device_kind,
        peak_flop_per_second=matmul,
        memory_bytes=memory_bytes(devices),
        memory_bytes_per_second=probes.stream_rate(
            mesh, _STREAM_BYTES, empty, _CALLS, [probes.scale]
        ),
        attainable=Attainable(
            matmul_fraction=1.0,
            matmul_ramp_seconds=0.0,
            convolution_fraction=min(1.0, convolution / matmul["f32"]),
            memory_fraction=1.0,
            launch_seconds=launch,
        ),
        runtime_reserve_bytes=0,
        sources={"*": _SOURCE},
    )
    sums = {size: _all_reduce_seconds(mesh, size) for size in (4, _REDUCED_BYTES)}
    return _cluster(devices, chip, sums)


def _all_reduce_seconds(mesh: Mesh, size_bytes: int) -> float:
    """Seconds of an all-reduce of `size_bytes` per device by itself; `probes` times one in a
    step."""
    return seconds_of_function(
        lambda x: jax.lax.psum(x, ALL), mesh, [(size_bytes // 4,)], calls=_CALLS
    )
