"""The strategies of a search that fit, costed in one process or in several side by side.

Which process costs a group changes nothing of what comes out, nor of its order. Knows no ranking,
and nothing of who asks.
"""

import gc
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

from scalejax.core.environment import end_with_caller
from scalejax.core.errors import ScalejaxError
from scalejax.hardware import Cluster
from scalejax.planning.search.costs import Candidate, StrategyCosts, workspace_bytes
from scalejax.planning.search.space import Group
from scalejax.simulator.transformer import Strategy, TransformerShape, held_by_stage

_PARTS_PER_PROCESS = 25
"""Each of 100 groups, which take 20 to 60 ms for GPT-3: a process, which takes 0.6 s to start, is
to save more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every group of strategies."""

    shape: TransformerShape
    """The network."""
    cluster: Cluster
    """The devices."""
    global_batch: int
    """Samples of an update."""
    moments: Literal[0, 1, 2]
    """Arrays like the parameters that the optimizer keeps."""


def candidates(
    question: Question, parts: Sequence[Sequence[Group]], processes: int
) -> Generator[list[Candidate]]:
    """What fits of each part, in order.

    Args:
        question: what is asked.
        parts: groups of like strategies; those that are close share most.
        processes: at most so many; as few as the parts are worth.

    Raises:
        DoesNotFit: if a collective spans nodes that no network joins.
        ScalejaxError: if the system ends a process.
    """
    processes = min(processes, len(parts) // _PARTS_PER_PROCESS)
    if processes > 1:
        yield from _side_by_side(question, parts, processes)
        return
    costing = _Costing(question)
    for part in parts:
        yield costing.candidates(part)


def _side_by_side(
    question: Question, parts: Sequence[Sequence[Group]], processes: int
) -> Iterator[list[Candidate]]:
    pool = ProcessPoolExecutor(
        # Not forked: a caller has threads, of JAX for one.
        processes,
        get_context("spawn"),
        initializer=_begin,
        initargs=(question, os.getpid()),
    )
    answers: list[Future[list[Candidate]]] = []
    try:
        with _interrupts_held():
            answers = [pool.submit(_answer, part) for part in parts]
        for answer in answers:
            yield answer.result()
    except BrokenProcessPool as error:
        if answers and answers[0].exception() is error:
            raise ScalejaxError(
                "No process of the search answered: a script that searches with several needs "
                'if __name__ == "__main__": around what it does; or memory ran out. '
                "processes=1 needs neither."
            ) from error
        raise ScalejaxError(
            "A process of the search was ended, most likely because memory ran out."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: their caller alone is to hear it, and ends them.

    What this thread blocks is blocked for good in processes that it starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Costing:
    """One process's answers to a question; what strategies share is kept from part to part."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._costs = StrategyCosts(question.shape, question.cluster)

    def candidates(self, groups: Sequence[Group]) -> list[Candidate]:
        """What fits of `groups`, and what it takes."""
        found: list[Candidate] = []
        for group in groups:
            if fits := _fitting(self._question, group):
                found += self._costs.candidates(fits)
        return found


def _fitting(question: Question, group: Group) -> list[Strategy]:
    """Those of a group that fit; most need no more than a look at what they must hold."""
    shape, chip, moments = question.shape, question.cluster.chip, question.moments
    free = chip.memory_bytes - chip.runtime_reserve_bytes - workspace_bytes(chip)
    layout = group.layout
    least = shape.layers * sum(shape.matrices) / layout.pipeline / layout.tensor / layout.fsdp
    if 4 * least * (1 + moments / layout.data) > free:
        return []
    ones = [group.strategy(question.global_batch, moments, stage, 1) for stage in group.zero_stages]
    return [
        group.strategy(question.global_batch, moments, zero_stage, chunks)
        for zero_stage, held in held_by_stage(shape, ones).items()
        for chunks in group.chunk_counts
        if held.batch_bytes
        + held.state_bytes(zero_stage)
        + held.temporary_bytes(zero_stage, chunks)
        <= free
    ]


_costing: _Costing
"""Of a process that was started for a search."""


def _begin(question: Question, caller: int) -> None:
    """Get ready to answer `question` of process `caller`, in a process of its own."""
    global _costing
    end_with_caller(caller)
    gc.disable()
    _costing = _Costing(question)


def _answer(groups: Sequence[Group]) -> list[Candidate]:
    """Answer it for some groups, in that process."""
    return _costing.candidates(groups)
