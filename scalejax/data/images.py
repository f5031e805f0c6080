"""Encoded images (JPEG, PNG, ...) as uint8 arrays of one size.

Knows no files and no columns: bytes in, pixels out.
"""

import contextlib
import io
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from scalejax.data.cores import usable_cores
from scalejax.data.source import UnreadableExample


class UndecodableImage(Exception):
    """Bytes that hold no whole image of 8 bits a channel in a format that Pillow knows."""


def decoded(encoded: bytes | memoryview, size: int, channels: int) -> np.ndarray:
    """The image, uint8 [size, size, channels].

    It is turned upright, as its EXIF says; the shorter side is scaled to `size` (bilinear, over
    all pixels that a new one covers), the middle of the longer kept.

    Args:
        encoded: a file's content.
        size: height and width to give.
        channels: 1 for grey, 3 for red, green and blue.

    Raises:
        UndecodableImage: saying why.
    """
    mode = "L" if channels == 1 else "RGB"
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            # A JPEG is decoded at a half, a quarter or an eighth, if that is still twice the size.
            image.draft(mode, (2 * size, 2 * size))
            if image.mode == "F" or image.mode.startswith("I"):  # which Pillow would cut at 255
                raise UndecodableImage(f"Pillow's mode {image.mode}: more than 8 bits a pixel")
            image.load()
            _turn_upright(image)
            image = image.convert(mode)
    except UnidentifiedImageError as error:  # whose own words name an object in memory
        raise UndecodableImage("its format is none that Pillow knows") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UndecodableImage(str(error) or type(error).__name__) from error
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels)


def _turn_upright(image: Image.Image) -> None:
    """Turn and mirror `image` as its EXIF says; one whose EXIF is damaged stays as it is."""
    with contextlib.suppress(OSError, ValueError, SyntaxError, TypeError, KeyError, struct.error):
        ImageOps.exif_transpose(image, in_place=True)


def decoded_all(
    contents: Callable[[int], bytes | memoryview],
    count: int,
    *,
    size: int,
    channels: int,
    named: Callable[[int], str],
) -> np.ndarray:
    """Images, uint8 [count, size, size, channels], as `decoded` makes each, in threads.

    Args:
        contents: the content of the file of image 0 ... `count` - 1, as it is asked for.
        count: how many.
        size: height and width to give.
        channels: 1 for grey, 3 for red, green and blue.
        named: where an image is, for the refusal.

    Raises:
        UnreadableExample: if one cannot be read or decoded, saying which and why.
    """
    images = np.empty((count, size, size, channels), np.uint8)

    def decode(part: slice) -> None:
        for number in range(count)[part]:
            try:
                images[number] = decoded(contents(number), size, channels)
            except (UndecodableImage, OSError) as error:
                raise UnreadableExample(
                    f"{named(number)}: no image that can be read ({error})."
                ) from error

    in_threads(decode, count)
    return images


def in_threads(function: Callable[[slice], None], count: int) -> None:
    """Call `function` with parts of 0 ... `count` - 1; Pillow lets threads decode side by side."""
    threads = usable_cores()
    # Several to a thread, as images differ; not one by one, as a small one takes but 50 us.
    width = max(1, min(16, count // (4 * threads)))
    parts = [slice(begin, begin + width) for begin in range(0, count, width)]
    for _ in _executor(threads).map(function, parts):
        pass


@cache
def _executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="decode")
