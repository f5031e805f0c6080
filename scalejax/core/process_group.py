"""The process group of a run: rank, number of processes, address of the coordinator.

Read from the environment, as set by `scalejax launch`, SLURM, Open MPI or a Kubernetes manifest of
`scalejax launch --target jobset`. Knows nothing of what the processes do.
"""

import ipaddress
import os
import re
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalejax.core.environment import end_with_caller, handling
from scalejax.core.errors import ConfigError, ExitCode, ScalejaxError, refusal

COORDINATOR, PROCESSES, PROCESS = (
    "SCALEJAX_COORDINATOR",
    "SCALEJAX_PROCESSES",
    "SCALEJAX_PROCESS",
)
"""Variables: host and port of the coordinator; number of processes; rank of this process."""
GO_ON = "SCALEJAX_GO_ON"
"""Variable: the command that resumes the run, set by the launcher."""
LAUNCHER = "SCALEJAX_LAUNCHER"
"""Variable: process id of the launcher on this machine; this process ends when it does."""
REFUSAL_MARKER = "SCALEJAX_REFUSAL_MARKER"
"""Variable: the file that a process creates if its input is refused after it joined the group."""

LOOPBACK = "127.0.0.1"
SLURM = "SLURM"
"""`Place.told_by` of a task of `srun`."""
JOIN_TIMEOUT_SECONDS = 300
"""Timeout for all processes to join the group; JAX's own default."""
_HEARTBEAT_TIMEOUT_SECONDS = 100
"""Silence of a process after which JAX aborts with a stack of addresses; JAX's default, and longer
than the watch of `launch.peers`."""
_SECONDS_TO_LEAVE = 5.0
"""Grace period of a failed process for a clean shutdown, which waits for the others."""
FIRST_PORT, PORTS = 61440, 4096  # from the range that systems assign last
_LOST_CONTACT = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|(?i:gloo [\w -]+ failed|connection (closed|reset|refused)|"
    r"broken pipe|NCCL operation .* failed: (unhandled system error|remote process)|heartbeat|"
    r"coordination[ _]?service|barrier (timed out|failed|has failed))"
)
"""Pattern of XLA's errors from collectives that another process has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of this process in its group."""

    process: int
    """Rank of this process, from 0."""
    processes: int
    """Number of processes."""
    coordinator: str | None
    """Host and port of the coordinator, the first process; None if JAX asks the scheduler."""
    told_by: str
    """Source of these values: a variable or a scheduler."""

    @property
    def bind_address(self) -> str | None:
        """Address that the coordinator binds to: its own, if that is loopback (all processes are on
        this machine) or the numeric address of an interface; None, JAX's default of all addresses,
        if it is a name, which may resolve differently here than on other machines."""
        host = "" if self.coordinator is None else self.coordinator.rpartition(":")[0]
        return self.coordinator if host == "localhost" or _is_of_interface(host) else None

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes are on this machine: the coordinator is on loopback."""
        host = "" if self.coordinator is None else self.coordinator.rpartition(":")[0]
        return host in (LOOPBACK, "localhost", "[::1]")


def place_here(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process, read from the environment; None if it is the only one.

    Raises:
        ConfigError: if some of our variables are missing, or hold invalid numbers.
    """
    # `mpirun` starts its daemons with `srun`, one task per node, and processes inherit its
    # variables.
    place = _of_ours(environment) or _of_open_mpi(environment) or _of_slurm(environment)
    return place if place is not None and place.processes > 1 else None


def join(place: Place | None) -> None:
    """Join the process group, before JAX is first used; does nothing without a group.

    Raises:
        ConfigError: if not all processes join in time, or another program uses the port.
    """
    die_with_launcher()
    if place is None:
        return
    import jax

    # It would handle SIGTERM itself, which then would not stop the run.
    jax.config.update("jax_enable_preemption_service", False)
    if place.is_on_one_machine:
        _keep_collectives_here()
    try:
        # Python's handler would wait until the call within returns.
        with handling(signal.SIG_DFL, signal.SIGINT):
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
        # If our variables are complete, no scheduler is asked: JAX would give each process only its
        # first device, or need the right to read the pods of Kubernetes.
        cluster_detection_method="deactivate" if place.told_by == COORDINATOR else None,
        initialization_timeout=JOIN_TIMEOUT_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS,
        coordinator_bind_address=place.bind_address,
    )


def _keep_collectives_here() -> None:
    """Have gloo, which runs collectives between CPUs, listen on loopback.

    By default it listens on the address of the host name, which other machines may reach; JAX
    passes no address, and calls this function when it first needs collectives.
    """
    from jaxlib import _jax  # type: ignore[attr-defined]

    made = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = partial(made, hostname=LOOPBACK)


@contextmanager
def leaving_at_once(place: Place | None) -> Iterator[None]:
    """Exit this process within seconds if the code within fails, here or in another process.

    Left to itself, JAX would wait for a dead process up to its heartbeat timeout, and then abort
    with a stack of addresses; if this process failed, it would wait for the others, which wait for
    this one.
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
                code = error.exit_code if isinstance(error, ScalejaxError) else 1
            if code == ExitCode.REFUSED:
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
        os._exit(ExitCode.LOST)


def _leave_marker() -> None:
    with suppress(OSError):  # the refusal itself is printed anyway
        if marker := os.environ.get(REFUSAL_MARKER):
            Path(marker).touch()


def is_lost_contact(error: BaseException) -> bool:
    """Whether `error`, or its cause, means that another process could not be reached."""
    # Only XLA's errors have this type, which is compared by name to avoid importing JAX.
    is_xla = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if is_xla and _LOST_CONTACT.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_contact(error.__cause__)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


def die_with_launcher() -> None:
    """Have the system kill this process when its launcher exits for any reason."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
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
    """The place of a task of `srun`; None in a batch script itself, or a shell of `salloc`."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Place(
        process=_number(environment, "SLURM_PROCID"),
        processes=_number(environment, "SLURM_STEP_NUM_TASKS"),
        coordinator=_loopback(f"{job}.{step}") if nodes == 1 else None,
        told_by=SLURM,
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


def _is_of_interface(host: str) -> bool:
    """Whether `host` is the numeric address of an interface of this machine, not a name, the
    address of a load balancer, or that of all interfaces."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as found:
            found.bind((str(address), 0))  # the system refuses addresses of other machines
    except (OSError, ValueError):
        return False
    return not address.is_unspecified


def _loopback(job: str) -> str:
    """A loopback address derived from `job`, unlikely to be that of another job."""
    return f"{LOOPBACK}:{FIRST_PORT + zlib.crc32(job.encode()) % PORTS}"


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name)
    if value is None or not value.isdecimal():
        raise ConfigError(refusal(name, value, "it must be a whole number"))
    return int(value)
