"""Training steps of this folder's networks in PyTorch on one GPU, timed as `scalejax bench` does.

Sizes, optimizer, types and batch are those of the run files here: float32 parameters, products and
convolutions in bfloat16 by autocast, ResNet-50 of torchvision in channels_last with
cudnn.benchmark, decoders with scaled_dot_product_attention, fused optimizers. One batch stays on
the device. Each network is a case; each case is timed eagerly, and compiled where asked.

    python experiments/gpu_parity/torch_steps.py CASE OUTPUT.json [--compile] [--tiny] [--steps N]
"""
# PyTorch is none of our dependencies.
# pyright: reportMissingImports=false

import argparse
import json
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.nn.functional as functional
from torch import nn

VOCABULARIES = {"gpt2": 50_304, "llama": 128_256}
CASES = {
    "resnet50": {"images": 256},
    "gpt2_1024": {"samples": 32, "tokens": 1024},
    "gpt2_4096": {"samples": 8, "tokens": 4096},
    "llama_4096": {"samples": 2, "tokens": 4096},
    "llama_8192": {"samples": 1, "tokens": 8192},
}


class Gpt2(nn.Module):
    """GPT-2's decoder, as in `gpt2.toml`: learned positions, tied embeddings, no dropout."""

    def __init__(self, tokens: int, vocabulary: int, layers: int, hidden: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(tokens, hidden)
        self.blocks = nn.ModuleList(Gpt2Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of tokens [B, S]."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class Gpt2Block(nn.Module):
    """Attention and feed-forward layer, each behind its norm."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream [B, S, D] after the block."""
        heads = [
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh")
        return x + self.down(inner)


class Llama(nn.Module):
    """Llama's decoder, as in `llama.toml`."""

    def __init__(
        self,
        tokens: int,
        vocabulary: int,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        inner: int,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            LlamaBlock(hidden, heads, kv_heads, inner) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)
        size = hidden // heads
        rates = 500_000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of tokens [B, S]."""
        x = self.tokens(inputs)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))


class LlamaBlock(nn.Module):
    """Attention of grouped queries and a gated feed-forward layer, each behind its norm."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int):
        super().__init__()
        size = hidden // heads
        self.size, self.sizes = size, [heads * size, kv_heads * size, kv_heads * size]
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The residual stream [B, S, D] after the block."""
        q, k, v = (
            each.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in self.qkv(self.attention_norm(x)).split(self.sizes, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [B, H, S, K] with rotary positions, in their own type."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def build(
    case: str, device: torch.device, *, is_tiny: bool
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network of a case on `device`, its inputs and targets."""
    sizes = dict(CASES[case])
    if case == "resnet50":
        from torchvision.models import resnet50

        images, size = (2, 64) if is_tiny else (sizes["images"], 224)
        model = resnet50().to(device, memory_format=torch.channels_last)
        inputs = torch.randn(images, 3, size, size, device=device)
        inputs = inputs.to(memory_format=torch.channels_last)
        return model, inputs, torch.randint(0, 1000, (images,), device=device)
    samples, tokens = sizes["samples"], sizes["tokens"]
    family = case.partition("_")[0]
    vocabulary = VOCABULARIES[family]
    if is_tiny:
        samples, tokens, vocabulary = 1, 64, 512
    if family == "gpt2":
        layers, hidden, heads = (2, 64, 4) if is_tiny else (12, 768, 12)
        model = Gpt2(tokens, vocabulary, layers, hidden, heads)
    else:
        widths = (2, 64, 4, 2, 160) if is_tiny else (4, 4096, 32, 8, 14_336)
        with device:  # two billion parameters take minutes to draw on the host
            model = Llama(tokens, vocabulary, *widths)
    drawn = torch.randint(0, vocabulary, (samples, tokens + 1), device=device)
    return model.to(device), drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def optimizer_of(case: str, model: nn.Module, *, is_fused: bool) -> torch.optim.Optimizer:
    """The optimizer of the run file; matrices alone decay."""
    groups = [
        {"params": [each for each in model.parameters() if each.dim() > 1]},
        {"params": [each for each in model.parameters() if each.dim() <= 1], "weight_decay": 0.0},
    ]
    if case == "resnet50":
        return torch.optim.SGD(
            groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=is_fused
        )
    return torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.1, fused=is_fused)


def timed(step: Callable[[], torch.Tensor], steps: int, warmup_steps: int) -> tuple:
    """(seconds of each step, first loss, last loss): ends of steps as the device reached them."""
    is_cuda = torch.cuda.is_available()
    losses, stamps = [], []
    for index in range(warmup_steps + steps + 1):
        loss = step()
        if index in (0, warmup_steps + steps):
            losses.append(float(loss))
        if index >= warmup_steps:
            if is_cuda:
                stamps.append(torch.cuda.Event(enable_timing=True))
                stamps[-1].record()
            else:
                stamps.append(time.perf_counter())
    if is_cuda:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(stamps)], *losses
    return [b - a for a, b in pairwise(stamps)], *losses


def main() -> None:
    """Time one case, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup-steps", type=int, default=10)
    asked = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # tf32, XLA's default
    model, inputs, targets = build(asked.case, device, is_tiny=asked.tiny)
    optimizer = optimizer_of(asked.case, model, is_fused=is_cuda)
    parameters = sum(each.numel() for each in model.parameters())
    loss_of = nn.CrossEntropyLoss()

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(inputs)
        return loss_of(logits.float().flatten(0, -2), targets.flatten())

    called = torch.compile(forward) if asked.compile else forward

    def step() -> torch.Tensor:
        loss = called(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    begin = time.perf_counter()
    step()
    if is_cuda:
        torch.cuda.synchronize()
    first_seconds = time.perf_counter() - begin
    seconds, first, last = timed(step, asked.steps, asked.warmup_steps)
    if not (math.isfinite(first) and math.isfinite(last)):
        raise SystemExit(f"the loss of {asked.case} is not finite: {first}, {last}")
    deciles = quantiles(seconds, n=10, method="inclusive")
    row = {
        "case": asked.case,
        "is_compiled": asked.compile,
        "is_tiny": asked.tiny,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        "input_shape": list(inputs.shape),
        "first_step_seconds": first_seconds,
        "warmup_steps": asked.warmup_steps,
        "step_seconds": seconds,
        "median_seconds": median(seconds),
        "p10_seconds": deciles[0],
        "p90_seconds": deciles[-1],
        "first_loss": first,
        "last_loss": last,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(row, indent=1) + "\n")
    told = f"{asked.case}: {1e3 * row['median_seconds']:.2f} ms"
    print(f"{told}, loss {first:.3f} to {last:.3f}, first step {first_seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
