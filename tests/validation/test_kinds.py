"""Kinds of ledgers: told from their columns, predicted by the simulator, or skipped in words."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import GPT, RESNET, archive_for, ledger, program

from scalejax.cli.main import main
from scalejax.core.errors import ConfigError
from scalejax.core.units import GIB
from scalejax.hardware import (
    load_attention_rates,
    load_chip,
    load_cluster,
    load_grouped_matmul_rates,
    load_matmul_table,
)
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.program import Collective, DeviceGroup
from scalejax.validation import (
    RowResult,
    compile_cases,
    evaluate,
    find_ledger,
    read_any,
    shipped_ledgers,
    validate,
)
from scalejax.validation.convergence import (
    ONE_TARGET,
    ReferenceRow,
    SamplesRow,
    SubmissionRow,
    samples_results,
)
from scalejax.validation.kinds import CONVERGENCE, FORMATS
from scalejax.validation.programs import archived_programs
from scalejax.validation.table import required_columns

AI = "h100_sxm/comm/nccl/2.27.3/nccl_perf.parquet"
ROWS: dict[str, tuple[str, dict[str, object]]] = {
    "all_reduce_times": (
        "collectives",
        {
            "case_id": "aws_p5_16gpu", "hardware": "AWS p5 8xH100", "device_count": 16,
            "devices_per_node": 8, "intra_node_link": "NVLink4",
            "inter_node_link": "32x100Gb/s EFA (3200Gb/s)", "operation": "all_reduce",
            "payload_bytes": 1073741824, "seconds": 0.00515, "source": "github:aws/x@1",
        },
    ),
    "nvlink_collective_rates": (
        "collectives",
        {
            "hardware": "h100_sxm_80gb", "operation": "reduce-scatter", "element_type": "F32",
            "elements": 1048576, "device_count": 8, "bytes_per_second": 2e11,
        },
    ),
    "nccl_times": (
        "collectives",
        {
            "system": "h100_sxm", "operation": "all_gather", "dtype": "int8", "devices": 8,
            "message_bytes": 134217728, "microseconds": 420.0, "nccl_version": "2.27.3", "file": AI,
        },
    ),
    "custom_allreduce_times": (
        "collectives",
        {
            "system": "a100_sxm", "dtype": "bfloat16", "devices": 8, "message_size": 134217728,
            "microseconds": 2175.877, "implementation": "TRTLLM", "file": AI,
        },
    ),
    "hf_cluster_collectives_256MB": (
        "collectives",
        {
            "operation": "AllReduce", "nodes_of_8_h100": 1, "bus_bandwidth_gbytes_per_s": 435.967,
            "band_low": 422.288, "band_high": 461.538, "source": "github:vinjn/nanotron@9",
        },
    ),
    "gemm_rates": (
        "products",
        {
            "hardware": "h100_sxm_80gb", "batch": 1, "m": 4096, "n": 4096, "k": 4096,
            "types": "bf16xbf16->bf16", "flop_per_second": 6.5e14,
        },
    ),
    "gemm_times": (
        "products",
        {
            "system": "a100_sxm", "dtype": "bfloat16", "m": 1024, "n": 1024, "k": 10240,
            "microseconds": 106.598, "tflops": 201.5,
            "file": "a100_sxm/gemm/trtllm/1.0.0/gemm_perf.parquet",
        },
    ),
    "expert_gemm_forward_times": (
        "grouped products",
        {
            "system": "a100_sxm", "kernel": "moe_torch_flow", "dtype": "bfloat16", "tokens": 1024,
            "hidden": 4096, "expert_hidden": 1536, "topk": 8, "experts": 128,
            "tensor_parallel": 1, "expert_parallel": 2, "distribution": "power_law_1.01",
            "microseconds": 2322.637, "file": AI,
        },
    ),
    "attention_forward_times": (
        "attention",
        {
            "system": "a100_sxm", "dtype": "bfloat16", "batch": 1, "sequence": 1024, "heads": 12,
            "kv_heads": 4, "head_dim": 128, "window": 0, "microseconds": 60.587, "file": AI,
        },
    ),
    "expert_dispatch_combine_deepep": (
        "dispatch",
        {
            "system": "h100_sxm", "kind": "deepep_normal", "nodes": 1, "hidden": 7168,
            "tokens_per_device": 4096, "topk": 8, "experts": 256, "sms": 24, "dispatch_us": 700.0,
            "dispatch_notify_us": 0, "combine_us": 1100.0, "combine_notify_us": 0, "file": AI,
        },
    ),
    "expert_alltoall_trtllm": (
        "dispatch",
        {
            "system": "gb200", "operation": "alltoall_dispatch", "kernel": "NVLinkTwoSided",
            "dtype": "bfloat16", "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256,
            "expert_parallel": 4, "distribution": "balanced", "microseconds": 300.0, "file": AI,
        },
    ),
    "steplaw": (
        "loss",
        {
            "lr": 0.003906, "bs": 352, "ti": 19739, "loss": 2.46204, "smooth loss": 2.44828,
            "exp_name": "step2v2", "D": 14200000000, "N": 268304384,
        },
    ),
    "steplaw_moe": (
        "loss",
        {
            "topk": 1, "nume": 8, "moeh": 3528, "sed": 3528, "lr": 0.0001726, "bs": 32,
            "loss": 2.6489, "smooth loss": 2.5998, "exp_name": "1in8", "D": 2000000000,
            "N": 2155174912,
        },
    ),
}  # fmt: skip
"""A row of each format that measures operations, most of them real: (what it measures, cells)."""
REFERENCE = {
    "round": "training_1.0.0", "benchmark": "resnet", "unit": "epochs", "std": 0.5, "runs": 10,
    "optimizer": "LARS", "warmup_epochs": 5, "source": "github:mlcommons/logging@7bb",
}  # fmt: skip


def written(folder: Path, *rows: dict[str, Any], name: str = "rows") -> Path:
    """A file with these rows."""
    path = folder / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_kind_is_told_from_its_columns_and_predicted(name: str, tmp_path: Path):
    """Within a factor of three of the measurement; of a loss within 1 %."""
    quantity, cells = ROWS[name]

    (found,) = validate(written(tmp_path, cells, name=name)).rows

    assert (found.quantity, found.ledger) == (quantity, name)
    assert found.source
    assert found.status == "ok"
    if quantity == "loss":
        assert found.measured_loss == cells["smooth loss"]
        assert found.error is not None
        assert abs(found.error) < 0.01
        assert found.band is not None
        assert found.band[0] < (found.measured_loss or 0) < found.band[1]
        return
    assert found.measured_seconds is not None
    assert found.predicted_seconds is not None
    assert 1 / 3 < found.predicted_seconds / found.measured_seconds < 3


def test_bus_bandwidth_and_shards_become_seconds_of_the_full_buffer(tmp_path: Path):
    """By hand: 2 x 7/8 x 256 MiB at 436 GB/s; of a reduce-scatter, 8 shards of 4 MiB at
    200 GB/s; and the prediction is that of `collective_seconds`."""
    (bus,) = validate(written(tmp_path, ROWS["hf_cluster_collectives_256MB"][1])).rows
    (shard,) = validate(written(tmp_path, ROWS["nvlink_collective_rates"][1])).rows

    assert bus.measured_seconds == pytest.approx(2 * 7 / 8 * 2**28 / 435.967e9)
    assert shard.measured_seconds == pytest.approx(8 * 4 * 2**20 / 2e11)
    collective = Collective(
        name="reduce_scatter",
        payload_bytes=32 * 2**20,
        group=DeviceGroup(extents=((8, 1),), axes=("data",)),
        is_async=False,
    )
    cluster = load_cluster("dgx-h100")
    assert shard.predicted_seconds == collective_seconds(collective, cluster)
    assert shard.p10_seconds is not None
    assert shard.p90_seconds is not None
    assert shard.p10_seconds < collective_seconds(collective, cluster) < shard.p90_seconds


def test_measured_layers_hold_more_than_their_operator(tmp_path: Path):
    """By hand: an fp8 layer casts its input besides the product, in blocks by a cast of its own and
    a slower product; attention has a fixed time and a pass over its bytes; a layer of experts moves
    its rows."""

    def seconds(name: str, **cells: object) -> float:
        (found,) = validate(written(tmp_path, ROWS[name][1] | cells)).rows
        assert found.predicted_seconds is not None
        return found.predicted_seconds

    sizes: dict[str, object] = {"m": 8192, "n": 8192, "k": 4096, "system": "gb300"}
    layers = load_matmul_table("gb300").form.layers
    (cast, each, slower), (own, of_own, ratio) = layers["fp8"], layers["fp8_block"]
    product = seconds("gemm_times", dtype="fp8", **sizes) - cast - each * 8192 * 4096
    assert slower == 1
    assert 0.4 < 2 * 8192**2 * 4096 / product / 5e15 < 0.8
    assert seconds("gemm_times", dtype="fp8_block", **sizes) == pytest.approx(
        ratio * product + own + of_own * 8192 * 4096
    )

    rates = load_attention_rates("b200")
    passed = 2 * 12 * 64 * 1024 * 128 * (3 + 4 / 3)
    assert seconds("attention_forward_times", system="b200", batch=64) == pytest.approx(
        2 * 64 * 12 * 1024**2 * 128 / (2250e12 * rates.share(1024, 128))
        + rates.layer_passes * passed / 7.672e12
        + rates.layer_seconds
        + load_chip("b200").attainable.matmul_ramp_seconds
    )

    (fixed, _) = load_grouped_matmul_rates("h100").layers["bf16"]
    small = {"system": "h100_sxm", "tokens": 1, "hidden": 64, "expert_hidden": 64}
    assert fixed < seconds("expert_gemm_forward_times", **small) < 2 * fixed


def test_samples_to_target_are_predicted_from_other_batches(tmp_path: Path):
    """Never from the row itself: changing it changes no prediction of its own, but the others'."""
    needed = {1024: 40.0, 4096: 42.0, 16384: 52.0}
    unknown = REFERENCE | {"round": "of nobody", "benchmark": "other"}

    def predictions(needed: dict[int, float]) -> list[RowResult]:
        rows = [unknown | {"global_batch": b, "mean": mean} for b, mean in needed.items()]
        return list(validate(written(tmp_path, *rows)).rows)

    before, after = predictions(needed), predictions(needed | {4096: 90.0})

    assert [each.measured_samples for each in before] == [40.0, 42.0, 52.0]
    assert {each.samples_unit for each in before} == {"epochs"}
    assert before[1].predicted_samples == after[1].predicted_samples
    assert before[0].predicted_samples != after[0].predicted_samples
    assert 40 < (before[1].predicted_samples or 0) < 52
    assert before[1].p10_samples is not None
    (alone,) = predictions({1024: 40.0})
    assert alone.skip_reason == "of its benchmark and round there is no other batch"
    rows = read_any(find_ledger("convergence_rcp")).rows
    known = next(row for row in rows if getattr(row, "benchmark", "") == "bert")
    assert isinstance(known, ReferenceRow)
    other = REFERENCE | {"round": known.round, "benchmark": "bert", "unit": known.unit}
    cells = other | {"global_batch": known.global_batch, "mean": known.mean}
    (single,) = validate(written(tmp_path, cells)).rows
    assert single.status == "ok"  # from the points that come with scalejax, without this one
    assert single.predicted_samples != known.mean


