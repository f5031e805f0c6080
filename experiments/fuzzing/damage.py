"""Cases of files that people write: ledgers, hardware, data, rates, points, of which something is
wrong."""

import csv
import io
import json
import lzma
import random
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import material
import mutations
from campaign import Case
from sense import TOLD

from scalejax.hardware.catalogue import CATALOGUE
from scalejax.validation.kinds import FOLDER

_LEDGER = {
    "case_id": "one", "series": "alike", "source": "github:Oneflow-Inc/DLPerf@c89430bac6",
    "year": "2020", "model": "resnet50", "layers": "", "hidden": "", "heads": "", "vocab": "",
    "seq_len": "", "hardware": "v100_sxm2_16gb", "device_count": "16", "devices_per_node": "8",
    "intra_node_link": "nvlink2_mesh", "node_network_gbit_per_second": "100", "precision": "fp32",
    "data": "16", "fsdp": "1", "tensor": "1", "pipeline": "1", "zero_stage": "0",
    "per_device_batch": "96", "microbatch": "96", "global_batch": "1536", "recompute": "none",
    "step_seconds": "0.25",
}  # fmt: skip
_LEDGER_GPT = _LEDGER | {
    "case_id": "two", "model": "gpt", "layers": "2", "hidden": "64", "heads": "4", "seq_len": "32",
    "vocab": "512", "hardware": "a100_sxm_80gb", "intra_node_link": "nvlink3_nvswitch",
    "precision": "bf16", "device_count": "8", "data": "1", "fsdp": "8", "per_device_batch": "4",
    "microbatch": "2", "global_batch": "32",
}  # fmt: skip
_RATES = {
    "data": "parquet", "is_of_images": True, "cores": 8, "memory_bytes": 6.4e10,
    "take": {"seconds_per_sample": 1e-5}, "threads": {"seconds_per_sample": 1e-5},
    "hand_over": {"seconds_per_batch": 1e-4, "seconds_per_byte": 1e-10},
    "worker_speedups": [[1, 1.0], [2, 1.9]],
    "read": {"seconds_per_row_group": 1e-4, "seconds_per_byte": 1e-9},
}  # fmt: skip
POINTS = {
    "target": 0.9, "metric": "test_accuracy", "noise_scale": 500.0, "failed_batches": [4096],
    "points": [
        {"global_batch": batch, "steps_to_target": steps}
        for batch, steps in ((16, 4000.0), (64, 1200.0), (256, 500.0), (1024, 400.0))
    ],
}  # fmt: skip
CLUSTERS = ("dgx-h100", "dgx-a100", "big-basin-goyal2017")


def ledger_text() -> str:
    """A ledger of steps with nothing wrong."""
    return _csv([_LEDGER, _LEDGER_GPT, _LEDGER | {"case_id": "three"}])


def _csv(rows: list[dict[str, str]]) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


