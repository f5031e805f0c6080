"""Every example of an epoch is seen once, whatever hosts and devices a run goes on with."""

import jax
import numpy as np
import pytest
from test_datasets import SMALL_IMAGES, Numbers, shapes_of

from scalejax.config.input import InputConfig
from scalejax.config.parallelism import Layout
from scalejax.data.loader.loader import rows_held
from scalejax.data.loader.prefetch import prefetched_batches
from scalejax.data.loader.sampler import TrainingSampler

GLOBAL_BATCH = 24
EXAMPLES = 1001  # 41 batches of 24 and 17 examples more
SESSIONS = ((4, 8, 60), (3, 6, 25), (8, 8, 1000))
"""Hosts, devices of all of them, and steps until the run stops to go on with others."""


def seen_by_hosts(remainder, *, epochs, seed=5):
    """(epoch, example, weight) of every row of every host, and the steps of each session's hosts.

    Each host is the code of one process: its own order, and the rows that its own devices hold.
    """
    per_epoch = -(-EXAMPLES // GLOBAL_BATCH) if remainder == "pad" else EXAMPLES // GLOBAL_BATCH
    total, begin, ledger, steps_of = epochs * per_epoch, 0, [], []
    for hosts, devices, wanted in SESSIONS:
        end = min(begin + wanted, total)
        shape = shapes_of(SMALL_IMAGES, GLOBAL_BATCH, Layout(data=devices))["inputs"]
        of_host = np.array_split(np.array(jax.devices()[:devices]), hosts)
        steps = []
        for each in of_host:
            source = Numbers(EXAMPLES)
            order = TrainingSampler(
                source,
                GLOBAL_BATCH,
                seed=seed,
                steps=end,
                first_epoch=0,
                is_filled=remainder == "pad",
                is_weighted=remainder == "pad",
            )
            rows, how = rows_held(shape, set(each)), InputConfig(remainder=remainder)
            batches = list(
                prefetched_batches(order, source, rows, 20, start=begin, how=how, workers=0)
            )
            steps.append(len(batches))
            for number, batch in enumerate(batches, start=begin):
                weights = batch.get("weights", np.ones(len(rows)))
                ledger += [
                    (number // per_epoch, int(example), float(weight))
                    for example, weight in zip(batch["targets"], weights, strict=True)
                ]
        steps_of.append((end - begin, steps))
        begin = end
    return ledger, steps_of


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_each_example_is_seen_once_an_epoch_across_4_then_3_then_8_hosts(remainder):
    """Changes fall within epochs. With "pad" each counts once and only once; with "drop" at most
    once, and as many are left out as do not fill a batch. Every host makes the same steps."""
    epochs = 4
    ledger, steps_of = seen_by_hosts(remainder, epochs=epochs)

    for expected, steps in steps_of:
        assert steps == [expected] * len(steps)
    for epoch in range(epochs):
        rows = [(example, weight) for of, example, weight in ledger if of == epoch]
        seen = sorted(example for example, weight in rows if weight == 1)
        assert {weight for _, weight in rows} <= {0.0, 1.0}
        assert len(rows) % GLOBAL_BATCH == 0
        if remainder == "pad":
            assert seen == list(range(EXAMPLES))
        else:
            assert len(seen) == len(set(seen)) == len(rows)
            assert EXAMPLES - len(seen) == EXAMPLES % GLOBAL_BATCH == 17
