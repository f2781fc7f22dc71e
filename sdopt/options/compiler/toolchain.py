"""Checks what compilers need: packages, C and C++ compilers, headers, and other options that they leave as they are."""

import os
import shutil
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sdopt.hardware.cards import TRITON, missing
from sdopt.options.attention import Sdpa
from sdopt.options.base import Context

_UNPACKED = "/tmp"
"""See `create_temp_dir` in torch/csrc/inductor/aoti_package/model_package_loader.cpp."""


def unfit_for_inductor(ctx: Context) -> list[str]:
    """Returns the conflicts of Inductor with this device and machine, and with attention that it would change."""
    found = []
    attention = ctx.chosen.get("attention")
    if isinstance(attention, Sdpa) and attention.backend == "math":
        # See torch/_inductor/fx_passes/fuse_attention.py. On a CPU in float32 a trace shows the fused kernel; beside
        # some other options the products stay, as those of attention=vanilla do.
        fused = "Inductor turns the products and the softmax of attention=math back into a fused kernel"
        found.append(f"{fused}: choose attention=vanilla, or another compiler")
    if ctx.device.is_cuda:
        found += missing(ctx.device, TRITON)
    if not ctx.device.is_here:
        return found
    if ctx.device.is_cuda:
        if find_spec("triton") is None:
            found.append("Inductor on CUDA needs the package triton: pip install triton")
        found += missing_for_triton("Inductor on CUDA")
    else:
        found += _missing_cxx("Inductor on a CPU")
    if sys.platform == "win32":
        found.append("Inductor is not tested on Windows")
    elif "TORCHINDUCTOR_CACHE_DIR" not in os.environ and _is_noexec(tempfile.gettempdir()):
        folder = f"{tempfile.gettempdir()}, which is mounted noexec"
        found.append(f"Inductor loads compiled code from {folder}: choose another folder with TMPDIR=…")
    return found


def _is_noexec(folder: str) -> bool:
    """Returns whether a folder is mounted noexec; the loader's own error is the same as for too little memory."""
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def missing_for_packages(ctx: Context) -> list[str]:
    """Returns the conflicts of AOTInductor, which on CUDA compiles C++ with the CUDA toolkit's headers."""
    found = unfit_for_inductor(ctx)
    if ctx.device.is_here and _is_noexec(_UNPACKED):
        unpacks = f"AOTInductor unpacks compiled code to {_UNPACKED}, independent of TMPDIR"
        found.append(f"{unpacks}, and {_UNPACKED} is mounted noexec: choose compiler=inductor")
    if not (ctx.device.is_cuda and ctx.device.is_here):
        return found
    from torch.utils import cpp_extension

    what, home = "AOTInductor on CUDA", cpp_extension.CUDA_HOME
    found += _missing_cxx(what)
    # torch/csrc/inductor/aoti_runtime/utils_cuda.h includes this header, which PyTorch's wheels do not contain.
    if home is None or not (Path(home) / "include" / "cuda_runtime.h").is_file():
        found.append(f"{what} needs the headers of the CUDA toolkit: install it, and set CUDA_HOME")
    return found


def _missing_cxx(what: str) -> list[str]:
    # Inductor tries $CXX, and then these: see torch._inductor.cpp_builder.
    if any(name and shutil.which(name) for name in [os.environ.get("CXX"), "g++", "clang++"]):
        return []
    return [f"{what} needs a C++ compiler: install g++ (Debian: apt-get install g++)"]


def missing_for_triton(what: str) -> list[str]:
    """Returns what Triton lacks to compile its launcher as a Python extension (triton/runtime/build.py)."""
    found = []
    own = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([own] if own else ["gcc", "clang"])):
        found.append(
            f"{what} needs a C compiler, and CC={own} is not one"
            if own
            else f"{what} needs a C compiler: install gcc (Debian: apt-get install gcc), or set CC"
        )
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
    if not (headers / "Python.h").is_file():
        found.append(f"{what} needs {headers / 'Python.h'}: install it (Debian: apt-get install python3-dev)")
    return found
