"""Wrong input of every kind ends in a line that names the field, and in exit code 2.

`experiments/fuzzing` tries ten thousand configs and a thousand files; here are some dozens, and
what once went wrong.
"""

import csv
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalejax import hardware
from scalejax.cli.main import main
from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.config.run import RunConfig, load_config
from scalejax.core.errors import ConfigError, Damaged, DoesNotFit, ScalejaxError, refusal
from scalejax.core.serialization import build, parse_toml, plain
from scalejax.data.facts import resolve
from scalejax.data.formats.parquet import find_files
from scalejax.launch.slurm import SlurmRun
from scalejax.planning.convergence import read_data
from scalejax.planning.time_to_target.notes import format_steps
from scalejax.planning.time_to_target.plan import PlanPoint
from scalejax.simulator.program import MemoryUse, Operation, Program, load_program
from scalejax.training.compile import refusing_without_memory
from scalejax.training.record import RecordPosition
from scalejax.training.train import train
from scalejax.validation.accuracy import Accuracy
from scalejax.validation.kinds import read_any

FUZZ = Path(__file__).parents[1] / "experiments" / "fuzzing" / "fuzz.py"
CLUSTER = Path(hardware.__file__).parent / "clusters" / "big-basin-goyal2017.toml"
RUN = """
model = { name = "mlp", hidden = [8] }
data = { name = "synthetic_images", image_size = 8, classes = 4, train_examples = 64 }
batch.global_batch = 16
optimizer.name = "sgd"
"""
PROGRAM = Program(
    name="one product",
    backend="closed_form",
    target="any",
    compiler="none",
    mesh_axes=(("data", 8),),
    operations=(
        Operation(name="product", kind="matmul", dtype="bf16", flop=1, shape=(1, 1, 1, 1)),
    ),
    memory=MemoryUse(argument_bytes=4, output_bytes=4, alias_bytes=4, temporary_bytes=0),
)
SCHEDULE = "schedule.base_learning_rate = 0.01\n"


