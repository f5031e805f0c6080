"""Predictions: what a program and a cluster come to, and what is said to be unknown."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hardware_cases import CHIP, cluster_of

from scalejax.core import serialization
from scalejax.core.errors import ConfigError, DoesNotFit
from scalejax.hardware import Cluster, MeasuredRates, Residuals, load_cluster
from scalejax.simulator.frameworks import FRAMEWORKS
from scalejax.simulator.predict import (
    RUN_CONDITIONS,
    STEP_CONDITIONS,
    Prediction,
    ScalingPrediction,
    merged_notes,
    predict,
    scaling_prediction,
)
from scalejax.simulator.program import Collective, DeviceGroup, MemoryUse, Operation, Program
from scalejax.simulator.uncertainty import Z_OF_P90

PAPER = cluster_of()


def data_parallel(devices: int, *, per_device_batch: int = 100) -> Program:
    """A step by hand: 1 ms of bf16 products per 100 samples, 1 ms of traffic, 1 ms all-reduce."""
    group = DeviceGroup(extents=((devices, 1),), axes=("data",))
    gradients = Collective(name="all_reduce", payload_bytes=10**8, group=group, is_async=False)
    flop = 10**9 * per_device_batch
    return Program(
        name="a step by hand",
        backend="closed_form",
        target="paper",
        compiler="none",
        mesh_axes=(("data", devices), ("fsdp", 1), ("tensor", 1)),
        operations=(
            Operation(name="m", kind="matmul", dtype="bf16", flop=flop),
            Operation(name="f", kind="fusion", dtype="f32", read_bytes=10**9),
            Operation(name="r", kind="collective", dtype="f32", collective=gradients),
        ),
        memory=MemoryUse(
            argument_bytes=2 * 10**9,
            output_bytes=2 * 10**9,
            alias_bytes=2 * 10**9,
            temporary_bytes=10**9,
        ),
        global_batch=devices * per_device_batch,
        model_flop=devices * flop,
    )


def test_prediction_by_hand():
    """8 devices: 1 ms of products, 1 ms of traffic, 2 x 7/8 x 1 ms + 14 us of all-reduce."""
    step_seconds = 1e-3 + 1e-3 + 1.75e-3 + 14e-6

    predicted = predict(data_parallel(8), PAPER, train_examples=80_100, epochs=90)

    assert predicted.step_seconds == pytest.approx(step_seconds)
    assert predicted.device_count == 8
    assert predicted.per_device_batch == 100
    assert predicted.samples_per_second == pytest.approx(800 / step_seconds)
    assert predicted.steps_per_epoch == 100  # the last 100 samples fill no batch
    assert predicted.epoch_seconds == pytest.approx(100 * step_seconds)
    assert predicted.run_seconds == pytest.approx(9000 * step_seconds)
    assert predicted.mfu == pytest.approx(1e-3 / step_seconds)
    assert predicted.matmul_type == "bf16"
    assert predicted.peak_memory_bytes == 3 * 10**9 + 10**9
    assert predicted.fits


def test_waterfall_adds_up_to_the_step():
    """Each term is what it says, none is missing, and what is not modelled is None."""
    predicted = predict(data_parallel(8), PAPER)

    terms = dict(predicted.waterfall)
    assert terms["compute"] == pytest.approx(1e-3)
    assert terms["memory"] == pytest.approx(1e-3)
    assert terms["communication data"] == pytest.approx(1.764e-3)
    assert all(terms[name] is None for name in (*STEP_CONDITIONS, *RUN_CONDITIONS))
    known = [seconds for seconds in terms.values() if seconds is not None]
    assert math.fsum(known) == predicted.step_seconds


def test_bands_surround_the_median():
    """A tenth on each class of the fits; without fits there is no band, and a note says so."""
    fitted = replace(CHIP, residuals=Residuals(compute=0.1, memory=0.1, launch=0.1))
    library = replace(PAPER.library, residual=0.1)

    known = predict(data_parallel(8), cluster_of(chip=fitted, library=library))
    unknown = predict(data_parallel(8), PAPER)
    half_known = predict(data_parallel(8), cluster_of(chip=fitted))

    assert known.p10_step_seconds is not None
    assert known.p90_step_seconds is not None
    # 1, 1 and 1.764 ms of 3.764, each off by 1.2816 tenths
    share = math.hypot(1, 1, 1.764) / 3.764
    expected = known.step_seconds * math.exp(0.12816 * share)
    assert known.p90_step_seconds == pytest.approx(expected, rel=0.01)
    assert known.p10_step_seconds < known.step_seconds
    assert (unknown.p10_step_seconds, half_known.p90_step_seconds) == (None, None)
    assert "paper: attainable rates are uncalibrated, so no p10 and p90" in unknown.notes
    assert "Rings: uncalibrated, so no p10 and p90" in half_known.notes


def test_a_framework_has_its_band_on_chips_whose_steps_or_operators_were_measured():
    """By hand, of products alone: that of its rows; elsewhere in the catalogue a wider one, and a
    note; none where nothing was measured, nor on a chip of one's own."""
    step = data_parallel(8)
    products = replace(step, operations=step.operations[:1], framework="megatron-core-2024")
    software = FRAMEWORKS["megatron-core-2024"].software
    assert software.residual is not None

    def log_p90(cluster: Cluster, program: Program = products) -> float | None:
        found = predict(program, cluster)
        p90 = found.p90_step_seconds
        return None if p90 is None else math.log(p90 / found.step_seconds) / Z_OF_P90

    assert "h100" in software.rows
    assert log_p90(load_cluster("dgx-h100")) == pytest.approx(software.residual)
    assert "b200" not in software.rows
    wider = math.hypot(software.residual, software.chip_residual)
    assert log_p90(load_cluster("dgx-b200")) == pytest.approx(wider)
    noted = predict(products, load_cluster("dgx-b200")).notes
    said = "Megatron-Core: fitted to no step on b200, so p10 and p90 are "
    assert any(note.startswith(said) for note in noted)
    own = replace(load_cluster("dgx-b200").chip, name="ours")
    for unknown in (load_cluster("mi250x"), cluster_of(chip=own)):
        for name in ("megatron-core-2024", "xla-2026"):
            assert log_p90(unknown, replace(products, framework=name)) is None


