"""The time of a run whose batch grows: that of the steps which train it, batch after batch."""

import json
from dataclasses import replace
from typing import Any

import pytest
from ramp_cases import TABLES

from scalejax.cli.main import main
from scalejax.config.run import RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build, load
from scalejax.core.units import format_seconds
from scalejax.hardware import load_cluster
from scalejax.planning import scaling_study
from scalejax.planning.scaling_study import phase_alone, ramp_study
from scalejax.report.sources import read_sources
from scalejax.simulator.predict import predict
from scalejax.simulator.program import MemoryUse, Operation, Program
from scalejax.simulator.ramp import RampPrediction
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step
from scalejax.xla import read_step

CONFIG = build(RunConfig, TABLES)
CLUSTER = load_cluster("dgx-h100")


@pytest.mark.slow_except("fields0")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "schedule.scaling": "linear",
            "schedule.reference_batch": 4,
            "schedule.warmup": "gradual",
            "schedule.warmup_epochs": 1,
        },
        {
            "optimizer": {"name": "adamw"},
            "schedule.scaling": "sde",
            "schedule.reference_batch": 2,
        },
    ],
)
def test_each_batch_is_costed_as_the_step_that_trains_it(fields):
    """The program of every phase has the operations of the trainer's own step of that phase, also
    where the rule of scaling takes the last batch itself for too large (1 - beta1 would be 1.6)."""
    run = resolve(with_fields(CONFIG, fields), 2)
    mesh = build_mesh(run.layout)
    for index, phase in enumerate(run.phases):
        alone = phase_alone(run, phase)
        found, trained = (
            read_step(step.function.lower(step.state, step.batch).compile(), mesh, alone)
            for step in (build_step(alone, mesh), build_step(run, mesh, phase=index))
        )

        assert found.global_batch == [8, 16, 32][index]
        assert products(found) == products(trained)
        assert collectives(found) == collectives(trained)


def products(program: Program) -> list[tuple[Any, ...]]:
    """Kind, FLOP and repeats of what multiplies."""
    return sorted((item.kind, item.flop, count) for item, count in program.walk() if item.flop)


def collectives(program: Program) -> list[tuple[str, int, int]]:
    """Name, bytes and repeats of what goes over wires."""
    found = [(item.collective, count) for item, count in program.walk()]
    return sorted((each.name, each.payload_bytes, count) for each, count in found if each)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the compiler: one product, of so many FLOP for each sample of a device."""

    def compiled(jobs, on_progress):
        return [_program(job.run) for job in jobs]

    monkeypatch.setattr(scaling_study, "profile_many", compiled)


def _program(run) -> Program:
    return Program(
        name="test",
        backend="cuda",
        target="sm_90",
        compiler="none",
        mesh_axes=(("data", run.layout.data),),
        operations=(
            Operation(
                name="product",
                kind="matmul",
                dtype="f32",
                flop=10**12 * run.split.per_device_batch,
                shape=(1, 8, 8, 8),
            ),
        ),
        memory=MemoryUse(argument_bytes=1, output_bytes=1, alias_bytes=1, temporary_bytes=1),
        global_batch=run.split.global_batch,
    )


@pytest.mark.usefixtures("compiler")
def test_the_run_takes_the_sum_of_its_batches():
    """5 updates of 8, 4 of 16 and 2 of 32, as the trainer counts them: 11, each at its own time."""
    found = ramp_study(CONFIG, CLUSTER, [2], "strong")

    run = resolve(CONFIG, 2)
    seconds = [
        predict(_program(phase_alone(run, phase)), CLUSTER).step_seconds for phase in run.phases
    ]
    assert found.total_steps(2) == run.total_steps == 11
    expected = 5 * seconds[0] + 4 * seconds[1] + 2 * seconds[2]
    assert found.run_seconds(2) == pytest.approx(expected)
    assert seconds[0] < seconds[1] < seconds[2]
    assert found.phases[1].study.title.endswith("epochs 1 to 3")


@pytest.mark.usefixtures("compiler")
def test_weak_scaling_keeps_the_samples_of_a_device_in_every_batch():
    """4 on each at first: 8 and 16 over all; then twice, then four times as many."""
    found = ramp_study(with_fields(CONFIG, {"data.train_examples": 64}), CLUSTER, [4, 2], "weak")

    batches = [[each.global_batch for each in phase.study.predictions] for phase in found.phases]
    assert found.device_counts == (2, 4)
    assert batches == [[8, 16], [16, 32], [32, 64]]
    assert [found.total_steps(count) for count in (2, 4)] == [8 + 2 * 4 + 2 * 2, 4 + 2 * 2 + 2]


@pytest.mark.usefixtures("compiler")
def test_a_run_fits_only_if_its_largest_batch_does():
    """As its last batch would fail after days, this is said before."""
    found = ramp_study(CONFIG, CLUSTER, [2], "strong")
    last = found.phases[-1]
    large = replace(last.study.predictions[0], fits=False)
    phases = (*found.phases[:-1], replace(last, study=replace(last.study, predictions=(large,))))

    assert found.fits(2)
    assert not replace(found, phases=phases).fits(2)


@pytest.mark.usefixtures("compiler")
def test_predict_prints_and_writes_every_batch(tmp_path, capsys):
    """A row for each, then the run; the file goes into a report as a study for each batch."""
    run_file, figures = tmp_path / "run.toml", tmp_path / "ramp.json"
    run_file.write_text(
        "\n".join(
            f"[{table}]\n" + "\n".join(f"{name} = {json.dumps(v)}" for name, v in values.items())
            for table, values in TABLES.items()
        )
    )

    flags = ["--cluster", "dgx-h100", "--devices", "2", "--json", str(figures)]
    assert main(["predict", str(run_file), *flags]) in (0, None)

    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:2] == "2 "]
    assert [row[1:6] for row in rows[:3]] == [
        ["0", "to", "1", "8", "5"],
        ["1", "to", "3", "16", "4"],
        ["3", "to", "5", "32", "2"],
    ]
    assert rows[3][1:3] == ["all", "11"]
    saved = load(RampPrediction, figures)
    steps = [phase.study.predictions[0] for phase in saved.phases]
    bands = [(each.p10_step_seconds, each.step_seconds, each.p90_step_seconds) for each in steps]
    # The second table: devices, "0 to 1", then two words for each time.
    assert [" ".join(row[4:10]) for row in rows[4:7]] == [
        " ".join(map(format_seconds, band)) for band in bands
    ]
    studies = read_sources([figures]).studies
    assert studies == tuple(phase.study for phase in load(RampPrediction, figures).phases)


def test_predictions_of_other_devices_are_no_run():
    """A sum over them would be of nothing."""
    with pytest.raises(ConfigError, match=r"phases=0 is refused"):
        RampPrediction(title="nothing", phases=())
