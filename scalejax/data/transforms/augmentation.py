"""Image augmentation of `[input.augmentation]`: random crops, shifts, flips, operations, colours,
erasing and mixup, and the crop of evaluation.

Works on encoded or decoded images of any source; opens no file.
"""

import math
from dataclasses import dataclass

import numpy as np

from scalejax.config.input import MOST_MAGNITUDE, AugmentationConfig
from scalejax.data.stage_clock import timed
from scalejax.data.transforms.images import Box, in_threads
from scalejax.data.transforms.pixels import COLOUR_CHANGES, enlarged, flipped, recoloured, shifted
from scalejax.data.transforms.rand_augment import (
    OPERATIONS,
    RAND_AUGMENT,
    TRIVIAL_AUGMENT,
    augmented,
)
from scalejax.data.transforms.random import noise_bytes, uniforms

TRIES = 10
"""Crops of a random size that are tried until one lies within the image."""
_AREAS = slice(0, TRIES)
_ASPECTS = slice(TRIES, 2 * TRIES)
_PLACE = slice(2 * TRIES, 2 * TRIES + 2)
_FLIP = 2 * TRIES + 2
_FACTORS = slice(_FLIP + 1, _FLIP + 5)
_ORDER = slice(_FLIP + 5, _FLIP + 9)
_MIX = _FLIP + 9
_DRAWS = _MIX + 1
_ERASE, _NOISE = _DRAWS, _DRAWS + 1
_ERASE_AREAS = slice(_NOISE + 1, _NOISE + 1 + TRIES)
_ERASE_ASPECTS = slice(_ERASE_AREAS.stop, _ERASE_AREAS.stop + TRIES)
_ERASE_PLACE = slice(_ERASE_ASPECTS.stop, _ERASE_ASPECTS.stop + 2)
_CUT = slice(_ERASE_PLACE.stop, _ERASE_PLACE.stop + 3)
_ALL_DRAWS = _CUT.stop
"""Number of columns of per-example random numbers, one set for each transform, so that enabling one
transform does not change another. The columns of operations come after them."""
_OPERATION_DRAWS = 3
"""Random numbers of an operation: which it is, its sign, and its magnitude."""
_VALUES_AT_ONCE = 2**15
"""Channels of pixels that are changed together: at most 128 KiB as float32, because memory of
larger arrays is requested from the system each time, which can take five times as long as the work.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Augmentation that depends only on (seed, epoch, index)."""

    config: AugmentationConfig
    """Which augmentations, and their ranges."""
    seed: int
    """Seed of the run."""

    def of(self, indices: np.ndarray, epoch: int | None) -> "Changes":
        """The changes of the examples at `indices` in an epoch; none in evaluation (None)."""
        config = self.config
        if epoch is None:
            keeps = AugmentationConfig(evaluation_crop=config.evaluation_crop)
            return Changes(keeps, np.empty((0, _DRAWS)))
        if config == AugmentationConfig():
            return _NOTHING
        draws = _ALL_DRAWS if config.erase_probability or config.cutmix_alpha else _DRAWS
        if config.operations:
            draws = _ALL_DRAWS + _OPERATION_DRAWS * config.operations
        return Changes(config, uniforms(self.seed, epoch, indices, draws))


AS_IS = Augmentation(config=AugmentationConfig(), seed=0)
"""Leaves every image as it is."""


