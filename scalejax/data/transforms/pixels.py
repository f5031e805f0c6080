"""Vectorised transforms of decoded images: resized crops, shifts, flips and colours.

Arrays in, arrays out: knows no random numbers, no files and no config.
"""

import numpy as np

LUMA = np.array([0.2989, 0.587, 0.114], np.float32)
"""Shares of red, green and blue in grey (ITU-R BT.601, as torchvision rounds them)."""
_AT_ONCE = 2**15
"""Pixels for which many arrays are made, one after the other: the memory of small arrays is reused,
that of larger ones requested from the system each time, which takes five times as long."""
COLOUR_CHANGES = ("brightness", "contrast", "saturation", "hue")
"""Colour changes of `recoloured`, in the numbering of its `order`."""


def enlarged(images: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The crop of each image by its box, scaled to the size of the image, bilinear.

    A box is never larger than its image, so that interpolation between two pixels along each side
    suffices, without antialiasing.

    Args:
        images: uint8 [images, height, width, channels].
        boxes: left, top, width and height of each, in pixels, [images, 4].

    Returns:
        uint8, of the shape of `images`.
    """
    left, top, width, height = boxes.T
    rows = _between(images, top, height)
    columns = _between(rows.swapaxes(1, 2), left, width)
    return _as_bytes(columns.swapaxes(1, 2))


def _between(images: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows `starts` to `starts` + `lengths` of each image, interpolated to its full height;
    float32."""
    count, size, *rest = images.shape
    steps = (np.arange(size) + 0.5) / size
    centres = np.clip(starts[:, None] + lengths[:, None] * steps - 0.5, 0, size - 1)
    above = centres.astype(np.intp)
    share = (centres - above).astype(np.float32)[:, :, None]
    lines = images.reshape(count * size, -1)  # whole rows, so that each is copied in one go
    first = np.arange(0, count * size, size)[:, None]
    low = lines[first + above].astype(np.float32)
    high = lines[first + np.minimum(above + 1, size - 1)]
    low += share * (high - low)
    return low.reshape(count, size, *rest)


def shifted(images: np.ndarray, right: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Each image shifted by whole pixels, to the left or up if negative, filled with black.

    Args:
        images: uint8 [images, height, width, channels].
        right: shift of each image to the right in pixels, int [images].
        down: shift of each image downwards in pixels, int [images].
    """
    _, height, width, _ = images.shape
    most = int(max(np.abs(right).max(initial=0), np.abs(down).max(initial=0)))
    padded = np.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    moved = windows[np.arange(len(images)), most - down, most - right]
    return np.moveaxis(moved, 1, -1)


def flipped(images: np.ndarray, is_flipped: np.ndarray) -> np.ndarray:
    """The images; those with `is_flipped` [images] are mirrored left to right."""
    result, rows = images.copy(), np.flatnonzero(is_flipped)
    # By index: through a view with a negative step, it takes twice as long.
    result[rows] = images[rows].take(np.arange(images.shape[2])[::-1], axis=2)
    return result


def recoloured(images: np.ndarray, factors: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The images with their colours changed, rounded once at the end.

    Args:
        images: uint8 [images, height, width, channels]; grey ones have no saturation or hue.
        factors: factors of `COLOUR_CHANGES`, [images, 4]: 1 leaves brightness, contrast and
            saturation unchanged, 0 the hue, which is rotated by this fraction of its circle.
        order: indices of the changes to apply, in the order of each image, [images, changes].

    Returns:
        uint8, of the shape of `images`.
    """
    # One plane per channel, so that operations across channels go through whole planes.
    pixels = np.moveaxis(images, -1, 1).astype(np.float32, order="C")
    factors = factors.astype(np.float32)
    for changes in order.T:
        for number in np.unique(changes):
            rows = np.flatnonzero(changes == number)
            chosen = slice(None) if len(rows) == len(pixels) else rows
            change = _CHANGES[number]
            pixels[chosen] = change(pixels[chosen], factors[chosen, number, None, None, None])
    return np.moveaxis(_as_bytes(pixels), 1, -1)


def _brightened(pixels: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return np.clip(pixels * factor, 0, 255)


def _contrasted(pixels: np.ndarray, factor: np.ndarray) -> np.ndarray:
    mean = _grey(pixels).mean(axis=(1, 2, 3), keepdims=True)
    return np.clip(pixels * factor + mean * (1 - factor), 0, 255)


def _saturated(pixels: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return np.clip(pixels * factor + _grey(pixels) * (1 - factor), 0, 255)


def _turned(pixels: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """The pixels with another hue, a few at a time."""
    count, channels, height, width = pixels.shape
    lines, turned = pixels.reshape(count, channels, -1), np.empty_like(pixels)
    result, at_once = turned.reshape(lines.shape), max(1, _AT_ONCE // count)
    for start in range(0, height * width, at_once):
        part = slice(start, start + at_once)
        result[:, :, part] = _turned_part(lines[:, :, part], turn[:, 0, 0])
    return turned


def _turned_part(pixels: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Pixels [images, 3, pixels] with another hue, their value (largest channel) and chroma
    (largest less least) as before (Smith 1978, "Color gamut transform pairs", SIGGRAPH)."""
    red, green, blue = np.moveaxis(pixels, 1, 0)
    value = np.maximum(np.maximum(red, green), blue)
    chroma = value - np.minimum(np.minimum(red, green), blue)
    # Hue in sixths of the circle from red, by which channel is the largest. Sums over the cases, as
    # a choice by `where` takes as long as all the rest.
    is_red = value == red
    is_green = (value == green) & ~is_red
    is_blue = ~(is_red | is_green)
    beside = is_red * (green - blue) + is_green * (blue - red) + is_blue * (red - green)
    sixths = beside / np.maximum(chroma, np.float32(1e-3)) + 6 * turn
    sixths += 2 * is_green.astype(np.float32) + 4 * is_blue.astype(np.float32)
    sixths -= 6 * np.floor(sixths / 6)
    shares = (np.abs(sixths - 3) - 1, 2 - np.abs(sixths - 2), 2 - np.abs(sixths - 4))
    least = value - chroma
    return np.stack([least + chroma * np.clip(share, 0, 1) for share in shares], axis=1)


_CHANGES = (_brightened, _contrasted, _saturated, _turned)


def _grey(pixels: np.ndarray) -> np.ndarray:
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = np.moveaxis(pixels, 1, 0)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def _as_bytes(pixels: np.ndarray) -> np.ndarray:
    return np.rint(pixels).astype(np.uint8)
