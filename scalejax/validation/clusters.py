"""Maps a row of a ledger to a cluster of the catalogue.

Knows the ledger's names of devices, links and systems; every number is the catalogue's, except
a network rate that the row itself states.
"""

import math
import re
from dataclasses import replace
from functools import cache

from scalejax.core.errors import ConfigError
from scalejax.hardware import Cluster, Network, chip_names, cluster_names, load_cluster
from scalejax.hardware.catalogue import load_dispatch, load_library
from scalejax.hardware.cluster import LinkKind
from scalejax.validation.experts import dispatch_of
from scalejax.validation.ledger import LedgerMachine, LedgerRow

CHIPS = {
    "k80_die": "k80",
    "p100_sxm2_16gb": "p100",
    "v100_sxm2_16gb": "v100",
    "v100_sxm2_32gb": "v100-32gb",
    "v100_sxm3_32gb": "v100-sxm3-32gb",
    "a100_sxm": "a100-80gb",
    "a100_sxm_40gb": "a100-40gb",
    "a100_sxm_80gb": "a100-80gb",
    "h100_sxm_80gb": "h100",
    "h100_sxm_96gb_500w": "h100-96gb",
    "h200_sxm": "h200",
    "h200_sxm_141gb": "h200",
    "h200_140gb_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "tpu7x_ironwood_chip": "tpu-7x",
    "trainium1_neuroncore": "trainium1-core",
}
"""The catalogue's chip for each name of the ledger."""
_LINKS: dict[str, LinkKind] = {
    "nvswitch": "nvswitch",
    "mesh": "nvlink_mesh",
    "pcie": "pcie",
    "ici": "ici",
    "nvlink": "nvswitch",
    "xgmi": "nvlink_mesh",
    "infinity fabric": "nvlink_mesh",
}
"""Kind of link by part of the ledger's name for it, the first that fits; plain "NVLink", as in
MLPerf's systems, means the kind in all nodes of its generations 4 and 5."""
_RACKS, _RACK = ("gb200", "gb300"), 72
"""Devices whose node is a rack (NVL72), where rows may count those of a host; devices of a rack."""
_ASSUMED_MEMORY = "HBM size"
"""Mark of rows whose source does not state the memory of a device."""
_YEAR_OF_40_GB = 2020
_LAST_OF_NCCL_1 = 2017
"""NCCL 2, the first whose rings follow the links, came out in the summer of this year; rows
published in this year are assumed to be older, which may be wrong for its last months."""


def cluster_of(row: LedgerRow) -> Cluster:
    """Cluster of the row; one object for equal rows.

    It is the catalogue's cluster with the row's chip, link and size of node that the row's source
    names, or else the one whose network is nearest to the row's, or the fastest if the row states
    no network. It gets the row's own network rate, the collective library of the row's time, its
    library for the dispatch to experts, and for fp32 a chip without tf32.

    Raises:
        ConfigError: if the catalogue has no such device, or none in such a node.
    """
    collective = row.spread.gradient_exchange
    if collective not in (None, "all_reduce", "parameter_server"):
        raise ConfigError(f"gradient_exchange {collective!r}")
    named = _words(f"{row.source} {row.source_locator or ''}")
    is_served = collective == "parameter_server"
    is_old = row.year is not None and row.year <= _LAST_OF_NCCL_1
    library = "parameter-server" if is_served else "nccl-1" if is_old else None
    cluster = _cluster(_machine(row), named, row.work.precision, library, dispatch_of(row))
    if row.device_count > cluster.devices_per_node and cluster.network is None:
        raise ConfigError("it spans nodes, and no network is stated")
    return cluster


def cluster_of_machine(machine: LedgerMachine, words: str) -> Cluster:
    """Cluster of a machine on which operations were measured alone; one object for equal ones.

    Args:
        machine: the machine.
        words: what may name the system: "AWS p5".

    Raises:
        ConfigError: if the catalogue has no such device, or none in such a node.
    """
    return _cluster(machine, _words(words), None, None, None)


def chip_name(hardware: str) -> str:
    """The catalogue's name of a chip by the ledger's; the ledger's own if there is none."""
    name = CHIPS.get(hardware, hardware.replace("_", "-"))
    known = chip_names()
    return next((each for each in (name, *_without_form(name)) if each in known), name)


def _without_form(name: str) -> list[str]:
    """The name of a chip without its form factor: "h100" for "h100-sxm"."""
    return [name.removesuffix(form) for form in ("-sxm", "-server") if name.endswith(form)]


