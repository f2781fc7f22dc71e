"""compiler: compiles modules to kernels, or captures them as graphs that launch at once. One file per compiler.

`base` has the shared parts: the modules that compilers replace, the replacements, and common conflicts.
"""

from sdopt.optimizations.compiler.aot import Aot
from sdopt.optimizations.compiler.blade import Blade
from sdopt.optimizations.compiler.cuda_graphs import CudaGraphs
from sdopt.optimizations.compiler.deepspeed import DeepSpeed
from sdopt.optimizations.compiler.eager import Eager
from sdopt.optimizations.compiler.inductor import Inductor, InductorDynamic, Regional
from sdopt.optimizations.compiler.onnxruntime import OnnxRuntime
from sdopt.optimizations.compiler.openvino import OpenVino
from sdopt.optimizations.compiler.tensorrt import TensorRt
from sdopt.optimizations.compiler.torchscript import TorchScript
from sdopt.optimizations.compiler.whole_step import WholeStep

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
