"""The verbs of `from scalejax import ...`: what commands do, as functions."""

from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from program_cases import matmul, program_of

import scalejax
from scalejax import predict, xla
from scalejax.core.errors import ConfigError, DoesNotFit, ScalejaxError, UnknownHardware
from scalejax.hardware import load_cluster
from scalejax.simulator.frameworks import Framework
from scalejax.simulator.program import Program
from scalejax.validation.cases import Case, case_of
from scalejax.validation.ledger import read_ledger
from scalejax.validation.programs import ARCHIVE
from scalejax.xla import ProfileJob
from scalejax.xla.archive import read_archive
from scalejax.xla.cache import case_key
from scalejax.xla.functions import call_of, pickled, unpickled
from scalejax.xla.job import Compiled

RUN = """
[model]
name = "mlp"
[data]
name = "fashion_mnist"
[batch]
per_device_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
"""
SMALL = replace(load_cluster("dgx-h100"), max_device_count=8)


def product(weights, rows):
    """Stands for a step: rows are the samples."""
    return (rows @ weights).sum()


WEIGHTS, ROWS = jax.ShapeDtypeStruct((4, 3), "float32"), jax.ShapeDtypeStruct((16, 4), "float32")
TABLE = jax.ShapeDtypeStruct((8, 3), "float32")
EXAMPLE = Path(scalejax.__file__).parent / "config/examples/fashion_small_batch.toml"


GPT = {
    "model": {"name": "gpt", "layers": 2, "hidden": 64, "heads": 4},
    "data": {"name": "synthetic_tokens", "tokens": 32, "vocabulary": 512},
}
BY = "megatron-lm-2022"
VERBS = {
    "compare": lambda run: scalejax.compare(run, run, "dgx-h100", 8, framework=BY),
    "explain": lambda run: scalejax.explain(run, "dgx-h100", 8, framework=BY),
    "cost": lambda run: scalejax.cost(run, ["dgx-h100"], [8], steps=10, framework=BY),
    "plan": lambda run: scalejax.plan(run, ["dgx-h100"], [8], framework=BY, layouts="file"),
    "predict": lambda run: scalejax.predict(run, "dgx-h100", 8, framework=BY),
    "search": lambda run: scalejax.search(
        run, "dgx-h100", 8, global_batch=64, top=1, confirm=1, framework=BY
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_passes_the_framework_on(verb: str, tmp_path: Path, monkeypatch):
    """To each step that it costs, compiled or not; else the figures would be XLA's."""
    applied: list[str] = []

    def transformed(framework: Framework, program: Program, *given: object) -> Program:
        applied.append(framework.name)
        return program

    def compiled(jobs, on_done, on_error=None):
        for position, job in enumerate(jobs):
            step = program_of(matmul("m", 1.0), devices=job.target.device_count)
            on_done(position, Compiled(program=step))

    monkeypatch.setattr(Framework, "applied", transformed)
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", compiled)
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    path = tmp_path / "run.toml"
    path.write_text(RUN)

    VERBS[verb](scalejax.load_config(path, GPT))

    assert set(applied) == {BY}


@pytest.mark.parametrize("row", [0, 2])  # by XLA on one device; by Megatron-LM over 2 stages
def test_a_row_of_validate_is_what_predict_says(row: int, tmp_path: Path, monkeypatch):
    """To the last digit, of the same compiled step: the table is of what users get."""
    ledger = Path(scalejax.__file__).parent / "validation" / "example.csv"
    case = case_of(read_ledger(ledger)[row])
    assert isinstance(case, Case)
    (run,) = case.runs

    def archived(jobs, on_done, on_error):
        for position, job in enumerate(jobs):
            program = read_archive(ARCHIVE).program(case_key(job))
            assert program is not None
            on_done(position, Compiled(program=program))

    monkeypatch.setattr("scalejax.xla.batch.run_jobs", archived)
    monkeypatch.setattr("scalejax.xla.target.has_cuda_compiler", lambda: True)
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))

    found = predict(run.config, case.cluster, case.row.device_count, framework=case.framework)

    result = scalejax.validate(ledger).rows[row]
    assert result.predicted_seconds == found.step_seconds
    assert (result.p10_seconds, result.p90_seconds) == (
        found.p10_step_seconds,
        found.p90_step_seconds,
    )