def test_bert_and_resnet_50_of_mlperf_are_within_six_per_cent_on_batches_left_out():
    """Whose target is the same in every round: BERT's submissions of 2024 from reference points of
    2021 and other submitters', never of their own batch; and ResNet-50 with a rule for each of the
    two warmups that its batches share."""
    known = [
        row
        for name in CONVERGENCE
        for row in read_any(find_ledger(name)).rows
        if isinstance(row, SamplesRow) and row.benchmark in ONE_TARGET
    ]
    for name, kind in (("bert", SubmissionRow), ("resnet", ReferenceRow)):
        rows = [row for row in known if row.benchmark == name and isinstance(row, kind)]
        errors = [abs(each.error or 1) for each in samples_results(rows, "mlperf", known)]
        assert len(errors) >= 5
        assert sum(errors) / len(errors) < 0.06, name


def test_a_submission_is_predicted_from_other_submitters(tmp_path: Path):
    """Not from its own, who tuned the same recipe on several systems."""
    cells = REFERENCE | {"round": "of nobody", "system": "s", "min": 1, "max": 9}
    rows = [
        cells | {"org": org, "global_batch": batch, "mean": mean}
        for org, batch, mean in [("A", 8, 30.0), ("A", 16, 31.0), ("B", 32, 33.0), ("B", 64, 35.0)]
    ]

    found = validate(written(tmp_path, *rows)).rows

    assert all(each.status == "ok" for each in found)
    rows[1]["mean"] = 60.0
    assert validate(written(tmp_path, *rows)).rows[0].predicted_samples == pytest.approx(
        found[0].predicted_samples
    )


