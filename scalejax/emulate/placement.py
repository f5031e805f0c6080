"""On how many hosts the workers of an algorithm can be, and what must be known of one of them.

Sources: MXNet's kvstore (`local`, `device` and `nccl` are of one machine); tf_cnn_benchmarks, where
variable_update=replicated is local only; Niu, Recht, Re & Wright 2011 (Hogwild: one memory). Knows
configs; no times.
"""

from scalejax.emulation_algorithms import HogwildConfig
from scalejax.emulation_config import AlgorithmConfig, EmulationConfig
from scalejax.emulation_modes import KvStoreConfig, VariableUpdateConfig
from scalejax.errors import ConfigError, refusal


def is_of_one_machine(algorithm: AlgorithmConfig) -> bool:
    """Whether all workers must share a host."""
    return _elsewhere(algorithm) is not None


def require_one_machine(emulation: EmulationConfig, workers_per_host: int) -> None:
    """Refuse several hosts where there can be but one.

    Raises:
        ConfigError: naming what works on several.
    """
    found = _elsewhere(emulation.algorithm)
    if found is None or emulation.workers <= workers_per_host:
        return
    field, value, instead = found
    accepted = (
        f"it is of one machine, and of emulation.workers={emulation.workers} a host has "
        f"{workers_per_host}: take {instead}, or at most {workers_per_host} workers"
    )
    raise ConfigError(refusal(f"emulation.algorithm.{field}", value, accepted))


def require_rates(emulation: EmulationConfig, workers_per_host: int) -> None:
    """Refuse an exchange within a host of which nobody says how fast it is.

    Raises:
        ConfigError: naming what is missing.
    """
    mode = emulation.algorithm
    if (
        isinstance(mode, VariableUpdateConfig | KvStoreConfig)
        and emulation.is_all_reduced
        and emulation.timing.exchange_seconds is None
        and mode.host_bytes_per_second is None
        and min(workers_per_host, emulation.workers) > 1
    ):
        raise ConfigError(
            "emulation.algorithm.host_bytes_per_second is missing: workers share a host, "
            "and exchange at its rate. Give it, emulation.timing.exchange_seconds, or --cluster."
        )


def _elsewhere(algorithm: AlgorithmConfig) -> tuple[str, str, str] | None:
    """Field and value of what is of one machine, and what to take on several."""
    match algorithm:
        case KvStoreConfig(type="local"):
            return "type", "local", '"dist_sync"'
        case KvStoreConfig(type="device" | "nccl" as kind):
            return "type", kind, '"dist_device_sync"'
        case VariableUpdateConfig(variable_update="replicated"):
            return "variable_update", "replicated", '"distributed_all_reduce" or "horovod"'
        case HogwildConfig():
            return "name", "hogwild", '"downpour"'
        case _:
            return None
