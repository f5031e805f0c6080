"""Hold the closed form of transformers against the compiled steps: time and memory by layout.

python experiments/closed_form/compare.py [--remake] [--explain ROW ...]

--remake takes twenty minutes of two cores; a row costs a hundredth of a second without.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from scalejax.config.parallelism import BATCH_AXES
from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.core.units import GIB
from scalejax.hardware import load_cluster
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import compiler_of, transformer_program
from scalejax.xla.archive import read_archive, write_archive
from scalejax.xla.cache import case_key
from scalejax.xla.closed_form import shape_of, strategy_of, workspace_bytes
from scalejax.xla.derive import Derivation, ProfileJob, derivation
from scalejax.xla.job import Compiled
from scalejax.xla.worker_pool import run_jobs

HERE = Path(__file__).parent
CLUSTER = load_cluster("dgx-h100")
JAX_VERSIONS = ("0.10.2", "0.12.0.1")
"""The JAX that Python 3.11 gets, and the newest; the closed form knows both."""
SAMPLES = 8  # of 2048 tokens, of each replica and microbatch
GPT = {
    "name": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "compute_dtype": "bfloat16",
}  # fmt: skip
LLAMA = {
    "name": "llama", "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8,
    "ffn_hidden": 8192, "compute_dtype": "bfloat16",
}  # fmt: skip
"""GPT of 1.3e9 parameters, and Llama 3.2 of 1.2e9 with an output layer of its own."""
EXPERTS = {"experts": 16, "experts_per_token": 4, "expert_hidden": 1024}
MIXTURE = LLAMA | {"moe": EXPERTS}
SHARED = LLAMA | {"moe": EXPERTS | {"shared_experts": 1, "dense_layers": 1}}
MLA = {
    "q_lora_rank": 1024, "kv_lora_rank": 512, "nope_head_size": 128, "rope_head_size": 64,
    "value_head_size": 128,
}  # fmt: skip
LATENT = LLAMA | {"heads": 16, "kv_heads": 16, "mla": MLA}
HEAD_NORMS = MIXTURE | {"heads": 16, "block": {"head_size": 128, "qk_norm": "head"}}
"""Llamas with experts in their feed-forward layers, of 0.4e9 active parameters in all blocks, with
latent attention, or with norms of queries and keys."""
LAYOUTS = {
    "one device": {},
    "data 8": {"data": 8},
    "data 8, ZeRO 1": {"data": 8, "zero_stage": 1},
    "data 8, ZeRO 2": {"data": 8, "zero_stage": 2},
    "data 8, ZeRO 2, 4 microbatches": {"data": 8, "zero_stage": 2, "microbatches": 4},
    "fsdp 8": {"fsdp": 8},
    "tensor 8": {"tensor": 8},
    "tensor 8, sequence parallel": {"tensor": 8, "sequence_parallel": True},
    "context 4": {"context": 4, "attention": "unfused"},
    "data 2 x tensor 4": {"data": 2, "tensor": 4},
    "fsdp 2 x tensor 4, sequence parallel": {"fsdp": 2, "tensor": 4, "sequence_parallel": True},
    "data 2 x fsdp 2 x tensor 2, full recompute": {
        "data": 2, "fsdp": 2, "tensor": 2, "remat": "full",
    },
    "data 2 x tensor 4, 4 microbatches, full recompute": {
        "data": 2, "tensor": 4, "microbatches": 4, "remat": "full",
    },
    "fsdp 8, one sample": {"fsdp": 8, "samples": 1},
    "data 2 x tensor 4, one sample": {"data": 2, "tensor": 4, "samples": 1},
    "tensor 8, every second product kept": {"tensor": 8, "remat": "selective_op"},
    "fsdp 2 x tensor 4, sequence parallel, every second product kept": {
        "fsdp": 2, "tensor": 4, "sequence_parallel": True, "remat": "selective_op",
    },
    "pipeline 4, 8 microbatches, full recompute": {
        "pipeline": 4, "microbatches": 8, "remat": "full",
    },
}  # fmt: skip
IN_1F1B = {
    "pipeline 4, 8 microbatches, full recompute, 1F1B": {
        "pipeline": 4, "microbatches": 8, "remat": "full",
    },
    "pipeline 4, 8 microbatches, 1F1B": {"pipeline": 4, "microbatches": 8},
    "pipeline 4, 8 microbatches, selective recompute, 1F1B": {
        "pipeline": 4, "microbatches": 8, "remat": "selective",
    },
    "data 2 x tensor 2 x pipeline 2, 4 microbatches, full recompute, 1F1B": {
        "data": 2, "tensor": 2, "pipeline": 2, "microbatches": 4, "remat": "full",
    },
    "data 2 x fsdp 2 x pipeline 2, 4 microbatches, 1F1B": {
        "data": 2, "fsdp": 2, "pipeline": 2, "microbatches": 4,
    },
}  # fmt: skip
"""Pipelines in the schedule that the closed form costs, as the trainer runs them; those of
`LAYOUTS` are in its default, GPipe."""
IN_1F1B = {name: {**layout, "pipeline_schedule": "1f1b"} for name, layout in IN_1F1B.items()}
_RING, _HEADS = {"context_strategy": "ring"}, {"context_strategy": "all_to_all"}
_LONG = {"context": 4, "tokens": 32768, "samples": 1}
_LONG_FULL = {**_LONG, "tensor": 2, "sequence_parallel": True, "remat": "full"}
OVER_CONTEXT = {
    "llama, 32k over context 4, gathered keys": (LLAMA, _LONG),
    "llama, 32k over context 4, ring": (LLAMA, _LONG | _RING),
    "llama, 32k over context 4, heads": (LLAMA, _LONG | _HEADS),
    "llama, 32k over context 4 x tensor 2, full recompute, gathered keys": (LLAMA, _LONG_FULL),
    "llama, 32k over context 4 x tensor 2, full recompute, ring": (LLAMA, _LONG_FULL | _RING),
    "llama, 32k over context 4 x tensor 2, full recompute, heads": (LLAMA, _LONG_FULL | _HEADS),
    "llama, 8k over context 2, data 2 x fsdp 2, gathered keys": (
        LLAMA, {"context": 2, "data": 2, "fsdp": 2, "tokens": 8192, "samples": 1},
    ),
    "llama, 16k over context 2, data 2 x tensor 2, 2 microbatches, every second kept, ring": (
        LLAMA, {
            "context": 2, "data": 2, "tensor": 2, "sequence_parallel": True, "microbatches": 2,
            "remat": "selective_op", "tokens": 16384, "samples": 1,
        } | _RING,
    ),
    "gpt, 16k over context 8, ring": (
        GPT, {"context": 8, "tokens": 16384, "samples": 1} | _RING,
    ),
    "gpt, 16k over context 2, fsdp 2 x tensor 2, heads": (
        GPT, {"context": 2, "fsdp": 2, "tensor": 2, "tokens": 16384, "samples": 1} | _HEADS,
    ),
}  # fmt: skip
"""Fused attention of long samples over context."""
ROWS = {
    f"{model['name']}, {title}": (model, layout)
    for title, layout in (LAYOUTS | IN_1F1B).items()
    for model in (GPT, LLAMA)
}
ROWS |= OVER_CONTEXT
WITH_EXPERTS = {
    "experts, one device": (MIXTURE, {}),
    "experts, data 8": (MIXTURE, {"data": 8}),
    "experts, data 8, ZeRO 1": (MIXTURE, {"data": 8, "zero_stage": 1}),
    "experts, fsdp 8": (MIXTURE, {"fsdp": 8}),
    "experts, expert 8": (MIXTURE, {"expert": 8}),
    "experts, data 2 x expert 4, ZeRO 1": (
        MIXTURE, {"data": 2, "expert": 4, "zero_stage": 1},
    ),
    "experts, tensor 2 x expert 4": (MIXTURE, {"tensor": 2, "expert": 4}),
    "experts, fsdp 2 x expert 4, full recompute": (
        MIXTURE, {"fsdp": 2, "expert": 4, "remat": "full"},
    ),
    "experts, data 2 x expert 4, 4 microbatches, full recompute, ZeRO 1": (
        MIXTURE, {
            "data": 2, "expert": 4, "microbatches": 4, "zero_stage": 1, "remat": "full",
        },
    ),
    "shared experts, expert 8, full recompute": (SHARED, {"expert": 8, "remat": "full"}),
    "latent attention, data 8": (LATENT, {"data": 8}),
    "latent attention and shared experts, data 2 x expert 4, full recompute": (
        LATENT | {"moe": SHARED["moe"]}, {"data": 2, "expert": 4, "remat": "full"},
    ),
    "latent attention and shared experts, data 2 x expert 4, every second kept": (
        LATENT | {"moe": SHARED["moe"]}, {"data": 2, "expert": 4, "remat": "selective_op"},
    ),
    "QK-norm and experts, data 2 x expert 4, full recompute": (
        HEAD_NORMS, {"data": 2, "expert": 4, "remat": "full"},
    ),
    "experts, expert 2 x pipeline 4, 8 microbatches, full recompute, 1F1B": (
        MIXTURE, {
            "expert": 2, "pipeline": 4, "microbatches": 8, "remat": "full",
            "pipeline_schedule": "1f1b",
        },
    ),
    "experts, data 2 x expert 2 x pipeline 2, 4 microbatches, ZeRO 1, 1F1B": (
        MIXTURE, {
            "data": 2, "expert": 2, "pipeline": 2, "microbatches": 4, "zero_stage": 1,
            "pipeline_schedule": "1f1b",
        },
    ),
}  # fmt: skip
"""Experts, latent attention and QK-norm."""
ROWS |= WITH_EXPERTS
_STAGES = {
    "context": 2, "pipeline": 2, "microbatches": 4, "tokens": 8192, "samples": 1,
    "pipeline_schedule": "1f1b",
}  # fmt: skip
_WIDE = LLAMA | {"hidden": 4096, "ffn_hidden": 14336}
_SHORT_STAGES = {
    "data": 2, "pipeline": 4, "microbatches": 8, "samples": 1, "remat": "full", "zero_stage": 1,
    "pipeline_schedule": "1f1b", "vocabulary": 32000,
}  # fmt: skip
STAGES_OVER_CONTEXT = {
    "llama, 8k over context 2 x pipeline 2, 4 microbatches, full recompute, 1F1B": (
        LLAMA, _STAGES | {"remat": "full"},
    ),
    "llama, 8k over data 2 x context 2 x tensor 2 x pipeline 2, 4 microbatches, full recompute, "
    "ZeRO 1, 1F1B": (
        LLAMA, _STAGES | {
            "data": 2, "tensor": 2, "sequence_parallel": True, "zero_stage": 1, "remat": "full",
        },
    ),
    "gpt, 8k over context 2 x pipeline 2, 4 microbatches, 1F1B": (GPT, _STAGES),
    "llama, 8k over context 2 x fsdp 2 x pipeline 2, 4 microbatches, full recompute, heads, 1F1B": (
        LLAMA, _STAGES | {"fsdp": 2, "remat": "full"} | _HEADS,
    ),
    "llama, pipeline 4 of 2 chunks, 8 microbatches, full recompute, 1F1B": (
        LLAMA, {
            "pipeline": 4, "pipeline_chunks": 2, "microbatches": 8, "remat": "full",
            "pipeline_schedule": "1f1b",
        },
    ),
    "wide llama, data 2 x pipeline 4, 8 microbatches of 2k, full recompute, ZeRO 1, 1F1B": (
        _WIDE, _SHORT_STAGES,
    ),
    "wide llama, data 2 x pipeline 4 of 4 chunks, 8 microbatches of 2k, full recompute, ZeRO 1, "
    "1F1B": (_WIDE, _SHORT_STAGES | {"pipeline_chunks": 4}),
}  # fmt: skip
"""Stages in 1F1B whose tokens are sharded, by gathered keys or over heads, of several chunks, and
of short microbatches beside wide matrices."""
ROWS |= STAGES_OVER_CONTEXT
_SHORT = {"tokens": 4096, "samples": 1, "microbatches": 2, "remat": "full"}
_SMALL, _SMALL_MIXTURE = LLAMA | {"layers": 4}, MIXTURE | {"layers": 4}
SUMMED_BY_MICROBATCH = {
    "small llama, context 4, 2 microbatches, ZeRO 1": (
        _SMALL, _SHORT | {"context": 4, "zero_stage": 1},
    ),
    "small llama, data 2 x context 4, 2 microbatches, ZeRO 1": (
        _SMALL, _SHORT | {"data": 2, "context": 4, "zero_stage": 1},
    ),
    "small llama, data 2 x context 4, 2 microbatches, ZeRO 2": (
        _SMALL, _SHORT | {"data": 2, "context": 4, "zero_stage": 2},
    ),
    "small experts, expert 4, 2 microbatches, ZeRO 1": (
        _SMALL_MIXTURE, _SHORT | {"expert": 4, "zero_stage": 1},
    ),
    "small experts, expert 4 x context 2, gathered keys": (
        _SMALL_MIXTURE, _SHORT | {"expert": 4, "context": 2, "microbatches": 1},
    ),
}  # fmt: skip
"""Gradients over context and experts, which the compiler sums in every microbatch, of networks of
4 layers."""
ROWS |= SUMMED_BY_MICROBATCH
_ADAPTED_ATTENTION = {"adapters": ("linear_qkv", "linear_proj")}
_LORA_LONG = _ADAPTED_ATTENTION | {"tokens": 8192, "samples": 1}
WITH_ADAPTERS = {
    "adapters of all, one device": (LLAMA, {"adapters": ("all-linear",)}),
    "adapters of attention, data 8": (LLAMA, _ADAPTED_ATTENTION | {"data": 8}),
    "adapters of all, fsdp 8, full recompute": (
        LLAMA, {"adapters": ("all-linear",), "fsdp": 8, "remat": "full"},
    ),
    "adapters of all, fsdp 4 x tensor 2": (
        LLAMA, {"adapters": ("all-linear",), "fsdp": 4, "tensor": 2},
    ),
    "adapters of attention, tensor 4": (LLAMA, _ADAPTED_ATTENTION | {"tensor": 4}),
    "adapters of attention, data 2 x tensor 4, sequence parallel, 2 microbatches": (
        LLAMA, _ADAPTED_ATTENTION | {
            "data": 2, "tensor": 4, "sequence_parallel": True, "microbatches": 2,
        },
    ),
    "adapters of attention, 8k, data 8": (LLAMA, _LORA_LONG | {"data": 8}),
    "adapters of attention, 8k, data 8, full recompute": (
        LLAMA, _LORA_LONG | {"data": 8, "remat": "full"},
    ),
    "adapters of attention, 8k, data 2 x tensor 4, sequence parallel, full recompute": (
        LLAMA, _LORA_LONG | {
            "data": 2, "tensor": 4, "sequence_parallel": True, "remat": "full",
        },
    ),
    "adapters of attention, 8k over context 2, data 4, full recompute, ring": (
        LLAMA, _LORA_LONG | {"data": 4, "context": 2, "remat": "full"} | _RING,
    ),
    "adapters of attention, 8k over context 2, data 2 x tensor 2, sequence parallel, ring": (
        LLAMA, _LORA_LONG | {
            "data": 2, "context": 2, "tensor": 2, "sequence_parallel": True,
        } | _RING,
    ),
    "adapters of queries, 8k, tensor 2 x pipeline 4, 8 microbatches, sequence parallel, 1F1B": (
        LLAMA, {
            "adapters": ("linear_qkv",), "tensor": 2, "pipeline": 4, "microbatches": 8,
            "sequence_parallel": True, "tokens": 8192, "samples": 1, "pipeline_schedule": "1f1b",
        },
    ),
}  # fmt: skip
"""Adapters of rank 16 on a frozen base in 16 bits."""
ROWS |= WITH_ADAPTERS
PLAIN = LLAMA | {
    "heads": 16,
    "block": {
        "rope_fraction": 0.5, "activation": "squared_relu", "is_gated": False, "norm": "layer",
    },
}  # fmt: skip
_MEGATRON = {
    "data": 2, "tensor": 4, "sequence_parallel": True, "zero_stage": 1, "microbatches": 4,
    "samples": 2,
}  # fmt: skip
WITH_SQUARED_RELU = {
    "squared ReLU, one device": (PLAIN, {}),
    "squared ReLU, data 8": (PLAIN, {"data": 8}),
    "squared ReLU, tensor 4": (PLAIN, {"tensor": 4}),
    "squared ReLU, data 2 x tensor 4, sequence parallel, 4 microbatches, ZeRO 1": (
        PLAIN, _MEGATRON,
    ),
    "squared ReLU, data 2 x tensor 4, sequence parallel, 4 microbatches, full recompute, ZeRO 1": (
        PLAIN, _MEGATRON | {"remat": "full"},
    ),
    "squared ReLU, 8k, tensor 2 x pipeline 4, 8 microbatches, sequence parallel, 1F1B": (
        PLAIN, {
            "tensor": 2, "pipeline": 4, "microbatches": 8, "sequence_parallel": True,
            "tokens": 8192, "samples": 1, "pipeline_schedule": "1f1b",
        },
    ),
}  # fmt: skip
"""The blocks of Nemotron-4: LayerNorm, squared ReLU without a gate, half of each head rotated."""
ROWS |= WITH_SQUARED_RELU
_SPREAD = (
    "data", "fsdp", "expert", "tensor", "context", "context_strategy", "pipeline",
    "pipeline_chunks", "pipeline_schedule", "zero_stage", "sequence_parallel",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row of the table."""

    title: str
    """Network and layout."""
    compiled: Program
    """The compiled step."""
    own: Program
    """The same step in closed form."""

    @property
    def seconds(self) -> tuple[float, float]:
        """Step time of the compiled step, and of the closed form."""
        return predict(self.compiled, CLUSTER).step_seconds, predict(self.own, CLUSTER).step_seconds

    @property
    def time_error(self) -> float:
        """Step time of the closed form over that of the compiled step, less 1."""
        compiled, own = self.seconds
        return own / compiled - 1

    @property
    def memory_error(self) -> float:
        """The same of the memory."""
        compiled, own = self.memory_bytes
        return own / compiled - 1

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """Most bytes that they hold, without the runtime's reserve."""
        return self.compiled.memory.peak_bytes, self.own.memory.peak_bytes


