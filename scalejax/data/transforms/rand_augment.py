"""RandAugment and TrivialAugment: operations of Pillow, by number, on decoded images.

Arrays in, arrays out: knows no random numbers and no files.

Source: Cubuk et al. 2019, arXiv 1909.13719, section 3 and its operations, whose ranges are those of
AutoAugment (arXiv 1805.09501, table 6); Müller & Hutter 2021, arXiv 2103.10158. Ranges in 31 steps,
order, rounding, black filling and nearest-pixel interpolation are those of `RandAugment` and
`TrivialAugmentWide` of torchvision 0.26. Shears of one sign go to the other side than there: both
signs are equally likely.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from scalejax.config.input import MOST_MAGNITUDE

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "color", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
"""Operations, in the numbering of `augmented`; those up to "sharpness" have a sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What the operations do at the largest magnitude. At 0, operations with a magnitude do
    nothing, except that solarizing turns white to black, as in torchvision."""

    shear: float
    """Pixels to the side for each pixel down."""
    translation: Callable[[int, int], int]
    """Whole pixels, from the pixels of a side and the magnitude."""
    degrees: float
    """Angle of a rotation."""
    enhancement: float
    """x: brightness, colour, contrast and sharpness change by a factor of 1 - x or 1 + x."""
    lost_bits: int
    """Bits of 8 that posterizing removes."""


RAND_AUGMENT = Ranges(
    shear=0.3,
    # 150 of the 331 pixels of an image side in AutoAugment.
    translation=lambda side, magnitude: 150 * side * magnitude // (331 * MOST_MAGNITUDE),
    degrees=30.0,
    enhancement=0.9,
    lost_bits=4,
)
"""Ranges of RandAugment."""
TRIVIAL_AUGMENT = Ranges(
    shear=0.99,
    translation=lambda side, magnitude: 32 * magnitude // MOST_MAGNITUDE,
    degrees=135.0,
    enhancement=0.99,
    lost_bits=6,
)
"""Wide ranges of TrivialAugment."""


def augmented(
    images: np.ndarray,
    operations: np.ndarray,
    magnitudes: np.ndarray,
    is_negative: np.ndarray,
    ranges: Ranges,
) -> np.ndarray:
    """Each image after its operations, one after the other.

    Args:
        images: uint8 [images, height, width, channels], grey or red, green and blue.
        operations: indices into `OPERATIONS`, int [images, operations].
        magnitudes: 0 to 30, int [images, operations].
        is_negative: whether to the other side, or less instead of more; bool [images, operations].
        ranges: what the operations do at the largest magnitude.

    Returns:
        uint8, of the shape of `images`.
    """
    result = images.copy()
    chosen = (operations.tolist(), magnitudes.tolist(), is_negative.tolist())
    for row, (names, sizes, signs) in enumerate(zip(*chosen, strict=True)):
        if not any(names):  # identity alone
            continue
        picture = Image.fromarray(images[row, ..., 0] if images.shape[3] == 1 else images[row])
        for number, magnitude, negative in zip(names, sizes, signs, strict=True):
            picture = _changed(picture, OPERATIONS[number], magnitude, negative, ranges)
        result[row] = np.asarray(picture).reshape(images.shape[1:])
    return result


def _changed(
    picture: Image.Image, operation: str, magnitude: int, is_negative: bool, ranges: Ranges
) -> Image.Image:
    """The picture after one operation, in its size and mode."""
    share, sign = magnitude / MOST_MAGNITUDE, -1 if is_negative else 1
    match operation:
        case "identity":
            return picture
        case "shear_x":
            return _moved(picture, (1, -sign * ranges.shear * share, 0, 0, 1, 0))
        case "shear_y":
            return _moved(picture, (1, 0, 0, -sign * ranges.shear * share, 1, 0))
        case "translate_x":
            return _moved(
                picture, (1, 0, -sign * ranges.translation(picture.width, magnitude), 0, 1, 0)
            )
        case "translate_y":
            return _moved(
                picture, (1, 0, 0, 0, 1, -sign * ranges.translation(picture.height, magnitude))
            )
        case "rotate":
            return picture.rotate(sign * ranges.degrees * share)
        case "posterize":
            return ImageOps.posterize(picture, 8 - round(ranges.lost_bits * share))
        case "solarize":
            first = math.ceil(255 * (MOST_MAGNITUDE - magnitude) / MOST_MAGNITUDE)
            return ImageOps.solarize(picture, first)
        case "autocontrast":
            return ImageOps.autocontrast(picture)
        case "equalize":
            return ImageOps.equalize(picture)
        case _:
            enhancement = _ENHANCEMENTS[operation](picture)
            return enhancement.enhance(1 + sign * ranges.enhancement * share)


def _moved(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """The picture whose pixel (x, y) is the old one at (a x + b y + c, d x + e y + f), where
    `matrix` is (a, b, c, d, e, f)."""
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


_ENHANCEMENTS = {
    "brightness": ImageEnhance.Brightness,
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "sharpness": ImageEnhance.Sharpness,
}