@pytest.mark.slow
def test_inputs_are_accepted_or_refused_by_name():
    """Twenty configs and a file or two of each kind, by another seed than those of the campaign.

    Slow as a run is trained first, whose checkpoints, record and trace are damaged, and goes on;
    sweeps, benches and event logs, each of which would be made too, are left to the campaign.
    """
    kinds = (
        "record,prediction,hardware,ledger,data,convergence,rates,cache,checkpoint,manifest,trace,"
        "program,facts,accuracy,grammar,launch"
    )
    words = ["--seed", "1", "--configs", "20", "--apart", "1", "--files", "20", "--kinds"]
    done = subprocess.run(
        [sys.executable, str(FUZZ), *words, kinds],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # as in this process
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert re.search(r"config +20 ", done.stdout)
    assert all(kind in done.stdout for kind in kinds.split(","))
    assert "0 deviations" in done.stdout


def run_toml(folder: Path, text: str = RUN + SCHEDULE) -> str:
    """A file, by its path."""
    (folder / "run.toml").write_bytes(text.encode())
    return str(folder / "run.toml")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x = " + "[" * 5000, r"run\.toml is not valid TOML: lists and tables lie too deep"),
        ("x = " + "{a=" * 900 + "1" + "}" * 900, r"not valid TOML|x\.a is refused: .* deep"),
        ("x = " + "[" * 60 + "]" * 60, r"x\.0 is refused: .* more than 50 deep"),
        ("a." * 50_000 + "b = 1", r"a key has 100 names or more \(at line 7\)"),
        ("x = " + "9" * 5000, r"run\.toml is not valid TOML: .*4300 digits"),
        ("seed = " + str(2**70), r"seed=1180591620717411303424 .*must fit 64 bits"),
        ("'' = " + str(2**70), r'""=1180591620717411303424 .*must fit 64 bits'),
        (
            "train.epochs = nan",
            r"train\.epochs=nan is refused: it must be a number",
        ),
        ("train.epochs = " + str(2**63 - 1), r"train\.epochs=9223\d+ .*2,147,483,647 steps"),
        ("train.epochs = 600_000_000", r"train\.epochs=600000000 .*536,870,911 epochs of 4"),
        ("layout = [" + "{}," * 3000 + "]", r"layout=\[\{\}.* \.\.\. .* must be a table"),
        ("train = { '' = 1 }", r'train\."" is not a field'),
    ],
)
def test_texts_that_once_went_wrong(tmp_path, capsys, line, said):
    """Each was a traceback, or took all memory, or a page."""
    assert (
        main(["config", "show", run_toml(tmp_path, RUN + SCHEDULE + line), "--devices", "1"]) == 2
    )
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(said, message)
    assert len(message) < 3000


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ('{ base_learning_rate = 1, warmup = "gradual", warmup_from = "zero", '
         "warmup_epochs = 1e12 }",
         r"schedule\.warmup_epochs=1000000000000\.0 .*536,870,911 epochs"),
        ('{ base_learning_rate = 1, decay = "step", decay_epochs = [1, 1e300] }',
         r"schedule\.decay_epochs=\(1\.0, 1e\+300\) .*steps are counted"),
        ('{ name = "piecewise", learning_rates = "0.1;1e12;0.01" }',
         r"schedule\.learning_rates='0\.1;1e12;0\.01' .*steps are counted"),
        ("{ base_learning_rate = 1e39 }", r"schedule\.base_learning_rate=1e\+39 .*at most 1e\+06"),
        ('{ base_learning_rate = 1, decay = "step", decay_epochs = [1, 2], decay_factor = 1e308 }',
         r"schedule\.decay_factor=1e\+308 .*at most 1e\+06"),
        ('{ name = "horovod", initial_learning_rate = 1, workers = 8, '
         "multipliers = [{ multiplier = 1, start_epoch = 1e12 }] }",
         r"schedule\.multipliers\.start_epoch=1000000000000\.0 .*steps are counted"),
    ],
)  # fmt: skip
def test_epochs_of_more_steps_than_are_counted_are_refused(tmp_path, schedule, said):
    """Steps are numbers of 32 bits on devices; beyond, they would begin again below 0."""
    config = load_config(Path(run_toml(tmp_path, f"{RUN}schedule = {schedule}\n")))

    with pytest.raises(ConfigError, match=said):
        resolve(config, 1)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--.=1", r"--\. is not a field: there must be a name on either side"),
        ("--train..epochs=1", r"--train\.\.epochs is not a field"),
        ("-train.epochs=1", r"-train\.epochs is not a flag \(did you mean --train\.epochs\?\)"),
        ("-seed=1", r"-seed is not a flag \(did you mean --seed\?\)"),
        ("--train.epochs=" + "9" * 5001, r"train\.epochs='9+ \.\.\. 9+' .*whole number"),
        ("--" + "a." * 3000 + "b=1", r"is refused: lists and tables lie more than 50 deep"),
        ("--seed=" + "[" * 2000, r"seed='\[+ \.\.\. \[+' .*whole number"),
    ],
)
def test_flags_that_once_went_wrong(tmp_path, capsys, flag, said):
    """Of all kinds of dots."""
    assert main(["config", "show", run_toml(tmp_path), "--devices", "1", flag]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_many_problems_are_counted_and_some_told(tmp_path, capsys):
    """Twenty lines, and not three thousand."""
    text = RUN.replace("[8]", str(["a"] * 3000)) + SCHEDULE

    assert main(["config", "show", run_toml(tmp_path, text), "--devices", "1"]) == 2
    message = capsys.readouterr().err
    assert "And 2,980 more problems" in message
    assert message.count("model.hidden.") == 20


def test_a_long_value_is_cut_in_the_middle():
    """Its ends say which it is; numbers that Python does not spell out are measured."""
    assert refusal("x", "a" * 1000 + "b", "no").count("a") < 450
    assert refusal("x", 2**100_000, "no").startswith("x=a whole number of 100001 bits is refused")


@pytest.mark.parametrize("text", ["x = '" + "a.b " * 1000 + "'", "x = [" + "0.1, " * 1000 + "]"])
def test_dots_in_values_are_no_long_key(text):
    """Numbers and sentences have them too."""
    assert parse_toml(text)


def test_fields_of_many_bits_are_refused_beyond_64(tmp_path):
    """The largest that TOML has is taken where a field bears it."""
    assert load_config(
        Path(run_toml(tmp_path, RUN + SCHEDULE + f"input.memory_bytes = {2**63 - 1}"))
    )
    assert np.iinfo(np.int64).max == 2**63 - 1


def test_what_was_accepted_and_made_no_sense_is_refused(tmp_path, monkeypatch, capsys):
    """Found by what the fuzzer says of accepted cases, or as tracebacks: numbers far from any that
    were measured, and positions of points that are not there."""
    (tmp_path / "run.toml").write_text(RUN + SCHEDULE)
    (tmp_path / "points.toml").write_text(
        "noise_scale = 5e-324\ntarget = 0.9\n"
        "points = [{global_batch = 16, steps_to_target = 4000.0}]\n"
    )
    (tmp_path / "points.csv").write_text("global_batch,steps_to_target" + "x" * 200_000 + "\n1,2\n")
    (tmp_path / "numbers.csv").write_bytes(b"x,\xca\n1,2\n")
    cluster = CLUSTER.read_text()
    assert "\nattainable_fraction = 0.9\n" in cluster
    (tmp_path / "slow.toml").write_text(
        cluster.replace("\nattainable_fraction = 0.9\n", "\nattainable_fraction = 1e-300\n", 1)
    )
    monkeypatch.chdir(tmp_path)
    plan = ["plan", "run.toml", "--clusters", "dgx-h100", "--devices", "8", "--convergence"]
    for words, said in (
        ([*plan, "points.toml"], "convergence.noise_scale=5e-324 is refused"),
        ([*plan, "points.csv"], "'points.csv' is refused: it must be CSV"),
        (["data", "inspect", "numbers.csv"], "its column names must be UTF-8"),
        (
            ["predict", "run.toml", "--cluster", "slow.toml", "--devices", "8"],
            "link.attainable_fraction=1e-300 is refused: it must be at least 1e-06",
        ),
    ):
        assert main(words) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def beyond() -> Callable[[str, float], str | None]:
    """How the fuzzer's judge says that a number is beyond what makes sense."""
    spec = importlib.util.spec_from_file_location("sense", FUZZ.parent / "sense.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.beyond


@pytest.mark.parametrize("name", ["dgx-h100", "dgx1-v100", "gb200-nvl72", "tpu-v5p"])
def test_no_number_of_hardware_is_accepted_that_makes_no_sense(name, beyond):
    """What the loader accepts lies within the bounds that the fuzzer's judge states for itself."""
    accepted = 0
    for table, field in numeric_fields(hardware.load_cluster(name)):
        for value in (-1, -1e-9, 1, 1 + 1e-6, 3, 1e3, 1e6, 1e9, 1e12, 1e15, 1e19, 1e21, 1e30):
            try:
                replace(table, **{field: value})
            except ConfigError:
                continue
            accepted += 1
            assert beyond(field, value) is None, (type(table).__name__, field, value)
    assert accepted > 100


def numeric_fields(table: Any) -> Iterator[tuple[Any, str]]:
    """Fields of a dataclass and of those in it that are one number."""
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if dataclasses.is_dataclass(value):
            yield from numeric_fields(value)
        elif field.type in (float, float | None):
            yield table, field.name


def test_an_end_of_a_schedule_that_is_no_number_is_refused(tmp_path):
    """It is not at or below the start, and so was taken for an end after it."""
    multipliers = "[{ multiplier = 0.1, start_epoch = 1, end_epoch = nan }]"
    text = (
        'schedule = { name = "horovod", initial_learning_rate = 0.1, workers = 8, '
        f"multipliers = {multipliers} }}\n"
    )
    with pytest.raises(ConfigError, match=r"schedule\.multipliers\.0\.end_epoch=nan is refused"):
        load_config(Path(run_toml(tmp_path, RUN + text)))


def test_a_record_shorter_than_its_checkpoint_says_takes_no_memory(tmp_path):
    """As many bytes as a damaged manifest says were asked for at once."""
    path = tmp_path / "measurements.jsonl"
    path.write_bytes(b"{}")
    with pytest.raises(Damaged, match="the record has 2 bytes of the 4,611,686"):
        RecordPosition(size_bytes=2**62, sha256="").part_of(path)


@pytest.mark.parametrize("devices", [2**40, 2**62])
def test_a_batch_over_more_devices_than_any_is_refused_at_once(devices):
    """The counts of devices that would divide it were tried one by one, for ever."""
    with pytest.raises(ConfigError, match=r"batch\.global_batch=7 is refused"):
        BatchSplit(global_batch=7, layout=Layout(data=devices))


def test_a_batch_of_more_samples_than_there_are_is_refused(tmp_path):
    """A search tried its divisors for ever."""
    text = RUN.replace("global_batch = 16", f"global_batch = {2**63 - 1}")
    with pytest.raises(ConfigError, match=r"batch.global_batch=9223372036854775807 is refused"):
        load_config(Path(run_toml(tmp_path, text + SCHEDULE)))


@pytest.mark.parametrize("field", ["weight_decay", "epsilon"])
def test_constants_of_optimizers_that_leave_nothing_are_refused(tmp_path, field):
    """By name, above a million."""
    text = RUN.replace(
        'optimizer.name = "sgd"', f'optimizer = {{ name = "adamw", {field} = 1e308 }}'
    )
    with pytest.raises(ConfigError, match=f"optimizer.{field}=1e.308 is refused"):
        load_config(Path(run_toml(tmp_path, text + SCHEDULE)))


def test_brackets_of_a_file_are_no_markup(tmp_path, capsys):
    """A hardware name of a ledger with them was a traceback of what draws tables."""
    heading = "system,operation,dtype,devices,message_bytes,microseconds,nccl_version,file"
    row = "h100_sxm,all_reduce,half[/],8,1024,10,2.20,a"
    (tmp_path / "ledger.csv").write_text(f"{heading}\n{row}\n{row.replace('h100_sxm', '[/]')}\n")

    main(["validate", str(tmp_path / "ledger.csv")])

    assert "[/]" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["1e308", "5e-324"])
def test_numbers_of_a_ledger_lie_within_what_is_ever_measured(tmp_path, number):
    """Their products were infinite, and the logarithm of one was a traceback."""
    path = tmp_path / "ledger.csv"
    path.write_text(f"system,dtype,m,n,k,microseconds,tflops,file\nh100,half,1,1,1,{number},1,a\n")

    with pytest.raises(ConfigError, match=r"line 2, column 6: microseconds='.*must be from 1e-18"):
        read_any(path)


def test_a_network_of_a_ledger_has_no_more_layers_than_any(tmp_path):
    """Of 9e18 a step was predicted, of a hundred million years."""
    path = tmp_path / "ledger.csv"
    table = files("scalejax") / "validation/example.csv"
    heading, *rows = table.read_text().splitlines()
    at = heading.split(",").index("layers")
    row = next(row for row in csv.reader(rows) if row[at])
    row[at] = str(2**63 - 1)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heading.split(","), row])

    with pytest.raises(ConfigError, match=r"layers='9223372036854775807' is refused: .* to 100000"):
        read_any(path)


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"hidden": 2**40}, "model.hidden=1099511627776 is refused: it must be from 1 to 100,000,"),
        (
            {"name": "llama", "kv_heads": 1, "norm_epsilon": 2.0**31},
            "model.norm_epsilon=2147483648.0 is refused: it must be at most 1",
        ),
        ({"hidden": 2 * 10**7}, "the training step needs .* of memory, and this machine has"),
        (
            {"hidden": 2 * 10**7, "layers": 1000},
            r"array float32\[1000,.*, larger than XLA can index",
        ),
    ],
)
def test_a_network_that_no_machine_holds_is_refused(tmp_path, sizes, refused):
    """The first and the last ended the process, from within XLA; of the second the system killed
    what it had promised memory to."""
    table = {
        "model": {"name": "gpt", "heads": 1, **sizes},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 16},
        "batch": {"global_batch": 4},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.1},
    }
    with pytest.raises(ScalejaxError, match=refused):
        train(build(RunConfig, table), tmp_path / "run", device_count=1)


