"""Two revisions of a step in git: what is checked out, compiled and compared, and left clean."""

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_processes import is_running, wait_until
from hardware_cases import cluster_of
from program_cases import matmul, program_of

import scalejax
from scalejax.cli.main import main
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.models import gpt
from scalejax.planning import compare_revisions
from scalejax.planning.compare_revisions import Request, find_revision
from scalejax.planning.git_checkout import CommittedFile, checked_out, committed_file
from scalejax.simulator.comparison import Comparison

RULE = "UP = P(FSDP, None, TENSOR, None), P(FSDP, TENSOR)"
"""Where gpt.py says how the first layer of its feed-forward network is sharded."""
OWN = '''

class Own(Gpt):
    """GPT as a network of one's own."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs, **options):
        super().__init__(GptConfig(**options), dataset, rngs=rngs)
'''
RUN = """
[model]
name = "custom"
path = "nets:Own"
options = {layers = 2, hidden = 64, heads = 4}
[data]
name = "synthetic_tokens"
tokens = 64
vocabulary = 256
train_examples = 512
test_examples = 64
[batch]
per_device_batch = 4
[layout]
data = 2
tensor = 4
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
"""


def git(folder: Path, *words: str) -> str:
    """What a git command in `folder` prints."""
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository of one commit, the working folder: a copy of GPT, and a run of it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "nets.py").write_text(inspect.getsource(gpt) + OWN)
    (folder / "run.toml").write_text(RUN)
    serialization.save_toml(cluster_of(), tmp_path / "paper.toml")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=one")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def checkouts(repository: Path) -> list[str]:
    """Working trees besides the first, and temporary folders."""
    trees = git(repository, "worktree", "list", "--porcelain").split("\n\n")
    left = [str(path) for path in repository.parent.glob("scalejax-*")]
    return [tree for tree in trees[1:] if tree.strip()] + left


def request(**fields: object) -> Request:
    """What is compiled for: paper."""
    given = {"cluster_name": "../paper.toml", "device_count": None, "overrides": {}}
    return Request(cluster=cluster_of(), **{**given, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_checkout_has_the_files_of_the_commit_and_is_removed(repository: Path, how: signal.Signals):
    """Also when Ctrl-C or SIGTERM ends it; the hooks of the repository do not run."""
    called = repository.parent / "called"
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch '{called}'\n")
    hook.chmod(0o755)
    (repository / "run.toml").write_text("changed")
    file = committed_file(Path("run.toml"), "HEAD")

    with contextlib.suppress(KeyboardInterrupt), checked_out(file) as tree:
        assert (tree / file.path).read_text() == RUN
        assert len(checkouts(repository)) == 2  # the tree, and the folder that holds it
        signal.raise_signal(how)
        pytest.fail("the signal was ignored")

    assert checkouts(repository) == []
    assert not called.exists()
    assert git(repository, "status", "--porcelain") == " M run.toml\n"


def test_file_is_found_from_below_and_in_folders_that_are_gone(repository: Path):
    """Its path is that in the repository, wherever the command is typed."""
    (repository / "runs" / "old").mkdir(parents=True)
    (repository / "runs" / "old" / "run@2.toml").write_text(RUN)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message=two")
    git(repository, "rm", "-r", "--quiet", "runs")

    source = find_revision("runs/old/run@2.toml@HEAD", request())

    assert isinstance(source, CommittedFile)
    assert source.path == Path("runs/old/run@2.toml")
    assert source.commit == git(repository, "rev-parse", "HEAD").strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.toml@nowhere", "'nowhere' is not a commit of"),
        ("run.toml@", "'' is not a commit of"),
        ("run.toml@--help", "'--help' is not a commit of"),
        ("walk.toml@HEAD", r"commit \w{12} has no file 'walk\.toml'"),
        ("../run.toml@HEAD", "is in the working tree of no git repository"),
        ("walk.toml", "'walk.toml' does not exist"),
        ("program.json@HEAD", "only a run file can be taken at a commit"),
    ],
)
def test_revision_that_is_not_there_is_refused(repository: Path, text: str, message: str):
    """Before anything is checked out or compiled."""
    with pytest.raises(ConfigError, match=message):
        find_revision(text, request())


def test_commit_of_scalejax_is_refused_to_another_scalejax(repository: Path):
    """The working tree would be compiled by the one that runs, which is not of it."""
    (repository / "scalejax").mkdir()
    (repository / "scalejax" / "__init__.py").write_text("")

    with pytest.raises(ConfigError, match="it is of scalejax's own repository, and the scalejax"):
        find_revision("run.toml@HEAD", request())


def test_git_of_a_hook_does_not_mislead(repository: Path, monkeypatch: pytest.MonkeyPatch):
    """A pre-push hook of another repository calls scalejax with its GIT_DIR."""
    monkeypatch.setenv("GIT_DIR", str(repository / "nowhere"))

    assert committed_file(Path("run.toml"), "HEAD").repository == repository


