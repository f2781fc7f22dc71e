"""Shared parts of compilers: the modules that they replace, the replacements, what they need, and common conflicts."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from typing_extensions import override

from sdopt.contract import LATENCY
from sdopt.hardware.cards import TRITON, missing
from sdopt.measure.stages import DENOISER, TEXT_ENCODER, VAE_DECODER
from sdopt.measure.trace import StageTrace
from sdopt.options import (
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
)
from sdopt.options.assumptions import nothing_but_tensors, plain_weights
from sdopt.options.attention import Sdpa
from sdopt.options.conflicts import autocast_of, records_autograd, upcasts_vae
from sdopt.options.declarations import Excludes
from sdopt.options.lora import CHANGE_A_LORA, Hotswap
from sdopt.pipelines.parts import (
    STEPS,
    Pipeline,
    denoiser_name,
    denoiser_of,
    networks_of,
    text_encoders_of,
    unwrapped,
)
from sdopt.scratch import cache_folder, named_caches, unwritable

if TYPE_CHECKING:
    import torch


STAGE_OF = {"text_encoder": TEXT_ENCODER, "denoiser": DENOISER, "decoder": VAE_DECODER}
"""The targets of compilers, with the stage of a call in which each runs."""


class Eager(Optimization):
    """Runs PyTorch operator by operator, without a compiler."""

    stage = Stage.COMPILE
    compiles = False

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        return lambda trace: Finding(
            not trace.is_compiled(denoiser_of(pipe)), "operator by operator"
        )


class Compiler(Optimization):
    """The base class of options that replace modules by compiled ones."""

    stage = Stage.COMPILE
    fixed_batch = True
    claims = LATENCY

    @property
    @override
    def contract(self) -> Contract:
        return (
            Contract.EQUIVALENT
        )  # OpenVINO overrides it by a property, since its precision decides

    @override
    def comes_after(self, pipe: Pipeline) -> Mapping[str, str]:
        networks = networks_of(pipe).items()
        wrapped = [
            name for name, network in networks if unwrapped(network) is not network
        ]
        if not wrapped:
            return {}
        # diffusers passes over a network that is no `ModelMixin`, nor a `PreTrainedModel`.
        passed = f"compiler: diffusers would change the LoRA in the other networks alone, and not in pipe.{wrapped[0]}"
        return dict.fromkeys(
            CHANGE_A_LORA,
            f"{passed}: call sdopt.undo(pipe), change it, and apply the options again",
        )


class GraphCompiler(Compiler):
    """The base class of compilers whose graphs nothing compiles anew when the code of a module would run otherwise."""

    assumes = (nothing_but_tensors, plain_weights)
    keeps_structure = True
    keeps_weights = True


class ExportingCompiler(GraphCompiler):
    """The base class of compilers that export a graph from a module, which no longer reads the module's settings."""

    excludes: ClassVar[tuple[Excludes, ...]] = (
        Excludes(
            "attention",
            "an exported graph selects its own attention kernel: choose attention=default",
            (Sdpa,),
        ),
        # peft swaps weights and scales in place. An exported graph keeps the scales as constants, if not the weights.
        Excludes(
            "lora",
            "an exported graph keeps the scale of the LoRA that it was made with, and lora=hotswap would draw wrong "
            "images: choose compiler=inductor, or lora=loaded or fused",
            (Hotswap,),
        ),
    )

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = records_autograd(ctx, "an exported graph")
        if autocast_of(ctx):
            reasons.append(
                "an exported graph runs without autocast: choose precision=fp16, bf16 or fp32"
            )
        for axis, option in ctx.chosen.items():
            if (
                option.stage is Stage.QUANTIZE
                and axis != "memory.quantized_text_encoders"
            ):
                reasons.append(
                    f"an exported graph needs weights in the type of the arithmetic, which {axis} changes"
                )
        return reasons


def unfit_targets(ctx: Context, chosen: Sequence[str]) -> list[str]:
    """Returns the conflicts of a list of targets: the list is empty, or has a text encoder that never runs."""
    if not chosen:
        return [f"compiler.targets=[]: name at least one of {', '.join(STAGE_OF)}"]
    if "text_encoder" in chosen and "memory.precomputed_embeddings" in ctx.chosen:
        return [
            "memory=precomputed_embeddings removes the text encoder: choose compiler.targets=[denoiser]"
        ]
    return []


def unfit_for_graphs(ctx: Context, chosen: Sequence[str]) -> list[str]:
    """Returns the conflicts of CUDA graphs of some targets with autograd and with weights that move."""
    reasons = records_autograd(ctx, "a CUDA graph")
    if "decoder" in chosen and upcasts_vae(ctx):
        reasons.append(
            "diffusers casts this model's VAE to float32 and back in each call, which moves its weights: choose "
            "compiler.targets=[text_encoder,denoiser], or precision=bf16"
        )
    return reasons


def _places_of(pipe: Pipeline, target: str) -> Iterator[tuple[Any, str]]:
    """Yields (owner, attribute) of each module of a target; SDXL has two text encoders."""
    if target == "text_encoder":
        encoders = text_encoders_of(pipe)
        for name, value in list(vars(pipe).items()):
            if any(value is encoder for encoder in encoders):
                yield pipe, name
    elif target == "denoiser":
        yield pipe, denoiser_name(pipe)
    else:
        yield pipe.vae, "decoder"


Module = TypeVar("Module", bound="torch.nn.Module")


