"""Presets of published transformers, which `model.name` of a run may name.

A preset is a network and its sizes; any field given with the name replaces the published value. The
published vocabulary and context length are listed too, but belong to the data and are not set
(`data.vocabulary` and `data.tokens` of `synthetic_tokens`). The presets are in `presets.toml`. No
network is built here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from scalejax.config.data import DatasetFacts
from scalejax.config.model import DecoderConfig, ModelConfig
from scalejax.core.errors import ConfigError, unknown_name
from scalejax.core.serialization import JsonValue, build, load_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTraining:
    """How a published network was trained: devices, batch and layout."""

    devices: int
    """Devices."""
    global_batch: int
    """Samples of the preset's tokens per update, at the end of any ramp."""
    layout: Mapping[str, int]
    """Devices along each axis except data, which takes the rest."""
    zero_stage: int
    """ZeRO stage."""
    source: str
    """Publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretraining:
    """What a published decoder was pretrained on."""

    tokens: int
    """Tokens of a sample for most of the training."""
    global_batch: int | None = None
    """Samples per update, at the end of any ramp; None if not published, or not kept here."""
    total_tokens: int | None = None
    """Tokens in all; None if not published, or not kept here."""
    source: str
    """Publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published network."""

    network: str
    """Its architecture: the `model.name` of the config class."""
    sizes: Mapping[str, JsonValue] = field(default_factory=dict)
    """Fields of the model that the preset sets; the others keep the defaults of the network."""
    vocabulary: int | None = None
    """Published size of the vocabulary; None for networks that read images."""
    tokens: int | None = None
    """Published context length in tokens; None for networks that read images."""
    parameters: int
    """Published number of parameters, input embedding included; with 1000 classes for images."""
    rounded_to: int = 1
    """Unit that `parameters` is rounded to; 1 if it is exact."""
    surplus: int = 0
    """Parameters of this network minus the published ones, where a layer differs."""
    active_parameters: int | None = None
    """Published number of parameters that a token passes through, for a mixture of experts; None
    for others, or if not published."""
    counts_embedding: bool = True
    """Whether `active_parameters` include the input embedding, of which a token reads one row;
    `parameters` always do."""
    active_rounded_to: int = 1
    """Unit that `active_parameters` is rounded to."""
    source: str
    """Publication."""
    training: PublishedTraining | None = None
    """How it was trained; None if that is not kept here."""
    pretraining: Pretraining | None = None
    """Samples, batch and tokens of its pretraining; None if they are not kept here."""

    @property
    def is_decoder(self) -> bool:
        """Whether it is trained on plain text of known vocabulary and context, as `cost` needs."""
        model = build(ModelConfig, {"name": self.network, **self.sizes}, where="model")
        return isinstance(model, DecoderConfig) and None not in (self.tokens, self.vocabulary)

    @property
    def pretraining_tokens(self) -> int | None:
        """Tokens of a sample in most of its training, or else its context; None for images."""
        return self.tokens if self.pretraining is None else self.pretraining.tokens

    @property
    def published_batch(self) -> int | None:
        """Samples per update as published; None if not kept here."""
        if self.pretraining is not None and self.pretraining.global_batch is not None:
            return self.pretraining.global_batch
        return None if self.training is None else self.training.global_batch


def with_preset(tables: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The tables of a run with a preset of the model expanded into its fields.

    Args:
        tables: of a `run.toml`; not modified.

    Raises:
        ConfigError: if neither a network nor a preset has that name.
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
        name: `model.name` as given.
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
        parts.append(_beside("tokens", dataset.input_shape[0], preset.pretraining_tokens))
    is_as_published = not any("published" in part for part in parts)
    if is_as_published and model.compute_dtype != "float32":
        return None
    return f"costs {', '.join((*parts, model.compute_dtype))}"


def _beside(what: str, given: int, published: int | None) -> str:
    return f"{what} {given}" + ("" if given == published else f" (published: {published})")


def _spelled_out(model: dict[str, JsonValue]) -> dict[str, JsonValue]:
    name = model.get("name")
    if not isinstance(name, str) or name in ModelConfig.names():
        return model  # an invalid name is refused when the config is built
    if name not in PRESETS:
        raise ConfigError(unknown_name("model.name", name, [*ModelConfig.names(), *PRESETS]))
    given = {key: value for key, value in model.items() if key != "name" and value is not None}
    return {"name": PRESETS[name].network, **_with_given(PRESETS[name].sizes, given)}


def _with_given(
    published: Mapping[str, JsonValue], given: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """`published` with the given fields replaced; within tables, field by field."""
    sizes = dict(published)
    for key, value in given.items():
        of_table = sizes.get(key)
        is_table = isinstance(of_table, dict) and isinstance(value, dict)
        sizes[key] = _with_given(of_table, value) if is_table else value  # type: ignore[arg-type]
    return sizes


def _catalogue() -> dict[str, Preset]:
    """The presets of `presets.toml`, in its order."""
    found = {}
    tables: Any = load_toml(Path(__file__).with_name("presets.toml"))
    for family in tables["family"]:
        models = family.pop("models")
        for name, own in models.items():
            sizes: dict[str, Any] = _with_given(family, own)
            facts = {
                each.name: sizes.pop(each.name) for each in fields(Preset) if each.name in sizes
            }
            if training := facts.pop("training", None):
                facts["training"] = PublishedTraining(**training)
            if pretraining := facts.pop("pretraining", None):
                facts["pretraining"] = Pretraining(**pretraining)
            found[name] = Preset(sizes=sizes, **facts)
    return found


PRESETS = _catalogue()
"""The presets by name."""
