"""Processes of one machine share its GPUs: JAX would take all of them in each."""

import io
import sys

import pytest

from scalejax.core.errors import ConfigError
from scalejax.launch import Launch, gpus, launch
from scalejax.launch.gpus import share


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["0,1", "2,3", "4,5", "6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "3, 5,6,7"}, ["3", "5", "6", "7"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,-1,4"}, [f"GPU-{x}" for x in "abcd"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [None] * 4),
        ({"JAX_PLATFORMS": "cpu"}, [None] * 4),
    ],
)
def test_each_process_sees_its_even_share(monkeypatch, environment, expected):
    """Of those that all would see, of a machine with eight."""
    monkeypatch.setattr(gpus, "nvidia_gpus", lambda: 8)

    shares = [share(process, 4, environment).get("CUDA_VISIBLE_DEVICES") for process in range(4)]

    assert shares == expected


@pytest.mark.parametrize("processes", [3, 16])
def test_what_cannot_be_shared_evenly_is_refused(monkeypatch, processes):
    """Three of eight, and more than there are; where there are none, nothing is."""
    monkeypatch.setattr(gpus, "nvidia_gpus", lambda: 8)

    with pytest.raises(ConfigError, match=f"processes={processes} is refused: .* the 8 GPUs"):
        share(0, processes, {})
    monkeypatch.setattr(gpus, "nvidia_gpus", lambda: 0)
    assert share(0, processes, {}) == {}


def test_one_process_keeps_all(monkeypatch):
    """Nobody else is there."""
    monkeypatch.setattr(gpus, "nvidia_gpus", lambda: 8)

    assert share(0, 1, {}) == {}


def test_launched_processes_are_told_their_share(tmp_path):
    """Each in its environment; they need not divide it themselves."""
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    job = Launch(
        command=(sys.executable, "-c", script),
        processes=2,
        shows_all=True,
        folder=tmp_path,
        environment={"CUDA_VISIBLE_DEVICES": "4,5,6,7", "JAX_PLATFORMS": ""},
    )
    said = io.StringIO()

    assert launch(job, said) == 0
    assert sorted(said.getvalue().splitlines()) == ["[0] 4,5", "[1] 6,7"]
