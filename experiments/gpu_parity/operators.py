"""Operators that the cost model costs by formula, timed on the GPU that is here, as XLA runs them.

    python experiments/gpu_parity/operators.py KIND OUTPUT.json [--tiny]

KIND is attention (cuDNN's kernel by head size and sequence), grouped (products of experts, by
lax.ragged_dot and in equal groups), norms, or launches (time from one small kernel of a program to
the next; run it again with XLA_FLAGS=--xla_gpu_enable_command_buffer= for launches without CUDA
graphs). A program repeats the operation on arrays of its own, and what a call takes is subtracted.
Rows are written as they are measured.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.measure.devices.machine import mesh_of
from scalejax.measure.devices.probes import call_seconds, empty_seconds
from scalejax.measure.devices.timing import seconds_of_function

CALLS = 12
ATTENTION_TOKENS = 32_768
"""Tokens of all samples of a case, 2048 wide."""
EXPERTS = {"mixtral": (8, 4096, 14_336), "deepseek_v3": (32, 7168, 2048), "qwen3": (128, 2048, 768)}
"""Experts on the device (of DeepSeek-V3 an eighth), width of tokens, width of an expert."""
RAGGED_ROWS = 8192
"""Rows at which lax.ragged_dot is timed, which XLA computes for all experts of every row: more do
not fit for all networks."""
NORM_WIDTHS = (768, 2048, 4096, 8192)


class Clock:
    """Times operations, and writes each as it is measured."""

    def __init__(self, kind: str, output: Path):
        self.mesh = mesh_of(jax.local_devices()[:1])
        self.call_seconds = call_seconds(self.mesh, CALLS)
        self.output = output
        device = jax.local_devices()[0]
        self.table: dict[str, Any] = {
            "kind": kind,
            "device": device.device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "call_seconds": self.call_seconds,
            "rows": [],
        }

    def seconds(
        self,
        function: Callable[..., Any],
        shapes: Sequence[tuple[int, ...]],
        repeats: int = 1,
        dtype: Any = jnp.bfloat16,
    ) -> float:
        """Seconds of `function` on arrays of `shapes`."""
        whole = seconds_of_function(
            function, self.mesh, shapes, calls=CALLS, dtype=dtype, repeats=repeats
        )
        empty = empty_seconds(
            function, self.mesh, shapes, calls=CALLS, dtype=dtype, repeats=repeats
        )
        return max(whole - empty, whole / 10) / repeats

    def row(self, **values: Any) -> None:
        """Keep a row, print it and write all."""
        self.table["rows"].append(values)
        print(json.dumps(values), flush=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.table, indent=1) + "\n")


def attention(clock: Clock, is_tiny: bool) -> None:
    """Causal attention by head size and sequence, forward and with its gradients; FLOP as in
    `xla.flop`: 2 products of the scores forward, 5 backward, and half of each."""
    total, width = (256, 128) if is_tiny else (ATTENTION_TOKENS, 2048)
    sequences = (64, 128) if is_tiny else tuple(2**power for power in range(10, 16))
    cases = [(size, width // size, tokens) for tokens in sequences for size in (128, 64)]
    kernel = "xla" if is_tiny else "cudnn"
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array) -> Any:
        mixed, backward = jax.vjp(attend, q, k, v)
        return mixed, backward(out)

    def add(size: int, heads: int, kv_heads: int, tokens: int) -> None:
        samples = max(1, total // tokens)
        query, key = (samples, tokens, heads, size), (samples, tokens, kv_heads, size)
        repeats = 1 if is_tiny or tokens > 8192 else 4
        forward = clock.seconds(attend, [query, key, key], repeats)
        together = clock.seconds(both, [query, key, key, query], repeats)
        flop = 2 * samples * heads * tokens**2 * size  # two products, half of each
        clock.row(
            head_size=size,
            heads=heads,
            kv_heads=kv_heads,
            samples=samples,
            tokens=tokens,
            forward_seconds=forward,
            backward_seconds=together - forward,
            forward_flop_per_second=flop / forward,
            backward_flop_per_second=2.5 * flop / max(together - forward, 1e-9),
            both_flop_per_second=3.5 * flop / together,
        )

    for size, heads, tokens in cases:
        add(size, heads, heads, tokens)
    if not is_tiny:
        add(128, 32, 8, 8192)


def grouped(clock: Clock, is_tiny: bool) -> None:
    """Products of experts at even loads, in three passes: lax.ragged_dot at few rows, and one
    product for each expert of as many rows in one batched product."""
    found = {"tiny": (4, 64, 32)} if is_tiny else EXPERTS
    for network, (experts, hidden, width) in found.items():
        for rows in (64,) if is_tiny else (8192, 32_768):
            for outer, inner in ((width, hidden), (hidden, width)):
                _grouped_case(clock, network, experts, rows, outer, inner)


def _grouped_case(
    clock: Clock, network: str, experts: int, rows: int, outer: int, inner: int
) -> None:
    """Passes of one product, of `rows` rows from `inner` to `outer`."""
    sizes = jnp.full(experts, rows // experts, jnp.int32)
    each = rows // experts

    def ragged(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, sizes)

    def equal(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("gmk,gkn->gmn", x, w)

    ways: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
        "equal_groups": (equal, (experts, each, inner), (experts, each, outer))
    }
    if (rows <= RAGGED_ROWS and outer < inner) or network == "tiny":
        ways["ragged_dot"] = (ragged, (rows, inner), (rows, outer))
    matrix, flop = (experts, inner, outer), 2 * rows * inner * outer
    for way, (product, left, result) in ways.items():

        def input_gradient(w: jax.Array, out: jax.Array, product: Any = product, left: Any = left):
            zeros = jnp.zeros(left, jnp.bfloat16)
            return jax.vjp(lambda x: product(x, w), zeros)[1](out)[0]

        def weight_gradient(x: jax.Array, out: jax.Array, product: Any = product):
            zeros = jnp.zeros(matrix, jnp.bfloat16)
            return jax.vjp(lambda w: product(x, w), zeros)[1](out)[0]

        passes = {
            "forward": (product, [left, matrix]),
            "input_gradient": (input_gradient, [matrix, result]),
            "weight_gradient": (weight_gradient, [left, result]),
        }
        for kind, (function, shapes) in passes.items():
            repeats = 2 if way == "equal_groups" else 1
            seconds = clock.seconds(function, shapes, repeats)
            clock.row(
                network=network,
                way=way,
                grouped_pass=kind,
                experts=experts,
                rows=rows,
                outer=outer,
                inner=inner,
                seconds=seconds,
                flop_per_second=flop / seconds,
            )


def norms(clock: Clock, is_tiny: bool) -> None:
    """LayerNorm and RMSNorm of bf16 rows in f32, forward and the gradients of input and scale."""
    tokens = 64 if is_tiny else 16_384

    def layer(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + 1e-5) * scale).astype(x.dtype)

    def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(square + 1e-5) * scale).astype(x.dtype)

    for name, norm in (("layer", layer), ("rms", rms)):

        def gradients(x: jax.Array, scale: jax.Array, out: jax.Array, norm: Any = norm) -> Any:
            return jax.vjp(norm, x, scale)[1](out)

        for width in NORM_WIDTHS:
            rows, scale = (tokens, width), (1, width)
            size = 2 * math.prod(rows)
            forward = clock.seconds(norm, [rows, scale], 8)
            backward = clock.seconds(gradients, [rows, scale, rows], 8)
            clock.row(
                norm=name,
                tokens=tokens,
                width=width,
                forward_seconds=forward,
                backward_seconds=backward,
                forward_bytes_per_second=2 * size / forward,
                backward_bytes_per_second=3 * size / backward,
            )


def launches(clock: Clock, is_tiny: bool) -> None:
    """Time of one more small kernel in a chain: each needs the result of the one before."""
    few, many = (5, 25) if is_tiny else (20, 420)

    def added(x: jax.Array) -> jax.Array:
        return x + 1

    def multiplied(x: jax.Array) -> jax.Array:
        return x @ x

    def chain(function: Callable[[jax.Array], jax.Array], count: int, x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jax.lax.optimization_barrier(function(x))  # or XLA would make one kernel of them
        return x

    cases = (
        ("add", added, (1024,), jnp.float32),
        ("add", added, (2**20,), jnp.float32),
        ("product", multiplied, (128, 128), jnp.bfloat16),
    )
    for name, function, shape, dtype in cases:
        seconds = [
            seconds_of_function(
                partial(chain, function, count), clock.mesh, [shape], calls=60, dtype=dtype
            )
            for count in (few, many)
        ]
        gap = (seconds[1] - seconds[0]) / (many - few)
        clock.row(operation=name, shape=shape, operations=[few, many], seconds=seconds, each=gap)


KINDS = {"attention": attention, "grouped": grouped, "norms": norms, "launches": launches}


def main() -> None:
    """Time the operators of one kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    asked = parser.parse_args()
    KINDS[asked.kind](Clock(asked.kind, asked.output), asked.tiny)


if __name__ == "__main__":
    main()
