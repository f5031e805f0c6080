"""Encoded images (JPEG, PNG, ...) as uint8 arrays of one size.

Knows no files and no columns: bytes in, pixels out.
"""

import contextlib
import io
import math
import os
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple, Protocol

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from scalejax.core.environment import usable_cores
from scalejax.core.errors import ConfigError
from scalejax.data.source import UnreadableExample
from scalejax.data.stage_clock import add_processor_seconds, add_seconds

_DAMAGED_EXIF = (OSError, ValueError, SyntaxError, TypeError, KeyError, struct.error)
"""Pillow's exceptions for damaged EXIF data."""

NO_IMAGE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""Pillow's exceptions for bytes that are not a complete image."""

if "PILLOW_BLOCKS_MAX" not in os.environ:  # with which a user sets it
    # By default Pillow frees the memory of each image, and a process that does little else gets new
    # pages for the next.
    Image.core.set_block_size(2**20)
    Image.core.set_blocks_max(16)


class UndecodableImage(Exception):
    """Bytes that hold no complete image of 8 bits a channel in a format that Pillow knows."""


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: float
    """Left edge."""
    top: float
    """Top edge."""
    width: float
    """Above 0."""
    height: float
    """Above 0."""


Crop = Callable[[int, int], Box | None]
"""Function from width and height of an image to its crop box; None for the centre crop."""


class ImageChanges(Protocol):
    """Changes of a batch of images, one per row."""

    def crop(self, row: int, width: int, height: int) -> Box | None:
        """The crop box of the image of this row; None for the centre crop."""
        ...

    def finished(self, images: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The images of `rows`, uint8 [rows, height, width, channels], changed after the crop."""
        ...


def _usual(width: int, height: int) -> None:
    """The default crop: None, the largest centre square."""


def decoded(
    encoded: bytes | memoryview, size: int, channels: int, crop: Crop = _usual
) -> np.ndarray:
    """The decoded image, uint8 [size, size, channels].

    It is rotated by its EXIF orientation, cropped, and scaled to `size` (bilinear with
    antialiasing: over all pixels that a new one covers).

    Args:
        encoded: a file's content.
        size: height and width of the result.
        channels: 1 for grey, 3 for red, green and blue.
        crop: maps the size of the upright image to its crop box; by default the centre square.

    Raises:
        UndecodableImage: if it cannot be decoded, saying why.
    """
    mode = "L" if channels == 1 else "RGB"
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            upright_size = _upright_size(image)
            box = crop(*upright_size)
            # A JPEG is decoded at a half, a quarter or an eighth, if the result is still twice the
            # size, or for a crop box no less than the size, so that no pixel is made up.
            if box is None:
                image.draft(mode, (2 * size, 2 * size))
            else:
                image.draft(mode, _least_size(image.size, box, size))
            if image.mode == "F" or image.mode.startswith("I"):  # Pillow would clip it at 255
                raise UndecodableImage(f"Pillow's mode {image.mode}: more than 8 bits a pixel")
            image.load()
            _turn_upright(image)
            if image.mode != mode:  # convert would copy it even if the mode is the same
                image = image.convert(mode)
    except NO_IMAGE as error:
        raise UndecodableImage(why_undecodable(error)) from error
    if box is not None:
        right, bottom = box.left + box.width, box.top + box.height
        across, down = (new / old for new, old in zip(image.size, upright_size, strict=True))
        part = (box.left * across, box.top * down, right * across, bottom * down)
        image = image.resize((size, size), Image.Resampling.BILINEAR, part)
    elif image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, channels)


def why_undecodable(error: Exception) -> str:
    """Pillow's message about an image in an error of `NO_IMAGE`."""
    if isinstance(error, UnidentifiedImageError):  # its message names an object in memory
        return "Pillow does not know its format"
    return str(error) or type(error).__name__


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of the image as turned by its EXIF, if that can be read."""
    width, height = image.size
    orientation = None
    with contextlib.suppress(*_DAMAGED_EXIF):
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def _least_size(image: tuple[int, int], box: Box, size: int) -> tuple[int, int]:
    """Smallest size to which an image may be reduced while `box` stays at least `size` wide and
    high."""
    share = max(size / box.width, size / box.height)
    return math.ceil(image[0] * share), math.ceil(image[1] * share)


def _turn_upright(image: Image.Image) -> None:
    """Turn and mirror `image` as its EXIF says; an image with damaged EXIF stays as it is."""
    with contextlib.suppress(*_DAMAGED_EXIF):
        ImageOps.exif_transpose(image, in_place=True)


def decoded_all(
    contents: Callable[[int], bytes | memoryview],
    count: int,
    *,
    size: int,
    channels: int,
    named: Callable[[int], str],
    changes: ImageChanges,
) -> np.ndarray:
    """Images, uint8 [count, size, size, channels], each as from `decoded`, in threads.

    Args:
        contents: returns the file content of image 0 ... `count` - 1.
        count: number of images.
        size: height and width of the result.
        channels: 1 for grey, 3 for red, green and blue.
        named: name of an image for error messages.
        changes: augmentation of each image.

    Raises:
        UnreadableExample: if one is gone or cannot be decoded, saying which and why.
        ConfigError: if a file cannot be read, as when a disk fails or too many files are open,
            which says nothing about the example.
    """
    images = np.empty((count, size, size, channels), np.uint8)
    busy: list[tuple[float, float]] = []  # seconds of decoding and of changing each part

    def decode(part: slice) -> None:
        begin = time.perf_counter()
        for number in range(count)[part]:
            try:
                crop = partial(changes.crop, number)
                images[number] = decoded(contents(number), size, channels, crop)
            except (UndecodableImage, FileNotFoundError) as error:
                raise UnreadableExample(
                    f"{named(number)}: no image that can be read ({error})."
                ) from error
            except OSError as error:
                raise ConfigError(f"{named(number)} cannot be read ({error}).") from error
        middle = time.perf_counter()
        images[part] = changes.finished(images[part], np.arange(count)[part])
        busy.append((middle - begin, time.perf_counter() - middle))

    begin = time.perf_counter()
    in_threads(decode, count)
    seconds = time.perf_counter() - begin
    decoding, changing = (math.fsum(each) for each in zip(*busy, strict=True)) if busy else (1, 0)
    add_seconds("augment", seconds * changing / (decoding + changing))  # the threads' share
    return images


def in_threads(function: Callable[[slice], None], count: int) -> None:
    """Call `function` with parts of 0 ... `count` - 1; Pillow lets threads decode in parallel."""
    threads = usable_cores()
    # Several at once, as a small image takes only 50 us; few, as all wait for the last thread.
    width = max(1, min(16, count // (16 * threads)))
    parts = iter([slice(begin, begin + width) for begin in range(0, count, width)])

    def work() -> float:
        begin = time.thread_time()
        for part in parts:  # an idle thread takes the next part
            function(part)
        return time.thread_time() - begin

    working = [_executor(threads).submit(work) for _ in range(threads)]
    add_processor_seconds(math.fsum(each.result() for each in working))


@cache
def _executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="decode")
