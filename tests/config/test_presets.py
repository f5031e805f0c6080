"""Published networks by name: as many parameters as published, and fields that replace theirs."""

import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from scalejax.config.data import MaskedTokensConfig, SyntheticImagesConfig, SyntheticTokensConfig
from scalejax.config.model import BertConfig, GptConfig, LlamaConfig
from scalejax.config.presets import PRESETS, costed_note, published_model
from scalejax.config.run import given_name, load_config, with_fields
from scalejax.core.errors import ConfigError
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network

RUN = """
[model]
name = "{name}"
layers = 2

[data]
name = "synthetic_tokens"

[batch]
global_batch = 8

[optimizer]
name = "adamw"

[schedule]
base_learning_rate = 0.1
"""


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_network_has_as_many_parameters_as_published(name):
    """Counted in the network itself, of the published vocabulary, context and classes."""
    preset, model = PRESETS[name], published_model(name)
    if preset.tokens is None or preset.vocabulary is None:
        dataset = read_facts(SyntheticImagesConfig())
    elif isinstance(model, BertConfig):
        dataset = read_facts(MaskedTokensConfig(tokens=preset.tokens, vocabulary=preset.vocabulary))
    else:
        dataset = read_facts(
            SyntheticTokensConfig(tokens=preset.tokens, vocabulary=preset.vocabulary)
        )

    shapes = nnx.eval_shape(  # nothing is computed, and no memory taken
        lambda: build_network(model, dataset, bn=BatchNormScope(), rngs=nnx.Rngs(0))
    )

    sizes = {
        jax.tree_util.keystr(path): math.prod(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(nnx.state(shapes, nnx.Param))
    }
    count = sum(sizes.values()) - preset.surplus
    moe = model.moe if isinstance(model, LlamaConfig) else None
    assert_published(
        (name, "all"), count, preset.parameters, preset.rounded_to, is_mixture=moe is not None
    )
    if moe is not None and preset.active_parameters is not None:
        embedding = next(size for path, size in sizes.items() if "tokens" in path)
        routed = sum(size for path, size in sizes.items() if "experts" in path)
        active = count - routed + routed * moe.experts_per_token // moe.experts
        active -= 0 if preset.counts_embedding else embedding
        unit = preset.active_rounded_to
        assert_published((name, "active"), active, preset.active_parameters, unit, is_mixture=True)


APART = {
    ("grok-1", "all"): 315_684_000_000,  # 314e9 published: 0.54 % less than its own sizes give
    ("qwen3-30b-a3b", "active"): 3_353_000_000,  # 3.3e9 published: cut off, not rounded
    ("deepseek-v2-lite", "active"): 2_451_000_000,  # 2.4e9 published: cut off, not rounded
}
"""Counts here, to a million, that are further from what is published than `assert_published`
allows."""


def assert_published(
    what: tuple[str, str], count: int, published: int, unit: int, *, is_mixture: bool
) -> None:
    """As many, to half a unit of the last printed digit; of mixtures whose count is rounded, 0.5 %
    is enough."""
    slack = unit // 2
    if is_mixture and unit > 1:
        slack = max(slack, published // 200)
    gap = abs(count - published)
    if what in APART:
        assert gap > slack, "it need not be listed"
        assert abs(count - APART[what]) <= 1_000_000, f"{count:_}"
        return
    assert gap <= slack, f"{what}: {count:_} beside {published:_}"


def test_a_run_may_name_a_published_network(tmp_path):
    """It is spelled out, but for what is given beside the name, in the file or by a flag."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(name="gpt3-175b"))

    given = load_config(path).model
    flagged = load_config(path, {"model.name": "llama3-8b", "model.remat": "selective"}).model

    assert given == GptConfig(layers=2, hidden=12_288, heads=96)
    assert isinstance(flagged, LlamaConfig)
    assert (flagged.layers, flagged.kv_heads, flagged.remat) == (2, 8, "selective")


def test_fields_of_inner_tables_are_given_alone():
    """The others of the table stay as published."""
    given = {"capacity_factor": 1.0, "router": {"balance": "none"}}
    model = published_model("deepseek-v3", moe=given)

    assert isinstance(model, LlamaConfig)
    assert model.moe is not None
    assert (model.moe.experts, model.moe.capacity_factor) == (256, 1.0)
    assert (model.moe.router.groups, model.moe.router.balance) == (8, "none")


def test_settings_that_no_parameter_shows_are_as_published():
    """Epsilons of base models; and weights of router losses, for losses that are summed here."""
    names = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
    olmoe, mixtral = (PRESETS[name].sizes["moe"] for name in ("olmoe-7b-1b", "mixtral-8x7b"))
    assert isinstance(olmoe, dict)
    assert isinstance(mixtral, dict)

    assert [PRESETS[name].sizes["norm_epsilon"] for name in names] == [1e-6, 1e-5, 1e-5, 1e-5]
    assert olmoe["router"] == {
        "normalise_weights": False,
        "auxiliary_loss_weight": 0.01 / 16,  # layers
        "z_loss_weight": 0.001 / (16 * 8),  # and experts per token
    }
    assert mixtral["router"] == {"auxiliary_loss_weight": 0.02 * 2 / 32}


def test_what_is_costed_other_than_published_is_said(tmp_path):
    """Data of its own, or float32; nothing where both are as published, or a network has no
    published name."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(name="gpt3-175b"))
    published = {
        "data.vocabulary": 50_257, "data.tokens": 2048, "model.compute_dtype": "bfloat16",
    }  # fmt: skip

    def note(**changed):
        overrides = {**published, **changed}
        config = load_config(path, overrides)
        return costed_note(given_name(path, overrides), config.model, read_facts(config.data))

    assert note() is None
    assert note(**{"model.name": "gpt", "data.tokens": 8}) is None
    assert (
        note(**{"model.compute_dtype": "float32"}) == "costs vocabulary 50257, tokens 2048, float32"
    )
    assert note(**{"data.tokens": 1024}) == (
        "costs vocabulary 50257, tokens 1024 (published: 2048), bfloat16"
    )


def test_a_published_network_of_the_default_size_keeps_what_is_given(tmp_path):
    """4 layers are the default of gpt without a published name; here they replace 96."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(name="gpt"))
    config = load_config(path, {"model.name": "gpt3-175b", "model.layers": 4})

    assert config.model == GptConfig(layers=4, hidden=12_288, heads=96)
    assert with_fields(config, {"model.layers": 8}).model == published_model("gpt3-175b", layers=8)


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    """Of networks and of published ones."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(name="llama-8b"))

    with pytest.raises(ConfigError, match=r"model\.name='llama-8b' .*did you mean 'llama3-8b'"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"did you mean 'gpt2-124m'.*vit-b/16"):
        published_model("gpt2-124")
    with pytest.raises(ConfigError, match=r"model.*hiden is not a field"):
        published_model("gpt2-124m", hiden=3)


def test_published_network_in_place_of_a_file_is_told_from_one(tmp_path, monkeypatch):
    """And where its name belongs."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        ConfigError, match=r'not a file: name it in a run\.toml \(model\.name = "gpt2'
    ):
        load_config(Path("gpt2-124m"))
