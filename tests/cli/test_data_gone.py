"""A finished run can be looked at, and predicted, when its data is gone."""

import shutil

import numpy as np
import pytest
from program_cases import PAPER, matmul, program_of

from scalejax.cli.main import main
from scalejax.config.run import load_config
from scalejax.core import serialization
from scalejax.planning import scaling_study
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.results import recorded_sweep
from scalejax.training.train import train

RUN = """
[model]
name = "mlp"
hidden = [8]
[data]
name = "numpy"
train = "{path}"
test = "{path}"
[batch]
global_batch = 4
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
[layout]
data = 1
[train]
epochs = 2
log_every_steps = 1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with run.toml, paper.toml, and two finished runs whose data is gone."""
    place = tmp_path_factory.mktemp("gone")
    data, classes = place / "arrays.npz", np.arange(16) % 3
    images = np.random.default_rng(0).integers(256, size=(16, 4, 4), dtype=np.uint8)
    np.savez(data, x_train=images, y_train=classes, x_test=images, y_test=classes)
    (place / "run.toml").write_text(RUN.format(path=data))
    train(load_config(place / "run.toml"), place / "one")
    serialization.save(program_of(matmul("m", 1.0), devices=1), place / "one" / "program.json")
    shutil.copytree(place / "one", place / "two")
    serialization.save_toml(PAPER, place / "paper.toml")
    data.unlink()
    return place


@pytest.mark.parametrize(
    "command",
    [
        "report {one} --output {out}/report.html",
        "config show {one}",
        "config show {one}/run.toml",
        "schedule plot {one} --output {out}/plot.svg",
        "calibrate --from {one} {two} --cluster {paper} --output {out}",
        "predict {one}/run.toml --cluster {paper} --devices 1,2",
        "predict {run} --facts {one}/facts.json --cluster {paper} --devices 1,2",
    ],
)
def test_a_finished_run_needs_no_data(place, tmp_path, monkeypatch, command):
    """The run keeps the counts and shapes of its data."""
    compiled = [program_of(matmul("m", 1.0), devices=count) for count in (1, 2)]
    monkeypatch.setattr(scaling_study, "profile_many", lambda jobs, on_progress, **_: compiled)
    names = {name: place / name for name in ("one", "two")}
    names |= {"run": place / "run.toml", "paper": place / "paper.toml", "out": tmp_path}

    assert main(command.format(**names).split()) == 0


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("config show {run}", "arrays.npz"),
        ("config show {one} --data.train other.npz", "data.train='other.npz'"),
        ('config show {one} --model={{name="vit",patch=3,hidden=8,heads=1}}', "data.image_size=4"),
        ("predict {run} --cluster dgx-h100 --devices 1", "arrays.npz"),
        ("explain {run} --cluster dgx-h100 --devices 1 --facts {one}/run.toml", "run.toml"),
        ("train {one}/run.toml --folder {out}", "arrays.npz"),
        ("launch {one}/run.toml --np -1 --folder {out}", "arrays.npz"),
    ],
)
def test_data_is_missed_where_it_is_needed(place, tmp_path, capsys, command, refused):
    """What trains reads the data anew; so does what has no facts of it, or of other data."""
    names = {"one": place / "one", "run": place / "run.toml", "out": tmp_path / "out"}

    assert main(command.format(**names).split()) == 2
    assert refused in capsys.readouterr().err


def test_a_run_of_an_earlier_version_reads_its_data(place, tmp_path, capsys):
    """It kept no facts."""
    older = tmp_path / "older"
    shutil.copytree(place / "one", older)
    (older / "facts.json").unlink()

    assert main(["config", "show", str(older)]) == 2
    assert "arrays.npz" in capsys.readouterr().err
    assert main(["report", str(older), "--output", str(tmp_path / "report.html")]) == 0


def test_a_sweep_is_read_without_data(place, tmp_path):
    """With the facts that each of its runs kept."""
    folder = SweepFolder(path=tmp_path)
    shutil.copy(place / "run.toml", folder.run_file)
    folder.plan.write_text('{"runs": [{}], "cpu_devices": null, "target": null}')
    shutil.copytree(place / "one", folder.run(0).path)

    _, (row,) = recorded_sweep(tmp_path)

    assert row.status == "completed"
    assert row.planned.run.total_steps == 8
