"""Finds the parts of a pipeline by what they do: code says *denoiser*, not `pipe.unet`."""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from itertools import chain
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


Pipeline = Any
"""A `DiffusionPipeline` of diffusers, which takes seconds to import."""

_DEVICE = "_sdopt_device"
"""Attribute of a pipeline that names the device on which it computes."""


STEPS = "sdopt_caching"
"""Attribute of a denoiser with data that an option keeps from step to step."""


def denoiser_of(pipe: Pipeline) -> Any:
    """Returns the model that is called once per step: a UNet or a transformer, compiled or not."""
    return getattr(pipe, denoiser_name(pipe))


def denoiser_name(pipe: Pipeline) -> str:
    """Returns the attribute of a pipeline that holds its denoiser."""
    return "unet" if hasattr(pipe, "unet") else "transformer"


def shape_of(weight: Any) -> Any:
    """Returns the shape of a weight, also of one whose numbers are stored in blocks."""
    return getattr(weight, "quant_shape", weight.shape)


def unwrapped(module: torch.nn.Module) -> Any:
    """Returns the module that `torch.compile` wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def is_compiled(denoiser: torch.nn.Module) -> bool:
    """Returns whether a compiler replaced a denoiser, or the functions of its kinds of steps."""
    steps = vars(denoiser).get(STEPS)
    computing = [
        denoiser,
        *(getattr(steps, part) for part in getattr(steps, "parts", ())),
    ]
    return any(unwrapped(module) is not module for module in computing)


TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
"""The attributes of a pipeline that may hold its text encoders, in their order."""


def text_encoders_of(pipe: Pipeline) -> list[torch.nn.Module]:
    """Returns the text encoders of a pipeline, in their order."""
    return [
        encoder
        for name in TEXT_ENCODERS
        if (encoder := getattr(pipe, name, None)) is not None
    ]


def networks_of(pipe: Pipeline) -> dict[str, torch.nn.Module]:
    """Returns the networks of a pipeline by their attributes: text encoders, denoiser, VAE."""
    import torch

    return {
        name: part
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
    }


def device_of(pipe: Pipeline) -> torch.device:
    """Returns the device on which a pipeline computes; its weights may be elsewhere."""
    device: torch.device = getattr(pipe, _DEVICE, None) or pipe.device
    return device


def place(pipe: Pipeline, device: str, on_host: bool) -> None:
    """Moves a pipeline to the device on which it computes, or to the host if an option moves its weights later."""
    import torch

    pipe.to("cpu" if on_host else device)
    setattr(pipe, _DEVICE, torch.device(device))


def cast(pipe: Pipeline, dtype: torch.dtype) -> None:
    """Casts the weights of a pipeline's networks, but not what a network keeps in its type when it is loaded.

    T5's last projections are such: in float16 they overflow, and every image is noise
    (https://github.com/huggingface/diffusers/issues/8604). Language models compute the rates by which they count
    positions, and do not store them: rounded to bfloat16, places of later words are wrong. `pipe.to(dtype)` casts both.
    """
    weights: dict[torch.nn.Parameter, torch.Tensor] = {}
    computed: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    for network in networks_of(pipe).values():
        in_float32 = kept_in_float32(network, dtype)
        weights |= {
            weight: weight.data.float()
            for key, weight in network.named_parameters()
            if key in in_float32
        }
        for module in network.modules():
            for name in module._non_persistent_buffers_set:
                if (buffer := module._buffers[name]) is not None:
                    computed.append((module, name, buffer))
    pipe.to(dtype)
    for weight, values in weights.items():
        weight.data = values
    for module, name, buffer in computed:
        module._buffers[name] = buffer


def kept_in_float32(network: Any, dtype: torch.dtype) -> set[str]:
    """Returns the parameters that a network keeps in float32 when it is loaded in a type, as its class says."""
    import torch

    if dtype != torch.float16:
        return set()
    parts = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    return {
        key
        for key, _ in network.named_parameters()
        if parts.intersection(key.split("."))
    }


CALL = "_sdopt_call"
"""Attribute of a pipeline with the arguments that each call of it has, whatever its prompts."""

_CALLED = "_sdopt_called"
"""Attribute that a pipeline has while it is called with its options: the thread that calls it."""


@contextmanager
def called(pipe: Pipeline) -> Iterator[None]:
    """Marks a pipeline as called: its denoiser and its scheduler may be those of other pipelines too."""
    pipe.__dict__[_CALLED] = get_ident()
    try:
        yield
    finally:
        pipe.__dict__.pop(_CALLED, None)


def is_called(pipe: Pipeline) -> bool:
    """Returns whether this thread calls a pipeline now, so that it says how its denoiser is to run."""
    return vars(pipe).get(_CALLED) == get_ident()


def layers_with_weights(network: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules of a network that have parameters of their own."""
    layers = network.modules()
    return [
        layer
        for layer in layers
        if next(layer.parameters(recurse=False), None) is not None
    ]


def computing_types(module: torch.nn.Module) -> list[str]:
    """Returns the distinct types in which parameters compute; for weights cast at each use, the type after the cast."""
    import torch

    only_stored = (torch.float8_e4m3fn, torch.float8_e5m2)
    # The weights of a GGUF file are blocks of bits, which their layers make numbers of.
    plain = (
        parameter
        for parameter in module.parameters()
        if not hasattr(parameter, "quant_type")
    )
    types = {
        parameter.dtype for parameter in plain if parameter.dtype not in only_stored
    }
    types |= {
        hook.compute_dtype
        for layer in module.modules()
        if (hook := casting_hook(layer)) is not None
    }
    for layer in module.modules():
        if type(layer).__name__ == "GGUFLinear":
            compute: Any = layer
            types.add(compute.compute_dtype)
    return sorted(str(dtype).removeprefix("torch.") for dtype in types)


def casting_hook(layer: torch.nn.Module) -> Any:
    """Returns diffusers' hook that casts a layer's weights for each use, with the types of both; None without one."""
    return hook_of(layer, "layerwise_casting")


def hook_of(layer: torch.nn.Module, name: str) -> Any:
    """Returns a layer's hook by the name that diffusers registers it under; None without one."""
    registry = getattr(layer, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


def moves_weights(network: torch.nn.Module) -> bool:
    """Returns whether hooks move a network's weights to the device for each use."""
    return any(
        "_hf_hook" in vars(layer) or hook_of(layer, "group_offloading")
        for layer in network.modules()
    )


def quantized_layer(network: torch.nn.Module) -> str | None:
    """Returns the name of a layer whose weights are not numbers of the type that they stand for; None if all are."""
    for name, layer in network.named_modules():
        for weight in layer.parameters(recurse=False):
            stored = weight.element_size() == 1 and casting_hook(layer) is None
            if (
                hasattr(weight, "__tensor_flatten__")
                or stored
                or not weight.is_floating_point()
            ):
                return str(name)
    return None


def attention_layers(denoiser: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the attention layers of a denoiser: the modules that have a processor."""
    return [
        layer
        for layer in denoiser.modules()
        if getattr(layer, "processor", None) is not None
    ]


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of tensors with their names, types and shapes."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        )
    return digest.hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what diffusers, transformers and others say, and their progress bars, from the terminal."""
    # Of what is not imported yet, nothing is to be imported here.
    logs = [
        sys.modules[name]
        for name in ("diffusers.utils.logging", "transformers.utils.logging")
        if name in sys.modules
    ]
    before = [log.get_verbosity() for log in logs]
    for log in logs:
        log.set_verbosity(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.set_verbosity(level)


def bytes_of(network: torch.nn.Module, device: str | None = None) -> int:
    """Returns the bytes of a network's parameters as they are stored, optionally only those on one type of device."""
    total = 0
    for weight in network.parameters():
        for tensor in held_tensors(weight):
            if device in (None, tensor.device.type):
                total += tensor.numel() * tensor.element_size()
    return total


def held_tensors(weight: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that store a weight: the weight itself, or the inner tensors of a quantized weight.

    diffusers moves only the inner tensors, so the device that a quantized weight reports may be wrong.
    """
    if hasattr(weight, "__tensor_flatten__"):
        names, _ = weight.__tensor_flatten__()
        inner = (getattr(weight, name) for name in names)
        return [*chain.from_iterable(map(held_tensors, inner))]
    # bitsandbytes keeps the scales beside the parameter, and quantizes them once more.
    held, state = [weight], getattr(weight, "quant_state", None)
    while state is not None:
        held.append(state.absmax)
        state = getattr(state, "state2", None)
    return held
