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
    embedding = next((size for path, size in sizes.items() if "tokens" in path), 0)
    moe = model.moe if isinstance(model, LlamaConfig) else None
    is_mixture, unit = moe is not None, preset.rounded_to
    assert_published(count, embedding, preset.parameters, unit, is_mixture=is_mixture)
    if moe is not None and preset.active_parameters is not None:
        routed = sum(size for path, size in sizes.items() if "experts" in path)
        active = count - routed + routed * moe.experts_per_token // moe.experts
        unit = preset.active_rounded_to
        assert_published(active, embedding, preset.active_parameters, unit, is_mixture=True)


def assert_published(
    count: int, embedding: int, published: int, rounded_to: int, *, is_mixture: bool
) -> None:
    """As many, to the last printed digit.

    Publications of mixtures round or cut it off, and count the input embedding or do not; and
    0.5 % is enough.
    """
    gaps = [count - published, count - embedding - published]
    if not is_mixture or rounded_to == 1:
        assert abs(gaps[0]) <= rounded_to // 2, f"{count:_} beside {published:_}"
        return
    slack = max(rounded_to // 2, published // 200)
    assert any(-slack <= gap < max(slack, rounded_to) for gap in gaps), (
        f"{count:_} or {count - embedding:_} beside {published:_}"
    )


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
    with pytest.raises(ConfigError, match=r"model.*hiden is no field"):
        published_model("gpt2-124m", hiden=3)


def test_published_network_in_place_of_a_file_is_told_from_one(tmp_path, monkeypatch):
    """And where its name belongs."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r'no file: name it in a run\.toml \(model\.name = "gpt2'):
        load_config(Path("gpt2-124m"))