def test_modules_are_those_of_the_checkout(repository: Path, monkeypatch: pytest.MonkeyPatch):
    """Folders of the working tree are left for those of the checkout, which come after the
    standard library and before installed packages; an environment in the repository stays."""
    tree, environment = Path("/tree"), repository / ".venv"
    site = environment / "site-packages"
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(site))
    monkeypatch.setattr(sys, "path", ["/lib/python", str(repository / "tools"), str(site)])
    (repository / "deep").mkdir()
    monkeypatch.chdir(repository / "deep")

    found = compare_revisions._search_path(repository, tree)

    assert found == ("/lib/python", "/tree/tools", "/tree/deep", "/tree", "/tree/src", str(site))


def test_refusal_of_a_run_file_names_its_commit(
    repository: Path, capsys: pytest.CaptureFixture[str]
):
    """By a process of its own, which knows neither flag nor commit; it takes 2 s to start."""
    serialization.save(program_of(matmul("m", 1)), Path("a.json"))
    words = ["compare", "a.json", "run.toml@HEAD", "--cluster", "../paper.toml"]

    assert main([*words, "--devices", "8", "--batch.per_device_batch", "0"]) == 2

    refused = " ".join(capsys.readouterr().err.split())
    assert "error: run.toml@HEAD: batch.per_device_batch=0 is refused" in refused
    assert checkouts(repository) == []


@pytest.mark.slow
def test_missing_axis_of_a_sharding_rule_is_seen_without_a_gpu(
    repository: Path, capsys: pytest.CaptureFixture[str]
):
    """One axis name less in one rule of GPT: its parameters are gathered over tensor in each layer.

    Losses and gradients are the same, so tests of those do not see it. Half a minute: four programs
    are compiled for the CPU.
    """
    assert RULE in (repository / "nets.py").read_text()
    own = (repository / "nets.py").read_text()
    words = ["run.toml", "--cluster", "../paper.toml", "--json", "out.json"]

    assert main(["compare", "run.toml@HEAD", *words]) == 0
    assert serialization.load(Comparison, Path("out.json")).changes == ()

    (repository / "nets.py").write_text(
        own.replace(RULE, RULE.replace("P(FSDP, TENSOR)", "P(FSDP)"))
    )
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        main(["compare", "run.toml@HEAD", *words])

    printed = " ".join(capsys.readouterr().out.split())
    assert "Beyond a bound: collectives over tensor move" in printed
    found = serialization.load(Comparison, Path("out.json"))
    gathered = [each for each in found.changes if each.name == "all_gather"]
    # of two layers, 64 x 256 in float32
    assert {(each.axes, each.payload_bytes, each.before_runs) for each in gathered} == {
        ("tensor", 64 * 256 * 4, 0)
    }
    assert checkouts(repository) == []


@pytest.mark.slow
def test_commits_without_their_network_are_refused_or_noted(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A module that is in the working tree alone is not the commit's; an installed one is of no
    commit, and a note says so. Half a minute to compile."""
    git(repository, "rm", "--quiet", "--cached", "nets.py")
    git(repository, "commit", "--quiet", "--message=two")
    words = ["compare", "run.toml@HEAD", "run.toml", "--cluster", "../paper.toml"]

    assert main(words) == 2
    assert "has no module 'nets', nor is one installed" in " ".join(capsys.readouterr().err.split())

    installed = repository.parent / "installed"
    installed.mkdir()
    (repository / "nets.py").rename(installed / "nets.py")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    assert main(words) == 0
    assert "'nets' is not of the commit: found in" in capsys.readouterr().out
    assert checkouts(repository) == []


CALLER = """
import os, signal, sys, time
from scalejax.core.workers import Worker
from scalejax.planning.compare_revisions import _COMPILE
worker = Worker({}, program=_COMPILE, search_path=sys.argv[1:])
while not os.path.exists(os.path.join(sys.argv[1], "at_work")):
    time.sleep(0.05)
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of the kernel")
def test_what_compiles_a_commit_ends_with_its_caller(tmp_path: Path):
    """Whatever scalejax the commit has: here one that is imported for ten minutes."""
    (tmp_path / "scalejax.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path(__file__).with_name('at_work').touch()\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", CALLER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(scalejax.__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        worker = int(caller.stdout.readline())

    assert wait_until(lambda: not is_running(worker), 60)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_comparison_leaves_nothing_behind(repository: Path, how: signal.Signals):
    """Ctrl-C, or a scheduler's limit, while it compiles: exit code 130, no checkout, no process
    that goes on."""
    scratch = repository.parent / "scratch"
    scratch.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(scratch),
        "PYTHONPATH": str(Path(scalejax.__file__).parents[1]),
    }
    words = ["run.toml@HEAD", "run.toml", "--cluster", "../paper.toml"]
    process = subprocess.Popen(
        [sys.executable, "-m", "scalejax", "compare", *words],
        env=environment,
        text=True,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "compiling for run.toml@HEAD ...\n"
    assert list(scratch.glob("scalejax-*"))
    time.sleep(2)  # until the compilers are at work

    process.send_signal(how)

    assert process.wait(120) == 130
    with process.stderr as said:
        assert said.read().endswith("interrupted\n")
    assert list(scratch.iterdir()) == []
    assert checkouts(repository) == []
    working = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(scratch) not in working
