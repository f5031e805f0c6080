"""Compile the programs that `compare.py` costs, into programs.jsonl.xz beside it.

Run from this folder: python build.py (about ten minutes on two cores; no GPU is needed)

Programs for one device, and for two along the data axis, which stand for all wider ones.
"""

import sys
from pathlib import Path

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.xla import ProfileJob, profile_function, profile_many
from scalejax.xla.archive import read_archive, write_archive

ARCHIVE = Path(__file__).parent / "programs.jsonl.xz"
"""Where the programs are kept, by their names below."""

SGD = {"optimizer": {"name": "sgd", "nesterov": True}, "schedule": {"base_learning_rate": 0.1}}
ADAM = {"optimizer": {"name": "adamw"}, "schedule": {"base_learning_rate": 1e-4}}
IMAGENETTE = {"name": "synthetic_images", "classes": 10, "train_examples": 9469}
"""The shape of imagenette: 9,469 images of 10 classes to train on."""


def resnet50(samples: int, devices: int, dtype: str, data: dict, optimizer: dict) -> ProfileJob:
    """ResNet-50 on 224 x 224 images, BatchNorm on every device by itself."""
    tables = {
        "model": {"name": "resnet50", "compute_dtype": dtype},
        "data": data,
        "batch": {"per_device_batch": samples},
        "layout": {"data": devices, "bn_scope": "local"},
        **optimizer,
    }
    return ProfileJob(run=resolve(build(RunConfig, tables)), cluster=load_cluster("dgx1-v100"))


def bert_large(tokens: int, masked: int) -> ProfileJob:
    """BERT-Large with 2 sequences for each core of a TPU."""
    tables = {
        "model": {"name": "bert_large", "compute_dtype": "bfloat16"},
        "data": {"name": "masked_tokens", "tokens": tokens, "masked": masked},
        "batch": {"per_device_batch": 2},
        "layout": {"data": 2},
        **ADAM,
    }
    return ProfileJob(run=resolve(build(RunConfig, tables)), cluster=load_cluster("tpu-v2"))


def main() -> None:
    """Compile what is not there yet, and write the archive."""
    imagenet = {"name": "synthetic_images"}
    jobs = {
        "goyal": resnet50(32, 2, "float32", imagenet, SGD),
        "resnet50_half_256": resnet50(256, 2, "bfloat16", imagenet, SGD),
        "imagenette_f32_32": resnet50(32, 1, "float32", IMAGENETTE, ADAM),
        "imagenette_f32_128": resnet50(128, 1, "float32", IMAGENETTE, ADAM),
        "imagenette_f32_128_data": resnet50(128, 2, "float32", IMAGENETTE, ADAM),
        "imagenette_half_128": resnet50(128, 1, "bfloat16", IMAGENETTE, ADAM),
        "imagenette_half_128_data": resnet50(128, 2, "bfloat16", IMAGENETTE, ADAM),
        "imagenette_half_64_data": resnet50(64, 2, "bfloat16", IMAGENETTE, ADAM),
        "imagenette_half_32_data": resnet50(32, 2, "bfloat16", IMAGENETTE, ADAM),
        "bert_large_128": bert_large(128, 20),
        "bert_large_512": bert_large(512, 77),
    }
    frozen = {"xception_2": 1, "xception_16": 1, "xception_2_data": 2, "xception_16_data": 2}
    frozen["xception_32_data"] = 2
    old = read_archive(ARCHIVE)
    known = {name: old.program(name) for name in (*jobs, *frozen)}
    programs = {name: program for name, program in known.items() if program is not None}
    for name, devices in frozen.items():
        if name not in programs:
            builder = f"frozen_xception:build_{name.split('_')[1]}"
            cluster = load_cluster("dgx1-v100")
            axes = {"data": devices}
            programs[name] = profile_function(builder, cluster=cluster, mesh_axes=axes)
            print(name, file=sys.stderr)
            write_archive(programs, ARCHIVE)
    for name, job in jobs.items():
        if name not in programs:
            (programs[name],) = profile_many([job])
            print(name, file=sys.stderr)
            write_archive(programs, ARCHIVE)


if __name__ == "__main__":
    main()
