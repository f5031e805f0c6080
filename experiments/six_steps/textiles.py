"""The textile images as Parquet files in the style of Hugging Face `datasets`: three files.

`test.parquet`, 100 images of each class; `part.parquet`, 100 others of each; `full.parquet`, all
but those of the test. Order and choice are drawn with a fixed seed.
"""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PACKAGE = "conformal-clip-data"
"""On PyPI; MIT; 2,000 JPEG of 250 x 250, of simulated defects."""
FOLDER = "conformal_clip_data/data/textile_images/simulated"
CLASSES = ("nominal", "local", "global")
PER_CLASS = 100
"""Images of each class in the test, and in the part."""
ROWS = 100
"""Rows of a row group."""


def write_textiles(folder: Path) -> None:
    """Write the three files, if they are not there.

    Raises:
        SystemExit: if the package is not installed.
    """
    if (folder / "test.parquet").exists():
        return
    try:
        images = Path(str(metadata.distribution(PACKAGE).locate_file(FOLDER)))
    except metadata.PackageNotFoundError as error:
        raise SystemExit(f'the images are not installed; "pip install {PACKAGE}"') from error
    folder.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(0)
    rows = {"test": [], "part": [], "full": []}
    for label, name in enumerate(CLASSES):
        paths = sorted((images / name).glob("*.jpg"))
        order = [(paths[index], label) for index in drawn.permutation(len(paths))]
        rows["test"] += order[:PER_CLASS]
        rows["part"] += order[PER_CLASS : 2 * PER_CLASS]
        rows["full"] += order[PER_CLASS:]
    for name in ("part", "full", "test"):  # the last one says that all are there
        chosen = [rows[name][index] for index in drawn.permutation(len(rows[name]))]
        _write(folder / f"{name}.parquet", chosen)


def _write(path: Path, rows: list[tuple[Path, int]]) -> None:
    images = [{"bytes": image.read_bytes(), "path": image.name} for image, _ in rows]
    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(CLASSES), "_type": "ClassLabel"},
    }
    table = pa.table(
        {"image": images, "label": pa.array([label for _, label in rows], pa.int64())}
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=ROWS)
