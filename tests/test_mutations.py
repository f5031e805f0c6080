"""The table of mistakes that `mutations.py` makes fits the code, and its answers can be read."""

from mutations import MUTATIONS, ROOT, Result, inapplicable


def test_the_mutations_can_be_made():
    """Each changes one place of the code as it is, and names tests that exist; a result is read
    back as it was written."""
    first = MUTATIONS[0]
    result = Result(
        key=first.key,
        path=first.path,
        mistake=first.mistake,
        outcome="caught",
        by="tests/training/test_example_weights.py::test_it[a b]",
        is_whole_suite=False,
        seconds=2.5,
    )

    assert len({mutation.key for mutation in MUTATIONS}) >= 44
    assert inapplicable(ROOT) == []
    assert Result.from_line(result.to_line()) == result
