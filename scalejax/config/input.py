"""Config of the input pipeline: augmentation, workers, prefetch. Neither reads nor changes data."""

from dataclasses import dataclass
from typing import Literal

from scalejax.core.errors import ConfigError, refusal, require_at_least

MOST_HUE = 0.5
"""Largest rotation of hues: half a circle to either side reaches every hue."""
MOST_MAGNITUDE = 30
"""Largest magnitude of RandAugment's operations."""
MOST_OPERATIONS = 14
"""Number of operations in RandAugment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandAugmentConfig:
    """RandAugment (Cubuk et al. 2019, arXiv 1909.13719): operations drawn for each image from 14
    equally likely ones, applied one after the other: identity, shear and translation along x and y,
    rotation, brightness, colour, contrast, sharpness, posterize, solarize, autocontrast, equalize.
    """

    operations: int = 2
    """Operations per image (N in the paper)."""
    magnitude: int = 9
    """Their strength (M), 0 to 30; at 30 they are those of AutoAugment at 10: shears of 0.3,
    rotations of 30 degrees. Steps and defaults are those of torchvision's RandAugment."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("operations", 1, MOST_OPERATIONS),
            ("magnitude", 0, MOST_MAGNITUDE),
        ):
            if not least <= (value := getattr(self, name)) <= most:
                accepted = f"it must be from {least} to {most}"
                raise ConfigError(
                    refusal(f"input.augmentation.rand_augment.{name}", value, accepted)
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationConfig:
    """Random augmentation of training images; every kind is off by default.

    Applied in this order: crop or shift, flip, RandAugment or TrivialAugment, colour jitter,
    erasing, mixup or CutMix. Test examples are never augmented. The augmentation of an example
    depends only on the seed of the run, the epoch and the index of the example.
    """

    crop_area: tuple[float, float] | None = None
    """Least and largest share of an image's area that a random crop keeps (random resized crop);
    ImageNet is trained with [0.08, 1.0] (Szegedy et al. 2014, arXiv 1409.4842, section 6; Goyal et
    al. 2017). If absent, the crop of evaluation."""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest aspect ratio, width over height, of a crop; uniform in the logarithm."""
    shift_pixels: int = 0
    """Most pixels by which an image is shifted to each side, padded with black (4 with CIFAR: He et
    al. 2015, arXiv 1512.03385, section 4.2)."""
    flip: bool = False
    """Whether images are mirrored left to right with probability 1/2."""
    rand_augment: RandAugmentConfig | None = None
    """RandAugment; if absent, none. `{}` gives its defaults."""
    trivial_augment: bool = False
    """TrivialAugment (Müller & Hutter 2021, arXiv 2103.10158): one of RandAugment's operations for
    each image, with a strength also drawn, from its wide ranges: up to 32 pixels, whatever the
    size. Not with `rand_augment`."""
    brightness: float = 0.0
    """x: pixels are multiplied by a factor in [1 - x, 1 + x]. Brightness, contrast, saturation and
    hue are applied in random order, as in torchvision's ColorJitter."""
    contrast: float = 0.0
    """x: differences of pixels from the mean grey of their image are multiplied by a factor in
    [1 - x, 1 + x]."""
    saturation: float = 0.0
    """x: differences of pixels from their own grey are multiplied by a factor in [1 - x, 1 + x]."""
    hue: float = 0.0
    """x: hues are rotated by a share of the circle in [-x, x]; at most 0.5."""
    erase_probability: float = 0.0
    """Probability with which a rectangle of an image is filled with random pixels (random erasing:
    Zhong et al. 2017, arXiv 1708.04896, where it is 0.5); 0 for none."""
    erase_area: tuple[float, float] = (0.02, 0.33)
    """Least and largest share of the image's area that is erased (the paper: 0.02 to 0.4)."""
    erase_aspect: tuple[float, float] = (0.3, 3.3)
    """Least and largest aspect ratio of the erased rectangle, height over width; uniform in the
    logarithm."""
    evaluation_crop: float = 1.0
    """Share of the shorter side of encoded images that the centre crop of evaluation keeps: 0.875
    keeps 224 of a shorter side of 256 (He et al. 2015, arXiv 1512.03385, section 3.4).
    """
    mixup_alpha: float = 0.0
    """Mixup of neighbouring pairs in a batch, and of their losses, each example with its own weight
    from Beta(alpha, alpha) (Zhang et al. 2017, arXiv 1710.09412; there 0.1 to 0.4); 0 for none."""
    cutmix_alpha: float = 0.0
    """CutMix of neighbouring pairs in a batch: a rectangle of each image is replaced by its
    neighbour's, with an area from Beta(alpha, alpha), and the losses are weighted by areas (Yun et
    al. 2019, arXiv 1905.04899, where alpha is 1); 0 for none. Not with `mixup_alpha`."""
    cutmix_probability: float = 1.0
    """Probability that an image is cut at all (the paper: 1 on ImageNet, 0.5 on CIFAR)."""

    def __post_init__(self) -> None:
        area = self.crop_area
        for name, example in (("crop_area", "[0.08, 1.0]"), ("erase_area", "[0.02, 0.33]")):
            part = getattr(self, name)
            if part is not None and not 0 < part[0] <= part[1] <= 1:
                accepted = f"the least and the largest part, above 0, at most 1, such as {example}"
                raise ConfigError(refusal(f"input.augmentation.{name}", list(part), accepted))
        for name, example in (("crop_aspect", "[0.75, 1.333]"), ("erase_aspect", "[0.3, 3.3]")):
            least, largest = getattr(self, name)
            if not 0 < least <= largest < float("inf"):
                accepted = f"the least and the largest, above 0, such as {example}"
                raise ConfigError(refusal(f"input.augmentation.{name}", [least, largest], accepted))
        if not 0 < self.evaluation_crop <= 1:
            accepted = "it must be above 0, and at most 1"
            raise ConfigError(
                refusal("input.augmentation.evaluation_crop", self.evaluation_crop, accepted)
            )
        colours = ("brightness", "contrast", "saturation", "hue")
        for name in ("shift_pixels", *colours, "erase_probability", "mixup_alpha"):
            require_at_least(f"input.augmentation.{name}", getattr(self, name), 0)
        for name in ("cutmix_alpha", "cutmix_probability"):
            require_at_least(f"input.augmentation.{name}", getattr(self, name), 0)
        if self.mixup_alpha and self.cutmix_alpha:
            accepted = "input.augmentation.mixup_alpha mixes pairs already; leave one of them out"
            raise ConfigError(
                refusal("input.augmentation.cutmix_alpha", self.cutmix_alpha, accepted)
            )
        if self.rand_augment is not None and self.trivial_augment:
            accepted = "input.augmentation.rand_augment draws operations already; leave one out"
            raise ConfigError(refusal("input.augmentation.trivial_augment", True, accepted))
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
            ("erase_probability", 1.0),
            ("cutmix_probability", 1.0),
        ):
            if getattr(self, name) > most:
                accepted = f"it must be from 0 to {most}"
                raise ConfigError(
                    refusal(f"input.augmentation.{name}", getattr(self, name), accepted)
                )

    @property
    def changes_colours(self) -> bool:
        """Whether brightness, contrast, saturation or hue is changed."""
        return any((self.brightness, self.contrast, self.saturation, self.hue))

    @property
    def changes_pixels(self) -> bool:
        """Whether pixels of an image are changed by anything but mixup and CutMix."""
        return self.crop_area is not None or self.finishes

    @property
    def operations(self) -> int:
        """Operations of RandAugment or TrivialAugment per image."""
        if self.rand_augment is not None:
            return self.rand_augment.operations
        return int(self.trivial_augment)

    @property
    def finishes(self) -> bool:
        """Whether pixels are changed after a crop."""
        return bool(
            self.shift_pixels
            or self.flip
            or self.operations
            or self.changes_colours
            or self.erase_probability
        )


