"""What XLA asks of the CUDA toolkit when it compiles for NVIDIA GPUs, without the toolkit.

XLA has ptxas and nvlink make machine code of every kernel before it returns a program, which is
read as HLO: the machine code is thrown away. It was a third of the time of compiling, and needs
tools that machines without a GPU seldom have. In `toolkit` both write an empty file. Libdevice,
CUDA's mathematical functions in LLVM's form, is NVIDIA's own: from the package nvidia-nvvm, or a
toolkit that is installed.

The compiled programs are the same with machine code and without (compared with jax 0.10.2 and
0.12.0.1); they cannot run.
"""

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from scalejax.core.environment import terminated_as_interrupted
from scalejax.core.errors import ProfileError

_RELEASE = "13.0, V13.0.88"
"""The toolkit with which programs were compared; XLA reads it to know what ptxas can."""

_ASSEMBLER = f"""#!/bin/sh
# XLA asks for the version, and for a file of machine code, which nobody reads.
while [ $# -gt 0 ]; do
  case $1 in
    --version) echo "Cuda compilation tools, release {_RELEASE}"; exit ;;
    -o) shift; : > "$1" ;;
  esac
  shift
done
"""


@contextmanager
def toolkit() -> Iterator[Path]:
    """A folder for XLA's option `xla_gpu_cuda_data_dir`, until the end of the context, which
    SIGTERM ends as Ctrl-C does unless it is handled already.

    Raises:
        ProfileError: if there is no libdevice.
    """
    library = libdevice()
    if library is None:
        raise ProfileError(
            "CUDA's libdevice is not installed, which the compiler for NVIDIA GPUs needs: "
            "pip install 'scalejax[gpu-target]'."
        )
    is_handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ending = nullcontext() if is_handled else terminated_as_interrupted()
    with ending, tempfile.TemporaryDirectory(prefix="scalejax-cuda-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        for tool in ("ptxas", "nvlink"):
            path = folder / "bin" / tool
            path.write_text(_ASSEMBLER)
            path.chmod(0o755)
        (folder / "nvvm").mkdir()
        (folder / "nvvm" / "libdevice").symlink_to(library.parent)
        yield folder


def libdevice() -> Path | None:
    """CUDA's libdevice.10.bc; None if it is not installed."""
    package = importlib.util.find_spec("nvidia")
    roots = [] if package is None else list(package.submodule_search_locations or ())
    installed = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    for root in (*(f"{each}/cu13" for each in roots), *installed):
        path = Path(root or "/") / "nvvm" / "libdevice" / "libdevice.10.bc"
        if path.is_file():
            return path
    return None
