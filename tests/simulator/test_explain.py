"""Explanations of a step that a reader can work out on paper.

The paper chip does 100 TFLOP/s in bf16 and moves 1 TB/s; here it reaches half of either, and
takes 10 us between operations. Its nodes have 100 GB/s per device, and 10 GB/s between them.
"""

from dataclasses import replace
from io import StringIO

import pytest
from hardware_cases import CHIP, RING, cluster_of
from rich.console import Console

from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.core import serialization
from scalejax.hardware import Link, Network, RunConditions, Site, load_cluster
from scalejax.hardware.cluster import Algorithm, HostMemory
from scalejax.report.html.explanation import render, waterfall
from scalejax.report.terminal import explanation as explanation_tables
from scalejax.simulator.explain import Explanation, explain, match_trace
from scalejax.simulator.predict import predict
from scalejax.simulator.program import (
    HOST_MEMORY,
    Collective,
    DeviceGroup,
    Loop,
    MemoryUse,
    Operation,
    Program,
)
from scalejax.simulator.timeline.attribution import attributions
from scalejax.simulator.transformer import Strategy, TransformerShape, transformer_program

HALF = replace(CHIP.attainable, matmul_fraction=0.5, memory_fraction=0.5, launch_seconds=10e-6)
CLUSTER = cluster_of(
    replace(RING, link_hop_seconds=0.0, network_hop_seconds=0.0),
    chip=replace(CHIP, attainable=HALF),
)

PRODUCT = Operation(
    name="dot.1",
    kind="matmul",
    dtype="bf16",
    flop=int(1e12),  # 10 ms at peak
    shape=(1, 1000, 1000, 500_000),
    source="net.py:7",
)
COPY = Operation(
    name="copy.2",
    kind="copy",
    dtype="bf16",
    read_bytes=int(1e9),
    write_bytes=int(1e9),  # 2 ms at peak, 4 ms at half
)


def collective(kind, axes, size, stride, payload_bytes, name="collective.3") -> Operation:
    """A synchronous collective of `size` devices, `stride` apart."""
    return Operation(
        name=name,
        kind="collective",
        dtype="f32",
        collective=Collective(
            name=kind,
            payload_bytes=payload_bytes,
            group=DeviceGroup(extents=((size, stride),), axes=axes),
            is_async=False,
        ),
    )


GRADIENTS = collective("all_reduce", ("data",), 16, 1, 10**8)


def program_of(*operations, axes=(("data", 16), ("fsdp", 1), ("tensor", 1))) -> Program:
    """A step of those operations on 16 devices."""
    return Program(
        name="paper step",
        backend="cuda",
        target="sm_90",
        compiler="by hand",
        mesh_axes=axes,
        operations=operations,
        memory=MemoryUse(
            argument_bytes=10**9, output_bytes=10**9, alias_bytes=10**9, temporary_bytes=10**9
        ),
        global_batch=1600,
    )


STEP = program_of(Loop(name="while.1", trip_count=2, body=(PRODUCT,)), COPY, GRADIENTS)


@pytest.fixture(scope="module")
def explained() -> Explanation:
    """The step above, with twice the batch: twice the work, the same gradients."""
    doubled = Operation(
        name="dot.1", kind="matmul", dtype="bf16", flop=2 * PRODUCT.flop, shape=(1, 1, 1, 1)
    )
    twice = program_of(
        Loop(name="while.1", trip_count=2, body=(doubled,)), COPY, COPY_AGAIN, GRADIENTS
    )
    return explain(STEP, CLUSTER, doubled_batch=replace(twice, global_batch=3200))


COPY_AGAIN = replace(COPY, name="copy.4")


def test_the_waterfall_leads_from_ideal_to_predicted(explained):
    """2 x 10 ms at peak; as much again for half the rate; 4 ms of memory; 3 launches.

    The ring of 16 sends 2 x 15/16 x 100 MB; of each node's ring one wire at 10 GB/s crosses.
    """
    terms = {term.name: term.seconds for term in explained.terms}
    crossing = 2 * 15 / 16 * 1e8 / 10e9

    assert terms["compute at peak"] == pytest.approx(20e-3)
    assert terms["attainable rates"] == pytest.approx(20e-3)
    assert terms["memory"] == pytest.approx(4e-3)
    assert terms["launch"] == pytest.approx(30e-6)
    assert terms["communication data"] == pytest.approx(crossing)
    assert next(iter(terms)) == "compute at peak"
    assert terms["input"] is None  # nothing is known of it


