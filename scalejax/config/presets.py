"""Presets of published transformers, which `model.name` of a run may name.

A preset is a network and its sizes; any field beside the name replaces the published value. The
published vocabulary and context length are listed too, but belong to the data and are not set
(`data.vocabulary` and `data.tokens` of `synthetic_tokens`). No network is built here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ModelConfig
from scalejax.core.errors import ConfigError, unknown_name
from scalejax.core.serialization import JsonValue, build


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published network."""

    network: str
    """Its architecture: the `model.name` of the config class."""
    sizes: Mapping[str, int | float] = field(default_factory=dict)
    """Other fields of the model; the others keep the defaults of the network."""
    vocabulary: int | None = None
    """Size of the vocabulary, as published; None for networks that read images."""
    tokens: int | None = None
    """Context length in tokens, as published; None for networks that read images."""
    parameters: int
    """Parameters, as published; with 1000 classes for images."""
    rounded_to: int = 1
    """Unit that `parameters` is rounded to; 1 if it is exact."""
    surplus: int = 0
    """Parameters of the network here less those published, where a layer differs from the
    published one."""
    source: str
    """Publication."""


def _gpt(
    layers: int, hidden: int, heads: int, parameters: int, rounded_to: int, **published: int | str
) -> Preset:
    """A gpt, GPT-2's vocabulary unless `published` says otherwise."""
    facts = {"vocabulary": 50_257, **published}
    sizes = {"layers": layers, "hidden": hidden, "heads": heads}
    return Preset(
        network="gpt",
        sizes=sizes,
        parameters=parameters,
        rounded_to=rounded_to,
        **facts,  # type: ignore[arg-type]  fields of a preset
    )


def _llama3(layers: int, hidden: int, heads: int, ffn_hidden: int, parameters: int) -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8}
    return Preset(
        network="llama",
        sizes={**sizes, "ffn_hidden": ffn_hidden, "rope_theta": 500_000.0, "norm_epsilon": 1e-5},
        vocabulary=128_256,  # 128,000 tokens and 256 special ones
        tokens=8192,
        parameters=parameters,
        source="Grattafiori et al. 2024, arXiv 2407.21783, table 3; parameters of the checkpoints",
    )


def _vit(layers: int, hidden: int, heads: int, parameters: int) -> Preset:
    return Preset(
        network="vit",
        sizes={"patch": 16, "layers": layers, "hidden": hidden, "heads": heads},
        parameters=parameters,
        source="Dosovitskiy et al. 2020, arXiv 2010.11929, table 1; parameters of torchvision's, "
        "images of 224 x 224",
    )


_GPT2 = "Radford et al. 2019, table 2; parameters of the published checkpoints"
_GPT3 = "Brown et al. 2020, arXiv 2005.14165, table 2.1"
_BERT = "Devlin et al. 2018, arXiv 1810.04805, section 3; parameters of BertForMaskedLM in \
Hugging Face's transformers, without the pooler"

