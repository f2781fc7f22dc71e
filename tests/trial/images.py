"""Harm to images alone: each is a function of the baseline's images, or of the pipeline that generates them.

None of it has to be timed: images are generated in a few calls from the study's prompts and noise, or computed from the
baseline's.
"""

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from sdopt.options import Proof, denoiser_of
from sdopt.reference import PROMPTS
from tests.trial.options import Mistake, handle_calls


@dataclass(frozen=True)
class Harm:
    """One kind of harm to images.

    Attributes:
        kind: what is harmed, as a heading.
        name: of this harm.
        promise: the contract that an option with this harm declares.
        caught_by: rules of which at least one should catch it, separated by bars.
        retouch: returns changed images, given the baseline's: (n, 3, height, width) in −1…1.
        change: changes a pipeline, where the images have to be generated; it can be pickled.
    """

    kind: str
    name: str
    promise: str
    caught_by: str
    retouch: Callable[[Tensor], Tensor] | None = None
    change: Callable[[DiffusionPipeline], None] | None = None


@dataclass(frozen=True)
class Changed(Mistake):
    """The option that a harm to a pipeline is, for the worker that generates its images."""

    change: Callable[[DiffusionPipeline], None] = lambda pipe: None

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        self.change(pipe)
        return super().apply(pipe)


# ------------------------------------------------------------------------------------------------------- pixels


def in_turn(images: Tensor, every: int, harmed: Tensor, others: Tensor | None = None) -> Tensor:
    """Returns `harmed` for every `every`-th image, from the first on, and `others` (by default, `images`) else."""
    chosen = torch.tensor([number % every == 0 for number in range(len(images))]).view(-1, 1, 1, 1)
    return torch.where(chosen, harmed, images if others is None else others)