def test_a_device_without_memory_left_is_a_refusal():
    """As XLA says it, and nothing else that it says."""
    memory, other = (
        f"RESOURCE_EXHAUSTED: {said}"
        for said in ("Out of memory allocating 8 bytes.", "a long message")
    )
    wanted = (
        r"the memory of a device is used up \(Out of memory allocating 8 bytes\): a smaller batch"
    )
    with pytest.raises(DoesNotFit, match=wanted), refusing_without_memory():
        raise jax.errors.JaxRuntimeError(memory)
    with pytest.raises(jax.errors.JaxRuntimeError, match=other), refusing_without_memory():
        raise jax.errors.JaxRuntimeError(other)


@pytest.mark.parametrize("column", ["kv_heads", "layers", "data", "microbatch", "device_count"])
def test_what_a_ledger_counts_is_at_least_one(tmp_path, column):
    """No heads of keys were a traceback: devices of the tensor axis were divided by them."""
    path = tmp_path / "ledger.csv"
    heading, row, *_ = (files("scalejax") / "validation/example.csv").read_text().splitlines()
    cells = dict(zip(heading.split(","), next(csv.reader([row])), strict=True)) | {column: "0"}
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(cells), list(cells.values())])

    with pytest.raises(ConfigError, match=f"{column}='0' is refused: .* whole number, 1 or more"):
        read_any(path)


