"""compiler: what turns the denoiser's Python into kernels."""

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from sdopt.hardware.cards import TRITON, missing
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Contract, Finding, Optimization, Proof, Stage
from sdopt.pipelines.parts import denoiser_name, denoiser_of, device_of
from sdopt.schema import bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_REGION = "Torch-Compiled Region"


@dataclass(frozen=True)
class Eager(Optimization):
    """No compiler: PyTorch runs operator by operator."""

    stage: ClassVar[Stage] = Stage.COMPILE

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        def proof(trace: Trace) -> Finding:
            compiled = sum(n for name, n in trace.denoiser.operators.items() if name.startswith(_REGION))
            return Finding(not compiled, "operator by operator")

        return proof


@dataclass(frozen=True)
class Inductor(Optimization):
    """`torch.compile` with Inductor on the denoiser.

    `dynamic`: null lets the compiler generalise a shape when it first changes.
    """

    stage: ClassVar[Stage] = Stage.COMPILE
    fixed_batch: ClassVar[bool] = True

    @property
    @override
    def claims(self) -> frozenset[str]:
        return frozenset({"latency"})

    mode: str = bounded("default", choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"))
    """As in `torch.compile`; `reduce-overhead` and `max-autotune` record CUDA graphs."""
    fullgraph: bool = False
    """Whether a graph break is an error."""
    dynamic: bool | None = None
    """Whether shapes are symbols; null generalises a shape when it first changes."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract.EQUIVALENT

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = []
        if ctx.device.is_cuda:
            found += missing(ctx.device, TRITON)
            # What is installed here says nothing of the machine that a card is planned for.
            found += _missing_for_triton() if ctx.device.attributes else []
        else:
            # Inductor asks $CXX, then for these: see torch._inductor.cpp_builder.
            compilers = [os.environ.get("CXX"), "g++", "clang++"]
            if not any(name and shutil.which(name) for name in compilers):
                found.append("Inductor on a CPU needs a C++ compiler: install g++ (Debian: apt-get install g++)")
        if sys.platform == "win32":
            found.append("Inductor is not tried on Windows")
        return found

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        from torch._dynamo.utils import counters

        counters.clear()
        replays = self.mode in ("reduce-overhead", "max-autotune")
        compiled = torch.compile(denoiser_of(pipe), mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic)
        if replays:
            _keep_outputs(compiled)
        setattr(pipe, denoiser_name(pipe), compiled)

        def proof(trace: Trace) -> Finding:
            regions = sum(n for name, n in trace.denoiser.operators.items() if name.startswith(_REGION))
            facts: dict[str, int] = {
                "graphs": counters["stats"]["unique_graphs"],
                "graph_breaks": sum(counters["graph_break"].values()),
                "compiled_regions_run": regions,
            }
            graphs = f"{facts['graphs']} graph{'s' if facts['graphs'] != 1 else ''}, {facts['graph_breaks']} breaks"
            summary = f"{graphs}; {regions} compiled regions run"
            engaged = facts["graphs"] > 0 and regions > 0
            if replays and device_of(pipe).type == "cuda":
                facts["graph_launches"] = trace.graph_launches
                facts["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
                summary += f"; {facts['graph_launches']} CUDA graphs replayed, {facts['cudagraph_skips']} skipped"
                engaged = engaged and facts["graph_launches"] > 0 and not facts["cudagraph_skips"]
            return Finding(engaged, summary, facts)

        return proof


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


def _keep_outputs(compiled: Any) -> None:
    """With CUDA graphs a replay overwrites the last output, which multistep schedulers still hold: hand out copies."""

    def begin(*_: Any) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    def copied(_module: Any, _inputs: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, output)

    compiled.register_forward_pre_hook(begin)
    compiled.register_forward_hook(copied)
