"""Predict published steps by what was fitted without them: families, chips and frameworks left out.

Run from the root of the repository:
    python experiments/left_out/run.py [--kind KIND] [--framework NAME] [--folder FOLDER] [--fresh]
    python experiments/left_out/run.py --kind model --framework maxtext-2025

Each family of rows, each chip of each framework, and each framework as a whole is left out in turn;
what is left is fitted anew (`fit.py`), and predicts it. Results of each turn are kept in FOLDER, so
that a run goes on where it was stopped. Prints errors and how many of the rows are in the band.
"""

import argparse
import json
import math
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import numpy as np
from fit import (
    Z_OF_P90,
    Setting,
    fit_framework,
    fit_pooled,
    log_errors,
    read_settings,
    seconds,
    typical,
)

from scalejax.core.cache import user_folder
from scalejax.simulator.frameworks import known_framework
from scalejax.simulator.frameworks.software import Rates, software_by_name

KINDS = ("family", "chip", "framework")
"""What is left out; each model too if asked."""


def main(arguments: Sequence[str]) -> int:
    """Leave everything out in turn, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(user_folder() or ".") / "left_out")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--kind", choices=(*KINDS, "model"), help="leave out only these, one at a time"
    )
    parser.add_argument("--framework", help="leave out only of this one")
    parser.add_argument("--fresh", action="store_true", help="forget turns of earlier runs")
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    kept = asked.folder / "turns.jsonl"
    if asked.fresh:
        kept.unlink(missing_ok=True)
    done = {}
    if kept.is_file():
        for line in kept.read_text().splitlines():
            turn = json.loads(line)
            done[turn["kind"], turn["framework"], turn["name"]] = turn
    settings = read_settings()
    kinds = KINDS if asked.kind is None else (asked.kind,)
    turns = [turn for turn in turns_of(settings, kinds) if asked.framework in (None, turn[1])]
    _TURNS.extend(turns)
    missing = [index for index, turn in enumerate(turns) if turn[:3] not in done]
    # The largest first, so that the last of them does not end alone.
    missing.sort(key=lambda index: -len(turns[index][4]))
    context = multiprocessing.get_context("fork")
    if any(turns[index][0] == "framework" for index in missing):
        _SETTINGS.update(by_framework(settings))
        names = sorted(_SETTINGS, key=lambda name: -len(_SETTINGS[name]))
        with context.Pool(asked.processes) as pool:
            for number, (name, rates) in enumerate(pool.imap_unordered(_pooled, names), 1):
                _POOLED[name] = rates
                _say(f"{number} of {len(names)} frameworks fitted on all their chips: {name}")
    with context.Pool(asked.processes) as pool, kept.open("a") as file:
        for number, (index, logs) in enumerate(pool.imap_unordered(_logs_of, missing), 1):
            kind, framework, name, held, _ = turns[index]
            turn = {
                "kind": kind,
                "framework": framework,
                "name": name,
                "cases": [each.case.row.case_id for each in held],
                "families": [each.family for each in held],
                "kinds": [each.case.row.kind for each in held],
                "chips": [each.chip for each in held],
                "log_errors": [round(log, 4) for log in logs],
            }
            done[kind, framework, name] = turn
            print(json.dumps(turn), file=file, flush=True)
            _say(f"{number} of {len(missing)}: {kind} {framework} {name}")
    print(file=sys.stderr)
    chips_of_rest = {turn[:3]: {each.chip for each in turn[4]} for turn in turns}
    found = [done[turn[:3]] for turn in turns]
    for kind in kinds:
        show(kind, found)
    if "family" in kinds:
        show_by_chip(found, chips_of_rest)
    return 0


def _say(progress: str) -> None:
    print(f"\r{progress[:78]:78}", end="", file=sys.stderr)


_TURNS: list[tuple[str, str, str, list[Setting], list[Setting]]] = []
"""All turns, which forked processes find here."""


def _logs_of(index: int) -> tuple[int, list[float]]:
    kind, _, _, held, rest = _TURNS[index]
    return index, errors_without(kind, held, rest).tolist()


def turns_of(settings: Sequence[Setting], kinds: Sequence[str]):
    """(kind, framework, what is left out, its settings, what is fitted) of every turn."""
    for framework, own in sorted(by_framework(settings).items()):
        for kind in kinds:
            if kind == "framework":
                others = [each for each in settings if each.framework != framework]
                yield kind, framework, framework, own, others
                continue
            names = sorted({_part(kind, each) for each in own})
            if len(names) == 1:
                continue
            for name in names:
                held = [each for each in own if _part(kind, each) == name]
                rest = [each for each in own if _part(kind, each) != name]
                yield kind, framework, name, held, rest


def _part(kind: str, setting: Setting) -> str:
    """Family, chip or model of a setting."""
    if kind == "model":
        return setting.case.row.model.model
    return setting.family if kind == "family" else setting.chip


def errors_without(kind: str, held: Sequence[Setting], rest: Sequence[Setting]) -> np.ndarray:
    """Log errors of `held` by what is fitted to `rest`, shape (held,)."""
    if kind == "framework":
        others = {each.framework for each in rest}
        return log_errors(held, typical([_POOLED[name] for name in sorted(others)]))
    found = fit_framework(rest)
    return np.array(
        [math.log(seconds(each, found.rates(each.chip)) / each.seconds) for each in held]
    )


def by_framework(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """The settings of each framework."""
    found: dict[str, list[Setting]] = defaultdict(list)
    for each in settings:
        found[each.framework].append(each)
    return found


_SETTINGS: dict[str, list[Setting]] = {}
_POOLED: dict[str, Rates] = {}
"""By framework: its settings and its rates on any chip, of which those of a framework that nobody
measured are the medians; forked processes find both here."""


def _pooled(framework: str) -> tuple[str, Rates]:
    return framework, fit_pooled(_SETTINGS[framework])


def show(kind: str, turns: Sequence[dict]) -> None:
    """Print errors by turn of a kind, and the share of rows in the bands that scalejax ships."""
    print(f"\nleft out: {kind}\n")
    print("| framework | left out | settings | mean | median | bias | in band |")
    print("|---|---|---:|---:|---:|---:|---:|")
    means, shares = [], []
    for turn in turns:
        if turn["kind"] != kind:
            continue
        sizes, inside = np.abs(np.expm1(turn["log_errors"])), np.mean(list(_in_band(turn)))
        means.append(sizes.mean())
        shares.append(inside)
        bias = math.expm1(float(np.median(turn["log_errors"])))
        print(
            f"| {turn['framework']} | {turn['name']} | {len(sizes)} | {sizes.mean():.1%} | "
            f"{np.median(sizes):.1%} | {bias:+.1%} | {inside:.0%} |"
        )
    print(
        f"\nEach counting once: {np.mean(means):.1%} in the mean, {np.median(means):.1%} in "
        f"the median; {np.mean(shares):.0%} in the band."
    )


def show_by_chip(
    turns: Sequence[dict], chips_of_rest: Mapping[tuple[str, str, str], Set[str]]
) -> None:
    """Print errors of families left out, apart for rows on chips that the framework is still fitted
    on without them, and on others: what is asked of a known pair and of a known framework alone."""
    means: dict[bool, list[float]] = {True: [], False: []}
    for turn in turns:
        if turn["kind"] != "family":
            continue
        rest = chips_of_rest[turn["kind"], turn["framework"], turn["name"]]
        sizes = np.abs(np.expm1(turn["log_errors"]))
        is_known = np.array([chip in rest for chip in turn["chips"]])
        for known, apart in means.items():
            if (is_known == known).any():
                apart.append(float(sizes[is_known == known].mean()))
    for known, where in ((True, "that are still fitted"), (False, "that nothing else is of")):
        print(
            f"Families on chips {where}: {np.mean(means[known]):.2%} in the mean, "
            f"{np.median(means[known]):.1%} in the median, of {len(means[known])}."
        )


def _in_band(turn: dict) -> Iterator[bool]:
    """Whether each row of a turn is between p10 and p90 of the band that it would have."""
    framework = known_framework("unknown" if turn["kind"] == "framework" else turn["framework"])
    software = framework.software if framework else software_by_name()["unknown"]
    for log, chip, what in zip(turn["log_errors"], turn["chips"], turn["kinds"], strict=True):
        own = software.rows if turn["kind"] != "chip" else {}
        seen = replace(software, rows=own) if own is not software.rows else software
        deviation = seen.deviation_on(chip, has_experts=what == "expert") or 0.0
        yield abs(log) <= Z_OF_P90 * deviation


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
