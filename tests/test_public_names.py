"""What `from scalejax import ...` offers, held against what is there."""

import subprocess
import sys

import pytest

import scalejax


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


def test_no_public_name_is_that_of_a_module():
    """`scalejax.simulator.predict` is always the module, whatever was imported first."""
    from pathlib import Path

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
    from pathlib import Path

    pyproject = Path(__file__).parent.parent / "pyproject.toml"

    assert scalejax.__version__ == tomllib.loads(pyproject.read_text())["project"]["version"]
