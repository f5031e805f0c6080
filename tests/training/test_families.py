"""A model and a data set are one file each, which nothing else names."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from scalejax import load_cluster, predict
from scalejax.config.data import DataConfig
from scalejax.config.model import ModelConfig
from scalejax.config.reference import run_reference
from scalejax.config.run import RunConfig
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.training.reporter import Silent
from scalejax.training.train import train

TABLES = {
    "model": {"name": "toy"},
    "data": {"name": "stripes"},
    "batch": {"global_batch": 8},
    "optimizer": {"name": "sgd"},
    "schedule": {"base_learning_rate": 0.1},
}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files of a toy model and a toy data set, imported, and forgotten again."""
    with monkeypatch.context() as patch:
        for family in (ModelConfig, DataConfig):
            patch.setattr(family, "_members", list(family._members))
        for module in ("toy_model", "toy_data"):
            patch.delitem(sys.modules, module, raising=False)
            import_module(module)
        yield
    serialization._adapter.cache_clear()


def test_a_model_and_a_data_set_of_a_file_each_are_trained(toys: None, tmp_path: Path):
    """Two steps; and the list of fields has them, last of their table."""
    config = serialization.build(RunConfig, TABLES)

    record = train(config, tmp_path / "run", device_count=2, reporter=Silent())
    titles = [table.title for table in run_reference()]

    assert (record.status, record.training[-1].step) == ("completed", 2)
    assert {"[model] name = toy", "[data] name = stripes"} < set(titles)


def test_what_nothing_imports_is_unknown():
    """A name is of the modules that were imported."""
    with pytest.raises(ConfigError, match=r"model\.name='toy'"):
        serialization.build(RunConfig, TABLES)


@pytest.mark.slow
def test_a_model_and_a_data_set_of_a_file_each_are_predicted(toys: None):
    """Compiled by a worker process, which imports the modules of what it compiles."""
    config = serialization.build(RunConfig, TABLES)

    prediction = predict(config, load_cluster("dgx1-p100"), 4)

    assert prediction.fits
    assert prediction.step_seconds > 0