def run_of(title: str) -> ResolvedRun:
    """The run of a row."""
    model, layout = ROWS[title]
    microbatches = layout.get("microbatches", 1)
    samples = layout.get("samples", SAMPLES) * microbatches
    replicas = math.prod(layout.get(axis, 1) for axis in BATCH_AXES)
    vocabulary = layout.get("vocabulary", 51200 if model["name"] == "gpt" else 128256)
    tables = {
        "model": {
            **model, "remat": layout.get("remat", "none"),
            "attention": layout.get("attention", "auto"),
        },
        "data": {
            "name": "synthetic_tokens", "tokens": layout.get("tokens", 2048),
            "vocabulary": vocabulary,
        },
        "batch": {
            "global_batch": samples * replicas, "microbatches": microbatches,
        },
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 1e-4},
        "layout": {"data": 1} | {name: layout[name] for name in layout if name in _SPREAD},
    }  # fmt: skip
    if "adapters" in layout:
        lora = {"rank": 16, "alpha": 32.0, "targets": list(layout["adapters"])}
        tables["fine_tuning"] = {"base_dtype": "bfloat16", "lora": lora}
    return resolve(build(RunConfig, tables))


def derivation_of(title: str) -> Derivation:
    """What is compiled for a row, and how its program is made of it."""
    return derivation(ProfileJob(run=run_of(title), cluster=CLUSTER), backend="cuda")


