"""Sorts what people run Stable Diffusion with into classes that cost alike: words, or options."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sdopt.options.attention import (
    Default,
    FusedProjections,
    Sdpa,
    Sliced,
    Vanilla,
    Xformers,
)
from sdopt.options.base import Optimization
from sdopt.options.caching import (
    DeepCaching,
    GuidanceInterval,
    SpectralForecast,
    WholeSteps,
)
from sdopt.options.lora import Fused, NoLora
from sdopt.options.memory import LayerwiseCasting
from sdopt.options.nf4 import BitsAndBytes
from sdopt.options.patch import Patch
from sdopt.options.precision import Precision
from sdopt.options.quantization import Quantized, TorchAo
from sdopt.pipelines.catalog import path_of
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.stored import kinds_of_blocks
from sdopt.pipelines.transformer_files import is_gguf
from sdopt.schema import Model
from sdopt.text_files import first_match
from sdopt.variant import Variant

FUSED, SPLIT, SCORES = "fused", "split", "scores"

EIGHT_BITS = ("fp8", "int8")
"""Types of products in eight bits."""

TRANSFORMERS = "transformers"
"""The application of diffusion transformers in libraries."""

_LIBRARIES = ("library", TRANSFORMERS)


@dataclass(frozen=True)
class Software:
    """How a pipeline is run.

    Attributes:
        application: `library` (diffusers, or code like it), `web` (a user interface), `engine` (a compiled engine),
            `transformers` (a library that runs a diffusion transformer).
        name: the class within the application, for a factor of its own.
        attention: `fused`, or `scores` if attention writes all its scores to memory.
        split: whether it does so in slices, which are read again.
        precision: `fp16`, `bf16`, `fp32` (as PyTorch has it), `tf32` (everywhere), `ieee` (nowhere), `fp8` or `int8`.
        compiled: whether kernels are generated or fused by a compiler.
        graphs: whether launches are recorded once and replayed.
        torch: major and minor version of PyTorch; (0, 0) if unknown.
        stored: whether weights are stored in fewer bits than products read, and unpacked for each of these.
        rescaled: whether products of such weights are scaled afterwards, by a kernel of its own without a compiler.
    """

    application: str
    name: str
    attention: str = FUSED
    split: bool = False
    precision: str = "fp16"
    compiled: bool = False
    graphs: bool = False
    torch: tuple[int, int] = (0, 0)
    stored: bool = False
    rescaled: bool = False

    @property
    def is_library(self) -> bool:
        """Whether diffusers runs it, or code like it."""
        return self.application in _LIBRARIES

    @property
    def is_transformer(self) -> bool:
        """Whether the denoiser is a transformer, whose parts have coefficients of their own."""
        return self.application == TRANSFORMERS

    @property
    def types(self) -> tuple[str, str]:
        """The types in which convolutions and matrix products compute."""
        if self.precision == "fp32":  # PyTorch allows TF32 in convolutions
            return "tf32", "fp32"
        kind = {"ieee": "fp32", "bf16": "fp16"}.get(self.precision, self.precision)
        return kind, kind

    @property
    def bytes(self) -> int:
        """Bytes of a number in memory."""
        return 4 if self.precision in ("fp32", "tf32", "ieee") else 2

    @property
    def age(self) -> int:
        """The class of its PyTorch: 1, 2 (unknown ones too), or 3 for versions since 2.4."""
        return 1 if (0, 0) < self.torch < (2, 0) else 2 if self.torch < (2, 4) else 3

    @property
    def fixed(self) -> str:
        """The class by which a call takes its fixed part."""
        return f"library_{self.age}" if self.is_library else self.application

    @property
    def launcher(self) -> str:
        """The class by which launching a kernel takes its time."""
        if self.is_library:
            return (
                "graphs"
                if self.graphs
                else "compiled"
                if self.compiled
                else f"eager_{self.age}"
            )
        return self.name if self.application == "web" else "engine"

    @classmethod
    def read(cls, backend: str, precision: str) -> "Software | str":
        """Returns the class of a software as people write it, or why there is none."""
        text, kind = backend.lower(), precision.lower()
        numbers = first_match(_PRECISIONS, kind)
        if not numbers:
            return f"unknown precision '{precision}'"
        reason = first_match(_NOT_DESCRIBED, text)
        if reason:
            return f"the software '{backend}' is not described: {reason}"
        version = re.search(r"(?:py)?torch v?(\d+)\.(\d+)", text)
        torch = (int(version[1]), int(version[2])) if version else (0, 0)
        engine = first_match(_ENGINES, text)
        if engine:
            return cls("engine", engine, FUSED, False, numbers, True, True, torch)
        web = re.search(
            r"a1111|automatic1111|sdnext|sd\.next|comfy|forge|invoke|webui|^other|^original|^diffusers \D|directml",
            text,
        )
        if not web and not re.search(r"torch|diffusers|flash|runwayml|comfy", text):
            return f"unknown software '{backend}'"
        compiled = bool(re.search(r"compil|inductor|nvfuser", text))
        fused = web or torch >= (2, 0) or (torch == (0, 0) and "0.1" not in text)
        attention = first_match(_ATTENTIONS, text) or (FUSED if fused else SCORES)
        kept, split = FUSED if attention == FUSED else SCORES, attention == SPLIT
        if web:
            return cls(
                "web",
                first_match(_WEB, text) or "other",
                kept,
                split,
                numbers,
                compiled,
                False,
                torch,
            )
        graphs = compiled and bool(re.search("reduce-overhead|max-autotune", text))
        name = "compiled" if compiled else "eager"
        return cls("library", name, kept, split, numbers, compiled, graphs, torch)


_PRECISIONS = {
    "fp8|float8": "fp8",
    "int8": "int8",
    "tf32": "tf32",
    "bf16|bfloat16": "bf16",
    "fp16|float16|^half$": "fp16",
    "fp32|float32|^full$": "fp32",
}


_NOT_DESCRIBED = {
    "openvino|ipex|bigdl|neural compressor": "it runs on CPUs",
    "core ?ml|mps|mlx": "it runs on Apple's devices",
    "xla|jax|tpu|gaudi|habana|qualcomm|shark": "it runs on other accelerators",
    "onnx|directml|zluda": "its kernels are others",
    "sequential|offload|lowvram|medvram": "it moves weights in each step",
    "hypertile|tome 0\\.[1-9]|deepcache|t-gate": "it leaves out work",
    "paddle": "its kernels are others",
}

_ENGINES = {
    "tensorrt|cuda 1\\d|jetpack": "tensorrt",
    "aitemplate": "aitemplate",
    "oneflow|onediff": "oneflow",
    "stable[ -]fast": "stable_fast",
    "thestage": "tensorrt",
}

_ATTENTIONS = {
    "xformers|flash|sdp|scaled-dot|automatic": FUSED,
    "doggettx|invokeai|sub-quad|split|v1": SPLIT,
    "none|no optimization|default attention|vanilla": SCORES,
}

_WEB = {
    "a1111|automatic1111|webui": "a1111",
    "sdnext, diffusers|^diffusers": "sdnext_diffusers",
    "sdnext|sd\\.next|original": "sdnext",
    "comfy|forge": "comfy",
}

_COMPILERS = {
    "Eager": (False, False),
    "TorchScript": (False, False),
    "Inductor": (True, False),
    "InductorDynamic": (True, False),
    "Regional": (True, False),
    "WholeStep": (True, False),
    "Aot": (True, False),
    "CudaGraphs": (False, True),
}
"""Whether a compiler fuses kernels, and whether it records launches, by the class of its option."""

_TIMED_BLOCKS = {"Q8_0", "F32", "F16", "BF16"}
"""Types of a GGUF file's matrices of which there are figures; kernels of fewer bits differ tenfold between packages."""

