"""The log of an emulated run says all that was computed, and nothing that was not."""

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from emulated_outcomes import VARIED, LastEvaluated, emulated, figures_of, run_of, same_bits, whole

from scalejax.config.emulation import (
    DownpourConfig,
    EmulationConfig,
    FailuresConfig,
    SandblasterConfig,
    SynchronousConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.emulation import executor
from scalejax.emulation.event_log import EventLog, read_events
from scalejax.emulation.instructions import InstructionLog, Rows
from scalejax.emulation.replay import replay
from scalejax.emulation.run import executor_of

ADAGRAD = {"optimizer": {"name": "adagrad"}}
ALGORITHMS = {
    "downpour": DownpourConfig(n_fetch=2, n_push=3, local_learning_rate=0.01),
    "all_reduce": SynchronousConfig(),
    "parameter_server": SynchronousConfig(gradient_sync="parameter_server", backup_workers=1),
    "sandblaster": SandblasterConfig(),
}
FAILURES = FailuresConfig(worker_mtbf_seconds=9, worker_restart_seconds=2)


def emulation_of(name: str) -> EmulationConfig:
    """Four workers that fail, three servers."""
    return EmulationConfig(
        algorithm=ALGORITHMS[name], workers=4, server_shards=3, failures=FAILURES
    )


@pytest.mark.slow_except("downpour", "all_reduce")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_computed_again_from_its_file(tmp_path, name: str):
    """Every line but its wall times, and the parameters, bit for bit, with no simulation."""
    emulation, fields = emulation_of(name), {"batch.global_batch": 6, **ADAGRAD}
    ran = emulated(emulation, VARIED, fields)
    with closing(EventLog(tmp_path / "events.parquet")) as log:
        for each in ran.log:
            log.write(each)

    read, lines = read_events(tmp_path / "events.parquet"), []
    run = run_of(fields)
    with LastEvaluated() as last:
        replay(run, emulation, read, lines.append)

    assert read == ran.log
    assert figures_of(lines) == ran.figures
    assert [line.elapsed_seconds for line in lines] == ran.seconds
    assert same_bits(whole(run, emulation, last.parts), ran.params)


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 37])
def test_gradients_are_the_same_in_every_company(size: int, monkeypatch):
    """Alone, with seven others, or with seven of whom three are others: the same bits."""
    fields = {"data.image_size": size, "model.hidden": [size, 16], "batch.global_batch": 4}
    emulation = EmulationConfig(algorithm=DownpourConfig(), server_shards=2)

    def gradients(kept: Iterable[int]) -> dict:
        parts = executor_of(run_of(fields), emulation)
        instructions = InstructionLog(parts, lambda: 0.0, 2)
        params = instructions.initial()
        made = [
            instructions.gradient(params, Rows(worker=0, index=index, workers=1, way="own"))
            for index in range(12)
        ]
        made = {index: made[index] for index in kept}  # the others are let go
        return {
            index: [instructions.read(part) for part in (*gradient, metrics)]
            for index, (gradient, metrics) in made.items()
        }

    together, some = gradients(range(12)), gradients((1, 2, 4, 5, 7, 8, 9, 10, 11))
    monkeypatch.setattr(executor, "TOGETHER", 1)
    alone = gradients(range(12))

    assert same_bits(together, alone)
    assert all(same_bits(some[index], alone[index]) for index in some)


