"""How the processes of one run find each other: how many they are, and where the first listens.

Read from the environment, where `scalejax launch`, SLURM, Open MPI or a Kubernetes manifest of
`scalejax launch --target jobset` put it. Knows nothing of what the processes do.
"""

import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalejax.core.environment import end_with_caller
from scalejax.core.errors import ConfigError, ScalejaxError, refusal

COORDINATOR, PROCESSES, PROCESS = (
    "SCALEJAX_COORDINATOR",
    "SCALEJAX_PROCESSES",
    "SCALEJAX_PROCESS",
)
"""Variables: host and port of the first process; how many there are; which of them this is."""
GO_ON = "SCALEJAX_GO_ON"
"""Variable: the command that goes on with the run, where another than this process knows it."""
LAUNCHER = "SCALEJAX_LAUNCHER"
"""Variable: the process on this machine that started this one, with which it is to end."""
REFUSAL_MARKER = "SCALEJAX_REFUSAL_MARKER"
"""Variable: the file that a process leaves whose input is refused after it has met the others."""

REFUSED = 2
"""Exit code of a process whose input was refused."""
MISSED_ANOTHER = 76
"""Exit code of a process that could not reach another: EX_PROTOCOL of <sysexits.h>."""
LOOPBACK = "127.0.0.1"
PATIENCE_SECONDS = 300
"""For the others to come; as JAX's own default."""
_HEARTBEAT_TIMEOUT_SECONDS = 60  # a node that is gone is found out in so long, without a launcher
_SECONDS_TO_LEAVE = 5.0
"""For a process that has failed to end in good order, which is to wait for the others."""
_FIRST_PORT, _PORTS = 61440, 4096  # of the range that systems hand out last
_LOST_CONTACT = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|(?i:gloo [\w -]+ failed|connection (closed|reset|refused)|"
    r"broken pipe|NCCL operation .* failed: (unhandled system error|remote process)|heartbeat|"
    r"coordination[ _]?service|barrier (timed out|failed|has failed))"
)
"""In what XLA says of exchanges that another process has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which process of how many this is."""

    process: int
    """Counted from 0."""
    processes: int
    """How many there are."""
    coordinator: str | None
    """Host and port where the first listens; None if JAX is to ask the scheduler."""
    told_by: str
    """Who said so."""

    @property
    def bind_address(self) -> str | None:
        """Where the first is to listen: on loopback alone, if all are on this machine."""
        host = None if self.coordinator is None else self.coordinator.rpartition(":")[0]
        return self.coordinator if host in (LOOPBACK, "localhost", "[::1]") else None


def place_here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process, as the environment says; None if it is alone.

    Raises:
        ConfigError: if a variable of ours is missing beside another, or holds no such number.
    """
    # `mpirun` starts its daemons by `srun`, of which the processes inherit the variables: one task
    # for each node.
    place = _of_ours(environment) or _of_open_mpi(environment) or _of_slurm(environment)
    return place if place is not None and place.processes > 1 else None


def join(place: Place | None) -> None:
    """Meet the other processes; before JAX is first used. Nothing if there are none.

    Raises:
        ConfigError: if they do not all come in time, or another program listens in their place.
    """
    die_with_launcher()
    if place is None:
        return
    import jax

    # It would take SIGTERM for itself, and a run that is asked to stop would not hear of it.
    jax.config.update("jax_enable_preemption_service", False)
    if place.bind_address is not None:
        _keep_collectives_here()
    try:
        with _ending_by_interrupts():
            _initialize(place)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"process {place.process} of {place.processes} ({place.told_by}) did not meet the "
            f"others at {place.coordinator or 'the address that the scheduler says'}: {reason}"
        ) from error


def _initialize(place: Place) -> None:
    import jax

    jax.distributed.initialize(
        place.coordinator,
        place.processes if place.coordinator else None,
        place.process if place.coordinator else None,
        # A scheduler around is not asked where ours says all: it would give each its first
        # device alone, or want the right to read the pods of Kubernetes.
        cluster_detection_method="deactivate" if place.told_by == COORDINATOR else None,
        initialization_timeout=PATIENCE_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS,
        coordinator_bind_address=place.bind_address,
    )


@contextmanager
def _ending_by_interrupts() -> Iterator[None]:
    """Let SIGINT end this process at once: Python would wait for what is done within."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _keep_collectives_here() -> None:
    """Have gloo, by which CPUs exchange, listen on loopback.

    By itself it listens where the name of this machine leads, which other machines may reach; JAX
    passes no address on, and asks this function for the exchanges when it first needs them.
    """
    from jaxlib import _jax  # type: ignore[attr-defined]

    made = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = partial(made, hostname=LOOPBACK)


