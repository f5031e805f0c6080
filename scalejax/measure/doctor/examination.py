"""Runs all checks, and merges the findings of all processes of a run."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scalejax.core.process_group import Place, is_lost_contact
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.serialization import build, plain
from scalejax.hardware import Cluster
from scalejax.measure.doctor import devices as device_checks
from scalejax.measure.doctor.finding import Finding, found
from scalejax.measure.doctor.host import host_findings, read_host
from scalejax.measure.doctor.network import (
    clock_finding,
    measure_clock_offsets,
    network_findings,
    read_network,
)
from scalejax.measure.doctor.storage import read_storage, storage_findings
from scalejax.measure.doctor.variables import Surroundings, variable_findings
from scalejax.measure.doctor.versions import read_versions, version_findings


def stage_count() -> int:
    """Most calls of `on_progress`."""
    return device_checks.STAGES + 4


def examine(
    run_folder: Path,
    cache_folder: Path,
    environment: Mapping[str, str],
    *,
    cluster: Cluster | None = None,
    place: Place | None = None,
    on_progress: OnProgress = no_display,
) -> tuple[Finding, ...]:
    """All findings, merged over all processes; every process must call it.

    A process whose JAX has no devices cannot communicate: it returns its own findings, with its
    number, and the others wait until it exits.

    Args:
        run_folder: folder of runs.
        cache_folder: folder of compiled programs and calibrations.
        environment: environment variables as set by the user.
        cluster: expected hardware; None to detect it from the device names.
        place: rank of this process among the connected processes; None if it is alone.
        on_progress: called as each stage begins.
    """
    processes = 1 if place is None else place.processes
    on_progress(Progress(part="versions"))
    mine = [*version_findings(read_versions())]
    on_progress(Progress(part="devices"))
    try:
        seen = device_checks.read_devices()
    except (RuntimeError, AssertionError) as error:
        if is_lost_contact(error):  # to a process without devices, which reports why
            raise
        # JAX could not start (some plug-ins raise AssertionError); checks without JAX may show why.
        hosts, processes = 1, 1
        mine.append(device_checks.no_devices(str(error)))
    else:
        hosts = len(set(_said_by_all(socket.gethostname(), processes)))
        mine += _of_devices(cluster, seen, hosts, on_progress)
    host = read_host()
    mine += host_findings(host)
    on_progress(Progress(part="storage"))
    for role, folder in (("run folder", run_folder), ("cache folder", cache_folder)):
        mine += storage_findings(read_storage(role, folder), hosts)
    on_progress(Progress(part="network"))
    mine += network_findings(read_network(), place)
    around = Surroundings(
        cores=host.allowed_cores,
        gpus=device_checks.driver_gpus(),
        processes=processes,
        coordinator=place and place.coordinator,
    )
    variables = variable_findings(environment, around)
    if processes == 1:
        alone = () if place is None else (place.process,)
        return tuple(replace(each, processes=alone) for each in (*mine, *variables))
    clocks = clock_finding(measure_clock_offsets())
    if place is not None and place.process == 0:  # the reference clock
        mine.append(clocks)
    said = _said_by_all(json.dumps(plain((*mine, *variables))), processes)
    return tuple(together([build(tuple[Finding, ...], json.loads(each)) for each in said]))


def _of_devices(
    cluster: Cluster | None, seen: device_checks.Devices, hosts: int, on_progress: OnProgress
) -> Iterator[Finding]:
    yield from device_checks.device_findings(seen, cluster)
    rates = None
    try:
        rates = device_checks.measure(on_progress)
    except RuntimeError as error:
        if is_lost_contact(error):
            raise
        yield device_checks.no_rates(str(error))
    # A process that failed may not complete a collective, and the others would wait for it.
    said = _said_by_all("failed" if rates is None else "measured", seen.processes)
    if rates is None:
        return
    if seen.processes > 1 and "failed" not in said:
        rates = device_checks.measure_all_reduce(rates)
    if cluster is None:
        chip = device_checks.detected_chip(seen)
    else:
        chip = device_checks.chip_when_busy(cluster, seen.count // hosts)
    yield from device_checks.rate_findings(rates, chip, cluster)


def together(by_process: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """The findings of all processes, each once.

    An "ok" finding is reported for the first process; any other names the processes concerned.
    Versions must be equal in all processes.
    """
    said: dict[tuple[str, str], list[tuple[int, Finding]]] = {}
    for process, findings in enumerate(by_process):
        for each in findings:
            said.setdefault((each.topic, each.name), []).append((process, each))
    for having in said.values():
        first = having[0][1]
        values = {each.value for _, each in having}
        if first.topic == "versions" and (len(values) > 1 or len(having) < len(by_process)):
            yield found(
                "versions",
                first.name,
                ", ".join(sorted(values)),
                "the same in all processes",
                bad=True,
                fix="give all processes one environment: they run one program together",
            )
            continue
        troubled = [(process, each) for process, each in having if each.verdict != "ok"]
        if not troubled:
            yield first
        for fix in dict.fromkeys(each.fix for _, each in troubled):
            alike = [(process, each) for process, each in troubled if each.fix == fix]
            processes = tuple(process for process, _ in alike)
            worst = min((each for _, each in alike), key=lambda each: each.verdict != "bad")
            yield replace(worst, processes=() if len(alike) == len(by_process) else processes)


def _said_by_all(text: str, processes: int) -> tuple[str, ...]:
    if processes == 1:
        return (text,)
    from scalejax.training.multihost import all_gather_text

    return all_gather_text(text)
