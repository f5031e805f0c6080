"""What the programs of a bench are predicted to take on a cluster, beside what they took."""

from collections.abc import Sequence

from scalejax import documents
from scalejax.bench.folder import BenchFolder
from scalejax.bench.results import Summary
from scalejax.chip_kind import refuse_other_kind
from scalejax.hardware import Cluster
from scalejax.predict import Prediction, predict
from scalejax.program import Program


def predictions(
    summaries: Sequence[Summary], folder: BenchFolder, cluster: Cluster
) -> list[tuple[Summary, Prediction | None, bool]]:
    """Each measured benchmark, its prediction, and whether the cluster was fitted to it.

    The prediction is None where the program could not be read.

    Args:
        summaries: of the bench in `folder`; those that are not measured are left out.
        folder: where the programs are.
        cluster: what predicts.

    Raises:
        ConfigError: if the cluster has another kind of chip than the benchmarks ran on.
        DoesNotFit: if it has fewer devices.
    """
    fitted = cluster.calibrated.sources.get("*", "").split() if cluster.calibrated else []
    rows = []
    for each in summaries:
        if not each.is_measured:
            continue
        name, prediction = each.benchmark.name, None
        if folder.program(name).is_file():
            program = documents.load(Program, folder.program(name))
            refuse_other_kind(
                "cluster", name, cluster, backend=program.backend, target=program.target
            )
            prediction = predict(program, cluster)
        rows.append((each, prediction, str(folder.benchmark(name)) in fitted))
    return rows
