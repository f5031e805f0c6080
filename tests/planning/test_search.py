"""Searches over strategies: all of them, none that does not fit, and the times of `predict`."""

import dataclasses
import gc
import json
import math
import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from child_processes import children_of
from hypothesis import given
from hypothesis import strategies as st
from program_cases import matmul, program_of

import scalejax
from scalejax.cli.main import main
from scalejax.config.moe import MoeConfig
from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.config.presets import PRESETS, PublishedTraining
from scalejax.config.run import load_config, published_run
from scalejax.core.errors import ConfigError, DoesNotFit, ScalejaxError
from scalejax.core.progress import Progress
from scalejax.data.facts import resolve
from scalejax.hardware import RunConditions, Site, load_cluster
from scalejax.planning.run_cost import published_decoder
from scalejax.planning.search import (
    Candidate,
    StrategyCosts,
    breakdown_difference,
    deduplicated,
    left_out,
    parallel,
    pareto,
    search,
    space,
    strategies,
)
from scalejax.planning.search import run as searched_run
from scalejax.planning.search.parallel import collecting_seldom
from scalejax.planning.search.run import left_out_notes, run_of, uneven_notes
from scalejax.simulator.predict import predict
from scalejax.simulator.transformer import (
    Strategy,
    TransformerShape,
    memory_by_zero_stage,
    slowest_stage,
    stage_counts,
    transformer_program,
)
from scalejax.xla import closed_form, has_cuda_compiler
from scalejax.xla.closed_form import installed_compiler, shape_of, workspace_bytes

CLUSTER = load_cluster("selene")
SHAPE = TransformerShape(
    layers=8, hidden=1024, heads=16, kv_heads=16, ffn_hidden=4096, vocabulary=32768, tokens=512
)
MIXTURE = replace(
    SHAPE,
    is_gated=True,
    experts=MoeConfig(experts=8, expert_hidden=512, dense_layers=2, shared_experts=1),
)
GPT3 = TransformerShape(
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    ffn_hidden=4 * 12288,
    vocabulary=51200,
    tokens=2048,
    is_fused=False,
)
RUN = """
[model]
name = "gpt"
layers = 4
hidden = 256
heads = 8
compute_dtype = "bfloat16"
[data]
name = "synthetic_tokens"
tokens = 128
vocabulary = 1024
[batch]
global_batch = 16
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.1
"""


@given(devices=st.integers(1, 48), global_batch=st.integers(1, 48))
def test_axes_multiply_to_the_devices(devices: int, global_batch: int):
    """Every strategy uses all devices, divides the batch, and is met once."""
    found = list(strategies(SHAPE, devices, global_batch))

    for each in found:
        assert math.prod(each.layout.axis_sizes.values()) == devices
        split = each.split
        assert split.microbatch * split.microbatches * each.layout.batch_shards == global_batch
        each.require_fits(SHAPE)
    assert len(found) == len(set(found))


def test_two_devices_by_hand():
    """One sample: two stages (of 8 blocks in one chunk), two contexts with attention in three ways
    and state whole or divided, or two along tensor with tokens whole or divided; data and fsdp have
    nothing to divide. Each with the four kinds of recompute."""
    found = list(strategies(SHAPE, 2, 1))

    assert len(found) == (1 + 3 * 2 + 2) * 4


