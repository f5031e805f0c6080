"""Several processes train what one does, begin alike or not at all, and speak with one voice.

Processes are started as `scalejax.launch.Runner` starts them, few times, and each start does all
that these tests ask of it (`process_cases`). They exchange over loopback (gloo).

Tolerances. As in `test_conformance`: both runs are float32 and differ in the order of sums only,
which `RTOL` allows, relative to the largest entry of each array; one update fewer differs by
more than a hundred times as much (a test below shows that). Arrays that are zero but for
rounding, as the gradient of the bias of keys in attention, are held to `RTOL` of a hundredth of
the largest entry among arrays of their kind (parameters, statistics, a moment).
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import process_cases
import pytest
from process_cases import OF_FOUR, OF_TWO, TEST_EXAMPLES, UNEVEN, Case, outcome, restore_by, save_by

from scalejax.launch import Runner
from scalejax.training.features import open_examples
from scalejax.training.reporter import Silent

pytestmark = [
    pytest.mark.slow,  # eight processes are started that each import JAX, and compile
    pytest.mark.timeout(1800),  # a test may be the first to ask for all of them
]

RTOL = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compiles_quickly) -> Path:
    """Where processes leave checkpoints for others."""
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def saved_alone(folder) -> dict[str, np.ndarray]:
    """What this process has saved for others to restore."""
    return save_by(1, folder)


def called(processes: int, function: Any, folder: Path) -> tuple[Any, str]:
    """What `function` of `process_cases` gives in as many processes, and what they said."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALEJAX_CACHE", str(folder / "cache"))
        runner = Runner(-processes, cpu_devices=2, shows_all=True, out=said)
        try:
            return runner.run(function, folder=folder), said.getvalue()
        except Exception as error:
            raise AssertionError(said.getvalue()) from error


@pytest.fixture(scope="module")
def beginnings(folder, saved_alone) -> tuple[dict[str, Any], str]:
    """What two processes make of runs that they begin unlike, and of one that they do not."""
    return called(2, process_cases.beginnings, folder)


@pytest.fixture(scope="module")
def of_four(folder, beginnings) -> dict[str, Any]:
    """What four processes make of the layouts, and of checkpoints of others."""
    return called(4, process_cases.of_four, folder)[0]


@pytest.fixture(scope="module")
def of_two(folder, of_four) -> dict[str, Any]:
    """What two processes make of the layouts, and of checkpoints of four."""
    return called(2, process_cases.of_two, folder)[0]


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, dict[str, np.ndarray]]:
    """The references, as they are asked for."""
    return {}


def kind_of(name: str) -> str:
    """What the array `name` of a state is: "state/opt_state/0/mu" of one of Adam's means."""
    _, *parts = name.split("/")
    return "/".join(parts[:3]) if parts[0] == "opt_state" else parts[0]


