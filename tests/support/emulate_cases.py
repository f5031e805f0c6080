"""Small runs to emulate, and an executor that does nothing, for tests of timing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scalejax.config.emulation import EmulationConfig
from scalejax.config.run import RunConfig
from scalejax.core.serialization import build
from scalejax.emulation.algorithms import algorithm_of
from scalejax.emulation.instructions import InstructionLog
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Durations, VirtualCluster


def config(emulation: EmulationConfig | None = None, **fields: Any) -> RunConfig:
    """A tiny network on 512 images; `fields` replace tables."""
    tables = {
        "seed": 3,
        "model": {"name": "mlp", "hidden": [8]},
        "data": {
            "name": "synthetic_images",
            "image_size": 4,
            "channels": 1,
            "classes": 4,
            "train_examples": 512,
            "test_examples": 64,
        },
        "batch": {"global_batch": 32},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "schedule": {"base_learning_rate": 0.1, "warmup": "none"},
        "train": {"epochs": 2, "log_every_steps": 1},
    }
    made = build(RunConfig, tables | fields)
    if emulation is None:
        return made
    return replace(made, emulation=emulation)


def durations(**fields: Any) -> Durations:
    """A second for a gradient, nothing for anything else."""
    usual: dict[str, Any] = {
        "gradient_seconds": 1.0,
        "gradient_deviation_seconds": 0.0,
        "collective_seconds": 0.0,
        "update_seconds": 0.0,
        "latency_seconds": 0.0,
        "worker_bytes_per_second": None,
        "server_bytes_per_second": None,
        "workers_per_host": 1,
    }
    return Durations(**(usual | fields))


class NoArithmetic:
    """Computes nothing."""

    def __init__(self, shards: int) -> None:
        self._shards = shards

    def execute(
        self, operation: str, inputs: Sequence[Any], factors: Sequence[float], rows: Any
    ) -> Sequence[Any]:
        """As many outputs as the instruction has."""
        counts = {"initial": self._shards, "gradient": self._shards + 1, "update": 2}
        return [None] * counts.get(operation, 1)

    def value(self, content: Any) -> Any:
        """Nothing."""


def simulated(
    emulation: EmulationConfig,
    times: Durations,
    *,
    steps: int,
    seed: int = 0,
    shard_bytes: Sequence[int] = (4000,),
    watch: Callable[[VirtualCluster], None] = lambda cluster: None,
) -> tuple[VirtualCluster, Servers]:
    """The virtual cluster and the servers after a run of so many gradients, not computed."""
    cluster = VirtualCluster(emulation, times, seed=seed)
    instructions = InstructionLog(
        NoArithmetic(emulation.server_shards), lambda: cluster.now, emulation.server_shards
    )
    servers = Servers(cluster, instructions, shard_bytes, emulation.failures)
    progress = Progress(
        cluster,
        instructions,
        lambda *line: None,
        total_steps=steps,
        steps_per_epoch=steps,
        log_every_steps=steps,
        is_evaluated=lambda step: False,
    )
    algorithm_of(emulation.core, cluster, instructions, servers, progress).start()
    watch(cluster)
    cluster.run()
    return cluster, servers
