"""Linear layers in fp8, by hand: which products, what they read, and what the casts add; and who
may ask for them."""

from dataclasses import replace

import pytest
from program_cases import kept_jobs, program_of

from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue, build
from scalejax.hardware import load_cluster
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Loop, Operation
from scalejax.simulator.timeline.timeline import timeline
from scalejax.simulator.transformer import Strategy, transformer_program
from scalejax.simulator.transforms.float8 import in_float8, with_float8_products
from scalejax.xla import ProfileJob, profile_many
from scalejax.xla.closed_form import shape_of
from scalejax.xla.derive import restored

LINEAR = Operation(
    name="up",
    kind="matmul",
    dtype="bf16",
    flop=2 * 4096**3,
    shape=(1, 4096, 4096, 4096),
    read_bytes=2 * 2 * 4096**2,
    write_bytes=2 * 4096**2,
)
SCORES = replace(LINEAR, name="scores", shape=(32, 512, 512, 64), flop=2 * 32 * 512**2 * 64)
HEAD = replace(LINEAR, name="head")


def test_products_of_blocks_are_cast_and_nothing_else():
    """In the loop over blocks: not the products of attention, nor adapters, nor the output layer
    outside of it."""
    blocks = Loop(name="blocks", trip_count=3, body=(LINEAR, SCORES))
    microbatches = Loop(name="microbatches", trip_count=2, body=(blocks, HEAD))

    program = in_float8(program_of(microbatches))

    narrow = replace(LINEAR, shape=(1, 4096, 16, 4096))
    assert with_float8_products([narrow], adapter_rank=16) == (narrow,)
    (outer,) = program.operations
    assert isinstance(outer, Loop)
    inner, head = outer.body
    assert isinstance(inner, Loop)
    amax, cast, product, scores = inner.body
    assert (scores, head) == (SCORES, HEAD)
    assert product == replace(LINEAR, dtype="f8e4m3fn", read_bytes=2 * 4096**2)
    assert isinstance(cast, Operation)
    # Two operands of 4096 x 4096: read in two bytes an element, written in one.
    assert (cast.read_bytes, cast.write_bytes) == (2 * 2 * 4096**2, 2 * 4096**2)
    # Read once more before, for a scale by present values: each operand for one of two products.
    assert isinstance(amax, Operation)
    assert amax.read_bytes == 2 * 4096**2
    assert "fp8" in program.notes[-1]


def test_a_scale_by_the_last_steps_needs_no_pass_before_the_cast():
    """Delayed scaling is current scaling without the reads for the largest values, in the program
    and in time; so are blocks, whose cast finds them."""
    blocks = Loop(name="blocks", trip_count=100, body=(LINEAR,))
    now, delayed, in_blocks = (
        in_float8(program_of(blocks), kind)
        for kind in ("float8", "float8_delayed", "float8_blockwise")
    )

    (of_now,), (of_delayed,), (of_blocks,) = (each.operations for each in (now, delayed, in_blocks))
    assert isinstance(of_now, Loop)
    assert isinstance(of_delayed, Loop)
    assert isinstance(of_blocks, Loop)
    assert of_now.body[1:] == of_delayed.body
    assert len(of_blocks.body) == len(of_delayed.body) == 2
    seconds = [timeline(each, load_cluster("dgx-h100")).device_seconds for each in (now, delayed)]
    # 34 MB at 3.35 TB/s, and no faster.
    assert seconds[0] - seconds[1] > 100 * 2 * 4096**2 / 3.35e12


def loop(name: str, *body: Operation | Loop) -> Loop:
    """Two rounds of it."""
    return Loop(name=name, trip_count=2, body=body)


def types(*items: Operation | Loop, adapter_rank: int | None = None) -> dict[str, str]:
    """Type of each product of a program of `items` with its linear layers in fp8, by name."""
    program = in_float8(program_of(*items), adapter_rank=adapter_rank)
    return {item.name: item.dtype for item, _ in program.walk() if item.kind == "matmul"}


def test_a_timetable_s_passes_are_cast_and_its_ends_are_not():
    """Of 1F1B the logits are in a loop of their own, and a chunk of one layer is in none."""
    up, down = LINEAR, replace(LINEAR, name="down")
    ends = loop("first_part#2", replace(LINEAR, name="embedding")), loop("last_part", HEAD)
    one = loop("forward_pass.bubble", *ends, up, loop("blocks of keys", SCORES))
    two = loop("backward_pass#2", loop("layers", down), *ends[:1])

    found = types(loop("slots", one, two))

    narrow = {name for name, dtype in found.items() if dtype == "f8e4m3fn"}
    assert narrow == {"up", "down"}


def test_attention_in_a_loop_hides_no_block():
    """Over blocks of keys of other devices: a ring, or keys that were gathered; whether or not
    there is a loop over microbatches, whose own products are of the output layer."""
    block = loop("layers", LINEAR, loop("blocks of keys", SCORES), replace(LINEAR, name="down"))
    fp8 = {"up": "f8e4m3fn", "scores": "bf16", "down": "f8e4m3fn", "head": "bf16"}

    assert types(block, HEAD) == types(loop("microbatches", block, HEAD)) == fp8
    with pytest.raises(ConfigError, match=r"model\.compute_dtype='float8' is refused: no loop"):
        types(HEAD, loop("blocks", SCORES))


