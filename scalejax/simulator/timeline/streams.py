"""Simulation of a device's streams, event by event: one computes, the others communicate.

Compute runs in order. A collective starts when compute has reached it and the collectives
before it are done; compute continues, and stalls at the wait only for the remainder. A
synchronous collective stalls compute from start to end. While a collective runs, compute loses a
fraction of its speed; the communication streams lose none.

Collectives within nodes use other links than those between nodes, and the two kinds overlap:
XLA assigns asynchronous collectives to as many streams as may be in flight at once
(openxla/xla, service/gpu/execution_stream_assignment.cc; scalejax sets
xla_gpu_experimental_parallel_collective_overlap_limit), and frameworks have a stream for each
group. Collectives on the same links run one after another. A synchronous one runs on the compute
stream, but on the same links: it starts after those in flight there. A send from one device to the
next (a ring of context, a pipeline) does not wait for them, as a ring that waited at each of its
steps would queue behind the gathers of a whole layer: it takes half of the links, and collectives
started before it share the rest in order, so that each ends later by what the send transfers until
then. Left out: the bandwidth that a collective between nodes takes from the links within them.
Copies to and from host memory have streams too (XLA: h2d and d2h); copy engines make them, and
they do not slow compute down. Independent of hardware: seconds in, seconds out.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from scalejax.simulator.collectives.placement import LINK_COUNT
from scalejax.simulator.timeline.schedule import Event, Repeat, Start, Wait, Work

_SAME_FRACTION = 1e-11
"""Share of an iteration's time by which the remainders of two equal iterations may differ. The
remainder may grow by this much in each iteration that is not simulated."""


@dataclass(slots=True)
class _Slowdown:
    """Loss of compute during one collective: a fraction of its speed from begin to end."""

    begin: float
    end: float
    fraction: float
    links: int


class Streams:
    """State of all streams: time reached by compute, and collectives in flight."""

    def __init__(
        self,
        segment_seconds: Sequence[float],
        collective_seconds: Sequence[float],
        collective_links: Sequence[int],
        collective_is_send: Sequence[bool],
        collective_contention: Sequence[float],
    ) -> None:
        """Start all streams idle at 0.

        Args:
            segment_seconds: time of each segment of compute on its own.
            collective_seconds: time of each collective on its own.
            collective_links: 0 for a collective within nodes, 1 across the network; 2 and 3 for a
                copy to and from host memory.
            collective_is_send: whether each sends from one device to another.
            collective_contention: fraction of its speed that compute loses during each; none
                during copies.
        """
        self._segment_seconds = segment_seconds
        self._collective_seconds = collective_seconds
        self._collective_links = collective_links
        self._collective_is_send = collective_is_send
        self._collective_contention = collective_contention
        self.exposed: dict[str, float] = defaultdict(float)
        """Time that compute was stalled, by the name of the collective waited for."""
        self.contention_seconds = 0.0
        """Slowdown of compute that overlapped with collectives."""
        self.now = 0.0
        """Time that compute has reached; iterations that were not simulated are left out."""
        self._idle_from = [0.0] * LINK_COUNT  # when each set of links is free
        self._finish: dict[str, float] = {}  # end of each collective
        self._links: dict[str, int] = {}  # of each collective
        self._slowdowns: list[_Slowdown] = []  # by those queued and in flight

    def run(self, events: Iterable[Event]) -> None:
        """Simulate `events` in order."""
        for event in events:
            if isinstance(event, Work):
                self.work(event.segment)
            elif isinstance(event, Start):
                self.start(event)
            elif isinstance(event, Wait):
                # Not started yet: the first iteration of a loop whose collectives run ahead.
                self._wait(event.name, self._finish.get(event.name, self.now))
            else:
                self.repeat(event)

    def drain(self) -> None:
        """Wait for the collectives in flight at the end of the step, in the order they end."""
        under_way = [(finish, name) for name, finish in self._finish.items() if finish > self.now]
        for finish, name in sorted(under_way):
            self._wait(name, finish)

    def work(self, segment: int) -> None:
        """Compute a segment: slowed while collectives are in flight, then at full speed."""
        seconds, elapsed = self._segment_seconds[segment], 0.0
        if self._slowdowns:
            left = seconds
            for until, slow in self._slow_until():
                beside, speed = until - self.now - elapsed, 1.0 - slow
                if left < speed * beside:
                    elapsed, left = elapsed + left / speed, 0.0
                    break
                elapsed, left = elapsed + beside, left - speed * beside
            elapsed += left
            self.contention_seconds += elapsed - seconds
            seconds = elapsed
        self.now += seconds

    def _slow_until(self) -> Iterator[tuple[float, float]]:
        """Yield (until, fraction of speed that compute loses until then) in order of time from now
        on: the largest fraction of those running; collectives that wait for links cost none."""
        rest, at = self._slowdowns, self.now
        self._slowdowns = rest = [each for each in rest if each.end > at]
        while rest:
            # One plain loop: a quarter of the time of a prediction was spent here.
            slow, until = 0.0, math.inf
            for each in rest:
                change = each.end
                if each.begin > at:
                    change = each.begin
                elif each.fraction > slow:
                    slow = each.fraction
                if change < until:
                    until = change
            yield until, slow
            at = until
            rest = [each for each in rest if each.end > at]

    def start(self, event: Start) -> tuple[float, float]:
        """Queue a collective; returns when it starts and ends."""
        links = self._collective_links[event.collective]
        idle_from = self._idle_from[links]
        seconds = self._collective_seconds[event.collective]
        if self._collective_is_send[event.collective] and idle_from > self.now:
            begin = self.now
            end = begin + seconds + min(seconds, idle_from - begin)
            for name, finish in self._finish.items():
                if finish > begin and self._links[name] == links:
                    self._slow_down(name, seconds)
            for each in self._slowdowns:
                if each.links == links:
                    each.begin = self._beside_send(each.begin, seconds)
                    each.end = self._beside_send(each.end, seconds)
            self._idle_from[links] = max(self._beside_send(idle_from, seconds), end)
        else:
            begin = self.now if self.now > idle_from else idle_from
            self._idle_from[links] = end = begin + seconds
        self._finish[event.name], self._links[event.name] = end, links
        if fraction := self._collective_contention[event.collective]:
            self._slowdowns.append(_Slowdown(begin, end, fraction, links))
        if not event.is_async:
            self._wait(event.name, end)
        return begin, end

    def _slow_down(self, name: str, seconds: float) -> None:
        """Delay the end of a collective in flight, as a send of `seconds` on its own begins now."""
        self._finish[name] = self._beside_send(self._finish[name], seconds)

    def _beside_send(self, at: float, seconds: float) -> float:
        """Later time of an event due at `at`, if a send of `seconds` on its own begins now: speed
        is halved until the send has ended."""
        return at + max(0.0, min(seconds, at - self.now))

    def repeat(self, loop: Repeat) -> None:
        """Simulate iterations until the state of the streams repeats; the rest are equal."""
        for done in range(1, loop.trip_count + 1):
            remaining = self._remaining_seconds()
            exposed, contention = dict(self.exposed), self.contention_seconds
            began = self.now
            self.run(loop.body)
            allowed = _SAME_FRACTION * (self.now - began)
            if _are_equal(remaining, self._remaining_seconds(), allowed):
                rest = loop.trip_count - done  # only adds to the totals
                for name, seconds in self.exposed.items():
                    self.exposed[name] = seconds + rest * (seconds - exposed.get(name, 0.0))
                self.contention_seconds += rest * (self.contention_seconds - contention)
                return

    def _wait(self, name: str, finish: float) -> None:
        if finish > self.now:
            self.exposed[name] += finish - self.now
            self.now = finish

    def _remaining_seconds(self) -> dict[str, float]:
        """Seconds from `now` until each collective in flight ends: the whole state.

        Links are free when the last collective on them ends, and a queued one begins when another
        ends.
        """
        now = self.now
        self._finish = {name: finish for name, finish in self._finish.items() if finish > now}
        return {name: finish - now for name, finish in self._finish.items()}


def _are_equal(before: dict[str, float], after: dict[str, float], allowed: float) -> bool:
    return all(
        abs(before.get(name, 0.0) - after.get(name, 0.0)) <= allowed
        for name in before.keys() | after.keys()
    )