def closed_form(run: ResolvedRun, jax: str) -> Program:
    """The step of `run` from its dimensions, as the compiler of this version of JAX makes it."""
    chip = CLUSTER.chip
    shape = shape_of(run.config, chip, compiler=compiler_of(jax))
    return transformer_program(shape, strategy_of(run), workspace_bytes=workspace_bytes(chip))


def archive_of(jax: str) -> Path:
    """File of the programs that this version of JAX compiled."""
    return HERE / f"programs_jax_{jax}.jsonl.xz"


def compared(title: str, jax: str) -> Compared:
    """A row of the table, from the program that was kept of this version of JAX."""
    archive, how = archive_of(jax), derivation_of(title)
    kept = read_archive(archive).program(case_key(how.compiled[0]))
    compiled = kept and how.program([kept])
    if compiled is None:
        raise ConfigError(f"{archive.name} does not hold {title!r}: --remake compiles it.")
    return Compared(title=title, compiled=compiled, own=closed_form(how.job.run, jax))


def remake(titles: Sequence[str]) -> None:
    """Compile the steps of rows anew with the JAX of this Python, and keep them."""
    jobs = [derivation_of(title).compiled[0] for title in titles]
    archive = archive_of(metadata.version("jax"))
    known = read_archive(archive)
    programs = {key: known.program(key) for key in known.lines}

    def done(index: int, compiled: Compiled) -> None:
        programs[case_key(jobs[index])] = compiled.program

    run_jobs(jobs, done)
    write_archive({key: each for key, each in programs.items() if each}, archive)
    read_archive.cache_clear()


