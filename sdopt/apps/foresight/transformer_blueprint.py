"""Memory and costs of a pipeline with a diffusion transformer: of a variant, and of a published figure."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sdopt.apps.foresight.latency import Costs, averaged
from sdopt.apps.foresight.memory import (
    Blueprint,
    decoding_gib,
    dtype_of,
    folder_for,
    steps_of,
)
from sdopt.apps.foresight.published import PublishedWork
from sdopt.apps.foresight.software import SCORES, Software
from sdopt.apps.foresight.storage import (
    BITS,
    Storage,
    encoder_stage,
    gib_of,
    weights_in,
)
from sdopt.apps.foresight.trace import network, on_meta, trace
from sdopt.apps.foresight.transfers import moved_gib
from sdopt.apps.foresight.transformers import (
    decoder_costs,
    denoiser_costs,
    encoding_costs,
    for_samples,
    latents_of,
    words_of,
)
from sdopt.errors import UsageError
from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.options.attention import Sliced, Vanilla
from sdopt.options.caching import GuidanceInterval, SpectralForecast
from sdopt.options.memory import LayerwiseCasting, TinyVae, VaeInPieces, WithoutT5
from sdopt.options.nf4 import BitsAndBytes
from sdopt.options.precision import FullVae
from sdopt.options.quantization import Quantized, QuantizedTextEncoders, TorchAo
from sdopt.pipelines.catalog import ARCHITECTURES
from sdopt.pipelines.families import family_of_folder
from sdopt.pipelines.family import Family
from sdopt.pipelines.loading import family_of, guidance_of
from sdopt.pipelines.random_weights import empty_part
from sdopt.pipelines.transformer_files import is_gguf, stored_parts
from sdopt.schema import Shape
from sdopt.variant import Variant

_ROOMY_DENOISER, _ROOMY_DECODER = 1.17, 3.0
"""What PyTorch reserves for what is alive where memory is not scarce."""

_CONVERTING = 0.17
"""GiB beside all weights while the largest layer is quantized."""


def of_transformer(variant: Variant, shape: Shape) -> Blueprint:
    """Counts what the networks of a variant weigh, and what one step and one decoding cost.

    Raises:
        UsageError: the model's configuration is not on this machine, or its transformer is of an unknown class.
    """
    folder, family = folder_for(variant), family_of(variant.model)
    chosen, guidance = variant.optimizations, guidance_of(variant.model)
    kinds = {type(option) for option in chosen.values()}
    dtype = dtype_of(chosen.get("precision"))
    images = shape.batch_size * variant.workload.images_per_prompt
    size = shape.size, shape.size
    words = words_of(family, variant.model.max_sequence_length)
    scores = isinstance(chosen.get("attention"), Vanilla | Sliced)
    scores = scores or getattr(chosen.get("attention"), "backend", "") == "math"
    one = _in_type(denoiser_costs(folder, size, words, scores), dtype)
    whole = for_samples(one, images * guidance.samples_a_call(variant.guidance_scale))
    passes = guidance.calls_a_step(variant.guidance_scale)
    whole = whole.times(passes)
    both = guidance.guides(variant.guidance_scale)
    storage = Storage()
    before = weights_in(folder, storage, dtype)
    if WithoutT5 in kinds:
        before = {k: v for k, v in before.items() if k not in family.optional}
    weights = {name: _stored(folder, name, family, dtype, variant) for name in before}
    if TinyVae in kinds:
        weights["vae"] = _gib(_tiny_vae(folder), dtype)
    if isinstance(chosen.get("precision"), FullVae):
        weights["vae"] *= 4 / dtype.itemsize
    quantizes = any(
        isinstance(option, Quantized | QuantizedTextEncoders | LayerwiseCasting)
        for option in chosen.values()
    )
    each_step, once = moved_gib(chosen.values(), weights, family.denoiser, passes)
    quantizes_on_device = quantizes and not once
    return Blueprint(
        weights,
        averaged(_steps(variant, whole, both)),
        _decoding(variant, folder, size, images, dtype),
        _largest_layer(folder, tuple(weights), dtype),
        each_step * 2**30,
        once * 2**30,
        isinstance(chosen.get("precision"), FullVae) and dtype != torch.float32,
        name=family.denoiser,
        texts=encoder_stage(family, weights, both and guidance.takes_negative),
        loading=sum(before.values()) + _CONVERTING if quantizes_on_device else 0.0,
        encoding=encoding_costs(folder, shape.batch_size * (2 if both else 1)),
    )


def _in_type(costs: Costs, dtype: torch.dtype) -> Costs:
    """Returns costs whose peak was traced in two bytes a number, in another type."""
    return replace(costs, peak=costs.peak * dtype.itemsize / 2)


def _stored(
    folder: Path, name: str, family: Family, dtype: torch.dtype, variant: Variant
) -> float:
    """Returns the GiB of a network as the options of a variant store it."""
    part, form = network(folder, name), ""
    if name == family.denoiser and is_gguf(variant.model):
        stored = stored_parts(variant.model, folder)[name]
        return stored.bytes_in_blocks(dtype.itemsize) / 2**30
    for option in variant.optimizations.values():
        if isinstance(option, QuantizedTextEncoders) and name in family.encoders:
            chosen = (
                not option.encoders
                or family.encoders.index(name) + 1 in option.encoders
            )
            form = option.weights if chosen else form
        elif name == family.denoiser and isinstance(option, LayerwiseCasting):
            form = "cast8"
        elif name == family.denoiser and isinstance(option, BitsAndBytes):
            form = "nf4_double" if option.double else "nf4"
        elif name == family.denoiser and isinstance(option, Quantized):
            form = {"float8_e4m3fn": "fp8"}.get(option.weights, option.weights)
            form = f"{form}_tokens" if isinstance(option, TorchAo) else form
    if form and form not in BITS:
        raise UsageError(
            f"model={variant.model.name}: sdopt plan does not know weights in {form}: measure it"
        )
    return gib_of(part, dtype, form, Storage())


def _gib(part: Any, dtype: torch.dtype) -> float:
    return float(
        sum(weight.numel() for weight in part.parameters()) * dtype.itemsize / 2**30
    )


def _tiny_vae(folder: Path) -> Any:
    """Builds a tiny autoencoder for the latents of a folder's own."""
    from diffusers import AutoencoderTiny

    channels = network(folder, "vae").config.latent_channels
    with torch.device("meta"):
        return AutoencoderTiny(latent_channels=channels)


