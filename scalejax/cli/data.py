"""Commands about data sets: say what is in one, write one anew.

They start without JAX, and need none.
"""

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from tyro.conf import FlagCreatePairsOff, Positional

from scalejax.cli.command import flag
from scalejax.config.parquet import ParquetConfig
from scalejax.config.run import load_config
from scalejax.core import progress, serialization
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import counted, format_bytes
from scalejax.data.formats.image_folder import ImageFolderConfig
from scalejax.data.formats.numpy import NumpyConfig, part_headers
from scalejax.report.terminal import tables

if TYPE_CHECKING:  # which imports Arrow
    from scalejax.data.convert import RowsOptions

_INTERRUPTED = """\
The files that are written stay; the same command, without --overwrite, goes on
with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInspect:
    """Say what is in a data set, and whether it is cut well.

    Rows, row groups, columns, classes, image sizes, advice, and the [data] table to paste into a
    run.toml.
    """

    source: Annotated[Positional[str], flag("PATH_OR_RUN.toml")]
    """A file, folder, glob or URL, or a run.toml, whose files are looked at."""
    images: Annotated[str | None, flag("NAME")] = None
    """Which array of an .npz holds the images. By default as training finds it."""
    labels: Annotated[str | None, flag("NAME_OR_FILE")] = None
    """Which array of an .npz, or which file, holds the classes."""
    verify: FlagCreatePairsOff[bool] = False
    """Read and decode every row, and name those that cannot be."""
    json: Annotated[Path | None, flag("OUT.json")] = None
    """Where the findings go."""

    def execute(self) -> None:
        """Look at each location, print and write what was found."""
        from scalejax.data.convert import RowsOptions, open_rows
        from scalejax.data.inspect import Inspections, inspect
        from scalejax.report.terminal.data import inspection

        serialization.require_writable("json", self.json)
        found = []
        is_run = self.source.endswith(".toml")
        options = RowsOptions(images=self.images, labels=self.labels)
        for each in _of_run(self.source) if is_run else [_Looked(self.source, options)]:
            rows = open_rows(each.location, each.options)
            with progress.rows("reading", len(rows) if self.verify else 0) as on_rows:
                about = inspect(rows, run=each.run, verify=self.verify, on_rows=on_rows)
            if is_run:  # a run.toml has its [data] table
                about = replace(about, table=None)
            found.append(about)
        for index, each in enumerate(found):
            if index:
                print()
            tables.show(inspection(each))
        if self.json is not None:
            serialization.save(Inspections(inspections=tuple(found)), self.json)
            print(f"\nwrote {self.json}")
        if broken := sum(each.unreadable_rows for each in found):
            named = "it is" if broken == 1 else "they are"
            rows = counted(broken, "row")
            raise ConfigError(f"{self.source}: {rows} cannot be read; {named} named above.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConvert:
    """Write any data set as Parquet files, which training reads.

    From a folder with a folder of images for each class, .npz and .npy, IDX (as MNIST comes), CSV,
    or other Parquet files. Killed at any time, the same command goes on with the files that are
    missing.
    """

    source: Annotated[Positional[str], flag("SOURCE")]
    """A file, folder, glob or URL."""
    destination: Annotated[Positional[Path], flag("DESTINATION")]
    """A folder, or one file that ends in .parquet."""
    files: Annotated[int | None, flag("N")] = None
    """Files of equally many rows. By default so many that each takes about 64 MiB."""
    row_group_rows: Annotated[int | None, flag("N")] = None
    """Rows of a row group. By default as many as take about 4 MiB."""
    image_size: Annotated[int | None, flag("PIXELS")] = None
    """Bring the shorter side of larger images to so many pixels, once: training reads less."""
    jpeg_quality: Annotated[int, flag("1..95")] = 95
    """Of JPEG that are made smaller. By default 95."""
    compression: Literal["snappy", "zstd", "gzip", "none"] = "snappy"
    """Of columns. By default snappy."""
    images: Annotated[str | None, flag("NAME")] = None
    """Which array of an .npz holds the images."""
    labels: Annotated[str | None, flag("NAME_OR_FILE")] = None
    """Which array of an .npz, or which file, holds the classes."""
    shuffle_seed: Annotated[int | None, flag("SEED")] = None
    """Mix a folder of images, whose classes otherwise lie one after the other."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What to do with rows whose image cannot be decoded: end there, or leave them out and say
    how many they are."""
    workers: Annotated[int | None, flag("N")] = None
    """Threads that decode images. By default as many as there are cores."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Remove what another conversion has written there."""

    def execute(self) -> None:
        """Convert, and say what came of it."""
        from scalejax.data.convert import RowsOptions, Wanted, convert
        from scalejax.data.inspect import written_order_advice

        wanted = Wanted(**{each.name: getattr(self, each.name) for each in fields(Wanted)})
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
            print(f"warning: {advice}")
        print(f"scalejax data inspect {self.destination} says what is in them.")


class _Looked(NamedTuple):
    """Files to look at."""

    location: str
    """Where they are."""
    options: "RowsOptions | None" = None
    """What they do not say of themselves."""
    run: ParquetConfig | None = None
    """What a run asks of them."""


def _of_run(path: str) -> list[_Looked]:
    """The files that the [data] table of a run.toml names: to train on, and to evaluate on."""
    from scalejax.data.convert import RowsOptions

    data = load_config(Path(path)).data
    match data:
        case ParquetConfig():
            # What is evaluated needs no mixing.
            reading = replace(data.reading, shuffle="rows", petastorm=None)
            tested = replace(data, reading=reading)
            found = [_Looked(data.train, None, data), _Looked(data.test, None, tested)]
            return found[:1] if data.train == data.test else found
        case ImageFolderConfig():
            found = [_Looked(data.train), _Looked(data.test)]
        case NumpyConfig():
            found = []
            for part in ("train", "test"):
                headers = part_headers(data, part)
                inputs, targets = headers.inputs, headers.targets
                options = RowsOptions(images=inputs.member, labels=targets.member)
                if inputs.member is None:
                    options = RowsOptions(labels=targets.file.path)
                found.append(_Looked(inputs.file.path, options))
        case _:
            accepted = (
                f"its data.name is {data.name!r}, and rows are looked at of parquet, image_folder "
                "and numpy"
            )
            raise ConfigError(refusal("source", path, accepted))
    for each in found:
        if "://" in each.location.removeprefix("file://"):
            accepted = f"{each.location} is a URL, of which only Parquet is looked at"
            raise ConfigError(refusal("source", path, accepted))
    return list(dict.fromkeys(found))
