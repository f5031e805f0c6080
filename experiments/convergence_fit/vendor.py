"""Writes the published convergence points that come with scalejax, from the ledger's rows.

python experiments/convergence_fit/vendor.py ../shared/ledger/convergence_rcp.csv
"""

import csv
import sys
from pathlib import Path

from rows import NETWORKS, PublishedRow, published_rows

OUTPUT = (
    Path(__file__).parents[2] / "scalejax" / "planning" / "convergence" / "published" / "mlperf.csv"
)
COLUMNS = (
    "network", "metric", "target", "recipe", "global_batch", "samples_to_target",
    "run_deviation", "run_count", "train_examples", "starts_from_checkpoint", "rounds",
    "optimizer",    "note", "source",
)  # fmt: skip


def cells(row: PublishedRow) -> dict[str, object]:
    """A row of the file that comes with scalejax."""
    network = NETWORKS[row.network]
    return {
        "network": row.network,
        "metric": network.metric,
        "target": network.target,
        "recipe": row.point.recipe,
        "global_batch": row.point.global_batch,
        "samples_to_target": f"{row.point.samples:.0f}",
        "run_deviation": f"{row.point.run_deviation:.4g}",
        "run_count": row.point.run_count,
        "train_examples": network.train_examples,
        "starts_from_checkpoint": str(network.starts_from_checkpoint).lower(),
        "rounds": network.rounds,
        "optimizer": network.optimizer,
        "note": network.note,
        "source": row.source,
    }


def main() -> None:
    """Write the file."""
    rows = published_rows(Path(sys.argv[1]))
    with OUTPUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([cells(row)[name] for name in COLUMNS] for row in rows)
    print(f"wrote {len(rows)} rows to {OUTPUT}")


if __name__ == "__main__":
    main()
