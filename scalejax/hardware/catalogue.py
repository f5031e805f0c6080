"""Loaders of chips, clusters and communication libraries from TOML: the catalogue's or a user's.

A cluster file gives its chip and library by name, by a path relative to the file, or as tables in
place; see `clusters/dgx-h100.toml` for one to copy.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from scalejax.core.errors import ConfigError, UnknownHardware, prefixed, refusal, unknown_name
from scalejax.core.serialization import JsonValue, build, load_toml
from scalejax.hardware.chip import Chip
from scalejax.hardware.cluster import Cluster, CommunicationLibrary
from scalejax.hardware.site import RunConditions

CATALOGUE = Path(__file__).parent


def chip_names() -> tuple[str, ...]:
    """Names of the chips in the catalogue, sorted."""
    return _names("chips")


def cluster_names() -> tuple[str, ...]:
    """Names of the clusters in the catalogue, sorted.

    Example:
        >>> from scalejax import cluster_names
        >>> "dgx-h100" in cluster_names()
        True
    """
    return _names("clusters")


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
    if name not in _names("libraries"):
        raise UnknownHardware(unknown_name("library", name, _names("libraries")))
    tables = load_toml(CATALOGUE / "libraries" / f"{name}.toml")
    return build(CommunicationLibrary, tables, where="library")


def load_cluster(name_or_path: str) -> Cluster:
    """The cluster of that name in the catalogue, or in a TOML file.

    Example:
        >>> from scalejax import load_cluster
        >>> load_cluster("dgx-h100").title
        'NVIDIA DGX H100, 8 x 400 Gb/s InfiniBand'

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
    with prefixed(f"{name_or_path}: "):
        return build(Cluster, tables)


def with_conditions(cluster: Cluster, values: Mapping[str, JsonValue]) -> Cluster:
    """A copy of `cluster` with conditions replaced.

    Args:
        cluster: the hardware.
        values: by field of `RunConditions`, such as {"step_cv": 0.02}.

    Raises:
        ConfigError: if there is no such field, or it cannot have that value.
    """
    conditions = build(RunConditions, asdict(cluster.conditions) | dict(values), where="conditions")
    return replace(cluster, conditions=conditions)


def _fill_in(tables: dict[str, JsonValue], part: str, folder: str, beside: Path) -> None:
    """Replace the name of a chip or library, or the path of its file, by its tables."""
    named = tables.get(part)
    if not isinstance(named, str):
        return
    if named.endswith(".toml"):
        tables[part] = _own_file(part, beside / named)
        return
    if named not in _names(folder):
        raise UnknownHardware(unknown_name(part, named, _names(folder)))
    tables[part] = load_toml(CATALOGUE / folder / f"{named}.toml")


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (CATALOGUE / folder).glob("*.toml")))


def _tables(kind: str, name_or_path: str) -> dict[str, JsonValue]:
    names = _names(f"{kind}s")
    if name_or_path in names:
        return load_toml(CATALOGUE / f"{kind}s" / f"{name_or_path}.toml")
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
