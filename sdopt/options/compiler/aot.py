"""AOTInductor: compiles to a package on disk, which later processes load in seconds."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sdopt.errors import UnavailableError
from sdopt.measure import compilation
from sdopt.options import Context, Finding, Proof, Trace
from sdopt.options.attention import Sliced
from sdopt.options.compiler.base import (
    ExportingCompiler,
    kept_code,
    missing_for_packages,
)
from sdopt.options.declarations import Excludes
from sdopt.pipelines.parts import Pipeline

if TYPE_CHECKING:
    import torch

    from sdopt.options.compiler.graphs import Graph, Tensors


@dataclass(frozen=True)
class Aot(ExportingCompiler):
    """Compiles the denoiser to a package on disk, with `torch.export` and AOTInductor, and later loads the package.

    A package contains compiled code without weights, and uses the pipeline's weights. Its key is a digest of the
    module's structure and settings, the shapes and types of inputs and weights, library versions, the device and, on a
    CPU, the number of threads. Packages are stored in, and loaded only from, `$XDG_CACHE_HOME/sdopt/aot`, which only
    its owner may read or write.
    """

    excludes = (
        Excludes(
            "attention",
            "a compiled package shows no matrix products in a trace, so nothing would show the slices: "
            "choose compiler=inductor, or another attention than sliced",
            (Sliced,),
        ),
    )

    recompile: bool = False
    """Whether every process recompiles the package, to measure cold starts; what compiling leaves in its memory counts
    then."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return missing_for_packages(ctx) + super().conflicts(ctx)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.compiler.graphs import graphs_in, replace_by_graphs

        compilation.reset()
        packages = Packages(private_folder("aot"), self.recompile)
        graphs = replace_by_graphs(pipe, ["denoiser"], packages.graph_of)

        def proof(trace: Trace) -> Finding:
            seen, shapes = trace.denoiser, graphs_in(graphs["denoiser"])
            eager = {
                name: seen.operators[name]
                for name in EAGER_ONLY
                if seen.operators[name]
            }
            lines = "; ".join(packages.told)
            summary = f"{lines}; {sum(eager.values())} operators that only eager code runs, in {seen.calls} calls"
            facts = {
                "graphs": shapes,
                "packages": packages.told,
                "eager_operators": eager,
            }
            return Finding(shapes > 0 and not eager, summary, facts)

        return proof


EAGER_ONLY = ("aten::silu", "aten::group_norm", "aten::layer_norm", "aten::gelu")
"""Operators of every UNet that do not appear by these names in compiled code."""


class Packages:
    """Builds graphs from packages in a folder, and compiles missing packages.

    Attributes:
        told: messages such as "compiled in 30.0 s" and "loaded in 1.0 s", in order.
    """

    def __init__(self, folder: Path, recompile: bool) -> None:
        self._folder = folder
        self._recompile = recompile
        self.told: list[str] = []

    def graph_of(self, call: Tensors) -> Graph:
        """Returns the graph of a call, with the weights of its module."""
        import torch

        with torch.no_grad():
            call(*call.inputs)  # records the structure of the output
            package = self._folder / f"{digest(call)}.pt2"
            start = time.perf_counter()
            if self._recompile or not package.is_file():
                _compile(call, package)
                compile_s = time.perf_counter() - start
                compilation.write_compile_s(package.with_suffix(".json"), compile_s)
                self.told.append(f"compiled in {compile_s:.1f} s")
                if not self._recompile:  # else a new process would compile again
                    compilation.note_package(None)
                start = time.perf_counter()
            else:
                compilation.note_package(
                    compilation.compile_s_in(package.with_suffix(".json"))
                )
            graph = _load(call, package)
            self.told.append(f"loaded in {time.perf_counter() - start:.1f} s")
        return graph


def _compile(call: Tensors, package: Path) -> None:
    """Exports and compiles a call to `package`, which is replaced atomically."""
    import torch
    from safetensors.torch import save_file
    from torch.utils.cpp_extension import CUDA_HOME  # imports setuptools

    if torch.cuda.is_available() and CUDA_HOME:
        # Inductor finds the toolkit's stub of the driver, which it links, only through the variable.
        os.environ.setdefault("CUDA_HOME", CUDA_HOME)
    exported = torch.export.export(call, tuple(call.inputs), strict=False)
    settings = {
        name: value
        for name, value in exported.constants.items()
        if isinstance(value, torch.Tensor)
    }
    if any(map(torch.is_complex, settings.values())):
        # Inductor gives them names of its own, by which nothing tells one from another of the same shape.
        raise UnavailableError(
            "AOTInductor cannot package complex constants, such as these rotary positions: choose compiler=inductor"
        )
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        file = Path(folder) / package.name
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(file),
            inductor_configs={"aot_inductor.package_constants_in_so": False},
        )
        # Constants of the code itself; the pipeline has the weights.
        save_file(
            {name: value.contiguous().cpu() for name, value in settings.items()},
            file.with_suffix(".safetensors"),
        )
        file.with_suffix(".safetensors").replace(package.with_suffix(".safetensors"))
        file.replace(package)


