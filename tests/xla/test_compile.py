"""Compiled programs against counts by hand: FLOP, bytes of collectives, memory; both compilers.

What each compiler made of each network was kept (see `program_cases`); what only a worker can show
is compiled here.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from program_cases import kept_jobs, require_same

from scalejax.config.model import DecoderConfig
from scalejax.config.presets import published_model
from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.errors import ConfigError, DoesNotFit, ProfileError
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Loop, Operation, Program
from scalejax.simulator.transforms.pipeline import gate_of, without_bubble
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step
from scalejax.xla import (
    ProfileJob,
    has_cuda_compiler,
    profile,
    profile_function,
    profile_many,
    read_step,
)
from scalejax.xla.target import target_for

DEVICES = 256
SAMPLES = 32
"""Samples per device."""
BASE = {
    "batch": {"per_device_batch": SAMPLES},
    "optimizer": {"name": "sgd"},
    "schedule": {"base_learning_rate": 0.1},
}
RUNS = {
    "mlp": {
        "model": {"name": "mlp", "hidden": [128, 128]},
        "data": {"name": "synthetic_images", "image_size": 28, "channels": 1, "classes": 10},
    },
    "resnet50": {
        "model": {"name": "resnet50"},
        "data": {"name": "synthetic_images"},
        "layout": {"bn_scope": "local"},
    },
    "gpt": {
        "model": {"name": "gpt", "layers": 6, "hidden": 256, "heads": 4, "remat": "full"},
        "data": {"name": "synthetic_tokens", "tokens": 128, "vocabulary": 1024},
        "layout": {"tensor": 2},
    },
}


def resolved(name: str, device_count: int = DEVICES, **tables) -> ResolvedRun:
    """One of the runs on a number of devices."""
    return resolve(build(RunConfig, {**BASE, **RUNS[name], **tables}), device_count)


needs_cuda_compiler = pytest.mark.skipif(
    not has_cuda_compiler(), reason="needs pip install 'scalejax[gpu-target]'"
)


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def programs(request) -> dict[str, Program]:
    """The programs of all runs for 256 H100, by one of the compilers."""
    jobs = [ProfileJob(run=resolved(name), cluster=load_cluster("dgx-h100")) for name in RUNS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)
        found = profile_many(jobs, cache=None, backend=request.param)
    return dict(zip(RUNS, found, strict=True))


@pytest.fixture
def kept(monkeypatch):
    """What is profiled was compiled once, and kept."""
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)


@pytest.mark.slow  # 17 s of processor time: the compilers themselves
@pytest.mark.parametrize("backend", [pytest.param("cuda", marks=needs_cuda_compiler), "cpu"])
def test_what_was_kept_is_what_the_compiler_makes_today(backend, monkeypatch):
    """Of each compiler the network with loops and two axes; REMAKE_PROGRAMS=1 makes all anew."""
    run, cluster = resolved("gpt"), load_cluster("dgx-h100")
    compiled = profile(run, cluster, cache=None, backend=backend)
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)

    require_same(profile(run, cluster, cache=None, backend=backend), compiled)


def mlp_products(samples: int) -> int:
    """Products and sums of the forward pass, two operations each: 784-128-128-10."""
    return 2 * samples * (784 * 128 + 128 * 128 + 128 * 10)


def resnet50_products(samples: int) -> int:
    """The convolutions of He et al. 2015, table 1, with the stride on the 3x3 (v1.5)."""
    stem = 112 * 112 * 7 * 7 * 3 * 64
    total, width_in, size = stem, 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            size_out = size // 2 if stage > 0 and block == 0 else size
            total += size * size * width_in * width
            total += size_out * size_out * (9 * width * width + width * 4 * width)
            if block == 0:
                total += size_out * size_out * width_in * 4 * width
            width_in, size = 4 * width, size_out
    return 2 * samples * (total + 2048 * 1000)


GPT_HIDDEN, GPT_TOKENS, GPT_LAYERS, GPT_VOCABULARY = 256, 128, 6, 1024


def gpt_block_products(samples: int) -> int:
    """Per token 12 h^2 for the weights of a block and 2 s h for its attention."""
    tokens = samples * GPT_TOKENS
    return 2 * tokens * (12 * GPT_HIDDEN**2 + 2 * GPT_TOKENS * GPT_HIDDEN)


def gpt_logit_products(samples: int) -> int:
    """One product with the embedding, h to vocabulary, per token."""
    return 2 * samples * GPT_TOKENS * GPT_HIDDEN * GPT_VOCABULARY


def test_flop_of_an_mlp_are_those_counted_by_hand(programs):
    """Three times the forward pass, but for the gradient of the images, which nobody needs."""
    first_layer = 2 * SAMPLES * 784 * 128

    assert programs["mlp"].flop == pytest.approx(3 * mlp_products(SAMPLES) - first_layer, rel=0.02)


def test_flop_of_resnet50_are_those_counted_by_hand(programs):
    """8.2 GFLOP per image and pass, again without the gradient of the images."""
    stem = 2 * SAMPLES * 112 * 112 * 7 * 7 * 3 * 64

    assert resnet50_products(1) == pytest.approx(2 * 4.09e9, rel=0.001)
    assert programs["resnet50"].flop == pytest.approx(
        3 * resnet50_products(SAMPLES) - stem, rel=0.02
    )


def test_flop_of_a_scanned_gpt_are_those_counted_by_hand(programs):
    """Loops count as often as they run, and rematerialised products twice.

    Forward, recompute, two gradients: four times the blocks. The last product of a block (4 h^2)
    is not made again: its result is nobody's operand.
    """
    per_device = 2  # devices along tensor share the products of the same samples
    not_again = 2 * SAMPLES * GPT_TOKENS * 4 * GPT_HIDDEN**2
    blocks = GPT_LAYERS * (4 * gpt_block_products(SAMPLES) - not_again)
    by_hand = (blocks + 3 * gpt_logit_products(SAMPLES)) / per_device

    loops = [item for item in programs["gpt"].operations if isinstance(item, Loop)]
    assert {loop.trip_count for loop in loops} == {GPT_LAYERS}
    assert programs["gpt"].flop == pytest.approx(by_hand, rel=0.02)


def test_model_flop_are_three_forward_passes_of_all_devices(programs):
    """The numerator of MFU: no recompute, no optimizer, the same for any compiler."""
    samples = SAMPLES * DEVICES

    assert programs["mlp"].model_flop == 3 * mlp_products(samples)
    assert programs["resnet50"].model_flop == 3 * resnet50_products(samples)
    gpt_samples = samples // 2
    assert programs["gpt"].model_flop == 3 * (
        GPT_LAYERS * gpt_block_products(gpt_samples) + gpt_logit_products(gpt_samples)
    )


def test_all_reduce_bytes_of_resnet50_are_those_of_its_gradient(programs):
    """25,557,032 parameters of 4 bytes, exactly.

    Besides them, and nothing else: the running mean and variance of 26,560 BatchNorm channels,
    averaged over devices, and the loss and the accuracy.
    """
    gradient, statistics, metrics = 25_557_032 * 4, 2 * 26_560 * 4, 2 * 4
    program = programs["resnet50"]

    assert program.collective_bytes("all_reduce") == gradient + statistics + metrics
    groups = {op.collective.group for op, _ in program.walk() if op.collective is not None}
    assert [(group.extents, group.axes) for group in groups] == [(((DEVICES, 1),), ("data",))]


def test_a_tensor_axis_reduces_activations_and_the_data_axis_gradients(programs):
    """Two sums of activations per block and pass over tensor (Megatron), in each direction."""
    program = programs["gpt"]
    activations = SAMPLES * GPT_TOKENS * GPT_HIDDEN * 4
    over_tensor = sum(
        times
        for op, times in program.walk()
        if op.collective is not None
        and op.collective.group.axes == ("tensor",)
        and op.collective.payload_bytes == activations
    )
    over_data = sum(
        op.collective.payload_bytes * times
        for op, times in program.walk()
        if op.collective is not None and op.collective.group.axes == ("data",)
    )

    # Forward 2, recompute at least the 1 whose sum the rest of the block reads, gradients 2;
    # besides the blocks, the embedding and the gradient of the logits.
    assert 5 * GPT_LAYERS <= over_tensor <= 6 * GPT_LAYERS + 4
    blocks = GPT_LAYERS * 12 * GPT_HIDDEN**2 * 4 / 2  # split over tensor
    assert over_data == pytest.approx(blocks, rel=0.15)  # the rest: embeddings, biases, norms


def test_memory_holds_what_the_run_holds(programs):
    """Arguments are parameters, momentum, statistics and the batch; donation reuses them."""
    memory = programs["resnet50"].memory
    state = (2 * 25_557_032 + 2 * 26_560) * 4
    batch = SAMPLES * (224 * 224 * 3 + 4)

    assert memory.argument_bytes == pytest.approx(state + batch, abs=64)
    assert memory.alias_bytes == pytest.approx(state, abs=64)
    assert memory.temporary_bytes > SAMPLES * 112 * 112 * 64 * 4  # at least the largest activation


def test_a_program_says_what_it_is(programs):
    """Batch, tokens and mesh come along, so that costing needs nothing else."""
    gpt = programs["gpt"]

    assert {axis: size for axis, size in gpt.mesh_axes if size > 1} == {"data": 128, "tensor": 2}
    assert (gpt.global_batch, gpt.tokens_per_sample) == (SAMPLES * 128, GPT_TOKENS)
    assert gpt.target == {"cuda": "sm_90", "cpu": "cpu"}[gpt.backend]
    assert gpt.compiler.startswith("jax ")
    assert programs["resnet50"].tokens_per_sample is None


@pytest.mark.usefixtures("kept")
def test_other_chips_compile_too():
    """Chips older than Ampere as Ampere, since no compiler takes them any more; part of a node."""
    clusters = [load_cluster(name) for name in ("dgx1-p100", "dgx-b200")]
    jobs = [ProfileJob(run=resolved("mlp", 12), cluster=cluster) for cluster in clusters]

    programs = profile_many(jobs, cache=None, backend="cuda")

    assert [program.target for program in programs] == ["sm_80", "sm_100"]
    assert {program.device_count for program in programs} == {12}


SMALL = {"name": "gpt", "layers": 2, "hidden": 512, "heads": 8}


@pytest.mark.slow  # compiles for CUDA, 7 s
@needs_cuda_compiler
def test_fused_attention_compiles_for_few_nodes():
    """Compiled for CUDA, 8 s of processor time: a worker has JAX ask the target for its cuDNN.

    Its heads are divided over tensor; on 16 devices XLA numbers the mesh anew, and writes its
    groups in one more notation.
    """
    model = {**SMALL, "compute_dtype": "bfloat16"}
    run = resolved("gpt", 16, model=model, layout={"tensor": 8})

    fused = profile(run, load_cluster("dgx-h100"), cache=None, backend="cuda")

    calls = [(item, times) for item, times in fused.walk() if item.kind == "attention"]
    rows = SAMPLES * 8 // 8  # samples x heads of one device
    assert {item.shape for item, _ in calls} == {(rows, GPT_TOKENS, GPT_TOKENS, 64)}
    # Causal: one product's worth forward and two and a half backward, in each layer.
    by_hand = 2 * (1 + 2.5) * 2 * rows * GPT_TOKENS**2 * 64
    assert sum(item.flop * times for item, times in calls) == by_hand
    axes = {item.collective.group.axes for item, _ in fused.walk() if item.collective}
    assert {("tensor",), ("data",)} <= axes
    assert () not in axes


@pytest.mark.slow  # compiles two networks for CUDA, 15 s
@needs_cuda_compiler
def test_fused_attention_counts_windows_and_no_documents():
    """Of gemma3's layers five of six see 512 of 2048 tokens: 1 - (3/4)^2 of the causal pairs. The
    kernel of packed documents computes all of these, whatever the lengths."""
    tokens, one = 2048, {"batch": {"global_batch": 1}, "layout": {"data": 1}}
    data = {"name": "synthetic_tokens", "tokens": tokens, "vocabulary": 64}
    gemma = published_model("gemma3-1b", layers=6, compute_dtype="bfloat16")
    plain = {"name": "gpt", "layers": 2, "hidden": 256, "heads": 2, "compute_dtype": "bfloat16"}
    windowed = resolved("gpt", 1, model={"name": "gpt"}, data=data, **one)
    windowed = replace(windowed, config=replace(windowed.config, model=gemma))
    packed = resolved("gpt", 1, model=plain, data={**data, "document_tokens": 100}, **one)
    jobs = [ProfileJob(run=run, cluster=load_cluster("dgx-h100")) for run in (windowed, packed)]

    of_gemma, of_packed = (
        [
            (item.flop, times)
            for item, times in program.walk()
            if item.kind == "attention" and "bwd" not in item.name
        ]
        for program in profile_many(jobs, cache=None, backend="cuda")
    )

    causal = 2 * tokens**2  # two products, half of the pairs, two operations a product
    assert isinstance(gemma, DecoderConfig)
    every = causal * gemma.heads * gemma.head_size
    assert sum(times for _, times in of_gemma) == 6
    assert sum(flop * times for flop, times in of_gemma) == every + 5 * every * 7 // 16
    assert sum(flop * times for flop, times in of_packed) == 2 * causal * 256


@pytest.mark.slow  # compiles two steps for CUDA, 10 s
@needs_cuda_compiler
def test_what_is_offloaded_leaves_the_device_and_is_copied_there_and_back():
    """Adam's moments, and an activation of each block, which is as large as its share of the
    residual stream in float32, but for two blocks whose copies are under way; by hand."""
    tokens, width, blocks = 1024, 256, 6
    tables = {
        "model": {"name": "gpt", "layers": blocks, "hidden": width, "heads": 4},
        "data": {"name": "synthetic_tokens", "tokens": tokens, "vocabulary": 64},
        "optimizer": {"name": "adamw"},
        "batch": {"global_batch": 16},
    }
    jobs = []
    for is_away, names in ((False, "save"), (True, "offload")):
        layout = {"fsdp": 2, "optimizer_memory_host_offload": is_away}
        model = {**tables["model"], "remat": {names: ["context"]}}
        run = resolved("gpt", 2, **{**tables, "model": model, "layout": layout})
        jobs.append(ProfileJob(run=run, cluster=load_cluster("dgx-h100")))

    kept, away = profile_many(jobs, cache=None, backend="cuda")

    counts = {"copy_to_host": 0, "copy_from_host": 0}
    for operation, runs in away.walk():
        if operation.collective is not None and operation.collective.name in counts:
            counts[operation.collective.name] += runs * operation.collective.payload_bytes
    moments = kept.memory.argument_bytes - away.memory.argument_bytes
    activations = blocks * 8 * tokens * width * 4  # samples of a device
    assert moments == pytest.approx(2 / 3 * kept.memory.argument_bytes, rel=0.05)
    assert set(counts.values()) == {away.memory.host_bytes}
    assert away.memory.host_bytes == pytest.approx(moments + activations, rel=1e-3)
    saved = kept.memory.peak_bytes - away.memory.peak_bytes
    assert saved >= away.memory.host_bytes - 2 / blocks * activations
    assert kept.memory.host_bytes == 0


@pytest.mark.slow  # compiles two pipelines for CUDA, 6 s
@needs_cuda_compiler
def test_1f1b_holds_as_many_microbatches_as_stages_and_gpipe_all():
    """16 of them on 2 stages of 6 blocks, whose inputs alone are kept: by hand, to a tenth."""
    tokens, width, blocks, microbatches = 128, 512, 12, 16
    model = {"name": "gpt", "layers": blocks, "hidden": width, "heads": 4, "remat": "full"}
    jobs = [
        ProfileJob(
            run=resolved(
                "gpt",
                2,
                model=model,
                data={"name": "synthetic_tokens", "tokens": tokens, "vocabulary": 64},
                batch={"per_device_batch": SAMPLES * microbatches, "microbatches": microbatches},
                layout={"pipeline": 2, "pipeline_schedule": schedule},
            ),
            cluster=load_cluster("dgx-h100"),
        )
        for schedule in ("gpipe", "1f1b")
    ]

    every, few = profile_many(jobs, cache=None, backend="cuda")

    input_bytes = SAMPLES * tokens * width * 4
    held = every.memory.temporary_bytes - few.memory.temporary_bytes
    assert held > 0.9 * (microbatches + 1 - 2) * blocks // 2 * input_bytes
    names = {item.name for item in few.operations}
    assert sum(name.endswith(".bubble") for name in names) == 1


@pytest.mark.slow  # compiles a pipeline for CUDA, 6 s
@needs_cuda_compiler
def test_passes_of_experts_have_the_products_of_their_schedule():
    """In units of rows x width x width of experts: gate and up are two, down one. ZB-H1 computes
    gate, up and the gradient before down in both of its passes, which have two and three others."""
    width, experts = 64, {"experts": 4, "experts_per_token": 2, "expert_hidden": 64}
    model = {"name": "llama", "layers": 2, "hidden": width, "heads": 2, "ffn_hidden": 64}
    run = resolved(
        "gpt",
        4,
        model={**model, "moe": experts},
        data={"name": "synthetic_tokens", "tokens": 128, "vocabulary": 64},
        batch={"per_device_batch": 8, "microbatches": 4},
        layout={"pipeline": 2, "expert": 2, "pipeline_schedule": "zb_h1"},
    )

    (program,) = profile_many(
        [ProfileJob(run=run, cluster=load_cluster("dgx-h100"))], cache=None, backend="cuda"
    )

    found: dict[str, list[float]] = {}

    def find(items: tuple[Operation | Loop, ...], gate: str) -> None:
        for item in items:
            if isinstance(item, Loop) and (blocks := item.expert_blocks) is not None:
                flop = sum(each.flop for each in item.body if isinstance(each, Operation))
                found.setdefault(gate, []).append(flop / (2 * blocks.rows * width * width))
            elif isinstance(item, Loop):
                find(item.body, item.name if gate_of(item) else gate)

    find(program.operations, "")
    units = {gate: [round(each) for each in of_loops] for gate, of_loops in found.items()}
    assert units == {
        "forward_pass": [3],
        "backward_pass": [5],
        "weights_pass": [6],
        "forward_pass.bubble": [3],
        "backward_pass.bubble": [5],
    }


@pytest.mark.slow  # compiles a pipeline twice
def test_dualpipe_is_derived_from_1f1b():
    """The same step in loops of its own, with a shorter bubble; a device has half of the output
    layer's work, the matrices of two stages in bfloat16, their gradients in float32, and the
    activations of three microbatches in place of two."""
    model = {"name": "gpt", "layers": 4, "hidden": 128, "heads": 4, "compute_dtype": "bfloat16"}
    cluster = load_cluster("dgx-h100")
    jobs = [
        ProfileJob(
            run=resolved(
                "gpt",
                2,
                model=model,
                data={"name": "synthetic_tokens", "tokens": 64, "vocabulary": 64},
                batch={"per_device_batch": 16, "microbatches": 8},
                layout={"pipeline": 2, "pipeline_schedule": schedule, "zero_stage": 0},
            ),
            cluster=cluster,
        )
        for schedule in ("1f1b", "dualpipe")
    ]

    plain, dual = profile_many(jobs, cache=None, backend="cpu")

    of_logits = 3 * 2 * (16 * 64) * 128 * 64
    assert without_bubble(plain).flop - without_bubble(dual).flop == of_logits / 2
    assert predict(dual, cluster).step_seconds < predict(plain, cluster).step_seconds
    parameters = 2 * (12 * 128**2 + 13 * 128)  # of two blocks, with biases and norms
    state = dual.memory.argument_bytes - plain.memory.argument_bytes
    assert state == 4 * parameters * (1 + jobs[0].run.config.optimizer.moments)
    copies = 6 * parameters
    held = plain.memory.temporary_bytes - copies
    more = dual.memory.temporary_bytes - plain.memory.temporary_bytes
    assert more == round(held / 2) + copies
    assert dual.notes[-1].startswith("DualPipe")


@pytest.mark.usefixtures("kept")
def test_attention_is_compiled_as_the_chip_would_train_it():
    """Fused on H100; as products on V100, which has none such. The model needs the same."""
    run = resolved("gpt", 16, model={**SMALL, "compute_dtype": "bfloat16"}, layout={"tensor": 2})
    jobs = [ProfileJob(run=run, cluster=load_cluster(name)) for name in ("dgx-h100", "dgx1-v100")]

    fused, unfused = profile_many(jobs, cache=None, backend="cuda")

    assert "attention" in {item.kind for item, _ in fused.walk()}
    assert "attention" not in {item.kind for item, _ in unfused.walk()}
    assert fused.model_flop == unfused.model_flop


def test_fused_attention_is_refused_for_chips_without():
    """Though the compiler, which takes them for newer ones, would let it pass."""
    model = {"name": "gpt", "attention": "fused", "compute_dtype": "bfloat16"}

    with pytest.raises(ConfigError, match="v100 is older than fused attention"):
        profile(resolved("gpt", 16, model=model), load_cluster("dgx1-v100"), cache=None)


def test_chips_too_old_to_compile_for_share_one_program():
    """What was compiled for a P100 need not be compiled again for a V100."""
    targets = [target_for(load_cluster(name), 8, "cuda") for name in ("dgx1-p100", "dgx1-v100")]

    assert targets[0] == targets[1] != target_for(load_cluster("dgx-a100"), 8, "cuda")


@pytest.mark.usefixtures("kept")
def test_float16_is_compiled_and_costed_as_such():
    """The products of bfloat16 in the other type, at its rate on V100 too, which has no other;
    beside them, what the loss scale needs: every gradient is read once more."""
    h100, v100 = load_cluster("dgx-h100"), load_cluster("dgx1-v100")
    runs = {
        each: resolved("gpt", 8, model={**SMALL, "compute_dtype": each})
        for each in ("bfloat16", "float16")
    }
    jobs = [ProfileJob(run=run, cluster=h100) for run in runs.values()]
    jobs.append(ProfileJob(run=runs["float16"], cluster=v100))

    bf16, f16, old = profile_many(jobs, cache=None, backend="cuda")

    def flop(program: Program) -> dict[str, int]:
        found: dict[str, int] = {}
        for item, times in program.walk():
            if item.flop and item.dtype != "f32":
                found[item.dtype] = found.get(item.dtype, 0) + item.flop * times
        return found

    def moved(program: Program) -> int:
        return sum((item.read_bytes + item.write_bytes) * times for item, times in program.walk())

    assert flop(f16) == {"f16": flop(bf16)["bf16"]}
    assert set(flop(old)) == {"f16"}
    parameters = f16.memory.argument_bytes // 8  # in float32, with momentum
    assert moved(f16) - moved(bf16) == pytest.approx(2 * parameters, rel=0.05)
    assert predict(f16, h100).matmul_type == predict(old, v100).matmul_type == "f16"


@pytest.mark.parametrize(("compute_dtype", "narrow"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_a_cpu_stand_in_keeps_the_type_of_products(compute_dtype, narrow):
    """A CPU widens bf16; the target would not, and its MFU is against the bf16 peak."""
    model = {"name": "mlp", "hidden": [32], "compute_dtype": compute_dtype}
    run = resolved("mlp", 2, model=model)

    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)

    program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)

    assert {item.dtype for item, _ in program.walk() if item.flop} == {narrow}


def test_more_devices_than_a_cluster_has_are_refused():
    """Before anything is compiled."""
    run = resolved("mlp", 2**14)

    with pytest.raises(DoesNotFit, match="devices=16384 is refused: tpu-v5e has at most"):
        profile(run, load_cluster("tpu-v5e"), cache=None)


def test_the_stand_in_compiler_says_how_many_devices_it_takes():
    """With the remedy, instead of an hour of silence."""
    with pytest.raises(ProfileError, match=r"at most 2048.*scalejax\[gpu-target\]"):
        profile(resolved("mlp", 4096), load_cluster("dgx-h100"), cache=None, backend="cpu")


def test_any_jitted_function_is_profiled():
    """A function written without scalejax, on a mesh of its own axes."""
    program = profile_function(
        "profiled_functions:two_layers",
        cluster=load_cluster("dgx-h100"),
        mesh_axes={"rows": 4, "columns": 2},
    )

    assert program.flop == 2 * (1024 // 4) * 512 * (2048 // 2) * 2
    assert program.collective_bytes("all_reduce") == 1024 // 4 * 512 * 4
    assert program.mesh_axes == (("rows", 4), ("columns", 2))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("raises", ProfileError, r":raises' for 2 devices does not compile: ValueError: odd size"),
        ("is_killed", ProfileError, r"was killed, most likely because memory ran out"),
        ("aborts", ProfileError, r"Check failed: no tiles"),
        ("returns_nothing", ConfigError, r"must return \(jitted function, arguments\)"),
        ("is_missing", ConfigError, r"profiled_functions has no 'is_missing'"),
    ],
)
def test_a_worker_that_fails_is_one_line(name, error, message, capfd):
    """Whatever happens in the worker: an error of ours, its last words, nothing on the screen."""
    with pytest.raises(error, match=message) as caught:
        profile_function(
            f"profiled_functions:{name}",
            cluster=load_cluster("dgx-h100"),
            mesh_axes={"data": 2},
            backend="cpu",
        )

    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow_except("9")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_caller_is_that_of_its_workers(tmp_path, how):
    """Ctrl-C, a scheduler's limit, and a kill end the compilers that it had started too."""
    pid_file = tmp_path / "pid"
    script = (
        # A shell starts background jobs with SIGINT ignored, and Python leaves it so.
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from scalejax.hardware import load_cluster\n"
        "from scalejax.xla import profile_function\n"
        "profile_function('profiled_functions:never_ends', cluster=load_cluster('dgx-h100'),"
        " mesh_axes={'data': 2}, backend='cpu')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "support"), str(HERE.parent)]),
        "PID_FILE": str(pid_file),
    }
    caller = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
        worker = int(pid_file.read_text())
        caller.send_signal(how)

        assert caller.wait(timeout=120) != 0
        _wait_for(lambda: not Path(f"/proc/{worker}").exists())
    finally:
        caller.kill()
        caller.wait()


HERE = Path(__file__).parents[1]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