@cache
def _shipped(name: str) -> tuple[dict[str, str], ...]:
    """The rows of a ledger that comes with scalejax."""
    with lzma.open(FOLDER / f"{name}.csv.xz", "rt", encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def _ledger(draw: random.Random, into: Path, kept: Path) -> Case:
    rows = [dict(_LEDGER), dict(_LEDGER_GPT), _LEDGER | {"case_id": "three"}]
    if draw.random() < 0.5:  # of any kind
        name = draw.choice(
            sorted(path.name.removesuffix(".csv.xz") for path in FOLDER.glob("*.csv.xz"))
        )
        rows = [dict(each) for each in draw.sample(_shipped(name), 3)]
    columns = list(rows[0])
    exact: set[str] = set()
    kind = draw.randrange(8)
    if kind <= 4:
        for _ in range(draw.choice([1, 1, 2])):
            name = draw.choice(columns)
            draw.choice(rows)[name] = _cell(mutations.hostile(draw))
            exact.add(name)
    elif kind == 5:
        name = draw.choice(columns)
        rows = [{k: v for k, v in row.items() if k != name} for row in rows]
        exact.add(name)
    elif kind == 6:
        name = draw.choice(columns)
        other = mutations.misspelt(draw, name)
        rows = [{other if k == name else k: v for k, v in row.items()} for row in rows]
        exact |= {name, other}
    data = _csv(rows).encode("utf-8", "replace")
    if kind == 7:
        data = mutations.damaged_text(draw, data)
        exact.add("ledger.csv")
    (into / "ledger.csv").write_bytes(data)
    more = draw.choice([[], [], ["--json", TOLD], ["--family", "dlperf"]])
    exact |= {"family"} if more[:1] == ["--family"] else set()
    return Case(["validate", "ledger.csv", *more], tuple(exact), ("ledger.csv",))


def _hardware(draw: random.Random, into: Path, kept: Path) -> Case:
    name = draw.choice(CLUSTERS)
    cluster = tomllib.loads((CATALOGUE / "clusters" / f"{name}.toml").read_text())
    chip = tomllib.loads((CATALOGUE / "chips" / f"{cluster['chip']}.toml").read_text())
    which = draw.choice(["cluster", "chip", "inline", "conditions"])
    if which == "inline":
        cluster["chip"] = chip
    elif which == "conditions":
        cluster["conditions"] = {"step_cv": 0.02, "noise_seconds": 1e-4}
    elif which == "chip":
        cluster["chip"] = "chip.toml"
    damaged, other = (chip, cluster) if which == "chip" else (cluster, chip)
    text, exact, loose = mutations.damaged_toml(draw, damaged)
    (into / ("chip.toml" if which == "chip" else "cluster.toml")).write_bytes(text)
    (into / ("cluster.toml" if which == "chip" else "chip.toml")).write_text(mutations.toml(other))
    (into / "run.toml").write_text(material.RUN)
    words = draw.choice(
        [
            ["hardware", "cluster.toml"],
            ["predict", "run.toml", "--cluster", "cluster.toml", "--devices", "8,16"],
            ["plan", "run.toml", "--clusters", "cluster.toml", "--devices", "8"],
        ]
    )
    if words[0] != "hardware":
        words = [*words, "--json", TOLD]
    # A cluster may have become too small for what is asked of it.
    return Case(
        words, exact, (*loose, "cluster.toml", "chip.toml", " has at most ", "memory of a device")
    )


def _data(draw: random.Random, into: Path, kept: Path) -> Case:
    name = draw.choice(
        ["images.parquet"] * 4 + ["arrays.npz"] * 2 + ["packed.npz", "folder", "tokens.bin"]
        + ["train-images-idx3-ubyte", "numbers.csv", "images.array_record", "arrays"]
    )  # fmt: skip
    path = material.copied(kept / name, into)
    if name == "train-images-idx3-ubyte":
        material.copied(kept / "train-labels-idx1-ubyte", into)
    victim = path
    if path.is_dir():
        victim = draw.choice(sorted(p for p in path.rglob("*") if p.is_file()))
    data = victim.read_bytes()
    damaged = mutations.damaged_text if name == "numbers.csv" else mutations.damaged_bytes
    head = draw.choice([0, 0, 100, 300])  # what says how much there is lies at either end
    if head and name != "numbers.csv" and len(data) > head:
        front, rest = data[:head], data[head:]
        victim.write_bytes(
            damaged(draw, front) + rest
            if draw.random() < 0.5
            else data[:-head] + damaged(draw, data[-head:])
        )
    else:
        victim.write_bytes(damaged(draw, data))
    tables = {
        "images.parquet": "parquet", "arrays.npz": "numpy", "folder": "image_folder",
        "tokens.bin": "tokens", "images.array_record": "array_record", "arrays": "numpy",
    }  # fmt: skip
    words = draw.choice(
        [
            ["data", "inspect", name],
            ["data", "inspect", name, "--verify"],
            ["data", "convert", name, "out"],
            ["config", "show", "run.toml", "--devices", "1"],
            ["config", "show", "run.toml", "--devices", "1"],
            ["train", "run.toml", "--folder", "run"],
        ]
    )
    if name in ("tokens.bin", "images.array_record") and words[0] == "data":
        words = ["config", "show", "run.toml", "--devices", "1"]
    if words[0] in ("config", "train"):
        if name not in tables:
            words = ["data", "inspect", name, "--verify"]
        else:
            text = material.PARQUET + material.DATA[tables[name]]
            if name == "tokens.bin":
                text = text.replace('"mlp", hidden = [8]', '"gpt", layers = 1, hidden = 8')
                text = text.replace("hidden = 8", "hidden = 8, heads = 2")
            (into / "run.toml").write_text(text.replace('"arrays.npz"', f'"{name}"'))
    return Case(words, (victim.name, name), ("images", "labels", "source", "data."))


def _rates(draw: random.Random, into: Path, kept: Path) -> Case:
    material.copied(kept / "images.parquet", into)
    (into / "run.toml").write_text(material.PARQUET + material.DATA["parquet"])
    text, exact, loose = mutations.damaged_toml(draw, json.loads(json.dumps(_RATES)))
    (into / "rates.toml").write_bytes(text)
    words = ["predict", "run.toml", "--cluster", "dgx-h100", "--devices", "1"]
    return Case([*words, "--input-rates", "rates.toml"], exact, (*loose, "rates.toml"))


def _convergence(draw: random.Random, into: Path, kept: Path) -> Case:
    (into / "run.toml").write_text(material.RUN)
    kind = draw.choice(["toml", "json", "csv"])
    path = into / f"points.{kind}"
    loose: tuple[str, ...] = ()
    if kind == "toml":
        text, exact, loose = mutations.damaged_toml(draw, json.loads(json.dumps(POINTS)))
        path.write_bytes(text)
    elif kind == "json":
        path.write_text(json.dumps(POINTS))
        exact = mutations.damaged_json(draw, path)
    else:
        rows = [dict(each) for each in POINTS["points"]]
        name = draw.choice(["global_batch", "steps_to_target"])
        draw.choice(rows)[name] = _cell(mutations.hostile(draw))
        lines = ["global_batch,steps_to_target"]
        lines += [f"{row['global_batch']},{row['steps_to_target']}" for row in rows]
        data = "\n".join(lines).encode("utf-8", "replace")
        exact = (name, "points.csv")
        path.write_bytes(data if draw.random() < 0.6 else mutations.damaged_text(draw, data))
    words = ["plan", "run.toml", "--clusters", "dgx-h100", "--devices", "8"]
    more = ("convergence", path.name, "global_batch", "points", "target")
    return Case([*words, "--convergence", path.name], exact, (*loose, *more))


def _cell(value: object) -> str:
    return str(value)


KINDS: dict[str, Callable[[random.Random, Path, Path], Case]] = {
    "ledger": _ledger,
    "hardware": _hardware,
    "data": _data,
    "rates": _rates,
    "convergence": _convergence,
}
"""What makes a case of each kind: draws it, writes its files into a folder, from kept material."""