@pytest.mark.parametrize(("name", "value"), [("rows", 0), ("coverage", 1.5), ("mean_error", -1.0)])
def test_accuracy_of_a_release_makes_sense(name, value):
    """A mean over cells of no rows was a traceback."""
    cell = {
        "quantity": "step time", "family": "a", "framework": "xla", "chip": "h100", "rows": 3,
        "median_error": 0.1, "mean_error": 0.1, "bias": -0.1, "coverage": 0.5,
    }  # fmt: skip

    with pytest.raises(ConfigError, match=f"{name}={value} is refused"):
        build(Accuracy, {"release": "0.2.0", "cells": [cell | {name: value}]})


def test_a_ledger_of_losses_names_the_column_that_is_wrong(tmp_path):
    """Where its runs are made of rows, the name was another."""
    path = tmp_path / "ledger.csv"
    path.write_text("lr,bs,smooth loss,D,N,exp_name\n0.001,0,2.5,1e9,1e9,a\n")

    with pytest.raises(ConfigError, match=r"line 2, column 2: bs=.0. is refused"):
        read_any(path)


def test_counts_of_machines_in_a_ledger_are_at_least_one(tmp_path):
    """No nodes were a traceback; and they are no more than anybody has."""
    path = tmp_path / "nodes.csv"
    for count, accepted in ((0, "1 or more"), (2**70, "from 1 to 1e.08")):
        path.write_text(
            "operation,nodes_of_8_h100,bus_bandwidth_gbytes_per_s,source\n"
            f"ReduceScatter,{count},54.5,a\n"
        )
        with pytest.raises(
            ConfigError, match=f"nodes_of_8_h100='{count}' is refused: .*{accepted}"
        ):
            read_any(path)


