"""environment: settings of the process that libraries read from the environment or at their start. They combine.

Workers start with PyTorch imported and no device in use. What PyTorch reads on import cannot be set by a variable then,
so options use PyTorch's own switches, and each proof reads what came of them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

from typing_extensions import override

from sdopt.contract import LATENCY
from sdopt.hardware.cards import ANY_CARD, Feature
from sdopt.options import Context, Contract, Finding, Optimization, Proof, Stage, Trace
from sdopt.options.compiler import Inductor, InductorDynamic, Regional, WholeStep
from sdopt.options.conflicts import compiles, keeps_gradients
from sdopt.options.declarations import Excludes
from sdopt.options.lora import Hotswap
from sdopt.pipelines.parts import Pipeline
from sdopt.scratch import own_folder

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables of PyTorch's allocator, of which it reads the first that is set."""

_FIND_MODE = "MIOPEN_FIND_MODE"


class CudnnBenchmark(Optimization):
    """Lets cuDNN (on ROCm: MIOpen) time its algorithms for each new shape of a convolution, and use the fastest."""

    claims = LATENCY
    contract = Contract.EQUIVALENT
    sets_process = True
    diffusers_lines = (
        "import torch",
        "torch.backends.cudnn.benchmark = True",
    )
    needs = (Feature("cuDNN", ANY_CARD),)

    @override
    def context(self, pipe: Pipeline) -> AbstractContextManager[Any]:
        import torch

        switches: Any = torch.backends.cudnn
        return _switched_on(
            lambda: switches.benchmark, lambda on: setattr(switches, "benchmark", on)
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        def proof(trace: Trace) -> Finding:
            seen = trace.denoiser
            ran = sum(
                n
                for name, n in seen.operators.items()
                if name.startswith(_CONVOLUTIONS)
            )
            state = "on" if seen.cudnn_benchmark else "off"
            where = f"{ran} convolutions by cuDNN or MIOpen and {seen.graph_launches} replayed graphs"
            engaged = bool(seen.cudnn_benchmark) and ran + seen.graph_launches > 0
            return Finding(
                engaged,
                f"benchmarking was {state} in the denoiser; {where}",
                {"convolutions": ran},
            )

        return proof


@contextmanager
def _switched_on(
    read: Callable[[], bool], write: Callable[[bool], None]
) -> Iterator[None]:
    before = read()
    write(True)
    try:
        yield
    finally:
        write(before)


_CONVOLUTIONS = ("aten::cudnn_convolution", "aten::miopen_convolution")


class AtStart(Optimization):
    """The base class of options that a process must set before it allocates or computes anything on the device."""

    stage = Stage.LOAD

    def variable(self) -> tuple[str, str]:
        """Returns the environment variable that does the same for a whole program, and its value."""
        raise NotImplementedError

    @override
    def begin_process(self) -> None:
        # PyTorch may have read its own already: then it is for processes that the worker starts.
        name, value = self.variable()
        os.environ[name] = value

    @override
    def broken(self, pipe: Pipeline) -> list[str]:
        name, value = self.variable()
        return [
            f"takes effect only at the start of a program: start Python with {name}={value}"
        ]


class ExpandableSegments(AtStart):
    """Lets CUDA's allocator grow its segments, which then fragment less where sizes change."""

    needs = (Feature("the allocator of PyTorch's device memory", ANY_CARD),)

    @override
    def variable(self) -> tuple[str, str]:
        name = next((name for name in _ALLOCATOR if name in os.environ), _ALLOCATOR[-1])
        named = [
            part
            for part in os.environ.get(name, "").split(",")
            if not part.startswith("expandable")
        ]
        return name, ",".join(filter(None, [*named, "expandable_segments:True"]))

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        name, value = self.variable()
        if "cudaMallocAsync" not in value:
            return []
        return [
            f"{name}={os.environ[name]} chooses CUDA's own allocator, which has no segments"
        ]

    @override
    def begin_process(self) -> None:
        import torch

        super().begin_process()
        torch._C._accelerator_setAllocatorSettings(self.variable()[1])

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        def proof(trace: Trace) -> Finding:
            segments = torch.cuda.memory_snapshot()
            grown = sum(bool(segment["is_expandable"]) for segment in segments)
            summary = f"{grown} of {len(segments)} segments of the allocator can grow"
            return Finding(
                grown > 0,
                summary,
                dict([self.variable()]) | {"segments": len(segments), "growing": grown},
            )

        return proof


@dataclass(frozen=True)
class MiopenFind(AtStart):
    """Sets how MIOpen, ROCm's library of convolutions, chooses its algorithms.

    MIOpen does not report its mode: the proof checks that it computed convolutions after the mode was set.
    """

    claims = LATENCY
    contract = Contract.EQUIVALENT

    mode: Literal["NORMAL", "FAST", "HYBRID", "DYNAMIC_HYBRID"] = "FAST"
    """`NORMAL` times every algorithm, `FAST` takes the best one that is known, and the others time only without one."""

    @override
    def variable(self) -> tuple[str, str]:
        return _FIND_MODE, self.mode

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        import torch

        if ctx.device.is_cuda and ctx.device.is_here and torch.version.hip is not None:
            return []
        return [
            f"MIOpen needs an AMD GPU and a ROCm build of PyTorch; this runs on {ctx.device.name or 'a CPU'}"
        ]

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        def proof(trace: Trace) -> Finding:
            ran = sum(
                n
                for name, n in trace.denoiser.operators.items()
                if name.startswith(_CONVOLUTIONS[1])
            )
            mode = os.environ.get(_FIND_MODE)
            summary = f"{_FIND_MODE}={mode} from the start; {ran} convolutions by MIOpen, which does not say its mode"
            return Finding(
                mode == self.mode and ran > 0,
                summary,
                {_FIND_MODE: mode, "convolutions": ran},
            )

        return proof


class TunableOp(Optimization):
    """Times the matrix products of cuBLAS or rocBLAS for each new shape, and uses the fastest (PyTorch's TunableOp).

    Tuning takes place in the first calls. Its results are not kept: each process tunes again.
    """

    claims = LATENCY
    contract = Contract.EQUIVALENT
    sets_process = True
    diffusers_lines = (
        "import torch",
        "torch.cuda.tunable.enable(True)",
    )
    needs = (Feature("TunableOp", ANY_CARD),)

    @override
    def context(self, pipe: Pipeline) -> AbstractContextManager[Any]:
        import torch

        return _switched_on(torch.cuda.tunable.is_enabled, torch.cuda.tunable.enable)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        # Else PyTorch would read and write it in the user's working folder.
        torch.cuda.tunable.set_filename(str(own_folder() / "tunableop.csv"))

        def proof(trace: Trace) -> Finding:
            tuned = len(torch.cuda.tunable.get_results())
            return Finding(
                tuned > 0, f"{tuned} matrix products tuned", {"tuned": tuned}
            )

        return proof


class InductorSetting(Optimization):
    """The base class of options that change a setting of Inductor while it compiles."""

    claims = LATENCY
    contract = Contract.EQUIVALENT
    setting: ClassVar[str]
    """Its name in `torch._inductor.config`."""

    @override
    def context(self, pipe: Pipeline) -> AbstractContextManager[Any]:
        import torch._inductor.config as settings

        patched: AbstractContextManager[Any] = settings.patch({self.setting: True})
        return patched


class InductorFreezing(InductorSetting):
    """Lets Inductor treat weights as constants: it folds them, and on a CPU repacks them for oneDNN.

    PyTorch's variable for it is `TORCHINDUCTOR_FREEZING`. The frozen weights are copies beside the pipeline's own.
    """

    setting = "freezing"
    excludes = (
        Excludes(
            "lora",
            "frozen weights would not change with the LoRA: choose lora=loaded or fused",
            (Hotswap,),
        ),
    )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = _without_inductor(ctx, Inductor, WholeStep)
        if keeps_gradients(ctx):
            reasons.append(
                "weights with gradients cannot be frozen: choose grad_mode=no_grad or inference_mode"
            )
        for axis, option in ctx.chosen.items():
            if option.stage in (Stage.QUANTIZE, Stage.OFFLOAD):
                reasons.append(
                    f"{axis} moves or packs weights, which freezing would copy: choose one of the two"
                )
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from torch._inductor.codecache import PyCodeCache

        before = len(PyCodeCache.modules)

        def proof(trace: Trace) -> Finding:
            modules = PyCodeCache.modules[before:]
            names = chain.from_iterable(map(vars, modules))
            frozen = sum(name.startswith("_frozen_param") for name in names)
            return Finding(
                frozen > 0,
                f"{frozen} weights are constants of compiled code",
                {"frozen": frozen},
            )

        return proof


class CoordinateDescent(InductorSetting):
    """Lets Inductor search the launch settings of each Triton kernel further, one setting after another.

    PyTorch's variable for it is `TORCHINDUCTOR_COORDINATE_DESCENT_TUNING`; the `max-autotune` modes of a compiler
    include it.
    """

    setting = "coordinate_descent_tuning"
    needs = (Feature("the tuning of Triton kernels", ANY_CARD),)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return _without_inductor(ctx, *_BY_INDUCTOR)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from torch._dynamo.utils import counters

        def proof(trace: Trace) -> Finding:
            tried = counters["inductor"]["coordesc_tuning_bench"]
            return Finding(
                tried > 0, f"{tried} settings of Triton kernels timed", {"tried": tried}
            )

        return proof


_BY_INDUCTOR = (Inductor, InductorDynamic, Regional, WholeStep)
"""The compilers that compile with Inductor in the process that calls."""


def _without_inductor(ctx: Context, *fitting: type[Optimization]) -> list[str]:
    """Returns the conflict, if any, of a setting of Inductor with a compiler that does not read it."""
    compiler = ctx.chosen.get("compiler")
    if compiler is not None and compiler.compiles and not compiles(ctx, *fitting):
        return []
    return [
        "the chosen compiler does not read this setting of Inductor: choose compiler=inductor"
    ]
