"""What a `run.toml` says of images changed at random for training; changes none."""

from dataclasses import dataclass
from typing import Literal

from scalejax.core.errors import ConfigError, refusal, require_at_least

MOST_HUE = 0.5
"""Half way round the circle of hues: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationConfig:
    """How images are changed at random before they are trained on; nothing is unless asked for.

    In this order: crop or shift, flip, colours, mixup. Examples to evaluate on stay as they are.
    What happens to an example follows from the seed of the run, the epoch and its index alone.
    """

    crop_area: tuple[float, float] | None = None
    """Least and largest part of an image's area that a random crop keeps, scaled to the size of
    the data set; ImageNet is trained with [0.08, 1.0] (Szegedy et al. 2014, arXiv 1409.4842,
    section 6; Goyal et al. 2017). If absent, evaluation's crop."""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest width of a crop over its height; uniform in the logarithm."""
    shift_pixels: int = 0
    """Most pixels by which an image is shifted to each side, black coming in (4 with CIFAR: He et
    al. 2015, arXiv 1512.03385, section 4.2)."""
    flip: bool = False
    """Whether every second image, at random, is mirrored left to right."""
    brightness: float = 0.0
    """x: pixels are multiplied by a factor in [1 - x, 1 + x]; the four changes of colours come in
    random order, as in torchvision's ColorJitter."""
    contrast: float = 0.0
    """x: likewise how far pixels are from the mean grey of their image."""
    saturation: float = 0.0
    """x: likewise how far pixels are from their own grey."""
    hue: float = 0.0
    """x: hues are turned by a share of their circle in [-x, x]; at most 0.5."""
    mixup_alpha: float = 0.0
    """Mixes every two neighbours of a batch, and their losses, each keeping a share of Beta(alpha,
    alpha) of its own (Zhang et al. 2017, arXiv 1710.09412; there 0.1 to 0.4); 0 mixes none."""

    def __post_init__(self) -> None:
        area = self.crop_area
        if area is not None and not 0 < area[0] <= area[1] <= 1:
            accepted = "the least and the largest part, above 0, at most 1, such as [0.08, 1.0]"
            raise ConfigError(refusal("input.augmentation.crop_area", list(area), accepted))
        least, largest = self.crop_aspect
        if not 0 < least <= largest < float("inf"):
            accepted = "the least and the largest, above 0, such as [0.75, 1.333]"
            raise ConfigError(
                refusal("input.augmentation.crop_aspect", list(self.crop_aspect), accepted)
            )
        for name in ("shift_pixels", "brightness", "contrast", "saturation", "hue", "mixup_alpha"):
            require_at_least(f"input.augmentation.{name}", getattr(self, name), 0)
        if area is not None and self.shift_pixels:
            accepted = "input.augmentation.crop_area moves images already; leave one of them out"
            raise ConfigError(
                refusal("input.augmentation.shift_pixels", self.shift_pixels, accepted)
            )
        for name, most in (
            ("brightness", 1.0),
            ("contrast", 1.0),
            ("saturation", 1.0),
            ("hue", MOST_HUE),
        ):
            if getattr(self, name) > most:
                accepted = f"it must be from 0 to {most}"
                raise ConfigError(
                    refusal(f"input.augmentation.{name}", getattr(self, name), accepted)
                )

    @property
    def changes_colours(self) -> bool:
        """Whether any of the four changes of colours is asked for."""
        return any((self.brightness, self.contrast, self.saturation, self.hue))

    @property
    def changes_pixels(self) -> bool:
        """Whether images of one size would not stay as they are."""
        return bool(
            self.crop_area is not None or self.shift_pixels or self.flip or self.changes_colours
        )


# What a `run.toml` says of the way from a data set to the devices, whatever the data set.


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    """How batches are made; `data` says of what."""

    workers: int | Literal["auto"] = 0
    """Processes of each host that make batches to train on, a core for each; 0 for threads of the
    one that trains, "auto" for as many as a measurement at the start says. Batches are the same
    bit by bit. Evaluations, and runs of a sweep that train together, use threads."""
    read_ahead_batches: int = 4
    """Batches made before they are asked for; each process makes two or more."""
    memory_bytes: int = 2**32
    """Most that batches made ahead take; where they need more, fewer are. What a data set keeps in
    memory is said with it, and shared by its processes."""
    remainder: Literal["drop", "pad"] = "drop"
    """What becomes of the last examples of an epoch, too few for a batch: they are left out, or
    the batch is filled up with rows that count for nothing, so that an epoch sees every example."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What an example does that is damaged, or holds what it must not: it ends the run; or it
    counts for nothing (in its place is the row beside it, or zeros if that is damaged too), and the
    record says how many did and why. A file damaged as a whole, or that the system cannot read,
    always ends the run."""
    augmentation: AugmentationConfig | None = None
    """How images are changed at random; if absent, not at all."""

    def __post_init__(self) -> None:
        if self.workers != "auto":
            require_at_least("input.workers", self.workers, 0)
        for name in ("read_ahead_batches", "memory_bytes"):
            require_at_least(f"input.{name}", getattr(self, name), 1)