@pytest.mark.parametrize(
    ("field", "value"), [("device_count", 0), ("run_seconds", math.inf), ("steps", -1.0)]
)
def test_points_of_a_plan_on_file_make_sense(field, value):
    """The report of others was a traceback: no devices divided, and of no time was a logarithm."""
    point = PlanPoint(
        cluster="a", device_count=8, global_batch=8, per_device_batch=1, steps=1.0,
        step_seconds=1.0, goodput=None, run_seconds=1.0, p10_run_seconds=None,
        p90_run_seconds=None, device_hours=1.0, cost=1.0,
    )  # fmt: skip

    with pytest.raises(ConfigError, match=f"points.{field}=.* is refused"):
        replace(point, **{field: value})


def test_a_plan_without_an_end_is_told():
    """Of a file whose number of updates is infinite."""
    assert format_steps(float("inf")) == "n/a"


def test_results_of_integers_wider_than_any_end_in_no_traceback(tmp_path):
    """Nor do results that are no Parquet at all: both are refused by their file."""
    path = tmp_path / "results.parquet"
    pq.write_table(pa.table({"global_batch": pa.array([1], pa.uint64())}), path, store_schema=False)
    whole = path.read_bytes()
    refused = 0
    for at in range(len(whole) - int.from_bytes(whole[-8:-4], "little") - 8, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xC0]) + whole[at + 1 :])
        try:
            read_data(path, target=None, train_examples=None)
        except ConfigError:
            refused += 1
    assert refused > 50


def test_no_byte_of_the_footer_of_a_parquet_file_ends_in_a_traceback(tmp_path):
    """Numbers of more than 64 bits and names that are no UTF-8 did: each is read, or refused."""
    path = tmp_path / "x.parquet"
    table = pa.table({"label": pa.array([0, 1], pa.uint8())})
    pq.write_table(table, path, compression="none", store_schema=False)
    whole = path.read_bytes()
    refused = 0
    for at in range(len(whole) - int.from_bytes(whole[-8:-4], "little") - 8, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xC0]) + whole[at + 1 :])
        try:
            find_files("data.train", str(path), ["label"])
        except ConfigError:
            refused += 1
    assert refused > 50