def assert_same(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    """Losses, metrics and arrays agree but for rounding."""
    assert set(ours) == set(theirs)
    largest: dict[str, float] = {}
    for name, array in theirs.items():
        if name.startswith("state/"):
            top = float(np.abs(array).max())
            largest[kind_of(name)] = max(top, largest.get(kind_of(name), 0.0))
    for name, array in theirs.items():
        if name.startswith("state/"):
            top = max(float(np.abs(array).max()), largest[kind_of(name)] / 100)
            np.testing.assert_allclose(ours[name], array, rtol=0, atol=RTOL * top, err_msg=name)
        elif name != "crossing":
            np.testing.assert_allclose(ours[name], array, rtol=RTOL, err_msg=name)


def reference(case: Case, known: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """`case` on one device of this process, computed once."""
    key = repr(case.alone)
    if key not in known:
        known[key] = outcome(case.alone, jax.devices()[:1])
    return known[key]


@pytest.mark.parametrize("name", OF_TWO)
def test_two_processes_train_what_one_device_trains(name, of_two, on_one_device):
    """Losses, parameters, statistics, moments and test metrics after three updates."""
    found = of_two["outcomes"][name]

    assert set(OF_TWO[name].crossing) <= set(found["crossing"])
    assert_same(found, reference(OF_TWO[name], on_one_device))


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_processes_train_what_one_device_trains(name, of_four, on_one_device):
    """Likewise, with groups of devices of two and of four processes."""
    found = of_four["outcomes"][name]

    assert set(OF_FOUR[name].crossing) <= set(found["crossing"])
    assert_same(found, reference(OF_FOUR[name], on_one_device))


def test_the_tolerance_sees_one_missing_update(on_one_device, monkeypatch):
    """Parameters a third of the updates short are far outside of what rounding explains."""
    case = OF_TWO["fsdp"]
    whole = reference(case, on_one_device)
    monkeypatch.setattr(process_cases, "UPDATES", 2)
    short = outcome(case.alone, jax.devices()[:1])

    names = [name for name in whole if name.startswith("state/params")]
    worst = max(
        np.abs(short[name] - whole[name]).max() / np.abs(whole[name]).max() for name in names
    )
    assert worst > 100 * RTOL


# --- metrics ---


def test_metrics_are_of_examples_or_as_horovod_has_them(beginnings):
    """Both averages of 44 examples on four devices, by NumPy from the weights they are of."""
    of_examples, of_devices = (beginnings[0]["metrics"][name] for name in ("examples", "devices"))
    losses, hits = losses_and_hits(of_examples)
    rows = np.arange(TEST_EXAMPLES) % 32 // 8  # eight of a batch of 32 on each device
    by_device = [rows == device for device in range(4)]

    assert [int(here.sum()) for here in by_device] == [16, 12, 8, 8]
    for found, loss, accuracy in (
        (of_examples, losses.mean(), hits.mean()),
        (
            of_devices,
            np.mean([losses[here].mean() for here in by_device]),
            np.mean([hits[here].mean() for here in by_device]),
        ),
    ):
        assert found["metrics/test_loss"] == pytest.approx(loss, rel=1e-5)
        assert found["metrics/test_accuracy"] == pytest.approx(accuracy, rel=1e-6)
        assert found["metrics/examples"] == TEST_EXAMPLES
    apart = abs(of_examples["metrics/test_loss"] / of_devices["metrics/test_loss"] - 1)
    assert apart > 100 * 1e-5  # or the test could not tell one from the other


def losses_and_hits(found: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Of every test example, by the weights in `found`, in NumPy's float64."""
    run = UNEVEN.run
    rows = open_examples(run, "test", Silent()).take(np.arange(TEST_EXAMPLES))
    hidden = rows["inputs"].reshape(TEST_EXAMPLES, -1) / 255.0
    hidden = (hidden - run.dataset.pixel_mean) / run.dataset.pixel_std
    for layer in range(3):
        weights = (found[f"state/params/layers/{layer}/{kind}"] for kind in ("kernel", "bias"))
        kernel, bias = (each.astype(np.float64) for each in weights)
        hidden = hidden @ kernel + bias
        hidden = hidden if layer == 2 else np.maximum(hidden, 0)
    of_target = hidden[np.arange(TEST_EXAMPLES), rows["targets"]]
    return np.log(np.exp(hidden).sum(axis=1)) - of_target, hidden.argmax(axis=1) == rows["targets"]


# --- the first state, and what must be alike before it ---


SAID_OF_COPIES = {
    "alike": "nothing was refused",
    "whole": (
        "ConfigError: model.name='mlp' is refused: params/kernel of process 1 differs from that of "
        "process 0, before the first update; a network may draw random numbers only from its "
        "rngs, which follow from the seed, not from the process, the clock or NumPy."
    ),
    "in parts with copies": (
        "ConfigError: model.name='mlp' is refused: params/bias of process 1 differs from that of "
        "process 0, and 1 other array, before the first update; a network may draw random numbers "
        "only from its rngs, which follow from the seed, not from the process, the clock or NumPy."
    ),
    "in parts without copies": "nothing was refused",
    "restored": (
        "CheckpointMismatch: the checkpoint of step 7 is refused: params/kernel of process 1 "
        "differs from that of process 0, as they read it. All processes must see the same files, "
        "such as on a shared disk."
    ),
}


@pytest.mark.parametrize("how", SAID_OF_COPIES)
def test_a_state_that_differs_between_processes_is_refused(how, beginnings):
    """With the array and the process, the same words in both."""
    assert beginnings[0]["copies"][how] == SAID_OF_COPIES[how]


SAID_OF_BEGINNINGS = {
    "config": (
        "ConfigError: process 1 differs from process 0: seed=5 (process 0: 0), train.epochs=2 "
        "(process 0: 1). Give all processes the same run.toml, flags and data."
    ),
    "data": (
        "ConfigError: process 1 differs from process 0: data.train_examples=64 (process 0: 96), "
        "examples: train_examples=64 (process 0: 96). "
        "Give all processes the same run.toml, flags and data."
    ),
    "resume": (
        "ConfigError: process 1 differs from process 0: --resume=True (process 0: False). "
        "Give all processes the same run.toml, flags and data."
    ),
    "network": (
        "ConfigError: model.path='process_cases:OfItsProcess' is refused: params/head/bias of "
        "process 1 differs from that of process 0, before the first update; a network may draw "
        "random numbers only from its rngs, which follow from the seed, not from the process, the "
        "clock or NumPy."
    ),
    "checkpoint": (
        "ConfigError: process 1 differs from process 0: latest checkpoint=40 (process 0: 20). "
        "All processes must see the same folder, such as one on a shared disk."
    ),
}


@pytest.mark.parametrize("what", SAID_OF_BEGINNINGS)
def test_processes_that_begin_unlike_are_refused(what, beginnings):
    """Before anything is compiled or, of a state, before it is trained; the same words in both."""
    assert beginnings[0]["refused"][what] == SAID_OF_BEGINNINGS[what]


# --- checkpoints ---


@pytest.mark.parametrize(
    ("saved_by", "restored_by"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2)]
)
def test_what_any_number_of_processes_saved_any_other_restores(
    saved_by, restored_by, folder, saved_alone, beginnings, of_four, of_two
):
    """Every array bit for bit: parameters, statistics, moments, the step."""
    saved = {1: saved_alone, 2: beginnings[0]["saved"], 4: of_four["saved"]}[saved_by]
    restored = {
        (1, 2): lambda: beginnings[0]["restored from 1"],
        (4, 2): lambda: of_two["restored from 4"],
        (1, 4): lambda: of_four["restored from 1"],
        (2, 4): lambda: of_four["restored from 2"],
    }.get((saved_by, restored_by), lambda: restore_by(1, saved_by, folder))()

    assert set(restored) == set(saved)
    for name, array in saved.items():
        assert array.dtype == restored[name].dtype
        assert array.tobytes() == restored[name].tobytes(), name
    assert len(np.unique(saved["state/params/head/kernel"])) > 100  # a state with something in it


# --- who talks and writes ---


def test_only_the_first_process_talks(beginnings):
    """The others say nothing at all, on either stream, through a whole run; nor of refusals."""
    _, said = beginnings

    assert "completed: 9 steps" in said
    assert [line for line in said.splitlines() if line and not line.startswith("[0] ")] == []


def test_only_the_first_process_writes_and_each_file_once(beginnings):
    """But for states and weights, of which every process writes its part."""
    first, other = (
        [name for name in names if not name.startswith(("checkpoints", "weights"))]
        for names in beginnings[0]["written"]
    )
    finished = [name for name in first if not name.startswith(".")]  # drafts, renamed when whole

    assert other == []
    assert sorted(finished) == [
        "README.txt",
        "facts.json",
        "measurements.jsonl",  # begun, as the others are
        "measurements.jsonl",  # and opened, for lines to be added
        "prediction.json",
        "program.json",
        "run.toml",
        "time.jsonl",
    ]
