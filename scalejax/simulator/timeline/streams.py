"""The streams of a device, walked event by event: one computes, the others communicate.

Compute runs in order. A collective starts when compute has reached it and the collectives
before it are done; compute goes on, and stands still at the wait only for what is left. A
synchronous collective holds up compute from start to end. While a collective is under way,
compute loses a share of its speed; the communication stream loses none.

Collectives within nodes use other wires than those between nodes, and the two kinds run beside
each other: XLA deals asynchronous collectives out to as many streams as may be under way at once
(openxla/xla, service/gpu/execution_stream_assignment.cc; scalejax sets
xla_gpu_experimental_parallel_collective_overlap_limit), and frameworks have a stream for each
group. Those on the same wires run one after the other. A synchronous one runs on the stream of
compute, but on the same wires: it is charged after those under way there. Left out: what an
exchange between nodes takes of the links within them. Knows no hardware: seconds in, seconds out.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from scalejax.simulator.timeline.schedule import Event, Repeat, Start, Wait, Work

_SAME_SECONDS = 1e-12  # two iterations alike to a picosecond are alike


class Streams:
    """All streams at one moment: what was done, and what is under way."""

    def __init__(
        self,
        segment_seconds: Sequence[float],
        collective_seconds: Sequence[float],
        collective_links: Sequence[int],
        contention_fraction: float,
    ) -> None:
        """Start all streams idle at 0.

        Args:
            segment_seconds: time of each segment of compute on its own.
            collective_seconds: time of each exchange on its own.
            collective_links: 0 where it stays within nodes, 1 where it does not.
            contention_fraction: share of its speed that compute loses beside a collective.
        """
        self._segment_seconds = segment_seconds
        self._collective_seconds = collective_seconds
        self._collective_links = collective_links
        self._slow_speed = 1.0 - contention_fraction
        self.exposed: dict[str, float] = defaultdict(float)
        """Time that compute stood still, by the name of the collective waited for."""
        self.contention_seconds = 0.0
        """Time that compute lost because it ran beside collectives."""
        self.now = 0.0
        """Where compute stands; iterations that were not walked are left out."""
        self._idle_from = [0.0, 0.0]  # when the wires within nodes and between them are free
        self._finish: dict[str, float] = {}  # when each collective is done

    def run(self, events: Iterable[Event]) -> None:
        """Go through `events` in order."""
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
        """Wait for what is still under way at the end of the step, in the order it ends."""
        under_way = [(finish, name) for name, finish in self._finish.items() if finish > self.now]
        for finish, name in sorted(under_way):
            self._wait(name, finish)

    def work(self, segment: int) -> None:
        """Compute a segment: slowly while collectives are under way, then at full speed."""
        seconds = self._segment_seconds[segment]
        # No queue runs dry in between: what is in it was started before now.
        beside = max(self._idle_from) - self.now
        if self._slow_speed < 1 and beside > 0:
            done_beside = self._slow_speed * beside
            if seconds < done_beside:
                elapsed = seconds / self._slow_speed
            else:
                elapsed = beside + (seconds - done_beside)
            self.contention_seconds += elapsed - seconds
            seconds = elapsed
        self.now += seconds

    def start(self, event: Start) -> tuple[float, float]:
        """Queue a collective; returns when it starts and ends."""
        links = self._collective_links[event.collective]
        idle_from = self._idle_from[links]
        begin = self.now if self.now > idle_from else idle_from
        end = begin + self._collective_seconds[event.collective]
        self._idle_from[links] = self._finish[event.name] = end
        if not event.is_async:
            self._wait(event.name, end)
        return begin, end

    def repeat(self, loop: Repeat) -> None:
        """Walk iterations until one leaves the streams as it found them; the rest are alike."""
        for done in range(1, loop.trip_count + 1):
            lags = self._lags()
            exposed, contention = dict(self.exposed), self.contention_seconds
            self.run(loop.body)
            if _alike(lags, self._lags()):
                rest = loop.trip_count - done  # adds to the totals; the streams see lags alone
                for name, seconds in self.exposed.items():
                    self.exposed[name] = seconds + rest * (seconds - exposed.get(name, 0.0))
                self.contention_seconds += rest * (self.contention_seconds - contention)
                return

    def _wait(self, name: str, finish: float) -> None:
        if finish > self.now:
            self.exposed[name] += finish - self.now
            self.now = finish

    def _lags(self) -> dict[str, float]:
        """How long after compute each collective under way will end: all that the future sees.

        Wires are free when the last exchange on them ends.
        """
        return {
            name: finish - self.now for name, finish in self._finish.items() if finish > self.now
        }


def _alike(before: dict[str, float], after: dict[str, float]) -> bool:
    return all(
        abs(before.get(name, 0.0) - after.get(name, 0.0)) < _SAME_SECONDS
        for name in before.keys() | after.keys()
    )