def test_the_terms_of_a_step_add_up_to_it(explained):
    """To the last digit that a sum keeps, none below zero, and no other time than predicted."""
    seconds = [term.seconds for term in explained.terms if term.is_of_step]

    assert sum(part or 0.0 for part in seconds) == pytest.approx(explained.step_seconds, rel=1e-12)
    assert all(part is None or part >= 0 for part in seconds)
    assert explained.step_seconds == predict(STEP, CLUSTER).step_seconds


def test_checkpoints_and_failures_come_on_top():
    """They lengthen a run, not a step."""
    conditions = {
        "node_mtbf_seconds": 1e6,
        "restart_seconds": 600.0,
        "storage_bytes_per_second": 1e9,
    }
    site = Site(conditions=RunConditions(**conditions))

    explained = explain(STEP, CLUSTER, site=site)

    on_top = {term.name: term.seconds for term in explained.terms if not term.is_of_step}
    assert on_top.keys() == {"checkpoints", "failures"}
    assert all(seconds is not None and seconds > 0 for seconds in on_top.values())
    assert explained.step_seconds == explain(STEP, CLUSTER).step_seconds
    assert "checkpoints" not in str(explained)  # of the run, not of the step


def test_the_costliest_operations_come_first_with_their_source(explained):
    """Two products of 20 ms and a gap each, then the collective, then the copy."""
    first, second, third = explained.operations

    assert (first.name, first.runs, first.source, first.bound) == (
        "dot.1",
        2,
        "net.py:7",
        "compute",
    )
    assert first.seconds == pytest.approx(40e-3 + 20e-6)
    assert first.peak_share == pytest.approx(20 / 40.02)
    assert first.what == "matmul bf16 1000 x 1000 x 500000"
    assert (second.name, second.what) == ("collective.3", "all-reduce 100 MB data")
    assert (third.name, third.peak_share) == ("copy.2", None)
    shares = [operation.share for operation in explained.operations]
    assert sum(shares) == pytest.approx(1.0)


def test_a_factor_of_two_buys_what_it_is_spent_on(explained):
    """Each by hand; links inside the node do not matter, since the network is narrower."""
    gains = {each.name: each for each in explained.improvements}
    step = explained.step_seconds

    assert gains["arithmetic"].step_seconds == pytest.approx(step - 20e-3)
    assert gains["memory"].step_seconds == pytest.approx(step - 2e-3)
    assert gains["chip"].step_seconds == pytest.approx(step - 22e-3)
    assert gains["network"].step_seconds == pytest.approx(step - 0.5 * 2 * 15 / 16 * 1e8 / 10e9)
    assert gains["links"].step_seconds == pytest.approx(step)
    assert gains["links"].speedup == pytest.approx(1.0)
    assert gains["latency"].step_seconds == pytest.approx(step)  # these messages have none
    # Twice the products and copies for twice the samples; the gradients stay.
    assert gains["batch"].step_seconds == pytest.approx(step + 44e-3 + 10e-6)
    assert gains["batch"].speedup == pytest.approx(2 * step / (step + 44e-3 + 10e-6))
    speedups = [each.speedup for each in explained.improvements]
    assert speedups == sorted(speedups, reverse=True)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "nvls", "hierarchical", "parameter_server"])
@pytest.mark.parametrize("devices", [8, 16])
def test_half_the_latency_is_half_of_what_the_library_starts_and_sends_with(
    algorithm: Algorithm, devices: int
):
    """Whatever the algorithm, in one node or over two, pipelines to fill included."""
    method = replace(RING, algorithm=algorithm, base_seconds=1e-3)
    half = replace(method, base_seconds=0.5e-3, link_hop_seconds=0.5e-6, network_hop_seconds=5e-6)
    never = replace(RING, base_seconds=10.0)  # a library must have a way besides nvls
    link = Link(kind="nvswitch", bytes_per_second=100e9, host_bytes_per_second=50e9,
        in_switch_fraction=0.9, ramp_seconds=1e-5, in_switch_ramp_seconds=2e-5)  # fmt: skip
    network = Network(bytes_per_second=10e9, message_seconds=4e-6, ramp_seconds=1e-5)
    before = cluster_of(method, never, link=link, network=network)
    after = cluster_of(half, never, link=link, network=replace(network, message_seconds=2e-6))
    sums = collective("all_reduce", ("data",), devices, 1, 10**6)
    step = program_of(PRODUCT, sums, axes=(("data", devices), ("fsdp", 1), ("tensor", 1)))

    gains = {each.name: each for each in explain(step, before).improvements}

    expected = predict(step, after).step_seconds
    assert gains["latency"].step_seconds == pytest.approx(expected, rel=1e-9)
    assert expected < predict(step, before).step_seconds - 0.49e-3
    assert gains["latency"].change == "half the latency"


