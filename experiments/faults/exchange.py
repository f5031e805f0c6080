"""What it costs two processes to agree on whether to stop.

python experiments/faults/exchange.py
"""

import sys
import time
from statistics import median

from scalejax.launch import Runner

GRADIENT_SYNCS = 200


def gradient_syncs() -> list[float]:
    """Seconds of each."""
    import numpy as np
    from jax.experimental import multihost_utils

    taken = []
    for _ in range(GRADIENT_SYNCS):
        begin = time.perf_counter()
        multihost_utils.process_allgather(np.zeros(2, np.float32))
        taken.append(time.perf_counter() - begin)
    return taken[GRADIENT_SYNCS // 10 :]


def main() -> None:
    """Measure in two processes of this machine, and print."""
    taken = Runner(-2, cpu_devices=1, out=sys.stderr).run(gradient_syncs)
    print(f"an exchange takes {median(taken) * 1e3:.2f} ms (median of {len(taken)}, warmed up)")


if __name__ == "__main__":
    main()
