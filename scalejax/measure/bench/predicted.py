"""Predicted step times of the programs of a bench, next to their measurements."""

from collections.abc import Sequence

from scalejax.hardware import Cluster, Site
from scalejax.measure.bench.folder import BenchFolder
from scalejax.measure.bench.plan import Settings
from scalejax.measure.bench.results import Summary
from scalejax.measure.trace import refuse_other_kind
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.program import load_program


def predictions(
    summaries: Sequence[Summary], folder: BenchFolder, clusters: Sequence[tuple[Cluster, Site]]
) -> list[tuple[Summary, Prediction | None, bool]]:
    """Each measured benchmark with its prediction, and whether the cluster was fitted to it.

    The prediction is None if the program could not be read, or no cluster matches the devices of
    the benchmark: with several processes, each process is a node of the cluster.

    Args:
        summaries: those of the bench in `folder`; unmeasured ones are left out.
        folder: folder with the programs.
        clusters: candidates with their sites; the first that matches the devices predicts.

    Raises:
        ConfigError: if a cluster has another kind of chip than the one benchmarked.
    """
    rows = []
    for each in summaries:
        if not each.is_measured:
            continue
        name, prediction, is_fitted = each.benchmark.name, None, False
        settings = each.benchmark.settings
        such = next((one for one in clusters if _has_such(one[0], settings)), None)
        if such is not None and folder.program(name).is_file():
            cluster, site = such
            program = load_program(folder.program(name))
            refuse_other_kind(
                "cluster", name, cluster, backend=program.backend, target=program.target
            )
            prediction = predict(program, cluster, site=site)
            fitted = cluster.calibrated.sources.get("*", "") if cluster.calibrated else ""
            is_fitted = str(folder.benchmark(name)) in fitted.split()
        rows.append((each, prediction, is_fitted))
    return rows


def _has_such(cluster: Cluster, settings: Settings) -> bool:
    of_process = settings.devices // settings.processes
    if settings.processes > 1:
        return of_process == cluster.devices_per_node
    return of_process <= min(cluster.most_devices, cluster.devices_per_node)
