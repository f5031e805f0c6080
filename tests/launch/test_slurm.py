"""A run is handed to SLURM as a script that one can read, and followed to its end."""

import importlib.util
import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from scalejax.api import train
from scalejax.cli.main import main
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError, ExitCode
from scalejax.launch import Launch, launch, slurm
from scalejax.launch.nodes import Nodes
from scalejax.launch.places import Elastic, Places
from scalejax.launch.slurm import SlurmRun, follow, script, submit
from scalejax.training.record import RunRecord, figures

# Found, not imported: how the package imports it is tested here.
needs_submitit = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="needs submitit"
)
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "scalejax" / "config" / "examples" / "fashion_no_warmup.toml"
CODE = (
    "import sys; from scalejax.cli.main import main; from scalejax.launch import slurm; "
    "slurm.SECONDS_BETWEEN_LOOKS = 0.2; sys.exit(main())"
)
RUN = """
seed = 3
[model]
name = "mlp"
hidden = [16]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 200
test_examples = 30
[batch]
global_batch = 8
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
warmup = "none"
[train]
epochs = 1
"""


def run(folder, **changes):
    """Eight processes on nodes of four GPUs."""
    values = {
        "command": ("python", "train", "a file.toml"),
        "run_marker": folder / "run.toml",
        "processes": 8,
        "gpus_per_node": 4,
        "most_restarts": 2,
        "folder": folder / "slurm",
        "name": "a-run",
    }
    return SlurmRun(**values | changes)


def options_of(text):
    """Options of sbatch in a script."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    return dict(line.partition("=")[::2] for line in lines)


@needs_submitit
def test_the_script_asks_for_what_the_flags_say(tmp_path):
    """Two nodes have the GPUs; further options are passed on; nothing else is asked for."""
    given = ("account=vision", "--cpus-per-task=6", "reservation=night", "setup=module load cuda")

    text = script(run(tmp_path, partition="gpu", time="2:00:00", options=given))

    options = options_of(text)
    output = options.pop("output")
    assert Path(output).parent == tmp_path / "slurm"
    assert options == {
        "account": "vision", "cpus-per-task": "6", "reservation": "night", "partition": "gpu",
        "time": "2:00:00", "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4",
        "job-name": "a-run", "open-mode": "append", "requeue": "", "signal": "TERM@120",
    }  # fmt: skip
    assert "\nmodule load cuda\n" in text
    assert "--wait=120 --cpus-per-task=6 python train 'a file.toml' $resume" in text


@needs_submitit
def test_a_percent_sign_of_a_folder_is_none_of_a_pattern(tmp_path, monkeypatch):
    """SLURM fills in %j, submitit %t too, and both would write to another folder than the one in
    which the log is looked for."""
    sbatch, folder = tmp_path / "sbatch", tmp_path / "100%train 50%j"
    sbatch.write_text("#!/bin/sh\ncat > /dev/null\necho '7;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    text = script(a_run := replace(run(tmp_path), folder=folder))
    job_id, log = submit(a_run)

    doubled = f"{tmp_path}/100%%train 50%%j"
    assert f"#SBATCH --output='{doubled}/%j_0_log.out'" in text.splitlines()
    assert f"srun --unbuffered --output '{doubled}/%j_%t_log.out' " in text
    assert (job_id, log) == ("7", folder / "7_0_log.out")
    assert (folder / "7_submission.sh").read_text() == text


@needs_submitit
def test_what_slurm_says_to_a_job_is_passed_on(tmp_path, monkeypatch):
    """Such as that there is no such partition."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    with pytest.raises(ConfigError, match="refused by SLURM: sbatch: error: no such partition;"):
        submit(run(tmp_path))


