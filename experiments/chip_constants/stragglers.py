"""How much V100s differ from step to step, from how all published series scale.

Run from the root of the repository, with the open ledger beside it:
    python experiments/chip_constants/stragglers.py

`fit.py` sees the fastest framework of each setting alone, and on few device counts; what a step
on more devices loses is told better by the ratios within every framework's own series. Prints
the error of these ratios by `step_cv`.
"""

from dataclasses import replace

from fit import LEDGER
from fits import IMAGES_AND_BERT

from scalejax.hardware import Chip, load_chip
from scalejax.validation import compile_cases, read_ledger, validation, with_chips

CHIPS = ("v100", "v100-32gb", "v100-sxm3-32gb")
CANDIDATES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)


def main() -> None:
    """Print one line for each candidate."""
    rows = [row for row in read_ledger(LEDGER) if row.family in IMAGES_AND_BERT]
    cases = compile_cases(rows)
    print("step_cv  median   p90 of the errors of all scaling ratios")
    for step_cv in CANDIDATES:
        chips = {name: varying(load_chip(name), step_cv) for name in CHIPS}
        whole = validation("", with_chips(cases, chips)).families[-1]
        print(f"{step_cv:7} {whole.median_ratio_error:7.1%} {whole.p90_ratio_error:7.1%}")


def varying(chip: Chip, step_cv: float) -> Chip:
    """`chip`, its steps varying by `step_cv`."""
    return replace(chip, attainable=replace(chip.attainable, step_cv=step_cv))


if __name__ == "__main__":
    main()
