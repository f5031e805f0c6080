"""Loaders of chips, clusters and communication libraries from TOML: the catalogue's or a user's.

A cluster file gives its chip, library and dispatch by name, by a path relative to the file, or as
inline tables; see `clusters/dgx-h100.toml`. With `based_on = "dgx-h100"` it states only the
differences.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

from scalejax.core.errors import ConfigError, UnknownHardware, prefixed, refusal, unknown_name
from scalejax.core.serialization import JsonValue, build, load_toml, plain, save_toml
from scalejax.hardware.chip import Chip
from scalejax.hardware.cluster import (
    Cluster,
    CommunicationLibrary,
    DispatchLibrary,
    HostMemory,
    LaunchMode,
    Link,
    Network,
    Power,
    Price,
)
from scalejax.hardware.site import RunConditions, Site

CATALOGUE = Path(__file__).parent
NAMED_PARTS = {"chip": "chips", "library": "libraries", "dispatch": "dispatch"}
"""The folder of the catalogue for each part of a cluster file that may be a name."""

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
        UnknownHardware: if it is neither; names the closest one.
        ConfigError: if the file does not describe a chip.
    """
    return build(Chip, _tables("chip", name_or_path, "chips"), where="chip")


def load_library(name: str) -> CommunicationLibrary:
    """The communication library of that name in the catalogue.

    Raises:
        UnknownHardware: if there is none; names the closest one.
    """
    return catalogued(CommunicationLibrary, "library", "libraries", name)


def load_dispatch(name: str) -> DispatchLibrary:
    """The catalogue's library of that name for the dispatch of tokens to experts.

    Raises:
        UnknownHardware: if there is none; names the closest one.
    """
    return catalogued(DispatchLibrary, "dispatch", "dispatch", name)


def load_cluster(name_or_path: str) -> Cluster:
    """The cluster of that name in the catalogue, or in a TOML file; `load_site` loads its site.

    Example:
        >>> from scalejax import load_cluster
        >>> load_cluster("dgx-h100").title
        'NVIDIA DGX H100, 8 x 400 Gb/s InfiniBand'

    Raises:
        UnknownHardware: if it, its chip or its library is in neither; names the closest one.
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
        UnknownHardware: if it, its chip or its library is in neither; names the closest one.
        ConfigError: if the file does not describe a cluster.
    """
    tables = _cluster_tables(name_or_path)
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
        parts: tables or file names that replace some fields of the cluster.

    Raises:
        ConfigError: if the file cannot be written.
    """
    save_toml({**_table(cluster), **_table(site), **(parts or {})}, path)


def _table(value: Cluster | Site) -> dict[str, JsonValue]:
    fields = plain(value)
    return fields if isinstance(fields, dict) else {}


LAUNCH_MODES: dict[str, LaunchMode] = {
    "launches_block": "blocking",
    "launches_in_graph": "graph",
}
"""The launch mode that each condition stands for."""


def with_conditions(
    cluster: Cluster, site: Site, values: Mapping[str, JsonValue]
) -> tuple[Cluster, Site]:
    """Copies of `cluster` and `site` with conditions replaced.

    Args:
        cluster: the hardware.
        site: its site.
        values: by field of `RunConditions`, such as {"step_cv": 0.02}; also "launches_block" or
            "launches_in_graph", which set the cluster's `launch_mode`, and "dispatch", the name of
            its library for experts, or "all_to_all" for none.

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
    stated = {name: values.pop(name) for name in LAUNCH_MODES if name in values}
    for name, value in stated.items():
        if not isinstance(value, bool):
            raise ConfigError(refusal(f"conditions.{name}", value, "it must be true or false"))
    if all(stated.get(name) for name in LAUNCH_MODES):
        accepted = "conditions.launches_block has the host launch operations one by one"
        raise ConfigError(refusal("conditions.launches_in_graph", True, accepted))
    for name, mode in LAUNCH_MODES.items():
        if stated.get(name):
            cluster = replace(cluster, launch_mode=mode)
        elif name in stated and cluster.launch_mode == mode:
            cluster = replace(cluster, launch_mode="asynchronous")
    conditions = build(RunConditions, asdict(site.conditions) | values, where="conditions")
    return cluster, replace(site, conditions=conditions)


