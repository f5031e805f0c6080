"""Commands of README, docs and AGENTS.md exist; figures are those that commands print."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

from scalejax.cli.commands import COMMANDS
from scalejax.cli.main import main, parse
from scalejax.config.data import FashionMnistConfig, MixtureConfig
from scalejax.config.optimizer import OptimizerConfig
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.training.record import EvaluationMeasurement, RunRecord

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ROOT / "docs" / "pages"
GUIDE = "".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.rglob("*.md")))
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
CHEAP = ("config show", "config fields", "schedule plot", "hardware")
"""Commands that are run as they stand; the others are only parsed here."""


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, those of the README first."""
    return re.findall(rf"```{language}\n(.*?)```", README + GUIDE + AGENTS, re.DOTALL)


def command_lines() -> list[str]:
    """Every line that one of them asks to be typed. Those of blocks "console" are run when the
    site is built, which shows what they print."""
    typed = "".join(blocks("bash") + blocks("console"))
    return [line.removeprefix("$ ") for line in typed.splitlines()]


SCALEJAX_LINES = [line for line in command_lines() if line.startswith("scalejax ")]


def test_two_commands_do_all_the_set_up():
    """One installs and runs the main job, one installs and passes the tests."""
    set_up = list(dict.fromkeys(line for line in command_lines() if "venv" in line))

    assert set_up == [
        "python3 -m venv .venv && .venv/bin/pip install '.[gpu-target]' "
        "&& .venv/bin/scalejax quickstart",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[gpu-target,test]' "
        "&& .venv/bin/python -m pytest -n auto --dist loadgroup",
    ]


def test_set_up_asks_for_extras_and_commands_that_exist():
    """The names between brackets, and the console command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for group in re.findall(r"\.\[(.*?)\]", README) for name in group.split(",")}

    assert extras == {"gpu-target", "test", "docs"}
    assert extras <= set(project["optional-dependencies"])
    assert project["scripts"] == {"scalejax": "scalejax.cli.main:main"}
    assert "quickstart" in COMMANDS


@pytest.mark.parametrize("line", SCALEJAX_LINES)
def test_command_of_the_documents_is_understood(line: str, monkeypatch: pytest.MonkeyPatch):
    """Its flags exist, and the run file that it names is there."""
    monkeypatch.chdir(ROOT)

    command, _ = parse(shlex.split(line)[1:])

    run_file = getattr(command, "run_file", None)
    assert run_file is None or run_file.is_file()


@pytest.mark.parametrize(
    "line", [line for line in SCALEJAX_LINES if any(f"scalejax {c}" in line for c in CHEAP)]
)
def test_cheap_command_of_the_documents_works(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Run as it stands, beside a copy of the examples."""
    (tmp_path / "scalejax").symlink_to(ROOT / "scalejax")
    monkeypatch.chdir(tmp_path)

    assert main(shlex.split(line)[1:]) == 0


def test_python_of_the_guide_works():
    """Three lines cost a function written without scalejax, typed beside it; 5 s to compile it."""
    (code,) = (block for block in blocks("python") if "profile_function" in block)

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "experiments" / "cost_any_function",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert 0 < float(done.stdout) < 1


def test_mixture_of_the_guide_is_one():
    """The block as it stands; its files are none."""
    (block,) = (block for block in blocks("toml") if "[[data.sources]]" in block)

    mixture = build(MixtureConfig, tomllib.loads(block)["data"], where="data")

    assert mixture.weights == (0.7, 0.3)
    assert len(mixture.locations) == 2


def test_schedule_of_the_guide_is_that_of_its_example():
    """Goyal et al. 2017, as the file has it."""
    (block,) = (block for block in blocks("toml") if "[schedule]" in block)
    example = ROOT / "scalejax/config/examples/resnet50_goyal2017.toml"

    assert tomllib.loads(block)["schedule"] == tomllib.loads(example.read_text())["schedule"]


