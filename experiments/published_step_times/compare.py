"""Print the table of the README: predicted step times beside published ones, none of them fitted.

Run from the root of the repository: python experiments/published_step_times/compare.py

The programs were compiled once and are kept in tests/golden/programs; costing them takes
milliseconds. tests/test_published.py holds the same cases to their tolerances.
"""

import gzip
import json
from pathlib import Path

from scalejax.documents import build
from scalejax.hardware import load_cluster
from scalejax.predict import predict
from scalejax.program import Program
from scalejax.units import format_seconds

PROGRAMS = Path(__file__).parents[2] / "tests" / "golden" / "programs"

MXNET = "NVIDIA DeepLearningExamples, MXNet"
"""github.com/NVIDIA/DeepLearningExamples at 729963dd47, MxNet/Classification/RN50v1.5."""
TENSORFLOW = "TensorFlow benchmarks, 2017"
"""github.com/tensorflow/tensorflow at 5984ffefd3, docs_src/performance/benchmarks.md, DGX-1."""

CASES = (
    ("ResNet-50, bf16, batch 512, one A100", "resnet50_bf16_512", "dgx-a100-80gb", 0.150124, MXNET),
    ("ResNet-50, f32, batch 32, one P100", "resnet50_f32_32", "dgx1-p100", 0.164103, TENSORFLOW),
    ("ResNet-50, f32, batch 64, one P100", "resnet50_f32_64", "dgx1-p100", 0.292237, TENSORFLOW),
    ("ResNet-152, f32, batch 64, one P100", "resnet152_f32_64", "dgx1-p100", 0.697168, TENSORFLOW),
)
"""What is compared: title, program, cluster, published seconds per step, source."""


def main() -> None:
    """Print one Markdown row for each case."""
    print("| step | predicted | published | error | source |")
    print("|---|---|---|---|---|")
    for title, name, cluster, published, source in CASES:
        text = gzip.decompress((PROGRAMS / f"{name}_sm_80.json.gz").read_bytes())
        seconds = predict(build(Program, json.loads(text)), load_cluster(cluster)).step_seconds
        error = (seconds - published) / published
        figures = f"{format_seconds(seconds)} | {format_seconds(published)} | {error:+.0%}"
        print(f"| {title} | {figures} | {source} |")


if __name__ == "__main__":
    main()
