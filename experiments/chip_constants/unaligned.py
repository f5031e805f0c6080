"""How slow an A100 is at products that its matrix units cannot load, from BLOOM's trials.

Run from the root of the repository, with the open ledger beside it:
    python experiments/chip_constants/unaligned.py

Heads of 108, 150, 225 and 450 elements are no multiples of 8. Prints the mean signed error of the
rows of each width by `unaligned_fraction` (None: as if alignment did not matter), then, for each
width, its error with the fraction that suits the others best.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from scalejax.hardware import Chip, load_chip
from scalejax.validation import CompiledCase, compile_cases, read_ledger, validation, with_chips

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "step_times.csv"
CHIPS = ("a100-80gb", "a100-40gb")
CANDIDATES = (None, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75)
_ALIGNED = 8


def main() -> None:
    """Print one line for each candidate, and one for each width left out."""
    if not LEDGER.is_file():
        print(f"{LEDGER} is not there: the published step times are not part of the repository.")
        return
    rows = [row for row in read_ledger(LEDGER) if row.family == "bloom"]
    cases = [
        case
        for case in compile_cases(rows, compiles=False)
        if isinstance(case, CompiledCase) and _width(case) % _ALIGNED
    ]
    widths = sorted({_width(case) for case in cases})
    errors = {each: _errors(cases, each) for each in CANDIDATES}
    print("fraction " + " ".join(f"{width:>8}" for width in widths))
    for candidate, by_width in errors.items():
        print(f"{candidate!s:8} " + " ".join(f"{fmean(by_width[each]):+8.1%}" for each in widths))
    for width in widths:
        best = min(CANDIDATES, key=lambda each: _median_size(errors[each], leaving_out=width))
        left_out = fmean(map(abs, errors[best][width]))
        print(f"{width} left out: {best} suits the others, mean error {left_out:.1%}")


def _errors(cases: list[CompiledCase], fraction: float | None) -> dict[int, list[float]]:
    """Signed errors of the rows of each width of a head."""
    chips = {name: _with(load_chip(name), fraction) for name in CHIPS}
    results = validation("", with_chips(cases, chips)).rows
    errors: dict[int, list[float]] = {}
    for case, result in zip(cases, results, strict=True):
        if result.error is not None:
            errors.setdefault(_width(case), []).append(result.error)
    return errors


def _median_size(errors: dict[int, list[float]], *, leaving_out: int) -> float:
    """Median absolute error of all widths but one."""
    kept = [each for width, many in errors.items() if width != leaving_out for each in many]
    return median(map(abs, kept))


def _width(case: CompiledCase) -> int:
    return (case.row.model.hidden or 0) // (case.row.model.heads or 1)


def _with(chip: Chip, fraction: float | None) -> Chip:
    return replace(chip, attainable=replace(chip.attainable, unaligned_fraction=fraction))


if __name__ == "__main__":
    main()