def test_gathered_attention_is_fused_where_shards_have_two_chunks():
    """As it is trained: two contexts of 129 tokens cost the same whatever the chip has."""
    fused = dataclasses.replace(SHAPE, tokens=258, is_fused=True)
    unfused = dataclasses.replace(SHAPE, tokens=258, is_fused=False)
    layout = Layout(context=2)
    over_two = Strategy(split=BatchSplit(global_batch=2, layout=layout))

    one, other = (transformer_program(shape, over_two) for shape in (fused, unfused))
    assert one.operations == other.operations
    assert one.memory == other.memory


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, compute_dtype="float8"),
        replace(SHAPE, layers=7),
        replace(SHAPE, layers=7, vocabulary=1024),
        MIXTURE,
    ],
    ids=[
        "even",
        "float8",
        "the last of unequal stages sets the pace",
        "the first of them",
        "experts",
    ],
)
def test_numbers_are_those_of_predict(shape: TransformerShape):
    """To rounding, over the whole ranking; of the fullest device where loads are uneven."""
    site = Site(conditions=RunConditions(expert_load_exponent=1.2))
    found = search(shape, CLUSTER, (8,), 16, site=site)
    assert {each.strategy.layout.expert for each in found.ranked} == (
        {1, 2, 4, 8} if shape is MIXTURE else {1}
    )
    for each in found.ranked[:: len(found.ranked) // 25]:
        program = transformer_program(
            shape, each.strategy, workspace_bytes=workspace_bytes(CLUSTER.chip)
        )
        whole = predict(program, CLUSTER, site=site)

        assert each.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
        assert each.peak_memory_bytes == whole.peak_memory_bytes


def test_numbers_of_a_large_network_are_those_of_predict():
    """GPT-3, whose devices are slower than their host, on any stages: bubble and sends count."""
    costs = StrategyCosts(GPT3, CLUSTER)
    some = list(islice(strategies(GPT3, 96, 96), 0, None, 1499))
    for each in some:
        (candidate,) = costs.candidates([each], memory_by_zero_stage(GPT3, [each]))
        whole = predict(transformer_program(GPT3, each), CLUSTER)

        assert candidate.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
    assert {each.layout.pipeline > 1 for each in some} == {True, False}
    assert {each.pipeline_chunks > 1 for each in some} == {True, False}


def test_steps_set_off_as_a_graph_are_those_of_predict():
    """On a chip whose host is slow: neither counts it."""
    chip = CLUSTER.chip
    slow = replace(chip, attainable=replace(chip.attainable, dispatch_seconds=36e-6))
    cluster = replace(CLUSTER, chip=slow)
    graphed = replace(cluster, launch_mode="graph")
    strategy = next(iter(strategies(SHAPE, 16, 32)))
    memory_of = memory_by_zero_stage(SHAPE, [strategy])
    (candidate,) = StrategyCosts(SHAPE, graphed).candidates([strategy], memory_of)
    (one_by_one,) = StrategyCosts(SHAPE, cluster).candidates([strategy], memory_of)
    whole = predict(transformer_program(SHAPE, strategy), graphed)

    assert candidate.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
    assert candidate.step_seconds < one_by_one.step_seconds


def test_steps_that_wait_for_the_host_of_another_stage_are_those_of_predict():
    """Seven blocks over stages of which the last has fewer, and logits; hosts are the slower."""
    shape = replace(SHAPE, layers=7)
    slow = replace(CLUSTER.chip.attainable, dispatch_seconds=200e-6)
    cluster = replace(CLUSTER, chip=replace(CLUSTER.chip, attainable=slow))
    strategy = next(
        each
        for each in strategies(shape, 16, 32)
        if max(stage_counts(shape, each.layout)) > slowest_stage(shape, each).layers
        and each.layout.pipeline > 1
    )
    program = transformer_program(shape, strategy)
    (candidate,) = StrategyCosts(shape, cluster).candidates(
        [strategy], memory_by_zero_stage(shape, [strategy])
    )
    alone = predict(replace(program, most_blocks=1.0), cluster).step_seconds

    whole = predict(program, cluster).step_seconds
    assert candidate.step_seconds == pytest.approx(whole, rel=1e-9)
    assert whole > 1.05 * alone


def test_ranking_is_by_the_objective_and_all_of_it_fits():
    """Time, memory, and device-hours over several numbers of devices."""
    by_time = search(SHAPE, CLUSTER, (8,), 8).ranked
    by_memory = search(SHAPE, CLUSTER, (8,), 8, objective="memory").ranked
    by_cost = search(SHAPE, CLUSTER, (1, 8), 8, objective="cost").ranked

    assert [e.step_seconds for e in by_time] == sorted(e.step_seconds for e in by_time)
    assert by_memory[0].peak_memory_bytes == min(e.peak_memory_bytes for e in by_time)
    assert by_cost[0].device_hours_per_sample == min(e.device_hours_per_sample for e in by_cost)
    assert all(e.peak_memory_bytes <= CLUSTER.chip.memory_bytes for e in by_time)


LLAMA = shape_of(published_run("llama3.1-8b", {"batch.global_batch": 8}), CLUSTER.chip)
FEW_TOKENS = replace(SHAPE, tokens=64, vocabulary=2048)
"""Most of whose memory is parameters, as ZeRO shards them."""


@pytest.mark.parametrize(
    ("shape", "memory_gb", "devices", "global_batch", "axes"),
    [
        (LLAMA, 80, 8, 8, {"context"}),
        (
            replace(
                FEW_TOKENS,
                is_gated=True,
                experts=MoeConfig(experts=8, expert_hidden=2048, dense_layers=2, shared_experts=1),
            ),
            2.5,
            16,
            16,
            {"context", "expert", "pipeline"},
        ),
        (FEW_TOKENS, 1.75, 16, 4, {"context", "pipeline"}),
        (replace(FEW_TOKENS, compute_dtype="float32"), 1.9, 8, 8, {"context", "pipeline"}),
    ],
    ids=["llama", "experts", "context", "float32"],
)
def test_no_strategy_is_left_out_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    shape: TransformerShape,
    memory_gb: float,
    devices: int,
    global_batch: int,
    axes: set[str],
):
    """What the lower bound excludes is no more than full enumeration does, though ZeRO shards
    parameters and moments over data, context and experts, and gradients of stages over data."""
    chip = replace(CLUSTER.chip, memory_bytes=round(memory_gb * 10**9))
    cluster = replace(CLUSTER, chip=chip)
    spec = parallel.SearchSpec(shape=shape, cluster=cluster, site=Site(), moments=2)
    groups = list(space.groups(shape, devices, global_batch))
    pruned = [parallel._fitting(spec, group) for group in groups]

    monkeypatch.setattr(parallel, "least_bytes", lambda *unused, **named: 0)
    every = [parallel._fitting(spec, group) for group in groups]
    assert [fits for _, fits in pruned] == [fits for _, fits in every]
    assert sum(len(held) for held, _ in pruned) < sum(len(held) for held, _ in every)
    sharded = [each.layout for _, fits in pruned for each in fits if each.zero_stage]
    assert axes <= {axis for layout in sharded for axis, n in layout.axis_sizes.items() if n > 1}