def test_four_bits_have_a_scale_for_sixteen_and_their_own_units():
    """NVFP4: half a byte an element and a sixteenth of a scale; at the rate of fp4, if any."""
    blocks = Loop(name="blocks", trip_count=3, body=(LINEAR,))

    (loop,) = in_float8(program_of(blocks), "float4").operations

    assert isinstance(loop, Loop)
    cast, product = loop.body
    assert isinstance(cast, Operation)
    assert isinstance(product, Operation)
    assert cast.write_bytes == product.read_bytes == 2 * 4096**2 * 9 // 16
    b300, h100 = load_cluster("dgx-b300").chip, load_cluster("dgx-h100").chip
    assert b300.peak(product.dtype) == 3 * b300.peak("f8e4m3fn")
    assert h100.peak(product.dtype) == h100.peak("f8e4m3fn")


def test_large_products_gain_and_narrow_ones_lose():
    """Twice the rate, less what the casts move: worth it for 16k rows, not for 128."""
    cluster = load_cluster("dgx-h100")

    def gain(rows: int) -> float:
        product = replace(LINEAR, shape=(1, rows, 4096, 4096), flop=2 * rows * 4096**2)
        program = program_of(Loop(name="blocks", trip_count=100, body=(product,)))
        before = timeline(program, cluster).device_seconds
        return before / timeline(in_float8(program), cluster).device_seconds

    assert 1.2 < gain(16384) < 2
    assert gain(128) < 1


def test_chip_without_fp8_gains_nothing():
    """An A100 converts them back."""
    cluster = load_cluster("dgx-a100")
    program = program_of(Loop(name="blocks", trip_count=2, body=(LINEAR,)))

    before, after = timeline(program, cluster), timeline(in_float8(program), cluster)
    assert after.compute_seconds == pytest.approx(before.compute_seconds, rel=0.05)
    assert after.step_seconds > before.step_seconds


def run_in(
    compute_dtype: str, layers: int = 4, rank: int | None = None, **words: JsonValue
) -> ResolvedRun:
    """A small llama on eight devices, with adapters of that rank."""
    model = {"name": "llama", "layers": layers, "hidden": 512, "heads": 8, "kv_heads": 4, **words}
    tables: dict[str, JsonValue] = {
        **({} if rank is None else {"fine_tuning": {"lora": {"rank": rank}}}),
        "model": {**model, "ffn_hidden": 1536, "compute_dtype": compute_dtype},
        "data": {"name": "synthetic_tokens", "tokens": 256, "vocabulary": 512},
        "batch": {"global_batch": 16},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": {"data": 2, "fsdp": 4},
    }
    return resolve(build(RunConfig, tables))


def test_a_run_in_float8_is_that_in_bfloat16_with_its_linear_layers_cast(tmp_path, monkeypatch):
    """Whoever asks: four matrices a block, one product forward and two backward; asked for again,
    it is remembered."""
    cluster = load_cluster("dgx-h100")
    jobs = [ProfileJob(run=run_in(each), cluster=cluster) for each in ("bfloat16", "float8")]

    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)
    bf16, fp8 = profile_many(jobs, cache=tmp_path, backend="cuda")
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", lambda *_: pytest.fail("compiled again"))
    (again,) = profile_many(jobs[1:], cache=tmp_path, backend="cuda")

    assert fp8 == again == in_float8(bf16)
    flop = sum(item.flop * times for item, times in fp8.walk() if item.dtype == "f8e4m3fn")
    matrices = 512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 1536
    assert flop == 3 * 2 * 4 * matrices * 2 * 256  # two samples of 256 tokens on a device
    assert predict(fp8, cluster).matmul_type == "fp8"


def test_the_closed_form_casts_the_same_products():
    """Of search: the blocks of its program, and nothing else."""
    chip, strategy = (
        load_cluster("dgx-h100").chip,
        Strategy(split=BatchSplit(global_batch=16, layout=Layout(data=2, fsdp=4))),
    )
    bf16, fp8 = (
        transformer_program(shape_of(run_in(each).config, chip), strategy)
        for each in ("bfloat16", "float8")
    )

    assert fp8.operations == in_float8(bf16).operations
    assert fp8.memory == bf16.memory


def test_float8_is_refused_where_it_means_nothing():
    """On a chip without a rate for it, compiled or in closed form; in a network of one block,
    where no loop tells its products; and in networks of other kinds."""
    a100 = load_cluster("dgx-a100")
    config = run_in("float8").config

    with pytest.raises(ConfigError, match='a100-40gb has no rate for fp8; use "bfloat16"'):
        profile_many([ProfileJob(run=resolve(config), cluster=a100)], cache=None)
    with pytest.raises(ConfigError, match="a100-40gb has no rate for fp8"):
        shape_of(config, a100.chip)
    with pytest.raises(ConfigError, match=r"model\.layers=1 is refused: float8 needs a stack"):
        run_in("float8", layers=1)
    with pytest.raises(ConfigError, match=r"model\.compute_dtype='float8' is refused"):
        build(RunConfig, {"model": {"name": "mlp", "compute_dtype": "float8"}})


def test_what_no_shape_tells_apart_is_refused_or_said():
    """Adapters as narrow as a layer (keys are 256 wide); one period of layers, which is no loop;
    a layer beyond the last period is costed in bf16, and a note says so."""
    program = program_of(loop("blocks", LINEAR))
    windows: JsonValue = {"sliding_window": 64, "global_every": 2}

    assert restored(program, run_in("float8", rank=8)).notes == in_float8(program).notes
    with pytest.raises(ConfigError, match=r"fine_tuning\.lora\.rank=256 is refused"):
        restored(program, run_in("float8", rank=256))
    with pytest.raises(ConfigError, match=r"model\.layers=2 is refused"):
        restored(program, run_in("float8", layers=2, block=windows))
    *_, note = restored(program, run_in("float8", layers=5, block=windows)).notes
    assert note == "1 layer outside of the loop over blocks costed in bf16"
