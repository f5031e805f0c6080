"""How fast do groups in part of a node leave it on vTrain's cluster?

Run from the root of the repository: python experiments/open_ledger/cards.py

Groups that hold 2 or 4 of the 8 devices of a node exchange their gradients over the network; all
of a node, or one, do so too. Predicts vTrain's multi-node rows with such groups held to 4, 2, 1 and
half of its 4 cards of 200 Gb/s. Printed are the mean errors of the rows of each network and tensor
axis, then that of each network with what suits the other networks best.
"""

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from summarize import LEDGER

from scalejax.validation import CompiledCase, compile_cases, evaluate, read_ledger

CARD_BYTES_PER_SECOND = 25e9
CARDS = (4.0, 2.0, 1.0, 0.5)

Key = tuple[int | None, int | None]
"""Width of a network, and devices along the tensor axis."""


def main() -> None:
    """Print a line for each choice, and one for each network left out."""
    rows = [row for row in read_ledger(LEDGER) if row.family == "vtrain_multi"]
    cases = [case for case in compile_cases(rows, compiles=False) if isinstance(case, CompiledCase)]
    errors = {cards: _errors(cases, cards) for cards in CARDS}
    for cards, by_key in errors.items():
        every = [error for each in by_key.values() for error in each]
        groups = ", ".join(
            f"{hidden} t{tensor} {fmean(each):+.1%}"
            for (hidden, tensor), each in sorted(by_key.items())
            if tensor in (2, 4)
        )
        print(f"{cards} cards: mean error {fmean(map(abs, every)):.1%}; {groups}")
    for hidden in sorted({key[0] for key in errors[CARDS[0]]}, key=str):
        best = min(CARDS, key=lambda cards: _mean_error(errors[cards], hidden, is_left_out=True))
        before, after = (
            _mean_error(errors[cards], hidden, is_left_out=False) for cards in (CARDS[0], best)
        )
        print(f"{hidden} left out: {best} suits the others, {before:.1%} with all -> {after:.1%}")


def _errors(cases: list[CompiledCase], cards: float) -> dict[Key, list[float]]:
    """Signed errors with so many cards for groups in part of a node."""
    clusters = {id(case.cluster): case.cluster for case in cases}
    for key, cluster in clusters.items():
        if cluster.network is not None:
            rate = cards * CARD_BYTES_PER_SECOND
            network = replace(cluster.network, partial_group_bytes_per_second=rate)
            clusters[key] = replace(cluster, network=network)
    changed = [replace(case, cluster=clusters[id(case.cluster)]) for case in cases]
    errors: dict[Key, list[float]] = defaultdict(list)
    for case, result in zip(cases, evaluate(changed), strict=True):
        if result.error is not None:
            errors[case.row.model.hidden, case.row.spread.tensor].append(result.error)
    return errors


def _mean_error(errors: dict[Key, list[float]], hidden: int | None, *, is_left_out: bool) -> float:
    """Of one network, or of all others."""
    kept = [
        each for key, many in errors.items() if (key[0] == hidden) != is_left_out for each in many
    ]
    return fmean(map(abs, kept))


if __name__ == "__main__":
    main()