_PARTS: dict[str, type] = {
    "chip": Chip,
    "link": Link,
    "network": Network,
    "host": HostMemory,
    "power": Power,
    "price": Price,
    "cluster": Cluster,
}
HARDWARE_TABLES = tuple(_PARTS)
"""First names of the fields that `with_hardware` replaces."""
_TIMES = re.compile(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?)x")


def with_hardware(cluster: Cluster, values: Mapping[str, JsonValue]) -> Cluster:
    """A copy of `cluster` with fields of its hardware replaced, as stated in its title.

    Args:
        cluster: the hardware.
        values: by dotted name, such as {"network.bytes_per_second": 8e11}, or "2x" for twice the
            current value; fields outside tables as {"cluster.devices_per_node": 16}.

    Raises:
        ConfigError: if there is no such field, it cannot have that value, or it has no number to
            multiply.
    """
    if not values:
        return cluster
    with prefixed(f"{cluster.name}: "):
        return _with_hardware(cluster, values)


def parts_without(cluster: Cluster, values: Mapping[str, JsonValue]) -> list[str]:
    """Those of `values`, as in `with_hardware`, that are multiples of something `cluster` lacks,
    such as the rate of a network that it does not have."""
    return [
        name
        for name, value in values.items()
        if isinstance(value, str)
        and _TIMES.fullmatch(value)
        and name.partition(".")[0] in ("network", "host", "power", "price")
        and getattr(cluster, name.partition(".")[0]) is None
    ]


def _with_hardware(cluster: Cluster, values: Mapping[str, JsonValue]) -> Cluster:
    tables = _table(cluster)
    for name, value in values.items():
        *path, last = name.removeprefix("cluster.").split(".")
        table = tables
        for part in path:
            inner = table.get(part)
            if not isinstance(inner, dict):
                inner = table[part] = {}
            table = inner
        # Unknown fields are refused as such below, whatever their value.
        is_known = last in table or _is_field(name)
        table[last] = _multiplied(name, table.get(last), value) if is_known else value
    if "price.dollars_per_device_hour" in values and "price.date" not in values:
        tables["price"] = _undated(tables["price"])
    sources = tables.get("sources")
    if isinstance(sources, dict):
        for name, value in values.items():
            sources[name.removeprefix("cluster.")] = f"{_GIVEN}{value}"
    given = ", ".join(f"{name} {value}" for name, value in values.items())
    return replace(build(Cluster, tables), title=f"{cluster.title}, {given}")


def replaced_in_words(cluster: Cluster) -> str:
    """What `with_hardware` replaced in a cluster, as in its title; "" if nothing."""
    given = {name: said for name, said in cluster.sources.items() if said.startswith(_GIVEN)}
    return ", ".join(f"{name} {said.removeprefix(_GIVEN)}" for name, said in given.items())


_GIVEN = "given: "
"""Beginning of the source of a replaced field."""


def _is_field(name: str) -> bool:
    """Whether a dotted name is that of a field of a cluster or of one of its parts."""
    *path, last = name.removeprefix("cluster.").split(".")
    part = _PARTS.get(path[0]) if path else Cluster
    return len(path) < 2 and part is not None and last in {each.name for each in fields(part)}


def _undated(price: JsonValue) -> JsonValue:
    """A price without the date of its list."""
    if not isinstance(price, dict):
        return price
    return {name: value for name, value in price.items() if name != "date"}


def _multiplied(name: str, old: JsonValue, value: JsonValue) -> JsonValue:
    """`value`, or for "2x" twice the number `old`."""
    found = _TIMES.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        if isinstance(value, str) and isinstance(old, int | float) and not isinstance(old, bool):
            accepted = (
                f"it must be a number, which is {old:g} there, or a multiple of it, such as 2x"
            )
            raise ConfigError(refusal(name, value, accepted))
        return value
    if isinstance(old, bool) or not isinstance(old, int | float):
        known = f"it is {old!r} there" if old is not None else "there is none"
        accepted = f"{known}, which has no multiple: give the value itself"
        raise ConfigError(refusal(name, value, accepted))
    product = old * float(found[1])
    return round(product) if isinstance(old, int) and product.is_integer() else product