def replace_modules(
    pipe: Pipeline,
    chosen: Iterable[str],
    make: Callable[[torch.nn.Module], Module],
    by_step: bool = False,
) -> dict[str, list[Module]]:
    """Replaces each module of the targets by `make(module)`; returns the replacements by target.

    With `by_step`, a denoiser with several kinds of step (`caching=deepcache`) is not replaced itself: Python chooses
    at each step between the modules that compute them.
    """
    made: dict[str, list[Module]] = {}
    for target in dict.fromkeys(chosen):
        for place in list(_places_of(pipe, target)):
            steps = vars(getattr(*place)).get(STEPS) if by_step else None
            for owner, name in [
                (steps, part) for part in getattr(steps, "parts", ())
            ] or [place]:
                replacement = make(getattr(owner, name))
                setattr(owner, name, replacement)
                made.setdefault(target, []).append(replacement)
    return made


def only_replays(stages: Iterable[StageTrace]) -> bool:
    """Returns whether all calls of the stages replayed a CUDA graph, and no graph was captured again.

    If weights have moved, each call captures a graph and replays it once.
    """
    return all(
        stage.graph_launches >= stage.runs > 0 and not stage.graph_captures
        for stage in stages
    )


@contextmanager
def tracing() -> Iterator[None]:
    """Suppresses PyTorch's warnings at each trace about deprecated TorchScript and conditions that become constants."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        yield


# ---- what Inductor and Triton need on this machine -------------------------------------------------------------------


_UNPACKED = "/tmp"
"""See `create_temp_dir` in torch/csrc/inductor/aoti_package/model_package_loader.cpp."""


def kept_code(name: str) -> Path:
    """Returns the folder in which code stays that some compiler has compiled, for later processes."""
    return cache_folder() / "sdopt" / name


def unfit_for_inductor(ctx: Context, keeps: str = "") -> list[str]:
    """Returns the conflicts of Inductor with this device and machine, and with attention that it would change.

    `keeps` names the folder of `kept_code`, if it is to be used.
    """
    reasons = []
    attention = ctx.chosen.get("attention")
    if isinstance(attention, Sdpa) and attention.backend == "math":
        # See torch/_inductor/fx_passes/fuse_attention.py. On a CPU in float32 a trace shows the fused kernel; beside
        # some other options the products stay, as those of attention=vanilla do.
        fused = "Inductor turns the products and the softmax of attention=math back into a fused kernel"
        reasons.append(f"{fused}: choose attention=vanilla, or another compiler")
    if ctx.device.is_cuda:
        reasons += missing(ctx.device, TRITON)
    if not ctx.device.is_here:
        return reasons
    if ctx.device.is_cuda:
        if find_spec("triton") is None:
            reasons.append(
                "Inductor on CUDA needs the package triton: pip install triton"
            )
        reasons += missing_for_triton("Inductor on CUDA")
    else:
        reasons += _missing_cxx("Inductor on a CPU")
    folders = {name: Path(folder) for name, folder in named_caches().items()}
    if keeps:
        folders["XDG_CACHE_HOME"] = kept_code(keeps)
    for name, folder in folders.items():
        if reason := unwritable(folder):
            reasons.append(
                f"compiled code goes to {folder}, and {reason}: name another folder with {name}=…"
            )
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and _is_noexec(
        tempfile.gettempdir()
    ):
        there = f"{tempfile.gettempdir()}, which is mounted noexec"
        reasons.append(
            f"Inductor loads compiled code from {there}: choose another folder with TMPDIR=…"
        )
    return reasons


def _is_noexec(folder: str) -> bool:
    """Returns whether a folder is mounted noexec; the loader's own error is the same as for too little memory."""
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def missing_for_packages(ctx: Context) -> list[str]:
    """Returns the conflicts of AOTInductor, which on CUDA compiles C++ with the CUDA toolkit's headers."""
    reasons = unfit_for_inductor(ctx, keeps="aot")
    if ctx.device.is_here and _is_noexec(_UNPACKED):
        unpacks = (
            f"AOTInductor unpacks compiled code to {_UNPACKED}, independent of TMPDIR"
        )
        reasons.append(
            f"{unpacks}, and {_UNPACKED} is mounted noexec: choose compiler=inductor"
        )
    if not (ctx.device.is_cuda and ctx.device.is_here):
        return reasons
    from torch.utils import cpp_extension

    what, home = "AOTInductor on CUDA", cpp_extension.CUDA_HOME
    reasons += _missing_cxx(what)
    # torch/csrc/inductor/aoti_runtime/utils_cuda.h includes this header, which PyTorch's wheels do not contain.
    if home is None or not (Path(home) / "include" / "cuda_runtime.h").is_file():
        reasons.append(
            f"{what} needs the headers of the CUDA toolkit: install it, and set CUDA_HOME"
        )
    return reasons


def _missing_cxx(what: str) -> list[str]:
    # Inductor tries $CXX, and then these: see torch._inductor.cpp_builder.
    if any(
        name and shutil.which(name)
        for name in [os.environ.get("CXX"), "g++", "clang++"]
    ):
        return []
    return [f"{what} needs a C++ compiler: install g++ (Debian: apt-get install g++)"]


def missing_for_triton(what: str) -> list[str]:
    """Returns what Triton lacks to compile its launcher as a Python extension (triton/runtime/build.py)."""
    reasons = []
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang"])):
        reasons.append(
            f"{what} needs a C compiler, and CC={compiler} is not one"
            if compiler
            else f"{what} needs a C compiler: install gcc (Debian: apt-get install gcc), or set CC"
        )
    scheme = sysconfig.get_default_scheme()
    headers = Path(
        sysconfig.get_path(
            "include", "posix_prefix" if scheme == "posix_local" else scheme
        )
    )
    if not (headers / "Python.h").is_file():
        reasons.append(
            f"{what} needs {headers / 'Python.h'}: install it (Debian: apt-get install python3-dev)"
        )
    return reasons