def _machine(row: LedgerRow) -> LedgerMachine:
    """Machine of the row, with the memory that devices had when it was published.

    The A100 with 80 GB was announced on 16 November 2020 (NVIDIA's press release of that day);
    until then only the one with 40 GB existed.
    """
    machine = row.machine
    if machine.hardware in _RACKS and (hosts := _RACK // (machine.devices_per_node or _RACK)) > 1:
        # All GPUs of a rack are joined by NVLink: the node is the rack, with its hosts' cards.
        rate = machine.node_network_gbit_per_second
        machine = replace(
            machine,
            devices_per_node=_RACK,
            node_network_gbit_per_second=None if rate is None else rate * hosts,
        )
    is_assumed = _ASSUMED_MEMORY in (row.assumed or "")
    if is_assumed and row.year is not None and row.year <= _YEAR_OF_40_GB:
        hardware = machine.hardware.replace("a100_sxm_80gb", "a100_sxm_40gb")
        return replace(machine, hardware=hardware)
    return machine


@cache
def _cluster(
    machine: LedgerMachine,
    named: frozenset[str],
    precision: str | None,
    library: str | None,
    dispatch: str | None,
) -> Cluster:
    chip = chip_name(machine.hardware)
    if chip not in chip_names():
        raise ConfigError(f"the catalogue has no chip for {machine.hardware!r}")
    kind = _link_kind(machine.intra_node_link)
    candidates = [
        cluster
        for cluster in _catalogue()
        if cluster.chip.name == chip and (kind is None or cluster.link.kind == kind)
    ]
    if not candidates:
        raise ConfigError(
            f"the catalogue has no cluster of {chip!r} joined by {machine.intra_node_link!r}"
        )
    chosen = min(candidates, key=lambda cluster: _distance(cluster, machine, named))
    is_torus = chosen.link.kind == "ici"  # a node is the whole slice, whatever a host has
    per_node = chosen.devices_per_node if is_torus else machine.devices_per_node
    per_node = per_node or chosen.devices_per_node
    # No limit on devices, as the row was measured on that many.
    chosen = replace(chosen, devices_per_node=per_node, max_device_count=None)
    # A cluster with a library other than NCCL keeps it.
    if library == "parameter-server" or (library and chosen.library.name == "nccl"):
        chosen = replace(chosen, library=load_library(library))
    if dispatch is not None:
        chosen = replace(chosen, dispatch=load_dispatch(dispatch))
    return _for_precision(_with_network(chosen, machine), precision)


def _with_network(cluster: Cluster, machine: LedgerMachine) -> Cluster:
    """`cluster` with the row's network rate, if it states one."""
    gigabits = machine.node_network_gbit_per_second
    if gigabits is None:
        return cluster
    rate = gigabits * 1e9 / 8
    network = cluster.network or Network(bytes_per_second=rate)
    return replace(cluster, network=replace(network, bytes_per_second=rate))


def _for_precision(cluster: Cluster, precision: str | None) -> Cluster:
    """`cluster` with the arithmetic of `precision`: fp32 is computed without tf32; int8, with a
    scale for each operand, is costed as fp8 at the rate of int8."""
    peaks = cluster.chip.peak_flop_per_second
    if precision == "int8":
        if "int8" not in peaks:
            raise ConfigError(f"precision 'int8', of which no rate of {cluster.chip.name} is known")
        changed = {**peaks, "fp8": peaks["int8"]}
        return replace(cluster, chip=replace(cluster.chip, peak_flop_per_second=changed))
    if precision == "tf32" and "tf32" not in peaks:
        raise ConfigError(f"precision 'tf32', which {cluster.chip.name} does not have")
    if precision != "fp32" or "tf32" not in peaks:
        return cluster
    kept = {name: peak for name, peak in peaks.items() if name != "tf32"}
    return replace(cluster, chip=replace(cluster.chip, peak_flop_per_second=kept))


def _distance(
    cluster: Cluster, machine: LedgerMachine, named: frozenset[str]
) -> tuple[bool, bool, int, float, float, str]:
    """Distance of a cluster from the row's machine: size of node, then name, then network.

    A cluster whose network was measured is one particular machine: it comes first if the row has a
    word of its name other than its chip's, else last.
    """
    wanted = machine.node_network_gbit_per_second
    rate = 0.0 if cluster.network is None else cluster.network.bytes_per_second
    gap = 0.0
    if wanted is not None:
        gap = round(abs(math.log(rate * 8 / (wanted * 1e9))), 6) if rate else math.inf
    is_elsewhere = cluster.devices_per_node != machine.devices_per_node
    is_unnamed = not _words(f"{cluster.name} {cluster.title}") & named
    machines = 0
    if cluster.network is not None and cluster.network.measured is not None:
        is_own = (_words(cluster.name) - _words(cluster.chip.name)) & named
        machines = -1 if is_own else 1
    return is_elsewhere, is_unnamed, machines, gap, -rate, cluster.name


def _words(text: str) -> frozenset[str]:
    """Words that may name a system: "dgx", "gce", "ec2"; numbers are dropped."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return frozenset(word for word in words if len(word) > 2 and not word.isdigit())


def _link_kind(name: str | None) -> LinkKind | None:
    """Kind of a link by its name in the ledger; None if no link is stated.

    Raises:
        ConfigError: if the name is unknown.
    """
    if name is None:
        return None
    for part, kind in _LINKS.items():
        if part in name.lower():
            return kind
    raise ConfigError(f"the link {name!r} is none of {', '.join(_LINKS)}")


@cache
def _catalogue() -> tuple[Cluster, ...]:
    return tuple(load_cluster(name) for name in cluster_names())
