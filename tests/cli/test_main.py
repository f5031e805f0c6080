"""What a person types, and the one sentence that answers what cannot work."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scalejax
from scalejax.cli.command import OverridingCommand, say
from scalejax.cli.commands import COMMANDS
from scalejax.cli.main import main, parse, split_overrides
from scalejax.cli.predict import Predict
from scalejax.cli.search import Search
from scalejax.cli.train import Train
from scalejax.config.run import RunConfig
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.models import pretrained
from scalejax.simulator.predict import ScalingPrediction

EXAMPLES = Path(scalejax.__file__).parent / "config" / "examples"
WARMUP = str(EXAMPLES / "fashion_gradual_warmup.toml")
PER_DEVICE = str(EXAMPLES / "resnet50_goyal2017.toml")


def refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a command line is refused, as it is before it is wrapped."""
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: [^\n]+\n(       [^\n]+\n)*", printed.err)
    return " ".join(printed.err.removeprefix("error: ").split())


# --- flags ---


def test_flags_become_fields_of_the_command():
    """Values arrive in their types."""
    command, overrides = parse(["train", "a.toml", "--folder", "b", "--resume", "--cpu-devices=8"])

    assert command == Train(run_file=Path("a.toml"), folder=Path("b"), resume=True, cpu_devices=8)
    assert overrides == {}


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("--train.epochs 3", 3),
        ("--train.epochs=3", 3),
        ("--train.epochs=[1, 2]", [1, 2]),
        ("--train.epochs -1", -1),
        ("--train.epochs cosine", "cosine"),
    ],
)
def test_flag_with_a_dot_replaces_a_field(typed: str, value: object):
    """Both spellings; the value is TOML where it is TOML."""
    arguments = typed.split(" ", 1) if "=" not in typed else [typed]

    assert split_overrides(["a.toml", *arguments, "--resume"]) == (
        ["a.toml", "--resume"],
        {"train.epochs": value},
    )


def test_seed_is_a_field_without_a_dot():
    """It stands in no table of the file."""
    assert split_overrides(["a.toml", "--seed", "3"]) == (["a.toml"], {"seed": 3})


def test_a_flag_of_a_command_is_not_taken_for_the_table_of_its_name():
    """Which it would replace: `plan` and `search` have the one there is, and fields beside it."""
    tables = {field.name for field in dataclasses.fields(RunConfig)}
    shared = {
        (name, field.name)
        for name, kind in COMMANDS.items()
        for field in dataclasses.fields(kind)
        if issubclass(kind, OverridingCommand) and field.name in tables
    }
    typed = "search --model olmoe-7b-1b --model.layers 3 --cluster dgx-h100 --devices 8"
    command, overrides = parse([*typed.split()])

    assert shared == {("plan", "model"), ("search", "model")}
    assert isinstance(command, Search)
    assert command.model == "olmoe-7b-1b"
    assert overrides == {"model.layers": 3}


def test_one_flag_names_one_cluster_or_several():
    """Whichever of the two spellings."""
    one, _ = parse(["plan", "a.toml", "--clusters=dgx-h100", "--devices", "8"])
    other, _ = parse(["plan", "a.toml", "--cluster", "dgx-h100", "--devices", "8"])
    predicted, _ = parse(["predict", "a.toml", "--clusters", "a,b", "--devices", "8"])

    assert one == other
    assert isinstance(predicted, Predict)
    assert predicted.cluster == "a,b"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("predict {} --cluster dgx-h100,, --devices 8", "names with commas between"),
        ("explain {} --cluster dgx-h100,dgx-b200 --devices 8", "it must be one here"),
        ("predict {} --cluster dgx-h100 --devices 8 --network.bytes 2x", "network.bytes is no"),
        ("emulate {} --network.bytes_per_second 2x", "it is of a cluster: give --cluster"),
        ("bench {} --link.own_share 2x", "it is of a cluster: give --cluster"),
    ],
)
def test_clusters_and_parts_that_cannot_be_are_refused(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
):
    """In one sentence, before anything is compiled."""
    assert said in refused(typed.format(WARMUP), capsys)


