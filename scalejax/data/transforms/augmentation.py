"""What `[input.augmentation]` does to which image: random numbers made into boxes and factors.

Knows images decoded or not, whatever source they are of; opens no file.
"""

import math
from dataclasses import dataclass

import numpy as np

from scalejax.config.input import AugmentationConfig
from scalejax.data.transforms.images import Box, in_threads
from scalejax.data.transforms.pixels import COLOUR_CHANGES, enlarged, flipped, recoloured, shifted
from scalejax.data.transforms.random import uniforms

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
"""Columns of the random numbers of an example: what one thing uses does not move another's."""
_VALUES_AT_ONCE = 2**15
"""Channels of pixels that are changed together: as float32 less than 128 KiB, for memory of larger
arrays is asked of the system each time, which can take five times as long as what is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Changes of images that follow from (seed, epoch, index) alone."""

    config: AugmentationConfig
    """What to do."""
    seed: int
    """Of the run."""

    def of(self, indices: np.ndarray, epoch: int | None) -> "Changes":
        """What happens to the examples at `indices` in an epoch; None evaluates, and nothing
        does."""
        if epoch is None or self.config == AugmentationConfig():
            return _NOTHING
        return Changes(self.config, uniforms(self.seed, epoch, indices, _DRAWS))


AS_IS = Augmentation(config=AugmentationConfig(), seed=0)
"""Leaves every image as it is."""


class Changes:
    """What happens to some examples, each a row.

    A source whose images are encoded crops while it decodes (`crop`), then calls `finished`; one
    that has their pixels calls `applied`.
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
        """The part of an image of this size to keep; None for no random part.

        Of ten sizes the first that lies within the image, anywhere in it; or, in the middle, the
        largest of an aspect asked for. Inception's crop (Szegedy et al. 2014, arXiv 1409.4842,
        section 6), with which Goyal et al. 2017 trained.
        """
        if self._config.crop_area is None:
            return None
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

    def applied(self, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The examples of a source that has the pixels of its images; "mix" besides, if they are
        to be mixed."""
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

        if len(parts) == len(images):
            in_threads(change, len(parts))
        else:  # of small ones Python takes much of the time, and threads would wait for each other
            change(slice(None))
        return examples | beside | {"inputs": changed}

    def finished(self, images: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The images of `rows` after their crop: shifted, flipped and in other colours.

        Args:
            images: uint8 [rows, height, width, channels].
            rows: which of the examples they are of, int [rows].
        """
        config = self._config
        if not (config.shift_pixels or config.flip or config.changes_colours):
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
        if config.changes_colours:
            widths = np.array([getattr(config, name) for name in COLOUR_CHANGES])
            factors = np.array([1, 1, 1, 0]) + widths * (2 * numbers[:, _FACTORS] - 1)
            wanted = np.flatnonzero(widths)
            order = wanted[np.argsort(numbers[:, _ORDER][:, wanted], axis=1)]
            images = recoloured(images, factors, order)
        return images

    def beside(self) -> dict[str, np.ndarray]:
        """ "mix": the share of its own that each row keeps, of Beta(alpha, alpha), float32 [rows];
        nothing where none are mixed."""
        alpha = self._config.mixup_alpha
        if not alpha:
            return {}
        # Imported here: mixup alone needs it.
        from scipy.special import betaincinv

        return {"mix": betaincinv(alpha, alpha, self._numbers[:, _MIX]).astype(np.float32)}


_NOTHING = Changes(AugmentationConfig(), np.empty((0, _DRAWS)))
"""Draws nothing, and asks for none."""


def _parts(images: np.ndarray) -> list[np.ndarray]:
    """The rows of `images` in parts that are changed together, each row once."""
    at_once = max(1, _VALUES_AT_ONCE // max(1, math.prod(images.shape[1:])))
    count = len(images)
    return [np.arange(start, min(start + at_once, count)) for start in range(0, count, at_once)]
