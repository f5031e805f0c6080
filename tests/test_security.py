"""What comes from outside runs nothing, is written nowhere but where it was asked to be, and is
listened to on this machine alone.

Trusted, and why: what our own processes write to each other through pipes and memory without a name
(`data.worker`, `input_taker`), and a `Runner` into a folder that this user alone can open
(`launch.runner`, `launch.called`): nobody else can put a pickle there. The module that `model.path`
names is the user's own program, and is run. Nothing else is.
"""

import ast
import contextlib
import gzip
import io
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_cases import random_images
from test_report import prediction, study, write_run

import scalejax
from scalejax.cli.main import main
from scalejax.config.data import NumpyConfig
from scalejax.core import serialization
from scalejax.core.errors import CheckpointMismatch, ConfigError, Damaged
from scalejax.data.convert import open_rows
from scalejax.data.convert.shards import _locked as locked_draft
from scalejax.data.facts import read_facts
from scalejax.launch.slurm import SlurmRun
from scalejax.report.html.report import write_report
from scalejax.training.checkpoint import Checkpoints

PACKAGE = Path(scalejax.__file__).parent


class Attack:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def called(tmp_path):
    """The file that an attack would leave."""
    path = tmp_path / "called"
    pickle.loads(pickle.dumps(Attack(path)))
    assert path.exists()  # it would indeed
    path.unlink()
    return path


# --- pickles ---


UNPICKLE = {
    "core/workers.py": "messages between our own processes, through sockets that only they hold",
    "launch/called.py": "the function of a Runner, in a folder of this user alone",
    "launch/runner.py": "its result, in the same folder",
    "xla/functions.py": "a function of the caller, sent to our own worker through a pipe",
    "models/torch_checkpoint.py": "an unpickler that knows five names, and refuses all others",
}
"""The files that unpickle, and why that is safe."""
READERS = {"load", "loads", "Unpickler", "_Unpickler", "open", "*"}
"""Names of what reads a pickle, in the modules that have such."""
FORBIDDEN = {"eval", "exec", "extractall", "extract", "unpack_archive", "mktemp", "system"}
"""Names that nothing in the package calls: they run text, or write where an archive says."""


def _calls():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path.relative_to(PACKAGE).as_posix(), node


def _called_name(node: ast.Call) -> tuple[str, str]:
    """("pickle", "load") of `pickle.load(...)`, ("", "eval") of `eval(...)`."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return getattr(owner, "id", getattr(owner, "attr", "")), node.func.attr
    return "", getattr(node.func, "id", "")


def _unpickles(tree: ast.AST) -> bool:
    """Whether a file calls, hands on, or imports by name what reads a pickle."""
    modules = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    owners = set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            owners |= {each.asname for each in node.names if each.asname and each.name in modules}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            if READERS & {each.name for each in node.names}:
                return True
        elif isinstance(node, ast.Attribute) and node.attr in READERS:
            if getattr(node.value, "id", getattr(node.value, "attr", "")) in owners:
                return True
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and getattr(node.value, "value", True) is not False
        ):
            return True
    return False


def test_no_other_file_unpickles():
    """Whoever adds one says here why what it reads is trusted."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if _unpickles(ast.parse(path.read_text(encoding="utf-8")))
    }

    assert found == set(UNPICKLE)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("import pickle; pickle.loads(x)", True),
        ("from pickle import loads; loads(x)", True),
        ("from pickle import loads as read; read(x)", True),
        ("import pickle as p; p.load(x)", True),
        ("import pickle; read = pickle.load", True),
        ("import numpy as np; np.load(x, allow_pickle=True)", True),
        ("import json; json.loads(x)", False),
        ("import pickle; pickle.dumps(x)", False),
        ("import numpy as np; np.load(x, allow_pickle=False)", False),
    ],
)
def test_a_file_that_unpickles_is_found_however_it_is_written(text, is_found):
    """By a name of its own, too."""
    assert _unpickles(ast.parse(text)) == is_found


def test_nothing_runs_text_or_extracts_an_archive():
    """Members of archives are read as streams, and their names lead nowhere."""
    found = {
        (path, name) for path, node in _calls() if (name := _called_name(node)[1]) in FORBIDDEN
    }

    assert not found


def _object_array(path: Path, called: Path) -> None:
    np.save(path, np.array([Attack(called)], object), allow_pickle=True)