@needs_submitit
def test_logs_of_others_stay_open(tmp_path, monkeypatch):
    """Though submitit, as it is imported, would set up logging and close them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "submitit"]:
        monkeypatch.delitem(sys.modules, name)
    log = logging.FileHandler(tmp_path / "log")

    script(run(tmp_path))

    assert log.stream is not None
    log.close()


@needs_submitit
def test_a_job_that_begins_elsewhere_finds_its_files(tmp_path, monkeypatch, capsys):
    """The run, and the folder whose record says that it can go on, by whole paths."""
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(RUN)

    main(["launch", "a.toml", "--np", "4", "--folder", "out", "--dry-run"])

    said = capsys.readouterr().out
    assert f"train {tmp_path}/a.toml --folder {tmp_path}/out $resume" in said
    assert f"-e {tmp_path}/out/" in said


@needs_submitit
def test_a_refusal_of_one_process_is_not_tried_again(tmp_path):
    """Though srun says the code of another, which the kill of the step has ended."""
    for name, does in (("srun", 'touch "$SCALEJAX_REFUSAL_MARKER"; exit 137'), ("scontrol", "")):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/calls\n{does}\n")
        command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}

    done = subprocess.run(["bash", "-c", script(run(tmp_path))], env=environment)

    assert done.returncode == 2
    assert (tmp_path / "calls").read_text().split() == ["srun"]


@needs_submitit
@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [
        (0, 0, False),
        (2, 0, False),
        (3, 0, False),
        (130, 0, False),
        (ExitCode.DAMAGED, 0, True),
        (ExitCode.LOST, 0, True),
        (ExitCode.TRANSIENT, 0, True),
        (143, 1, True),
        (137, 0, True),
        (137, 2, False),
    ],
)
def test_the_script_goes_back_into_the_queue_for_what_may_go_well(
    tmp_path, code, restarts, is_requeued
):
    """Run by bash, with commands of SLURM that note how they were called. A process that was killed
    is a lost one."""
    (tmp_path / "run.toml").touch()
    for name, ends in (("srun", code), ("scontrol", 0)):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\nexit {ends}\n')
        command.chmod(0o755)
    text = script(run(tmp_path))
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}
    if restarts:
        environment["SLURM_RESTART_COUNT"] = str(restarts)

    done = subprocess.run(["bash", "-c", text], env=environment)

    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == (ExitCode.LOST if code == 137 else code)
    assert calls[1:] == (["scontrol requeue 7"] if is_requeued else [])
    assert calls[0].endswith(" --resume") == bool(restarts)


@needs_submitit
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_is_requeued_does_not_start_over_again(tmp_path, restarts):
    """What the first start trained is not to be lost to a checkpoint that is damaged since."""
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    srun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}
    environment["SLURM_RESTART_COUNT"] = str(restarts)

    text = script(run(tmp_path, once=("--start-over",), run_marker=None))
    subprocess.run(["bash", "-c", text], env=environment, check=True)

    assert (tmp_path / "calls").read_text().endswith(" --start-over\n") == (not restarts)


@needs_submitit
def test_the_script_goes_back_into_the_queue_once_for_what_is_damaged(tmp_path):
    """The second try takes what was stored before it; the same end again is for a person."""
    for name, ends in (("srun", ExitCode.DAMAGED), ("scontrol", 0)):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/calls\nexit {ends}\n")
        command.chmod(0o755)
    text = script(run(tmp_path))
    (tmp_path / "slurm").mkdir(exist_ok=True)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}

    for _ in range(2):
        subprocess.run(["bash", "-c", text], env=environment, check=False)

    assert (tmp_path / "calls").read_text().split() == ["srun", "scontrol", "srun"]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"nodes": 3}, "np=8 is refused: it must be a multiple of the 3 nodes"),
        ({"nodes": 1}, "gpus_per_node=4 is refused: 8 processes of a node need a GPU each"),
        ({"options": ("nodes=2",)}, "slurm='nodes=2' is refused: there is a flag for it, --nodes"),
        ({"options": ("--ntasks=2",)}, "there is a flag for it, --np"),
        ({"options": ("--account",)}, "slurm='--account' is refused: it must be an option"),
        ({"gpus_per_node": 0}, "gpus_per_node=0 is refused"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_submitted(tmp_path, changes, refused):
    """Naming the flag."""
    with pytest.raises(ConfigError, match=refused):
        run(tmp_path, **changes)


def test_without_slurm_or_submitit_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    """Exit code 2, and how to go on."""
    command = ["launch", str(EXAMPLE), "--np", "4", "--folder", str(tmp_path / "run")]
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main(command) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no SLURM on this machine (no sbatch); --np -4 starts" in said

    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main([*command, "--dry-run"]) == 2
    assert "pip install 'scalejax[slurm]'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("JobState=COMPLETED ExitCode=0:0", 0),
        ("JobState=FAILED ExitCode=2:0", 2),
        ("JobState=FAILED ExitCode=0:9", 137),
        ("JobState=CANCELLED ExitCode=0:15", 143),
        ("JobState=TIMEOUT ExitCode=0:15", ExitCode.LOST),
        ("JobState=NODE_FAIL ExitCode=0:0", ExitCode.LOST),
    ],
)
def test_the_job_is_followed_to_its_end(tmp_path, monkeypatch, ends, code):
    """Through the queue, twice; what its first process says is passed on as it is said."""
    log, answers = tmp_path / "log", tmp_path / "answers"
    states = ["JobState=PENDING ExitCode=0:0", "JobState=RUNNING ExitCode=0:0"]
    answers.write_text("\n".join(f"JobId=7 {each}" for each in [*states, *states, ends]))
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\nhead -n 1 {answers}\nsed -i 1d {answers}\necho "said $@" >> {log}\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(slurm, "SECONDS_BETWEEN_LOOKS", 0.0)
    out = io.StringIO()

    assert follow("7", log, out) == code

    lines = out.getvalue().splitlines()
    assert lines.count("said --oneliner show job 7") == 5
    assert [line for line in lines if line.startswith("job 7: ")] == [
        "job 7: pending", "job 7: running", "job 7: pending", "job 7: running",
    ]  # fmt: skip
    assert (code == 0) == ("job 7 ended" not in out.getvalue())


@needs_submitit
@pytest.mark.slow  # two jobs of two processes that each import JAX
@pytest.mark.alone
def test_a_job_of_two_processes_trains_and_passes_its_code_on(tmp_path, slurm, monkeypatch):
    """On a scheduler of one node: it ends with 0; and where the processes refuse, with 2.
    Tasks of srun meet with nothing said."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    monkeypatch.setenv("SLURM_CONF", slurm)

    def launched(*flags):
        return subprocess.run(
            [sys.executable, "-c", CODE, "launch", str(run_file), "--np", "2", *flags],
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "PYTHONPATH": str(ROOT),
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=500,
        )

    done = launched("--folder", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("completed: 25 steps") == 1
    assert "started: on 2 devices" in done.stdout
    assert "scancel" in done.stdout

    refused = launched("--folder", str(tmp_path / "other"), "--batch.global_batch", "7")
    assert refused.returncode == 2, refused.stdout
    assert "batch.global_batch=7" in refused.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--through", "slurm"], "through='slurm' is refused: there is no SLURM on this machine"),
        (["--partition", "all"], "partition='all' is refused: it is for --through slurm"),
    ],
)
def test_a_sweep_without_slurm_says_what_to_do(tmp_path, monkeypatch, capsys, flags, words):
    """Before anything is trained."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    monkeypatch.setenv("PATH", str(tmp_path))
    typed = ["sweep", str(run_file), "--folder", str(tmp_path / "sweep"), "-V", "seed=[0,1]"]

    assert main([*typed, *flags]) == 2

    assert words in " ".join(capsys.readouterr().err.split())


@needs_submitit
@pytest.mark.slow  # three jobs, each of which imports JAX
@pytest.mark.alone
def test_the_runs_of_a_sweep_are_jobs(tmp_path, slurm, monkeypatch):
    """One is refused, the others are trained; a resumed sweep tries it again, and no other."""
    run_file, folder = tmp_path / "run.toml", tmp_path / "sweep"
    run_file.write_text(RUN)
    monkeypatch.setenv("SLURM_CONF", slurm)
    blocker = folder / "runs" / "0001"

    def swept(*flags):
        words = ["sweep", str(run_file), "--folder", str(folder), "-V", "seed=[0,1]"]
        return subprocess.run(
            [sys.executable, "-c", CODE, *words, "--one-by-one", "--through", "slurm", *flags],
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "PYTHONPATH": str(ROOT),
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=280,
        )

    blocker.parent.mkdir(parents=True)
    blocker.write_text("no folder")
    done = swept()
    said = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout
    assert "error: run 0001: " in said
    assert "runs/0001' is a file, not a folder" in said
    assert "--resume tries again what failed" in said

    blocker.unlink()
    done = swept("--resume")
    assert done.returncode == 0, done.stdout
    rows = pq.read_table(folder / "results.parquet").to_pylist()
    assert [row["status"] for row in rows] == ["completed", "completed"]
    assert len(list((folder / "slurm").glob("[0-9]*.sh"))) == 3


@needs_submitit
def test_the_script_of_an_elastic_run_keeps_what_is_left(tmp_path, monkeypatch, capsys):
    """The nodes of fewest to most processes, no end when one fails, and the time limit told to the
    launcher; on one node, which fails as a whole, the launcher is that of any machine."""
    run_file = tmp_path / "a.toml"
    run_file.write_text(RUN)
    typed = ["launch", str(run_file), "--folder", str(tmp_path / "out"), "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["scalejax", *typed, "--np", "4"])

    main([*typed, "--np", "4", "--elastic", "2:4", "--nodes", "2", "--rejoin-seconds", "5"])
    text = capsys.readouterr().out
    main([*typed, "--np", "4", "--elastic", "2:4"])
    on_one = capsys.readouterr().out

    options = options_of(text)
    expected = {"nodes": "1-2", "ntasks-per-node": "2", "no-kill": "", "signal": "B:TERM@120"}
    assert {name: options.get(name) for name in expected} == expected
    assert "\nSCALEJAX_TASKS_PER_NODE=2 env 'SCALEJAX_GO_ON=scalejax launch " in text
    assert "-m scalejax launch" in text
    assert " --np=-4 --elastic=2:4 --rejoin-seconds=5 " in text
    assert "srun" not in text
    assert options_of(on_one)["nodes"] == "1"
    assert "TASKS_PER_NODE" not in on_one
    assert "no-kill" not in on_one


@needs_submitit
@pytest.mark.parametrize("code", [0, ExitCode.LOST, 143])
def test_an_elastic_script_passes_signals_on_and_codes_back(tmp_path, code):
    """The launcher has its time to save when the shell is signalled, and the job ends as it does;
    it goes back into the queue where that may help."""
    launcher, scontrol = tmp_path / "launcher", tmp_path / "scontrol"
    launcher.write_text(
        f"#!/bin/bash\ntrap 'sleep 0.3; echo saved >> {tmp_path}/calls; exit {code}' TERM\n"
        f"touch {tmp_path}/ready\nwhile true; do sleep 0.05; done\n"
    )
    scontrol.write_text(f"#!/bin/sh\necho scontrol >> {tmp_path}/calls\n")
    for each in (launcher, scontrol):
        each.chmod(0o755)
    text = script(run(tmp_path, command=(str(launcher),), least_processes=4))
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}

    job = subprocess.Popen(["bash", "-c", text], env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    job.terminate()

    assert job.wait(60) == code
    calls = (tmp_path / "calls").read_text().split()
    assert calls == ["saved", *(["scontrol"] if code else [])]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (
            ("--elastic", "2:4", "--nodes", "2", "--copy-seconds", "3"),
            "copy_seconds=3 is refused: copies are in the memory of one machine; on several nodes",
        ),
        (
            ("--json", "out.json", "--detach"),
            "json='out.json' is refused: nothing",
        ),
        (("--rejoin-seconds", "3"), "rejoin_seconds=3 is refused: it needs --elastic MIN:MAX"),
    ],
)
def test_a_job_that_cannot_be_is_refused(tmp_path, capsys, flags, refused):
    """Before it is submitted."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)

    assert (
        main(["launch", str(run_file), "--np", "4", "--folder", str(tmp_path / "o"), *flags]) == 2
    )

    assert re.search(refused, " ".join(capsys.readouterr().err.split()))


