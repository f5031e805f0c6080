"""`scalejax emulate` as it is typed: a folder, a table, a report, a sweep, a replay."""

import contextlib
import json
import signal

import pytest

from scalejax.cli.main import main
from scalejax.core.serialization import load
from scalejax.emulation.record import EMULATION, Emulation
from scalejax.training.record import RunRecord

RUN = """
seed = 3
[model]
name = "mlp"
hidden = [8]
[data]
name = "synthetic_images"
image_size = 4
channels = 1
classes = 4
train_examples = 512
test_examples = 64
[batch]
global_batch = 16
[optimizer]
name = "adagrad"
[schedule]
base_learning_rate = 0.05
warmup = "none"
[train]
epochs = 2
log_every_steps = 8
[emulation]
workers = 4
[emulation.algorithm]
name = "downpour"
n_push = 2
[emulation.timing]
gradient_seconds = 0.5
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A file with an [emulation], in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_a_run_is_emulated_shown_and_computed_again(run_file, tmp_path, capsys):
    """Its folder is that of a run, and its events give the same lines."""
    assert main(["emulate", "run.toml", "--folder", "a", "--events"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("downpour by 4 workers\n")
    assert "staleness" in printed
    found = load(Emulation, tmp_path / "a" / EMULATION)
    record = RunRecord.load(tmp_path / "a")
    assert record.status == "completed"
    assert [each.step for each in record.evaluations] == [32, 64]
    assert record.evaluations[-1].elapsed_seconds == found.virtual_seconds
    assert max(map(len, printed.splitlines())) <= 80

    assert main(["emulate", "a/run.toml", "--replay", "a"]) == 0
    assert capsys.readouterr().out == "a: all 10 lines of losses and accuracies are the same.\n"
    assert main(["emulate", "a/run.toml", "--replay", "a", "--seed", "4"]) == 2
    assert "at step 8 loss was" in " ".join(capsys.readouterr().err.split())

    assert main(["report", "a", "--output", "r.html"]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "Accuracy over virtual time" in page
    assert "downpour by 4 workers" in page


@pytest.mark.slow
def test_the_same_config_and_seed_give_the_same_curve(run_file, tmp_path):
    """Bit for bit, stragglers and failures included; another seed gives another."""
    weather = (
        *("--emulation.stragglers.cv", "0.3", "--emulation.stragglers.distribution", "lognormal"),
        *("--emulation.failures.worker_mtbf_seconds", "5"),
        *("--emulation.failures.worker_restart_seconds", "1"),
    )
    for folder, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main(["emulate", "run.toml", "--folder", folder, "--seed", seed, *weather]) == 0

    a, b, c = (
        [line for line in RunRecord.load(tmp_path / name).measurements if line.kind != "status"]
        for name in "abc"
    )
    assert a == b
    assert a != c


def test_an_algorithm_of_another_name_leaves_the_options_of_the_file(run_file, capsys):
    """Those of the same name stay; a second run in the folder is refused; so are conditions
    without a cluster."""
    assert main(["emulate", "run.toml", "--algorithm", "synchronous"]) == 0
    written = (run_file.parent / "runs" / "run-synchronous" / "run.toml").read_text()
    assert "n_push" not in written
    assert main(["emulate", "run.toml", "--algorithm", "downpour"]) == 0
    assert "n_push = 2" in (run_file.parent / "runs" / "run-downpour" / "run.toml").read_text()
    capsys.readouterr()

    assert main(["emulate", "run.toml", "--algorithm", "downpour"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["emulate", "run.toml", "--conditions.step_cv", "0.1", "--folder", "d"]) == 2
    assert "it is of a cluster: give --cluster NAME" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow  # emulates a run twice
def test_a_run_that_was_cut_off_is_begun_anew(run_file, tmp_path, monkeypatch):
    """A signal leaves a folder that says so, and no lock; the same command is enough."""
    from scalejax.emulation import run

    real = run.Lines.evaluated

    def interrupted(*arguments, **options):
        real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run.Lines, "evaluated", interrupted)
        assert main(["emulate", "run.toml", "--folder", "a"]) == 130
    assert RunRecord.load(tmp_path / "a").status == "interrupted"

    def swallowed(*arguments, **options):  # as in a callback of a garbage collection
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(run.Lines, "evaluated", swallowed)
        assert main(["emulate", "run.toml", "--folder", "a"]) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert main(["emulate", "run.toml", "--folder", "a"]) == 0
    record = RunRecord.load(tmp_path / "a")
    assert [each.status for each in record.statuses] == ["started", "completed"]


@pytest.mark.slow  # a worker process starts JAX
def test_a_sweep_emulates_runs_that_have_an_emulation(run_file, tmp_path, capsys):
    """Each of its runs is one."""
    varied = ("-V", "emulation.workers=[1, 4]", "--folder", "s", "--processes", "1")
    assert main(["sweep", "run.toml", *varied]) == 0

    folders = sorted((tmp_path / "s" / "runs").iterdir())
    times = [load(Emulation, folder / EMULATION).virtual_seconds for folder in folders]
    assert times[0] == pytest.approx(4 * times[1], rel=0.1)
    plan = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [fields["emulation.workers"] for fields in plan["runs"]] == [1, 4]


def test_a_sweep_refuses_what_cannot_be_emulated_before_its_first_run(run_file, tmp_path, capsys):
    """The run is named, and no other has been emulated by then."""
    varied = ("-V", "emulation.workers=[4, 3]", "--emulation.algorithm", '{name = "synchronous"}')
    assert main(["sweep", "run.toml", *varied, "--folder", "s"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "run 2 of 2 (" in error
    assert "batch.global_batch=16 is refused: it must be a multiple of 3" in error
    assert not (tmp_path / "s").exists()


def test_a_run_too_short_for_one_update_says_so(run_file, capsys):
    """A line search that has had no time to end leaves the parameters as they were."""
    algorithm = ("--algorithm", "sandblaster", "--train.epochs", "1", "--workers", "1")
    assert main(["emulate", "run.toml", *algorithm, "--folder", "a"]) == 0
    assert "gradients: too few for one" in " ".join(capsys.readouterr().out.split())
