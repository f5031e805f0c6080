"""Encoded images checked, and made small once: bytes in, bytes out."""

import io
import os

from PIL import Image, ImageOps

from scalejax.data.images import NO_IMAGE, UndecodableImage, why_undecodable


def prepared(encoded: bytes, shorter_side: int | None, *, jpeg_quality: int) -> bytes:
    """The image as it is, once it has been decoded; or, if it is larger, one whose shorter side is
    `shorter_side`, upright, the longer in proportion.

    A JPEG becomes a JPEG; others become PNG, which loses nothing. Scaled as training scales
    images: bilinear, over all pixels that a new one covers.

    Raises:
        UndecodableImage: saying why.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode == "F" or image.mode.startswith("I"):  # which Pillow would cut at 255
                raise UndecodableImage(f"Pillow's mode {image.mode}: more than 8 bits a pixel")
            shortest, kind = min(image.size), image.format
            is_kept = shorter_side is None or shortest <= shorter_side
            # Of a JPEG to be checked alone, an eighth: all of its bytes are read for that, too.
            least = 1 if is_kept else 2 * (shorter_side or 1)
            image.draft(None, (least, least))
            image.load()
            if is_kept or shorter_side is None:
                return encoded
            upright = ImageOps.exif_transpose(image)
            kept = upright.convert("L" if upright.mode in ("L", "1") else "RGB")
    except NO_IMAGE as error:
        raise UndecodableImage(why_undecodable(error)) from error
    share = shorter_side / min(kept.size)
    width, height = (max(shorter_side, round(side * share)) for side in kept.size)
    kept = kept.resize((width, height), Image.Resampling.BILINEAR)
    # A file, and not a BytesIO, for which Pillow would hold the lock that keeps threads apart.
    with os.fdopen(os.memfd_create("image"), "w+b") as file:
        if kind == "JPEG":
            kept.save(file, "JPEG", quality=jpeg_quality)
        else:
            kept.save(file, "PNG")
        file.seek(0)
        return file.read()
