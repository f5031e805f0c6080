"""How many cores this process may use to make batches."""

from scalejax.this_process import machine_cores

_limits: list[int] = []


def usable_cores() -> int:
    """Cores that this process may run on, or fewer if it was told so."""
    return _limits[-1] if _limits else machine_cores()


def limit_cores(count: int) -> None:
    """Use no more than `count` cores: other processes make batches on the rest."""
    _limits.append(count)
