"""The number of processes that make batches, by what was measured of them."""

import numpy as np
import pytest
from test_datasets import EMBEDDED, shapes_of

from scalejax.config.input import InputConfig
from scalejax.core.environment import machine_cores
from scalejax.data.datasets import open_source
from scalejax.data.loader.autotune import chosen
from scalejax.data.loader.loader import chosen_workers


@pytest.mark.parametrize(
    ("rates", "needed", "workers", "tried"),
    [
        # threads are enough, with a quarter to spare: nothing else is tried
        ([1300], 1000, 0, 1),
        # not with less to spare
        ([1200, 700, 1400], 1000, 2, 3),
        # nothing is enough: the fewest that are nearly as fast as any
        ([500, 300, 600, 1150, 1200], 5000, 4, 5),
        # a store that gives no more however many ask it: two do not help, more are not tried
        ([500, 700, 720, 9999], None, 1, 3),
        # unknown need: as fast as can be
        ([500, 260, 500], None, 0, 3),
        ([500, 400, 790, 1500], None, 4, 4),
        # memory for one process alone
        ([500, 700, None], 9000, 1, 2),
        # too little for any
        ([500, None], 9000, 0, 1),
    ],
)
def test_the_fewest_that_are_enough_are_chosen(rates, needed, workers, tried):
    """Rates are of 0, 1, 2, 4, 8 processes."""
    by_count: dict[int, float | None] = dict(zip((0, 1, 2, 4, 8), rates, strict=False))

    choice = chosen(lambda count: by_count.get(count), most=8, needed=needed)

    assert choice.workers == workers
    assert len(choice.measured) == tried


def test_a_choice_says_why():
    """In one sentence, for the record."""
    choice = chosen({0: 500.0, 1: 300.0, 2: 1260.0}.__getitem__, most=2, needed=1000)

    assert str(choice) == (
        "input.workers = 2 (samples/s: 500 with threads, 300 with 1, 1.26 k with 2; "
        "the devices take 1 k)"
    )


def test_images_in_memory_need_no_process():
    """Batches of Fashion-MNIST are copies: threads give them faster than any process would."""
    source = open_source(EMBEDDED, "train", seed=0)
    shapes = shapes_of(EMBEDDED, 256)

    choice = chosen_workers(source, shapes, seed=0, how=InputConfig(workers="auto"), step_seconds=1)

    assert choice.workers == 0
    (measured,) = choice.measured
    assert measured[1] > 1.25 * 256
    assert choice.needed == 256


class Slow:
    """Examples that take 2 ms of a core each, whatever else it does."""

    def __len__(self):
        return 1000

    def take(self, indices, epoch=None):
        """Numbers, after a while."""
        total = 0
        for _ in indices:
            total += sum(range(60_000))
        images = np.zeros((len(indices), 28, 28, 1), np.uint8)
        return {"inputs": images, "targets": indices.astype(np.int32)}


@pytest.mark.slow  # starts processes, and measures
def test_every_number_up_to_the_cores_is_measured_where_none_is_enough():
    """And the choice is one of them, of nearly the best rate."""
    shapes = shapes_of(EMBEDDED, 16)

    choice = chosen_workers(
        Slow(), shapes, seed=0, how=InputConfig(workers="auto"), step_seconds=1e-6
    )

    counts = [count for count, _ in choice.measured]
    assert counts[:2] == [0, 1]
    assert counts[-1] <= machine_cores()
    assert dict(choice.measured)[choice.workers] >= 0.9 * max(rate for _, rate in choice.measured)