class Changes:
    """Random changes of a batch of examples, one per row.

    A source of encoded images crops while it decodes (`crop`), then calls `finished`; a source of
    pixels calls `applied`.
    """

    def __init__(self, config: AugmentationConfig, numbers: np.ndarray) -> None:
        self._config = config
        self._numbers = numbers
        if config.crop_area is not None:
            least, largest = config.crop_area
            low, high = np.log(config.crop_aspect)
            areas = least + (largest - least) * numbers[:, _AREAS]
            aspects = np.exp(low + (high - low) * numbers[:, _ASPECTS])
            sides = np.sqrt(np.stack([areas * aspects, areas / aspects], axis=2))
            self._sides, self._places = sides.tolist(), numbers[:, _PLACE].tolist()

    def crop(self, row: int, width: int, height: int) -> Box | None:
        """The random crop box of an image of this size; without random crops that of evaluation,
        which is None if it is the largest square.

        It has the first of ten random sizes that fits into the image, at a random position; else it
        is the largest centre crop of an accepted aspect. This is Inception's crop (Szegedy et al.
        2014, arXiv 1409.4842, section 6), with which Goyal et al. 2017 trained.
        """
        if self._config.crop_area is None:
            return self._centre(width, height)
        unit = math.sqrt(width * height)
        across, down = self._places[row]
        for wide, high in self._sides[row]:
            box_width, box_height = round(wide * unit), round(high * unit)
            if 1 <= box_width <= width and 1 <= box_height <= height:
                left = int(across * (width - box_width + 1))
                top = int(down * (height - box_height + 1))
                return Box(left, top, box_width, box_height)
        narrowest, widest = self._config.crop_aspect
        box_width = max(1, min(width, round(height * widest)))
        box_height = max(1, min(height, round(width / narrowest)))
        return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)

    def _centre(self, width: int, height: int) -> Box | None:
        """The centre square, whose side is the share of the shorter side that evaluation keeps."""
        share = self._config.evaluation_crop
        if share == 1:
            return None
        side = share * min(width, height)
        return Box((width - side) / 2, (height - side) / 2, side, side)

    def applied(self, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The examples of a source of decoded images, augmented; with the arrays of `beside`."""
        images, beside = examples["inputs"], self.beside()
        if not self._config.changes_pixels:
            return examples | beside
        _, height, width, _ = images.shape
        parts, changed = _parts(images), np.empty_like(images)

        def change(some: slice) -> None:
            for rows in parts[some]:
                part = images[rows]
                if self._config.crop_area is not None:
                    boxes = np.array([self.crop(row, width, height) for row in rows.tolist()])
                    part = enlarged(part, boxes)
                changed[rows] = self.finished(part, rows)

        with timed("augment"):
            if len(parts) == len(images):
                in_threads(change, len(parts))
            else:  # for small images, Python takes most of the time, and threads would wait
                change(slice(None))
        return examples | beside | {"inputs": changed}

    def finished(self, images: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The cropped images of `rows` after shift, flip, operations, colour changes and erasing.

        Args:
            images: uint8 [rows, height, width, channels].
            rows: index of the example of each image, int [rows].
        """
        if not self._config.finishes:
            return images
        parts = [self._finished(images[part], rows[part]) for part in _parts(images)]
        return np.concatenate(parts)

    def _finished(self, images: np.ndarray, rows: np.ndarray) -> np.ndarray:
        config, numbers = self._config, self._numbers[rows]
        if most := config.shift_pixels:
            right, down = np.floor((2 * most + 1) * numbers[:, _PLACE]).astype(int).T - most
            images = shifted(images, right, down)
        if config.flip:
            images = flipped(images, numbers[:, _FLIP] < 0.5)
        if config.operations:
            images = self._operated(images, numbers)
        if config.changes_colours:
            widths = np.array([getattr(config, name) for name in COLOUR_CHANGES])
            factors = np.array([1, 1, 1, 0]) + widths * (2 * numbers[:, _FACTORS] - 1)
            wanted = np.flatnonzero(widths)
            order = wanted[np.argsort(numbers[:, _ORDER][:, wanted], axis=1)]
            images = recoloured(images, factors, order)
        if config.erase_probability:
            images = images.copy()
            for image, own in zip(images, numbers, strict=True):
                self._erase(image, own)
        return images

    def _operated(self, images: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The images after their operations of RandAugment or TrivialAugment."""
        which, signs, strengths = np.moveaxis(
            numbers[:, _ALL_DRAWS:].reshape(len(numbers), -1, _OPERATION_DRAWS), 2, 0
        )
        operations = np.floor(len(OPERATIONS) * which).astype(int)
        if (config := self._config.rand_augment) is not None:
            magnitudes, ranges = np.full(operations.shape, config.magnitude), RAND_AUGMENT
        else:
            magnitudes = np.floor((MOST_MAGNITUDE + 1) * strengths).astype(int)
            ranges = TRIVIAL_AUGMENT
        return augmented(images, operations, magnitudes, signs < 0.5, ranges)

    def _erase(self, image: np.ndarray, numbers: np.ndarray) -> None:
        """Fill a rectangle of `image` with random pixels, with the configured probability: the
        first of ten that is smaller than the image along both sides, else none.

        Source: Zhong et al. 2017, arXiv 1708.04896, algorithm 1; tries and rounding, and aspects
        that are uniform in the logarithm, as in `RandomErasing.get_params` of torchvision 0.26.
        """
        config = self._config
        if numbers[_ERASE] >= config.erase_probability:
            return
        height, width, channels = image.shape
        least, largest = config.erase_area
        low, high = np.log(config.erase_aspect)
        areas = height * width * (least + (largest - least) * numbers[_ERASE_AREAS])
        aspects = np.exp(low + (high - low) * numbers[_ERASE_ASPECTS])
        for area, aspect in zip(areas.tolist(), aspects.tolist(), strict=True):
            high_side, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if high_side < height and wide < width:
                down, across = numbers[_ERASE_PLACE].tolist()
                top, left = int(down * (height - high_side + 1)), int(across * (width - wide + 1))
                noise = noise_bytes(numbers[_NOISE], high_side * wide * channels)
                part = image[top : top + high_side, left : left + wide]
                part[...] = noise.reshape(part.shape)
                return

    def beside(self) -> dict[str, np.ndarray]:
        """Mixup's "mix", the share of itself that each row keeps, drawn from Beta(alpha, alpha),
        float32 [rows]; CutMix's "cut", float32 [rows, 3]: the share of each side that the rectangle
        covers, the root of 1 - a share from Beta(alpha, alpha), and its centre from the left and
        the top, 0..1 (Yun et al. 2019, arXiv 1905.04899, equation 2); empty without either."""
        alpha, of_cut = self._config.mixup_alpha, self._config.cutmix_alpha
        if not (alpha or of_cut):
            return {}
        # Imported here, as only these need it.
        from scipy.special import betaincinv

        if of_cut:
            cut = self._numbers[:, _CUT].copy()
            own = betaincinv(of_cut, of_cut, self._numbers[:, _MIX])
            is_cut = cut[:, 0] < self._config.cutmix_probability
            cut[:, 0] = np.where(is_cut, np.sqrt(1 - own), 0)
            # The centre stays below 1 in float32, too.
            return {"cut": np.minimum(cut, [1, 1 - 2**-24, 1 - 2**-24]).astype(np.float32)}
        return {"mix": betaincinv(alpha, alpha, self._numbers[:, _MIX]).astype(np.float32)}


_NOTHING = Changes(AugmentationConfig(), np.empty((0, _DRAWS)))
"""Changes nothing, and draws no numbers."""


def _parts(images: np.ndarray) -> list[np.ndarray]:
    """Slices of the rows of `images` that are transformed together."""
    at_once = max(1, _VALUES_AT_ONCE // max(1, math.prod(images.shape[1:])))
    count = len(images)
    return [np.arange(start, min(start + at_once, count)) for start in range(0, count, at_once)]
