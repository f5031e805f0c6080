"""Promises of `run.toml`: everything wrong is refused in one line that says how to mend it."""

import tomllib
from pathlib import Path

import pytest

from scalejax.config.model import MlpConfig
from scalejax.config.run import RunConfig, load_config, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build, parse_value, plain
from scalejax.data.facts import read_facts

RUN = """
[model]
name = "mlp"
hidden = [64, 32]
[data]
name = "fashion_mnist"
edition = "embedded"
[batch]
global_batch = 512
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.02
scaling = "linear"
reference_batch = 32
warmup = "gradual"
warmup_epochs = 3.0
[train]
epochs = 10
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    """A correct file."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_a_file_becomes_what_it_says(run_toml):
    """Values land in their fields, lists as tuples, the rest at its defaults."""
    config = load_config(run_toml)

    assert isinstance(config.model, MlpConfig)
    assert config.model.hidden == (64, 32)
    assert config.schedule.scaled(None)[1] == 3.0
    assert config.layout.mode == "jit"
    assert config.train.epochs == 10


def test_a_config_survives_a_round_trip(run_toml):
    """What is written into a run folder reads back as the same config."""
    config = load_config(run_toml)

    assert build(RunConfig, plain(config)) == config


def test_flags_replace_fields(run_toml):
    """A dotted name reaches any field, also of a table that the file leaves out."""
    config = load_config(run_toml, {"train.epochs": 3, "layout.tensor": 2})

    assert (config.train.epochs, config.layout.tensor) == (3, 2)


