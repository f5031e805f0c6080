"""Commands about data sets: say what is in one, write one anew.

They start without JAX, and need none.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional

from scalejax import documents, tables, waiting
from scalejax.commands.command import flag
from scalejax.config import load_config
from scalejax.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInspect:
    """Say what is in a data set, and whether it is cut well.

    Rows, row groups, columns, classes, image sizes, advice, and the [data] table to paste into a
    run.toml.
    """

    source: Annotated[Positional[str], flag("PATH_OR_RUN.toml")]
    """A file, folder, glob or URL, or a run.toml, whose files are looked at."""
    verify: FlagCreatePairsOff[bool] = False
    """Read and decode every row, and name those that cannot be."""
    json: Annotated[Path | None, flag("OUT.json")] = None
    """Where the findings go."""

    def execute(self) -> None:
        """Look at each location, print and write what was found."""
        from scalejax.conversion import open_rows
        from scalejax.inspection import Inspections, inspect
        from scalejax.inspection_tables import inspection

        documents.require_writable("json", self.json)
        found = []
        for location in _locations(self.source):
            rows = open_rows(location)
            with waiting.rows("reading", len(rows) if self.verify else 0) as on_rows:
                about = inspect(rows, verify=self.verify, on_rows=on_rows)
            if location != self.source:  # a run.toml has its [data] table
                about = replace(about, table=None)
            found.append(about)
        for index, each in enumerate(found):
            if index:
                print()
            tables.show(inspection(each))
        if self.json is not None:
            documents.save(Inspections(inspections=tuple(found)), self.json)
            print(f"\nwrote {self.json}")
        if broken := sum(each.unreadable_rows for each in found):
            raise ConfigError(f"{broken} rows cannot be read; they are named above.")


def _locations(source: str) -> list[str]:
    """Where the files are that `source` names, itself or in its [data] table."""
    if not source.endswith(".toml"):
        return [source]
    data = load_config(Path(source)).data
    if data.name != "parquet":
        accepted = f"its data.name={data.name!r} is of no files that can be looked at"
        raise ConfigError(refusal("source", source, accepted))
    return list(dict.fromkeys([data.train, data.test]))
