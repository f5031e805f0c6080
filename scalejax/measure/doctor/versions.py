"""Checks of the versions of Python, libraries and driver against each other's requirements."""

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from scalejax.core.environment import text_of
from scalejax.measure.doctor.finding import Finding, found

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_PLUGINS = tuple(f"jax-cuda{cuda}-{part}" for cuda in (12, 13) for part in ("plugin", "pjrt"))
_OLDEST_DRIVERS = {12: 525, 13: 580}
"""Oldest driver by CUDA version. Source: CUDA Toolkit release notes, table of minimum drivers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Installed versions and their requirements."""

    python: str
    """Python version."""
    installed: Mapping[str, str]
    """Versions of installed libraries by name."""
    required: Mapping[str, str]
    """Version ranges that scalejax and jax accept, such as "<0.14,>=0.10.2"; also for Python."""
    driver: str | None
    """NVIDIA driver version; None without a driver."""


def read_versions() -> Versions:
    """The versions of this process."""
    installed = {}
    for name in (*_LIBRARIES, *_PLUGINS):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        required = {"python": metadata.metadata("scalejax")["Requires-Python"]}
    except metadata.PackageNotFoundError:  # run from source
        required = {}
    for package in ("jax", "scalejax"):  # jax names its jaxlib; scalejax names its jax
        required |= _required_by(package)
    return Versions(
        python=platform.python_version(),
        installed=installed,
        required=required,
        driver=_driver(),
    )


def version_findings(versions: Versions) -> Iterator[Finding]:
    """A finding for each library, and for the CUDA plug-in and driver."""
    yield _against("python", versions.python, versions.required.get("python"))
    for name in _LIBRARIES:
        yield _against(name, versions.installed.get(name), versions.required.get(name))
    plugins = {name: versions.installed[name] for name in _PLUGINS if name in versions.installed}
    jaxlib = versions.installed.get("jaxlib")
    for name, version in plugins.items():
        # JAX ignores a plug-in whose version differs from jaxlib's, and thus the GPUs.
        fix = f"pip install '{name}=={jaxlib}'"
        yield found(
            "versions", name, version, f"that of jaxlib, {jaxlib}", bad=version != jaxlib, fix=fix
        )
    if versions.driver is not None:
        yield _driver_finding(versions.driver, list(plugins))


def _driver_finding(driver: str, plugins: list[str]) -> Finding:
    cudas = sorted({int(name[8:10]) for name in plugins})
    oldest = _OLDEST_DRIVERS[max(cudas, default=13)]
    major = int(re.match(r"\d+", driver)[0])  # type: ignore[index]  it begins with a number
    if not cudas:
        expected = "a plug-in of JAX to use it"
        fix = f"pip install 'jax[cuda{13 if major >= _OLDEST_DRIVERS[13] else 12}]'"
        return found("versions", "CUDA plug-in", "none", expected, bad=True, fix=fix)
    if len(cudas) > 1:
        fix = "pip uninstall those of one of them"
        value = "plug-ins of CUDA 12 and of 13"
        return found("versions", "CUDA plug-in", value, "those of one", warn=True, fix=fix)
    fix = f"a driver of {oldest} or later" + (", or jax[cuda12]" if major >= 525 else "")
    expected = f"at least {oldest}, for CUDA {cudas[0]}"
    return found("versions", "NVIDIA driver", driver, expected, bad=major < oldest, fix=fix)


def _against(name: str, version: str | None, required: str | None) -> Finding:
    asked = name if required is None else f"{name}{required}"
    accepted = SpecifierSet(required or "", prereleases=True)
    is_good = version is not None and version in accepted
    fix = "install such a Python" if name == "python" else f"pip install '{asked}'"
    return found("versions", name, version or "missing", required or None, bad=not is_good, fix=fix)


def _required_by(package: str) -> dict[str, str]:
    """Requirements of a package without extras."""
    try:
        asked = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return {}
    parsed = [Requirement(each) for each in asked]
    return {
        each.name: str(each.specifier)
        for each in parsed
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }


def _driver() -> str | None:
    text = text_of("/proc/driver/nvidia/version")
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", text)
    return version[1] if version else None
