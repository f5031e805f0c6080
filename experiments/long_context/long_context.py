"""Llama 3 8B on long samples over context: memory, step time and bytes over context, by strategy.

python experiments/long_context/long_context.py [--remake]

--remake compiles all rows, ten minutes of two cores; without it, the kept figures are printed.
"""

import argparse
import json
from pathlib import Path

from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.serialization import JsonValue, build
from scalejax.hardware import load_cluster
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Program
from scalejax.xla import ProfileJob, profile_many

RESULTS = Path(__file__).parent / "results.json"
CLUSTER = load_cluster("dgx-h100")
LLAMA: dict[str, JsonValue] = {
    "name": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8,
    "ffn_hidden": 14336, "tied_embeddings": False, "rope_theta": 500_000.0,
    "compute_dtype": "bfloat16", "remat": "full",
}  # fmt: skip
"""Llama 3 8B (arXiv 2407.21783, table 3), recomputed in full."""
VOCABULARY = 128_256
ROWS = (
    (131_072, 8, "all_gather", 0),
    (131_072, 8, "ring", 0),
    (131_072, 8, "all_to_all", 0),
    (131_072, 16, "ring", 0),
    (262_144, 8, "ring", 0),
    (1_048_576, 8, "ring", 0),
    (1_048_576, 8, "all_to_all", 0),
    (1_048_576, 16, "ring", 0),
    (1_048_576, 8, "ring", 1),
    (1_048_576, 16, "ring", 1),
)
"""(tokens of a sample, devices along context, strategy, ZeRO stage); 4 devices along tensor share
each."""


def run_of(tokens: int, context: int, strategy: str, zero_stage: int) -> ResolvedRun:
    """The run of a row: one sample a step, tokens divided over tensor between layers."""
    tables: dict[str, JsonValue] = {
        "model": LLAMA,
        "data": {"name": "synthetic_tokens", "tokens": tokens, "vocabulary": VOCABULARY},
        "batch": {"global_batch": 1},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 1e-4},
        "layout": {
            "data": 1,
            "context": context,
            "context_strategy": strategy,
            "tensor": 4,
            "sequence_parallel": True,
            "zero_stage": zero_stage,
        },
    }
    return resolve(build(RunConfig, tables))


def figures(program: Program) -> dict[str, JsonValue]:
    """What is printed of a compiled step."""
    prediction = predict(program, CLUSTER)
    over_context = sum(
        runs * operation.collective.payload_bytes
        for operation, runs in program.walk()
        if operation.collective is not None
        and operation.collective.group.axes == ("context",)
        and operation.collective.name != "all_reduce"
    )
    attended = sum(
        runs * operation.flop for operation, runs in program.walk() if operation.kind == "attention"
    )
    return {
        "step_seconds": prediction.step_seconds,
        "state_bytes": program.memory.argument_bytes,
        "temporary_bytes": program.memory.temporary_bytes,
        "fits": prediction.fits,
        "attention_flop": attended,
        "context_bytes": over_context,
    }


def main() -> None:
    """Compile the rows if asked to, and print their table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--remake", action="store_true", help="compile all rows")
    if parser.parse_args().remake:
        jobs = [ProfileJob(run=run_of(*row), cluster=CLUSTER) for row in ROWS]
        found = [figures(program) for program in profile_many(jobs, backend="cuda")]
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    titles = ("tokens", "context", "strategy", "ZeRO", "step, s", "state, GB", "all else, GB")
    titles += ("fits 80 GB", "attention, PFLOP", "over context, GB")
    print(f"| {' | '.join(titles)} |")
    print(f"|{'---|' * len(titles)}")
    for row, each in zip(ROWS, json.loads(RESULTS.read_text(encoding="utf-8")), strict=True):
        tokens, context, strategy, zero_stage = row
        print(
            f"| {tokens:,} | {context} | {strategy} | {zero_stage} | {each['step_seconds']:.2f} "
            f"| {each['state_bytes'] / 1e9:.1f} | {each['temporary_bytes'] / 1e9:.1f} "
            f"| {'yes' if each['fits'] else 'no'} | {each['attention_flop'] / 1e15:.2f} "
            f"| {each['context_bytes'] / 1e9:.2f} |"
        )


if __name__ == "__main__":
    main()