@pytest.mark.slow  # starts processes
def test_processes_side_by_side_find_what_one_finds(monkeypatch):
    """The same strategies in the same order, and progress in as many parts."""
    monkeypatch.setattr(parallel, "_PARTS_PER_PROCESS", 1)
    monkeypatch.setattr("scalejax.planning.search._GROUPS_OF_A_PART", 20)
    told: dict[int, list[Progress]] = {1: [], 2: []}

    alone, shared = (
        search(
            SHAPE,
            CLUSTER,
            (8,),
            16,
            processes=count,
            on_progress=told[count].append,
        )
        for count in told
    )

    assert shared == alone
    assert told[1] == told[2]
    assert len(told[1]) > 2
    assert told[1][-1].done == told[1][-1].total


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "memory ran out"), (signal.SIGTERM, "ended: it ended with -15")],
)
def test_a_process_of_a_search_that_is_killed_is_said(monkeypatch, number, words):
    """As the system does where memory runs out, or another; no other process is left."""
    monkeypatch.setattr(parallel, "_PARTS_PER_PROCESS", 1)
    monkeypatch.setattr("scalejax.planning.search._GROUPS_OF_A_PART", 20)

    def kill(progress: Progress) -> None:
        for child in children_of():
            os.kill(child, number)

    with pytest.raises(ScalejaxError, match=words):
        search(SHAPE, CLUSTER, (64,), 64, processes=2, on_progress=kill)

    assert not children_of()


def test_front_is_beaten_by_none():
    """In both time and memory."""
    ranked = search(SHAPE, CLUSTER, (8,), 8).ranked
    for each in pareto(ranked):
        assert not any(
            other.step_seconds < each.step_seconds
            and other.peak_memory_bytes < each.peak_memory_bytes
            for other in ranked
        )