PRESETS: dict[str, Preset] = {
    "gpt2-124m": _gpt(12, 768, 12, 124_439_808, 1, tokens=1024, source=_GPT2),
    "gpt2-355m": _gpt(24, 1024, 16, 354_823_168, 1, tokens=1024, source=_GPT2),
    "gpt2-774m": _gpt(36, 1280, 20, 774_030_080, 1, tokens=1024, source=_GPT2),
    "gpt2-1.5b": _gpt(48, 1600, 25, 1_557_611_200, 1, tokens=1024, source=_GPT2),
    "gpt3-125m": _gpt(12, 768, 12, 125_000_000, 10**6, tokens=2048, source=_GPT3),
    "gpt3-760m": _gpt(24, 1536, 16, 760_000_000, 10**6, tokens=2048, source=_GPT3),
    # 16 heads of 128: the table's 24 would be 3072 wide
    "gpt3-1.3b": _gpt(24, 2048, 16, 1_300_000_000, 10**8, tokens=2048, source=_GPT3),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2_700_000_000, 10**8, tokens=2048, source=_GPT3),
    "gpt3-6.7b": _gpt(32, 4096, 32, 6_700_000_000, 10**8, tokens=2048, source=_GPT3),
    # 40 heads of 128 are 5120: the table's 5140 is no multiple of its heads
    "gpt3-13b": _gpt(40, 5120, 40, 13_000_000_000, 10**9, tokens=2048, source=_GPT3),
    "gpt3-175b": _gpt(96, 12_288, 96, 175_000_000_000, 10**9, tokens=2048, source=_GPT3),
    # ALiBi, which has no parameters, replaced by learned positions; the norm of the embedding
    # left out
    "bloom-176b": _gpt(
        70,
        14_336,
        112,
        176_247_271_424,
        1,
        vocabulary=250_880,  # padded
        tokens=2048,
        surplus=2048 * 14_336 - 2 * 14_336,
        source="BigScience 2022, arXiv 2211.05100, table 3; parameters of the checkpoint",
    ),
    "llama3-8b": _llama3(32, 4096, 32, 14_336, 8_030_261_248),
    "llama3-70b": _llama3(80, 8192, 64, 28_672, 70_553_706_496),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248, 405_853_388_800),
    "bert-base": Preset(
        network="bert_base",
        vocabulary=30_522,
        tokens=512,
        parameters=109_514_298,
        source=_BERT,
    ),
    "bert-large": Preset(
        network="bert_large",
        vocabulary=30_522,
        tokens=512,
        parameters=335_174_458,
        source=_BERT,
    ),
    "vit-b/16": _vit(12, 768, 12, 86_567_656),
    "vit-l/16": _vit(24, 1024, 16, 304_326_632),
}
"""The presets by name."""


def with_preset(tables: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The tables of a run with a preset of the model expanded into its fields.

    Args:
        tables: of a `run.toml`; not modified.

    Raises:
        ConfigError: if there is neither a network nor a published one of that name.
    """
    model = tables.get("model")
    if not isinstance(model, dict):
        return tables
    return {**tables, "model": _spelled_out(model)}


def published_model(name: str, **replaced: JsonValue) -> ModelConfig:
    """The config of the preset `name`, with fields replaced.

    Raises:
        ConfigError: if there is no such name or field.
    """
    if name not in PRESETS:
        raise ConfigError(unknown_name("model.name", name, PRESETS))
    return build(ModelConfig, _spelled_out({"name": name, **replaced}), where="model")


def costed_note(name: str | None, model: ModelConfig, dataset: DatasetFacts) -> str | None:
    """A note on settings in which a costed preset differs from the published network; None if it
    does not.

    Compares vocabulary and context length, which a preset does not set, and names the compute type
    if it is float32, in which networks of published sizes are not trained.

    Args:
        name: `model.name` as it was given.
        model: its config.
        dataset: the data set it is trained on.
    """
    preset = PRESETS.get(name or "")
    if preset is None:
        return None
    parts = []
    if preset.vocabulary is not None:
        parts.append(_beside("vocabulary", dataset.classes, preset.vocabulary))
    if preset.tokens is not None:
        parts.append(_beside("tokens", dataset.input_shape[0], preset.tokens))
    is_as_published = not any("published" in part for part in parts)
    if is_as_published and model.compute_dtype != "float32":
        return None
    return f"costs {', '.join((*parts, model.compute_dtype))}"


def _beside(what: str, given: int, published: int) -> str:
    return f"{what} {given}" + ("" if given == published else f" (published: {published})")


def _spelled_out(model: dict[str, JsonValue]) -> dict[str, JsonValue]:
    name = model.get("name")
    if not isinstance(name, str) or name in ModelConfig.names():
        return model  # an invalid name is refused when the config is built
    if name not in PRESETS:
        raise ConfigError(unknown_name("model.name", name, [*ModelConfig.names(), *PRESETS]))
    given = {key: value for key, value in model.items() if key != "name" and value is not None}
    return {"name": PRESETS[name].network, **PRESETS[name].sizes, **given}
