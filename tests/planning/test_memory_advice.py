"""A step that does not fit is told with what would let it need less, and only that."""

from pathlib import Path

import pytest

import scalejax
from scalejax.config.run import ResolvedRun, load_config, resolve
from scalejax.core.serialization import JsonValue
from scalejax.planning.memory_advice import memory_notes

IMAGES = Path(scalejax.__file__).parent / "config" / "examples" / "resnet50_goyal2017.toml"
ZERO = "layout.zero_stage=1"
TEXT = {"model.name": "gpt", "data.name": "synthetic_tokens"}

STAGES = {**TEXT, "model.remat": "full", "batch.per_device_batch": 3, "batch.microbatches": 3}
STAGES |= {"layout.pipeline": 3}


def run_on(devices: int, fields: dict[str, JsonValue]) -> ResolvedRun:
    """ResNet-50 with 32 images per device, with `fields` replaced."""
    return resolve(load_config(IMAGES, fields), devices)


@pytest.mark.parametrize(
    ("devices", "fields", "remedies"),
    [
        (8, {}, f"fewer samples per device, fsdp, {ZERO} or microbatches"),
        (8, TEXT, f"fewer samples per device, fsdp, {ZERO}, microbatches or remat"),
        (1, {}, "fewer samples per device or microbatches"),
        (8, {"layout.fsdp": 8}, "fewer samples per device or microbatches"),
        (8, {"layout.mode": "shard_map"}, "fewer samples per device or microbatches"),
        (8, {"batch.microbatches": 32, "layout.fsdp": 8}, "fewer samples per device"),
        (8, {"batch.per_device_batch": 1}, f"fsdp or {ZERO}"),
        (8, {"batch.per_device_batch": 1, "layout.zero_stage": 1}, "fsdp"),
        (1, {"batch.per_device_batch": 1}, "a smaller network"),
        (1, {**TEXT, "model.remat": "full", "batch.per_device_batch": 1}, "a smaller network"),
        (3, STAGES, "layout.pipeline that divides 4 layers or fewer samples per device"),
    ],
)
def test_remedies_are_those_that_the_run_leaves_open(
    devices: int, fields: dict[str, JsonValue], remedies: str
):
    """Samples can be halved, an axis turned, a pass split, activations left out: where they are."""
    found = memory_notes(
        run_on(devices, fields), needed_bytes=int(37.2 * 2**30), memory_bytes=int(15.9 * 2**30)
    )

    assert found == (
        f"does not fit: needs 37.2 of 15.9 GiB on each device; {remedies} would need less"
    )


def test_nothing_is_said_of_a_step_that_fits():
    """To the last byte."""
    assert memory_notes(run_on(8, {}), needed_bytes=5, memory_bytes=5) is None
