"""Promises of layouts and of the arithmetic of batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.config.parallelism import (
    BatchSplit,
    Layout,
    balanced_layers,
    bn_group_count,
    fill_data_axis,
    stage_layers,
)
from scalejax.config.pipeline_schedule import PipelineTicks
from scalejax.core.errors import ConfigError


def test_devices_are_the_product_of_the_axes():
    """Every device sits at one place of every axis."""
    layout = Layout(data=4, fsdp=2, tensor=3)

    assert layout.device_count == 24
    assert layout.batch_shards == 8


def test_neighbours_along_tensor_are_neighbours_in_a_node():
    """Devices are counted along the axes, major to minor; a node holds devices of like number."""
    layout = Layout(tensor=6, context=5, expert=7, fsdp=4, data=3, pipeline=2)

    assert list(layout.axis_sizes) == ["pipeline", "data", "fsdp", "expert", "context", "tensor"]
    assert str(layout) == "pipeline=2 x data=3 x fsdp=4 x expert=7 x context=5 x tensor=6"
    assert layout.batch_shards == 3 * 4 * 7


def test_data_axis_takes_what_the_others_leave():
    """24 devices with fsdp 2 and tensor 3 have a data axis of 4."""
    assert fill_data_axis(24, fsdp=2, tensor=3) == Layout(data=4, fsdp=2, tensor=3)


def test_devices_that_do_not_divide_are_refused_with_the_nearest_that_do():
    """The refusal names field, value, divisor and both neighbours."""
    with pytest.raises(ConfigError, match=r"devices=10 .* multiple of fsdp\*tensor=4 .*8 or 12"):
        fill_data_axis(10, fsdp=2, tensor=2)


def test_batch_that_does_not_divide_is_refused_with_the_nearest_that_do():
    """The example of the conventions, word for word."""
    with pytest.raises(
        ConfigError,
        match=r"global_batch=1000 is refused: it must be a multiple of data\*fsdp=24 "
        r"\(nearest: 984 or 1008; or 20 or 25 devices\)\.",
    ):
        BatchSplit(global_batch=1000, layout=Layout(data=12, fsdp=2))


def test_a_batch_smaller_than_its_divisor_is_told_the_smallest_that_works():
    """Zero is no batch: only the multiple above is named."""
    with pytest.raises(ConfigError, match=r"nearest: 24; or 5 devices\)"):
        BatchSplit(global_batch=5, layout=Layout(data=24))


@given(
    data=st.integers(1, 64),
    fsdp=st.integers(1, 16),
    tensor=st.integers(1, 8),
    microbatches=st.integers(1, 8),
    microbatch=st.integers(1, 32),
)
def test_no_sample_is_lost_or_seen_twice(data, fsdp, tensor, microbatches, microbatch):
    """Microbatch, microbatches and batch shards multiply back to the global batch."""
    layout = Layout(data=data, fsdp=fsdp, tensor=tensor)
    global_batch = microbatch * microbatches * data * fsdp

    split = BatchSplit(global_batch=global_batch, layout=layout, microbatches=microbatches)

    assert split.microbatch == microbatch
    assert split.per_device_batch * layout.batch_shards == global_batch


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_stages_hold_all_layers_and_none_a_second_more_than_another(layers, stages):
    """10 layers over 4 stages are 3, 3, 2 and 2."""
    held = stage_layers(layers, stages)

    assert stage_layers(10, 4) == (3, 3, 2, 2)
    assert (len(held), sum(held)) == (stages, layers)
    assert max(held) - min(held) <= 1
    assert list(held) == sorted(held, reverse=True)


def test_the_first_stage_has_fewer_layers_after_those_it_computes_besides():
    """DeepSeek-V3's 58 after 3 dense ones; with more than its share it has none."""
    assert stage_layers(58, 16, before=3) == (1, *(4,) * 12, *(3,) * 3)
    assert stage_layers(4, 3, before=5) == (0, 2, 2)


def test_layers_are_balanced_with_the_output_layer():
    """nanotron's 1B: 16 layers of 67.1 million and an output layer of 268.4 on two stages: 11 are
    the first to exceed half of all. One of its 3B on eight: the last stage has no layer left."""
    assert balanced_layers(16, 2, 67_108_864, 268_435_456) == (11, 5)
    assert balanced_layers(28, 8, 113_246_208, 402_653_184) == (4, 4, 4, 4, 4, 4, 4, 0)
    assert balanced_layers(5, 1, 1, 10) == (5,)


def test_local_statistics_are_those_of_one_device():
    """Eight devices of four samples at a time make eight groups."""
    split = BatchSplit(global_batch=64, layout=Layout(data=8), microbatches=2)

    assert bn_group_count(split, is_local=True, group_size=None) == 8
    assert bn_group_count(split, is_local=True, group_size=2) == 16
    assert bn_group_count(split, is_local=False, group_size=None) == 1


@pytest.mark.parametrize(("is_local", "group_size"), [(False, 2), (True, 3), (True, 0)])
def test_groups_that_cannot_be_are_refused(is_local, group_size):
    """Global statistics have no group size; a local one divides the samples of a device."""
    split = BatchSplit(global_batch=32, layout=Layout(data=8))

    with pytest.raises(ConfigError, match=r"layout\.bn_group_size"):
        bn_group_count(split, is_local=is_local, group_size=group_size)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_idles_for_a_tick_per_other_stage(schedule):
    """In every schedule; 4 stages of 2 chunks take 8 microbatches in 16 ticks and 3 idle ones."""
    ticks, alone = PipelineTicks(schedule, 4, 8, 2), PipelineTicks(schedule, 1, 8)

    assert (ticks.work, ticks.idle) == (16, 3)
    assert (alone.work, alone.idle) == (8, 0)


@pytest.mark.parametrize(
    ("microbatches", "chunks", "held"), [(8, 1, 4), (2, 1, 2), (8, 2, 5.5), (4, 2, 4)]
)
def test_a_stage_holds_no_more_microbatches_than_there_are(microbatches, chunks, held):
    """Under 1F1B the first of 4 stages holds 4; with two chunks 4 (1 + 3 / 8). GPipe holds all."""
    assert PipelineTicks("1f1b", 4, microbatches, chunks).in_flight == held
    assert PipelineTicks("gpipe", 4, microbatches, chunks).in_flight == microbatches