def by_kind(program: Program) -> dict[str, tuple[float, float, float]]:
    """(runs, GB, seconds alone) of the operations of a step by kind; of collectives by name and
    axes."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for operation, runs in program.walk():
        collective = operation.collective
        if collective is not None:
            name = f"{collective.name} over {' x '.join(collective.group.axes)}"
            size, seconds = collective.payload_bytes, collective_seconds(collective, CLUSTER)
        elif operation.kind != "wait":
            name = "fusion" if operation.kind in ("copy", "custom") else operation.kind
            size = operation.read_bytes + operation.write_bytes
            seconds = operation_time(operation, CLUSTER.chip).seconds
        else:
            continue
        for index, value in enumerate((1, size / 1e9, seconds)):
            found[name][index] += runs * value
    return {name: (one, two, three) for name, (one, two, three) in found.items()}


def main() -> None:
    """Print the table, and what rows differ in."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--remake", nargs="?", const="", help="compile rows whose titles start so, and keep them"
    )
    parser.add_argument("--explain", nargs="*", default=[], help="start of the titles of rows")
    arguments = parser.parse_args()
    if arguments.remake is not None:
        remake([title for title in ROWS if title.startswith(arguments.remake)])
    print(f"{CLUSTER.title}; what each JAX compiles, its closed form, and how far that is off\n")
    headings = "".join(f" {jax}: ms | | | GiB | | |" for jax in JAX_VERSIONS)
    print(f"| network, layout |{headings}")
    print("|---|" + "---|---|---|---|---|---|" * len(JAX_VERSIONS))
    for title in ROWS:
        cells = [title]
        for row in (compared(title, jax) for jax in JAX_VERSIONS):
            cells += [f"{seconds * 1e3:.1f}" for seconds in row.seconds]
            cells.append(f"{row.time_error:+.1%}")
            cells += [f"{held / GIB:.2f}" for held in row.memory_bytes]
            cells.append(f"{row.memory_error:+.1%}")
        print(f"| {' | '.join(cells)} |")
    for start in arguments.explain:
        for title in ROWS:
            for jax in JAX_VERSIONS if title.startswith(start) else ():
                explain(compared(title, jax), jax)


