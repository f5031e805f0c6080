"""One emulated run: builds its parts, advances virtual time, and returns a summary.

Knows all parts, and the lines of a record; the algorithms know neither.
"""

import time
from collections.abc import Callable

import numpy as np

from scalejax.config.data import Split
from scalejax.config.emulation import EmulationConfig
from scalejax.config.run import ResolvedRun
from scalejax.data.datasets import open_source
from scalejax.data.source import Source
from scalejax.emulation.algorithms import algorithm_of
from scalejax.emulation.checks import require_progress
from scalejax.emulation.collective_times import with_reduction
from scalejax.emulation.executor import JaxExecutor
from scalejax.emulation.instructions import Instruction, InstructionLog, LineKind, Value
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.record import Emulation
from scalejax.emulation.virtual_cluster import Durations, VirtualCluster
from scalejax.training.logger import evaluation_measurement, train_measurement
from scalejax.training.mesh import build_mesh
from scalejax.training.record import Measurement
from scalejax.training.setup import schedule_of

Write = Callable[[Measurement], None]
"""Called with each line of the record."""


def emulate_run(
    run: ResolvedRun,
    emulation: EmulationConfig,
    durations: Durations,
    *,
    cluster: str | None = None,
    write: Write = lambda measurement: None,
    log: Callable[[Instruction], None] | None = None,
) -> Emulation:
    """Train `run` with the algorithm of `emulation`, in virtual time.

    The same arguments give the same figures, bit for bit, on the same kind of machine.

    Args:
        run: the run, on one device, checked by `emulated_run`.
        emulation: the algorithm and its workers.
        durations: durations of all actions.
        cluster: name of the cluster of the durations, for the record.
        write: called with the lines of the record, whose seconds are virtual.
        log: called with each executed instruction.

    Raises:
        ConfigError: if examples cannot be read, or are too few for so many workers; or if workers
            fail too often to make progress.
    """
    require_progress(run, emulation, durations)
    began = time.perf_counter()
    executor = executor_of(run, emulation)
    durations = with_reduction(durations, emulation, executor.tensor_elements)
    virtual_cluster = VirtualCluster(emulation, durations, seed=run.config.seed)
    instructions = InstructionLog(
        executor, lambda: virtual_cluster.now, emulation.server_shards, log
    )
    servers = Servers(virtual_cluster, instructions, executor.shard_bytes, emulation.failures)
    if emulation.compression is not None:
        servers.compress(emulation.compression, executor.message_bytes)
    progress = Progress(
        virtual_cluster,
        instructions,
        Lines(run, executor, write).tell,
        total_steps=run.total_steps,
        steps_per_epoch=run.steps_per_epoch,
        log_every_steps=run.config.train.log_every_steps,
        is_evaluated=run.is_evaluated,
        has_validation=run.config.data.has_validation,
    )
    training = algorithm_of(emulation.core, virtual_cluster, instructions, servers, progress)
    training.start()
    virtual_cluster.run()
    return Emulation(
        config=emulation,
        cluster=cluster,
        gradient_seconds=durations.gradient_seconds,
        exchange_seconds=durations.collective_seconds,
        virtual_seconds=virtual_cluster.now,
        gradients=progress.step,
        updates=servers.versions[0],
        staleness=tuple(sorted(servers.staleness.items())),
        sent_bytes=servers.sent_bytes,
        dropped_gradients=training.dropped_gradients,
        worker_failures=virtual_cluster.worker_failures,
        server_failures=servers.failures,
        wall_seconds=time.perf_counter() - began,
    )


def executor_of(run: ResolvedRun, emulation: EmulationConfig) -> JaxExecutor:
    """The executor of the gradients and updates of an emulated run."""
    config = run.config
    splits: tuple[Split, ...] = ("train", "test")
    if config.data.has_validation:
        splits += ("validation",)
    sources: dict[
        Split, Source
    ] = {  # augmentation does not change examples that are not trained on
        split: open_source(
            config.data, split, seed=config.seed, augmentation=config.input.augmentation
        )
        for split in splits
    }
    return JaxExecutor(
        run,
        build_mesh(run.layout),
        sources,
        shards=emulation.server_shards,
        gradients_per_update=emulation.core.steps_per_update(emulation.workers),
        compression=emulation.compression,
        samples=run.split.global_batch // emulation.sharing_workers,
    )


class Lines:
    """Writes the metrics of an emulated run as lines of a record."""

    def __init__(self, run: ResolvedRun, executor: JaxExecutor, write: Write) -> None:
        self._run, self._executor, self._write = run, executor, write
        self._schedule = schedule_of(run)
        self._step, self._seconds = 0, 0.0

    def tell(
        self, kind: LineKind, at_seconds: float, step: int, metrics: tuple[Value, ...]
    ) -> None:
        """Write a line of this kind; see `Listener` of `progress`."""
        if kind == "trained":
            self.trained(at_seconds, step, metrics)
        else:
            self.evaluated(at_seconds, step, metrics, is_end=kind == "tested")

    def trained(self, at_seconds: float, step: int, metrics: tuple[Value, ...]) -> None:
        """Write a line with the training loss and the virtual time of an update."""
        values = [self._executor.value(each.content) for each in metrics]
        loss, accuracy = np.mean(values, axis=0)
        updates, seconds = step - self._step, at_seconds - self._seconds
        if seconds <= 0:  # several updates at the same virtual time
            updates, seconds = step, at_seconds
        self._step, self._seconds = step, at_seconds
        rate = self._schedule(step - 1)
        self._write(
            train_measurement(
                self._run,
                {"loss": loss, "accuracy": accuracy, "learning_rate": rate},
                step=step,
                step_seconds=seconds / updates,
                elapsed_seconds=at_seconds,
            )
        )

    def evaluated(
        self, at_seconds: float, step: int, metrics: tuple[Value, ...], *, is_end: bool = False
    ) -> None:
        """Write a line of an evaluation, which takes no virtual time; `is_end` for test data at the
        end of a run that has validation data."""
        (sums,) = metrics
        is_chosen_by = self._run.config.data.has_validation and not is_end
        self._write(
            evaluation_measurement(
                self._run,
                self._executor.value(sums.content),
                split="validation" if is_chosen_by else "test",
                step=step,
                seconds=0.0,
                elapsed_seconds=at_seconds,
                chosen=(step, "last") if is_end else None,
            )
        )