def test_strategies_alike_but_for_zero_stage_are_one():
    """Of ZeRO 1 and 2 with the same time, the one with less memory; of unlike times, both."""
    found = search(SHAPE, CLUSTER, (8,), 16).ranked
    shown = deduplicated(found)

    ways: dict[Strategy, list[Candidate]] = {}
    for each in shown:
        ways.setdefault(dataclasses.replace(each.strategy, zero_stage=0), []).append(each)
    assert len(shown) < len(found)
    assert len(shown) > len(ways)
    assert [e.step_seconds for e in shown] == pytest.approx(
        sorted(e.step_seconds for e in shown), rel=1e-3
    )
    for each in found:
        alike = [
            other
            for other in ways[dataclasses.replace(each.strategy, zero_stage=0)]
            if abs(other.step_seconds / each.step_seconds - 1) < 2e-3
        ]
        assert min(other.peak_memory_bytes for other in alike) <= each.peak_memory_bytes


def test_tensor_axes_that_do_not_divide_the_vocabulary_are_named():
    """16 heads allow 2, 4, 8 and 16; of 50,260 values, 8 and 16 do not divide; 50,272 is the
    next multiple of 16."""
    odd = replace(SHAPE, vocabulary=50_260)

    assert left_out(odd, (8, 64)) == (8, 16)
    assert left_out(odd, (4,)) == left_out(SHAPE, (64,)) == ()
    assert "--data.vocabulary 50272" in left_out_notes(odd, (64,))[0]
    assert left_out_notes(SHAPE, (64,)) == ()
    assert max(each.layout.tensor for each in strategies(odd, 16, 16)) == 4


def test_near_winner_loses_where_its_terms_are_longer():
    """The changes of the terms; what is alike is left out."""
    best = (("compute", 1.0), ("communication data", 0.1))
    own = (("compute", 1.0), ("communication data", 0.05), ("communication tensor", 0.2))

    assert [name for name, _ in breakdown_difference(own, best)] == [
        "communication tensor",
        "communication data",
    ]
    assert breakdown_difference(own, best)[0][1] == pytest.approx(0.2)


def test_nothing_fits():
    """GPT-3 on 8 devices; the nearest needs several times their memory."""
    found = search(GPT3, CLUSTER, (8,), 8)

    assert found.ranked == ()
    assert found.nearest is not None
    assert 3 < found.nearest[1] < 10


def test_impossible_questions_are_refused():
    """More devices than there are, and no samples."""
    with pytest.raises(DoesNotFit, match="4480"):
        search(SHAPE, CLUSTER, (8192,), 8192)
    with pytest.raises(ConfigError, match="global_batch"):
        search(SHAPE, CLUSTER, (8,), 0)


def test_more_memory_never_makes_the_best_slower():
    """What fits a small device fits a large one."""
    small = replace(CLUSTER.chip, memory_bytes=6 * 10**9)
    few = search(SHAPE, replace(CLUSTER, chip=small), (8,), 64).ranked
    many = search(SHAPE, CLUSTER, (8,), 64).ranked

    assert len(few) < len(many)
    assert many[0].step_seconds <= few[0].step_seconds


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A table that fits 80 columns, figures and a plot; without compiling."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    command = ["search", str(run), "--cluster", "dgx-h100", "--devices", "8", "--confirm", "0"]

    monkeypatch.setenv("COLUMNS", "80")

    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert any("2 against 1:" in line for line in lines)
    assert "8 devices, 16 samples of 128 tokens per step; least time." in printed.out
    with_paths = ("wrote", "  scalejax")
    assert max(len(line) for line in lines if not line.startswith(with_paths)) <= 80
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "run.toml",
        "search.json",
        "time_and_memory.png",
    }
    first, last = printed.err.splitlines()[0], printed.err.splitlines()[-1]
    assert first.startswith("searching ")
    assert last == f"searched {first.split()[1]} of {first.split()[1]} strategies"
    assert max(map(len, printed.err.splitlines())) <= 80


