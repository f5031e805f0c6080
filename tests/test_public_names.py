"""What `from scalejax import ...` offers, held against what is there."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from hardware_cases import CHIP

import scalejax


def example_of(name: str) -> doctest.DocTest:
    """The examples in the docstring of a public name."""
    text = inspect.getdoc(getattr(scalejax, name)) or ""
    return doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, None)


def test_public_names_are_sorted_and_few():
    """A reader can take them in at a glance."""
    assert scalejax.__all__ == sorted(scalejax.__all__)
    assert len(scalejax.__all__) <= 40


def test_public_names_are_those_that_have_a_home():
    """Each one resolves, and none is offered that is not listed."""
    homes = [name for names in scalejax._HOMES.values() for name in names]

    assert sorted(homes) == scalejax.__all__
    for name in scalejax.__all__:
        assert getattr(scalejax, name).__name__ == name
    assert set(scalejax.__all__) <= set(dir(scalejax))


def test_every_public_name_has_an_example():
    """Under that heading of its docstring, where a reader looks for one."""
    for name in scalejax.__all__:
        found = example_of(name)
        assert found.examples, name
        assert "\nExample:\n" in (found.docstring or ""), name


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one example compiles, no other compiles again."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def little_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this machine takes minutes: a megabyte, two devices, no process besides this one. Its
    products are measured by `measure/test_calibrate.py`, on the same grid."""
    home = "scalejax.measure.devices"
    monkeypatch.setattr(f"{home}.machine.measure_chip", lambda *_: CHIP)
    monkeypatch.setattr(f"{home}._process_counts", list)
    monkeypatch.setattr(f"{home}._device_counts", lambda: [2])
    monkeypatch.setattr(f"{home}.collectives.SIZES", (64, 2**20))
    monkeypatch.setattr(f"{home}._STORED_BYTES", 2**20)
    monkeypatch.setattr(f"{home}._COPIED_BYTES", 2**20)


# The others compile, train, measure or draw.
@pytest.mark.slow_except(
    *("Chip", "Cluster", "ConfigError", "DoesNotFit", "Framework", "Layout", "Prediction"),
    *("Program", "ResolvedRun", "RunConfig", "ScalejaxError", "Step", "Validation"),
    *("build_mesh", "cluster_names", "load_cluster", "load_config", "resolve", "search"),
    "validate",
)
@pytest.mark.parametrize("name", scalejax.__all__)
@pytest.mark.usefixtures("little_to_measure")
def test_examples_of_public_names_run(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As they stand, each by itself, from any folder: they are what a reader copies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SCALEJAX_CACHE", str(cache))
    said: list[str] = []

    results = doctest.DocTestRunner().run(example_of(name), out=said.append)

    assert results.failed == 0, "".join(said)


def test_no_public_name_is_that_of_a_module():
    """`scalejax.simulator.predict` is always the module, whatever was imported first."""
    modules = {path.stem for path in Path(scalejax.__file__).parent.iterdir()}

    assert not modules & set(scalejax.__all__)


def test_unknown_name_is_an_attribute_error():
    """A misspelt name fails as it does in any module."""
    with pytest.raises(AttributeError, match="has no attribute 'laod_config'"):
        _ = scalejax.laod_config  # type: ignore[attr-defined]


def test_importing_the_package_starts_no_jax():
    """`import scalejax` and its plain-data names leave JAX alone."""
    code = (
        "import sys, scalejax; scalejax.load_config; scalejax.study; sys.exit('jax' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_version_is_that_of_the_package():
    """The number stands in two files, and is the same."""
    import tomllib

    pyproject = Path(__file__).parent.parent / "pyproject.toml"

    assert scalejax.__version__ == tomllib.loads(pyproject.read_text())["project"]["version"]
