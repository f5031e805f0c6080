"""Images of another size, encoded as those they are made of: what `input_bench` measures on."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, JpegImagePlugin


def write_sized(images: Sequence[bytes], factor: float, path: Path) -> None:
    """A Parquet file of `images`, their edges `factor` times as long, in one row group.

    Args:
        images: encoded.
        factor: of width and height; 1 leaves them as they are.
        path: where it goes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    encoded = [each if factor == 1 else sized(each, factor) for each in images]
    table = pa.table({"image": encoded, "label": pa.array([0] * len(encoded), pa.int64())})
    pq.write_table(table, path)


def sized(encoded: bytes, factor: float) -> bytes:
    """The image with edges `factor` times as long; a JPEG as fine as it is, by its own tables."""
    with Image.open(io.BytesIO(encoded)) as image:
        form = image.format or "PNG"
        how: dict[str, Any] = {}
        if isinstance(image, JpegImagePlugin.JpegImageFile):
            how = {"qtables": image.quantization}
            if (sampling := JpegImagePlugin.get_sampling(image)) >= 0:
                how["subsampling"] = sampling
        width, height = (max(1, round(edge * factor)) for edge in image.size)
        mode = image.mode if image.mode in ("L", "RGB", "CMYK") else "RGB"
        resized = image.convert(mode).resize((width, height), Image.Resampling.BICUBIC)
    written = io.BytesIO()
    resized.save(written, form, **how)
    return written.getvalue()