def test_names_of_options_of_a_batch_script_are_names(tmp_path):
    """`--slurm '%YAML 1.1'` was a line of two options."""
    for option in ("%YAML 1.1", "x y=1", "#x", "Account=1"):
        with pytest.raises(ConfigError, match=r"slurm='.*must be an option of sbatch"):
            SlurmRun(
                command=("train",), run_marker=None, processes=1, options=(option,),
                folder=tmp_path, name="run",
            )  # fmt: skip


IMPOSSIBLE = {
    "share": (lambda p: {"operations": [p["operations"][0] | {"share": 1e300}]}, r"share=1e\+300"),
    "flop": (lambda p: {"operations": [p["operations"][0] | {"flop": -1}]}, "flop=-1 "),
    "devices": (lambda p: {"mesh_axes": [["data", 0]]}, "mesh_axes.data=0 "),
    "waits": (
        lambda p: {"operations": [p["operations"][0] | {"waits_for": "x"}]},
        r"\w+.waits_for='x' is refused: it must be the name of an operation .*here there is none",
    ),
    "memory": (lambda p: {"memory": p["memory"] | {"alias_bytes": 2**50}}, "memory.alias_bytes="),
    "loops": (
        lambda p: {
            "operations": [
                {"name": "a", "trip_count": 10**6, "body": [
                    {"name": "b", "trip_count": 10**6, "body": p["operations"][:1]}]}
            ]
        },
        "the sum of operations",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_programs_that_no_device_could_run_are_refused(tmp_path, what):
    """Their steps would take 1e302 seconds, and `compare` printed that."""
    change, said = IMPOSSIBLE[what]
    program = json.loads(json.dumps(plain(PROGRAM)))
    path = tmp_path / "program.json"
    path.write_text(json.dumps(program | change(program)))

    with pytest.raises(ConfigError, match=f"program.json: {said}|program.json: .*{said}"):
        load_program(path)


def test_a_network_that_an_axis_does_not_split_is_refused_by_its_field(tmp_path):
    """Which of the two was changed is not known: both are named."""
    with pytest.raises(ConfigError, match=r"layout\.pipeline=2 .* not model\.name='mlp'"):
        load_config(Path(run_toml(tmp_path, RUN + SCHEDULE + "layout.pipeline = 2\n")))


@pytest.mark.parametrize("flag", ["-P", "-V", "-E"])
def test_long_texts_of_a_sweep_are_cut(tmp_path, monkeypatch, capsys, flag):
    """What might be meant was printed whole, after seconds of looking for passwords in it."""
    monkeypatch.chdir(tmp_path)
    run_toml(tmp_path, RUN + SCHEDULE)
    start = time.process_time()
    for text in ("seed=[" + "a." * 20_000 + "]", "a." * 20_000):
        assert main(["sweep", "run.toml", "--plan", "--cpu-devices", "1", flag, text]) == 2
        assert 0 < len(capsys.readouterr().err) < 3000
    assert time.process_time() - start < 3  # it was 20 and more


def test_a_batch_of_more_than_the_examples_names_the_data(tmp_path):
    """Which may be what is wrong."""
    config = load_config(Path(run_toml(tmp_path, RUN + SCHEDULE)), {"data.train_examples": 3})

    with pytest.raises(ConfigError, match=r"batch\.global_batch=16 .* training examples of data"):
        resolve(config, 1)


def test_numbers_of_many_digits_in_a_file_are_refused_by_name(tmp_path):
    """As those of TOML are: no float holds them, and a report ended in a traceback."""
    path = tmp_path / "program.json"
    written = json.dumps(plain(PROGRAM)).replace(
        '"argument_bytes":4', f'"argument_bytes":{10**400}'
    )
    path.write_text(written.replace('"argument_bytes": 4', f'"argument_bytes": {10**400}'))

    with pytest.raises(ConfigError, match=r"memory\.argument_bytes=.*must fit 64 bits"):
        load_program(path)


@pytest.mark.parametrize("count", ["2", "-2"])
def test_a_folder_whose_name_is_too_long_is_refused(tmp_path, capsys, count):
    """It was a traceback."""
    words = ["launch", run_toml(tmp_path, RUN + SCHEDULE), f"--np={count}", "--folder", "x" * 300]

    assert main(words) == 2
    assert "' is refused: it cannot be read" in " ".join(capsys.readouterr().err.split())
