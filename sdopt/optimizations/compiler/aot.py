"""AOTInductor: compiled once into a package on disk, which later processes load in seconds."""

import hashlib
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from typing_extensions import override

from sdopt.errors import UnavailableError
from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Finding, Proof
from sdopt.optimizations.compiler.base import (
    Compiler,
    Graph,
    Tensors,
    exports,
    graphs_in,
    replace_by_graphs,
)
from sdopt.optimizations.compiler.toolchain import missing_for_packages
from sdopt.scratch import cache_folder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

FOLDER = Path("sdopt") / "aot"
"""The packages, below the user's cache folder."""


@dataclass(frozen=True)
class Aot(Compiler):
    """`torch.export` and AOTInductor on the denoiser: compiled once into a package on disk, loaded in seconds later.

    A package holds compiled code, and no weights: it takes those of the pipeline. It is found again by a digest of the
    module's structure, the shapes and types of its inputs and weights, the versions of libraries, and the device.
    Packages lie in the user's own cache folder (`$XDG_CACHE_HOME/sdopt/aot`), which nobody else may read or write, and
    are loaded from nowhere else.
    """

    recompile: bool = False
    """Whether to compile anew if there is a package: its time is then that of a cold start."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return missing_for_packages(ctx) + exports(ctx, "a compiled package")

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        compilation.reset()
        packages = Packages(private_folder(), self.recompile)
        made = replace_by_graphs(pipe, ["denoiser"], packages.graph_of)

        def proof(trace: Trace) -> Finding:
            seen, shapes = trace.denoiser, graphs_in(made["denoiser"])
            left = {name: seen.operators[name] for name in EAGER_ONLY if seen.operators[name]}
            told = "; ".join(packages.told)
            summary = f"{told}; {sum(left.values())} operators that eager code alone runs, in {seen.calls} calls"
            facts = {"graphs": shapes, "packages": packages.told, "eager_operators": left}
            return Finding(shapes > 0 and not left, summary, facts)

        return proof


EAGER_ONLY = ("aten::silu", "aten::group_norm", "aten::layer_norm", "aten::gelu")
"""Operators of every UNet that a compiler takes apart or calls under no such name."""


class Packages:
    """Makes graphs from packages in a folder, and compiles the ones that are missing.

    Args:
        folder: where the packages lie.
        recompile: whether to compile those as well that are there.

    Attributes:
        told: a line for each graph: whether it was compiled or loaded, and the seconds that it took.
    """

    def __init__(self, folder: Path, recompile: bool) -> None:
        self._folder = folder
        self._recompile = recompile
        self.told: list[str] = []

    def graph_of(self, call: Tensors) -> Graph:
        """Returns a call's graph, with the weights of its module."""
        with torch.no_grad():
            call(*call.inputs)  # shows the form of the output
            package = self._folder / f"{digest(call)}.pt2"
            start = time.perf_counter()
            if self._recompile or not package.is_file():
                _compile(call, package)
                self.told.append(f"compiled in {time.perf_counter() - start:.1f} s")
                start = time.perf_counter()
            graph = _load(call, package)
            self.told.append(f"loaded in {time.perf_counter() - start:.1f} s")
        return graph


def _compile(call: Tensors, package: Path) -> None:
    """Exports and compiles a call; what lies at `package` afterwards is whole."""
    exported = torch.export.export(call, tuple(call.inputs), strict=False)
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        made = Path(folder) / package.name
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(made), inductor_configs={"aot_inductor.package_constants_in_so": False}
        )
        # Constants of the code itself; weights are the pipeline's.
        own = {name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)}
        save_file({name: value.contiguous().cpu() for name, value in own.items()}, made.with_suffix(".safetensors"))
        made.with_suffix(".safetensors").replace(package.with_suffix(".safetensors"))
        made.replace(package)


def _load(call: Tensors, package: Path) -> Graph:
    """Loads a package with the weights of a call's module.

    `torch._inductor.aoti_load_package` would do the same, but on a CPU it compiles test programs first, for as long as
    half a minute, to learn what the processor can do. The digest of the package has that.
    """
    device = call.inputs[0].device
    # For one thread: else each run waits on the host for the end of the last one (`reclaim_finished_models` in
    # aoti_runtime/model_container.h), and a GPU is idle until its next kernels are launched.
    one_thread, index = True, -1 if device.index is None else device.index
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", one_thread, 1, index)
    # The pipeline keeps the weights alive: the package takes their addresses, and no copies.
    loader.load_constants(_constants(call, package, loader.get_constant_fqns()), False, True, True)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results: list[torch.Tensor] = loader.boxed_run(list(tensors))
        return results

    return run


def _constants(call: Tensors, package: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors that a package asks for by name: the module's, and those saved beside it."""
    device = call.inputs[0].device
    saved = {name: value.to(device) for name, value in load_file(package.with_suffix(".safetensors")).items()}
    known = saved | call.state_dict() | dict(call.named_buffers())
    return {name: known[name] for name in names}


def digest(call: Tensors) -> str:
    """Returns a digest of everything that a call's compiled code depends on."""
    import diffusers

    module = call.module
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    device = call.inputs[0].device
    machine = torch.cuda.get_device_properties(device) if device.type == "cuda" else _processor()
    about = [
        (torch.__version__, torch.version.cuda, diffusers.__version__, str(machine)),
        [(name, tuple(each.shape), each.stride(), str(each.dtype)) for name, each in sorted(tensors.items())],
        # What an option replaces is another class, or sits in an instance before the method of its class.
        [(name, _kind(each)) for name, each in module.named_modules()],
        [(name, _kind(p)) for part in module.modules() for name, p in getattr(part, "attn_processors", {}).items()],
        [(tuple(each.shape), each.stride(), str(each.dtype)) for each in call.inputs],
        str(call.key[1:3]),
    ]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]


def _kind(part: Any) -> tuple[str, str, list[str]]:
    own = [name for name, value in vars(part).items() if callable(value) and hasattr(type(part), name)]
    said = part.extra_repr() if isinstance(part, torch.nn.Module) else ""
    return f"{type(part).__module__}.{type(part).__qualname__}", said, sorted(own)


def _processor() -> tuple[str, ...]:
    return platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()


def private_folder() -> Path:
    """Returns the folder of the packages, made if it is missing. Raises UnavailableError if others may write there."""
    folder = cache_folder() / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise UnavailableError(f"{folder}: holds compiled code, and must be yours alone: chmod 700 {folder}")
    return folder
