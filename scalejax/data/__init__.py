"""Examples by index, and the global batches made of them: one file per kind of data set.

The names below start JAX when they are asked for; files beside this one that need none start none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalejax.data.pipeline import (
        Batch,
        Batches,
        chosen_workers,
        evaluation_batches,
        evaluation_batches_of_seeds,
        training_batches,
        training_batches_of_seeds,
    )
    from scalejax.data.readable import Skipped
    from scalejax.data.source import Source, Split, open_source

__all__ = [
    "Batch",
    "Batches",
    "Skipped",
    "Source",
    "Split",
    "chosen_workers",
    "evaluation_batches",
    "evaluation_batches_of_seeds",
    "open_source",
    "training_batches",
    "training_batches_of_seeds",
]

_HOMES = {"Source": "source", "Split": "source", "open_source": "source", "Skipped": "readable"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'pipeline')}")
    return getattr(home, name)
