"""What `scalejax data inspect` prints: an inspection in 80 columns."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from scalejax.inspection import Inspection
from scalejax.tables import figures
from scalejax.units import UNKNOWN, counted, format_bytes

SHOWN_CLASSES, SHOWN_COLUMNS = 10, 40
"""Of more, the rest is counted."""


def inspection(found: Inspection) -> Iterator[RenderableType]:
    """Rows, columns, classes, images, what cannot be read, advice, and the table to paste."""
    files, rows = counted(f"{found.files:,}", "file"), counted(f"{found.rows:,}", "row")
    about = f"{found.kind}, {files}, {format_bytes(found.size_bytes)}, {rows}"
    if groups := found.groups:
        rows = counted(f"{groups.most_rows:,}", "row")
        if groups.fewest_rows != groups.most_rows:
            rows = f"{groups.fewest_rows:,} to {rows}"
        about += (
            f"\n{counted(f'{groups.count:,}', 'row group')} of {rows}, the largest "
            f"{format_bytes(groups.largest_bytes)} in memory"
        )
    yield Text.assemble((found.location, "bold"), "\n", about)
    yield _columns(found)
    if found.classes is not None:
        yield Text(_classes(found))
    if images := found.images:
        sizes = ", ".join(
            f"{name} {width} x {height}"
            for name, (width, height) in (
                ("smallest", images.smallest),
                ("middle", images.median),
                ("largest", images.largest),
            )
        )
        yield Text(
            f"Images: {'/'.join(images.formats)}, {format_bytes(images.mean_bytes)} each in the "
            f"mean; {sizes} (of {images.sampled} looked at)."
        )
    if found.verified_rows is not None:
        yield _verified(found)
    for each in found.advice:
        yield Text(f"Advice: {each}")
    if found.table is not None:
        yield Text(found.table)


def _columns(found: Inspection) -> RenderableType:
    table = figures("column", "type", "in memory", "in files", "compression")
    for each in found.columns[:SHOWN_COLUMNS]:
        table.add_row(
            each.name,
            each.type if len(each.type) <= 30 else f"{each.type[:27]}...",
            format_bytes(each.decompressed_bytes),
            format_bytes(each.stored_bytes),
            each.compression or ("none" if each.stored_bytes is not None else UNKNOWN),
        )
    if (more := len(found.columns) - SHOWN_COLUMNS) > 0:
        table.add_row(f"and {more} more")
    return table


def _classes(found: Inspection) -> str:
    classes = found.classes or ()
    shown = ", ".join(f"{name} {count:,}" for name, count in classes[:SHOWN_CLASSES])
    more = len(classes) - SHOWN_CLASSES
    rest = f" and {more:,} more" if more > 0 else ""
    count = f"{len(classes):,} class{'es' if len(classes) != 1 else ''}"
    return f"{count} in {found.label_column!r}: {shown}{rest}."


def _verified(found: Inspection) -> Text:
    if not found.unreadable_rows:
        return Text(f"Verified: all {found.verified_rows:,} rows can be read.")
    lines = [
        f"Unreadable: {found.unreadable_rows:,} of {counted(found.verified_rows or 0, 'row')}."
    ]
    lines += [f"  {each.where}: {each.why}" for each in found.unreadable]
    if (more := found.unreadable_rows - len(found.unreadable)) > 0:
        lines.append(f"  and {more:,} more")
    return Text("\n".join(lines))