@pytest.mark.slow  # compiles in workers
def test_a_run_is_predicted_from_its_file_its_config_its_program_and_its_step(tmp_path: Path):
    """To the same time: all are the one step that trains."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    config = scalejax.load_config(path)
    run = scalejax.resolve(config, 2)
    cluster = load_cluster("dgx-h100")
    step = scalejax.build_step(run, scalejax.build_mesh(run.layout))
    program = scalejax.profile_many([ProfileJob(run=run, cluster=cluster)])[0]

    found = [
        predict(str(path), "dgx-h100", 2),
        predict(config, cluster, 2),
        predict(program, cluster),
        predict(step, cluster),
        predict(config, cluster, [2, 4]).predictions[0],
    ]

    assert len({each.step_seconds for each in found}) == 1
    assert found[0].epoch_seconds == found[3].epoch_seconds
    assert "step_seconds" in found[0].to_rows()[0]
    assert "<table>" in found[0]._repr_html_()
    assert found[0].to_dict()["device_count"] == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"devices": None}, ConfigError, r"devices=None is refused: one number is needed"),
        ({"devices": 3}, ConfigError, r"arguments\[1\]\.shape\[0\]=16 is refused.*devices=3"),
        ({"devices": 2**20}, ConfigError, r"nearest"),
        ({"batch_argnums": 7}, ConfigError, r"batch_argnums=7 is refused: there are 2"),
        ({"batch_argnums": (0, 9)}, ConfigError, r"batch_argnums=9 is refused: there are 2"),
        ({"arguments": ("words", ROWS)}, ConfigError, r"arguments='words' is refused"),
        ({"framework": "megatron-lm"}, ConfigError, r"framework='megatron-lm-2022' is refused"),
        ({"framework": "megatrom-lm"}, ConfigError, r"framework='megatrom-lm' is refused"),
        ({"subject": 7}, ConfigError, r"subject=7 is refused"),
        ({"subject": (product, WEIGHTS)}, ConfigError, r"a pair is \(function, arguments\)"),
        ({"subject": (product, (WEIGHTS, ROWS))}, ConfigError, r"has them already; leave one out"),
        ({"devices": [2, 3]}, ConfigError, r"shape\[0\]=16 is refused.*devices=3"),
        ({"devices": []}, ConfigError, r"devices=\[\] is refused: at least one"),
        ({"devices": [3, 4], "scaling": "weak"}, ConfigError, r"16 samples on the fewest devices"),
        ({"devices": "8"}, ConfigError, r"devices='8' is refused: it must be a whole number"),
        ({"scaling": "strong"}, ConfigError, r"scaling='strong' is refused: it is of several"),
        ({"subject": EXAMPLE}, ConfigError, r"arguments=.* is refused: it is of a function"),
        (
            {"arguments": (WEIGHTS, {"rows": ROWS, "table": TABLE})},
            ConfigError,
            r"batch_argnums=\(1,\) is refused: its arrays have 8, 16 rows",
        ),
        ({"cluster": "dgx-h1000"}, UnknownHardware, r"dgx-h1000.*dgx-h100"),
        ({"cluster": SMALL, "devices": 16}, DoesNotFit, r"devices=16 is refused"),
    ],
)
def test_what_cannot_be_predicted_is_refused_at_the_door(change, error, message):
    """With the argument's name, before anything is compiled."""
    given = {
        "subject": product,
        "cluster": "dgx-h100",
        "devices": 8,
        "arguments": (WEIGHTS, ROWS),
        **change,
    }

    with pytest.raises(error, match=message):
        predict(given.pop("subject"), given.pop("cluster"), given.pop("devices"), **given)