def noisy(images: Tensor, sigma: float) -> Tensor:
    """Adds noise with a standard deviation of `sigma`, in the range 0…1."""
    return images + 2 * sigma * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Convolves images with a Gaussian of `sigma` pixels."""
    line = torch.exp(-torch.arange(-3, 4).float().square() / (2 * sigma**2))
    kernel = torch.outer(line, line) / line.sum() ** 2
    padded = functional.pad(images, (3, 3, 3, 3), mode="replicate")
    return functional.conv2d(padded, kernel.expand(3, 1, 7, 7), groups=3)


def unevenly_sharp(images: Tensor) -> Tensor:
    """Blurs every other image and sharpens the others by as much, so that the mean of fine detail stays."""
    soft = blurred(images, 0.6)
    return in_turn(images, 2, soft, (2 * images - soft).clamp(-1, 1))


def redder(images: Tensor, share: float) -> Tensor:
    """Adds a share of the range to red."""
    return (images + torch.tensor([2 * share, 0.0, 0.0]).view(1, 3, 1, 1)).clamp(-1, 1)


def grey(images: Tensor) -> Tensor:
    """Returns the luminance, (n, 1, height, width)."""
    return (images * torch.tensor([0.2126, 0.7152, 0.0722]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def faded(images: Tensor, kept: float) -> Tensor:
    """Reduces the distance of colours to grey to the share `kept`."""
    return grey(images) + kept * (images - grey(images))


def contrast(images: Tensor, factor: float) -> Tensor:
    """Multiplies the contrast."""
    middle = images.mean(dim=(1, 2, 3), keepdim=True)
    return (middle + factor * (images - middle)).clamp(-1, 1)


def darker(images: Tensor, share: float) -> Tensor:
    """Reduces the brightness by a share."""
    return (images + 1) * (1 - share) - 1


def shifted(images: Tensor, pixels: int) -> Tensor:
    """Shifts images to the right."""
    return functional.pad(images, (pixels, 0, 0, 0), mode="replicate")[..., : images.shape[-1]]


def enlarged(images: Tensor) -> Tensor:
    """Enlarges images by 6 %, and cuts off their edges."""
    side = images.shape[-1]
    large = functional.interpolate(images, scale_factor=1.06, mode="bicubic", antialias=True)
    start = (large.shape[-1] - side) // 2
    return large[..., start : start + side, start : start + side].clamp(-1, 1)


def blotted(images: Tensor) -> Tensor:
    """Puts a grey square, a quarter of the side wide, into the middle."""
    start, stop = 3 * images.shape[-1] // 8, 5 * images.shape[-1] // 8
    harmed = images.clone()
    harmed[..., start:stop, start:stop] = 0
    return harmed


def jpeg(images: Tensor, quality: int) -> Tensor:
    """Compresses images as JPEG, and decodes them again."""
    found = []
    for image in ((images.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy():
        Image.fromarray(image).save(stream := io.BytesIO(), "JPEG", quality=quality)
        found.append(torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1) / 127.5 - 1)
    return torch.stack(found)


def few_levels(images: Tensor) -> Tensor:
    """Reduces each channel to 32 levels."""
    return ((images + 1) / 2 * 31).round() / 31 * 2 - 1


def coarse_colour(images: Tensor) -> Tensor:
    """Reduces the resolution of colour to a quarter each way, and keeps that of luminance."""
    coarse = functional.interpolate(functional.avg_pool2d(images - grey(images), 4), scale_factor=4)
    return (grey(images) + coarse).clamp(-1, 1)


# ----------------------------------------------------------------------------------------------------- pipelines


def not_a_number(pipe: DiffusionPipeline) -> None:
    """Sets one value in the latents of every 32nd image to NaN."""
    decode, made = pipe.vae.decode, 0

    def changed(latents: Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal made
        latents = latents.clone()
        latents[[(made + number) % 32 == 0 for number in range(len(latents))], 0, 0, 0] = torch.nan
        made += len(latents)
        return decode(latents, *arguments, **options)

    pipe.vae.__dict__["decode"] = changed


def other_noise(pipe: DiffusionPipeline, shared: float = 0.0, weaker: float = 0.0) -> None:
    """Mixes the noise of every image with noise that all share, at the same variance, or makes it weaker.

    `shared` is the share of the common noise in the variance: 1 ignores the seed.
    """
    prepare = pipe.prepare_latents

    def changed(*arguments: Any, **options: Any) -> Tensor:
        own: Tensor = prepare(*arguments, **options)
        common = torch.randn(own[:1].shape, generator=torch.Generator().manual_seed(0)).to(own)
        mixed: Tensor = math.sqrt(1 - shared) * own + math.sqrt(shared) * pipe.scheduler.init_noise_sigma * common
        return mixed * (1 - weaker)

    pipe.prepare_latents = changed


def other_guidance(pipe: DiffusionPipeline) -> None:
    """Changes the guidance scale to 1.5."""
    handle_calls(pipe, lambda call, arguments: call(**arguments | {"guidance_scale": 1.5}))


def other_prompts(pipe: DiffusionPipeline, every: int, words: int | None = None) -> None:
    """Replaces every `every`-th prompt of the packaged list by the next one, or cuts it after some words."""
    captions = json.loads(PROMPTS.read_text())["gate"]
    chosen = list(zip(captions, captions[1:] + captions[:1], strict=True))[::every]
    instead = {text: following if words is None else " ".join(text.split()[:words]) for text, following in chosen}
    encode = pipe.encode_prompt

    def changed(prompt: Any, *arguments: Any, **options: Any) -> Any:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        return encode([instead.get(text, text) for text in prompts], *arguments, **options)

    pipe.encode_prompt = changed


def late_text(pipe: DiffusionPipeline, after: float, every: int = 1, swapped: bool = False) -> None:
    """Conditions every `every`-th image on no text after a share of the steps, or on that of the next image."""
    denoiser, calls = denoiser_of(pipe), 0
    forward = denoiser.forward

    def changed(sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, *rest: Any, **options: Any) -> Any:
        nonlocal calls
        step, calls = calls % pipe.num_timesteps, calls + 1
        if step >= after * pipe.num_timesteps:
            without, of_text = encoder_hidden_states.chunk(2)
            other = of_text.clone()
            other[::every] = (of_text.roll(-1, 0) if swapped else without)[::every]
            encoder_hidden_states = torch.cat([without, other])
        return forward(sample, timestep, encoder_hidden_states, *rest, **options)

    denoiser.forward = changed


def scaled_attention(pipe: DiffusionPipeline, factor: float) -> None:
    """Multiplies the queries of every attention, as with a wrong scale."""
    for name, module in denoiser_of(pipe).named_modules():
        if name.endswith("to_q"):
            module.weight.data *= factor


def scaled_latents(pipe: DiffusionPipeline, factor: float) -> None:
    """Multiplies the autoencoder's scale."""
    pipe.vae.register_to_config(scaling_factor=pipe.vae.config.scaling_factor * factor)


