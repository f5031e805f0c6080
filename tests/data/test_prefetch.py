"""Batches made ahead: how many, for how long they were waited for, and what ends them."""

import time

import pytest
from child_processes import wait_until

from scalejax.data.loader.prefetch import Prefetcher


def slow(count, seconds):
    """`count` groups of one element, each of which takes a while to make."""
    for number in range(count):
        time.sleep(seconds)
        yield [number]


def busy_for(seconds):
    """Devices with so much to do from now on."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def test_elements_come_in_order_and_end():
    """Those of a group one by one; asking again at the end says again that it is the end."""
    feed = Prefetcher(iter([[0, 1, 2], [3], [4, 5]]), ahead=1)

    assert list(feed) == [0, 1, 2, 3, 4, 5]
    assert list(feed) == []


def test_no_more_is_made_than_is_asked_for():
    """Two ahead and no third, however long no one asks."""
    made = []

    def groups():
        for number in range(10):
            made.append(number)
            yield [number]

    feed = Prefetcher(groups(), ahead=2)
    wait_until(lambda: len(made) == 2)
    time.sleep(0.1)
    assert made == [0, 1]
    assert next(feed) == 0
    wait_until(lambda: len(made) == 3)
    time.sleep(0.1)
    assert made == [0, 1, 2]
    feed.close()


def test_what_is_raised_while_an_element_is_made_is_raised_where_it_is_asked_for():
    """After the elements before it."""

    def groups():
        yield [0]
        raise ValueError("row 3")

    feed = Prefetcher(groups(), ahead=3)

    assert next(feed) == 0
    with pytest.raises(ValueError, match="row 3"):
        next(feed)
    with pytest.raises(StopIteration):
        next(feed)


def test_waiting_counts_from_when_the_devices_have_nothing_to_do():
    """A batch takes 200 ms and a step 100 ms, begun when its batch came: the devices idle for half
    of the time, though the loop waits for all of it. Faster batches are not waited for."""
    feed = Prefetcher(slow(6, 0.2), ahead=1)
    next(feed)
    waits = [feed.next_beside(busy_for(0.1))[1] for _ in range(5)]
    # 100 ms each; a busy machine makes batches later, never sooner
    assert min(waits) > 0.08
    assert min(waits) < 0.15

    ready = Prefetcher(slow(5, 0.0), ahead=5)
    time.sleep(0.5)
    assert [ready.next_beside(lambda: False)[1] for _ in range(5)] == [0.0] * 5


def test_a_feed_that_is_dropped_or_closed_ends_its_thread():
    """And gives up what it held, once, whether or not it had begun."""
    released = []
    for drops in (True, False):
        feed = Prefetcher(slow(1000, 0.01), ahead=2, release=lambda: released.append(1))
        thread = feed._thread
        next(feed)
        if not drops:
            feed.close()
        del feed
        thread.join(timeout=60)
        assert not thread.is_alive()

    assert released == [1, 1]
