"""Commands about data sets: inspect one, convert one to Parquet.

They do not need JAX.
"""

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    PlainCommand,
    flag,
    require_result_files,
    say,
    write_result,
)
from scalejax.config.run import load_config
from scalejax.core import progress
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import counted, format_bytes
from scalejax.data.datasets import reader_of
from scalejax.data.facts import fitting_facts, read_facts
from scalejax.data.source import Inspected
from scalejax.report.terminal import tables

_INTERRUPTED = """\
The files that are written are kept; the same command, without --overwrite,
continues with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInspect(PlainCommand):
    """Summarise a data set, and advise on its row groups.

    Rows, row groups, columns, classes, image sizes, advice, and the [data] table to paste into a
    run.toml.
    """

    source: Annotated[Positional[str], flag("PATH_OR_RUN.toml")]
    """A file, folder, glob or URL, or a run.toml, whose data files are inspected."""
    images: Annotated[str | None, flag("NAME")] = None
    """Array of an .npz that holds the images. By default the one that training would use."""
    labels: Annotated[str | None, flag("NAME_OR_FILE")] = None
    """Array of an .npz, or file, that holds the classes."""
    verify: FlagCreatePairsOff[bool] = False
    """Read and decode every row, list those that fail, and, for a run.toml, count validation and
    test examples that are also trained on."""
    json: JsonFile = None
    """Write the summary here as JSON."""
    csv: CsvFile = None
    """Write a row for each location here as CSV."""

    def execute(self) -> None:
        """Inspect each location, print and write the summaries."""
        from scalejax.data.convert import RowsOptions, open_rows
        from scalejax.data.inspect import Inspections, inspect, shared_examples
        from scalejax.report.terminal.data import inspection

        require_result_files(self.json, self.csv)
        found = []
        is_run = self.source.endswith(".toml")
        options = RowsOptions(images=self.images, labels=self.labels)
        for each in _of_run(self.source) if is_run else [Inspected(self.source, options)]:
            rows = open_rows(each.location, each.options)
            with progress.rows("reading", len(rows) if self.verify else 0) as on_progress:
                about = inspect(rows, run=each.run, verify=self.verify, on_progress=on_progress)
            if is_run:  # a run.toml already has its [data] table
                about = replace(about, table=None)
            found.append(about)
        for index, each in enumerate(found):
            if index:
                print()
            tables.show(inspection(each))
        broken, shared = sum(each.unreadable_rows for each in found), ()
        if is_run and self.verify and not broken:
            data = load_config(Path(self.source)).data
            with progress.rows("comparing", read_facts(data).examples) as on_progress:
                shared = shared_examples(data, on_progress)
            for each in shared:
                say(f"warning: {each}.")
        every = Inspections(inspections=tuple(found), shared=shared)
        write_result(every, self.json, self.csv)
        if broken:
            named = "it is" if broken == 1 else "they are"
            rows = counted(broken, "row")
            raise ConfigError(f"{self.source}: {rows} cannot be read; {named} named above.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConvert(PlainCommand):
    """Convert a data set to Parquet files, which training reads.

    From a folder with a folder of images for each class, .npz and .npy, IDX (as MNIST), CSV, or
    other Parquet files. If it is interrupted, the same command continues with the missing files.
    """

    source: Annotated[Positional[str], flag("SOURCE")]
    """A file, folder, glob or URL."""
    destination: Annotated[Positional[Path], flag("DESTINATION")]
    """A folder, or one file that ends in .parquet."""
    files: Annotated[int | None, flag("N")] = None
    """Number of files, with equally many rows. By default so many that each takes about 64 MiB."""
    row_group_rows: Annotated[int | None, flag("N")] = None
    """Rows per row group. By default as many as take about 4 MiB."""
    image_size: Annotated[int | None, flag("PIXELS")] = None
    """Resize the shorter side of larger images to this many pixels, so that training reads less."""
    jpeg_quality: Annotated[int, flag("1..95")] = 95
    """Quality of JPEG images that are resized. By default 95."""
    compression: Literal["snappy", "zstd", "gzip", "none"] = "snappy"
    """Compression of columns. By default snappy."""
    images: Annotated[str | None, flag("NAME")] = None
    """Array of an .npz that holds the images."""
    labels: Annotated[str | None, flag("NAME_OR_FILE")] = None
    """Array of an .npz, or file, that holds the classes."""
    shuffle_seed: Annotated[int | None, flag("SEED")] = None
    """Shuffle a folder of images, which are otherwise ordered by class."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """Handling of rows whose image cannot be decoded: stop with an error, or skip and count
    them."""
    workers: Annotated[int | None, flag("N")] = None
    """Threads that decode images. By default as many as there are cores."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Remove the files of another conversion in the destination."""
    json: JsonFile = None
    """Write the summary here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write it here as CSV."""

    def execute(self) -> None:
        """Convert, and print a summary."""
        from scalejax.data.convert import ConvertOptions, RowsOptions, convert
        from scalejax.data.inspect import written_order_advice

        require_result_files(self.json, self.csv)
        wanted = ConvertOptions(
            **{each.name: getattr(self, each.name) for each in fields(ConvertOptions)}
        )
        chosen = {each.name: getattr(self, each.name) for each in fields(RowsOptions)}
        try:
            done = convert(
                self.source,
                self.destination,
                options=RowsOptions(**chosen),
                wanted=wanted,
                workers=self.workers,
                shown=partial(progress.rows, "converting"),
            )
        except KeyboardInterrupt:
            print(_INTERRUPTED, file=sys.stderr)
            raise
        before = f", {done.files_before:,} of them written before" if done.files_before else ""
        written = f"{counted(f'{done.rows:,}', 'row')} in {counted(f'{done.files:,}', 'file')}"
        print(f"{written}, {format_bytes(done.size_bytes)}{before}")
        if done.skipped_rows:
            were = "was" if done.skipped_rows == 1 else "were"
            print(f"{counted(f'{done.skipped_rows:,}', 'unreadable row')} {were} left out")
            for about in done.skipped:
                print(f"  {about}")
            if done.skipped and (more := done.skipped_rows - len(done.skipped)):
                print(f"  and {more:,} more")
        if advice := written_order_advice(str(self.destination)):
            say(f"warning: {advice}")
        write_result(done, self.json, self.csv)
        print(f"scalejax data inspect {self.destination} summarises them.")


def _of_run(path: str) -> list[Inspected]:
    """The training and test files that the [data] table of a run.toml names."""
    config = load_config(Path(path))
    fitting_facts(config)  # refuses files that cannot be read, naming the field of each
    data = config.data
    reader = reader_of(data)
    found: dict[object, Inspected] = {}
    for each in (reader.inspected(data, "train"), reader.inspected(data, "test")):
        if each is None:
            accepted = (
                f"its data.name is {data.name!r}, and only parquet, image_folder and numpy can be "
                "inspected"
            )
            raise ConfigError(refusal("source", path, accepted))
        if each.run is None and "://" in each.location.removeprefix("file://"):
            accepted = f"{each.location} is a URL, of which only Parquet can be inspected"
            raise ConfigError(refusal("source", path, accepted))
        found.setdefault((each.location, each.options), each)
    return list(found.values())