def test_one_batch_replaces_the_other_of_the_file(run_toml: Path):
    """A run has one of the two; who asks for this one does not want that of the file."""
    by_device = load_config(run_toml, {"batch.per_device_batch": 4})

    assert (by_device.batch.global_batch, by_device.batch.per_device_batch) == (None, 4)
    assert load_config(run_toml, {"batch.microbatches": 2}).batch.global_batch is not None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model.hiden": [3]}, r"model\.hiden is not a field \(did you mean 'hidden'\?\)"),
        ({"modell": {}}, r"modell is not a field \(did you mean 'model'\?\)"),
        ({"model.name": "resnet5"}, r"model\.name='resnet5' .*did you mean 'resnet50'"),
        ({"train.epochs": 1.5}, r"train\.epochs=1\.5 is refused: it must be a whole number"),
        ({"train.epochs": "3"}, r"train\.epochs='3' is refused: it must be a whole number"),
        ({"train.epochs": True}, r"train\.epochs=True is refused"),
        ({"train.epochs": 0}, r"train\.epochs=0 is refused: it must be at least 1"),
        (
            {"train.evaluate_every_epochs": 2**40},
            r"train\.evaluate_every_epochs=1099511627776 is refused: it must be at most 2\.1",
        ),
        ({"model.hidden": [3, "a"]}, r"model\.hidden\.1='a' is refused"),
        ({"layout": 3}, r"layout=3 is refused: it must be a table"),
        ({"schedule": 3}, r"schedule=3 is refused: it must be a table"),
        ({"optimizer": 3}, r"optimizer=3 is refused: it must be a table"),
        ({"optimizer": {}}, r"optimizer\.name is missing"),
        ({"schedule.base_learning_rate": -1.0}, r"must be above 0"),
        ({"schedule.base_learning_rate": float("nan")}, r"must be above 0|must be a"),
        ({"schedule.base_learning_rate": float("inf")}, r"must be"),
        ({"schedule.decay": "step", "schedule.decay_epochs": [-1.0]}, r"above 0 and rise"),
        ({"schedule.decay": "stp"}, r"did you mean 'step'"),
        ({"schedule.decay": "step"}, r"schedule\.decay_epochs=\(\) .*at least one epoch"),
        ({"schedule.scaling": "none"}, r'schedule\.warmup_from=\'base\' .*warmup_from="zero"'),
        (
            {"schedule.warmup": "none"},
            r'warmup_epochs=3\.0 .*needs it to be 0; .*warmup="gradual" and vary warmup_epochs',
        ),
        ({"batch.per_device_batch": 4, "batch.global_batch": 8}, r"exactly one of the two"),
        ({"layout.mode": "pmap", "layout.tensor": 2}, r"layout\.tensor=2 .*data axis only"),
        ({"optimizer.momentum": 1.0}, r"optimizer\.momentum=1\.0 .*from 0 to below 1"),
        ({"train.early_stopping.patience": -1}, r"train\.early_stopping\.patience=-1"),
        (
            {"train.early_stopping.monitor": "loss"},
            r"it must be one of validation_accuracy, validation_loss",
        ),
        ({"train.evaluate_every_steps": 0}, r"train\.evaluate_every_steps=0"),
        (
            {"train.evaluate_every_steps": 5, "train.early_stopping": {}},
            r"train\.evaluate_every_steps=5 is refused: train\.early_stopping counts epochs",
        ),
        ({"data": {"name": "synthetic_tokens"}}, r"model\.name='mlp' .*holds text"),
        (
            {"model": {"name": "inception_v3"}},
            r"model\.name='inception_v3' .*at least 75 x 75, but .*holds images of 28 x 28",
        ),
        ({"model": {"name": "vgg16", "width": 0}}, r"model\.width=0\.0 .*must be above 0"),
        ({"model": {"name": "bert_base"}}, r"model\.name='bert_base' .*text with hidden words"),
        (
            {"model": {"name": "gpt"}, "data": {"name": "masked_tokens"}},
            r"model\.name='gpt' .*reads text, but .*holds text with hidden words",
        ),
        (
            {"model": {"name": "bert_base"}, "data": {"name": "masked_tokens", "tokens": 513}},
            r"data\.tokens=513 is refused: it must be at most model\.max_tokens=512",
        ),
        (
            {"model": {"name": "bert_base", "heads": 5}, "data": {"name": "masked_tokens"}},
            r"model\.hidden=768 .*multiple of heads=5 \(nearest: 765 or 770\)",
        ),
        (
            {"model": {"name": "bert_base"}, "data": {"name": "masked_tokens", "masked": 126}},
            r"data\.masked=126 is refused: an example of 128 tokens has 125 words",
        ),
        ({"model": {"name": "custom", "path": "nonsense"}}, r"model\.path=\'nonsense\'.*module:"),
        (
            {"model": {"name": "gpt", "remat": "fulll"}},
            r"^[^\n]*model\.remat='fulll' is refused: did you mean 'full'\? [^\n]*$",
        ),
        (
            {"model": {"name": "gpt", "remat": {"save": ["qkv"]}}},
            r"^[^\n]*model\.remat\.save\.0='qkv' .*did you mean 'qkv_proj'[^\n]*$",
        ),
        (
            {"model": {"name": "gpt", "remat": {"save": ["mlpwi"], "offload": ["mlpwi"]}}},
            r"model\.remat\.offload='mlpwi' .*saved already",
        ),
        (
            {"model": {"name": "gpt", "remat": {"offload": ["kv_wa_proj"]}}},
            r"model\.remat\.offload='kv_wa_proj' is refused: it is for latent attention",
        ),
        (
            {"model": {"name": "mixtral-8x7b", "remat": {"save": ["mlpwi"]}}},
            r"model\.remat\.save='mlpwi' is refused: it is for shared experts",
        ),
        (
            {
                "model": {"name": "gpt", "remat": "minimal_offloaded"},
                "data": {"name": "synthetic_tokens"},
                "layout": {"pipeline": 2},
            },
            r"layout\.pipeline=2 .*leave model\.remat's",
        ),
        (
            {"layout.optimizer_memory_host_offload": True, "optimizer.momentum": 0},
            r"optimizer_memory_host_offload=True .*'sgd' without momentum has no state",
        ),
        (
            {
                "optimizer": {"name": "adamw", "main_params_dtype": "bfloat16"},
                "averaging": {"name": "ema"},
            },
            r"optimizer\.main_params_dtype='bfloat16' .*averages of parameters",
        ),
        ({"seed": -1}, r"seed=-1 is refused"),
        ({"seed": 2**32}, r"seed=4294967296 is refused"),
    ],
)
def test_what_cannot_work_is_refused_by_field(run_toml, overrides, sentence):
    """Field, value, what is accepted, nearest fix; never a traceback of another library."""
    with pytest.raises(ConfigError, match=sentence):
        load_config(run_toml, overrides)