_NOT_INHERITED = ("name", "calibrated")
_OF_ITS_CHIP = ("shared", "price", "power")


def _cluster_tables(name_or_path: str, derived: tuple[str, ...] = ()) -> dict[str, JsonValue]:
    """The tables of a cluster, with its parts filled in and merged into the cluster it is based on.

    Args:
        name_or_path: the cluster.
        derived: the files that are based on it, in order from the first.
    """
    kind = "based_on" if derived else "cluster"
    tables = _tables(kind, name_or_path, "clusters")
    beside = Path(name_or_path).parent
    shared = tables.get("shared")
    for each in shared if isinstance(shared, list) else ():
        if isinstance(each, dict):
            _fill_in(each, "chip", NAMED_PARTS["chip"], beside)
    for part, folder in NAMED_PARTS.items():
        _fill_in(tables, part, folder, beside)
    if (base := tables.pop("based_on", None)) is None:
        return tables
    if not isinstance(base, str):
        accepted = "it must be the name of a cluster, or the path of its file"
        raise ConfigError(f"{name_or_path}: {refusal('based_on', base, accepted)}")
    path = str((beside / base).resolve()) if base.endswith(".toml") else base
    chain = (*derived, str(Path(name_or_path).resolve()))
    if path in chain:
        accepted = "it is based on this file itself, through " + " and ".join(
            Path(each).name for each in chain
        )
        raise ConfigError(f"{name_or_path}: {refusal('based_on', base, accepted)}")
    return _based(_cluster_tables(path, chain), tables, Path(name_or_path).stem)


def _based(
    base: dict[str, JsonValue], own: dict[str, JsonValue], stem: str
) -> dict[str, JsonValue]:
    """The tables of a cluster `own` based on another, named after its file unless it has a name."""
    chips = base.get("chip"), own.get("chip")
    names = [chip.get("name") if isinstance(chip, dict) else None for chip in chips]
    is_other_chip = names[1] is not None and names[0] != names[1]
    left = _NOT_INHERITED + (_OF_ITS_CHIP if is_other_chip else ())
    kept = {name: value for name, value in base.items() if name not in left}
    if is_other_chip:
        kept.pop("chip", None)
    own_price = own.get("price")
    if isinstance(own_price, dict) and "dollars_per_device_hour" in own_price:
        kept["price"] = _undated(kept.get("price", {}))
    sources = kept.get("sources")
    if isinstance(sources, dict):
        gone = set(_leaves(own))
        kept["sources"] = {
            name: source
            for name, source in sources.items()
            if name not in gone and not (is_other_chip and name.startswith(("price.", "power.")))
        }
    name = own.get("name", re.sub(r"[^A-Za-z0-9._-]+", "-", stem))
    return {"name": name, **_merged(kept, {"title": f"{name}, based on {base.get('name')}", **own})}


def _leaves(value: JsonValue, prefix: str = "") -> Iterator[str]:
    """Dotted names of all values in a table."""
    if not isinstance(value, dict):
        yield prefix
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{prefix}.{key}" if prefix else key)


def _merged(base: dict[str, JsonValue], own: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """`base` with the values of `own`; within tables, value by value."""
    merged = dict(base)
    for key, value in own.items():
        inner = merged.get(key)
        is_table = isinstance(inner, dict) and isinstance(value, dict)
        merged[key] = _merged(inner, value) if is_table else value  # type: ignore[arg-type]
    return merged


def _fill_in(tables: dict[str, JsonValue], part: str, folder: str, beside: Path) -> None:
    """Replace the name of a chip or library, or the path of its file, with its tables."""
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
        UnknownHardware: if there is none of that `kind`; names the closest one.
    """
    return build(type_, _named_tables(kind, folder, name), where=kind)


def _named_tables(kind: str, folder: str, name: str) -> dict[str, JsonValue]:
    if name not in (names := names_in(folder)):
        raise UnknownHardware(unknown_name(kind, name, names))
    return load_toml(CATALOGUE / folder / f"{name}.toml")


def _tables(kind: str, name_or_path: str, folder: str) -> dict[str, JsonValue]:
    names = names_in(folder)
    if name_or_path in names:
        return _named_tables(kind, folder, name_or_path)
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
