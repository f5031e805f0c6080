"""A run as another framework would train it: what is compiled for it, and what is made of that."""

from dataclasses import replace
from typing import Any

import pytest
from program_cases import matmul, program_of

from scalejax.config.run import RunConfig, resolve
from scalejax.core.errors import ConfigError, DoesNotFit
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.simulator.frameworks import FRAMEWORKS, XLA, Framework, framework_named
from scalejax.simulator.program import Loop, Operation, Program, with_channels_first
from scalejax.simulator.transforms.pipeline import BUBBLE
from scalejax.xla import ProfileJob, derive, profile_many
from scalejax.xla.batch import Programs
from scalejax.xla.closed_form import program_in_closed_form
from scalejax.xla.derive import derivation, stage_run

CLUSTER = load_cluster("dgx-a100")


def run_of(*, layers=8, microbatches=4, remat="full", devices=16, **layout):
    """A small GPT on 16 devices."""
    return resolve(
        build(
            RunConfig,
            {
                "model": {
                    "name": "gpt",
                    "layers": layers,
                    "hidden": 64,
                    "heads": 4,
                    "remat": remat,
                    "compute_dtype": "bfloat16",
                },
                "data": {"name": "synthetic_tokens", "tokens": 32, "vocabulary": 512},
                "batch": {"per_device_batch": 4, "microbatches": microbatches},
                "optimizer": {"name": "adamw"},
                "schedule": {"base_learning_rate": 0.1},
                "layout": layout,
            },
        ),
        devices,
    )


def test_one_stage_of_a_pipeline_under_1f1b_is_compiled():
    """The longest, on its own devices; XLA's GPipe is compiled whole."""
    run = run_of(layers=10, pipeline=4, tensor=2)
    jobs = [ProfileJob(run=run, cluster=CLUSTER, framework=each) for each in FRAMEWORKS.values()]

    by_name = {job.framework.name: derivation(job).compiled[0].run for job in jobs}

    assert by_name["xla-2026"] == run
    stage = by_name["megatron-lm-2022"]
    assert stage == stage_run(run)
    assert getattr(stage.config.model, "layers", None) == 3
    assert stage.layout.axis_sizes == {
        "pipeline": 1, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2,
    }  # fmt: skip
    assert stage.split.microbatch == run.split.microbatch


@pytest.mark.parametrize("change", [{"remat": "none"}, {"microbatches": 1}])
def test_a_pipeline_whose_stage_says_too_little_is_compiled_whole(change):
    """In the schedule of the framework, which is trained too; one that a run names stays."""
    job = ProfileJob(
        run=run_of(pipeline=4, **change), cluster=CLUSTER, framework=FRAMEWORKS["megatron-lm-2022"]
    )

    compiled = derivation(job).compiled[0].run
    again = derivation(replace(job, run=compiled)).compiled[0].run

    assert compiled.config.layout == replace(job.run.config.layout, pipeline_schedule="1f1b")
    assert again == compiled


def test_all_devices_of_a_pipeline_must_be_there():
    """Though those of a stage alone are compiled for."""
    small = replace(CLUSTER, max_device_count=8)
    job = ProfileJob(
        run=run_of(pipeline=4), cluster=small, framework=FRAMEWORKS["megatron-lm-2022"]
    )

    with pytest.raises(DoesNotFit, match=r"devices=16 is refused: dgx-a100 has at most 8"):
        derivation(job)


def test_an_unknown_framework_is_refused():
    """With the nearest that is known."""
    with pytest.raises(ConfigError, match=r"framework='megatron' is refused.*megatron-lm"):
        framework_named("megatron")


def test_a_framework_runs_pipelines_in_a_schedule_that_is_trained():
    """DualPipe is of a run, which is refused where stages or microbatches do not fit it."""
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        assert Framework(name="ours", title="Ours", year=2026, schedule=schedule).schedule
    accepted = "one of gpipe, 1f1b, zb_h1; for this one set layout.pipeline_schedule"
    given: Any = "dualpipe"
    with pytest.raises(ConfigError, match=f"framework.schedule='dualpipe' is refused.*{accepted}"):
        Framework(name="ours", title="Ours", year=2026, schedule=given)
    given = "1f1"
    with pytest.raises(ConfigError, match="did you mean '1f1b'"):
        Framework(name="ours", title="Ours", year=2026, schedule=given)


