"""Tables of what `session.py` measured, beside predictions of the same steps.

    python experiments/gpu_parity/summarize.py FIRST.tar.gz SECOND.tar.gz [--write]

Each step is predicted by `scalejax predict` for one GPU of the catalogue's cluster, compiled here
(with the jax that is installed: best that which ran); from the program that ran, on the catalogue's
chip; and from that program on the chip as `scalejax calibrate` measured it. --write keeps all in
results.json, the programs in programs.jsonl.xz, and the calibrated chip in calibration/. Errors are
(predicted - measured) / measured.
"""

import argparse
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import jax

from scalejax import load_cluster, predict
from scalejax.core import metrics, serialization
from scalejax.hardware import Cluster
from scalejax.measure.bench import BenchFolder, Summary, read_summaries
from scalejax.measure.bench.results import read_plan
from scalejax.simulator.program import Program

HERE = Path(__file__).resolve().parent
NETWORKS = ("resnet50", "gpt2", "llama")
PROGRAMS = "programs.jsonl.xz"


def extracted(archives: list[Path], folder: Path) -> dict[str, Path]:
    """Paths of what was measured by name: files, and folders of benches and calibration."""
    found: dict[str, Path] = {}
    for archive in archives:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    for part in sorted(folder.iterdir()):
        found |= {path.stem: path for path in part.iterdir()}
    return found


