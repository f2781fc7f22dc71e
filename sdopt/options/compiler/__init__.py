"""compiler: compiles modules to kernels, or captures them as graphs that launch at once.

`base` has the shared parts: the modules that compilers replace, the replacements, and common conflicts.
"""

from sdopt.options.compiler.aot import Aot
from sdopt.options.compiler.base import Eager
from sdopt.options.compiler.deepspeed import DeepSpeed
from sdopt.options.compiler.engines import (
    Blade,
    CudaGraphs,
    OnnxRuntime,
    OpenVino,
    TensorRt,
    TorchScript,
)
from sdopt.options.compiler.inductor import Inductor, InductorDynamic, Regional
from sdopt.options.compiler.whole_step import WholeStep

__all__ = [
    "Aot",
    "Blade",
    "CudaGraphs",
    "DeepSpeed",
    "Eager",
    "Inductor",
    "InductorDynamic",
    "OnnxRuntime",
    "OpenVino",
    "Regional",
    "TensorRt",
    "TorchScript",
    "WholeStep",
]
