"""compiler: what turns Python into kernels, or into a graph that is launched at once. One file per kind of compiler.

`base` holds what they share: the modules of a pipeline that they take, and what stands in for them.
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
