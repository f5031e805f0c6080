"""A small run to bench, and results that stand for measured ones."""

import json
from pathlib import Path

from scalejax.core import serialization
from scalejax.measure.bench import BenchFolder, BenchPlan, plan_bench
from scalejax.measure.bench.monitor import Usage
from scalejax.measure.bench.plan import Job
from scalejax.measure.bench.results import BenchResult
from scalejax.measure.bench.run import begin_bench
from scalejax.sweep import parse_grammar

RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 256
test_examples = 16
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.01
[train]
epochs = 1
"""


def planned(folder: Path, *words: str, repeats: int = 1) -> BenchPlan:
    """The plan of `-P`, `-V` and `-E` with their values, over the small run."""
    path = folder / "run.toml"
    path.write_text(RUN)
    typed: dict[str, list[str]] = {"-P": [], "-V": [], "-E": []}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        typed[flag].append(value)
    grammar = parse_grammar(typed["-P"], typed["-V"], typed["-E"])
    return plan_bench(path, grammar, repeats=repeats)


def result(global_batch: int, step_seconds: list[float]) -> BenchResult:
    """What a round of such steps leaves."""
    usage = Usage(
        process=0,
        seconds=0.5,
        cpu_percent=50.0,
        rss_bytes=2**20,
        pss_bytes=None,
        threads=3,
        device_bytes=None,
    )
    return BenchResult(
        platform="cpu",
        device_kind="cpu",
        versions="of a test",
        started="2026-11-22T00:00:00+00:00",
        load_average=0.0,
        compile_seconds=1.0,
        global_batch=global_batch,
        warmup_seconds=(1.0,),
        step_seconds=tuple(step_seconds),
        wait_seconds=(0.0,) * len(step_seconds),
        usage=(usage,),
    )


def finished(plan: BenchPlan, path: Path, seconds_of: dict[int, list[float]]) -> BenchFolder:
    """A folder in which all of `plan` is measured: steps by number of devices."""
    folder = BenchFolder(path=path)
    begin_bench(plan, folder)
    for repeat, each in plan.rounds:
        serialization.save(Job(settings=each.settings, run=each.run), folder.job(each.name))
        batch = each.run.split.global_batch
        measured = result(batch, seconds_of[each.settings.devices])
        serialization.save(measured, folder.result(each.name, repeat))
    return folder


def progress(folder: BenchFolder) -> dict[str, object]:
    """What the progress file says."""
    written = json.loads(folder.progress.read_text())
    return {name: value for name, value in written.items() if name not in ("kind", "version")}
