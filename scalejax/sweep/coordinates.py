"""Coordinate checks: the sizes of a decoder's activations, before and after a few updates, against
its width or depth.

Under a parametrization that transfers rates, neither the activations nor their changes over a few
updates grow or fall with the size of the network (Yang et al. 2022, "Tensor Programs V", arXiv
2203.03466, appendix D.1). Knows configs and numbers; `activations` does the training.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Literal, cast

from scalejax.config.model import BlockConfig, DecoderConfig, LlamaConfig
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular

Along = Literal["hidden", "layers"]
"""What differs between the networks of a check: their width, or their depth."""
Kept = Literal["head_size", "heads"]
"""What stays fixed as networks grow wider: the size of a head, or the number of heads."""
LOGITS = "logits"
"""The last layer of a check."""

FLAT = 0.2
"""Largest exponent, up or down, that counts as flat. A choice: exponents of correct networks differ
from 0 by noise and terms of order 1 / width; those of wrong ones are near one half or one (Yang et
al. 2022, table 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Mean absolute entries of one layer's output, over the tokens of a batch; None if they are not
    finite."""

    parametrization: str
    """Parametrization of the network: "standard", "mup" or "completep"."""
    size: int
    """Its width or its number of layers."""
    layer: str
    """The layer: embedding, a block, or logits."""
    start: float | None
    """Value before the first update."""
    end: float | None
    """Value after the last update."""
    change: float | None
    """Value for the difference of the two outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Exponents b of a x size^b for one layer, fitted by least squares to logarithms; None if a
    value is 0 or not finite."""

    parametrization: str
    """As in its coordinates."""
    layer: str
    """As in its coordinates."""
    start: float | None
    """Exponent before the first update."""
    end: float | None
    """Exponent after the last update."""
    change: float | None
    """Exponent of the change that the updates made."""
    is_flat: bool
    """Whether neither the layer nor its changes grow or fall with the size. Logits must change by
    the same amount, but may fall: before the first update those of muP fall as 1 / sqrt(width)
    (Yang et al. 2022, appendix D.2)."""


@document("coordinate_check")
@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateCheck(Tabular):
    """The measurements, and what follows from them."""

    along: Along
    """What differs between the networks."""
    sizes: tuple[int, ...]
    """Their widths or depths."""
    steps: int
    """Updates between the two measurements."""
    learning_rate: float
    """The learning rate, which is constant: the peak of the run's schedule."""
    are_flat: dict[str, bool]
    """Whether all layers are flat, by parametrization."""
    slopes: tuple[Slope, ...]
    """Exponents by layer."""
    coordinates: tuple[Coordinate, ...]
    """The measurements."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The measurements, a row for each."""
        return [asdict(each) for each in self.coordinates]


def resized(config: RunConfig, along: Along, size: int, kept: Kept) -> RunConfig:
    """`config` with a decoder of another depth, or of another width, with all widths scaled by the
    same factor.

    Raises:
        ConfigError: if it has no decoder, if one of its widths does not scale to a whole number, or
            if heads grow and its parametrization does not state their size in the base.
    """
    model = _decoder(config)
    if along == "layers":
        require_at_least("depths", size, 1)
        return replace(config, model=replace(model, layers=size))
    require_at_least("widths", size, 1)
    ratio = Fraction(size, model.hidden)

    def grown(name: str, value: int) -> int:
        if (product := ratio * value).denominator == 1:
            return int(product)
        accepted = (
            f"of hidden={model.hidden} and {name}={value} it would leave {name}={float(product):g}"
        )
        raise ConfigError(refusal("widths", size, accepted))

    changed: dict[str, object] = {"hidden": size}
    if model.ffn_hidden is not None:
        changed["ffn_hidden"] = grown("ffn_hidden", model.ffn_hidden)
    if kept == "head_size":
        changed |= {name: grown(name, count) for name, count in model.head_counts.items()}
    elif model.parametrization is not None and model.parametrization.base_head_size is None:
        accepted = "heads grow: say how large those of the base are, or use --keep head_size"
        raise ConfigError(refusal("model.parametrization.base_head_size", None, accepted))
    elif isinstance(model, LlamaConfig) and (head_size := model.block.head_size) is not None:
        block = replace(model.block, head_size=grown("block.head_size", head_size))
        changed["block"] = cast(BlockConfig, block)
    return replace(config, model=replace(model, **changed))  # type: ignore[arg-type]  its own fields


def arms(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """The networks to compare, by name of their parametrization: without any, and as the config
    says."""
    model = _decoder(config)
    plain = ("standard", replace(config, model=replace(model, parametrization=None)))
    own = model.parametrization
    return [plain] if own is None else [plain, (own.name, config)]


def slopes_of(coordinates: Sequence[Coordinate]) -> tuple[Slope, ...]:
    """The exponents of each layer of each parametrization, over its sizes."""
    groups: dict[tuple[str, str], list[Coordinate]] = {}
    for each in coordinates:
        groups.setdefault((each.parametrization, each.layer), []).append(each)
    return tuple(_slope(*key, found) for key, found in groups.items())


def _slope(parametrization: str, layer: str, found: Sequence[Coordinate]) -> Slope:
    start, end, change = (
        _exponent([(each.size, getattr(each, name)) for each in found])
        for name in ("start", "end", "change")
    )
    values = (start, end, change)
    # Logits may fall with the size, but must not grow.
    bounded = (start, end) if layer == LOGITS else ()
    judged = (change,) if layer == LOGITS else values
    return Slope(
        parametrization=parametrization,
        layer=layer,
        start=start,
        end=end,
        change=change,
        is_flat=all(each is not None and abs(each) <= FLAT for each in judged)
        and all(each is None or each <= FLAT for each in bounded),
    )


def _exponent(points: Sequence[tuple[int, float | None]]) -> float | None:
    """b of a x size^b through (size, value)."""
    known = [(size, value) for size, value in points if value]
    if len(known) < len(points):
        return None
    x, y = ([math.log(each) for each in axis] for axis in zip(*known, strict=True))
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - middle_x) ** 2 for a in x)


def _decoder(config: RunConfig) -> DecoderConfig:
    model = config.model
    if not isinstance(model, DecoderConfig):
        accepted = "a coordinate check is of decoders: gpt or llama"
        raise ConfigError(refusal("model.name", model.name, accepted))
    if model.expert_count:
        accepted = "a coordinate check is of dense decoders; leave it out"
        raise ConfigError(refusal("model.moe", "a table", accepted))
    return model
