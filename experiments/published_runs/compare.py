"""Print the table of the README: runs that people know, predicted beside what was published.

Run from this folder: python compare.py

The programs are in programs.jsonl.xz (`build.py` compiles them); costing them takes seconds, so
that the table can be printed again whenever a constant changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from build import ARCHIVE

from scalejax.core import metrics
from scalejax.core.units import format_seconds
from scalejax.hardware import Cluster, load_cluster
from scalejax.simulator.frameworks.one_device import through_one_device
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Loop, Operation, Program
from scalejax.xla.archive import read_archive

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
XCEPTION_BYTES = 22_855_952 * 4
"""Weights of Xception in float32."""
XCEPTION_IMAGE_BYTES, IMAGE_BYTES = 299 * 299 * 3 * 4, 224 * 224 * 3 * 4
"""An image in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run."""

    title: str
    """What was run."""
    predicted_seconds: float
    """What scalejax says."""
    published_seconds: float
    """What was published."""
    alone_seconds: tuple[float, float] | None = None
    """The same work on one device, predicted and published, where both are known."""


def main() -> None:
    """Print one Markdown row for each run."""
    print("| run | predicted | published | error | speed-up, predicted | published |")
    print("|---|---|---|---|---|---|")
    for runs in (caltech(), imagenette(), imagenet(), bert()):
        for run in runs:
            error = run.predicted_seconds / run.published_seconds - 1
            times = map(format_seconds, (run.predicted_seconds, run.published_seconds))
            gains = ("", "")
            if run.alone_seconds is not None:
                predicted, published = run.alone_seconds
                gains = (
                    f"{predicted / run.predicted_seconds:.1f}",
                    f"{published / run.published_seconds:.1f}",
                )
            print(f"| {run.title} | {' | '.join((*times, f'{error:+.0%}', *gains))} |")


TRAINED_BY = {
    "xception": "tensorflow-2017",
    "goyal": "tensorflow-2017",
    "imagenette": "pytorch-eager-2020",
    "resnet50_half": "tensorflow-2020",
}
"""Frameworks nearest to what trained these runs, by the beginning of their programs' names."""