def _load(call: Tensors, package: Path) -> Graph:
    """Loads a package, and binds the weights of the call's module.

    `torch._inductor.aoti_load_package` does the same, but on a CPU it first compiles test programs for up to half a
    minute to detect the processor's features, which are already part of the package's digest.
    """
    import torch
    from safetensors.torch import load_file

    device = call.inputs[0].device
    # Single-threaded: otherwise each run waits on the host for the end of the last run (`reclaim_finished_models` in
    # aoti_runtime/model_container.h), and the GPU idles until the next kernels are launched.
    one_thread, index = True, -1 if device.index is None else device.index
    loader = torch._C._aoti.AOTIModelPackageLoader(
        str(package), "model", one_thread, 1, index
    )
    # The package stores addresses of the weights, not copies; the pipeline keeps the weights alive.
    saved = {
        name: value.to(device)
        for name, value in load_file(package.with_suffix(".safetensors")).items()
    }
    weights = saved | call.state_dict() | dict(call.named_buffers())
    loader.load_constants(
        {name: weights[name] for name in loader.get_constant_fqns()}, False, True, True
    )

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results: list[torch.Tensor] = loader.boxed_run(list(tensors))
        return results

    return run


def _card(device: torch.device) -> tuple[str | int, ...]:
    """Returns the kind of a card. All its properties would include the UUID, and a package serve that one card."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return (
        properties.name,
        properties.major,
        properties.minor,
        properties.multi_processor_count,
    )


def digest(call: Tensors) -> str:
    """Returns a hex digest of everything that the compiled code of a call depends on."""
    inputs = [
        (tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
        for tensor in call.inputs
    ]
    return digest_of(call.module, call.inputs[0].device, inputs, str(call.key[1:3]))


def digest_of(module: torch.nn.Module, device: torch.device, *more: Any) -> str:
    """Returns a hex digest of what a module's code, compiled for a device, depends on: structure, libraries, device."""
    import torch

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    machine = _card(device) if device.type == "cuda" else _processor()
    about = [
        (*map(_version, _LIBRARIES), torch.version.cuda, str(machine)),
        [
            (name, tuple(each.shape), each.stride(), str(each.dtype))
            for name, each in sorted(tensors.items())
        ],
        # An option replaces a module's class, overrides a method on the instance, or sets an attribute.
        [(name, _kind(each)) for name, each in module.named_modules()],
        list(_processors(module)),
        *more,
    ]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]


_LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "peft", "xformers")
"""Libraries whose code may be compiled; their versions stand for their files."""


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


@cache
def _registries() -> frozenset[str]:
    """Returns PyTorch's own attributes of a module: its weights, which `digest` lists, and its hooks."""
    import torch

    return frozenset(name for name in vars(torch.nn.Module()) if name.startswith("_"))


_ORIGINS = frozenset({"_name_or_path", "_diffusers_version", "_use_default_values"})
"""Keys of a diffusers configuration that describe its source file; compiled code does not depend on them.

The names of values that the file lacks (`_use_default_values`) are in another order in each process.
"""


def _processors(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attention processors of the parts of a module, by their names."""
    for part in module.modules():
        for name, processor in getattr(part, "attn_processors", {}).items():
            yield name, _kind(processor)


def _kind(part: Any) -> tuple[str, list[str], Any]:
    """Returns the class of a module or processor, the methods overridden on it, and its attributes."""
    members = [
        f"{name} {_code_of(getattr(value, '__module__', None))}"
        for name, value in vars(part).items()
        if callable(value) and hasattr(type(part), name)
    ]
    attributes = {
        name: value for name, value in vars(part).items() if name not in _registries()
    }
    return _class_of(part), sorted(members), _constant(attributes)


def _constant(value: Any) -> Any:
    """Returns what compiled code may keep of an attribute: values of numbers, strings and tensors, and others' class.

    peft keeps a LoRA's scale in a dict, as a number or as a tensor that is no buffer. The `repr` of other objects may
    hold an address, which differs between equal modules.
    """
    import torch

    if isinstance(value, bool | int | float | str | torch.dtype | None):
        return repr(value)
    if isinstance(value, Mapping):
        return sorted(
            (repr(key), _constant(part))
            for key, part in value.items()
            if key not in _ORIGINS
        )
    if isinstance(value, list | tuple):
        return [_constant(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(
            repr(_constant(part)) for part in value
        )  # each process has an order of its own
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return value.tolist()
    return _class_of(value)


def _class_of(value: Any) -> str:
    """Returns the name of an object's class, and what stands for its code."""
    module = type(value).__module__
    return f"{module}.{type(value).__qualname__} {_code_of(module)}"


@cache
def _code_of(module: str | None) -> str:
    """Returns a digest of a module's file; "" for libraries, which have versions, and for modules without a file."""
    if module is None or module.partition(".")[0] in _LIBRARIES:
        return ""
    file = getattr(sys.modules.get(module), "__file__", None)
    return (
        "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    )


def _processor() -> tuple[str | int, ...]:
    import torch

    # Inductor generates loops, and arrays for partial sums, for a fixed number of threads.
    return (
        platform.machine(),
        platform.processor(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )


def private_folder(name: str) -> Path:
    """Returns a folder of compiled code in the user's cache folder, and creates it if it is missing.

    Raises:
        UnavailableError: other users may read or write the folder.
    """
    folder = kept_code(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise UnavailableError(
            f"{folder}: holds compiled code, and only you may have access: chmod 700 {folder}"
        )
    return folder