@contextmanager
def leaving_at_once(place: Place | None) -> Iterator[None]:
    """End this process within seconds when what is done within fails, here or in another one.

    Left to itself, JAX would first wait for one that is dead, up to its heartbeat's timeout, and
    then abort with a stack of addresses; and for the others where this one has failed, which wait
    for this one.
    """
    try:
        yield
    except BaseException as error:
        if place is None:
            raise
        if not is_lost_contact(error):
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else 1
            else:
                code = REFUSED if isinstance(error, ScalejaxError) else 1
            if isinstance(error, ScalejaxError):
                _leave_marker()
            timer = threading.Timer(_SECONDS_TO_LEAVE, os._exit, (code,))
            timer.daemon = True
            timer.start()
            raise
        reason = str(error).strip().splitlines()[0]
        print(
            f"error: process {place.process} of {place.processes} lost contact with another one "
            f"({reason}).",
            file=sys.stderr,
            flush=True,
        )
        os._exit(MISSED_ANOTHER)


def _leave_marker() -> None:
    with suppress(OSError):  # the refusal itself is told anyway
        if marker := os.environ.get(REFUSAL_MARKER):
            Path(marker).touch()


def is_lost_contact(error: BaseException) -> bool:
    """Whether what was raised, or a cause of it, is that another process could not be reached."""
    # XLA's errors alone are of type JaxRuntimeError; asked by name, to import no JAX here.
    is_xla = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if is_xla and _LOST_CONTACT.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_contact(error.__cause__)


def die_with_launcher() -> None:
    """Let the system kill this process when the one that launched it dies, however it does."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    end_with_caller(int(launcher))


def _of_ours(environment: Mapping[str, str]) -> Place | None:
    if COORDINATOR not in environment:
        return None
    index = PROCESS if PROCESS in environment else "JOB_COMPLETION_INDEX"  # Kubernetes sets that
    process = _number(environment, index)
    processes = _number(environment, PROCESSES)
    if not 0 <= process < processes:
        accepted = f"it must be from 0 to {processes - 1}, as {PROCESSES} is {processes}"
        raise ConfigError(refusal(index, process, accepted))
    return Place(
        process=process,
        processes=processes,
        coordinator=environment[COORDINATOR],
        told_by=COORDINATOR,
    )


def _of_slurm(environment: Mapping[str, str]) -> Place | None:
    """A task of `srun`; a batch script itself, or a shell of `salloc`, is no such task."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place(
        process=_number(environment, "SLURM_PROCID"),
        processes=_number(environment, "SLURM_STEP_NUM_TASKS"),
        coordinator=_loopback(f"{job}.{step}") if nodes == 1 else None,
        told_by="SLURM",
    )


def _of_open_mpi(environment: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    processes = _number(environment, "OMPI_COMM_WORLD_SIZE")
    is_one_machine = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") == processes
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "0")
    return Place(
        process=_number(environment, "OMPI_COMM_WORLD_RANK"),
        processes=processes,
        coordinator=_loopback(job) if is_one_machine else None,
        told_by="Open MPI",
    )


def _loopback(job: str) -> str:
    """An address on this machine that the processes of `job` agree on, and other jobs hardly do."""
    return f"{LOOPBACK}:{_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS}"


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name)
    if value is None or not value.isdecimal():
        raise ConfigError(refusal(name, value, "it must be a whole number"))
    return int(value)