def caltech() -> Iterator[Run]:
    """Caltech-256 with a frozen Xception on K80 GPUs (S. Owen, Databricks, 2019)."""
    images, sample = 27_546, 2_755  # nine tenths of 30,607, and a tenth of that
    machine = load_cluster("aws-p2")
    apart = load_cluster("aws-p2-xlarge")

    def epoch(
        name: str, devices: int, batch: int, cluster: Cluster, *, keras: bool = False
    ) -> float:
        program = program_of(name, devices)
        if keras:
            program = by_multi_gpu_model(program, batch // devices)
        step = predict(program, cluster).step_seconds
        return metrics.epoch_seconds(sample if batch == 2 else images, batch, step)

    def run(
        title: str, predicted: float, published: float, alone: tuple[float, float] | None = None
    ) -> Run:
        return Run(
            title=f"Caltech-256, {title}",
            predicted_seconds=predicted,
            published_seconds=published,
            alone_seconds=alone,
        )

    yield run(
        "one K80, a tenth of the images, batch 2: epoch", epoch("xception_2", 1, 2, machine), 65
    )
    single = epoch("xception_16", 1, 16, machine)
    yield run("one K80, batch 16: epoch", single, 630)
    yield run(
        "8 K80 by multi_gpu_model, batch 16: epoch",
        epoch("xception_2_data", 8, 16, machine, keras=True),
        270,
        (single, 630),
    )
    yield run(
        "8 K80 by multi_gpu_model, batch 256: epoch",
        epoch("xception_32_data", 8, 256, machine, keras=True),
        135,
        (single, 630),
    )
    # Horovod's runs are published as a whole; all are as many epochs as one GPU does in 96 min.
    epochs = 96 * MINUTE / 630
    for title, cluster, published in (("one machine", machine, 12.6), ("8 machines", apart, 17)):
        predicted = epochs * epoch("xception_16_data", 8, 128, cluster)
        alone = (epochs * single, 96 * MINUTE)
        yield run(f"8 K80 of {title}, all-reduce: run", predicted, published * MINUTE, alone)


def imagenette() -> Iterator[Run]:
    """ResNet-50 on imagenette, 15 epochs on T4 (Data-drone/DAIS2022-Scaling-Deep-Learning-Talk)."""
    machine = load_cluster("aws-g4")
    alone: dict[str, tuple[float, float]] = {}
    for title, name, devices, batch, cluster, published in (
        ("one T4, f32, batch 32", "imagenette_f32_32", 1, 32, machine, 34),
        ("one T4, f32, batch 128", "imagenette_f32_128", 1, 128, machine, 30),
        ("one T4, f16, batch 128", "imagenette_half_128", 1, 128, machine, 16),
        ("2 T4 by DataParallel, f16", "imagenette_half_64_data", 2, 128, machine, 21),
        ("4 T4 by DataParallel, f16", "imagenette_half_32_data", 4, 128, machine, 20),
        ("2 T4, all-reduce, f16", "imagenette_half_128_data", 2, 256, machine, 10),
        ("3 T4, all-reduce, f16", "imagenette_half_128_data", 3, 384, machine, 8),
        ("2 T4, all-reduce, f32", "imagenette_f32_128_data", 2, 256, machine, 22),
        ("8 T4 of 2 machines, all-reduce, f32", "imagenette_f32_128_data", 8, 1024, machine, 7),
    ):
        program = program_of(name, devices)
        if "DataParallel" in title:
            program = by_data_parallel(program, batch // devices)
        step = predict(program, cluster).step_seconds
        # 3,925 images are evaluated after each epoch, at a third of a training step's work.
        evaluation = 3_925 / 3 / batch * step
        epoch = metrics.epoch_seconds(9_469, batch, step) + evaluation
        dtype = name.split("_")[1]
        if devices == 1:
            alone[dtype] = (15 * epoch, published * MINUTE)
        yield Run(
            title=f"imagenette, {title}: 15 epochs",
            predicted_seconds=15 * epoch,
            published_seconds=published * MINUTE,
            alone_seconds=alone[dtype] if devices > 1 else None,
        )


def imagenet() -> Iterator[Run]:
    """90 epochs of ResNet-50."""
    images = 1_281_167
    for title, name, devices, batch, cluster, published in (
        ("128 V100, f16, batch 256 each", "resnet50_half_256", 128, 256, "dgx1-v100", 20 * MINUTE),
        ("256 P100, f32, batch 32 each", "goyal", 256, 32, "big-basin-goyal2017", HOUR),
    ):
        program = program_of(name, devices)
        step = predict(program, load_cluster(cluster)).step_seconds
        yield Run(
            title=f"ImageNet, ResNet-50, {title}: 90 epochs",
            predicted_seconds=90 * metrics.epoch_seconds(images, batch * devices, step),
            published_seconds=published,
        )


def bert() -> Iterator[Run]:
    """BERT-Large's pre-training: a million steps of 256 sequences, a tenth of them long."""
    short, long = (
        predict(program_of(name, 128), load_cluster("tpu-v2")).step_seconds
        for name in ("bert_large_128", "bert_large_512")
    )
    yield Run(
        title="BERT-Large, 64 TPU v2 chips, bf16: 900,000 steps of 128 tokens, 100,000 of 512",
        predicted_seconds=900_000 * short + 100_000 * long,
        published_seconds=4 * DAY,
    )


def by_multi_gpu_model(program: Program, images: int) -> Program:
    """The step of Keras' multi_gpu_model, so many images for each device: all weights go out, and
    gradients of the one layer that is trained come back."""
    changed = through_one_device(
        program,
        is_relayed=False,
        input_bytes=images * XCEPTION_IMAGE_BYTES,
        weight_bytes=XCEPTION_BYTES,
    )
    return replace(changed, framework="keras-multi-gpu-model")


def by_data_parallel(program: Program, images: int) -> Program:
    """The step of PyTorch's DataParallel, so many images for each device."""
    changed = through_one_device(program, is_relayed=True, input_bytes=images * IMAGE_BYTES)
    return replace(changed, framework="pytorch-dataparallel")


def program_of(name: str, devices: int) -> Program:
    """A program of the archive, on as many devices along the data axis, as the software of its time
    ran it."""
    framework = next((each for part, each in TRAINED_BY.items() if name.startswith(part)), None)
    program = compiled(name, devices)
    return program if framework is None else replace(program, framework=framework)


@cache
def compiled(name: str, devices: int) -> Program:
    """A program of the archive, on as many devices along the data axis."""
    program = read_archive(ARCHIVE).program(name)
    if program is None:
        raise SystemExit(f"{ARCHIVE.name} has no program {name!r}: run build.py")
    return program if devices == 1 else on_devices(program, devices)


def on_devices(program: Program, devices: int) -> Program:
    """A program of two devices on more of them, which differ in the size of their sums alone."""

    def grown(item: Operation | Loop) -> Operation | Loop:
        if isinstance(item, Loop):
            return replace(item, body=tuple(map(grown, item.body)))
        if item.collective is None:
            return item
        if item.collective.name != "all_reduce" or item.collective.group.axes != ("data",):
            raise SystemExit(f"{item.name} is no sum over the data axis")
        group = replace(item.collective.group, extents=((devices, 1),))
        return replace(item, collective=replace(item.collective, group=group))

    return replace(
        program,
        mesh_axes=(("data", devices), *program.mesh_axes[1:]),
        operations=tuple(map(grown, program.operations)),
        global_batch=None,  # of the two devices, as is the FLOP of the model
        model_flop=None,
    )


if __name__ == "__main__":
    main()
