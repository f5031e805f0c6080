"""Loaders of chips, clusters and communication libraries from TOML: the catalogue's or a user's.

A cluster file gives its chip, library and dispatch by name, by a path relative to the file, or as
tables in place; see `clusters/dgx-h100.toml` for one to copy.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from scalejax.core.errors import ConfigError, UnknownHardware, prefixed, refusal, unknown_name
from scalejax.core.serialization import JsonValue, build, load_toml, plain, save_toml
from scalejax.hardware.chip import Chip
from scalejax.hardware.cluster import Cluster, CommunicationLibrary, DispatchLibrary, LaunchMode
from scalejax.hardware.site import RunConditions, Site

CATALOGUE = Path(__file__).parent

Entry = TypeVar("Entry")


def chip_names() -> tuple[str, ...]:
    """Names of the chips in the catalogue, sorted."""
    return names_in("chips")


def cluster_names() -> tuple[str, ...]:
    """Names of the clusters in the catalogue, sorted.

    Example:
        >>> from scalejax import cluster_names
        >>> "dgx-h100" in cluster_names()
        True
    """
    return names_in("clusters")


def load_chip(name_or_path: str) -> Chip:
    """The chip of that name in the catalogue, or in a TOML file.

    Raises:
        UnknownHardware: if it is neither; names the closest that is.
        ConfigError: if the file does not describe a chip.
    """
    return build(Chip, _tables("chip", name_or_path), where="chip")


def load_library(name: str) -> CommunicationLibrary:
    """The communication library of that name in the catalogue.

    Raises:
        UnknownHardware: if there is none; names the closest that is.
    """
    return catalogued(CommunicationLibrary, "library", "libraries", name)


def load_dispatch(name: str) -> DispatchLibrary:
    """The library for the dispatch of tokens to experts of that name in the catalogue.

    Raises:
        UnknownHardware: if there is none; names the closest that is.
    """
    return catalogued(DispatchLibrary, "dispatch", "dispatch", name)


def load_cluster(name_or_path: str) -> Cluster:
    """The cluster of that name in the catalogue, or in a TOML file; its site is of `load_site`.

    Example:
        >>> from scalejax import load_cluster
        >>> load_cluster("dgx-h100").title
        'NVIDIA DGX H100, 8 x 400 Gb/s InfiniBand'

    Raises:
        UnknownHardware: if it, its chip or its library is in neither; names the closest that is.
        ConfigError: if the file does not describe a cluster.
    """
    return load_cluster_and_site(name_or_path)[0]


def load_site(name_or_path: str) -> Site:
    """The site of a cluster: the tables `[conditions]` and `[input]` of its TOML file.

    Example:
        >>> from scalejax import load_site
        >>> load_site("dgx-h100").input is None  # the catalogue knows no site
        True

    Raises:
        UnknownHardware: if the cluster is neither in the catalogue nor a file.
        ConfigError: if the file does not describe a cluster and its site.
    """
    return load_cluster_and_site(name_or_path)[1]


def load_cluster_and_site(name_or_path: str) -> tuple[Cluster, Site]:
    """The cluster of that name in the catalogue, or in a TOML file, and its site.

    Raises:
        UnknownHardware: if it, its chip or its library is in neither; names the closest that is.
        ConfigError: if the file does not describe a cluster.
    """
    tables = _tables("cluster", name_or_path)
    beside = Path(name_or_path).parent
    shared = tables.get("shared")
    for each in (tables, *(shared if isinstance(shared, list) else ())):
        if isinstance(each, dict):
            _fill_in(each, "chip", "chips", beside)
    _fill_in(tables, "library", "libraries", beside)
    _fill_in(tables, "dispatch", "dispatch", beside)
    with prefixed(f"{name_or_path}: "):
        conditions = tables.pop("conditions", None) or {}
        site = build(Site, {"input": tables.pop("input", None)})
        cluster = build(Cluster, tables)
        if not isinstance(conditions, dict):
            raise ConfigError(refusal("conditions", conditions, "it must be a table"))
        return with_conditions(cluster, site, conditions)


def save_cluster(
    cluster: Cluster, site: Site, path: Path, parts: Mapping[str, JsonValue] | None = None
) -> None:
    """Write a cluster and its site as one TOML file, which `load_cluster_and_site` reads.

    Args:
        cluster: the hardware.
        site: its site.
        path: the file.
        parts: tables or names of files in place of those of some fields of the cluster.

    Raises:
        ConfigError: if the file cannot be written.
    """
    save_toml({**_table(cluster), **_table(site), **(parts or {})}, path)


def _table(value: Cluster | Site) -> dict[str, JsonValue]:
    fields = plain(value)
    return fields if isinstance(fields, dict) else {}


_LAUNCH_MODES: dict[str, LaunchMode] = {
    "launches_block": "blocking",
    "launches_in_graph": "graph",
}
"""The launch mode that each condition of this name stands for."""


def with_conditions(
    cluster: Cluster, site: Site, values: Mapping[str, JsonValue]
) -> tuple[Cluster, Site]:
    """Copies of `cluster` and `site` with conditions replaced.

    Args:
        cluster: the hardware.
        site: its site.
        values: by field of `RunConditions`, such as {"step_cv": 0.02}; and "launches_block" or
            "launches_in_graph", by which the cluster's `launch_mode` is said, and "dispatch", the
            name of its library for experts, or "all_to_all" for none.

    Raises:
        ConfigError: if there is no such field, or it cannot have that value.
        UnknownHardware: if there is no such library.
    """
    values = dict(values)
    if "dispatch" in values:
        named = values.pop("dispatch")
        if not isinstance(named, str):
            raise ConfigError(refusal("conditions.dispatch", named, "it must be a name"))
        library = None if named == "all_to_all" else load_dispatch(named)
        cluster = replace(cluster, dispatch=library)
    stated = {name: values.pop(name) for name in _LAUNCH_MODES if name in values}
    for name, value in stated.items():
        if not isinstance(value, bool):
            raise ConfigError(refusal(f"conditions.{name}", value, "it must be true or false"))
    if all(stated.get(name) for name in _LAUNCH_MODES):
        accepted = "conditions.launches_block has the host launch operations one by one"
        raise ConfigError(refusal("conditions.launches_in_graph", True, accepted))
    for name, mode in _LAUNCH_MODES.items():
        if stated.get(name):
            cluster = replace(cluster, launch_mode=mode)
        elif name in stated and cluster.launch_mode == mode:
            cluster = replace(cluster, launch_mode="asynchronous")
    conditions = build(RunConditions, asdict(site.conditions) | values, where="conditions")
    return cluster, replace(site, conditions=conditions)


def _fill_in(tables: dict[str, JsonValue], part: str, folder: str, beside: Path) -> None:
    """Replace the name of a chip or library, or the path of its file, by its tables."""
    named = tables.get(part)
    if not isinstance(named, str):
        return
    if named.endswith(".toml"):
        tables[part] = _own_file(part, beside / named)
    else:
        tables[part] = _named_tables(part, folder, named)


def names_in(folder: str, suffix: str = "toml") -> tuple[str, ...]:
    """Names of the entries in a folder of the catalogue, sorted."""
    return tuple(sorted(path.stem for path in (CATALOGUE / folder).glob(f"*.{suffix}")))


def catalogued(type_: type[Entry], kind: str, folder: str, name: str) -> Entry:
    """The entry of that name in a folder of the catalogue.

    Raises:
        UnknownHardware: if there is none of that `kind`; names the closest that is.
    """
    return build(type_, _named_tables(kind, folder, name), where=kind)


def _named_tables(kind: str, folder: str, name: str) -> dict[str, JsonValue]:
    if name not in (names := names_in(folder)):
        raise UnknownHardware(unknown_name(kind, name, names))
    return load_toml(CATALOGUE / folder / f"{name}.toml")


def _tables(kind: str, name_or_path: str) -> dict[str, JsonValue]:
    names = names_in(f"{kind}s")
    if name_or_path in names:
        return _named_tables(kind, f"{kind}s", name_or_path)
    if name_or_path.endswith(".toml"):
        return _own_file(kind, Path(name_or_path))
    raise UnknownHardware(
        f"{unknown_name(kind, name_or_path, names)} A file of your own must end in .toml."
    )


def _own_file(kind: str, path: Path) -> dict[str, JsonValue]:
    if not path.is_file():
        raise UnknownHardware(refusal(kind, str(path), "there is no such file"))
    try:
        return load_toml(path)
    except ConfigError as error:
        raise ConfigError(f"{kind}: {error}") from error
