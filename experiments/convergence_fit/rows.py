"""Rows of the ledger of reference convergence points, as points of networks with one target."""

import csv
from dataclasses import dataclass
from pathlib import Path

from scalejax.planning.convergence import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What rows must share to be points of one curve: network, data set and target."""

    benchmark: str
    """MLPerf's name."""
    first_round: str
    """Rounds from this one ..."""
    last_round: str
    """... to this one have the same network, data set and target."""
    metric: str
    """What the target is of."""
    target: float
    """The quality target of those rounds (mlcommons.org/en/training-normal-10 and -21)."""
    train_examples: int | None
    """Samples in an epoch of the data set; None where rows count samples."""
    starts_from_checkpoint: bool = False
    """Whether training begins with weights that MLPerf hands out, and not from scratch."""
    optimizer: str = ""
    """What trained it, as scalejax names it; empty where rows do not say."""
    note: str = ""
    """What a reader must know before using the points for a run of his own."""

    @property
    def rounds(self) -> str:
        """The rounds, in words: "training 1.0 to 1.1"."""
        first, last = (name[: -len(".0")] for name in (self.first_round, self.last_round))
        until = f" to {last.removeprefix('training_')}" if last != first else ""
        return first.replace("_", " ") + until


FROM_CHECKPOINT = "counted from MLPerf's starting checkpoint, not from scratch"
NETWORKS = {
    "resnet50": Network(
        benchmark="resnet",
        first_round="training_1.0.0",
        last_round="training_1.0.0",
        metric="ImageNet top-1 accuracy",
        target=0.759,
        train_examples=1_281_167,
        optimizer="lars",
        note="LARS with a polynomial decay that ends where training does",
    ),
    "bert_large": Network(
        benchmark="bert",
        first_round="training_1.0.0",
        last_round="training_2.1.0",
        metric="masked-word accuracy",
        target=0.72,
        train_examples=None,
        starts_from_checkpoint=True,
        optimizer="lamb",
        note=f"LAMB, 512 tokens; {FROM_CHECKPOINT}",
    ),
    "ssd_resnet34": Network(
        benchmark="ssd",
        first_round="training_1.0.0",
        last_round="training_1.1.0",
        metric="COCO mAP",
        target=0.23,
        train_examples=117_266,
    ),
    "retinanet": Network(
        benchmark="ssd",
        first_round="training_2.0.0",
        last_round="training_4.0.0",
        metric="OpenImages mAP",
        target=0.34,
        train_examples=1_170_301,
    ),
    "llama3-405b": Network(
        benchmark="llama31_405b",
        first_round="training_5.0.0",
        last_round="training_5.1.0",
        metric="log perplexity",
        target=5.6,  # unverified: the pages above end before its round
        train_examples=None,
        starts_from_checkpoint=True,
        note=f"8192 tokens; {FROM_CHECKPOINT}",
    ),
}
"""From round 2.0 on, MLPerf's "ssd" is RetinaNet on OpenImages: another network and target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """A row as a point."""

    network: str
    """Key of `NETWORKS`."""
    point: Point
    """In samples."""
    source: str
    """Where it was published."""


def published_rows(path: Path) -> list[PublishedRow]:
    """The rows of all networks above, in order of network and batch."""
    with path.open(encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    found = []
    for name, network in NETWORKS.items():
        rows = [row for row in cells if _is_of(row, network)]
        found += [_published(name, row) for row in sorted(rows, key=_batch)]
    return found


def _batch(row: dict[str, str]) -> int:
    return int(row["global_batch"])


def _is_of(row: dict[str, str], network: Network) -> bool:
    in_rounds = network.first_round <= row["round"] <= network.last_round
    return row["benchmark"] == network.benchmark and in_rounds


def _published(name: str, row: dict[str, str]) -> PublishedRow:
    examples = {"epochs": NETWORKS[name].train_examples, "samples": 1}[row["unit"]]
    if examples is None:
        raise ValueError(f"{name}: rows in epochs need the samples of one")
    mean = float(row["mean"])
    return PublishedRow(
        network=name,
        point=Point(
            global_batch=_batch(row),
            samples=mean * examples,
            run_deviation=float(row["std"]) / mean,
            run_count=int(row["runs"]),
            # What the rows say of how they were trained beside batch and peak rate, which go
            # together: ResNet-50 has two recipes, with 2 epochs of warmup and with 5 (and another
            # weight decay).
            recipe=f"warmup {row['warmup_epochs']}" if row["warmup_epochs"] else "",
        ),
        source=row["source"],
    )
