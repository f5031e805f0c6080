"""Commands of README, docs and AGENTS.md exist; figures are those that commands print."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import wheel_alone

from scalejax.cli.commands import COMMANDS
from scalejax.cli.main import main, parse
from scalejax.config.data import FashionMnistConfig, MixtureConfig
from scalejax.config.optimizer import OptimizerConfig
from scalejax.core.errors import ExitCode
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.training.record import EvaluationMeasurement, RunRecord

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "scalejax" / "config" / "examples"
PAGES = ROOT / "docs" / "pages"
GUIDE = "".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.rglob("*.md")))
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
_FEWER = {
    "train": "--train.epochs=1",
    "cost": "--devices=8 --confirm=0",
    "study warmup": "--optimizers=sgd:0.1 --batches=512 --warmup=none --scaling=none --seeds=1 "
    "--train.epochs=1",
    "validate": "step_times --family=paxml,torchtitan",
}
"""What is put behind a command of the documents, so that it takes seconds: an epoch, eight devices
without the compiler, one of each thing that is studied, two of the families of steps."""
_NOT_RUN = {
    "python3 -m venv": "installs, as .ci/run does",
    "scalejax quickstart": "test_tour_trains_predicts_and_reports runs it, for an epoch",
    "ruff check": "a stage of .ci/run",
    "python -m pytest": "runs these tests",
    "pip install 'scalejax": "no index has it",
}
"""Beginnings of lines that are not run by the test of all others, and why."""


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, those of the README first."""
    return re.findall(rf"```{language}\n(.*?)```", README + GUIDE + AGENTS, re.DOTALL)


def command_lines() -> list[str]:
    """Every line that one of them asks to be typed, or a workflow to be run. Those of blocks
    "console" are run when the site is built, which shows what they print."""
    typed = "".join(blocks("bash") + blocks("console")).splitlines()
    return [line.removeprefix("$ ") for line in typed] + WORKFLOW_LINES


WORKFLOW_LINES = re.findall(r"- run: (.*)", "".join(blocks("yaml")))
"""Of a checkout with a run.toml, which is not one of ours."""
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


@pytest.mark.slow  # builds it, predicts, trains an epoch, and writes a page and a report
def test_the_wheel_alone_has_all_that_the_tree_has(tmp_path: Path):
    """Each file of the package; and with nothing else on the path it does what the tree does.
    `tests/support/wheel_alone.py` installs it for each Python, and runs everything."""
    try:
        archive = wheel_alone.build(tmp_path / "dist")
    except ConnectionError as error:
        pytest.skip(str(error))
    with zipfile.ZipFile(archive) as files:
        files.extractall(tmp_path / "installed")
    tracked = subprocess.check_output(["git", "ls-files", "scalejax"], cwd=ROOT, text=True)
    work = tmp_path / "elsewhere"
    work.mkdir()
    (work / "run.toml").write_bytes(EXAMPLES.joinpath("fashion_gradual_warmup.toml").read_bytes())
    lines = (
        "predict modern.toml --cluster dgx-h100 --devices 8,4096 --json p.json",
        "train run.toml --folder run --train.epochs 1",
        "report run p.json --output report.html",
        "page gpt2-124m --cluster dgx-h100 --devices 8 --networks 1 --layouts 1 "
        "--batches 8 --frameworks xla --precisions bfloat16 --confirm 0 --output page.html",
        "validate hf_cluster_collectives_256MB",
    )
    (work / "modern.toml").write_bytes(EXAMPLES.joinpath("resnet50_modern.toml").read_bytes())
    code = "from scalejax.cli.main import main\n"
    code += f"assert all(main(line.split()) == 0 for line in {lines!r})\n"
    code += "import scalejax; print(scalejax.__file__)"

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=work,
        env=wheel_alone.alone(dict(os.environ), tmp_path / "cache")
        | {"PYTHONPATH": str(tmp_path / "installed"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )

    absent = [name for name in tracked.split() if not (tmp_path / "installed" / name).is_file()]
    assert absent == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(str(tmp_path / "installed/scalejax/__init__.py"))


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("WARNING: Retrying after connection broken by 'NewConnectionError'", ConnectionError),
        ("tomli.TOMLDecodeError: Invalid value", subprocess.CalledProcessError),
    ],
)
def test_a_wheel_that_cannot_be_built_fails_where_the_network_is_not_why(
    said: str, raised: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A broken pyproject.toml is no reason to skip."""
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho {shlex.quote(said)} >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))

    with pytest.raises(raised):
        wheel_alone.build(tmp_path)


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


def with_fewer(line: str) -> list[str]:
    """The words of a command, after `scalejax`, with those of `_FEWER`."""
    typed = line.removeprefix("scalejax ")
    fewer = [flags for name, flags in _FEWER.items() if typed.startswith(f"{name} ")]
    return shlex.split(" ".join((typed, *fewer)))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a run.toml, which a workflow compares with that of the main branch."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(EXAMPLES / "fashion_gradual_warmup.toml", folder / "run.toml")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (
        ("init", "--quiet"),
        ("add", "run.toml"),
        (*who, "commit", "--quiet", "--message", "Add a run"),
        ("update-ref", "refs/remotes/origin/main", "HEAD"),
    ):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


@pytest.mark.slow  # trains five runs and a study, costs a network on three clusters, compiles one
def test_blocks_of_the_documents_run(
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Each line once, in order and in one folder, as who reads them would type them; those of
    blocks "console" run as they stand when the site is built. The README shows what is printed, in
    80 columns but for what happened and what can be pasted; the run without warmup diverges."""
    for name in ("scalejax", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    typed = dict.fromkeys([*"".join(blocks("bash")).splitlines(), *WORKFLOW_LINES])
    lines = [line for line in typed if not line.startswith(tuple(_NOT_RUN))]
    printed = {}

    for line in lines:
        monkeypatch.chdir(checkout if line in WORKFLOW_LINES else tmp_path)
        try:
            code = main(with_fewer(line))
        except SystemExit as ended:
            code = ended.code
        printed[line], said = capsys.readouterr()
        expected = ExitCode.DIVERGED if "no_warmup" in line else 0
        assert code == expected, f"{line}\n{printed[line]}{said}"
        shown = (printed[line] + said).splitlines()
        wide = [each for each in shown if len(each.rstrip()) > 80]
        assert [each for each in wide if not each.startswith(("scalejax ", "diverged: "))] == []

    assert len(lines) > 15
    assert all(any(line.startswith(each) for line in typed) for each in _NOT_RUN)
    (code,) = (block for block in blocks("python") if "resnet50_modern" in block)
    monkeypatch.chdir(ROOT)
    exec(code, {})
    assert 0.04 < float(capsys.readouterr().out) < 0.05  # the first row of the README
    (shown,) = re.findall(r"```\n(resnet50 on .*?)```", README, re.DOTALL)
    predicted = next(out for out in printed.values() if out.startswith("resnet50 on"))
    assert shown in "".join(f"{each.rstrip()}\n" for each in predicted.splitlines())


@pytest.mark.slow  # compiles it in 5 s
def test_python_of_the_guide_works():
    """Three lines cost a function written without scalejax, typed beside it."""
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

    assert main(["train", "run.toml", "--folder", "run", "--json", "out.json"]) == 0

    evaluations = [
        line
        for line in RunRecord.load(tmp_path / "run").measurements
        if isinstance(line, EvaluationMeasurement)
    ]
    assert evaluations[-1].test_accuracy > 0.5  # one epoch of a linear network
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["status"], run["test_accuracy"]) == ("completed", evaluations[-1].test_accuracy)


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
