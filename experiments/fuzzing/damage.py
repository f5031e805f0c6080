"""Cases of files: ledgers, hardware, checkpoints, records, data, of which something is wrong."""

import csv
import io
import json
import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import material
import mutations
from campaign import Case
from sense import TOLD

from scalejax.hardware.catalogue import CATALOGUE

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
_POINTS = {
    "target": 0.9, "metric": "test_accuracy", "noise_scale": 500.0, "failed_batches": [4096],
    "points": [
        {"global_batch": batch, "steps_to_target": steps}
        for batch, steps in ((16, 4000.0), (64, 1200.0), (256, 500.0), (1024, 400.0))
    ],
}  # fmt: skip
_CLUSTERS = ("dgx-h100", "dgx-a100", "big-basin-goyal2017")


class Files:
    """Cases of files, their material in a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed

    def case(self, kind: str, number: int, into: Path) -> Case:
        """Case `number` of `kind`, its files written into a folder."""
        draw = random.Random(f"{self._seed} {kind} {number}")
        makers: dict[str, Callable[[random.Random, Path], Case]] = {
            "ledger": self._ledger,
            "hardware": self._hardware,
            "checkpoint": self._checkpoint,
            "record": self._record,
            "sweep": self._sweep,
            "prediction": self._prediction,
            "data": self._data,
            "rates": self._rates,
            "convergence": self._convergence,
            "cache": self._cache,
        }
        return makers[kind](draw, into)

    def _copy(self, name: str, into: Path) -> Path:
        source = self._folder / name
        if source.is_dir():
            shutil.copytree(source, into / name)
        else:
            shutil.copy(source, into / name)
        return into / name

    def _ledger(self, draw: random.Random, into: Path) -> Case:
        rows = [dict(_LEDGER), dict(_LEDGER_GPT), _LEDGER | {"case_id": "three"}]
        exact: set[str] = set()
        kind = draw.randrange(8)
        if kind <= 4:
            for _ in range(draw.choice([1, 1, 2])):
                name = draw.choice(list(_LEDGER))
                draw.choice(rows)[name] = _cell(mutations.hostile(draw))
                exact.add(name)
        elif kind == 5:
            name = draw.choice(list(_LEDGER))
            rows = [{k: v for k, v in row.items() if k != name} for row in rows]
            exact.add(name)
        elif kind == 6:
            name = draw.choice(list(_LEDGER))
            other = mutations.misspelt(draw, name)
            rows = [{other if k == name else k: v for k, v in row.items()} for row in rows]
            exact |= {name, other}
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        data = file.getvalue().encode("utf-8", "replace")
        if kind == 7:
            data = mutations.damaged_text(draw, data)
            exact.add("ledger.csv")
        (into / "ledger.csv").write_bytes(data)
        more = draw.choice([[], [], ["--json", TOLD], ["--family", "dlperf"]])
        exact |= {"family"} if more[:1] == ["--family"] else set()
        return Case(["validate", "ledger.csv", *more], tuple(exact), ("ledger.csv",))

    def _hardware(self, draw: random.Random, into: Path) -> Case:
        name = draw.choice(_CLUSTERS)
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
        text, exact, loose = self._damaged_toml(draw, damaged)
        (into / ("chip.toml" if which == "chip" else "cluster.toml")).write_bytes(text)
        (into / ("cluster.toml" if which == "chip" else "chip.toml")).write_text(
            mutations.toml(other)
        )
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
        return Case(words, exact, (*loose, "cluster.toml", "chip.toml", " has at most "))

    def _damaged_toml(
        self, draw: random.Random, tree: mutations.Tree
    ) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
        """A text, what exactly differs in it, and what that lies in."""
        if draw.random() < 0.7:
            text = mutations.toml(mutations.changed(draw, tree)).encode("utf-8", "replace")
        else:
            text = mutations.damaged_text(draw, mutations.toml(tree).encode())
        after = mutations.parsed(text)
        if after is None:
            return text, (".toml",), ()
        paths = mutations.differing(tree, after)
        exact = {".".join(path) for path in paths} | {path[-1] for path in paths if path}
        return text, tuple(exact), tuple({part for path in paths for part in path})

    def _damaged_json(self, draw: random.Random, path: Path) -> tuple[str, ...]:
        """Damage a file of JSON, or of a line of JSON each; what differs in it."""
        data = path.read_bytes()
        if draw.random() < 0.4:
            path.write_bytes(mutations.damaged_text(draw, data))
            return (path.name,)
        lines = [data.decode()] if path.suffix == ".json" else data.decode().splitlines()
        which = draw.randrange(len(lines))
        before = json.loads(lines[which])
        fields = tuple(each for each in mutations.leaves(before) if each)
        after = mutations.changed(draw, before, fields)
        lines[which] = json.dumps(after, default=str)
        path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "replace"))
        paths = mutations.differing(before, after)
        return (*{part for each in paths for part in each}, path.name)

    def _checkpoint(self, draw: random.Random, into: Path) -> Case:
        run = self._copy("run", into)
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
            new = draw.choice(
                ["abc", "-1", "9" * 20, "7", "12.tmp", "名", "1e3", "00000000000000008"]
            )
            draw.choice(steps).rename(run / "checkpoints" / new)
        else:
            shutil.rmtree(draw.choice(sorted({p.parent for p in files})))
        words = ["train", "run.toml", "--folder", "run", "--resume", "--train.epochs=3"]
        (into / "run.toml").write_text(material.RUN)
        more = ["--train.checkpoint_every_steps=3"]
        return Case([*words, *more], ("checkpoints",), ("run",))

    def _record(self, draw: random.Random, into: Path) -> Case:
        run = self._copy("run", into)
        (into / "run.toml").write_text(material.RUN)
        name = draw.choice(
            ["measurements.jsonl"] * 4
            + ["prediction.json"] * 2
            + ["run.toml"] * 2
            + ["program.json"]
        )
        if name == "run.toml":
            tree = tomllib.loads((run / name).read_text())
            text, exact, loose = self._damaged_toml(draw, tree)
            (run / name).write_bytes(text)
            names = (*exact, *loose, name)
        else:
            names = self._damaged_json(draw, run / name)
        if draw.random() < 0.1:
            (run / name).unlink()
        words = ["report", "run"]
        if draw.random() < 0.15 and name != "program.json":
            words = ["train", "run.toml", "--folder", "run", "--resume"]
            words.append("--train.checkpoint_every_steps=3")
        return Case(words, names, (name, "run"))

    def _sweep(self, draw: random.Random, into: Path) -> Case:
        sweep = self._copy("sweep", into)
        (into / "run.toml").write_text(material.RUN)
        files = [p for p in sweep.rglob("*") if p.is_file() and p.suffix in _OF_SWEEP]
        files = [p for p in files if "checkpoints" not in p.parts and "weights" not in p.parts]
        victim = draw.choice([sweep / "sweep.json", *sorted(files)])
        if victim.suffix in (".json", ".jsonl"):
            names = self._damaged_json(draw, victim)
        else:
            victim.write_bytes(mutations.damaged_bytes(draw, victim.read_bytes()))
            names = (victim.name,)
        words = ["report", "sweep"]
        if victim.suffix == ".parquet" and victim.name == "results.parquet":
            words = ["plan", "run.toml", "--clusters", "dgx-h100", "--devices", "8"]
            words += ["--convergence", "sweep/results.parquet"]
        return Case(words, names, (victim.name, "sweep"))

    def _prediction(self, draw: random.Random, into: Path) -> Case:
        path = self._copy(draw.choice(["scaling.json", "plan.json", "one.json"]), into)
        return Case(["report", path.name], self._damaged_json(draw, path), (path.name,))

    def _data(self, draw: random.Random, into: Path) -> Case:
        name = draw.choice(
            ["images.parquet"] * 4 + ["arrays.npz"] * 2 + ["packed.npz", "folder", "tokens.bin"]
            + ["train-images-idx3-ubyte", "numbers.csv", "images.array_record", "arrays"]
        )  # fmt: skip
        path = self._copy(name, into)
        if name == "train-images-idx3-ubyte":
            self._copy("train-labels-idx1-ubyte", into)
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

    def _rates(self, draw: random.Random, into: Path) -> Case:
        self._copy("images.parquet", into)
        (into / "run.toml").write_text(material.PARQUET + material.DATA["parquet"])
        text, exact, loose = self._damaged_toml(draw, json.loads(json.dumps(_RATES)))
        (into / "rates.toml").write_bytes(text)
        words = ["predict", "run.toml", "--cluster", "dgx-h100", "--devices", "1"]
        return Case([*words, "--input-rates", "rates.toml"], exact, (*loose, "rates.toml"))

    def _convergence(self, draw: random.Random, into: Path) -> Case:
        (into / "run.toml").write_text(material.RUN)
        kind = draw.choice(["toml", "json", "csv"])
        path = into / f"points.{kind}"
        loose: tuple[str, ...] = ()
        if kind == "toml":
            text, exact, loose = self._damaged_toml(draw, json.loads(json.dumps(_POINTS)))
            path.write_bytes(text)
        elif kind == "json":
            path.write_text(json.dumps(_POINTS))
            exact = self._damaged_json(draw, path)
        else:
            rows = [dict(each) for each in _POINTS["points"]]
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

    def _cache(self, draw: random.Random, into: Path) -> Case:
        import os

        from scalejax.core.cache import user_folder

        (into / "run.toml").write_text(material.RUN)
        kept = sorted(user_folder().glob("*.json.gz"))
        for path in kept:
            path.write_bytes(mutations.damaged_bytes(draw, path.read_bytes()))
            os.utime(path)
        words = ["predict", "run.toml", "--cluster", "dgx-h100", "--devices", "8"]
        return Case(words, ("cache",))


_OF_SWEEP = (".json", ".jsonl", ".parquet", ".toml")


def _cell(value: object) -> str:
    return str(value)


def make_predictions(folder: Path) -> None:
    """The files that predict and plan write, made with the compiler that stands in."""
    import contextlib
    import os

    from scalejax.cli.main import main

    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cluster = ["--devices", "8,16", "--json", "scaling.json"]
            if main(["predict", "run.toml", "--cluster", "dgx-h100", *cluster]):
                raise RuntimeError("no prediction")
            points = Path("points.json")
            points.write_text(json.dumps(_POINTS))
            words = ["plan", "run.toml", "--clusters", "dgx-h100", "--devices", "8,16"]
            if main([*words, "--convergence", "points.json", "--json", "plan.json"]):
                raise RuntimeError("no plan")
    finally:
        os.chdir(before)
    shutil.copy(folder / "run" / "prediction.json", folder / "one.json")
