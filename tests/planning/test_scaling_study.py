"""What is held fixed as devices are added, and what comes of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import scalejax
from scalejax.config.run import RunConfig, load_config, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.progress import Progress
from scalejax.hardware import load_cluster
from scalejax.planning import scaling_study
from scalejax.planning.scaling_study import resolve_all, study
from scalejax.simulator.program import MemoryUse, Operation, Program
from scalejax.xla.job import Compiled

EXAMPLES = Path(scalejax.__file__).parent / "config" / "examples"


@pytest.fixture
def config() -> RunConfig:
    """ResNet-50 with 32 images per device."""
    return load_config(EXAMPLES / "resnet50_goyal2017.toml")


def test_weak_scaling_keeps_the_batch_of_each_device(config: RunConfig):
    """32 images each, on 8 devices as on 256."""
    runs = resolve_all(config, [256, 8], "weak")

    assert [run.layout.device_count for run in runs] == [8, 256]
    assert [run.split.per_device_batch for run in runs] == [32, 32]
    assert [run.split.global_batch for run in runs] == [256, 8192]


def test_strong_scaling_keeps_the_global_batch(config: RunConfig):
    """What 32 images each come to on the fewest devices is divided among more."""
    runs = resolve_all(config, [8, 64], "strong")

    assert [run.split.global_batch for run in runs] == [256, 256]
    assert [run.split.per_device_batch for run in runs] == [32, 4]


def test_given_global_batch_is_that_of_the_fewest_devices(config: RunConfig):
    """Weak scaling starts from the batch in the file."""
    fixed = with_fields(config, {"batch.per_device_batch": None, "batch.global_batch": 512})

    runs = resolve_all(fixed, [8, 16], "weak")

    assert [run.split.global_batch for run in runs] == [512, 1024]


def test_a_layout_in_the_file_says_what_its_batch_is_per_device(config: RunConfig):
    """512 samples on the 8 devices of the file are 64 each, also when 16 are the fewest asked."""
    fixed = with_fields(
        config, {"batch.per_device_batch": None, "batch.global_batch": 512, "layout.data": 8}
    )

    runs = resolve_all(fixed, [16, 32], "weak")

    assert [run.split.global_batch for run in runs] == [1024, 2048]


def test_other_axes_stay_and_data_takes_the_rest(config: RunConfig):
    """A layout.data in the file is replaced; fsdp is not."""
    split = with_fields(config, {"layout.data": 2, "layout.fsdp": 4})

    runs = resolve_all(split, [8, 32], "weak")

    assert [(run.layout.data, run.layout.fsdp) for run in runs] == [(2, 4), (8, 4)]


def test_number_that_does_not_divide_is_named(config: RunConfig):
    """The refusal says on how many devices it happened."""
    with pytest.raises(ConfigError, match=r"on 24 devices, batch.global_batch=256 is refused"):
        resolve_all(config, [8, 24], "strong")


@pytest.mark.parametrize("counts", [[], [0, 8]])
def test_no_devices_are_refused(config: RunConfig, counts: list[int]):
    """There is nothing to predict on none."""
    with pytest.raises(ConfigError, match="devices="):
        resolve_all(config, counts, "weak")


def test_study_costs_the_program_of_each_number(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Equal steps on 8 and 16 devices are 100 % efficient, and twice as many samples."""

    def compiled(jobs, on_done, on_error):
        for position, job in enumerate(jobs):
            on_done(position, Compiled(program=_program(job.target.device_count)))

    monkeypatch.setattr("scalejax.xla.batch.run_jobs", compiled)
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    cluster = load_cluster("dgx-b200")
    study(config, cluster, [16], "weak")
    said: list[Progress] = []

    found = study(config, cluster, [8, 16], "weak", on_progress=said.append)

    assert said == [
        Progress(part="16 devices", done=1),  # remembered
        Progress(part="8 devices"),
        Progress(part="8 devices", done=1),
    ]
    assert found.efficiencies == (1.0, 1.0)
    assert found.predictions[1].samples_per_second == pytest.approx(
        2 * (found.predictions[0].samples_per_second or 0)
    )
    assert found.predictions[0].run_seconds == pytest.approx(
        90 * (1_281_167 // 256) * found.predictions[0].step_seconds
    )
    assert found.title == "resnet50 on NVIDIA DGX B200, 8 x 400 Gb/s InfiniBand"


def test_step_that_does_not_fit_says_what_would(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    """First of its notes; a step that fits has none such."""

    def compiled(jobs, on_progress, takes_kept):
        large, small = (_program(job.run.layout.device_count) for job in jobs)
        return [replace(large, memory=replace(large.memory, temporary_bytes=2**40)), small]

    monkeypatch.setattr(scaling_study, "profile_many", compiled)

    found = study(config, load_cluster("dgx-h100"), [8, 16], "weak")

    large, small = (each.notes for each in found.predictions)
    assert re.match(r"does not fit: needs 102\d\.\d of 79\.\d GiB on each device; fewer", large[0])
    assert not any("does not fit" in note for note in small)


def _program(device_count: int) -> Program:
    """One matrix product, and no communication."""
    return Program(
        name="test",
        backend="cuda",
        target="sm_80",
        compiler="none",
        mesh_axes=(("data", device_count),),
        operations=(
            Operation(name="product", kind="matmul", dtype="f32", flop=10**12, shape=(1, 8, 8, 8)),
        ),
        memory=MemoryUse(argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=1),
        global_batch=32 * device_count,
    )
