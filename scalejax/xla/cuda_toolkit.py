"""What XLA requires of the CUDA toolkit to compile for NVIDIA GPUs, without the toolkit.

XLA runs ptxas and nvlink to make machine code of every kernel before it returns a program. The
program is read as HLO, and the machine code is discarded: it took a third of the compile time, and
needs tools that machines without a GPU seldom have. In `toolkit` both write an empty file.
Libdevice, CUDA's mathematical functions in LLVM's form, is linked to a kernel once the program is
final: here it has no functions, and a kernel's calls of them stay calls.

The compiled programs are the same with and without machine code and libdevice (compared with jax
0.10.2 and 0.12.0.1), but without them they cannot run.
"""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from scalejax.core.environment import terminated_as_interrupted

_RELEASE = "13.0, V13.0.88"
"""The toolkit with which programs were compared; XLA reads it to know what ptxas supports."""

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

_LIBDEVICE = 'target triple = "nvptx64-nvidia-gpulibs"\n'
"""A module of LLVM without functions, as text, which LLVM reads as it reads bitcode."""


@contextmanager
def toolkit() -> Iterator[Path]:
    """A folder for XLA's option `xla_gpu_cuda_data_dir`, until the end of the context; SIGTERM ends
    the context as Ctrl-C does, unless it is handled already."""
    is_handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ending = nullcontext() if is_handled else terminated_as_interrupted()
    with ending, tempfile.TemporaryDirectory(prefix="scalejax-cuda-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        for tool in ("ptxas", "nvlink"):
            path = folder / "bin" / tool
            path.write_text(_ASSEMBLER)
            path.chmod(0o755)
        library = folder / "nvvm" / "libdevice" / "libdevice.10.bc"
        library.parent.mkdir(parents=True)
        library.write_text(_LIBDEVICE)
        yield folder
