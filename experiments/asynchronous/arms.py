"""What is compared: for each question, arms by name, which replace fields of run.toml.

Learning rates are the best of RATES for each arm at seed 100, which no arm is shown with
(`compare.py QUESTION --rates`); those with a rate in their name take that one.
"""

from typing import Any

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""What is searched."""
SEEDS = (0, 1, 2)
"""What is shown."""
Fields = dict[str, Any]


def downpour(workers: int, optimizer: str, rate: float, **algorithm: Any) -> Fields:
    """Downpour of so many replicas."""
    return {
        "emulation.workers": workers,
        "emulation.algorithm": {"name": "downpour", **algorithm},
        "optimizer": {"name": optimizer} | ({"momentum": 0.0} if optimizer == "sgd" else {}),
        "schedule.base_learning_rate": rate,
    }


DEAN2012: dict[str, Fields] = {
    "SGD, 1": downpour(1, "sgd", 0.03),
    "Downpour SGD, 20": downpour(20, "sgd", 0.01),
    "Downpour SGD, 200": downpour(200, "sgd", 0.0003),
    "Downpour SGD, 200, rate 0.003": downpour(200, "sgd", 0.003),
    "Downpour Adagrad, 20": downpour(20, "adagrad", 0.01),
    "Downpour Adagrad, 200": downpour(200, "adagrad", 0.001),
    "Downpour Adagrad, 200, rate 0.003": downpour(200, "adagrad", 0.003),
    "Downpour Adagrad, 200, warm": downpour(200, "adagrad", 0.001, warmstart_updates=300),
    "Sandblaster, 2000": {
        "emulation.workers": 2000,
        "emulation.algorithm": {"name": "sandblaster"},
        "train.epochs": 30,
    },
}
"""Dean et al. 2012, figures 4 and 5, on this data."""


def straggling(arm: Fields, slow_factor: float) -> Fields:
    """`arm` where a tenth of the workers is slower."""
    slow = {"emulation.stragglers.slow_share": 0.1, "emulation.stragglers.slow_factor": slow_factor}
    return arm | slow


def served(workers: int, backup: int) -> Fields:
    """Synchronous by servers; an update is of 16 samples for each worker that counts."""
    counted = workers - backup
    return {
        "emulation.workers": workers,
        "emulation.algorithm": {
            "name": "synchronous",
            "gradient_sync": "parameter_server",
            "backup_workers": backup,
        },
        "batch.global_batch": 16 * counted,
        "schedule.base_learning_rate": 0.3,
    }


STRAGGLERS: dict[str, Fields] = {
    f"{name}, slow x {factor:g}": straggling(arm, factor)
    for factor in (1.0, 4.0, 16.0)
    for name, arm in {
        "synchronous, 20": served(20, 0),
        "4 of 20 backup": served(20, 4),
        "Downpour Adagrad, 20": downpour(20, "adagrad", 0.03),
    }.items()
}
"""Synchronous with and without backup workers against asynchronous, a tenth being slow."""


def local(every_steps: int, **outer: float) -> Fields:
    """Local SGD of 16 workers, whose average takes 0.5 s: a slow network."""
    return {
        "emulation.workers": 16,
        "emulation.server_shards": 1,
        "emulation.algorithm": {"name": "local_sgd", "every_steps": every_steps, **outer},
        "emulation.timing.collective_seconds": 0.5,
        "batch.global_batch": 256,
        "schedule.base_learning_rate": 0.3,
        "train.epochs": 12,
    }


LOCAL_SGD: dict[str, Fields] = {
    "synchronous (every 1)": local(1),
    **{f"every {steps}": local(steps) for steps in (2, 4, 8, 16, 32, 64)},
    "every 32, outer Nesterov": local(32, outer_learning_rate=0.7, outer_momentum=0.9),
}
"""How rarely workers can meet, and what that costs (Stich 2018; DiLoCo)."""

QUESTIONS = {"dean2012": DEAN2012, "stragglers": STRAGGLERS, "local_sgd": LOCAL_SGD}
