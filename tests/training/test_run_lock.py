"""One run at a time in a folder."""

import subprocess
import sys

import pytest

from scalejax.core.errors import ConfigError
from scalejax.training.run_folder import RunLock


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_over(tmp_path):
    """Also by the same process, which may train twice."""
    with RunLock() as first:
        first.take(tmp_path)
        first.take(tmp_path)  # as often as one likes
        with RunLock() as second, pytest.raises(ConfigError, match="another run trains in"):
            second.take(tmp_path)

    with RunLock() as third:
        third.take(tmp_path)


def test_a_killed_process_leaves_no_lock(tmp_path):
    """The system lets go of it."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from scalejax.training.run_folder import RunLock\n"
        "lock = RunLock()\n"
        "lock.take(Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder.stdout:
        holder.stdout.readline()
        with RunLock() as lock, pytest.raises(ConfigError, match="another run trains in"):
            lock.take(tmp_path)
        holder.kill()
        holder.wait()

    with RunLock() as lock:
        lock.take(tmp_path)
    assert list(tmp_path.iterdir()) == []