def test_what_is_pushed_is_applied_once_on_every_server():
    """Each gradient that goes into the parameters does so once on each server, and whole."""
    ran = emulated(emulation_of("downpour"), VARIED, {"batch.global_batch": 6, **ADAGRAD})
    assert ran.emulation.worker_failures > 0
    made = {number: each for each in ran.log for number in each.outputs}

    def minibatches(number: int, place: int) -> Counter:
        """The gradients that a value is the sum of, all of them the part of one server."""
        each = made[number]
        if each.operation == "combine":
            assert each.factors == (1.0, 1.0)
            return sum((minibatches(one, place) for one in each.inputs), Counter())
        assert each.operation == "gradient"
        assert each.rows is not None
        assert each.outputs.index(number) == place
        return Counter([(each.rows.worker, each.rows.index)])

    applied = [Counter() for _ in range(3)]
    server_of = {}
    for each in ran.log:
        if each.operation == "initial":
            server_of = {number: place for place, number in enumerate(each.outputs)}
        if each.operation == "update":
            params, _, gradient = each.inputs
            place = server_of.pop(params)  # the newest that this server has
            server_of[each.outputs[0]] = place
            applied[place] += minibatches(gradient, place)

    assert all(set(each.values()) == {1} for each in applied)
    everywhere = applied[0] & applied[1] & applied[2]
    assert everywhere.total() >= ran.emulation.gradients  # what ends the run has been everywhere
    begun = {(each.rows.worker, each.rows.index) for each in ran.log if each.rows is not None}
    assert set(applied[0]) < begun  # those of the dead were begun, and never sent


def test_a_log_of_another_run_is_refused(tmp_path):
    """As is a file that is none."""
    emulation = EmulationConfig(algorithm=DownpourConfig(), server_shards=2)
    ran = emulated(emulation)
    other = EmulationConfig(algorithm=DownpourConfig(), server_shards=1)
    (tmp_path / "none").write_text("no Parquet")

    with pytest.raises(ConfigError, match="of row 1=2 is refused: it must be 1 for 'initial' "):
        replay(run_of(), other, ran.log, lambda line: None)
    with pytest.raises(ConfigError, match="inputs of row 1=0 is refused: it must be of values"):
        replay(run_of(), emulation, ran.log[1:], lambda line: None)
    damaged = [
        replace(each, inputs=each.inputs * 2) if each.operation == "evaluated" else each
        for each in ran.log
    ]
    with pytest.raises(ConfigError, match="2 is refused: it must be 1 for 'evaluated': the log"):
        replay(run_of(), emulation, damaged, lambda line: None)
    for change, refused in (
        ({"factors": (0.0,)}, "operation of row .*='trained' is refused: it cannot be executed"),
        ({"factors": (-1.0,)}, "factors=-1.0 is refused: it must be a step of this run, 0 to"),
        ({"factors": ()}, "'trained' is refused: it cannot be executed .IndexError"),
        ({"operation": "trane"}, "operation of row .*='trane' is refused: it must be one of init"),
    ):
        damaged = [
            replace(each, **change) if each.operation == "trained" else each for each in ran.log
        ]
        with pytest.raises(ConfigError, match=refused):
            replay(run_of(), emulation, damaged, lambda line: None)
    with pytest.raises(ConfigError, match="cannot be read as the log"):
        read_events(tmp_path / "none")
    with closing(EventLog(tmp_path / "log")) as log:
        log.write(ran.log[0])
    stored = pq.read_table(tmp_path / "log")
    for name, cell, refused in (
        ("outputs", 2**30, "outputs=1073741824 is refused: it must be from 0 to 1,048,576"),
        ("outputs", -1, "outputs=-1 is refused"),
        ("factors", None, "factors is blank in a row"),
    ):
        place, field = stored.schema.get_field_index(name), stored.schema.field(name)
        damaged = stored.set_column(place, field, pa.array([cell], field.type))
        pq.write_table(damaged, tmp_path / "damaged")
        with pytest.raises(ConfigError, match=refused):
            read_events(tmp_path / "damaged")


def test_an_emulated_run_is_tested_once_at_its_end():
    """Until then it is evaluated on what is held out; the log says both, and gives them again."""
    emulation = EmulationConfig(algorithm=DownpourConfig(), workers=2)
    fields = {"data.validation_fraction": 0.25, "train.epochs": 2}
    ran, lines = emulated(emulation, VARIED, fields), []

    replay(run_of(fields), emulation, ran.log, lines.append)

    kinds = [line.kind for line in lines if line.kind != "train"]
    assert kinds == ["validation", "validation", "evaluation"]
    assert (lines[-1].chosen_step, lines[-1].chosen_by) == (lines[-2].step, "last")
    assert figures_of(lines) == ran.figures