def test_peak_memory_is_held_against_the_prediction(tmp_path: Path, capsys):
    """Where a row states it; of runs that died it is only said whether they fit."""
    stated = GPT | {"peak_memory_gib": "1.5", "step_seconds_kind": "printed"}
    died = GPT | {"step_seconds": "", "step_seconds_kind": "crashed or out of memory"}
    path = ledger(tmp_path, stated, died)

    assert main(["validate", str(path), "--json", str(tmp_path / "out.json")]) == 0

    one, other = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert one["measured_memory_bytes"] == 1.5 * GIB
    assert one["predicted_memory_bytes"] > 0
    assert (one["fits"], one["has_died"], other["has_died"]) == (True, False, True)
    printed = " ".join(capsys.readouterr().out.split())
    error = one["predicted_memory_bytes"] / (1.5 * GIB) - 1
    assert f"dlperf 1 {abs(error):.1%} {abs(error):.1%} {error:+.1%} 1 0 1 1" in printed


def test_kept_programs_are_taken_before_the_closed_form(row):
    """A run of both is that of the compiler."""
    cells = GPT | {"hardware": "h100_sxm_80gb", "intra_node_link": ""}
    measured = row(cells)
    kept = archive_for(measured, program(8))

    (found,) = evaluate(compile_cases([measured], archive=kept, compiles=False, closed_form=True))

    assert found.status == "ok"
    assert not found.is_closed_form
    assert len(archived_programs(kept, compiles=False, closed_form=True).compiled.known) == 0