def test_unknown_is_none():
    """No data, no batch, no model FLOP: no epoch, no throughput, no MFU, and no invented figure."""
    bare = replace(data_parallel(8), global_batch=None, model_flop=None)

    predicted = predict(bare, PAPER, train_examples=80_000, epochs=1)

    assert predicted.samples_per_second is None
    assert predicted.steps_per_epoch is None
    assert predicted.epoch_seconds is None
    assert predicted.run_seconds is None
    assert predicted.tokens_per_second is None
    assert predicted.mfu is None
    assert predict(data_parallel(8), PAPER).epoch_seconds is None


def test_tokens_follow_samples():
    """Each of the samples has so many tokens."""
    predicted = predict(replace(data_parallel(8), tokens_per_sample=1024), PAPER)

    assert predicted.samples_per_second is not None
    assert predicted.tokens_per_second == pytest.approx(1024 * predicted.samples_per_second)


def test_mfu_is_against_the_type_of_most_flop():
    """A little f32 in a bf16 program leaves the bf16 peak; the note says which it is."""
    program = data_parallel(8)
    extra = Operation(name="head", kind="matmul", dtype="f32", flop=10**9)
    mostly_bf16 = replace(program, operations=(*program.operations, extra))
    mostly_f32 = replace(program, operations=(*program.operations, replace(extra, flop=10**12)))

    assert predict(mostly_bf16, PAPER).matmul_type == "bf16"
    assert predict(mostly_f32, PAPER).matmul_type == "f32"
    assert "MFU against the f32 peak, 10 TFLOP/s" in predict(mostly_f32, PAPER).notes


def test_a_program_too_large_is_said_not_to_fit():
    """Time is predicted all the same: a reader wants to know what it would be worth."""
    small = replace(CHIP, memory_bytes=10**9)

    predicted = predict(data_parallel(8), cluster_of(chip=small))

    assert not predicted.fits
    assert predicted.peak_memory_bytes > predicted.memory_bytes == 10**9
    assert predicted.step_seconds > 0


def test_more_devices_than_the_cluster_has_are_refused():
    """A mesh larger than the machine cannot run."""
    with pytest.raises(DoesNotFit, match=r"devices=16 is refused: paper-cluster has at most 8"):
        predict(data_parallel(16), cluster_of(max_device_count=8))
    with pytest.raises(DoesNotFit, match=r"devices=16 is refused: paper-cluster has at most 8"):
        predict(data_parallel(16), cluster_of(network=None))


def test_a_batch_larger_than_the_data_is_refused():
    """There is no epoch of less than a step."""
    with pytest.raises(ConfigError, match="at most the 100 training examples"):
        predict(data_parallel(8), PAPER, train_examples=100)


def test_an_empty_program_is_refused():
    """Nothing to cost means that the program was not read."""
    with pytest.raises(ConfigError, match="does nothing"):
        predict(replace(data_parallel(8), operations=()), PAPER)


def test_notes_say_what_the_program_stands_in_for():
    """A CPU program, and one compiled for another chip, are marked as such."""
    big_basin = load_cluster("big-basin-goyal2017")
    for_ampere = replace(data_parallel(8), backend="cuda", target="sm_80")
    for_cpu = replace(data_parallel(8), backend="cpu", target="cpu")

    assert "compiled for sm_80 in place of sm_60" in predict(for_ampere, big_basin).notes
    for_hopper = replace(for_ampere, target="sm_90")
    amd = predict(for_hopper, load_cluster("mi300x")).notes
    assert any("compiled for an NVIDIA GPU (sm_90)" in note for note in amd)
    assert not any("in place of" in n for n in predict(for_ampere, load_cluster("selene")).notes)
    assert any("no overlap assumed" in note for note in predict(for_cpu, big_basin).notes)