@pytest.mark.slow  # compiles for CUDA, thrice at once
def test_a_function_and_its_arguments_are_a_subject_of_every_verb():
    """In a pair, on one number of devices or several, compiled once for each; and a run of it is
    costed by its updates, or its tokens."""
    pair = product, (WEIGHTS, ROWS)
    one = predict(pair, "dgx-h100", 8)
    grown = predict(pair, "dgx-h100", [2, 8])
    weak = predict(pair, "dgx-h100", [2, 8], scaling="weak")
    compiled = len(xla._FUNCTIONS)

    assert grown.scaling == "strong"
    assert grown.predictions[1] == one == predict(product, "dgx-h100", 8, arguments=pair[1])
    assert [each.global_batch for each in grown.predictions] == [16, 16]
    assert [each.global_batch for each in weak.predictions] == [16, 64]
    assert scalejax.explain(pair, "dgx-h100", 8).step_seconds == one.step_seconds
    assert scalejax.timeline(pair, "dgx-h100", 8).step_seconds == pytest.approx(
        sum(seconds or 0 for name, seconds in one.waterfall if name != "stragglers"), rel=0.05
    )
    assert scalejax.compare(pair, pair, "dgx-h100", 8).time_ratio == 1
    (row,) = scalejax.cost(pair, ["dgx-h100"], [8], tokens=1e6, tokens_per_step=100).rows
    assert row.run_seconds is not None
    assert row.run_seconds == 10_000 * one.step_seconds
    assert row.price == pytest.approx(row.run_seconds / 3600 * 8 * 2.95)
    assert len(xla._FUNCTIONS) == compiled


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"give steps, or tokens and tokens_per_step"),
        ({"tokens": 1e6}, r"give steps, or tokens and tokens_per_step"),
        ({"epochs": 3}, r"give steps, or tokens and tokens_per_step"),
        ({"tokens": 1e6, "tokens_per_step": 0}, r"tokens_per_step=0 is refused"),
        ({"run": EXAMPLE, "tokens_per_step": 9}, r"tokens_per_step=9 is refused: it is of"),
        ({"steps": 3, "framework": "megatron-lm"}, r"framework='megatron-lm-2022' is refused"),
    ],
)
def test_cost_refuses_work_that_a_function_does_not_say(given, message):
    """Before it compiles anything."""
    run = given.pop("run", (product, (WEIGHTS, ROWS)))

    with pytest.raises(ConfigError, match=message):
        scalejax.cost(run, ["dgx-h100"], [8], **given)


PAIR = product, (WEIGHTS, ROWS)


def as_any(value: Any) -> Any:
    """A value of a type that is not taken."""
    return value


@pytest.mark.parametrize("subject", [EXAMPLE, PAIR], ids=["run", "function"])
@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda it: scalejax.explain(it, "dgx-h100", as_any([1, 2])),
            r"devices=\[1, 2\] .*one number is",
        ),
        (
            lambda it: scalejax.timeline(it, "dgx-h100", as_any([1, 2])),
            r"devices=\[1, 2\] .*one number is",
        ),
        (lambda it: scalejax.timeline(it, "dgx-h100"), r"devices=None .*one number is"),
        (
            lambda it: scalejax.compare(it, it, "dgx-h100", as_any([1, 2])),
            r"devices=\[1, 2\] .*one number",
        ),
        (lambda it: scalejax.predict(it, "dgx-h100", []), r"devices=\[\] .*at least one"),
        (lambda it: scalejax.predict(it, "dgx-h100", [0, 2]), r"devices=0 .*at least 1"),
        (lambda it: scalejax.cost(it, ["dgx-h100"], [], steps=9), r"devices=\[\] .*at least one"),
        (lambda it: scalejax.cost(it, [], 2, steps=9), r"clusters=\[\] .*at least one"),
        (lambda it: scalejax.cost(it, as_any(7), 2, steps=9), r"clusters=7 .*at least one"),
        (lambda it: scalejax.cost(it, "dgx-h1000", 2, steps=9), r"'dgx-h1000'.*dgx-h100"),
        (
            lambda it: scalejax.cost(it, "dgx-h100", 2, steps=as_any(1.5)),
            r"steps=1\.5 .*whole number",
        ),
        (
            lambda it: scalejax.cost(it, "dgx-h100", as_any("2"), steps=9),
            r"devices='2' .*whole number",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_of_runs_and_of_functions(subject, ask, message: str):
    """In one line, before anything is compiled."""
    with pytest.raises(ScalejaxError, match=message):
        ask(subject)


@pytest.mark.parametrize("prices", [[], [1.0, 2.0], "cheap", ["cheap"], np.ones((1, 2))])
@pytest.mark.parametrize("verb", [scalejax.cost, scalejax.plan])
def test_prices_are_one_for_each_cluster(verb, prices):
    """Or none is given: an empty list is not that."""
    with pytest.raises(ConfigError, match=r"prices_per_device_hour=.* one number for each of 1"):
        verb(EXAMPLE, "dgx-h100", 2, prices_per_device_hour=prices)


@pytest.mark.parametrize("subject", [EXAMPLE, PAIR], ids=["run", "function"])
def test_one_cluster_and_one_number_stand_for_lists_of_one(subject, tmp_path: Path, monkeypatch):
    """A number that is named twice counts once; a price may be NumPy's."""
    step = replace(program_of(matmul("m", 1.0), devices=2), global_batch=64)

    def compiled(jobs, on_done, on_error=None):
        for position in range(len(jobs)):
            on_done(position, Compiled(program=step))

    monkeypatch.setattr("scalejax.xla.batch.run_jobs", compiled)
    monkeypatch.setattr(
        "scalejax.api.profile_calls", lambda _, cases, **given: [step for _ in cases]
    )
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))

    asked: list[tuple[Any, Any, Any, Any]] = [
        ("dgx-h100", 2, 3, 9),
        (["dgx-h100"], [2, 2], np.array([3.0]), 9),
        (load_cluster("dgx-h100"), np.int64(2), [np.float32(3)], np.int64(9)),
    ]
    for clusters, devices, prices, steps in asked:
        (row,) = scalejax.cost(
            subject, clusters, devices, steps=steps, prices_per_device_hour=prices
        ).rows
        assert row.updates == 9
        assert row.device_hours is not None
        assert row.price == pytest.approx(3 * row.device_hours)
    found = scalejax.plan(EXAMPLE, "dgx-h100", 2, prices_per_device_hour=3, layouts="file")
    assert {(point.cluster, point.device_count) for point in found.points} == {("dgx-h100", 2)}