def test_every_problem_is_named_at_once(run_toml):
    """Two mistakes are two lines."""
    with pytest.raises(ConfigError) as caught:
        load_config(run_toml, {"train.epochs": "x", "batch.global_batch": 1.5})

    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_file_is_told_with_the_nearest_name(run_toml):
    """A typing mistake in a path is as common as one in a field."""
    with pytest.raises(ConfigError, match=r"rum\.toml' does not exist \(did you mean .*run\.toml"):
        load_config(run_toml.with_name("rum.toml"))


def test_a_file_that_is_no_toml_is_told_where(run_toml):
    """The line of the mistake is in the message."""
    run_toml.write_text(RUN + "epochs = = 3\n")

    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: .*line \d+"):
        load_config(run_toml)


def test_resolving_fills_the_data_axis(run_toml):
    """512 samples over 8 devices: 64 each, 19 updates an epoch, 190 in the run."""
    run = resolve(load_config(run_toml), 8)

    assert (run.layout.data, run.split.per_device_batch) == (8, 64)
    assert (run.steps_per_epoch, run.total_steps) == (10_000 // 512, 190)


def test_a_per_device_batch_grows_with_the_devices(run_toml):
    """Weak scaling is one field."""
    config = with_fields(
        load_config(run_toml), {"batch.global_batch": None, "batch.per_device_batch": 32}
    )

    assert [resolve(config, n).split.global_batch for n in (1, 4, 8)] == [32, 128, 256]


def test_a_batch_larger_than_the_data_is_refused(run_toml):
    """There would be no step in an epoch."""
    with pytest.raises(ConfigError, match=r"at most the 10000 training examples"):
        resolve(load_config(run_toml, {"batch.global_batch": 16_384}), 8)


def test_averages_of_devices_need_examples_on_each(run_toml):
    """Eight devices with four rows each: the last one's begin with the 29th example."""
    fields = {"batch.global_batch": 32, "train.metric_average": "devices"}
    enough, too_few = (
        load_config(run_toml, {**fields, "data": {"name": "synthetic_images", "test_examples": n}})
        for n in (29, 28)
    )

    assert resolve(enough, 8).config.train.metric_average == "devices"
    with pytest.raises(ConfigError, match=r"metric_average='devices' .*of 8 devices .*, 7 have"):
        resolve(too_few, 8)
    resolve(too_few, 4)  # of eight rows each, the last one's begin with the 25th


def test_a_fixed_layout_refuses_other_devices(run_toml):
    """A layout of 4 on 8 devices would leave half of them idle without a word."""
    with pytest.raises(ConfigError, match=r"devices=8 is refused: the layout data=4 takes 4"):
        resolve(load_config(run_toml, {"layout.data": 4}), 8)


def test_flag_values_are_toml_or_text():
    """Numbers, truths and lists are TOML; a bare word is itself."""
    values = [parse_value(text) for text in ("3", "1e-3", "true", "[1, 2]", "mlp", '"mlp"')]

    assert values == [3, 1e-3, True, [1, 2], "mlp", "mlp"]


def test_the_full_edition_is_refused_where_it_is_not_installed(run_toml, monkeypatch, tmp_path):
    """The refusal is the command that installs it."""
    monkeypatch.setattr("scalejax.data.readers.fashion_mnist.FOLDER", tmp_path / "nowhere")

    full = load_config(run_toml, {"data.edition": "full"})
    with pytest.raises(ConfigError, match="apt-get install dataset-fashion-mnist"):
        read_facts(full.data)
    auto = load_config(run_toml, {"data.edition": "auto"})
    assert auto.data.known_facts is None  # a config opens nothing
    assert read_facts(auto.data).train_examples == 10_000


def test_the_example_is_toml():
    """The fixture itself is what a user would write."""
    assert tomllib.loads(RUN)["train"]["epochs"] == 10


MOE = {"model.name": "llama", "model.moe": {"experts": 8, "expert_hidden": 16}}


def _experts_with(**router: str | float) -> dict[str, object]:
    return {"experts": 8, "expert_hidden": 16, "router": router}


GPT = {"model.name": "gpt", "data.name": "synthetic_tokens", "data.tokens": 64}


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"layout.pipeline": 5}, r"model\.layers=4 .* layout\.pipeline=5 .* at least 5"),
        ({"layout.pipeline": 2, "layout.pipeline_chunks": 4}, "nearest: 8"),
        (
            {"layout.pipeline": 2, "layout.pipeline_chunks": 2, "batch.microbatches": 3},
            r"batch\.microbatches=3 .* layout\.pipeline=2",
        ),
        ({"layout.expert": 2}, r"layout\.expert=2 is refused.* has none"),
        (
            {**MOE, "layout.expert": 3, "batch.global_batch": 48},
            r"model\.moe\.experts=8 .* layout\.expert=3 \(nearest: 6 or 9\)",
        ),
        ({**MOE, "model.moe.dense_layers": 4}, r"dense_layers=4 .* some layer has experts"),
        ({**MOE, "model.moe.experts_per_token": 9}, "at most the 8 experts"),
        (
            {**MOE, "model.moe": _experts_with(balance="none", auxiliary_loss_weight=0.5)},
            r'auxiliary_loss_weight=0\.5 .*"none" does not read it',
        ),
        (
            {**MOE, "model.moe": _experts_with(bias_update_rate=0.2)},
            r'bias_update_rate=0\.2 .*"auxiliary_loss" does not read it',
        ),
        (
            {**MOE, "model.moe": _experts_with(bias_update="error")},
            r"bias_update='error' .*\"auxiliary_loss\" does not read it",
        ),
        ({"layout.pipeline_chunks": 2}, r"needs layout\.pipeline above 1"),
        ({"layout.pipeline_schedule": "1f1b"}, r"needs layout\.pipeline above 1"),
        (
            {"layout.pipeline": 2, "layout.pipeline_chunks": 2, "batch.microbatches": 4}
            | {"layout.pipeline_schedule": "zb_h1"},
            "stages have one chunk",
        ),
        (
            {"layout.pipeline": 2, "layout.pipeline_schedule": "dualpipe", "batch.microbatches": 2},
            r"microbatches=2 is refused: in \"dualpipe\" half of them .* use 4",
        ),
        (
            {"layout.pipeline": 3, "layout.pipeline_schedule": "dualpipe", "batch.microbatches": 8},
            r"layout\.pipeline=3 .* an even number; use 2 or 4",
        ),
        (
            {"layout.pipeline": 2, "layout.pipeline_schedule": "1f1b", "layout.context": 2}
            | {"layout.context_strategy": "ring"},
            r"confuses with the ring; use .all_gather",
        ),
        ({"layout.sequence_parallel": True}, r"needs layout\.tensor above 1"),
        ({"layout.context": 5}, "data.tokens=64 .* layout.context=5"),
        (
            {"layout.context": 2, "model.attention": "fused", "data.tokens": 66},
            r"data\.tokens=66 .* 2\*layout\.context=4 \(nearest: 64 or 68",
        ),
        (
            {"layout.context": 2, "layout.context_strategy": "ring", "data.tokens": 66},
            r"data\.tokens=66 .* 2\*layout\.context=4 \(nearest: 64 or 68",
        ),
        (
            {"layout.context": 3, "layout.context_strategy": "all_to_all", "data.tokens": 66},
            r"model\.heads=4 .* layout\.context=3 \(nearest: 3 or 6",
        ),
        ({"layout.context_strategy": "ring"}, r"needs layout\.context above 1"),
        ({"layout.pipeline": 2, "layout.mode": "shard_map"}, "spreads over the data axis only"),
    ],
)
def test_axes_that_do_not_divide_a_transformer_are_refused(run_toml, fields, refusal):
    """Before anything is compiled, with what would do."""
    with pytest.raises(ConfigError, match=refusal):
        load_config(run_toml, {"model": {"name": "gpt"}, "data": {}, **GPT, **fields})


@pytest.mark.parametrize("name", ["pipeline", "context"])
def test_axes_of_transformers_are_refused_for_other_networks(run_toml, name):
    """There are no blocks or tokens to divide."""
    with pytest.raises(ConfigError, match=rf"layout\.{name}=2 .*transformers.*'mlp'"):
        load_config(run_toml, {f"layout.{name}": 2})
