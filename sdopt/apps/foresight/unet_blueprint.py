"""Memory and costs of a pipeline with a UNet: of a variant, and of a published figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sdopt.apps.foresight.latency import Costs, averaged
from sdopt.apps.foresight.memory import (
    Blueprint,
    decoding_gib,
    dtype_of,
    folder_for,
    steps_of,
)
from sdopt.apps.foresight.published import PublishedWork, upcasts_vae
from sdopt.apps.foresight.software import Software
from sdopt.apps.foresight.transfers import moved_gib
from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.options.attention import FusedProjections, Sliced, Vanilla
from sdopt.options.base import Optimization
from sdopt.options.caching import DeepCaching, GuidanceInterval, SpectralForecast
from sdopt.options.memory import (
    LayerwiseCasting,
    SequentialGuidance,
    TinyVae,
    VaeSlicing,
    VaeTiling,
)
from sdopt.options.precision import FixedVae, FullVae, Precision
from sdopt.options.quantization import Quantized, QuantizedTextEncoders, Sdnq
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED, parts_in
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.parts import STEPS, TEXT_ENCODERS
from sdopt.pipelines.random_weights import empty_network, empty_part
from sdopt.schema import Shape
from sdopt.variant import Variant

if TYPE_CHECKING:
    import torch


_ROOMY_DENOISER, _ROOMY_DECODER = 1.17, {2: 2.75, 4: 2.25}
"""What the allocator reserves for what is alive where memory is not scarce, by bytes of a number: cuDNN's workspaces for
large images count there."""

Options = tuple[Optimization, ...]


def of_unet(variant: Variant, shape: Shape) -> Blueprint:
    """Builds the networks of a variant on the meta device, applies its options, and traces one step and one decoding.

    Raises:
        UsageError: the model's configuration is not on this machine.
    """
    import torch

    options = variant.optimizations
    chosen = {type(option) for option in options.values()}
    precision = options.get("precision")
    folder = folder_for(variant)
    dtype = dtype_of(precision)
    attention, pieces = _structural(variant)
    unet = changed_network(folder, "unet", dtype, attention)
    vae_folder, vae_class = folder / "vae", parts_in(folder)["vae"][1]
    if TinyVae in chosen:
        packaged = folder.parent == PACKAGED
        vae_folder = (
            PACKAGED / "tiny_autoencoder" if packaged else ARCHITECTURES / "taesd"
        )
        vae_class = "AutoencoderTiny"
    vae_type = _vae_type(variant, vae_folder, vae_class, dtype)
    vae = autoencoder(vae_folder, vae_class, vae_type, pieces)
    encoders = [name for name in TEXT_ENCODERS if name in parts_in(folder)]
    networks = {"unet": unet, "vae": vae}
    for name in encoders:
        networks[name] = changed_network(folder, name, dtype)
    weights = _stored(networks, options.values())
    if (
        isinstance(precision, Precision)
        and precision.autocast
        and precision.weights == "float32"
    ):
        weights["autocast's copies"] = weights["unet"] / 2
    apart = SequentialGuidance in chosen and variant.guidance_scale > 1
    passes = 2 if apart else 1
    each_step, once = moved_gib(options.values(), weights, "unet", passes)
    modules = chain.from_iterable(part.modules() for part in networks.values())
    layer = max(_bytes(module, recurse=False) for module in modules)
    images = shape.batch_size * variant.workload.images_per_prompt
    side = shape.size // 8
    return Blueprint(
        weights,
        averaged(_steps(variant, folder, dtype, attention, images, shape.size)),
        _decoding(vae_folder, vae_class, vae_type, pieces, images, side),
        layer / 2**30,
        each_step * 2**30,
        once * 2**30,
        vae_type == torch.float32 != dtype,
    )


def _structural(variant: Variant) -> tuple[Options, Options]:
    """Returns the options whose changes of the denoiser, and of the autoencoder, a trace on the meta device shows."""
    attention: list[Optimization] = []
    pieces: list[Optimization] = []
    for _, option in variant.applied:
        if isinstance(option, VaeSlicing | VaeTiling):
            pieces.append(option)
        elif isinstance(option, Vanilla | Sliced | FusedProjections):
            attention.append(option)
        elif getattr(option, "backend", "") == "math":
            attention.append(Vanilla())  # PyTorch's own arithmetic writes scores, too
    return tuple(attention), tuple(pieces)


def _vae_type(
    variant: Variant, folder: Path, class_name: str, dtype: torch.dtype
) -> torch.dtype:
    """Returns the type in which the autoencoder decodes, whose weights are of type `dtype`."""
    import torch

    precision = variant.optimizations.get("precision")
    vae = autoencoder(folder, class_name, dtype)
    upcast = (
        getattr(vae.config, "force_upcast", False)
        and family_of(variant.model).upcasts_vae
    )
    upcast = upcast and dtype == torch.float16 and not isinstance(precision, FixedVae)
    return torch.float32 if upcast or isinstance(precision, FullVae) else dtype


@lru_cache(maxsize=16)
def changed_network(
    folder: Path, name: str, dtype: torch.dtype, options: Options = ()
) -> Any:
    """Builds a network of a pipeline's folder on the meta device, as options change it. Nothing may change it further."""
    from sdopt.apps.foresight.trace import on_meta

    part = on_meta(empty_part(folder, name), dtype)
    _apply(options, name, part)
    return part


