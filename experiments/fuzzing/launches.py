"""Cases of commands that write what others run: batch scripts and manifests; and of the grammar of
sweeps and benches. Of all of them words of the command line are wrong, or meant to harm."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import configs
import material
import mutations
from campaign import Case
from sense import CANARY, EXPECTED, MANIFEST

_HARMFUL = (
    f"$(: > {CANARY})", f"`: > {CANARY}`", f"x; : > {CANARY}", f"x\n: > {CANARY}\n",
    f"x && : > {CANARY} #", f"' ; : > {CANARY} ; '", f'" ; : > {CANARY} ; "', f"x | : > {CANARY}",
    f"x\r: > {CANARY}", f"x\u2028: > {CANARY}", f"x\x85: > {CANARY}", f"$'\\n: > {CANARY}'",
    "${HOME}", "$x", "x # y", "x --uid=0", "x y", "#x", "- a: b", "a: {b: c}", "*x", "&x", "!!x y",
    "%YAML 1.1", "---\nkind: Pod", "|\n  x", "null", "yes", "1e3", "0x1F", "2026-01-01", "a\tb",
    "-x", "--x", "=", "a=b", "x" * 300, "a/../../b", ".", "..",
)  # fmt: skip
"""Words that mean something to a shell, to sbatch, or to YAML."""


def _launch(draw: random.Random, into: Path, kept: Path) -> Case:
    """A batch script or a JobSet, printed or written, and what it must then run."""
    target = draw.choice(["slurm", "jobset"])
    words = {"slurm": {"folder": "runs/x", "partition": "gpu", "time": "2-12:00:00",
                       "slurm": "account=vision", "nodes": "2", "np": "4"},
             "jobset": {"folder": "runs/x", "image": "ghcr.io/me/scalejax:1", "volume": "claim",
                        "namespace": "me", "max-restarts": "2", "np": "4"}}[target]  # fmt: skip
    names = draw.sample([*words, "file", "data"], draw.choice([1, 1, 2]))
    run_file, text = "run.toml", material.RUN
    overrides: list[str] = []
    expected: list[str] = []
    for name in names:
        hostile = draw.choice(
            [*_HARMFUL, *_HARMFUL, *mutations.TEXTS, str(mutations.hostile(draw))]
        )
        hostile = hostile.replace("\x00", "")
        if name in ("file", "data"):  # whose name is hostile, and which is there
            hostile = hostile.replace("/", "_")[:80]
        if name == "file":
            run_file = f"{hostile}.toml"
        elif name == "data":
            text = material.PARQUET + material.DATA["numpy"]
            material.copied(kept / "arrays.npz", into / f"{hostile}.npz")
            material.copied(kept / "arrays.npz", into / "arrays.npz")
            value = json.dumps(f"{hostile}.npz", ensure_ascii=False)
            overrides = [f"--data.train={value}"]
            expected += [f"--data.train={json.dumps(f'{hostile}.npz')}"]
        elif name == "slurm" and draw.random() < 0.5:
            words[name] = f"account={hostile}"
        else:
            words[name] = hostile
    (into / run_file).write_text(text, encoding="utf-8")
    flags = [part for name, value in words.items() for part in (f"--{name}", value)]
    if target == "slurm":
        flags += ["--dry-run"]
        expected += ["train", str(into / run_file), "--folder", str(into / words["folder"])]
    else:
        flags += ["--target", "jobset", "--output", MANIFEST]
        expected += ["train", "/etc/scalejax/run.toml", "--folder"]
    values = {name: words[name] for name in ("image", "namespace") if name in words}
    (into / EXPECTED).write_text(
        json.dumps({"script": target, "words": expected, "values": values, "run_toml": text})
    )
    exact = {name.replace("-", "_") for name in names} | {run_file, *(f"{n}" for n in overrides)}
    exact |= {*names, "data.train"} if "data" in names else {*names}
    if "folder" in names:  # whose last part names the job
        exact |= {"name"}
    if {"nodes", "np"} & set(names):  # one of which must divide the other
        exact |= {"nodes", "np"}
    more = tuple(words[name] for name in names if name in words)
    return Case(
        ["launch", run_file, *flags, *overrides], tuple(exact), (*more, "launch", "unrecog")
    )


def _grammar(draw: random.Random, into: Path, kept: Path) -> Case:
    """The plan of a sweep, or of a bench."""
    (into / "run.toml").write_text(material.RUN)
    is_sweep = draw.random() < 0.7
    words: list[str] = []
    exact: set[str] = set()
    for _ in range(draw.choice([1, 1, 2, 3])):
        name = ".".join(draw.choice(configs.fields()))
        if draw.random() < 0.5:
            name = draw.choice(
                ["seed", "batch.global_batch", "train.epochs", "optimizer", "devices"]
            )
        if draw.random() < 0.1:
            name = mutations.misspelt(draw, name)
        value = draw.choice([[0, 1], 3, [mutations.hostile(draw)], mutations.hostile(draw),
                             [1, mutations.hostile(draw)], {"low": 1, "high": 2}])  # fmt: skip
        flag = draw.choice("VVPE")
        text = json.dumps(value, default=str)
        if flag == "E":
            other = ".".join(draw.choice(configs.fields()))
            document = {
                "condition": {name: value},
                "parameters": {other: 3},
                "cases": [{}, {name: 1}],
            }
            part = draw.choice([*document, "x"])
            document[part] = draw.choice([document.get(part), mutations.hostile(draw)])
            text = json.dumps(document, default=str)
            exact |= {other, other.split(".")[0], "extension", "condition", "cases", "parameters"}
        if draw.random() < 0.2:
            text = mutations.damaged_text(draw, text.encode()).decode("utf-8", "replace")
        text = text.replace("\x00", "")
        words += [f"-{flag}", text if flag == "E" else f"{name}={text}"]
        exact |= {name, name.split(".")[0], name.split(".")[-1], f"-{flag}", words[-1][:40]}
    (command, more) = ("sweep", ["--plan", "--cpu-devices", "8"])
    if not is_sweep:
        (command, more) = ("bench", ["--plan", "plan.json"])
    loose = ("variable", "parameter", "combinations", "benchmarks", "runs", "run.toml")
    return Case([command, "run.toml", *more, *words], tuple(exact - {""}), loose)


KINDS: dict[str, Callable[[random.Random, Path, Path], Case]] = {
    "launch": _launch,
    "grammar": _grammar,
}
"""What makes a case of each kind: draws it, writes its files into a folder, from kept material."""