def test_columns_of_no_kind_are_refused_with_the_kinds(tmp_path: Path, capsys):
    """And what each needs, and what the nearest lacks."""
    cells = dict(ROWS["gemm_times"][1])
    del cells["microseconds"]

    assert main(["validate", str(written(tmp_path, cells | {"microsecs": 3}))]) == 2

    message = " ".join(capsys.readouterr().err.split())
    assert "line 1: the column 'microseconds' is missing (is it 'microsecs'?)" in message
    assert "the nearest is products" in message
    for quantity, kind in FORMATS:
        assert quantity in message
        assert " ".join(required_columns(kind)) in message.replace(" error: ", " ")


def test_collectives_of_more_devices_than_there_can_be_are_skipped(tmp_path: Path):
    """Each of a group's devices has its seat: 80 billion took all memory."""
    _, cells = ROWS["expert_dispatch_combine_deepep"]
    name = "expert_dispatch_combine_deepep"

    (found,) = validate(written(tmp_path, cells | {"nodes": 10**7}, name=name)).rows

    assert "devices=80000000 is refused: it must be at most 1e+07" in found.status


def test_nothing_predicted_is_exit_code_1(tmp_path: Path, capsys):
    """One row that is predicted among skipped ones is enough for 0."""
    unknown = RESNET | {"model": "mamba"}

    with pytest.raises(SystemExit) as stop:
        main(["validate", str(ledger(tmp_path, unknown))])
    assert stop.value.code == 1
    assert "1 0 dense no network 'mamba'" in " ".join(capsys.readouterr().out.split())
    assert main(["validate", str(ledger(tmp_path, unknown, RESNET))]) == 0


def test_steps_that_need_the_compiler_are_skipped_unless_asked_for(tmp_path: Path, capsys):
    """With the flag that compiles them in the reason."""
    unknown = {"per_device_batch": "95", "microbatch": "95", "global_batch": "1520"}

    with pytest.raises(SystemExit):
        main(["validate", str(ledger(tmp_path, RESNET | unknown))])
    assert "--compile compiles it" in " ".join(capsys.readouterr().out.split())


def test_ledgers_that_come_with_scalejax_are_read_by_name():
    """All of them, a source on every row; a name that is misspelt is refused with the nearest."""
    for name, path in shipped_ledgers().items():
        found = read_any(path)
        assert found.name == name
        for row in found.rows:
            assert getattr(row, "source", None) or getattr(row, "file", None), name
    with pytest.raises(ConfigError, match="did you mean 'step_times'"):
        find_ledger("steptimes")
    assert next(iter(shipped_ledgers())) == "step_times"
