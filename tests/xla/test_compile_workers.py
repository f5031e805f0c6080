"""How many workers there is room for: by the machine, and by the limits of its control groups."""

from pathlib import Path

import pytest

from scalejax.xla.worker_pool import WORKER_BYTES, free_bytes

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def machine(root: Path, groups: str, available_kb: int = 8_000_000) -> Path:
    """A machine with so much memory, and a process in these groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def limit(root: Path, folder: str, names: tuple[str, str, str], values: tuple[str, int, int]):
    """A group with a limit, what is taken of it, and what of that is given up when asked for."""
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{values[0]}\n")
    (path / names[1]).write_text(f"{values[1]}\n")
    (path / "memory.stat").write_text(f"anon 5\n{names[2]} {values[2]}\n")


@pytest.mark.parametrize(
    ("groups", "folder", "names"),
    [
        ("0::/jobs/mine\n", "jobs", V2),  # the limit of a group above it
        ("0::/\n", "", V2),  # a container that sees its own group as the root
        ("5:cpu:/\n4:memory:/docker/abc\n0::/\n", "memory", V1),  # by a name that is not there
    ],
)
def test_free_memory_is_within_the_limit_of_the_control_group(tmp_path, groups, folder, names):
    """1 GB of which 700 MB are taken, 200 MB of them by files that can be read again."""
    root = machine(tmp_path, groups)
    limit(root, folder, names, (str(10**9), 7 * 10**8, 2 * 10**8))

    assert free_bytes(root) == 5 * 10**8
    limit(root, folder, names, (str(10**8), 7 * 10**8, 0))
    assert free_bytes(root) == 0


def test_free_memory_without_a_limit_is_that_of_the_machine(tmp_path):
    """ "max", or no groups at all; and where nothing is known, enough for two workers."""
    root = machine(tmp_path / "one", "0::/jobs\n")
    limit(root, "jobs", V2, ("max", 7 * 10**8, 0))

    assert free_bytes(root) == 8_000_000 * 1024
    assert free_bytes(machine(tmp_path / "other", "")) == 8_000_000 * 1024
    assert free_bytes(tmp_path / "none") == 2 * WORKER_BYTES
