"""Processes are told who they are by launchers and schedulers, each in its own words."""

import os
import subprocess
import sys

import pytest

from scalejax.core.errors import ConfigError, ExitCode
from scalejax.core.process_group import place_here

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "3127574529",
}
OURS = {
    "SCALEJAX_COORDINATOR": "127.0.0.1:4567",
    "SCALEJAX_PROCESSES": "4",
    "SCALEJAX_PROCESS": "2",
}
POD = {
    "SCALEJAX_COORDINATOR": "run-workers-0-0.run:4567",
    "SCALEJAX_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
}


def place_in(environment):
    """The place in an environment that says one."""
    place = place_here(environment)
    assert place is not None
    return place


@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI, OURS, POD], ids=str)
def test_every_launcher_says_which_process_this_is(environment):
    """The third of four."""
    place = place_in(environment)

    assert (place.process, place.processes) == (2, 4)


@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI, OURS], ids=str)
def test_on_one_machine_the_first_process_listens_on_loopback_alone(environment):
    """And all of them know the same address."""
    place = place_in(environment)

    assert place.bind_address == place.coordinator
    assert str(place.coordinator).startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("host", "is_bound"),
    [
        ("127.0.0.2", True),  # as good as any interface
        ("192.0.2.7", False),  # TEST-NET-1: of nobody, as the address of a balancer
        ("0.0.0.0", False),
        ("node-0.run", False),
    ],
)
def test_the_coordinator_listens_on_its_own_interface_where_that_is_told_by_number(host, is_bound):
    """A name may lead to another address here than on other machines: as JAX has it."""
    place = place_in(OURS | {"SCALEJAX_COORDINATOR": f"{host}:4000"})

    assert place.bind_address == (f"{host}:4000" if is_bound else None)
    assert not place.is_on_one_machine


@pytest.mark.parametrize(
    "environment",
    [
        SLURM | {"SLURM_STEP_NUM_NODES": "2"},
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ],
    ids=["SLURM", "Open MPI"],
)
def test_on_several_machines_the_scheduler_is_asked(environment):
    """JAX reads the name of the first node from it."""
    assert place_in(environment).coordinator is None


def test_mpirun_within_an_allocation_of_slurm_says_more_than_the_daemon_that_it_started_by_srun():
    """Its processes inherit the variables of that, which is one task for each node."""
    daemon = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}

    place = place_in(daemon | OPEN_MPI)

    assert (place.process, place.processes, place.told_by) == (2, 4, "Open MPI")


def test_jobs_on_one_machine_meet_at_ports_of_their_own():
    """Two steps of a job, too."""
    places = [place_in(SLURM | {"SLURM_STEP_ID": str(step)}) for step in range(8)]

    assert len({place.coordinator for place in places}) == 8


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
        OURS | {"SCALEJAX_PROCESSES": "1", "SCALEJAX_PROCESS": "0"},
    ],
    ids=["nothing", "one task", "batch script", "one process"],
)
def test_a_process_alone_waits_for_no_others(environment):
    """Also within a job that has more tasks than this script is."""
    assert place_here(environment) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"SCALEJAX_PROCESS": "4"}, r"SCALEJAX_PROCESS=4 is refused: it must be from 0 to 3"),
        ({"SCALEJAX_PROCESSES": "many"}, r"SCALEJAX_PROCESSES='many' is refused"),
        ({"SCALEJAX_PROCESS": ""}, r"SCALEJAX_PROCESS='' is refused"),
    ],
)
def test_a_place_that_cannot_be_is_refused(change, told):
    """Naming the variable."""
    with pytest.raises(ConfigError, match=told):
        place_here(OURS | change)


FAILS = """
import atexit, sys, time
from scalejax.core import process_group

class JaxRuntimeError(RuntimeError):
    pass

process_group._SECONDS_TO_LEAVE = 0.3
atexit.register(time.sleep, 600)  # as JAX waits for the others
with process_group.leaving_at_once(
    process_group.Place(process=1, processes=2, coordinator=None, told_by="a test")
):
    try:
        raise JaxRuntimeError(sys.argv[1])
    except JaxRuntimeError as error:
        if len(sys.argv) > 2:
            raise RuntimeError("while saving") from error
        raise
"""


@pytest.mark.parametrize(
    ("said", "is_lost"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 96636764160 bytes.", False),
        ("INTERNAL: Failed to compile %opt-barrier.3", False),
        ("INVALID_ARGUMENT: Executable expected parameter 0 of size 4", False),
        ("FAILED_PRECONDITION: Gloo all-reduce failed: [a/b.cc:1] Timed out waiting 9ms", True),
        ("INTERNAL: [external/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:7", True),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error", True),
        ("UNAVAILABLE: failed to connect to all addresses", True),
        ("DEADLINE_EXCEEDED: Barrier timed out. Id: save::3", True),
    ],
)
def test_only_what_is_said_of_exchanges_is_lost_contact(said, is_lost):
    """All else ends with its own words, and code 1, by which the process is told from those that
    miss it; neither waits for the others."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILS, said], capture_output=True, text=True, timeout=240
    )

    assert ended.returncode == (ExitCode.LOST if is_lost else 1)
    assert ("Traceback" in ended.stderr) != is_lost
    assert said in ended.stderr


def test_lost_contact_is_also_told_from_what_was_being_done():
    """By the cause of what is raised."""
    said = "UNAVAILABLE: Barrier failed because: a task is gone"

    ended = subprocess.run([sys.executable, "-c", FAILS, said, "saving"], timeout=240)

    assert ended.returncode == ExitCode.LOST


@pytest.mark.parametrize(("kind", "is_left"), [("ConfigError", True), ("ValueError", False)])
def test_a_process_that_is_refused_leaves_the_marker_it_was_told(tmp_path, kind, is_left):
    """By which the script of SLURM knows."""
    marker = tmp_path / "refused-7"
    script = FAILS.replace(
        "raise JaxRuntimeError(", f"from scalejax.core.errors import ConfigError; raise {kind}("
    )
    environment = os.environ | {"SCALEJAX_REFUSAL_MARKER": str(marker)}

    ended = subprocess.run([sys.executable, "-c", script, "no"], env=environment, timeout=240)

    assert ended.returncode == (2 if is_left else 1)
    assert marker.exists() == is_left