def llama():
    """A llama of two layers."""
    tables = {
        "model": {"name": "llama", "layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128},
        "data": {"name": "synthetic_tokens", "tokens": 32, "vocabulary": 512},
        "batch": {"per_device_batch": 4},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
    }
    return resolve(build(RunConfig, tables), 2)


def test_a_step_says_what_sets_it_apart_and_nothing_else():
    """Megatron-LM's differences are known of gpt; of a llama there is none to tell."""
    step = program_of(matmul("up", 1.0), devices=2)
    megatron = FRAMEWORKS["megatron-lm-2021"]

    as_llama = megatron.applied(step, llama())

    assert as_llama.operations == step.operations
    assert as_llama.notes == (
        *step.notes,
        "the step of Megatron-LM or Megatron-DeepSpeed, fp16: no difference from XLA's is known "
        "for this run",
    )
    assert XLA.applied(step, llama()) is step


def test_pytorch_keeps_channels_first_unless_it_is_told_otherwise():
    """As its rows were fitted: `predict --framework` costs what `validate` did."""
    step = program_of(
        Operation(name="c", kind="convolution", dtype="bf16", flop=1, shape=(32, 784, 64, 128, 9)),
        matmul("up", 1.0),
        devices=2,
    )
    pytorch = FRAMEWORKS["pytorch-eager-2020"]

    by_default = pytorch.applied(step, llama())
    told = replace(pytorch, channels_first=False).applied(step, llama())

    assert [each.channels_first for each, _ in by_default.walk()] == [True, False]
    assert "channels first" in by_default.notes[-1]
    assert told.operations == step.operations
    assert with_channels_first(by_default, False).operations == step.operations


def test_stages_of_other_networks_are_told_apart():
    """70 and 72 layers on 12 stages have one longest stage, and not one bubble: (70 - 6) / 6 and
    (72 - 6) / 6 stages wait."""
    jobs = [
        ProfileJob(
            run=run_of(layers=layers, pipeline=12, devices=12, microbatches=2),
            cluster=CLUSTER,
            framework=FRAMEWORKS["pytorch-fsdp-2023"],
        )
        for layers in (70, 72)
    ]
    blocks = Loop(name="blocks", trip_count=6, body=(matmul("up", 1.0),))
    stage = program_of(Loop(name="microbatches", trip_count=2, body=(blocks,)), devices=1)

    uneven, even = Programs(archived=lambda _: stage).find(jobs)

    assert isinstance(uneven, Program)
    assert isinstance(even, Program)
    waits = [
        sum(times for each, times in program.walk() if BUBBLE in each.name)
        for program in (uneven, even)
    ]
    assert waits == [70 - 6, 72 - 6]


WITH_KERNELS = FRAMEWORKS["nanotron-2025"]


def test_a_run_that_does_not_fit_is_answered_for_itself_alone():
    """Of a framework with kernels, whose closed form is made at once."""
    fits, too_large = (
        ProfileJob(
            run=run_of(devices=devices, data=devices),
            cluster=replace(CLUSTER, max_device_count=16),
            framework=WITH_KERNELS,
        )
        for devices in (16, 32)
    )

    found, refused, again = Programs(compiles=False).find([fits, too_large, fits])

    assert isinstance(found, Program)
    assert found.backend == "closed_form"
    assert again == found
    assert isinstance(refused, DoesNotFit)
    assert "devices=32" in str(refused)


def test_a_run_without_a_closed_form_is_said_to_be_xlas():
    """By a framework whose kernels are known for closed forms alone; not of one without any."""
    run = run_of(pipeline_schedule="zb_h1", pipeline=2)
    compiled = replace(program_of(matmul("up", 1.0)), backend="cuda")
    with pytest.raises(ConfigError, match="zb_h1"):
        program_in_closed_form(ProfileJob(run=run, cluster=CLUSTER, framework=WITH_KERNELS))

    (note,) = WITH_KERNELS.applied(compiled, run).notes

    assert note.startswith("the step of nanotron: this run has no closed form: XLA's program")
    other = FRAMEWORKS["pytorch-fsdp-2023"].applied(compiled, run)
    assert not any("closed form" in note for note in other.notes)


def test_tokens_over_context_are_sent_in_parts():
    """Each device sends what it has."""
    whole, split = (
        derivation(
            ProfileJob(
                run=run_of(pipeline=2, context=context),
                cluster=CLUSTER,
                framework=FRAMEWORKS["pytorch-fsdp-2023"],
            )
        )
        for context in (1, 2)
    )

    assert pipeline_of(whole).boundary_bytes == 32 * 64 * 2
    assert pipeline_of(split).boundary_bytes == 32 * 64 * 2 // 2


def pipeline_of(how):
    """The pipeline of a derivation."""
    return derive._pipeline(how.job.run, how.run)


def test_every_property_has_a_source():
    """And the framework that scalejax trains with has none: it is what is compiled."""
    assert XLA.properties == ()
    for framework in FRAMEWORKS.values():
        assert all(each.source and each.title for each in framework.properties), framework.name


@pytest.mark.slow  # compiles in workers
def test_what_megatron_runs_is_made_of_what_xla_compiles(tmp_path):
    """Of one run: a pipeline with its bubble from the compiled stage, and more FLOP, as full
    recompute runs each block's last product again; without stages and properties, nothing else."""
    run, flat = run_of(pipeline=4), run_of()
    jobs = [
        ProfileJob(run=each, cluster=CLUSTER, framework=framework_named(name))
        for each, name in ((run, "megatron-lm"), (run, "pytorch"), (flat, "xla"), (flat, "pytorch"))
    ]

    megatron, pytorch, xla, flat_pytorch = profile_many(jobs, cache=tmp_path, backend="cpu")

    for program in (megatron, pytorch):
        assert program.device_count == 16
        assert program.mesh_axes[0] == ("pipeline", 4)
        assert any(BUBBLE in each.name for each in program.operations if isinstance(each, Loop))
    assert megatron.framework == "megatron-lm-2022"
    assert megatron.flop > 1.05 * pytorch.flop
    assert any("Megatron-LM" in note for note in megatron.notes)
    assert xla.framework == "xla-2026"
    # Four stages share the samples that four devices had of their own.
    assert pytorch.model_flop == pytest.approx((xla.model_flop or 0) / 4)
    assert _bare(flat_pytorch) == _bare(xla)


def _bare(program: Program) -> Program:
    return replace(program, framework="", notes=())
