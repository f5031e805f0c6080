"""What the operations beside products move in the step that XLA compiles for an H100, in bfloat16
and in fp8 with scales by present values and by the last steps.

Run from the root of the repository, with scalejax[gpu-target] installed:
    python experiments/fp8_training/compiled.py
"""

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.simulator.predict import predict
from scalejax.xla.job import Compiled, RunJob
from scalejax.xla.target import target_for
from scalejax.xla.worker_pool import run_jobs

TABLES = {
    "model": {"name": "llama", "layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8}
    | {"ffn_hidden": 14336},
    "data": {"name": "synthetic_tokens", "tokens": 4096, "vocabulary": 32000},
    "batch": {"global_batch": 2},
    "optimizer": {"name": "adamw"},
    "schedule": {"base_learning_rate": 0.01, "scaling": "none", "decay": "constant"},
    "layout": {"data": 1},
}
"""Eight blocks of Llama 3 8B on one device, 8,192 tokens."""


def main() -> None:
    """One line for each compute type: the compiler's own step, not one derived from bfloat16."""
    cluster, made = load_cluster("dgx-h100"), dict[int, Compiled]()
    names = ("bfloat16", "float8", "float8_delayed")
    jobs = [
        RunJob(
            run=resolve(
                build(RunConfig, TABLES | {"model": {**TABLES["model"], "compute_dtype": name}})
            ),
            target=target_for(cluster, 1, "cuda"),
        )
        for name in names
    ]
    run_jobs(jobs, made.__setitem__)
    print("compute type     step, predicted  beside products: operations    read  written")
    for index, name in enumerate(names):
        program = made[index].program
        beside = [(item, times) for item, times in program.walk() if item.kind == "fusion"]
        count = sum(times for _, times in beside)
        read = sum(item.read_bytes * times for item, times in beside) / 1e9
        written = sum(item.write_bytes * times for item, times in beside) / 1e9
        seconds = predict(program, cluster).step_seconds
        print(
            f"{name:16} {1e3 * seconds:12.1f} ms {count:28} {read:6.1f} GB {written:5.1f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
