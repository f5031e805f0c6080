"""Cases of files that scalejax wrote and reads again: checkpoints and their manifests, records,
sweeps, predictions, programs, traces, benches, event logs, facts and accuracies; all damaged."""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import damage
import material
import mutations
import pyarrow as pa
import pyarrow.parquet as pq
from campaign import Case
from sense import EXPECTED, TOLD, ending

from scalejax.hardware.catalogue import CATALOGUE

_RESUME: tuple[str, ...] = (
    "train",
    "run.toml",
    "--folder",
    "run",
    "--resume",
    "--train.checkpoint_every_steps=3",
)
_ON = "--train.epochs=3"
"""Two epochs are trained; a resumed run goes on with the third."""
_OF_SWEEP = (".json", ".jsonl", ".parquet", ".toml")


def _checkpoint(draw: random.Random, into: Path, kept: Path) -> Case:
    run = material.copied(kept / "run", into)
    steps = sorted((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    where = steps[-1] if draw.random() < 0.9 else run / "checkpoints"  # the one it resumes from
    files = sorted(p for p in where.rglob("*") if p.is_file())
    victim = draw.choice(files)
    kind = draw.randrange(10)
    if kind <= 5:
        victim.write_bytes(mutations.damaged_bytes(draw, victim.read_bytes()))
    elif kind == 6:
        victim.unlink()
    elif kind == 7:
        victim.unlink()
        draw.choice(
            [
                lambda: victim.mkdir(),
                lambda: victim.symlink_to("/dev/null"),
                lambda: victim.symlink_to(victim.name),
                lambda: victim.write_bytes(b""),
            ]
        )()
    elif kind == 8:
        new = draw.choice(["abc", "-1", "9" * 20, "7", "12.tmp", "名", "1e3", "00000000000000008"])
        draw.choice(steps).rename(run / "checkpoints" / new)
    else:
        shutil.rmtree(draw.choice(sorted({p.parent for p in files})))
    (into / "run.toml").write_text(material.RUN)
    material.copied(kept / "went_on.json", into / EXPECTED)
    return Case([*_RESUME, _ON], ("checkpoints",), ("run",))


def _manifest(draw: random.Random, into: Path, kept: Path) -> Case:
    """Another number or word in the newest manifest, with the checksum of what it then says: what
    no disk does, but a program may."""
    run = material.copied(kept / "run", into)
    newest = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    path = newest / "manifest.json"
    document = json.loads(path.read_text())
    before = document["manifest"]
    after = mutations.changed(
        draw, before, tuple(each for each in mutations.leaves(before) if each)
    )
    document["manifest"] = after
    text = json.dumps(after, sort_keys=True, separators=(",", ":"), default=str)
    document["sha256"] = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    path.write_bytes(json.dumps(document, default=str).encode("utf-8", "replace"))
    (into / "run.toml").write_text(material.RUN)
    material.copied(kept / "went_on.json", into / EXPECTED)
    return Case([*_RESUME, _ON], ("checkpoints",), ("run",))


def _record(draw: random.Random, into: Path, kept: Path) -> Case:
    run = material.copied(kept / "run", into)
    (into / "run.toml").write_text(material.RUN)
    name = draw.choice(
        ["measurements.jsonl"] * 4 + ["prediction.json"] * 2 + ["run.toml"] * 2 + ["program.json"]
    )
    if name == "run.toml":
        tree = tomllib.loads((run / name).read_text())
        text, exact, loose = mutations.damaged_toml(draw, tree)
        (run / name).write_bytes(text)
        names = (*exact, *loose, name)
    else:
        names = mutations.damaged_json(draw, run / name)
    if draw.random() < 0.1:
        (run / name).unlink()
    words = ["report", "run"]
    if draw.random() < 0.15 and name != "program.json":
        words = list(_RESUME)
        material.copied(kept / "ended.json", into / EXPECTED)
    return Case(words, names, (name, "run"))


def _sweep(draw: random.Random, into: Path, kept: Path) -> Case:
    sweep = material.copied(kept / "sweep", into)
    (into / "run.toml").write_text(material.RUN)
    files = [p for p in sweep.rglob("*") if p.is_file() and p.suffix in _OF_SWEEP]
    files = [p for p in files if "checkpoints" not in p.parts and "weights" not in p.parts]
    victim = draw.choice([sweep / "sweep.json", *sorted(files)])
    if victim.suffix in (".json", ".jsonl"):
        names = mutations.damaged_json(draw, victim)
    else:
        victim.write_bytes(mutations.damaged_bytes(draw, victim.read_bytes()))
        names = (victim.name,)
    words = ["report", "sweep"]
    if victim.suffix == ".parquet" and victim.name == "results.parquet":
        words = ["plan", "run.toml", "--clusters", "dgx-h100", "--devices", "8"]
        words += ["--convergence", "sweep/results.parquet"]
    return Case(words, names, (victim.name, "sweep"))


def _prediction(draw: random.Random, into: Path, kept: Path) -> Case:
    path = material.copied(kept / draw.choice(["scaling.json", "plan.json", "one.json"]), into)
    return Case(["report", path.name], mutations.damaged_json(draw, path), (path.name,))


def _cache(draw: random.Random, into: Path, kept: Path) -> Case:
    from scalejax.core.cache import user_folder

    (into / "run.toml").write_text(material.RUN)
    for path in sorted(user_folder().glob("*.json.gz")):
        path.write_bytes(mutations.damaged_bytes(draw, path.read_bytes()))
        os.utime(path)
    words = ["predict", "run.toml", "--cluster", "dgx-h100", "--devices", "8"]
    return Case(words, ("cache",))


def _program(draw: random.Random, into: Path, kept: Path) -> Case:
    """A program that `compare` reads, beside the one that it was."""
    material.copied(kept / "before.json", into)
    path = material.copied(kept / "before.json", into / "program.json")
    names = mutations.damaged_json(draw, path)
    words = (
        ["before.json", "program.json"] if draw.random() < 0.5 else ["program.json", "before.json"]
    )
    more = ["--cluster", "dgx-h100", "--json", TOLD]
    return Case(["compare", *words, *more], names, ("program.json", "before.json"))


def _trace(draw: random.Random, into: Path, kept: Path) -> Case:
    """A profile, in the folder of its run or alone."""
    material.copied(kept / "run", into)
    (into / "run.toml").write_text(material.RUN)
    (into / "cluster.toml").write_text(_cluster_of_cpus())
    path = next((into / "run" / "traces").rglob("*.xplane.pb"))
    data = path.read_bytes()
    sort = draw.randrange(10)
    if sort <= 6:
        for _ in range(draw.choice([1, 1, 3, 20])):
            data = mutations.damaged_message(draw, data)
        path.write_bytes(data)
    elif sort <= 8:
        path.write_bytes(mutations.damaged_bytes(draw, data))
    else:
        path.write_bytes(draw.choice([b"", b"\n" * 9, b"{}", json.dumps([1] * 99).encode()]))
    where = draw.choice(["run", "run/traces", str(path.relative_to(into))])
    words = ["explain", "run.toml", "--cluster", "cluster.toml", "--devices", "8", "--json", TOLD]
    return Case([*words, "--trace", where], ("trace", path.name), ("devices", "run"))


def _cluster_of_cpus() -> str:
    """A cluster of a chip that says that it is a CPU, as the trace does."""
    cluster = tomllib.loads((CATALOGUE / "clusters" / "dgx-h100.toml").read_text())
    chip = tomllib.loads((CATALOGUE / "chips" / f"{cluster['chip']}.toml").read_text())
    cluster["chip"] = {k: v for k, v in chip.items() if k != "cuda"} | {"name": "cpu"}
    return mutations.toml(cluster)


def _facts(draw: random.Random, into: Path, kept: Path) -> Case:
    (into / "run.toml").write_text(material.RUN)
    path = material.copied(kept / "run" / "facts.json", into)
    names = mutations.damaged_json(draw, path)
    words = ["predict", "run.toml", "--cluster", "dgx-h100", "--devices", "8", "--json", TOLD]
    return Case([*words, "--facts", path.name], names, (path.name, "facts", "data"))


def _bench(draw: random.Random, into: Path, kept: Path) -> Case:
    bench = material.copied(kept / "bench", into)
    (into / "run.toml").write_text(material.RUN)
    (into / "cluster.toml").write_text(_cluster_of_cpus())
    names = ["bench.json", "results.json", "job.json", "program.json", "result-0.json"]
    victim = draw.choice(sorted(path for path in bench.rglob("*.json") if path.name in names))
    exact = mutations.damaged_json(draw, victim)
    words = draw.choice(
        [
            ["bench", "run.toml", *material.BENCH, "--report", "--folder", "bench"],
            ["calibrate", "--from", "bench", "--cluster", "cluster.toml", "--output", "."],
            ["report", "bench"],
        ]
    )
    return Case(words, exact, (victim.name, victim.parent.name, "bench"))


def _events(draw: random.Random, into: Path, kept: Path) -> Case:
    folder = material.copied(kept / "emulated", into)
    material.copied(kept / "emulated.toml", into)
    victim = folder / draw.choice(["events.parquet"] * 3 + ["emulation.json", "measurements.jsonl"])
    exact: tuple[str, ...] = (victim.name,)
    if victim.suffix != ".parquet":
        exact = mutations.damaged_json(draw, victim)
    elif draw.random() < 0.4:
        victim.write_bytes(mutations.damaged_bytes(draw, victim.read_bytes()))
    else:
        table = pq.read_table(victim)
        name = draw.choice(table.column_names)
        values = table.column(name).to_pylist()
        values[draw.randrange(len(values))] = mutations.hostile(draw)
        at = table.column_names.index(name)
        with contextlib.suppress(pa.ArrowException, OverflowError):  # a value that no column holds
            column = pa.array(values, table.schema.field(name).type)
            pq.write_table(table.set_column(at, name, column), victim)
        exact = (name, victim.name)
    words = ["emulate", "emulated.toml", "--replay", "emulated"]
    if victim.suffix != ".parquet":
        words = ["report", "emulated"]
    return Case(words, exact, (victim.name, "emulated"))


def _accuracy(draw: random.Random, into: Path, kept: Path) -> Case:
    material.copied(kept / "ledger.csv", into)
    path = material.copied(kept / "accuracy.json", into)
    exact = mutations.damaged_json(draw, path)
    return Case(["validate", "ledger.csv", "--compare", path.name], exact, (path.name,))


KINDS: dict[str, Callable[[random.Random, Path, Path], Case]] = {
    "checkpoint": _checkpoint,
    "manifest": _manifest,
    "record": _record,
    "sweep": _sweep,
    "prediction": _prediction,
    "cache": _cache,
    "program": _program,
    "trace": _trace,
    "facts": _facts,
    "bench": _bench,
    "events": _events,
    "accuracy": _accuracy,
}
"""What makes a case of each kind: draws it, writes its files into a folder, from kept material."""


def make_in_this_process(folder: Path) -> None:
    """Predictions, a plan and accuracies, made with the compiler that stands in; and how the run of
    `folder` goes on where nothing is wrong with it, on as many devices as cases have."""
    from scalejax.cli.main import main

    def run(*words: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if main(list(words)):
                raise RuntimeError(f"scalejax {' '.join(words)} failed")

    os.chdir(folder)
    run(
        "predict",
        "run.toml",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8,16",
        "--json",
        "scaling.json",
    )
    Path("points.json").write_text(json.dumps(damage.POINTS))
    run("plan", "run.toml", "--clusters", "dgx-h100", "--devices", "8,16",
        "--convergence", "points.json", "--json", "plan.json")  # fmt: skip
    shutil.copy("run/prediction.json", "one.json")
    program = json.loads(Path("run/program.json").read_text())
    Path("before.json").write_text(json.dumps(program | {"backend": "cuda", "target": "sm_90"}))
    Path("ledger.csv").write_text(damage.ledger_text())
    run("validate", "ledger.csv", "--accuracy", "accuracy.json")
    whole = Path("whole")
    for words, name in ((_RESUME, "ended.json"), ((*_RESUME, _ON), "went_on.json")):
        whole.mkdir()
        shutil.copytree("run", whole / "run")
        shutil.copy("run.toml", whole)
        os.chdir(whole)
        run(*words)
        os.chdir(folder)
        Path(name).write_text(json.dumps(ending(whole / "run")))
        shutil.rmtree(whole)
