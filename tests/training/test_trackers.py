"""Trackers show what is in the record: by the same names, each step once, also after a resume."""

import importlib
import importlib.util
import socket
import struct
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.heartbeat import Heartbeat
from scalejax.core.serialization import build
from scalejax.training import trackers
from scalejax.training.logger import MetricsLogger
from scalejax.training.record import RunFolder, StatusChange
from scalejax.training.reporter import Silent
from scalejax.training.time_accounting import RunClock
from scalejax.training.trackers import Tracker, require_trackers, tracked_values
from scalejax.training.train import train

Values = dict[str, dict[int, list[float]]]
"""What a tracker shows: by metric and step, each value that was written."""


def config_of(tracker: str) -> RunConfig:
    """A run of 12 updates with checkpoints after 4 and 8."""
    tables: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [4]},
        "data": {
            "name": "synthetic_images",
            "image_size": 4,
            "channels": 1,
            "classes": 3,
            "train_examples": 60,
            "test_examples": 8,
            "validation_fraction": 0.2,
        },
        "batch": {"global_batch": 8},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.01},
        "train": {
            "epochs": 2,
            "log_every_steps": 1,
            "checkpoint_every_steps": 4,
            "layer_gradient_norms": True,
        },
        "tracking": {"trackers": [tracker], "project": "a project"},
    }
    return build(RunConfig, tables)


def read_tensorboard(folder: Path) -> Values:
    """By TensorBoard's own reader."""
    from tensorboard.backend.event_processing import (  # pyright: ignore[reportMissingImports]
        event_accumulator,
    )

    events = event_accumulator.EventAccumulator(str(folder)).Reload()
    found: Values = {}
    for name in events.Tags()["scalars"]:
        found[name] = defaultdict(list)
        for each in events.Scalars(name):
            found[name][each.step].append(each.value)
    return found


def read_wandb(folder: Path) -> Values:
    """By the records of W&B's own protocol, which `wandb sync` sends; they lie in blocks of 32 KiB
    as in a log of LevelDB, each part behind its checksum, length and kind."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(600):  # a process of its own writes it
        found, has_ended = _parsed(path.read_bytes())
        if has_ended:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def _parsed(data: bytes) -> tuple[Values, bool]:
    """The values in a file of W&B, and whether it has its last record."""
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    at, whole, has_ended = 7, b"", False
    found: Values = defaultdict(lambda: defaultdict(list))
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record, whole = records.Record.FromString(whole), b""
            items = {"/".join(each.nested_key) or each.key: each for each in record.history.item}
            for name, item in items.items():
                if not name.startswith("_"):
                    step = int(items["_step"].value_json)
                    found[name][step].append(float(item.value_json))
            has_ended = has_ended or record.HasField("exit")
    return found, has_ended


def read_mlflow(folder: Path) -> Values:
    """By MLflow's client."""
    import mlflow  # pyright: ignore[reportMissingImports]

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'a project'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["batch.global_batch"] == "8"
    found: Values = {}
    for name in run.data.metrics:
        found[name] = defaultdict(list)
        for each in client.get_metric_history(run.info.run_id, name):
            found[name][each.step].append(each.value)
    return found


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


class Killed(Exception):
    """The run ends as by a kill: with no status."""


class KilledAt(Silent):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def measured(self, measurement: Any) -> None:
        """Raise after the step."""
        if measurement.step == self.step and not isinstance(measurement, StatusChange):
            raise Killed


