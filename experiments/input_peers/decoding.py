"""The transforms that every loader applies: a module, so that worker processes can import it.

As plain users of Pillow write them: no decoding at a part of the size, no other tricks.
"""

import io
import math
import random
from collections.abc import Callable

import numpy as np
from PIL import Image

SIZE = 128
AREA, ASPECT, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Of a random crop: as of torchvision's RandomResizedCrop."""


def resized(content: bytes) -> np.ndarray:
    """The image, uint8 [SIZE, SIZE, 3]: the shorter side scaled, the middle kept."""
    image = _opened(content)
    width, height = image.size
    scale = SIZE / min(width, height)
    width, height = max(SIZE, round(width * scale)), max(SIZE, round(height * scale))
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    return np.asarray(image.crop((left, top, left + SIZE, top + SIZE)))


def augmented(content: bytes) -> np.ndarray:
    """A random part of the image, scaled to uint8 [SIZE, SIZE, 3] and, half the time, mirrored."""
    image = _opened(content)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, _part(*image.size))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def _opened(content: bytes) -> Image.Image:
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def _part(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(TRIES):
        area = random.uniform(*AREA) * width * height
        aspect = math.exp(random.uniform(*map(math.log, ASPECT)))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.randint(0, width - across), random.randint(0, height - down)
            return left, top, left + across, top + down
    side = min(width, height)
    return 0, 0, side, side


TRANSFORMS: dict[str, Callable[[bytes], np.ndarray]] = {"resized": resized, "augmented": augmented}
"""By the name that a command line gives."""