def test_a_pickle_in_an_array_is_not_run(tmp_path, called):
    """Neither by a run nor by what looks at files or converts them."""
    for name in ("x_train", "y_train", "x_test", "y_test"):
        _object_array(tmp_path / f"{name}.npy", called)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for path in tmp_path.glob("*.npy"):
            archive.write(path, path.name)

    for location in (tmp_path / "a.npz", tmp_path):
        with pytest.raises(ConfigError, match=r"unpickling|Python objects"):
            read_facts(NumpyConfig(train=str(location), test=str(location)))
    for location in (tmp_path / "a.npz", tmp_path / "x_train.npy"):
        assert main(["data", "inspect", str(location)]) == 2
        assert main(["data", "convert", str(location), str(tmp_path / "out")]) == 2
    assert not called.exists()


def test_a_pickle_in_a_type_of_arrow_is_not_run(tmp_path, called):
    """Arrow once unpickled types of Python that a schema names (CVE-2023-47248)."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Attack(called)),
    }
    schema = pa.schema(
        [pa.field("x", pa.int64(), metadata=metadata), pa.field("label", pa.int64())]
    )
    pq.write_table(pa.table([[1, 2], [0, 1]], schema=schema), tmp_path / "t.parquet")

    main(["data", "inspect", str(tmp_path / "t.parquet"), "--verify"])
    main(["data", "convert", str(tmp_path / "t.parquet"), str(tmp_path / "out")])
    assert not called.exists()


def test_a_pickle_among_the_files_of_a_checkpoint_is_not_run(tmp_path, called):
    """In the place of each of its files in turn."""
    state = {"weights": np.arange(4.0)}
    with Checkpoints(tmp_path / "whole", keep=1) as checkpoints:
        checkpoints.save(1, state)
    files = [p for p in (tmp_path / "whole").rglob("*") if p.is_file()]
    assert len(files) > 2

    refused = 0
    for index, file in enumerate(files):
        damaged = tmp_path / str(index)
        shutil.copytree(tmp_path / "whole", damaged)
        (damaged / file.relative_to(tmp_path / "whole")).write_bytes(pickle.dumps(Attack(called)))
        try:
            with Checkpoints(damaged, keep=1) as checkpoints:
                checkpoints.restore(1, state)
        except (CheckpointMismatch, Damaged):
            refused += 1
    assert refused
    assert not called.exists()


# --- archives ---


def test_names_in_an_archive_lead_nowhere(tmp_path):
    """What is converted is written where it was asked to be, whatever the members are called."""
    array = io.BytesIO()
    np.save(array, random_images(3))
    labels = io.BytesIO()
    np.save(labels, np.arange(3))
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.writestr("../../escaped.npy", array.getvalue())
        archive.writestr(f"{tmp_path}/absolute.npy", labels.getvalue())

    main(["data", "convert", str(folder / "x.npz"), str(folder / "out")])

    outside = {p for p in tmp_path.rglob("*") if p.is_file() and folder not in p.parents}
    assert not outside


def _npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    file = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def test_an_array_that_says_it_is_larger_than_its_archive_gets_no_room(tmp_path):
    """A terabyte in a kilobyte: refused by its header, not by the end of the memory."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for part in ("train", "test"):
            archive.writestr(f"x_{part}.npy", _npy_header((10**6, 1000, 1000), "|u1") + bytes(1000))
            archive.writestr(f"y_{part}.npy", _npy_header((10**6,), "<i8") + bytes(1000))
    location = str(tmp_path / "a.npz")

    with pytest.raises(ConfigError, match=r"x_t\w+'\] is incomplete: .*1000000000\d+ bytes"):
        read_facts(NumpyConfig(train=location, test=location))


