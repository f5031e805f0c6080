"""Processes are told who they are by launchers and schedulers, each in its own words."""

import pytest

from scalejax.errors import ConfigError
from scalejax.rendezvous import place_here

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
