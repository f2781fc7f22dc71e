"""Reads a variant's options as the latency model needs them: its class of software, or why it has none."""

from sdopt.foresight.software import FUSED, SCORES, Software
from sdopt.options.attention import Sliced, Vanilla
from sdopt.options.base import Optimization
from sdopt.options.caching import WholeSteps
from sdopt.options.lora import Fused, NoLora
from sdopt.options.precision import Precision
from sdopt.variant import Variant

_TORCH = 2.1
"""The newest PyTorch of which the figures tell something; later ones count as this one."""

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

_TYPES = {"float16": "fp16", "bfloat16": "bf16"}


def software_of(variant: Variant) -> Software | str:
    """Returns the class of software that a variant runs, or why no time can be told for it."""
    options = variant.optimizations
    compiler, attention, precision = (options.get(axis) for axis in ("compiler", "attention", "precision"))
    kind = type(compiler).__name__ if compiler is not None else "Eager"
    numbers, autocast = _numbers(precision)
    for axis, untold, reason in (
        ("precision", not isinstance(precision, Precision | None), "there are no figures of 8-bit back ends"),
        ("lora", not isinstance(options.get("lora"), NoLora | Fused | None), "there are no figures of unfused LoRAs"),
        ("caching", not isinstance(options.get("caching"), WholeSteps | None), "one traced step shows nothing"),
        ("grad_mode", getattr(options.get("grad_mode"), "mode", "") == "enabled", "there are no figures with autograd"),
        ("compiler", kind not in (*_COMPILERS, "TensorRt"), "there are no figures of it"),
    ):
        if untold:
            return f"{axis}={variant.choices.get(axis, axis)}: {reason} to learn from"
    if kind == "TensorRt":
        return Software("engine", "tensorrt", FUSED, "engine", numbers, autocast, True, True, _TORCH)
    compiled, graphs = _COMPILERS[kind]
    graphs = graphs or getattr(compiler, "mode", "") in ("reduce-overhead", "max-autotune")
    plain = isinstance(attention, Vanilla | Sliced) or getattr(attention, "backend", "") == "math"
    processor = "split" if isinstance(attention, Sliced) else "vanilla" if plain else "sdpa"
    if type(attention).__name__ == "Xformers":
        processor = "xformers"
    name = "compiled" if compiled else "eager"
    kept = SCORES if plain else FUSED
    return Software("library", name, kept, processor, numbers, autocast, compiled, graphs, _TORCH)


def _numbers(precision: Optimization | None) -> tuple[str, bool]:
    """Returns the type of the arithmetic, and whether it is chosen at each operator."""
    if not isinstance(precision, Precision):
        return "fp32", False
    if precision.autocast:
        return _TYPES[precision.autocast], True
    if precision.weights != "float32":
        return _TYPES[precision.weights], False
    return {"on": "tf32", "off": "ieee"}.get(precision.tf32, "fp32"), False