def test_twice_the_host_link_halves_copies_and_half_the_latency_leaves_them():
    """4 MB out at 1 GB/s with nothing beside them: 4 ms, or 2 ms; copies have no latency."""
    made = Collective(
        name="copy_to_host", payload_bytes=4 * 10**6, group=HOST_MEMORY, is_async=False
    )
    out = Operation(name="out", kind="collective", dtype="f32", collective=made)
    step = program_of(PRODUCT, out)
    step = replace(step, memory=replace(step.memory, host_bytes=4 * 10**6))
    cluster = replace(cluster_of(), host=HostMemory(bytes_per_second=1e9))

    explained = explain(step, cluster)

    gains = {each.name: each for each in explained.improvements}
    assert gains["host link"].step_seconds == pytest.approx(explained.step_seconds - 2e-3)
    assert gains["latency"].step_seconds == pytest.approx(explained.step_seconds)


def test_measured_times_have_a_latency_to_halve_too():
    """All-reduces of 8 bytes between 8 H100 are nothing but latency, by a table.

    On chips whose steps are alike: else the slowest of eight would be later by more.
    """
    h100 = load_cluster("dgx-h100")
    attainable = replace(h100.chip.attainable, step_cv=None)
    h100 = replace(h100, chip=replace(h100.chip, attainable=attainable))
    sums = collective("all_reduce", ("data",), 8, 1, 8)
    step = program_of(sums, axes=(("data", 8), ("fsdp", 1), ("tensor", 1)))

    gains = {each.name: each for each in explain(step, h100).improvements}

    (attribution,) = attributions(step, h100)
    saved = predict(step, h100).step_seconds - gains["latency"].step_seconds
    assert saved == pytest.approx(attribution.seconds / 2, rel=0.01)
    assert gains["links"].speedup == pytest.approx(1.0, abs=0.01)


def test_a_host_that_is_the_limit_is_what_to_improve():
    """A product takes four times as long to set off as to run; half of that, twice the speed."""
    one = program_of(PRODUCT, axes=(("data", 8), ("fsdp", 1), ("tensor", 1)))
    dispatch = 4 * predict(one, CLUSTER).step_seconds
    attainable = replace(CLUSTER.chip.attainable, dispatch_seconds=dispatch)
    slow = replace(CLUSTER, chip=replace(CLUSTER.chip, attainable=attainable))

    gains = {each.name: each for each in explain(one, slow).improvements}

    assert gains["host"].change == "half the host"
    assert gains["host"].speedup == pytest.approx(2.0)
    assert gains["chip"].speedup == pytest.approx(1.0)


def test_one_node_needs_no_network():
    """Nothing is said of cards that nothing passes."""
    inside = program_of(PRODUCT, axes=(("data", 8), ("fsdp", 1), ("tensor", 1)))

    names = {each.name for each in explain(inside, CLUSTER).improvements}

    assert names == {"arithmetic", "memory", "chip", "links"}


MESH = (("data", 4), ("fsdp", 2), ("tensor", 2))


def unexpected_names(*operations, axes=MESH) -> list[str]:
    """Names of the unexpected collectives."""
    found = explain(program_of(PRODUCT, *operations, axes=axes), CLUSTER).unexpected
    return [each.name for each in found]


@pytest.mark.parametrize(
    ("kind", "axes", "size", "stride"),
    [
        ("all_to_all", ("tensor",), 2, 1),
        ("collective_permute", ("data",), 4, 4),
        ("all_gather", ("data",), 4, 4),
        ("all_gather", ("data", "fsdp"), 8, 2),
        ("all_gather", ("tensor",), 2, 1),
        ("all_reduce", (), 3, 1),
    ],
)
def test_a_collective_that_no_axis_calls_for_is_named(kind, axes, size, stride):
    """With what it takes, and why it is odd."""
    odd = collective(kind, axes, size, stride, 10**9, name="odd.9")

    (found,) = explain(program_of(PRODUCT, odd, axes=MESH), CLUSTER).unexpected

    assert (found.name, found.collective, found.axes) == ("odd.9", kind, axes)
    assert found.step_seconds == pytest.approx(found.seconds)
    assert found.seconds > 0
    assert found.reason


