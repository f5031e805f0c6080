"""Compiling for NVIDIA GPUs needs no CUDA toolkit."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scalejax.xla import cuda_toolkit
from scalejax.xla.target import has_cuda_compiler

EXAMPLE = Path(__file__).parents[2] / "scalejax/config/examples/fashion_small_batch.toml"


def test_tools_say_their_version_and_write_an_empty_file(tmp_path: Path):
    """As XLA calls them; afterwards the folder is gone."""
    made = tmp_path / "made"

    with cuda_toolkit.toolkit() as folder:
        assert "define" not in (folder / "nvvm/libdevice/libdevice.10.bc").read_text()
        for tool in ("ptxas", "nvlink"):
            said = subprocess.check_output([folder / "bin" / tool, "--version"], text=True)
            assert "release 13" in said
            subprocess.check_call([folder / "bin" / tool, "in", "-o", made, "-arch=sm_90a"])
            assert made.read_bytes() == b""
            made.unlink()
    assert not folder.exists()


def test_sigterm_leaves_no_folder():
    """Which would stay in the temporary directory for good."""
    with pytest.raises(KeyboardInterrupt), cuda_toolkit.toolkit() as folder:
        signal.raise_signal(signal.SIGTERM)
    assert not folder.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


_HIDDEN = "for each in /usr/local/cuda*; do mount -t tmpfs none $(readlink -f $each); done; "


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs pip install 'scalejax[gpu-target]'")
@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="may not hide folders of this machine",
)
def test_a_step_is_compiled_where_no_cuda_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a process that sees no CUDA of this machine, and no tool of it on its path: 8 s."""
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    command = f"{sys.executable} -m scalejax predict {EXAMPLE} --cluster dgx-h100 --devices 8"

    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", f"{_HIDDEN} ! ls /usr/local/cuda/bin && exec {command}"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "compiled for 8 devices" in done.stderr
    assert "for the CPU" not in done.stdout