def test_notes_on_a_calibrated_cpu_contradict_no_calibration():
    """A program for the CPU stands in for nothing there; what it lacks are residuals alone."""
    products = {"f32": ((1, 512, 512, 512, 2.49884e11),)}
    rates = MeasuredRates(matmul=products, convolution={}, stream=((1000, 1e10),))
    peak = {"f32": 2.49884e11}
    cpu = replace(CHIP, name="cpu", measured=rates, peak_flop_per_second=peak)
    program = replace(data_parallel(8), backend="cpu", target="cpu")

    assert predict(program, cluster_of(chip=cpu)).notes == (
        "MFU against the f32 peak, 0.25 TFLOP/s",
        "cpu: measured here; no residuals, so no p10 and p90",
    )


def test_notes_that_differ_say_for_how_many_devices():
    """What holds for all is said once, bare."""
    predictions = [
        replace(predict(data_parallel(n), PAPER), notes=("all", *other))
        for n, other in ((1, ("1",)), (2, ("2",)), (4, ("2",)), (8, ("8 devices are many",)))
    ]

    assert merged_notes(predictions) == (
        "all",
        "1 (on 1 device)",
        "2 (on 2, 4 devices)",
        "8 devices are many",
    )


def test_devices_along_tensor_share_their_samples():
    """800 samples on data=2 x tensor=4 are 400 for each device, and axes of others say nothing."""
    axes = (("data", 2), ("fsdp", 1), ("tensor", 4))
    shared = predict(replace(data_parallel(8), mesh_axes=axes), PAPER)
    unknown = predict(replace(data_parallel(8), mesh_axes=(("batch", 8),)), PAPER)

    assert (shared.per_device_batch, unknown.per_device_batch) == (400, None)


def test_calls_that_cannot_be_looked_into_are_noted():
    """Their FLOP are unknown, so the prediction is too fast by them."""
    program = data_parallel(8)
    call = Operation(name="c", kind="custom", dtype="f32", read_bytes=10)
    with_call = replace(program, operations=(*program.operations, call))

    assert any("1 custom calls" in note for note in predict(with_call, PAPER).notes)
    assert not any("custom calls" in note for note in predict(program, PAPER).notes)


def test_weak_scaling_by_hand():
    """Batch per device kept: efficiency is the ratio of step times, against the fewest devices."""
    predictions = [predict(data_parallel(n), PAPER) for n in (16, 8)]

    scaling = scaling_prediction(predictions, "weak", "a step by hand")

    assert [each.device_count for each in scaling.predictions] == [8, 16]
    assert scaling.baseline_devices == 8
    # 16 devices wait for the network: 2 x 15/16 x 10 ms, 28 link and 2 network hops
    on_16 = 2e-3 + 18.75e-3 + 48e-6
    assert scaling.efficiencies == pytest.approx((1.0, 3.764e-3 / on_16))


def test_strong_scaling_by_hand():
    """Global batch kept: twice the devices should take half the time."""
    predictions = [
        predict(data_parallel(2, per_device_batch=400), PAPER),
        predict(data_parallel(8, per_device_batch=100), PAPER),
    ]

    scaling = scaling_prediction(predictions, "strong", "a step by hand")

    on_2, on_8 = 4e-3 + 1e-3 + 1e-3 + 2e-6, 3.764e-3
    assert scaling.efficiencies == pytest.approx((1.0, 2 * on_2 / (8 * on_8)))


def test_scaling_of_nothing_is_refused():
    """An efficiency needs a baseline."""
    with pytest.raises(ConfigError, match="predictions=0 is refused"):
        scaling_prediction([], "weak", "nothing")


def test_doubling_devices_halves_compute_but_not_all_reduce():
    """Weak links, not FLOP, limit strong scaling."""
    on_8, on_16 = (
        dict(predict(data_parallel(n, per_device_batch=1600 // n), PAPER).waterfall)
        for n in (8, 16)
    )

    assert on_8["compute"] is not None
    assert on_8["communication data"] is not None
    assert on_16["compute"] == pytest.approx(on_8["compute"] / 2)
    assert on_16["communication data"] is not None
    assert on_16["communication data"] >= on_8["communication data"]


def test_predictions_survive_a_file(tmp_path: Path):
    """What is written is read back the same, to the last bit."""
    scaling = scaling_prediction(
        [predict(data_parallel(n), PAPER, train_examples=10**6) for n in (8, 16)], "weak", "by hand"
    )
    serialization.save(scaling.predictions[0], tmp_path / "one.json")
    serialization.save(scaling, tmp_path / "many.json")

    assert serialization.load(Prediction, tmp_path / "one.json") == scaling.predictions[0]
    # Files of 0.1.0 know no bands and no goodput.
    older = json.loads((tmp_path / "one.json").read_text())
    for name in ("p10_step_seconds", "p90_step_seconds", "goodput"):
        del older[name]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert serialization.load(Prediction, tmp_path / "older.json") == scaling.predictions[0]
    assert serialization.load(ScalingPrediction, tmp_path / "many.json") == scaling