def test_blocks_dealt_to_unequal_stages_are_said_to_be():
    """At each step, because the layers are no multiple of the stages."""
    odd = collective("all_to_all", ("pipeline",), 4, 4, 10**9, name="deal")

    program = program_of(PRODUCT, odd, axes=(("pipeline", 4), *MESH[1:]))
    (found,) = explain(program, CLUSTER).unexpected

    assert "blocks are redistributed that equal stages" in found.reason


@pytest.mark.parametrize(
    ("kind", "axes", "size", "stride"),
    [
        ("all_reduce", ("data",), 4, 4),
        ("all_reduce", ("data", "fsdp"), 8, 2),
        ("all_reduce", ("data", "fsdp", "tensor"), 16, 1),
        ("all_gather", ("fsdp",), 2, 2),
        ("reduce_scatter", ("fsdp",), 2, 2),
        ("reduce_scatter", ("data", "fsdp"), 8, 2),
        ("all_reduce", ("tensor",), 2, 1),
    ],
)
def test_what_the_layout_asks_for_is_not_odd(kind, axes, size, stride):
    """Gradients over data, parameters over fsdp, sums of activations over tensor."""
    assert unexpected_names(collective(kind, axes, size, stride, 10**9)) == []


def test_sequence_parallel_sums_are_not_odd():
    """A sum scattered over tensor is gathered again: the layout divides tokens there."""
    scatter = collective("reduce_scatter", ("tensor",), 2, 1, 10**9, name="scatter")
    gather = collective("all_gather", ("tensor",), 2, 1, 10**9, name="gather")

    assert unexpected_names(scatter, gather) == []
    assert unexpected_names(gather) == ["gather"]


def test_small_collectives_and_user_defined_axes_are_ignored():
    """Indices are no finding; nobody has said what a user's own axes ask for."""
    small = collective("all_to_all", ("tensor",), 2, 1, 10**4)
    own = collective("all_to_all", ("experts",), 16, 1, 10**9)

    assert unexpected_names(small) == []
    assert unexpected_names(own, axes=(("experts", 16),)) == []


def test_a_trace_is_matched_by_name():
    """The copy took twice as long as predicted; the collective was not recorded."""
    predicted = {
        attribution.operation.name: attribution.seconds
        for attribution in attributions(STEP, CLUSTER)
    }
    measured = {"dot.1": predicted["dot.1"], "copy.2": 2 * predicted["copy.2"], "extra.7": 1e-3}

    match = match_trace(STEP, CLUSTER, measured)

    assert [each.name for each in match.matches] == ["copy.2", "dot.1"]
    assert match.matches[0].difference_seconds == pytest.approx(-predicted["copy.2"])
    assert match.only_measured == (("extra.7", 1e-3),)
    assert match.only_predicted == (("collective.3", predicted["collective.3"]),)
    assert match.matched_share == pytest.approx(
        match.measured_seconds / (match.measured_seconds + 1e-3)
    )