def test_winner_of_a_published_network_has_a_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Where there was none before: the commands that are printed take it; without a folder for it,
    how to get one is said, and no flags of a file that is not there. Without a batch it has that of
    `cost`."""
    search = ["search", "--model", "gpt2-124m", "--cluster", "dgx-h100"]
    command = [*search, "--devices", "8", "--confirm", "0", "--top", "1"]

    assert main([*command, "--global-batch", "16", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"\n  scalejax train {tmp_path}/run.toml\n" in printed
    flags = f"scalejax predict {tmp_path}/run.toml --cluster dgx-h100 --devices 8\n"
    assert printed.endswith(f"  {flags}")
    kept = json.loads((tmp_path / "search.json").read_text())["ranked"][0]["strategy"]["split"]
    layout = resolve(load_config(tmp_path / "run.toml"), 8).split.layout
    assert layout.axis_sizes == kept["layout"]

    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Train 1 with" not in printed
    assert "With --output DIR, the run file of 1 is written too, DIR/run.toml:" in printed
    costed, notes = published_decoder("gpt2-124m")
    assert f"8 devices, {costed.batch.global_batch:,} samples of 1,024 tokens" in printed
    assert f"Note: {notes[0]}." in " ".join(printed.split())


def test_ranking_is_printed_before_its_first_are_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What is compiled keeps its place in the table; the best of it is what to train."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    printed = []

    def compiled(jobs, on_progress):
        printed.append(capsys.readouterr().out)
        assert [job.name for job in jobs] == ["strategy 1", "strategy 2"]  # together, not in turn
        return [program_of(matmul("m", milliseconds)) for milliseconds in (2.0, 1.0)]

    monkeypatch.setattr(searched_run, "profile_each", compiled)
    monkeypatch.setattr(searched_run, "has_cuda_compiler", lambda: True)
    command = ["search", str(run), "--cluster", "dgx-h100", "--devices", "8", "--top", "3"]

    assert main([*command, "--confirm", "2", "--json", str(tmp_path / "out.json")]) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert "samples/s" in printed[0]
    assert "1: compiled, " in said
    assert "2: compiled, " in said
    assert "Train 2 with --layout." in said
    assert "predict it with --devices 8 as well" in said
    assert "1 against 2: +" in said
    assert "as compiled; in closed form " in said
    assert "3 against 2: " in said
    ranked = json.loads((tmp_path / "out.json").read_text())["ranked"]
    assert [each["place"] for each in ranked] == [2, 1, 3]


def test_what_was_seen_not_to_fit_is_not_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Nor is what nobody compiled, where all that was compiled does not fit."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    wide = replace(program_of(matmul("m", 1.0)).memory, temporary_bytes=2**40)

    def compiled(jobs, on_progress):
        return [replace(program_of(matmul("m", 1.0)), memory=wide) for _ in jobs]

    monkeypatch.setattr(searched_run, "profile_each", compiled)
    monkeypatch.setattr(searched_run, "has_cuda_compiler", lambda: True)
    command = ["search", str(run), "--cluster", "dgx-h100", "--devices", "8", "--top", "3"]

    assert main([*command, "--confirm", "2"]) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert said.count("it does not fit") == 2
    assert "None of the 2 that were compiled fits" in said
    assert "Train" not in said


def test_the_title_names_a_framework_other_than_xla(tmp_path: Path):
    """As those of predictions and plans do."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)

    titles = [
        scalejax.search(run, "dgx-h100", 1, framework=name, top=1, confirm=0).title
        for name in ("xla", "pytorch")
    ]

    assert titles[1] == f"{titles[0]}, by PyTorch FSDP"