def _decoding(
    variant: Variant,
    folder: Path,
    size: tuple[int, int],
    images: int,
    dtype: torch.dtype,
) -> Costs:
    """Returns the costs of decoding the images of a call, as the options decode them."""
    options = variant.optimizations.values()
    pieces = [option for option in options if isinstance(option, VaeInPieces)]
    tiny = any(isinstance(option, TinyVae) for option in options)
    full = isinstance(variant.optimizations.get("precision"), FullVae)
    width = torch.float32 if full else dtype
    if not pieces and not tiny:
        one = _in_type(decoder_costs(folder, size), width)
        return replace(one.times(images), kernels=one.kernels, peak=one.peak * images)
    return _in_pieces(
        folder, size, images, dtype if tiny else width, tuple(pieces), tiny
    )


@lru_cache(maxsize=64)
def _in_pieces(
    folder: Path,
    size: tuple[int, int],
    images: int,
    dtype: torch.dtype,
    pieces: tuple[VaeInPieces, ...],
    tiny: bool,
) -> Costs:
    """Traces the decoding of images in pieces, or by a tiny autoencoder: as many ways to fit into a card have it."""
    # Made anew, since options change it.
    vae = on_meta(_tiny_vae(folder) if tiny else empty_part(folder, "vae"), dtype)
    pipe: Any = SimpleNamespace(vae=vae)
    for option in pieces:
        option.apply(pipe)
    latents = latents_of(network(folder, "vae"), size, images, dtype)
    return trace(vae.decode, latents, kept=[latents])


def _largest_layer(folder: Path, names: tuple[str, ...], dtype: torch.dtype) -> float:
    most = 0
    for name in names:
        for layer in network(folder, name).modules():
            weights = layer.parameters(recurse=False)
            most = max(most, sum(weight.numel() for weight in weights))
    return float(most * dtype.itemsize / 2**30)


def _steps(variant: Variant, whole: Costs, both: bool) -> list[tuple[int, Costs]]:
    """Returns how many steps of a call cost what. Steps that are forecast cost nothing."""
    steps, caching = steps_of(variant), variant.optimizations.get("caching")
    if isinstance(caching, SpectralForecast):
        runs = sum(caching.runs(steps))
        return [(runs, whole), (steps - runs, Costs())]
    if isinstance(caching, GuidanceInterval) and both:
        runs = sum(caching.guides(step, steps) for step in range(steps))
        return [(runs, whole), (steps - runs, whole.times(0.5))]
    return [(steps, whole)]


def likely_of_transformer(
    work: PublishedWork, software: Software, kind: str, card_gib: float
) -> tuple[float, float]:
    """Returns floor and likely GiB of a published figure, as `blueprints.likely_of`."""
    folder, storage = ARCHITECTURES / work.architecture, work.storage
    family, size = family_of_folder(folder), (work.width, work.height)
    dtype = torch.float16 if software.precision == "fp16" else torch.bfloat16
    weights = weights_in(folder, storage, dtype)
    whole = sum(weights.values())
    if kind == "weights":
        return whole, whole
    one = denoiser_costs(
        folder, size, words_of(family, None), software.attention == SCORES
    )
    denoiser = for_samples(one, work.batch * work.samples).peak / 2**30
    decoder = decoder_costs(folder, size).peak * work.batch / 2**30
    roomy = kind in ("reserved", "device")
    wide = (
        denoiser * (_ROOMY_DENOISER if roomy else 1.0),
        decoder * _ROOMY_DECODER if roomy else decoding_gib(decoder),
    )
    held = [whole, whole]
    encoding = 0.0
    if storage.offload:
        both = work.calls * work.samples > 1
        held, encoding = (
            [weights[family.denoiser], weights["vae"]],
            encoder_stage(family, weights, both),
        )
    floor = max(held[0] + denoiser, held[1] + decoder, encoding)
    likely = max(held[0] + wide[0], held[1] + wide[1], encoding)
    if storage.loads_whole and storage.denoiser:
        plain = replace(storage, denoiser="", texts="")
        likely = max(
            likely, sum(weights_in(folder, plain, dtype).values()) + _CONVERTING
        )
    context = CUDA_CONTEXT_GIB if kind == "device" else 0.0
    return floor + context, min(likely + context, max(floor + context, card_gib))