_COUNTED = WholeSteps | DeepCaching | SpectralForecast | GuidanceInterval | None
"""Ways to leave out work of which the number of steps tells how much."""

_TIMED = Precision | None
"""Precisions of UNets of which there are figures."""

_TIMED_OF_TRANSFORMERS = Precision | TorchAo | BitsAndBytes | None
"""Those of transformers: the kernels of bitsandbytes hide that weights are unpacked, and calls on an H100 and an RTX 4090
take no longer."""

_TYPES = {"float16": "fp16", "bfloat16": "bf16"}


def software_of(variant: Variant, torch: tuple[int, int]) -> Software | str:
    """Returns the class of software that a variant runs with a PyTorch, or why no time can be told for it."""
    untold = _untold(variant)
    if untold:
        return untold
    options = variant.optimizations
    compiler = options.get("compiler")
    attention = options.get("attention")
    precision = options.get("precision")
    numbers = _numbers(precision)
    kind = _kind_of(compiler)
    if kind == "TensorRt":
        return Software("engine", "tensorrt", FUSED, False, numbers, True, True, torch)
    compiled, graphs = _COMPILERS[kind]
    mode = getattr(compiler, "mode", "")
    backend = str(getattr(attention, "backend", ""))
    plain = isinstance(attention, Vanilla | Sliced) or backend.endswith("math")
    named = "compiled" if compiled else "eager"
    software = Software(
        application="library",
        name=named,
        attention=SCORES if plain else FUSED,
        split=isinstance(attention, Sliced),
        precision=numbers,
        compiled=compiled,
        graphs=graphs or mode in ("reduce-overhead", "max-autotune"),
        torch=torch,
    )
    if family_of(variant.model).is_unet:
        return software
    if numbers == "int8" and not compiled:
        chosen = variant.choices.get("precision", "int8")
        return f"precision={chosen}: int8 products without a compiler run 20 times slower: choose compiler=inductor"
    casts = any(isinstance(option, LayerwiseCasting) for option in options.values())
    weight_only = isinstance(precision, TorchAo) and not precision.activations
    in_8_bits = isinstance(precision, TorchAo) and "int8" in precision.weights
    return replace(
        software,
        application=TRANSFORMERS,
        name=f"blocks_{named}",
        stored=casts or weight_only or "Q8_0" in _blocks_of(variant.model),
        rescaled=weight_only and in_8_bits and not compiled,
    )


