"""Sorts what people run Stable Diffusion with into classes that cost alike."""

import re
from dataclasses import dataclass

FUSED, SCORES = "fused", "scores"


@dataclass(frozen=True)
class Software:
    """How a pipeline is run.

    Attributes:
        application: `library` (diffusers, or code like it), `web` (a user interface), `engine` (a compiled engine).
        name: the class within the application, for a factor of its own.
        attention: `fused`, or `scores` if attention writes all its scores to memory.
        processor: what computes attention.
        precision: `fp16`, `bf16`, `fp32` (as PyTorch has it), `tf32` (everywhere), `ieee` (nowhere), `fp8` or `int8`.
        autocast: whether types are chosen at each operator.
        compiled: whether kernels are generated or fused by a compiler.
        graphs: whether launches are recorded once and replayed.
        torch: version of PyTorch, as 2.1; 0 if unknown.
    """

    application: str
    name: str
    attention: str = FUSED
    processor: str = "sdpa"
    precision: str = "fp16"
    autocast: bool = False
    compiled: bool = False
    graphs: bool = False
    torch: float = 0.0

    @property
    def types(self) -> tuple[str, str]:
        """The types in which convolutions and matrix products compute."""
        if self.precision == "fp32":  # user interfaces allow TF32 everywhere; PyTorch allows it in convolutions
            return ("tf32", "tf32") if self.application == "web" else ("tf32", "fp32")
        kind = {"ieee": "fp32", "bf16": "fp16"}.get(self.precision, self.precision)
        return kind, kind

    @property
    def bytes(self) -> int:
        """Bytes of a number in memory."""
        return 4 if self.precision in ("fp32", "tf32", "ieee") else 2

    @property
    def launcher(self) -> str:
        """The class by which launching a kernel takes its time."""
        if self.application == "engine":
            return "engine"
        if self.application == "web":
            return self.name
        return "graphs" if self.graphs else "compiled" if self.compiled else f"eager_{1 if 0 < self.torch < 2 else 2}"

    @classmethod
    def read(cls, backend: str, precision: str) -> "Software | str":
        """Returns the class of a software as people write it, or why there is none."""
        text, kind = backend.lower(), precision.lower()
        numbers = _precision(kind)
        if numbers is None:
            return f"unknown precision '{precision}'"
        for pattern, reason in _NOT_DESCRIBED.items():
            if re.search(pattern, text):
                return f"the software '{backend}' is not described: {reason}"
        version = re.search(r"(?:py)?torch v?(\d+)\.(\d+)", text)
        torch = float(version[1]) + float(version[2]) / 100 if version else 0.0
        auto = "autocast" in kind
        engine = next((name for pattern, name in _ENGINES.items() if re.search(pattern, text)), None)
        if engine:
            return cls("engine", engine, FUSED, "engine", numbers, auto, True, True, torch)
        web = re.search(
            r"a1111|automatic1111|sdnext|sd\.next|comfy|forge|invoke|webui|^other|^original|^diffusers \D|directml",
            text,
        )
        compiled = bool(re.search(r"compil|inductor|nvfuser", text))
        processor = next((name for pattern, name in _PROCESSORS.items() if re.search(pattern, text)), None)
        if web:
            name = next((name for pattern, name in _WEB.items() if re.search(pattern, text)), "other")
            processor = processor or "sdpa"
            return cls("web", name, _kept(processor), processor, numbers, auto, compiled, False, torch)
        if not re.search(r"torch|diffusers|flash|runwayml|comfy", text):
            return f"unknown software '{backend}'"
        if processor is None:
            processor = "sdpa" if torch >= 2.0 or (not torch and "0.1" not in text) else "vanilla"
        graphs = compiled and bool(re.search("reduce-overhead|max-autotune", text))
        name = "compiled" if compiled else "eager"
        return cls("library", name, _kept(processor), processor, numbers, auto, compiled, graphs, torch)


def _kept(processor: str) -> str:
    return FUSED if processor in ("sdpa", "xformers") else SCORES


def _precision(kind: str) -> str | None:
    return next((name for pattern, name in _PRECISIONS.items() if re.search(pattern, kind)), None)


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

_PROCESSORS = {
    "xformers|flash": "xformers",
    "sdp|scaled-dot|automatic": "sdpa",
    "doggettx|invokeai|sub-quad|split|v1": "split",
    "none|no optimization|default attention|vanilla": "vanilla",
}

_WEB = {
    "a1111|automatic1111|webui": "a1111",
    "sdnext, diffusers|^diffusers": "sdnext_diffusers",
    "sdnext|sd\\.next|original": "sdnext",
    "comfy|forge": "comfy",
}