def test_steps_are_those_of_the_installed_compiler(tmp_path: Path, monkeypatch):
    """XLA of jaxlib 0.12 copies less, of one device as well."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    seconds = {}
    for version in ("0.10.2", "0.11.0", "0.12.0.1"):
        monkeypatch.setattr(closed_form.metadata, "version", lambda _, known=version: known)
        report = scalejax.search(run, "dgx-h100", 1, top=1, confirm=0)
        seconds[version] = report.ranked[0].prediction.step_seconds

    assert seconds["0.12.0.1"] < seconds["0.11.0"] == seconds["0.10.2"]


def test_prices_and_losses_are_of_the_steps_of_the_framework(tmp_path: Path):
    """And not of XLA's, by which strategies are searched for."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)

    report = scalejax.search(
        run, "dgx-h100", 8, framework="megatron-core", price_per_device_hour=2.0, confirm=0
    )

    first = report.ranked[0].prediction
    terms = len(first.waterfall)
    for each in report.ranked:
        seconds, batch = each.prediction.step_seconds, each.strategy.split.global_batch
        assert each.price == pytest.approx(1e6 * 2.0 * 8 * seconds / 3600 / batch)
        # Differences below a thousandth of the first step are left out of each term.
        assert sum(loss for _, loss in each.losses) == pytest.approx(
            seconds - first.step_seconds, abs=1e-3 * terms * first.step_seconds
        )