@lru_cache(maxsize=16)
def autoencoder(
    folder: Path, class_name: str, dtype: torch.dtype, pieces: Options = ()
) -> Any:
    """Builds an autoencoder from its own folder, as `changed_network`."""
    from sdopt.apps.foresight.trace import on_meta

    vae = on_meta(empty_network(folder, "diffusers", class_name), dtype)
    _apply(pieces, "vae", vae)
    return vae


def _apply(options: Options, name: str, part: Any) -> None:
    named = {name: part}
    pipe: Any = SimpleNamespace(**named, components=named)
    for option in options:
        option.apply(pipe)


@lru_cache(maxsize=64)
def _decoding(
    folder: Path,
    class_name: str,
    dtype: torch.dtype,
    pieces: Options,
    images: int,
    side: int,
) -> Costs:
    """Traces the decoding of some images, whose latents have a side of so many numbers."""
    import torch

    from sdopt.apps.foresight.trace import trace

    vae = autoencoder(folder, class_name, dtype, pieces)
    shape = images, vae.config.latent_channels, side, side
    latents = torch.empty(shape, dtype=dtype, device="meta")
    return trace(vae.decode, latents, kept=[latents])


def _steps(
    variant: Variant,
    folder: Path,
    dtype: torch.dtype,
    attention: Options,
    images: int,
    size: int,
) -> list[tuple[int, Costs]]:
    """Returns how many steps of a call cost what. Steps that are forecast, without any layer, cost nothing."""
    options = variant.optimizations
    steps, caching = steps_of(variant), options.get("caching")
    guided = variant.guidance_scale > 1
    apart = guided and any(
        isinstance(option, SequentialGuidance) for option in options.values()
    )
    samples = images * (2 if guided and not apart else 1)
    deep = caching if isinstance(caching, DeepCaching) else None
    whole, fewer = _denoising(folder, dtype, attention, samples, size, deep)
    if isinstance(caching, DeepCaching | SpectralForecast):
        runs = sum(caching.runs(steps))
        return [(runs, whole), (steps - runs, fewer)]
    if isinstance(caching, GuidanceInterval):
        runs = sum(caching.guides(step, steps) for step in range(steps))
        half, _ = _denoising(folder, dtype, attention, samples // 2, size, None)
        return [(runs, whole), (steps - runs, half)]
    return [(steps, whole.times(2 if apart else 1))]


@lru_cache(maxsize=64)
def _denoising(
    folder: Path,
    dtype: torch.dtype,
    attention: Options,
    samples: int,
    size: int,
    caching: DeepCaching | None,
) -> tuple[Costs, Costs]:
    """Traces a step on some samples, and one in which a cache leaves out layers; that costs nothing without a cache."""
    from sdopt.apps.foresight.trace import denoiser_inputs, trace

    if caching is None:
        unet = changed_network(folder, "unet", dtype, attention)
        inputs, more = denoiser_inputs(unet, samples, size, size, dtype)
        return trace(unet, *inputs, kept=inputs[:1], **more), Costs()
    # The cache changes it, so that it is no other's.
    unet = changed_network.__wrapped__(folder, "unet", dtype, (*attention, caching))
    unet.__dict__[STEPS].begin()
    inputs, more = denoiser_inputs(unet, samples, size, size, dtype)
    whole = trace(unet, *inputs, kept=inputs[:1], **more)
    return whole, trace(unet, *inputs, kept=inputs[:1], **more)


def _bytes(module: torch.nn.Module, recurse: bool = True) -> float:
    return float(
        sum(p.numel() * p.element_size() for p in module.parameters(recurse=recurse))
    )


def _stored(
    networks: Mapping[str, torch.nn.Module], options: Iterable[Optimization]
) -> dict[str, float]:
    """Returns the GiB of networks whose weights some options store in few bits, without the scales of these."""
    import torch

    weights = {name: _bytes(part) / 2**30 for name, part in networks.items()}
    for option in options:
        if not isinstance(option, LayerwiseCasting | Quantized | QuantizedTextEncoders):
            continue
        of_text = isinstance(option, QuantizedTextEncoders)
        only_linear = of_text or (
            isinstance(option, Quantized) and not isinstance(option, Sdnq)
        )
        kinds = (
            (torch.nn.Linear,) if only_linear else (torch.nn.Linear, torch.nn.Conv2d)
        )
        bits = 4 if getattr(option, "weights", "") in ("uint4", "nf4", "fp4") else 8
        for name in weights.keys() & ({*TEXT_ENCODERS} if of_text else {"unet"}):
            stored = [
                layer.get_parameter("weight")
                for layer in networks[name].modules()
                if isinstance(layer, kinds)
            ]
            saved = sum(
                weight.numel() * (weight.element_size() - bits / 8) for weight in stored
            )
            weights[name] = (_bytes(networks[name]) - saved) / 2**30
    return weights


@lru_cache
def _parameters(folder: Path) -> int:
    """Returns how many parameters a published architecture has."""
    from sdopt.apps.foresight.trace import network

    texts = [
        empty_part(folder, name) for name in TEXT_ENCODERS if name in parts_in(folder)
    ]
    parts = network(folder, "unet"), network(folder, "vae"), *texts
    weights = chain.from_iterable(part.parameters() for part in parts)
    return sum(weight.numel() for weight in weights)


def likely_of_unet(
    work: PublishedWork, software: Software, kind: str, card_gib: float
) -> tuple[float, float]:
    """Returns floor and likely GiB of a published figure: `allocated`, `reserved` where there is room, or `device`."""
    from sdopt.apps.foresight.trace import pass_costs

    folder, bytes_each = ARCHITECTURES / work.architecture, software.bytes
    weights = _parameters(folder) * bytes_each / 2**30
    decoded = 4 if upcasts_vae(work, software) else bytes_each

    def peak_gib(name: str, samples: int, width: int) -> float:
        costs = pass_costs(
            folder, name, samples, work.width, work.height, software.attention
        )
        return costs.peak * width / 2 / 2**30

    denoiser = peak_gib("unet", work.batch * work.samples, bytes_each)
    decoder = peak_gib("vae", 1 if work.sliced else work.batch, decoded)
    floor = weights + max(denoiser, decoder)
    if kind == "allocated":
        return floor, weights + max(denoiser, decoding_gib(decoder))
    roomy = weights + max(denoiser * _ROOMY_DENOISER, decoder * _ROOMY_DECODER[decoded])
    context = CUDA_CONTEXT_GIB if kind == "device" else 0.0
    return floor + context, min(roomy, max(floor, card_gib - context)) + context