def printed(parts) -> list[str]:
    """Lines on an 80-column terminal."""
    console = Console(width=80, file=StringIO(), highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get().splitlines()


def test_an_explanation_fits_a_terminal(explained):
    """All of it in 80 columns; the finding is said in words."""
    match = match_trace(STEP, CLUSTER, {"dot.1": 1e-3})
    lines = printed([*explanation_tables.explanation(replace(explained, trace=match))])
    text = " ".join(" ".join(lines).split())

    assert max(map(len, lines)) <= 80
    assert "The largest loss is attainable rates" in text
    assert "Twice the chip gives 1.54 times the samples per second." in text
    assert "net.py:7" in text
    assert "1 operations match" in text


def test_a_framework_other_than_xla_is_in_the_headings():
    """On a terminal and on the page; of XLA nothing is said."""
    megatron = explain(replace(STEP, framework="megatron-lm"), CLUSTER)
    title = f"{STEP.name} on {CLUSTER.title}"

    assert explain(STEP, CLUSTER).title == title
    assert megatron.title == f"{title}, by Megatron-LM or Megatron-DeepSpeed, bf16"
    said = " ".join(printed([*explanation_tables.explanation(megatron)]))
    assert " ".join(said.split()).startswith(megatron.title)
    assert f"<h1>{megatron.title}</h1>" in render(megatron)


def test_what_must_be_known_first_is_said_once_above_the_figures(explained):
    """That a step does not fit, say."""
    noted = replace(explained, notes=("does not fit: too large", "another"))

    lines = printed([*explanation_tables.explanation(noted, first="does not fit: too large")])

    told = [line.strip() for line in lines if line.startswith("Note: ")]
    assert told == ["Note: does not fit: too large.", "Note: another."]
    waterfall = next(i for i, line in enumerate(lines) if line.startswith("from ideal"))
    assert lines.index(told[0]) < waterfall


def test_bars_begin_where_the_last_one_ended():
    """Whole cells before it, eighths at its end, and never nothing for something."""
    assert explanation_tables.bar(0.0, 5.0, 10.0, cells=10) == "█████"
    assert explanation_tables.bar(5.0, 10.0, 10.0, cells=10) == "     █████"
    assert explanation_tables.bar(5.0, 5.5, 10.0, cells=10) == "     ▌"
    assert explanation_tables.bar(9.999, 10.0, 10.0, cells=10).strip() != ""
    assert explanation_tables.bar(5.0, 5.0, 10.0, cells=10) == ""


def test_the_page_draws_each_term_from_the_end_of_the_one_before(explained):
    """In milliseconds, and with all that the terminal shows."""
    rows = waterfall(explained)["data"]["values"]
    ends = [0.0, *(row["end"] for row in rows)]

    assert [row["begin"] for row in rows] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(explained.step_seconds * 1e3)
    page = render(explained)
    for words in ("paper step", "From ideal to predicted", "net.py:7", "all-reduce 100 MB data"):
        assert words in page


def test_the_page_compares_a_trace(explained):
    """The operations in both with their errors, and what only one of the two has."""
    took = explained.operations[0].seconds
    match = match_trace(STEP, CLUSTER, {"dot.1": 2 * took, "extra.7": 1e-3})

    page = render(replace(explained, trace=match))

    assert "Recorded against predicted" in page
    assert "<td>80 ms</td><td>40 ms</td><td>-50%</td>" in page
    assert "(dot.1)</td><td>net.py:7</td>" in page
    assert "extra.7 1 ms" in page
    assert "Recorded against predicted" not in render(explained)


def test_a_trace_of_which_little_matches_is_warned_of(explained):
    """Half of the measured time is the least that tells of the step."""
    half = match_trace(STEP, CLUSTER, {"dot.1": 1e-3, "extra.7": 1e-3})
    less = match_trace(STEP, CLUSTER, {"dot.1": 1e-3, "extra.7": 1.1e-3})

    assert half.warning is None
    assert less.warning is not None
    assert less.warning in render(replace(explained, trace=less))
    text = " ".join(" ".join(printed([*explanation_tables.trace_match(less)])).split())
    assert f"Warning: {less.warning}" in text


def test_the_figures_survive_a_file(tmp_path, explained):
    """What `--json` writes is read back as it was, the trace with it."""
    path = tmp_path / "explained.json"
    compared = replace(explained, trace=match_trace(STEP, CLUSTER, {"dot.1": 1e-3}))
    serialization.save(compared, path)

    assert serialization.load(Explanation, path) == compared


@pytest.mark.parametrize(
    "axes",
    [
        {"pipeline": 4, "tensor": 2, "sequence_parallel": True},
        {"context": 4, "data": 2},
        {"data": 4, "fsdp": 2, "zero_stage": 1},
    ],
)
def test_collectives_of_every_axis_of_a_transformer_are_called_for(axes):
    """Hand-overs between stages, keys over context, ZeRO's parameters: nothing is unexpected."""
    shape = TransformerShape(
        layers=8,
        hidden=1024,
        heads=8,
        kv_heads=8,
        ffn_hidden=4096,
        vocabulary=8192,
        tokens=512,
        is_fused=False,
    )
    spread = {name: value for name, value in axes.items() if name not in Layout().axis_sizes}
    layout = Layout(**{name: value for name, value in axes.items() if name not in spread})
    split = BatchSplit(global_batch=8 * layout.batch_shards, layout=layout, microbatches=4)
    program = transformer_program(shape, Strategy(split=split, **spread))

    assert explain(program, load_cluster("dgx-h100")).unexpected == ()