def case_of(network: str, summary: Summary) -> str:
    """Name of a case, as in `torch_steps.py`."""
    config = summary.benchmark.run.config
    tokens = getattr(config.data, "tokens", None)
    return network if tokens is None else f"{network}_{tokens}"


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and deciles of times."""
    deciles = quantiles(seconds, n=10, method="inclusive")
    found = {"median_seconds": median(seconds), "p10_seconds": deciles[0]}
    return found | {"p90_seconds": deciles[-1], "steps": len(seconds)}


def catalogue_cluster(kind: str) -> Cluster:
    """The cluster of the catalogue that has such GPUs."""
    return load_cluster("dgx-h200" if "H200" in kind else "dgx-h100")


def timed_steps(found: dict[str, Path]) -> Iterator[tuple[str, Summary, Program]]:
    """Each case that was timed, and the program that ran."""
    for network in NETWORKS:
        path = found.get(f"bench-{network}")
        if path is None or not (path / "bench.json").is_file():
            continue
        folder = BenchFolder(path=path)
        for summary in read_summaries(read_plan(folder), folder):
            if summary.is_measured:
                program = serialization.load(Program, folder.program(summary.benchmark.name))
                yield case_of(network, summary), summary, program


def kept_programs() -> dict[str, Program]:
    """The programs that ran, by case, as --write kept them."""
    with lzma.open(HERE / PROGRAMS, "rt", encoding="utf-8") as file:
        return {
            case: serialization.build(Program, program) for case, program in map(json.loads, file)
        }


def step_row(
    case: str,
    summary: Summary,
    program: Program,
    found: dict[str, Path],
    calibrated: Cluster | None,
) -> dict[str, Any]:
    """One network: measured in JAX and PyTorch, and predicted in three ways."""
    result = summary.results[0]
    cluster = catalogue_cluster(result.device_kind)
    peak = cluster.chip.peak("bf16")
    row: dict[str, Any] = {"case": case, "device": result.device_kind}
    row |= {"versions": result.versions, "started": result.started}
    row |= {"compile_seconds": result.compile_seconds, "global_batch": result.global_batch}
    row["jax"] = spread(list(summary.step_seconds))
    low, high = summary.interval
    row["jax"] |= {"median_low_seconds": low, "median_high_seconds": high}
    if program.model_flop is not None:
        row["mfu"] = metrics.mfu(program.model_flop, summary.median_seconds, 1, peak)
    for name in (case, f"{case}-compiled"):
        path = found.get(f"torch-{name}")
        if path is not None:
            told = json.loads(path.read_text())
            key = "torch_compiled" if told["is_compiled"] else "torch"
            row[key] = spread(told["step_seconds"]) | {"peak_bytes": told["peak_bytes"]}
    predictions = {
        "compiled_here": predict(summary.benchmark.run.config, cluster, 1),
        "program_that_ran": predict(program, cluster),
    }
    if calibrated is not None:
        predictions["calibrated"] = predict(program, calibrated)
    for name, prediction in predictions.items():
        seconds = prediction.step_seconds
        row[name] = {
            "step_seconds": seconds,
            "error": seconds / summary.median_seconds - 1,
            "p10_step_seconds": prediction.p10_step_seconds,
            "p90_step_seconds": prediction.p90_step_seconds,
        }
    return row


def table(title: str, names: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def ms(row: dict[str, Any] | None, name: str = "median_seconds") -> str:
    """A time in milliseconds; n/a where it was not measured."""
    return "n/a" if row is None else f"{1e3 * row[name]:.2f}"


def predicted(row: dict[str, Any] | None) -> str:
    """A predicted time and its error."""
    return "n/a" if row is None else f"{ms(row, 'step_seconds')} ({row['error']:+.1%})"


def show_steps(rows: list[dict[str, Any]]) -> None:
    """Print measured and predicted steps."""
    names = ["case", "JAX, ms", "95 % of the median", "MFU", "PyTorch, ms", "compiled, ms"]
    names += ["predicted, ms", "of the program that ran", "calibrated"]
    table(
        "Steps",
        names,
        [
            [
                *(row["case"], ms(row["jax"])),
                " to ".join(ms(row["jax"], f"median_{end}_seconds") for end in ("low", "high")),
                f"{row['mfu']:.1%}" if "mfu" in row else "n/a",
                *(ms(row.get("torch")), ms(row.get("torch_compiled"))),
                *map(predicted, map(row.get, ("compiled_here", "program_that_ran", "calibrated"))),
            ]
            for row in rows
        ],
    )


def show_operators(operators: dict[str, Any], peak: float) -> None:
    """Print operators as shares of the peak, or times."""
    attention = list(operators.get("operators-attention", {}).get("rows", []))
    attention += operators.get("torch-operators", {}).get("attention", [])
    table(
        "Causal attention, share of the peak in bf16",
        ["way", "head size", "heads", "samples", "tokens", "forward", "backward", "both"],
        [
            [
                *(row.get("way", "XLA, cuDNN"), str(row["head_size"]), str(row["heads"])),
                *(str(row["samples"]), str(row["tokens"])),
                *(
                    f"{row[f'{name}_flop_per_second'] / peak:.3f}" if "error" not in row else "n/a"
                    for name in ("forward", "backward", "both")
                ),
            ]
            for row in attention
        ],
    )
    grouped = list(operators.get("operators-grouped", {}).get("rows", []))
    grouped += operators.get("torch-operators", {}).get("grouped", [])
    sizes = ("network", "way", "experts", "rows", "outer", "inner")
    by_case: dict[tuple[str, ...], dict[str, float]] = {}
    for row in grouped:
        case = by_case.setdefault(tuple(str(row[name]) for name in sizes), {})
        if "error" not in row:
            case[row["grouped_pass"]] = row["flop_per_second"] / peak
    passes = ("forward", "input_gradient", "weight_gradient")
    table(
        "Products of experts, share of the peak in bf16",
        [*sizes, *passes],
        [
            [*case, *(f"{each[name]:.3f}" if name in each else "n/a" for name in passes)]
            for case, each in sorted(by_case.items())
        ],
    )
    table(
        "Norms, TB/s of what must be moved",
        ["norm", "tokens", "width", "forward", "backward"],
        [
            [
                *(row["norm"], str(row["tokens"]), str(row["width"])),
                *(f"{row[f'{name}_bytes_per_second'] / 1e12:.2f}" for name in _DIRECTIONS),
            ]
            for row in operators.get("operators-norms", {}).get("rows", [])
        ],
    )
    table(
        "Time from one small operation of a program to the next",
        ["flags", "operation", "shape", "us"],
        [
            [
                operators[name]["xla_flags"] or "none",
                *(row["operation"], str(row["shape"]), f"{1e6 * row['each']:.2f}"),
            ]
            for name in ("operators-launches", "operators-launches-without-graphs")
            for row in operators.get(name, {}).get("rows", [])
        ],
    )


_DIRECTIONS = ("forward", "backward")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="keep results.json and calibration/")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = extracted(asked.archives, Path(scratch))
        file = found.get("calibration", Path(scratch)) / "cluster.toml"
        calibrated = load_cluster(str(file)) if file.is_file() else None
        steps = list(timed_steps(found))
        rows = [
            step_row(case, summary, program, found, calibrated) for case, summary, program in steps
        ]
        operators = {
            name: json.loads(path.read_text())
            for name, path in found.items()
            if name.startswith(("operators-", "torch-operators"))
        }
        kinds = sorted(
            {row["device"] for row in rows} | {each["device"] for each in operators.values()}
        )
        print(f"on {', '.join(kinds)}; compiled here by jax {jax.__version__}")
        if calibrated is not None:
            chip = calibrated.chip
            rates = ", ".join(
                f"{name} {rate / 1e12:.0f} TFLOP/s"
                for name, rate in chip.peak_flop_per_second.items()
            )
            print(
                f"calibrated: {rates}, {chip.memory_bytes_per_second / 1e12:.2f} TB/s, "
                f"launch {1e6 * chip.attainable.launch_seconds:.2f} us, attention "
                f"{chip.attainable.attention_fraction:.3f} of the peak measured"
            )
        show_steps(rows)
        show_operators(operators, catalogue_cluster(kinds[0] if kinds else "").chip.peak("bf16"))
        if asked.write:
            kept = {"compiled_here_by": jax.__version__, "steps": rows, "operators": operators}
            (HERE / "results.json").write_text(json.dumps(kept, indent=1) + "\n")
            with lzma.open(HERE / PROGRAMS, "wt", encoding="utf-8") as programs:
                for case, _, program in steps:
                    programs.write(json.dumps([case, serialization.plain(program)]) + "\n")
            if file.is_file():
                shutil.copytree(file.parent, HERE / "calibration", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