def test_network_of_the_guide_trains_on_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks as they stand, and the tables that the guide leaves out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the folder is added
    (network,) = (block for block in blocks("python") if "(Network)" in block)
    (samples,) = (block for block in blocks("python") if "class Digits" in block)
    model, data = (block for block in blocks("toml") if '"custom"' in block)
    (tmp_path / "my_networks.py").write_text(network)
    (tmp_path / "my_data.py").write_text(samples)
    for part in ("train", "test"):
        source = open_source(FashionMnistConfig(edition="embedded"), part, seed=0)
        rows = source.take(np.arange(len(source)))
        np.save(tmp_path / f"{part}_x.npy", rows["inputs"])
        np.save(tmp_path / f"{part}_y.npy", rows["targets"].astype(np.uint8))
    (tmp_path / "run.toml").write_text(
        model
        + data
        + """
[batch]
global_batch = 400
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
"""
    )

    assert main(["train", "run.toml", "--folder", "run"]) == 0

    evaluations = [
        line
        for line in RunRecord.load(tmp_path / "run").measurements
        if isinstance(line, EvaluationMeasurement)
    ]
    assert evaluations[-1].test_accuracy > 0.5  # one epoch of a linear network


def test_table_of_the_readme_is_what_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Predicted beside published: no figure is kept by hand."""
    script = re.search(r"`python (experiments/\S+\.py)` prints", README)
    assert script is not None
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script.group(1)])

    runpy.run_path(script.group(1), run_name="__main__")

    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 3
    assert printed in README


def test_every_optimizer_has_its_row_with_the_distance_that_was_measured():
    """One row each, with a source, what it was held against, and the figures of their command."""
    path = ROOT / "experiments/optimizers_held/results.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["far"]
    section = README.partition("| optimizer | source | held against | how far off |")[2]
    table = section.partition("\n\n")[0].splitlines()[2:]
    rows = {cells[0]: cells[1:] for cells in (row.strip("| ").split(" | ") for row in table)}

    def written(distance: float) -> str:
        return f"{distance:.1e}".replace("e-0", "e-") if distance else "0"

    expected = {f"`{name}`": measured[name] for name in measured if "," not in name}
    del expected["`custom`"]  # another's, by import path
    cautious = {name: measured[f"{name}, cautious"]["NumPy"] for name in ("adamw", "lion")}
    expected["`adamw`, `lion`, `cautious`"] = cautious
    assert set(rows) == set(expected)
    here = [each for each in OptimizerConfig.members() if each.__module__.startswith("scalejax.")]
    names = {name for each in here for name in get_args(get_type_hints(each)["name"])}
    assert {name.strip("`") for name in rows if "," not in name} == names - {"custom"}
    for name, distances in expected.items():
        source, against, far_off = rows[name]
        assert re.search(r"arXiv \d{4}\.\d{5}|JMLR", source)
        assert ("`optax." in against) == ("Optax" in distances)
        assert far_off == "; ".join(map(written, distances.values()))


def test_readme_can_be_read_in_one_sitting():
    """140 lines at most, a quarter of them rows of tables to look up, and none of them a wall."""
    assert len(README.splitlines()) <= 140
    assert max(map(len, README.splitlines())) <= 400


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_files_that_a_document_links_to_are_there(document: str):
    """Links and pictures lead to files of the repository."""
    text = (ROOT / document).read_text(encoding="utf-8")

    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / document).parent.joinpath(link).is_file()


def test_files_that_the_architecture_names_are_there():
    """Paths that begin with a folder, of the root, the package or its simulator."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|toml|json|xz))`", text))
    package = ROOT / "scalejax"

    absent = [
        name
        for name in named
        if "NAME" not in name  # of what is to be added
        and not any((place / name).is_file() for place in (ROOT, package, package / "simulator"))
    ]
    assert len(named) > 50
    assert absent == []
