"""Parquet files of images and numbers, written with pyarrow for the tests."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def encoded(image, kind="PNG"):
    """A uint8 image [height, width] or [height, width, 3] as the bytes of a file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind)
    return file.getvalue()


def write_images(path, images, labels, *, rows=7, kind="PNG", style="hugging face"):
    """Write images and labels in row groups of `rows`, as Hugging Face does or as plain binary."""
    content = [image if isinstance(image, bytes) else encoded(image, kind) for image in images]
    if style == "hugging face":
        column = pa.array([{"bytes": each, "path": None} for each in content])
    else:
        column = pa.array(content, pa.binary())
    table = pa.table({"image": column, "label": labels})
    pq.write_table(table, path, row_group_size=rows)


def random_images(count, side=8, *, seed=0, channels=3):
    """Random uint8 images [side, side, 3], or grey ones [side, side]."""
    shape = (count, side, side, channels) if channels > 1 else (count, side, side)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
