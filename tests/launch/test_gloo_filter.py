"""What the library that connects processes prints is held back, torn or whole, and nothing else."""

import pytest

from scalejax.launch.local import GlooFilter

WHOLE = "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
END = WHOLE.removeprefix("[Gloo] Rank ")


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ([WHOLE, "step 1", "3"], ["step 1", "3"]),
        ([f"{WHOLE}3", "3", ""], ["3", ""]),
        ([f"[Gloo] Rank {WHOLE}", END, "3"], ["3"]),
        ([f"[Gloo] Rank {WHOLE}", "step 1", "3", "3"], ["step 1", "3"]),
        ([f"{WHOLE[:-1]}{WHOLE}3", "", "", "3"], ["", "3"]),
        ([f"[Gloo] Rank 1{WHOLE}", " is connected to 3 peer ranks. ", "3"], ["3"]),
    ],
    ids=["whole", "digits", "torn early", "between others", "torn late", "torn in three"],
)
def test_only_what_gloo_says_is_held_back(said, heard):
    """Lines of several threads, each of which ends once; numbers of the user's own are heard."""
    gloo = GlooFilter()

    assert [line for line in said if not gloo.holds_back(f"{line}\n".encode())] == heard