def test_a_file_that_says_its_rows_are_huge_is_read_in_pieces(tmp_path):
    """IDX with one image of 4 billion pixels on each side, and ten bytes of it."""
    header = b"\x00\x00\x08\x03" + np.array([1, 2**32 - 1, 2**32 - 1], ">u4").tobytes()
    (tmp_path / "images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(10)))
    labels = b"\x00\x00\x08\x01" + np.array([1], ">u4").tobytes() + b"\x00"
    (tmp_path / "labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    rows = open_rows(str(tmp_path / "images-idx3-ubyte.gz"))

    with pytest.raises(ConfigError, match=r"cannot be read .it ends too early"):
        list(rows.read(0, 1))


# --- locations and pages ---


@pytest.mark.parametrize(
    "changes",
    [
        {"folder": Path("runs/a\ntouch called\n")},
        {"name": "a\rb"},
        {"partition": "gpu\n#SBATCH --wrap=x"},
        {"options": ("account=a\nb",)},
        {"options": ("exclusive\ntouch called",)},
    ],
)
def test_a_newline_in_a_name_adds_nothing_to_a_batch_script(changes):
    """A directive of SLURM ends with its line, and what follows would be run."""
    about = {"command": ("true",), "run_marker": None, "processes": 1, "name": "a"}

    with pytest.raises(ConfigError, match="must be of one line"):
        SlurmRun(**{"folder": Path("runs"), **about, **changes})


def test_a_link_in_place_of_a_draft_leads_nowhere(tmp_path, monkeypatch):
    """Whoever may write to the folder guesses the name, and puts a link to a file of ours there."""
    other, path = tmp_path / "other", tmp_path / "prediction.json"
    other.write_text("ours")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".prediction.json.guessed").symlink_to(other)
    (tmp_path / ".part.parquet.draft").symlink_to(other)

    with pytest.raises(ConfigError, match="cannot be written"):
        serialization.save_text("theirs", path)
    with pytest.raises(OSError, match="symbolic links"):
        locked_draft(tmp_path / ".part.parquet.draft", tmp_path / "part.parquet")

    assert other.read_text() == "ours"
    assert not path.exists()


@pytest.mark.parametrize("location", ["shell://touch called", "no://x", "python://os:system"])
def test_a_url_runs_nothing(tmp_path, monkeypatch, location):
    """What no file system is known for is refused."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r"data\.train"):
        read_facts(NumpyConfig(train=location, test=location))
    assert not any(tmp_path.iterdir())


SCRIPT = "<script>alert(1)<!--"
"""A name for a folder: it has no slash."""


def test_a_report_shows_names_and_runs_none(tmp_path):
    """Of folders, in records and predictions: as text, in tables and in charts alike."""
    run = write_run(tmp_path / SCRIPT, [0.5, 0.6])
    other = write_run(tmp_path / '"><img src=x onerror=alert(1)>', [0.5, 0.7])
    scaling = tmp_path / "scaling.json"
    serialization.save(study(f"{SCRIPT}</script><script>alert(2)</script>"), scaling)
    single = tmp_path / "single.json"
    serialization.save(prediction(8, 0.1), single)
    single.write_text(single.read_text().replace("p100: attainable", SCRIPT))

    write_report([run, other, scaling, single], tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page  # it is shown
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    charts = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert charts is not None
    assert "<" not in charts[1]


# --- listening ---


LONG_RUN = """
model = { name = "mlp", hidden = [8] }
batch.global_batch = 16
optimizer.name = "sgd"
schedule.base_learning_rate = 0.01
train = { epochs = 1000, log_every_steps = 1000 }
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 640000
test_examples = 16
"""


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # it ended
            continue
        found += [each for child in children for each in _family(child)]
    return found


def _listening(pid: int) -> set[str]:
    """Addresses on which a process or its descendants listen, as /proc/net/tcp writes them."""
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":  # LISTEN
                sockets[f"socket:[{inode}]"] = local
    found = set()
    for each in _family(pid):
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{each}/fd").iterdir()]
        except OSError:
            continue
        found |= {sockets[link] for link in links if link in sockets}
    return found


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    mapped = "0000000000000000FFFF0000"  # ::ffff:, words of 4 bytes in the machine's order
    return host.removeprefix(mapped) == "0100007F" or host == "0" * 24 + "01000000"


def _elsewhere(tmp_path: Path) -> list[str]:
    """What runs a command where the name of this machine leads to an address of the network, as it
    does on most; nothing where it does so anyway. Skips the test where neither can be had."""
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    own = addresses.stdout.split()
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{own[0] if own else '::1'} elsewhere\n")
    script = f"hostname elsewhere && mount --bind {tmp_path}/hosts /etc/hosts"
    words = ["unshare", "--mount", "--uts", "sh", "-c"]
    can_tell = own and shutil.which("unshare")
    if can_tell and not subprocess.run([*words, script], capture_output=True).returncode:
        return [*words, f'{script} && exec "$@"', "sh"]
    try:
        leads_to = socket.gethostbyname(socket.gethostname())
    except OSError:
        leads_to = "127."
    if leads_to.startswith("127."):
        pytest.skip("the name of this machine leads to loopback, and that cannot be changed here")
    return []


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_of_one_machine_listen_on_loopback_alone(tmp_path):
    """The coordinator, and what carries their exchanges, wherever the machine's name leads."""
    (tmp_path / "run.toml").write_text(LONG_RUN)
    command = [sys.executable, "-m", "scalejax", "launch", "--np", "-2", "run.toml"]
    process = subprocess.Popen(
        [*_elsewhere(tmp_path), *command, "--folder", "run", "--cpu-devices", "1"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        heard: set[str] = set()
        deadline = time.monotonic() + 240
        # The coordinator, and an exchange of each of the two.
        while len(heard) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
            heard |= _listening(process.pid)
    finally:
        for each in _family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()

    assert len(heard) >= 3
    assert all(map(_is_loopback, heard)), heard
