"""What compilers need of the machine: packages, C and C++ compilers, headers."""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from sdopt.hardware.cards import TRITON, missing
from sdopt.optimizations.base import Context


def missing_for_inductor(ctx: Context) -> list[str]:
    """Returns what Inductor lacks on this device."""
    found = []
    if ctx.device.is_cuda:
        found += missing(ctx.device, TRITON)
    if not ctx.device.is_here:
        return found
    if ctx.device.is_cuda:
        found += _missing_for_triton()
    else:
        # Inductor asks $CXX, then for these: see torch._inductor.cpp_builder.
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        if not any(name and shutil.which(name) for name in compilers):
            found.append("Inductor on a CPU needs a C++ compiler: install g++ (Debian: apt-get install g++)")
    if sys.platform == "win32":
        found.append("Inductor is not tried on Windows")
    return found


def _missing_for_triton() -> list[str]:
    """Returns what Triton lacks here: it compiles its launcher as an extension of Python (triton/runtime/build.py)."""
    found = []
    if find_spec("triton") is None:
        found.append("Inductor on CUDA needs the package triton: pip install triton")
    own = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([own] if own else ["gcc", "clang"])):
        found.append(
            f"Inductor on CUDA needs a C compiler, and CC={own} is none"
            if own
            else "Inductor on CUDA needs a C compiler: install gcc (Debian: apt-get install gcc), or set CC"
        )
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
    if not (headers / "Python.h").is_file():
        found.append(f"Inductor on CUDA needs {headers / 'Python.h'}: install it (Debian: apt-get install python3-dev)")
    return found