# The input pipeline from a data set to the devices.


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    """The input pipeline: worker processes, prefetch, incomplete batches, augmentation."""

    workers: int | Literal["auto"] = 0
    """Worker processes per host that make training batches, one core each; 0: threads of the
    training process; "auto": as many as a measurement at the start finds best. Batches are bitwise
    identical in all cases. Evaluation, and runs of a sweep that train together, use threads."""
    read_ahead_batches: int = 4
    """Batches that are prefetched; each worker process prefetches two or more."""
    memory_bytes: int = 2**32
    """Most memory that prefetched batches take; fewer are prefetched if they need more. Memory that
    a data set keeps its rows in is a field of the data set, and shared by its processes."""
    remainder: Literal["drop", "pad"] = "drop"
    """Handling of the last examples of an epoch, if too few for a batch. drop: they are left out.
    pad: the batch is padded with rows of weight 0, so that an epoch sees every example."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """Handling of an example that cannot be decoded or is invalid. refuse: it ends the run. skip:
    it has weight 0 (and is replaced by a neighbouring row, or by zeros if that is unreadable too),
    and the record says how many were skipped and why. A file that is damaged as a whole, or that
    the system cannot read, always ends the run."""
    augmentation: AugmentationConfig | None = None
    """Random augmentation of images; if absent, none."""

    def __post_init__(self) -> None:
        if self.workers != "auto":
            require_at_least("input.workers", self.workers, 0)
        for name in ("read_ahead_batches", "memory_bytes"):
            require_at_least(f"input.{name}", getattr(self, name), 1)
