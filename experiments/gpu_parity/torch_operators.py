"""Attention and grouped products in PyTorch on one GPU, at the sizes of `operators.py`.

What XLA has no kernel for: products of experts in one grouped kernel (CUTLASS), whose rows are
divided among experts at will. Attention is scaled_dot_product_attention by each of its backends.

    python experiments/gpu_parity/torch_operators.py OUTPUT.json [--tiny]
"""
# PyTorch is none of our dependencies.
# pyright: reportMissingImports=false

import argparse
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

EXPERTS = {"mixtral": (8, 4096, 14_336), "deepseek_v3": (32, 7168, 2048), "qwen3": (128, 2048, 768)}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")


def seconds_of(function: Callable[[], Any], calls: int = 10, warm_ups: int = 3) -> float:
    """Median seconds of a call, by events on the device."""
    for _ in range(warm_ups):
        function()
    if not IS_CUDA:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3


def noise(*shape: int, needs_gradient: bool = False) -> torch.Tensor:
    """Random bf16 numbers."""
    found = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    return found.requires_grad_(needs_gradient)


def grouped_rows(is_tiny: bool) -> list[dict[str, Any]]:
    """Three passes of the products of experts at even loads."""
    product = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    rows = []
    for network, (experts, hidden, width) in (
        {"tiny": (4, 64, 32)} if is_tiny else EXPERTS
    ).items():
        for count in (64,) if is_tiny else (8192, 32_768):
            ends = torch.arange(1, experts + 1, device=DEVICE, dtype=torch.int32)
            ends = ends * (count // experts)
            for outer, inner in ((width, hidden), (hidden, width)):
                x, out = noise(count, inner), noise(count, outer)
                w = noise(experts, outer, inner).transpose(1, 2)
                back, left = w.transpose(1, 2), x.t().contiguous()
                passes = {
                    "forward": lambda x=x, w=w, ends=ends: product(x, w, offs=ends),
                    "input_gradient": lambda o=out, w=back, e=ends: product(o, w, offs=e),
                    "weight_gradient": lambda x=left, o=out, e=ends: product(x, o, offs=e),
                }
                for kind, call in passes.items():
                    row = {"network": network, "way": "torch_grouped_mm", "grouped_pass": kind}
                    row |= {"experts": experts, "rows": count, "outer": outer, "inner": inner}
                    try:
                        seconds = seconds_of(call)
                        row |= {"seconds": seconds}
                        row |= {"flop_per_second": 2 * count * inner * outer / seconds}
                    except RuntimeError as error:
                        row |= {"error": str(error).splitlines()[0]}
                    rows.append(row)
    return rows


def attention_rows(is_tiny: bool) -> list[dict[str, Any]]:
    """Causal attention, forward and backward."""
    total, width = (256, 128) if is_tiny else (32_768, 2048)
    rows = []
    for tokens in (64,) if is_tiny else (1024, 4096, 16_384, 32_768):
        for size in (128, 64):
            shape = (max(1, total // tokens), width // size, tokens, size)
            q, k, v = (noise(*shape, needs_gradient=True) for _ in range(3))
            out = noise(*shape)
            for backend, choice in BACKENDS.items():
                row = {"way": f"torch_{backend}", "head_size": size, "heads": shape[1]}
                row |= {"samples": shape[0], "tokens": tokens}

                def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
                    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

                try:
                    with sdpa_kernel([choice] if IS_CUDA else [SDPBackend.MATH]):
                        mixed = forward()
                        alone = seconds_of(forward)

                        def backward(
                            mixed: Any = mixed, out: Any = out, qkv: Any = (q, k, v)
                        ) -> Any:
                            return torch.autograd.grad(mixed, qkv, out, retain_graph=True)

                        after = seconds_of(backward)
                except RuntimeError as error:
                    rows.append(row | {"error": str(error).splitlines()[0]})
                    continue
                flop = 2 * shape[0] * shape[1] * tokens**2 * size
                row |= {"forward_seconds": alone, "backward_seconds": after}
                row |= {"forward_flop_per_second": flop / alone}
                row |= {"backward_flop_per_second": 2.5 * flop / after}
                rows.append(row | {"both_flop_per_second": 3.5 * flop / (alone + after)})
    return rows


def main() -> None:
    """Time both, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    asked = parser.parse_args()
    table: dict[str, Any] = {
        "kind": "torch_operators",
        "device": torch.cuda.get_device_name() if IS_CUDA else "cpu",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    for name, measure in (("grouped", grouped_rows), ("attention", attention_rows)):
        table[name] = measure(asked.tiny)
        asked.output.write_text(json.dumps(table, indent=1) + "\n")
        print(f"{name}: {len(table[name])} rows", flush=True)


if __name__ == "__main__":
    main()