def put_programs(folder, monkeypatch, **does):
    """Put shell scripts on the path under their names, before those of the system."""
    for name, script_of_it in does.items():
        (folder / name).write_text(f"#!/bin/sh\n{script_of_it}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


@pytest.mark.parametrize(
    ("job", "most_restarts", "is_done"),
    [
        ("JobState=RUNNING x Restarts=1 NodeList=n1 n2", 3, ""),
        ("JobState=RUNNING x Restarts=1 NodeList=n2", 3, "scontrol requeue 7"),
        ("JobState=RUNNING x Restarts=1 NodeList=n2", 1, "scancel 7"),
        ("JobState=COMPLETING x Restarts=1 NodeList=n2", 3, None),
        ("JobState=RUNNING x Restarts=2 NodeList=n2", 3, None),
    ],
)
def test_a_job_without_its_first_node_goes_back_into_the_queue(
    tmp_path, monkeypatch, job, most_restarts, is_done
):
    """SLURM keeps the others, which have nothing to do without the script, until its time is up.
    Not where it has ended, or begun again, and no more often than is asked for. None: what watches
    it ends."""
    names = job.rpartition("=")[2].split()
    calls = tmp_path / "calls"
    put_programs(
        tmp_path,
        monkeypatch,
        srun='while [ "$1" != sh ]; do shift; done; exec "$@"',
        scontrol=f"""case "$*" in
*hostnames*) printf "%s\\n" {" ".join(names)} ;;
*show*) echo look >> {calls}; echo "JobId=7 {job.replace(" n2", ",n2")} " ;;
*) echo scontrol "$@" >> {calls} ;; esac""",
        scancel=f'echo scancel "$@" >> {calls}',
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr("scalejax.launch.nodes._SECONDS_TO_LOOK", 0.05)
    nodes = Nodes(job_id="7", names=("n1", "n2"), tasks_per_node=2)

    assert nodes.guard((0, 1), most_restarts) is None
    guard = nodes.guard((0, 1, 2), most_restarts)
    assert guard is not None
    end = time.monotonic() + 60
    said = []
    while time.monotonic() < end and said.count("look") < 3 and guard.poll() is None:
        time.sleep(0.05)
        with suppress(FileNotFoundError):
            said = calls.read_text().splitlines()
    has_ended = guard.poll() is not None
    guard.kill()
    guard.wait()

    said = set(calls.read_text().splitlines()) - {"look"}
    assert has_ended == (is_done is None)
    assert said == ({is_done} if is_done else set())


def test_nodes_are_asked_without_waiting_and_each_once(tmp_path, monkeypatch):
    """One that does not answer would keep signals from the others: SLURM gives up after 10 s."""
    put_programs(
        tmp_path,
        monkeypatch,
        srun=f"""echo "$@" >> {tmp_path}/calls
case "$*" in *nodelist=n1*) while [ ! -e {tmp_path}/up ]; do sleep 0.02; done ;;
*nodelist=n2*) exec sleep 60 ;; *) exit 1 ;; esac""",
    )
    nodes = Nodes(job_id="7", names=("n1", "n2", "n3"), tasks_per_node=2)
    places = Places(Elastic(least=1, most=6, rejoin_seconds=0.0), 6, bool)
    places.answers = nodes.answers
    places.lose(range(6))

    begun = time.monotonic()
    assert places.chosen() == ()
    assert places.seconds_to_wait() == 0
    assert time.monotonic() - begun < 30
    (tmp_path / "up").touch()
    while not (chosen := places.chosen()):
        assert time.monotonic() - begun < 60
        time.sleep(0.02)
    assert chosen == (0, 1)
    asked = (tmp_path / "calls").read_text()
    assert [asked.count(f"nodelist=n{each}") for each in (1, 2)] == [1, 1]
    monkeypatch.setattr("scalejax.launch.nodes._SECONDS_TO_ANSWER", -1.0)
    nodes.signal_steps(signal.SIGKILL)  # forgets who is asked
    assert nodes.answers((2, 3)) == {2: False, 3: False}


@pytest.mark.parametrize("ends", [True, False])
def test_processes_that_slurm_has_not_ended_are_waited_for(tmp_path, monkeypatch, ends):
    """The next ones would write to the same files: where SLURM takes long they start later, and
    where it does not end them at all none does. A task outlives its srun."""
    task = tmp_path / "task.sh"
    task.write_text(
        f"""echo "start $SCALEJAX_PROCESS" >> {tmp_path}/calls
[ $(grep -c start {tmp_path}/calls) -gt 2 ] && exit 0
[ $SCALEJAX_PROCESS = 0 ] && exec sleep 60
sleep 0.3; kill -9 $$
"""
    )
    put_programs(
        tmp_path,
        monkeypatch,
        srun=f"""while [ "$1" != sh ]; do shift; done
setsid "$@" > /dev/null 2>&1 & echo $! >> {tmp_path}/tasks; wait $!; code=$?
echo "end $SCALEJAX_PROCESS" >> {tmp_path}/calls; exit $code""",
        squeue="echo 7.0; echo 7.1",
        scancel=f"""{"sleep 1; kill -9 $(cat " + str(tmp_path) + "/tasks)" if ends else ":"}""",
        scontrol=":",
    )
    monkeypatch.setattr("scalejax.launch.local._SECONDS_TO_FOLLOW", 0.5)
    monkeypatch.setattr("scalejax.launch.local._SECONDS_TO_CANCEL", 10.0 if ends else 1.0)
    job = Launch(
        command=("sh", str(task)),
        processes=2,
        elastic=Elastic(least=1, most=2, rejoin_seconds=0.0, copy_seconds=0.0),
        nodes=Nodes(job_id="7", names=("localhost", "127.0.0.1"), tasks_per_node=1),
        folder=tmp_path / "logs",
        most_restarts=1,
    )
    said = io.StringIO()

    code = launch(job, said)

    calls = (tmp_path / "calls").read_text().splitlines()
    if ends:
        assert code == 0
        assert max(calls.index(f"end {each}") for each in (0, 1)) < calls.index("start 0", 2)
    else:
        assert code == ExitCode.LOST
        assert "SLURM has not ended process 0: no other is started" in said.getvalue()
        assert len([each for each in calls if "start" in each]) == 2
        # Those that are left, and what watches the first node.
        kill(map(int, (tmp_path / "tasks").read_text().split()))


ON_NODES = """
import os, sys, time
from scalejax.core.elastic import SharedFolder
from scalejax.core.heartbeat import Heartbeat
shared, heart = SharedFolder.from_environment(), Heartbeat.from_environment()
count, rank = (int(os.environ["SCALEJAX_" + name]) for name in ("PROCESSES", "PROCESS"))
starts = shared.path / f"starts-{rank}"
starts.open("a").write(f"{count} ")
start = len(starts.read_text().split())
heart.at("training", 10 * start)
(shared.path.parent / f"{start}-{rank}-{os.environ['SLURMD_NODENAME']}").touch()
if start == 1:
    while not (shared.path.parent / "hit").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    sys.exit(5)
while count == 2 and not shared.is_asked_to_stop:
    time.sleep(0.05)
sys.exit(143 if count == 2 else 0)
"""
"""A process without a run: ends as those do that lose a peer, and goes when it is asked to."""


def processes_of(node):
    """Tasks of a node, after the daemons that started them, but without that of the node itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SLURMD_NODENAME={node}".encode() in (path / "environ").read_bytes().split(b"\0"):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                is_step = b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes()
                found += [*([parent] if is_step else []), int(path.name)]
    return found


def kill(processes):
    """Send SIGKILL."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def allocate(slurm_conf, nodes, monkeypatch):
    """Give this process a job on so many nodes, as its batch script has: the id of the job."""
    monkeypatch.setenv("SLURM_CONF", slurm_conf)
    asked = ["salloc", "--no-shell", f"--nodes={nodes}", "--no-kill"]
    given = subprocess.run(asked, capture_output=True, text=True)
    (job_id,) = re.findall(r"Granted job allocation (\d+)", given.stderr)
    for name, value in (("ID", job_id), ("NODELIST", f"n[1-{nodes}]")):
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setenv("SCALEJAX_TASKS_PER_NODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Who has failed is known at once here.
    monkeypatch.setattr("scalejax.launch.local._SECONDS_TO_FOLLOW", 1.0)
    return job_id


@pytest.mark.slow  # SLURM is given its time to miss a node, and to start three times
@pytest.mark.alone
def test_a_node_that_is_gone_is_done_without_until_it_is_back(
    tmp_path, slurm_of_three, monkeypatch
):
    """All of it is killed at once, and it says no last word: two go on, and when SLURM starts it
    again all three. No step is left when the launcher ends."""
    folder = Path(slurm_of_three).parent
    job_id = allocate(slurm_of_three, 3, monkeypatch)
    job = Launch(
        command=(sys.executable, "-c", ON_NODES),
        processes=3,
        elastic=Elastic(least=1, most=3, rejoin_seconds=1.0, copy_seconds=0.0),
        nodes=Nodes.of_this_job(),
        folder=tmp_path,
        most_restarts=1,
    )

    def hit():
        while len(list(tmp_path.glob("1-*"))) < 3:
            time.sleep(0.05)
        kill([*processes_of("n3"), int((folder / "slurmd-n3.pid").read_text())])
        (tmp_path / "hit").touch()
        while len(list(tmp_path.glob("2-*"))) < 2:
            time.sleep(0.05)
        script = str(ROOT / "tests" / "support" / "slurm.sh")
        subprocess.run([script, "node", str(folder), "n3"], check=True)

    said = io.StringIO()
    hitting = threading.Thread(target=hit)
    hitting.start()
    code = launch(job, said)
    hitting.join()

    assert code == 0, said.getvalue()
    assert "process 2 no longer answers the others at step 10 (on n3)" in said.getvalue()
    assert re.findall(r"restart \d, \d process\w*", said.getvalue()) == [
        "restart 1, 2 processes",
        "restart 2, 3 processes",
    ]
    assert {path.name for path in tmp_path.glob("2-*")} == {"2-0-n1", "2-1-n2", "2-2-n3"}
    asked = ["squeue", "--steps", "--noheader", "--format=%i %N"]
    steps = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    # SLURM still counts those of the node whose daemons were killed.
    assert not [each for each in steps if each.startswith(job_id) and not each.endswith("n3")]
    subprocess.run(["scancel", job_id], check=True)


@pytest.mark.slow  # three processes that each import JAX, one after the others
@pytest.mark.alone
def test_an_elastic_job_goes_on_without_a_process(tmp_path, slurm_of_three, monkeypatch):
    """One of two, on a node each, is killed: the other goes on from the newest checkpoint, with
    the same batches. Each step is in the record once, and its loss is that of a run of one process
    but for rounding: 1e-5 after 100 updates of AdamW. The launcher is that of the batch script, in
    this process."""
    job_id = allocate(slurm_of_three, 2, monkeypatch)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    run_file, folder = tmp_path / "run.toml", tmp_path / "run"
    text = RUN.replace("epochs = 1", "epochs = 4\nlog_every_steps = 1\ncheckpoint_every_steps = 20")
    run_file.write_text(text)

    def hit():
        while not list((folder / "checkpoints").glob("[0-9]*/manifest.json")):
            time.sleep(0.02)
        kill(each for each in processes_of("n2") if is_trainer(each))

    threading.Thread(target=hit, daemon=True).start()
    flags = ["--np=-2", "--elastic", "1:2", "--rejoin-seconds", "600", "--folder", str(folder)]
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(run_file), *flags])
    subprocess.run(["scancel", job_id], check=True)
    train(load_config(run_file), tmp_path / "alone", device_count=1, predicts=False)

    assert ended.value.code == 0
    ours, expected = figures(folder), figures(tmp_path / "alone")
    assert [row[0] for row in ours] == [row[0] for row in expected]
    losses = (np.array([row[1] for row in rows], float) for rows in (ours, expected))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    (change,) = RunRecord.load(folder).processes
    assert (change.before, change.after) == (2, 1)
    assert change.reason.startswith("process 1 was killed by SIGKILL")
    assert change.seconds > 0


def is_trainer(process):
    """Whether a process trains, and is not the step that it is in."""
    with suppress(OSError):
        return b"scalejax" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False
