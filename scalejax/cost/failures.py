"""Checkpoints and failures: which share of a long run's time goes into steps that count."""

import math

from scalejax.errors import ConfigError, refusal, require_above, require_at_least

_HOPELESS = 20.0  # mean times between failures per interval: e^20 attempts at each


def best_interval_seconds(checkpoint_seconds: float, run_mtbf_seconds: float) -> float:
    """Time of training between checkpoints that loses the least to both of its costs.

    interval = sqrt(2 checkpoint mtbf): more often, and checkpoints cost more; less often, and
    a failure does. First order in checkpoint / mtbf; the optimum is flat.

    Args:
        checkpoint_seconds: time that training stands still for one checkpoint.
        run_mtbf_seconds: mean time between failures of the run: of a node over nodes.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval", CACM
        17(9).
    """
    require_above("checkpoint_seconds", checkpoint_seconds, 0)
    require_above("run_mtbf_seconds", run_mtbf_seconds, 0)
    return math.sqrt(2 * checkpoint_seconds * run_mtbf_seconds)


def checkpoint_goodput(interval_seconds: float, checkpoint_seconds: float) -> float:
    """Share of the time that is left to training by checkpoints alone, 0..1.

    goodput = interval / (interval + checkpoint)
    """
    require_above("interval_seconds", interval_seconds, 0)
    require_at_least("checkpoint_seconds", checkpoint_seconds, 0)
    return interval_seconds / (interval_seconds + checkpoint_seconds)


def goodput(
    interval_seconds: float,
    checkpoint_seconds: float,
    restart_seconds: float,
    run_mtbf_seconds: float,
) -> float:
    """Share of the time that is left to training by checkpoints and failures, 0..1.

    Failures come at random with mean time M between them, during training, checkpoints and
    restarts alike. An interval with its checkpoint is tried until it passes without one, which
    takes M e^(R/M) (e^((interval + C)/M) - 1) on average; so

    goodput = interval / (M e^(R/M) (e^((interval + C)/M) - 1)),

    which for M much larger than the rest is the well-known
    1 - C/interval - (interval/2 + R)/M.

    Args:
        interval_seconds: time of training between checkpoints.
        checkpoint_seconds: C, time that training stands still for one.
        restart_seconds: R, time from a failure until training goes on.
        run_mtbf_seconds: M, mean time between failures of the run: of a node over nodes.

    Raises:
        ConfigError: if failures come so fast that such a run would never end.
    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", Future Generation Computer Systems 22(3), section 3.
    """
    require_above("interval_seconds", interval_seconds, 0)
    require_at_least("checkpoint_seconds", checkpoint_seconds, 0)
    require_at_least("restart_seconds", restart_seconds, 0)
    require_above("run_mtbf_seconds", run_mtbf_seconds, 0)
    attempt = (interval_seconds + checkpoint_seconds) / run_mtbf_seconds
    restart = restart_seconds / run_mtbf_seconds
    if attempt + restart > _HOPELESS:
        least = (interval_seconds + checkpoint_seconds + restart_seconds) / _HOPELESS
        accepted = (
            f"with {interval_seconds:.4g} s between checkpoints of {checkpoint_seconds:.4g} s and "
            f"{restart_seconds:.4g} s for a restart, it must be above {least:.4g}, or the run "
            "never ends"
        )
        raise ConfigError(refusal("run_mtbf_seconds", run_mtbf_seconds, accepted))
    mean_seconds = run_mtbf_seconds * math.exp(restart) * math.expm1(attempt)
    return interval_seconds / mean_seconds