def test_a_function_without_shardings_is_data_parallel():
    """Over the last argument, or those that are named."""
    last = call_of(product, (WEIGHTS, ROWS), 8)
    first = call_of(product, (ROWS, WEIGHTS), 8, batch_argnums=(-2,))

    assert (last.mesh_axes, last.global_batch) == ({"data": 8}, 16)
    assert (first.mesh_axes, first.global_batch) == ({"data": 8}, 16)
    assert (last.batch_names, first.batch_names) == (("'rows'",), ("'weights'",))
    unnamed = call_of(lambda weights, *rest: product(weights, *rest), (WEIGHTS, ROWS), 8)
    assert unnamed.batch_names == ("argument 1",)

    @wraps(product)
    def scaled(rows):
        return product(WEIGHTS, rows)

    assert call_of(scaled, (ROWS,), 8).batch_names == ("argument 0",)
    mesh = jax.make_mesh((8,), ("data",))
    _, (weights, rows) = last.builder(mesh)
    assert (weights.sharding.spec, rows.sharding.spec) == (PartitionSpec(), PartitionSpec("data"))


def test_a_number_of_python_takes_the_type_of_what_it_meets():
    """As without the compiler elsewhere: it would make bfloat16 parameters float32."""

    def step(weights, rate, rows):
        return weights - rate * (rows @ weights).sum()

    weights, rows = (jax.ShapeDtypeStruct(each.shape, "bfloat16") for each in (WEIGHTS, ROWS))
    call = call_of(step, (weights, 0.1, rows), 8)

    function, arguments = call.builder(jax.make_mesh((8,), ("data",)))
    assert jax.eval_shape(function, *arguments).dtype == "bfloat16"


def test_shardings_of_ones_own_are_kept():
    """Over a mesh that is not here; what has none is replicated."""
    mesh = AbstractMesh((4, 2), ("rows", "columns"))
    own = NamedSharding(mesh, PartitionSpec("rows", "columns"))
    rows = jax.ShapeDtypeStruct((16, 4), "float32", sharding=own)

    call = call_of(product, (WEIGHTS, rows), 8)

    assert call.mesh_axes == {"rows": 4, "columns": 2}
    assert call.global_batch is None
    _, (weights, placed) = call.builder(jax.make_mesh((4, 2), ("rows", "columns")))
    assert (weights.sharding.spec, placed.sharding.spec) == (PartitionSpec(), own.spec)
    with pytest.raises(ConfigError, match="its mesh must have devices=16 devices"):
        call_of(product, (WEIGHTS, rows), 16)


def test_any_function_can_be_sent_to_the_compiler():
    """Closures and jitted functions, which lose their static arguments when pickled otherwise."""
    factor = 3
    jitted = jax.jit(lambda x, n: (x * factor).sum() * n, static_argnums=1)

    again = unpickled(pickled(lambda x: jitted(x, 2), "test"), ())

    assert again(jnp.ones(4)) == 24


def test_what_cannot_be_sent_is_refused():
    """By the function's name."""
    generator = (number for number in range(3))

    with pytest.raises(ConfigError, match=r"function='test' is refused: it must be picklable"):
        pickled(lambda: next(generator), "test")