@pytest.mark.parametrize("flag", ["layout.tensor", "model.remat", "batch.microbatches"])
def test_what_is_searched_is_not_given(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag):
    """A flag that would not be heeded is refused, not dropped."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    command = ["search", str(run), "--cluster", "dgx-h100", "--devices", "8"]

    assert main([*command, f"--{flag}", "full" if flag == "model.remat" else "2"]) == 2

    assert f"{flag}=" in capsys.readouterr().err


def test_command_has_a_column_of_devices_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Beside a price too, the table fits; what the vocabulary leaves out is said."""
    monkeypatch.setenv("COLUMNS", "80")
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("vocabulary = 1024", "vocabulary = 1025"))
    command = ["search", str(run), "--cluster", "dgx-h100", "--confirm", "0", "--top", "3"]

    assert main([*command, "--devices", "8,16", "--price-per-device-hour", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if "pp x v" in line)
    rows = lines[lines.index(heading) + 1 :][:3]
    assert heading.split()[0] == "dev"
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert {row.split()[1] for row in rows} == {"8", "16"}
    assert max(map(len, lines)) <= 80
    assert "tensor 2, 4, 8 left out: the vocabulary of 1,025" in " ".join(lines)


def test_devices_that_the_batch_does_not_divide_over_are_told():
    """Of 60 devices a batch of 512 divides over 4; a factor of two left over is usual."""
    (note,) = uneven_notes(512, (60, 64, 1024))

    assert note.startswith("60 devices: the batch of 512 divides over 4 of them at most")
    assert "15 are left to tensor, context and pipeline" in note
    assert note.endswith("--global-batch 480 or 540 divides over all")


def test_winner_is_a_run_that_can_be_trained(tmp_path: Path):
    """Its layout, microbatches and recompute are those of the strategy."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    config = load_config(path)
    shape = shape_of(config, CLUSTER.chip)
    for each in (*strategies(shape, 4, 8), *strategies(shape, 3, 6)):
        run = run_of(config, each)

        assert (run.layout, run.split) == (each.layout, each.split)
        assert getattr(run.config.model, "remat", None) == each.recompute
        assert run.config.layout.zero_stage == each.zero_stage


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs pip install 'scalejax[gpu-target]'")
def test_winners_are_confirmed_by_the_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """On one device nothing is left out of what the trainer does."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)

    command = ["search", str(run), "--cluster", "dgx-h100", "--devices", "1"]
    assert main([*command, "--confirm", "1"]) == 0
    assert "1: compiled, " in capsys.readouterr().out


def test_published_layout_has_a_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Of a network by name: DeepSeek-V3 cut to 4 blocks, its layout cut to 4 devices."""
    training = PublishedTraining(
        devices=4,
        global_batch=4,
        layout={"pipeline": 2, "expert": 2},
        zero_stage=0,
        source="a report",
    )
    preset = replace(PRESETS["deepseek-v3"], training=training)
    monkeypatch.setitem(PRESETS, "deepseek-v3", preset)
    cut = {"layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 16, "moe.experts": 16}
    cut |= {"moe.dense_layers": 1, "moe.router.groups": 4}
    fields = {f"model.{name}": size for name, size in cut.items()}
    cluster = load_cluster("dgx-h100")
    config = published_run("deepseek-v3", fields)
    shape = shape_of(config, cluster.chip, compiler=installed_compiler())
    ranked = search(shape, cluster, (4,), 4)
    layouts = [(each.strategy.layout, each.strategy.zero_stage) for each in ranked.ranked]
    place = layouts.index((Layout(pipeline=2, expert=2), 0)) + 1
    flags = [word for name, size in fields.items() for word in (f"--{name}", str(size))]
    command = ["search", "--cluster", "dgx-h100", "--devices", "4"]

    assert main([*command, "--model", "deepseek-v3", *flags, "--confirm", "0", "--top", "3"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    said = f"(a report) is number {place:,} of {len(layouts):,}, at "
    assert said in printed
    assert "deepseek-v3 on " in printed
    assert "Against it, the first has -" in printed

    assert main(command) == 2
    assert "either RUN.toml or --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model.layers", "96", "--model.hidden", "12288", "--model.heads", "96"], "the nearest"),
        (["--objective", "speed"], "objective"),
        (["--devices", "many"], "devices"),
        (["--global-batch", "7", "--devices", "5"], "no strategy divides"),
    ],
)
def test_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str
):
    """One line, and exit code 2."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    command = ["search", str(run), "--cluster", "dgx-h100"]
    devices = [] if "--devices" in changes else ["--devices", "8"]

    assert main([*command, *devices, *changes]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_other_networks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With the reason."""
    run = tmp_path / "run.toml"
    text = RUN.replace('"gpt"', '"resnet50"').replace("layers = 4\nhidden = 256\nheads = 8\n", "")
    run.write_text(
        text.replace('"synthetic_tokens"', '"synthetic_images"').replace(
            "tokens = 128\nvocabulary = 1024", ""
        )
    )

    assert main(["search", str(run), "--cluster", "dgx-h100", "--devices", "8"]) == 2
    assert "the closed form covers gpt and llama only" in " ".join(capsys.readouterr().err.split())


def test_gradient_compression_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The closed form sends whole gradients."""
    run = tmp_path / "run.toml"
    run.write_text(RUN + '[gradient_sync]\nname = "fp16"\n[layout]\nmode = "shard_map"\n')

    assert main(["search", str(run), "--cluster", "dgx-h100", "--devices", "8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "gradient_sync.name='fp16' is refused: the closed form sums uncompressed gradients" in said
    )


def test_optimizers_of_matrices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The closed form has none of their products, nor of their state."""
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("adamw", "muon"))

    assert main(["search", str(run), "--cluster", "dgx-h100", "--devices", "8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "optimizer.name='muon' is refused: the closed form counts moments" in said


def test_fine_tuning_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The closed form has gradients and moments of everything; rates of their own cost nothing."""
    run = tmp_path / "run.toml"
    run.write_text(RUN + '[fine_tuning]\ntrainable = ["norm"]\n')

    assert main(["search", str(run), "--cluster", "dgx-h100", "--devices", "8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "fine_tuning.trainable=('norm',) is refused: the closed form costs training in" in said
    run.write_text(RUN + "[fine_tuning.lora]\nrank = 4\n")
    assert main(["search", str(run), "--cluster", "dgx-h100", "--devices", "8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "fine_tuning.lora='given' is refused: search ranks training in full" in said
    run.write_text(RUN + "[fine_tuning.rate_factors]\nnorm = 0.1\n")
    assert shape_of(load_config(run), CLUSTER.chip).layers == 4


def test_a_search_looks_for_garbage_seldom_and_leaves_the_process_as_it_was():
    """A program that searches keeps its own settings, an error or not."""
    before = gc.get_threshold()

    def fail() -> None:
        with collecting_seldom():
            assert gc.get_threshold()[0] >= 200_000
            raise ConfigError("one")

    with pytest.raises(ConfigError):
        fail()

    assert gc.get_threshold() == before
