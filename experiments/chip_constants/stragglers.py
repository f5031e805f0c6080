"""How much chips differ from step to step, from how all published series scale.

Run from the root of the repository, with the open ledger beside it:
    python experiments/chip_constants/stragglers.py

`fit.py` sees the fastest framework of each setting alone, and on few device counts; what a step
on more devices loses is told better by the ratios within every framework's own series. Prints
the errors of these ratios by `step_cv`, and that of the fastest framework of each setting, which
the others should not cost.
"""

from dataclasses import replace

from fit import LEDGER
from fits import FITS, IMAGES_AND_BERT

from scalejax.hardware import Chip, load_chip
from scalejax.validation import Skipped, compile_cases, read_ledger, validation, with_chips

FITTED = ("k80", "p100", "v100")
CANDIDATES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)


def main() -> None:
    """Print one line for each chip and candidate."""
    rows = [row for row in read_ledger(LEDGER) if row.family in IMAGES_AND_BERT]
    cases = compile_cases(rows)
    print("chip  step_cv  median   p90 of the errors of scaling ratios   median error, fastest")
    for name in FITTED:
        chips = FITS[name].chips
        of_chip = [
            case
            for case in cases
            if not isinstance(case, Skipped) and case.cluster.chip.name in chips
        ]
        for step_cv in CANDIDATES:
            varied = {chip: varying(load_chip(chip), step_cv) for chip in chips}
            whole = validation("", with_chips(of_chip, varied)).families[-1]
            print(
                f"{name:5} {step_cv:7} {whole.median_ratio_error:7.1%} {whole.p90_ratio_error:7.1%}"
                f" {whole.median_fastest_error:38.1%}"
            )


def varying(chip: Chip, step_cv: float) -> Chip:
    """`chip`, its steps varying by `step_cv`."""
    return replace(chip, attainable=replace(chip.attainable, step_cv=step_cv))


if __name__ == "__main__":
    main()