def test_clusters_are_predicted_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A table for each, a file for each, and one of both: with a chip that launches faster.
    The compilation takes the time: one, which both share."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "fast.toml").write_text(
        'based_on = "dgx-h100"\n[chip.attainable]\nlaunch_seconds = 1e-8\n'
    )
    clusters = f"dgx-h100,{tmp_path / 'fast.toml'}"
    command = ["predict", WARMUP, "--clusters", clusters, "--devices", "16"]

    assert main([*command, "--json", str(tmp_path / "out.json"), "--network.ramp_seconds=0"]) == 0

    printed = capsys.readouterr().out
    one, two = (
        serialization.load(ScalingPrediction, tmp_path / f"out-{name}.json").predictions[0]
        for name in ("dgx-h100", "fast")
    )
    assert two.step_seconds < one.step_seconds
    last = [line for line in printed.splitlines() if line.startswith("fast ")][-1]
    assert last.split()[-1] == f"{one.step_seconds / two.step_seconds:.2f}x"
    assert max(map(len, (line for line in printed.splitlines() if "/" not in line))) <= 80


def test_every_command_has_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """And the help of all of them lists each one; all within 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([*name.split(), "--help"])
        shown = capsys.readouterr().out
        assert f"usage: scalejax {name}" in shown
        assert max(map(len, shown.splitlines())) <= 80
        if name == "cost":  # its docstring breaks the line after "By"
            assert "for each. By default the list price in" in shown
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.strip().startswith(f"{name}  ") for line in lines) for name in COMMANDS)
    assert max(map(len, lines)) <= 80


def test_first_word_of_two_has_help(capsys: pytest.CaptureFixture[str]):
    """It lists the commands that begin so, and no other."""
    with pytest.raises(SystemExit, match="0"):
        main(["config", "--help"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: scalejax config COMMAND [-h] ..."
    assert [" ".join(line.split()[:2]) for line in lines[2:]] == [
        "config show",
        "config fields",
        "config migrate",
    ]


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("trian x.toml", "did you mean 'train'?"),
        ("config", "needs one more word: scalejax config show"),
        ("config shw", "did you mean 'config show'?"),
        ("train", "missing: RUN.toml"),
        ("predict x.toml", "missing: --cluster A,B,..., --devices N..M"),
        (
            "train x.toml --epochs 3",
            "--epochs is not a flag of scalejax train (did you mean --train",
        ),
        ("train x.toml --epoch=3", "(did you mean --train.epochs?)"),
        ("train x.toml --global-batch 8", "(did you mean --batch.global_batch?)"),
        ("train x.toml --lr 3", "--lr is not a flag of scalejax train (see scalejax train --help)"),
        (
            "train x.toml --foldr 3",
            "--foldr is not a flag of scalejax train (did you mean --folder?)",
        ),
        ("train x.toml --train.epochs", "--train.epochs needs a value"),
        ("launch ---.toml --np 2", "'---.toml' is not a flag (flags begin with two hyphens): give"),
        ("launch x.toml --np 2 --partition ---", "as a value of --partition as --partition=VALUE."),
        ("train x.toml --cpu-devices few", "--cpu-devices='few' is refused: it must be a whole"),
        ("quickstart --seeds 1.5", "--seeds='1.5' is refused: it must be a whole number"),
        ("bench x.toml --monitor x", "--monitor='x' is refused: it must be a number"),
        (
            "plan x.toml --clusters a --devices 8 --budget x",
            "--budget='x' is refused: it must be a number",
        ),
        ("predict x.toml --cluster a --devices 8 --scaling wek", "Expected one of ('weak', 'stro"),
        ("hardware --train.epochs 3", "reads no run.toml, so it takes no --train.epochs"),
        ("hardware dgx-h10", "did you mean 'dgx-h100'?"),
        ("hardware h1000", "did you mean 'h100'?"),
        ("hardware my.toml", "there is no such file"),
    ],
)
def test_what_cannot_be_understood_is_refused(
    arguments: str, answer: str, capsys: pytest.CaptureFixture[str]
):
    """In one sentence that says what would do, with exit code 2."""
    assert answer in refused(arguments, capsys)


def test_refusals_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """No line is wider; a path stays whole."""
    monkeypatch.setenv("COLUMNS", "60")
    path = "a-folder/" * 8 + "none.toml"

    assert main(["hardware", "dgx-h10"]) == 2
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 60
    assert main(["config", "show", path]) == 2
    assert path in capsys.readouterr().err


def test_sentences_are_wrapped_for_who_reads_them_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """In a pipe a line stays one, as what reads it expects; lines of a text stay apart."""
    text = "note: " + "a path with spaces " * 6 + "\nand a second line"
    monkeypatch.delenv("COLUMNS", raising=False)
    say(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("COLUMNS", "60")
    say(text)
    wide, *others, second = capsys.readouterr().out.splitlines()
    assert len(wide) <= 60
    assert others
    assert second == "and a second line"


@pytest.mark.slow
def test_refusal_is_the_same_with_and_without_utf8(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Frames are drawn with other signs where the terminal has no line drawing."""
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-m", "scalejax", "predict", "x.toml"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}

    without = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert main(["predict", "x.toml"]) == without.returncode == 2

    assert without.stderr == capsys.readouterr().err
    assert without.stderr == (
        "error: missing: --cluster A,B,..., --devices N..M (see scalejax predict --help)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("config show none.toml", "'none.toml' does not exist"),
        (
            f"config show {WARMUP} --train.epoch 3",
            "train.epoch is not a field (did you mean 'epochs'",
        ),
        (f"config show {WARMUP} --train.epochs many", "train.epochs='many' is refused"),
        (f"config show {WARMUP} --devices 7", "must be a multiple of data*fsdp=7 (nearest: 511 or"),
        (f"config show {WARMUP} --model.name resnet51", "did you mean 'resnet"),
        (
            f"predict {WARMUP} --cluster dgx-h10 --devices 8",
            "cluster='dgx-h10' is refused: did you mean 'dgx-h100'? It must be one of aws-",
        ),
        (
            f"predict {WARMUP} --cluster b200 --devices 8",
            "cluster='b200' is refused: it is a chip; of clusters, those with it are dgx-b200.",
        ),
        (
            f"predict {PER_DEVICE} --cluster dgx-h100 --devices 10000000",
            "devices=10000000 is refused: 32 samples x data*fsdp=10000000 are 320000000 a "
            "step, more than the 1281167 training examples (at most data*fsdp=40036).",
        ),
        (
            f"predict {WARMUP} --cluster dgx-h100 --devices 8 --netwrk.bytes_per_second 2x",
            "--netwrk.bytes_per_second is not a flag (did you mean --network.bytes_per_second?)",
        ),
        (
            f"predict {WARMUP} --cluster dgx-h100 --devices 8 --network.bytes_per_second 400",
            "it is in bytes per second, and must be at least 1e6; 400 Gb/s is 50e9, and 400 GB/s",
        ),
        ("calibrate --cpu-devices 0", "cpu_devices=0 is refused"),
        (f"predict {WARMUP} --cluster dgx-h100 --devices 8,x", "devices='8,x' is refused"),
        (f"predict {WARMUP} --cluster dgx-h100 --devices 0", "devices='0' is refused"),
        (
            f"predict {WARMUP} --cluster dgx-h100 --devices 8 --conditions.step_vc 0.1",
            "conditions.step_vc is not a field (did you mean 'step_cv'?)",
        ),
        (f"predict {WARMUP} --cluster tpu-v5e --devices 512", "devices=512 is refused"),
        (f"train {WARMUP} --cpu-devices 0", "cpu_devices=0 is refused"),
        (f"schedule plot {WARMUP} --output a.gif --devices 8", "output='a.gif' is refused"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: str, answer: str, capsys: pytest.CaptureFixture[str]
):
    """Before any device is touched, in one sentence, with exit code 2."""
    assert answer in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("predict {run} --cluster dgx-h100 --devices 8", ("json", "trace")),
        ("explain {run} --cluster dgx-h100 --devices 8", ("json", "output", "trace-output")),
        ("search {run} --cluster dgx-h100 --devices 8", ("json", "output")),
        (f"train {WARMUP}", ("folder",)),
        ("validate {run}", ("json", "plot")),
        ("report {run}", ("output",)),
        ("schedule plot {run}", ("output",)),
        ("calibrate", ("output",)),
        ("quickstart", ("folder",)),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_first(
    command: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Before any work: there is not even a file to work on. Option and path are named."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "new" / "out.png"
    for option in options:
        arguments = f"{command.format(run=tmp_path / 'none.toml')} --{option} {path}"

        answer = refused(arguments, capsys)
        assert f"{option.replace('-', '_')}='{path}' is refused: '{tmp_path / 'file'}' is" in answer


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (f"train {WARMUP}", "measurements.jsonl"),
        (f"train {WARMUP}", "checkpoints/out.json"),
        (f"launch {WARMUP} --np -2", "prediction.json"),
        (f"emulate {WARMUP} --algorithm downpour", "emulation.json"),
        (f"sweep {WARMUP} -V seed=[0,1]", "sweep.json"),
        (f"study warmup {WARMUP}", "run.toml"),
        (f"bench {WARMUP}", "results.json"),
        ("quickstart", "resnet50-h100.json"),
    ],
)
def test_a_result_is_no_file_of_the_record(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Which it would overwrite; beside them it may be, as the next refusal shows."""
    folder = tmp_path / "run"
    for option in ("json", "csv"):
        answer = refused(f"{command} --folder {folder} --{option} {folder / name}", capsys)
        assert f"{option}='{folder / name}' is refused: it is a file of the record in" in answer
    assert not folder.exists()


def test_layout_larger_than_the_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """These tests run on eight devices."""
    folder = tmp_path / "run"

    assert "8" in refused(f"train {WARMUP} --layout.data 16 --folder {folder}", capsys)


def test_fields_of_another_kind_are_said_to_be_the_files_and_how_to_drop_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The example gives sgd's momentum, which lamb has not; what a flag gives is its own."""
    monkeypatch.setenv("COLUMNS", "1000")
    show = ["config", "show", WARMUP, "--devices", "8"]

    assert main([*show, "--optimizer.name", "lamb", "--optimizer.nesterov", "true"]) == 2
    *_, hint = capsys.readouterr().err.splitlines()
    assert hint.endswith(
        "fashion_gradual_warmup.toml gives momentum of [optimizer], for another name than 'lamb': "
        """--optimizer='{name = "lamb"}' replaces the whole table."""
    )

    assert main([*show, '--optimizer={name = "lamb"}', "--optimizer.beta1", "0.8"]) == 0
    assert "optimizer lamb variant optax, beta1 0.8" in " ".join(capsys.readouterr().out.split())
    assert "whole table" not in refused("config show " + WARMUP + " --optimizer.beta1 1", capsys)


def test_each_problem_of_a_file_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Two mistakes, two lines, where the terminal is wide enough."""
    monkeypatch.setenv("COLUMNS", "300")
    text = (
        Path(WARMUP)
        .read_text()
        .replace("momentum", "momntum")
        .replace("epochs = 10", "epochs = 'x'")
    )
    (tmp_path / "run.toml").write_text(text)

    assert main(["config", "show", str(tmp_path / "run.toml"), "--devices", "8"]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)


# --- leaving ---


def test_interrupt_leaves_with_130(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C is no error to be traced."""

    def interrupted(self: Predict, overrides: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Predict, "execute", interrupted)

    assert main(["predict", "x.toml", "--cluster", "a", "--devices", "8"]) == 130


def test_interrupt_while_it_starts_leaves_with_130(tmp_path: Path):
    """The first second goes into imports."""
    (tmp_path / "tyro.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{EXAMPLES.parents[2]}"}
    command = [sys.executable, "-c", "from scalejax.cli.main import main"]

    done = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_reader_that_goes_away_is_no_error():
    """`scalejax hardware | head -1` prints one line and nothing on standard error."""
    command = f"{sys.executable} -m scalejax hardware | head -1"

    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("cluster")
    assert done.stderr == ""


# --- commands ---


def test_config_show_prints_what_will_happen(capsys: pytest.CaptureFixture[str]):
    """Batches, steps, and the rate at start, peak, decay and end, as worked out by hand.

    10,000 // 512 = 19 steps an epoch; k = 512 / 32 = 16, so the peak is 0.32; W = 3 x 19 = 57.
    """
    assert main(["config", "show", WARMUP, "--devices", "8"]) == 0

    words = " ".join(capsys.readouterr().out.split())
    for expected in (
        "devices 8 data=8",
        "global batch 512",
        "per-device batch 64",
        "steps per epoch 19 272 examples are left over each epoch",
        "total steps 190",
        "0.02 step 0, epoch 0 start",
        "0.32 step 57, epoch 3 peak",
        "0.032 step 114, epoch 6 step of the decay",
        "0.0032 step 189, epoch 9.947 end",
    ):
        assert expected in words


def test_config_show_tells_the_batch_of_a_part_from_that_of_a_device(
    capsys: pytest.CaptureFixture[str],
):
    """Two devices along tensor share their samples: 512 / 4 = 128 for each pair."""
    assert main(["config", "show", WARMUP, "--devices", "8", "--layout.tensor", "2"]) == 0

    words = " ".join(capsys.readouterr().out.split())
    assert "per-part batch 128 samples per update, on 2 devices each; 4 parts" in words


def test_config_show_takes_the_devices_that_are_here(capsys: pytest.CaptureFixture[str]):
    """These tests run on eight."""
    assert main(["config", "show", WARMUP]) == 0
    assert "per-device batch   64" in capsys.readouterr().out


FINE_TUNED = """
[model]
name = "efficientnet_lite0"
pretrained = "imagenet"
[data]
name = "synthetic_images"
image_size = 64
classes = 3
[batch]
global_batch = 8
[optimizer]
name = "adamw"
beta2 = 0.98
[averaging]
name = "ema"
decay = 0.99
[schedule]
base_learning_rate = 0.1
warmup = "gradual"
warmup_epochs = 2
warmup_from = "zero"
[fine_tuning]
trainable = ["head", "tail"]
rate_factors = {tail = 0.5}
[layout]
bn_scope = "local"
bn_group_size = 2
"""


def test_config_show_prints_what_makes_an_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Optimizer, average, BatchNorm, what learns: the last layer, 1280 x 3 + 3, and the 1x1
    convolution before it, 320 x 1280 with 2 x 1280 of its BatchNorm: 416,003 of the
    published 4,652,008 with 1000 classes, 1280 x 997 + 997 less with 3.

    And a warmup of 2 epochs in a run of 1 is not refused, but said.
    """
    run = tmp_path / "run.toml"
    run.write_text(FINE_TUNED)

    assert main(["config", "show", str(run), "--devices", "2"]) == 0

    words = " ".join(capsys.readouterr().out.split())
    for expected in (
        "optimizer adamw beta1 0.9, beta2 0.98, epsilon 1e-08, weight_decay 0.01, "
        "decays_norm_and_bias no",
        "averaging ema decay 0.99, warms_up no, is_evaluated yes",
        "BatchNorm local statistics of 2 samples",
        "weights imagenet",
        "learns 416 k of 3,374,851 parameters: head, tail",
        "rate factor 0.5 tail",
        "Note: the warmup of 2 epochs is longer than the run of 1",
    ):
        assert expected in words

    assert main(["config", "show", str(run), "--devices", "2", "--train.epochs", "2"]) == 0
    assert "longer than" not in capsys.readouterr().out


def test_config_show_finds_what_only_the_network_can_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Parts that it has not; and weights that are not installed, which costing does without."""
    run = tmp_path / "run.toml"
    run.write_text(FINE_TUNED)
    misspelt = "--fine_tuning.trainable=['heads','tail']"

    assert "did you mean 'head'?" in refused(f"config show {run} {misspelt}", capsys)

    monkeypatch.setattr(pretrained, "PACKAGE", "no-such-package")
    assert main(["config", "show", str(run)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Note: train will not begin: model.pretrained='imagenet' is refused" in words
    assert "pip install no-such-package" in words


def test_schedule_plot_writes_a_picture(tmp_path: Path):
    """By the suffix asked for."""
    for suffix, beginning in (("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")):
        path = tmp_path / "new" / f"schedule.{suffix}"

        assert main(["schedule", "plot", WARMUP, "--output", str(path)]) == 0
        assert path.read_bytes().startswith(beginning)


def test_hardware_lists_and_shows_sources(capsys: pytest.CaptureFixture[str]):
    """The list names clusters and chips; an entry gives the source of its numbers."""
    assert main(["hardware"]) == 0
    listed = capsys.readouterr().out
    assert "big-basin-goyal2017" in listed
    assert max(map(len, listed.splitlines())) <= 80
    assert main(["hardware", "big-basin-goyal2017"]) == 0
    shown = capsys.readouterr().out
    assert "network.bytes_per_second = 6.25e+09\n    Goyal et al. 2017" in shown


def test_predict_prints_and_writes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A small network, compiled for real; the second call is answered from the cache."""
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    output = tmp_path / "out.json"
    trace = tmp_path / "trace.json"
    command = (
        f"predict {WARMUP} --cluster dgx-h100 --devices 8,16 --scaling strong --json {output} "
        f"--trace {trace} --conditions.step_cv 0.02"
    )

    assert main(command.split()) == 0
    first = capsys.readouterr()
    assert main(command.split()) == 0
    second = capsys.readouterr()

    study = serialization.load(ScalingPrediction, output)
    assert [each.device_count for each in study.predictions] == [8, 16]
    assert study.scaling == "strong"
    counts = ("8 devices", "16 devices")
    begun, done = first.err.splitlines()[:2], first.err.splitlines()[2:]
    assert begun == [f"compiling for {count} ..." for count in counts]
    assert sorted(done) == sorted(f"compiled for {count}" for count in counts)
    assert second.err.splitlines() == [f"compiled for {count} (cached)" for count in counts]
    assert first.out == second.out
    shown = first.out.replace(str(output), "").replace(str(trace), "")
    assert max(map(len, shown.splitlines())) <= 80
    assert "efficiency" in shown
    assert "stragglers" in shown
    assert json.loads(trace.read_text())["otherData"]["devices"] == 16
    assert json.loads(output.read_text())["baseline_devices"] == 8


def test_unexpected_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch):
    """Only what a user can mend is cut to a line."""

    def broken(self: Predict, overrides: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Predict, "execute", broken)

    with pytest.raises(ZeroDivisionError):
        main(["predict", "x.toml", "--cluster", "a", "--devices", "8"])


def test_refusal_by_a_command_is_a_config_error():
    """Python code that calls `parse` can catch it."""
    with pytest.raises(ConfigError, match="missing"):
        parse(["train"])


@pytest.mark.parametrize(
    ("typed", "shown", "hidden"),
    [
        ("models", "gpt3-1.3b", None),
        ("models --grep llama3.1", "llama3.1-405b", "gpt3-1.3b"),
        ("models --grep MOE", "mixtral-8x7b", "llama3-8b"),
        ("frameworks", "nemo-2025", None),
        ("frameworks --grep maxtext", "maxtext-2025", "nemo-2025"),
    ],
)
def test_what_can_be_named_is_listed(
    typed: str,
    shown: str,
    hidden: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """In 80 columns, and of it what has a text."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(typed.split()) == 0
    printed = capsys.readouterr().out
    assert shown in printed
    assert hidden is None or hidden not in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_what_nothing_has_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    """As names are elsewhere."""
    assert "did you mean 'llama3-8b'" in refused("models --grep llama3-9b", capsys)