def explain(row: Compared, jax: str) -> None:
    """Print what differs between the two programs of a row, the largest first."""
    compiled, own = by_kind(row.compiled), by_kind(row.own)
    nothing = (0.0, 0.0, 0.0)
    names = compiled.keys() | own.keys()
    pairs = [(name, compiled.get(name, nothing), own.get(name, nothing)) for name in names]
    print(f"\n{row.title}, JAX {jax}: runs, GB and ms alone, compiled and in closed form")
    for name, theirs, ours in sorted(pairs, key=lambda pair: -abs(pair[1][2] - pair[2][2])):
        print(
            f"{name:44}{theirs[0]:8,.0f}{ours[0]:8,.0f}{theirs[1]:10.2f}{ours[1]:10.2f}"
            f"{theirs[2] * 1e3:10.2f}{ours[2] * 1e3:10.2f}{(ours[2] - theirs[2]) * 1e3:+9.2f}"
        )
    beside = [
        seconds - sum(each[2] for name, each in kinds.items() if " over " not in name)
        for seconds, kinds in zip(row.seconds, (compiled, own), strict=True)
    ]
    print(
        f"ms of collectives with nothing beside them: {beside[0] * 1e3:.1f}, {beside[1] * 1e3:.1f}"
    )


if __name__ == "__main__":
    main()
