"""Rows of ledgers that can be predicted, and programs for them that a reader checks on paper."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scalejax.core.serialization import plain
from scalejax.simulator.program import Collective, DeviceGroup, Loop, MemoryUse, Operation, Program
from scalejax.validation.cases import Case, case_of
from scalejax.validation.ledger import LedgerRow, read_ledger
from scalejax.xla.archive import Archive
from scalejax.xla.cache import case_key
from scalejax.xla.derive import Derivation, derivation

RESNET = {
    "case_id": "one",
    "series": "alike",
    "source": "github:Oneflow-Inc/DLPerf@c89430bac6",
    "model": "resnet50",
    "hardware": "v100_sxm2_16gb",
    "device_count": "16",
    "devices_per_node": "8",
    "intra_node_link": "nvlink2_mesh",
    "node_network_gbit_per_second": "100",
    "precision": "fp32",
    "data": "16",
    "per_device_batch": "96",
    "microbatch": "96",
    "global_batch": "1536",
    "recompute": "none",
    "step_seconds": "0.25",
}
"""Cells of a row that can be predicted."""
GPT = RESNET | {
    "model": "gpt",
    "layers": "2",
    "hidden": "64",
    "heads": "4",
    "seq_len": "32",
    "vocab": "512",
    "hardware": "a100_sxm_80gb",
    "intra_node_link": "nvlink3_nvswitch",
    "precision": "bf16",
    "device_count": "8",
    "data": "1",
    "fsdp": "8",
    "per_device_batch": "4",
    "microbatch": "2",
    "global_batch": "32",
}


def ledger(folder: Path, *rows: dict[str, str]) -> Path:
    """A file with these rows; cells that a row lacks are blank."""
    path = folder / "ledger.csv"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def row_of(folder: Path, cells: dict[str, str]) -> LedgerRow:
    """The row of these cells, through a file in `folder`."""
    (found,) = read_ledger(ledger(folder, cells))
    return found


def case(row: LedgerRow) -> Case:
    """The case of a row that has one."""
    found = case_of(row)
    assert isinstance(found, Case), found
    return found


def program(data: int = 2, *, payload_bytes: int = 8_000_000) -> Program:
    """A step that multiplies for a while and sums gradients over `data` devices."""
    group = DeviceGroup(extents=((data, 1),), axes=("data",))
    collective = Collective(
        name="all_reduce", payload_bytes=payload_bytes, group=group, is_async=False
    )
    return Program(
        name="step",
        backend="cuda",
        target="sm_80",
        compiler="by hand",
        mesh_axes=(("data", data), ("fsdp", 1), ("tensor", 1)),
        operations=(
            Operation(
                name="dot", kind="matmul", dtype="f32", flop=10**12, shape=(1, 4096, 4096, 29802)
            ),
            Loop(
                name="loop",
                trip_count=3,
                body=(
                    Operation(
                        name="sum",
                        kind="collective",
                        dtype="f32",
                        collective=collective,
                        source="here.py:1",
                    ),
                ),
            ),
        ),
        memory=MemoryUse(
            argument_bytes=10**9, output_bytes=10**9, alias_bytes=10**9, temporary_bytes=10**9
        ),
        global_batch=96 * data,
        model_flop=data * 10**12,
    )


def derived(found: Case, choice: int = 0, *, is_reduced: bool = True) -> Derivation:
    """How the program of a case is made, from what an archive holds."""
    return derivation(found.job(choice), is_reduced=is_reduced, backend="cuda")


def archive_for(row: LedgerRow, found: Program, choice: int = 0) -> Archive:
    """An archive that holds `found` for a row."""
    job = derived(case(row), choice).compiled[0]
    return Archive({case_key(job): json.dumps(plain(found))})


def moved_bytes(found: Program) -> int:
    """Bytes that one device reads and writes in one step."""
    return sum((each.read_bytes + each.write_bytes) * times for each, times in found.walk())


def operation_count(found: Program) -> int:
    """Operations that one device runs in one step."""
    return sum(times for _, times in found.walk())


@pytest.fixture
def row(tmp_path: Path) -> Callable[[dict[str, str]], LedgerRow]:
    """Reads one row from its cells."""
    return lambda cells: row_of(tmp_path, cells)