@pytest.mark.slow_except("tensorboard", "wandb")  # MLflow makes its database in 5 s
@pytest.mark.parametrize("tracker", READERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers' own packages
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_tracker_shows_the_record_once_after_a_kill(tracker, tmp_path, monkeypatch):
    """What was written after the checkpoint and is trained again is there once, what was not yet
    written when the run was killed is there too; and nothing is sent anywhere."""
    pytest.importorskip("tensorboardX" if tracker == "tensorboard" else tracker)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    connect, asked = socket.socket.connect, []

    def noting(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1"):
            asked.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noting)
    folder, config = tmp_path / "run", config_of(tracker)
    with monkeypatch.context() as killing:
        if tracker == "mlflow":  # what waits for its next transaction is lost
            killing.setattr("scalejax.training.trackers._Mlflow.close", lambda *_: None)
        with pytest.raises(Killed):
            train(config, folder, device_count=1, reporter=KilledAt(6))
    record = train(config, folder, device_count=1, resume=True)

    expected: dict[tuple[str, int], float] = {}
    for line in record.measurements:
        expected |= {(name, line.step): value for name, value in tracked_values(line).items()}
    shown = READERS[tracker](folder / "trackers" / tracker)
    values = {(name, step): value for name, steps in shown.items() for step, value in steps.items()}
    assert values.keys() == expected.keys()
    assert {len(each) for each in values.values()} == {1}
    bitwise = {name for name, _ in expected} - {name for name, _ in expected if "second" in name}
    for (name, step), value in expected.items():
        if name in bitwise:  # times of steps trained again are others: MLflow keeps the first
            # TensorBoard keeps float32.
            assert values[name, step][0] == pytest.approx(value, rel=1e-7), (name, step)
    assert {"train/loss", "validation/accuracy", "test/loss"} <= bitwise
    assert any(name.startswith("train/layer_gradient_norms/") for name in bitwise)
    assert not asked


def test_norms_of_layers_add_up_to_the_norm_of_the_gradient(tmp_path):
    """Their squares do, in each logged update; the layers are those of the network."""
    config = build(
        RunConfig,
        {
            "model": {"name": "gpt", "layers": 2, "hidden": 8, "heads": 2},
            "data": {
                "name": "synthetic_tokens",
                "vocabulary": 11,
                "tokens": 6,
                "train_examples": 16,
                "test_examples": 4,
            },
            "batch": {"global_batch": 4},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.01},
            "clipping": {"max_norm": 1e-3},
            "layout": {"data": 1},
            "train": {"log_every_steps": 1, "layer_gradient_norms": True},
        },
    )
    for line in train(config, tmp_path / "run", reporter=Silent()).training:
        norms = line.layer_gradient_norms
        assert norms is not None
        assert {"blocks/0", "blocks/1"} <= norms.keys()
        squares = [value**2 for value in norms.values() if value is not None]
        # Sums of a thousand squares in float32, in another order.
        assert np.sqrt(sum(squares)) == pytest.approx(line.gradient_norm, rel=1e-5)


def test_opening_a_tracker_is_no_time_of_the_run(tmp_path, monkeypatch):
    """Else the time to an accuracy would be longer with one."""
    monkeypatch.setattr("scalejax.training.logger.open_trackers", lambda *_: time.sleep(0.5) or [])
    files = RunFolder(path=tmp_path)
    begin = time.perf_counter()
    logger = MetricsLogger(
        files, Silent(), Heartbeat(None), RunClock(), after_step=0, config=config_of("wandb")
    )
    assert logger.elapsed_seconds < time.perf_counter() - begin - 0.4
    logger.close()


def test_a_tracker_that_cannot_be_opened_is_told_and_left_out(tmp_path, monkeypatch):
    """As a server that does not answer: the run is not ended by it."""

    class Away(Tracker):
        name = "tensorboard"

        def __init__(self, *_):
            raise ConnectionRefusedError("nobody answers")

        def write(self, step, values, unix_seconds): ...

        def close(self, status): ...

    monkeypatch.setitem(trackers._TRACKERS, "tensorboard", Away)
    said: list[str] = []

    opened = trackers.open_trackers(config_of("tensorboard"), RunFolder(path=tmp_path), said.append)

    assert not opened
    assert said == ["Note: tensorboard is left out, as it could not be opened: nobody answers"]


def test_a_missing_package_is_refused_with_the_command_that_brings_it(monkeypatch):
    """Before anything is compiled."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name)
    )
    with pytest.raises(
        ConfigError, match=r"wandb is not installed: run pip install 'scalejax\[track"
    ):
        require_trackers(config_of("wandb").tracking)


@pytest.mark.parametrize(
    ("tracking", "words"),
    [
        ({"trackers": []}, "each once"),
        ({"trackers": ["wandb", "wandb"]}, "each once"),
        ({"trackers": ["comet"]}, "tracking.trackers"),
        ({"trackers": ["wandb"], "project": "a/b"}, "tracking.project='a/b' is refused"),
    ],
)
def test_refusals(tracking, words):
    """At the door, by the name of the field."""
    with pytest.raises(ConfigError, match=words):
        build(RunConfig, {**plain_tables(), "tracking": tracking})


def plain_tables() -> dict[str, Any]:
    """The other tables of a run."""
    return {
        "model": {"name": "mlp"},
        "data": {"name": "fashion_mnist"},
        "batch": {"global_batch": 8},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.01},
    }