def for_weights(pipe: DiffusionPipeline, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the weights of the denoiser's products and convolutions."""
    for tensor in denoiser_of(pipe).parameters():
        if tensor.dim() > 1:
            tensor.data.copy_(change(tensor.data))


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Rounds a tensor to some bits, with one scale."""
    scale = weight.abs().max() / (2 ** (bits - 1) - 1)
    levels: Tensor = (weight / scale).round() * scale
    return levels


def pruned(weight: Tensor) -> Tensor:
    """Sets the smallest 30 % of a tensor to zero."""
    return weight.where(weight.abs() >= weight.abs().flatten().quantile(0.3), 0)


def flipped(weight: Tensor) -> Tensor:
    """Flips the sign of every thousandth value, as damaged bits would."""
    damaged = weight.clone()
    damaged.view(-1)[::1000] *= -1
    return damaged


_CLOSE, _LOSSY = "equivalent", "lossy"


def _retouched(kind: str, *rows: tuple[str, str, str, Callable[[Tensor], Tensor]]) -> list[Harm]:
    return [Harm(kind, name, promise, rules, retouch=function) for name, promise, rules, function in rows]


def _generated(kind: str, *rows: tuple[str, str, str, Callable[[DiffusionPipeline], None]]) -> list[Harm]:
    return [Harm(kind, name, promise, rules, change=function) for name, promise, rules, function in rows]


HARMS: tuple[Harm, ...] = (
    *_retouched(
        "a few images of many",
        ("one black image of 32", _LOSSY, "tripwires", lambda x: in_turn(x, 32, torch.full_like(x, -1))),
        ("one image of 60 is another's", _CLOSE, "mse", lambda x: in_turn(x, 60, x.roll(1, 0))),
        ("one image of 15 is another's", _LOSSY, "perceptual", lambda x: in_turn(x, 15, x.roll(1, 0))),
        ("grey square in one image of 8", _LOSSY, "perceptual", lambda x: in_turn(x, 8, blotted(x))),
        (
            "one image of 8 darker by 10 %",
            _LOSSY,
            "brightness_error|colour_error",
            lambda x: in_turn(x, 8, darker(x, 0.1)),
        ),
        ("one image of 30 darker by 1 %", _CLOSE, "mse", lambda x: in_turn(x, 30, darker(x, 0.01))),
    ),
    *_generated("a few images of many", ("NaN in one latent of 32", _LOSSY, "tripwires", not_a_number)),
    *_retouched(
        "colours, contrast, sharpness",
        ("pixel noise, σ 0.02", _LOSSY, "fine_detail", lambda x: noisy(x, 0.02)),
        ("pixel noise, σ 0.05", _LOSSY, "fine_detail", lambda x: noisy(x, 0.05)),
        ("blur, σ 0.7 pixels", _LOSSY, "fine_detail", lambda x: blurred(x, 0.7)),
        ("blurred and sharpened in turn", _LOSSY, "detail_error", unevenly_sharp),
        (
            "red +5 % and −5 % in turn",
            _LOSSY,
            "colour_error",
            lambda x: in_turn(x, 2, redder(x, 0.05), redder(x, -0.05)),
        ),
        ("red +0.5 %", _CLOSE, "mse", lambda x: redder(x, 0.005)),
        ("a fifth of the colour lost", _LOSSY, "colour_error", lambda x: faded(x, 0.8)),
        (
            "contrast +8 % and −8 % in turn",
            _LOSSY,
            "contrast_error",
            lambda x: in_turn(x, 2, contrast(x, 1.08), contrast(x, 0.92)),
        ),
    ),
    *_retouched(
        "geometry",
        ("shifted by 2 pixels", _LOSSY, "perceptual", lambda x: shifted(x, 2)),
        ("shifted by 1 pixel", _CLOSE, "mse", lambda x: shifted(x, 1)),
        ("all mirrored", _LOSSY, "perceptual", lambda x: x.flip(-1)),
        ("one image of 6 mirrored", _LOSSY, "perceptual", lambda x: in_turn(x, 6, x.flip(-1))),
        ("enlarged by 6 %", _LOSSY, "perceptual", enlarged),
    ),
    *_retouched(
        "compression",
        ("JPEG of quality 50", _LOSSY, "perceptual|fine_detail|detail_error", lambda x: jpeg(x, 50)),
        ("JPEG of quality 98", _CLOSE, "mse", lambda x: jpeg(x, 98)),
        ("32 levels a channel", _LOSSY, "fine_detail|detail_error", few_levels),
        ("colour at a quarter of the resolution", _LOSSY, "perceptual|fine_detail|colour_error", coarse_colour),
    ),
    *_generated(
        "variety between seeds",
        ("the seed ignored", _LOSSY, "perceptual", partial(other_noise, shared=1.0)),
        ("half of the noise shared", _LOSSY, "perceptual", partial(other_noise, shared=0.5)),
        (
            "noise weaker by two fifths",
            _LOSSY,
            "perceptual|contrast_error|colour_error",
            partial(other_noise, weaker=0.4),
        ),
    ),
    *_generated(
        "conditioning",
        ("guidance 1.5 instead of 4.5", _LOSSY, "perceptual|clip_score|contrast", other_guidance),
        ("prompts shifted by one", _LOSSY, "perceptual|clip_score|tripwires", partial(other_prompts, every=1)),
        ("every eighth prompt shifted", _LOSSY, "perceptual", partial(other_prompts, every=8)),
        ("prompts cut to two words", _LOSSY, "perceptual|clip_score", partial(other_prompts, every=1, words=2)),
        ("one prompt of 6 cut to one word", _LOSSY, "perceptual", partial(other_prompts, every=6, words=1)),
        (
            "text dropped after half the steps",
            _LOSSY,
            "perceptual|colour_error|contrast_error",
            partial(late_text, after=0.5),
        ),
        (
            "text dropped late for one image of 6",
            _LOSSY,
            "perceptual|colour_error",
            partial(late_text, after=0.3, every=6),
        ),
        (
            "text swapped late for one image of 6",
            _LOSSY,
            "perceptual",
            partial(late_text, after=0.3, every=6, swapped=True),
        ),
        ("text dropped in the last tenth", _CLOSE, "mse|latents_error", partial(late_text, after=0.9)),
    ),
    *_generated(
        "weights",
        ("attention scaled by 0.9", _CLOSE, "mse", partial(scaled_attention, factor=0.9)),
        ("attention scaled by 0.999", _CLOSE, "latents_error", partial(scaled_attention, factor=0.999)),
        ("VAE scale off by 2 %", _CLOSE, "mse", partial(scaled_latents, factor=1.02)),
        ("VAE scale off by 0.05 %", _CLOSE, "mse", partial(scaled_latents, factor=1.0005)),
        ("weights in 12 bits", _CLOSE, "mse|latents_error", partial(for_weights, change=partial(rounded, bits=12))),
        ("weights in 5 bits", _LOSSY, "perceptual", partial(for_weights, change=partial(rounded, bits=5))),
        (
            "30 % of the weights zero",
            _LOSSY,
            "perceptual|colour_error|fine_detail|contrast_error",
            partial(for_weights, change=pruned),
        ),
        (
            "one sign of 1,000 flipped",
            _LOSSY,
            "perceptual|colour_error|fine_detail|contrast_error",
            partial(for_weights, change=flipped),
        ),
    ),
)