def _blocks_of(model: Model) -> set[str]:
    """Returns the types of the matrices of a model in a GGUF file; none of any other."""
    return kinds_of_blocks(path_of(model)) if is_gguf(model) else set()


def _kind_of(compiler: Optimization | None) -> str:
    return type(compiler).__name__ if compiler is not None else "Eager"


def _untold(variant: Variant) -> str:
    """Returns what of a variant no figure tells of; "" if figures tell of all."""
    options = variant.optimizations
    if unknown := _unknown_axis(options):
        return f"{unknown}={variant.choices.get(unknown, unknown)}: there are no figures of what it changes to learn from"
    packed = ", ".join(sorted(_blocks_of(variant.model) - _TIMED_BLOCKS))
    if packed:
        file = path_of(variant.model).name
        return f"model={file}: there are no figures of blocks in {packed} to learn from"
    transformer = not family_of(variant.model).is_unet
    for axis, what in _untold_axes(options, transformer):
        chosen = variant.choices.get(axis, axis)
        return f"{axis}={chosen}: there are no figures {what} to learn from"
    return ""


def _untold_axes(
    options: Mapping[str, Optimization], transformer: bool
) -> Iterator[tuple[str, str]]:
    """Yields the axes of whose option something is not told by any figure, and what that is."""
    timed = _TIMED_OF_TRANSFORMERS if transformer else _TIMED
    if not isinstance(options.get("precision"), timed):
        yield "precision", "of its kernels"
    attention = options.get("attention")
    native = "native" in str(getattr(attention, "backend", ""))
    if not native and not isinstance(attention, _ATTENDS):
        yield "attention", "of its kernels"
    if not isinstance(options.get("lora"), NoLora | Fused | None):
        yield "lora", "of unfused LoRAs"
    if not isinstance(options.get("caching"), _COUNTED):
        yield "caching", "of what it leaves out"
    if getattr(options.get("grad_mode"), "mode", "") == "enabled":
        yield "grad_mode", "with autograd"
    if _kind_of(options.get("compiler")) not in _known_compilers(transformer):
        yield "compiler", "of it"


def _unknown_axis(options: Mapping[str, Optimization]) -> str:
    """Returns the axis of a function or an option of the user's own, of which no figure tells; "" if there is none."""
    for axis, option in options.items():
        is_function = isinstance(option, Patch) and bool(option.functions)
        if is_function or not type(option).__module__.startswith(_OPTIONS):
            return axis
    return ""


_OPTIONS = "sdopt.options."
"""The package of the options that are described here."""

_ATTENDS = Default | Vanilla | Sdpa | Sliced | Xformers | FusedProjections | None
"""Ways to attend that run in PyTorch's or xFormers' fused kernels, or without one."""


def _known_compilers(transformer: bool) -> tuple[str, ...]:
    """Returns the classes of compilers of which there are figures; none are of transformers in an engine."""
    return (*_COMPILERS, *(() if transformer else ("TensorRt",)))


def _numbers(precision: Optimization | None) -> str:
    """Returns the type of the arithmetic."""
    if isinstance(precision, Quantized):
        return (
            ("fp8" if "float8" in precision.weights else "int8")
            if precision.activations
            else _TYPES.get(precision.others, "fp32")
        )
    if not isinstance(precision, Precision):
        return "fp32"
    kind = precision.autocast or precision.weights
    return _TYPES.get(kind) or {"on": "tf32", "off": "ieee"}.get(precision.tf32, "fp32")
