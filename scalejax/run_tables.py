"""What makes an update of a run, for the terminal.

Knows how to word what a config says; its batches, steps and rates are in `tables`. Fits 80 columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from rich.console import RenderableType
from rich.text import Text

from scalejax.augmentation_config import AugmentationConfig
from scalejax.config import ResolvedRun
from scalejax.documents import plain
from scalejax.input_config import InputConfig
from scalejax.run_checks import has_batch_norm
from scalejax.tables import facts
from scalejax.units import format_count


def update(
    run: ResolvedRun, learning: tuple[int, int] | None = None, notes: Sequence[str] = ()
) -> Iterator[RenderableType]:
    """Optimizer, averaging, BatchNorm, what the network begins with, what of it learns; notes.

    Args:
        run: the run on its devices.
        learning: of a run that is fine-tuned, numbers that learn, and all of its parameters.
        notes: sentences without full stops.
    """
    config, split = run.config, run.split
    table = facts()
    table.add_row("optimizer", config.optimizer.name, _fields(config.optimizer))
    if config.averaging is not None:
        table.add_row("averaging", config.averaging.name, _fields(config.averaging))
    if config.exchange is not None:
        table.add_row("exchange", config.exchange.name, _fields(config.exchange))
    if has_batch_norm(config.model) or config.layout.bn_scope != "global":
        samples = split.microbatch * run.layout.batch_shards // run.bn_groups
        table.add_row("BatchNorm", config.layout.bn_scope, f"statistics of {samples:,} samples")
    if (weights := getattr(config.model, "pretrained", None)) is not None:
        table.add_row("weights", weights, "what the network begins with")
    tuning = config.fine_tuning
    if tuning is not None and learning is not None:
        parts = ", ".join(tuning.trainable) or "all"
        table.add_row(
            "learns", format_count(learning[0]), f"of {learning[1]:,} parameters: {parts}"
        )
        for part, factor in tuning.rate_factors.items():
            table.add_row("rate factor", f"{factor:g}", part)
    if given := _input(config.input):
        table.add_row("input", "", given)
    yield "[bold]update[/]"
    yield table
    if notes:
        yield Text("\n".join(f"Note: {note}." for note in notes))


def _input(given: InputConfig) -> str:
    """What is not as usual of the way from the data to the devices, and how images are changed."""
    changed = _changed(given, InputConfig(), but="augmentation")
    if given.augmentation is not None:
        changed += _changed(given.augmentation, AugmentationConfig())
    return ", ".join(changed)


def _changed(given: object, usual: object, *, but: str = "") -> list[str]:
    """The fields of a description that differ from the usual ones, in words."""
    names = [field.name for field in fields(given) if field.name != but]  # type: ignore[arg-type]
    return [
        f"{name} {getattr(given, name)}"
        for name in names
        if getattr(given, name) != getattr(usual, name)
    ]


def _fields(description: object) -> str:
    """The fields of a description in words, but for its name and what is absent."""
    tables = plain(description)
    assert isinstance(tables, dict)  # noqa: S101  a dataclass is a table
    given = {name: value for name, value in tables.items() if name != "name" and value is not None}
    words = {True: "yes", False: "no"}
    return ", ".join(
        f"{name} {words[value] if isinstance(value, bool) else value}"
        for name, value in given.items()
    )
