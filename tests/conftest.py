"""What every test runs under: eight virtual CPU devices, and no silence about mistakes."""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

# A CUDA compiler plug-in without a driver logs an error at every start of JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

from scalejax.core.environment import set_required_flags

# A shell has what it runs in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast an example runs says how busy the machine is, not whether the property holds.
hypothesis.settings.register_profile("scalejax", deadline=None)
hypothesis.settings.load_profile("scalejax")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling is most of what tests do here; how fast their small programs run is not their matter.
# Workers that compile for a cluster do not inherit this.
jax.config.update("jax_disable_most_optimizations", True)
# Two thirds of compiling for a CPU are spent in XLA's emitters of fusions, and part of the rest
# in splitting a program for threads. XLA reads its flags once, when it starts.
# An unknown flag ends the process: each is for the versions that were seen to know it.
QUICK_FLAGS = ""
if jax.__version_info__[:2] <= (0, 12):
    QUICK_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__[:2] <= (0, 10):
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
set_required_flags()
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}")
    jax.devices()
# And what one test has compiled, no other compiles again, nor another file of tests beside it: the
# runs of one session share a folder, in which they begin with nothing.
if "SCALEJAX_COMPILED_BY_TESTS" not in os.environ:
    os.environ["SCALEJAX_COMPILED_BY_TESTS"] = tempfile.mkdtemp(prefix="scalejax-compiled-")
    atexit.register(shutil.rmtree, os.environ["SCALEJAX_COMPILED_BY_TESTS"], ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", os.environ["SCALEJAX_COMPILED_BY_TESTS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Modules that tests write are not kept compiled: two of one second and size are taken for one.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def pytest_collection_finish() -> None:
    """Keeps modules and collected tests out of garbage collection, which took a seventh of the
    time of tests that train."""
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Has `--dist loadgroup` run tests that share a fixture of their module in one worker, which
    makes it once; all others are dealt out one by one. And marks rows as slow."""
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
        if any(each.scope == "module" for several in fixtures for each in several):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    kept = mark_slow_rows(items)
    if kept and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_except names rows that are not there: {sorted(kept)}")


def mark_slow_rows(items: list[pytest.Item]) -> set[str]:
    """Of a test with `slow_except("id", ...)`, marks all rows but those as slow.

    Returns: ids that no row has, after the name of their test.
    """
    missing, found = set(), set()
    for item in items:
        if mark := item.get_closest_marker("slow_except"):
            test = item.nodeid.partition("[")[0]
            row = getattr(item, "callspec").id  # noqa: B009
            missing |= {f"{test}[{each}]" for each in mark.args}
            found.add(f"{test}[{row}]")
            if row not in mark.args:
                item.add_marker(pytest.mark.slow)
    return missing - found


@pytest.fixture(scope="module")
def compiles_quickly():
    """Has processes that are started compile as this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}")
        yield


@pytest.fixture(scope="module")
def slurm():
    """A scheduler of one node on this machine: the path of its slurm.conf."""
    with slurm_here(1) as path:
        yield path


@pytest.fixture(scope="module")
def slurm_of_three():
    """A scheduler of three nodes, n1 to n3, on this machine: the path of its slurm.conf."""
    with slurm_here(3) as path:
        yield path


@contextmanager
def slurm_here(nodes):
    """A scheduler of so many nodes on this machine: the path of its slurm.conf."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("srun", "slurmctld", "munged"))):
        pytest.skip("needs root and the Debian packages slurm-wlm and munge")
    folder = Path("/tmp") / f"scalejax-slurm-{nodes}-{os.getpid()}"  # munge's user must reach it
    script = [str(Path(__file__).parent / "support" / "slurm.sh")]
    first = os.getpid() % 1000 * 8 + nodes  # two schedulers may be up at once
    numbers = [str(16000 + first), str(24000 + first), str(nodes)]
    up = subprocess.run([*script, "up", str(folder), *numbers], text=True, stdout=subprocess.PIPE)
    try:
        if up.returncode:
            pytest.skip("SLURM did not come up on this machine")
        yield up.stdout.strip()
    finally:
        subprocess.run([*script, "down", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)
