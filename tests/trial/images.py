"""Harm to images alone: each is a function of the baseline's images, or of the pipeline that generates them.

None of it has to be timed: images are generated in a few calls from the study's prompts and noise, or computed from the
baseline's.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor
from torch.nn import functional

from sdopt.options import Proof, denoiser_of
from sdopt.options.skipping import Calls
from sdopt.pipelines.parts import denoiser_name
from sdopt.reference import PROMPTS
from tests.trial.options import Mistake


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

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        self.change(pipe)
        return super().apply(pipe)


# ------------------------------------------------------------------------------------------------------- pixels


def in_turn(
    images: Tensor, every: int, harmed: Tensor, others: Tensor | None = None
) -> Tensor:
    """Returns `harmed` for every `every`-th image, from the first on, and `others` (by default, `images`) else."""
    chosen = torch.tensor([number % every == 0 for number in range(len(images))]).view(
        -1, 1, 1, 1
    )
    return torch.where(chosen, harmed, images if others is None else others)


def noisy(images: Tensor, sigma: float) -> Tensor:
    """Adds noise with a standard deviation of `sigma`, in the range 0…1."""
    return images + 2 * sigma * torch.randn(
        images.shape, generator=torch.Generator().manual_seed(0)
    )


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


def faded(images: Tensor, kept: float) -> Tensor:
    """Reduces the distance of colours to their luminance to the share `kept`."""
    grey = (images * torch.tensor([0.2126, 0.7152, 0.0722]).view(1, 3, 1, 1)).sum(
        1, keepdim=True
    )
    return grey + kept * (images - grey)


def uneven_contrast(images: Tensor) -> Tensor:
    """Raises the contrast of every other image by 8 %, and reduces that of the others by as much."""
    middle = images.mean(dim=(1, 2, 3), keepdim=True)
    high, low = (
        (middle + factor * (images - middle)).clamp(-1, 1) for factor in (1.08, 0.92)
    )
    return in_turn(images, 2, high, low)


def jpeg(images: Tensor) -> Tensor:
    """Compresses images as JPEG of quality 50, and decodes them again."""
    found = []
    for image in (
        ((images.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    ):
        Image.fromarray(image).save(stream := io.BytesIO(), "JPEG", quality=50)
        found.append(
            torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1) / 127.5 - 1
        )
    return torch.stack(found)


# ----------------------------------------------------------------------------------------------------- pipelines


def not_a_number(pipe: DiffusionPipeline) -> None:
    """Sets one value in the latents of every 32nd image to NaN."""
    decode, made = pipe.vae.decode, 0

    def changed(latents: Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal made
        latents = latents.clone()
        latents[
            [(made + number) % 32 == 0 for number in range(len(latents))], 0, 0, 0
        ] = torch.nan
        made += len(latents)
        return decode(latents, *arguments, **options)

    pipe.vae.__dict__["decode"] = changed


def same_noise(pipe: DiffusionPipeline) -> None:
    """Starts every image from the same noise, whatever its seed."""
    prepare = pipe.prepare_latents

    def changed(*arguments: Any, **options: Any) -> Any:
        prepared = prepare(*arguments, **options)
        own, *places = prepared if isinstance(prepared, tuple) else (prepared,)
        common: Tensor = torch.randn(
            own[:1].shape, generator=torch.Generator().manual_seed(0)
        ).to(own)
        common *= getattr(pipe.scheduler, "init_noise_sigma", 1.0)
        noise = common.expand_as(own).clone()
        return (noise, *places) if isinstance(prepared, tuple) else noise

    pipe.prepare_latents = changed


def next_prompts(pipe: DiffusionPipeline) -> None:
    """Replaces every prompt of the packaged list by the next one."""
    captions = json.loads(PROMPTS.read_text())["gate"]
    following = dict(zip(captions, captions[1:] + captions[:1], strict=True))
    encode = pipe.encode_prompt

    def changed(prompt: Any, *arguments: Any, **options: Any) -> Any:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        others = {
            name: None if name == "prompt_2" else value
            for name, value in options.items()
        }
        return encode(
            [following.get(text, text) for text in prompts], *arguments, **others
        )

    pipe.encode_prompt = changed


def late_text(pipe: DiffusionPipeline) -> None:
    """Conditions every sixth image on no text after a third of the steps."""
    drop = (
        _late_text_of_transformer
        if denoiser_name(pipe) == "transformer"
        else _late_text_of_unet
    )
    drop(pipe, denoiser_of(pipe))


def _late_text_of_unet(pipe: DiffusionPipeline, unet: Any) -> None:
    """Both branches of guidance are in one batch, that without text first."""
    forward, calls = unet.forward, 0

    def changed(
        sample: Tensor,
        timestep: Any,
        encoder_hidden_states: Tensor,
        *rest: Any,
        **options: Any,
    ) -> Any:
        nonlocal calls
        step, calls = calls % pipe.num_timesteps, calls + 1
        if step >= 0.3 * pipe.num_timesteps:
            without, of_text = encoder_hidden_states.chunk(2)
            other = of_text.clone()
            other[::6] = without[::6]
            encoder_hidden_states = torch.cat([without, other])
        return forward(sample, timestep, encoder_hidden_states, *rest, **options)

    unet.forward = changed


def _late_text_of_transformer(pipe: DiffusionPipeline, transformer: Any) -> None:
    """Each branch of guidance has a call of its own, that with text first."""
    forward, calls, without = transformer.forward, Calls(pipe), None

    def changed(*arguments: Any, encoder_hidden_states: Tensor, **options: Any) -> Any:
        nonlocal without
        step, branch = calls.next()
        step %= pipe.num_timesteps
        if branch == 1:
            without = encoder_hidden_states
        elif step >= 0.3 * pipe.num_timesteps and without is not None:
            encoder_hidden_states = encoder_hidden_states.clone()
            encoder_hidden_states[::6] = without[: len(encoder_hidden_states)][::6]
        return forward(
            *arguments, encoder_hidden_states=encoder_hidden_states, **options
        )

    transformer.forward = changed


def scaled_attention(pipe: DiffusionPipeline) -> None:
    """Multiplies the queries of every attention by 0.999, as with a wrong scale."""
    for module in denoiser_of(pipe).modules():
        if hasattr(module, "to_q"):
            # A norm after the projection would undo it.
            norm = getattr(module, "norm_q", None)
            scaled = module.to_q if norm is None else norm
            scaled.weight.data *= 0.999


def few_bits(pipe: DiffusionPipeline) -> None:
    """Rounds the weights of the denoiser's products and convolutions to 5 bits, with one scale for each tensor."""
    for tensor in denoiser_of(pipe).parameters():
        if tensor.dim() > 1:
            scale = tensor.data.abs().max() / 15
            tensor.data.copy_((tensor.data / scale).round() * scale)


_CLOSE, _LOSSY = "equivalent", "lossy"

_FEW, _LOOKS = "a few images of many", "colours, contrast, sharpness"

HARMS = (
    Harm(
        _FEW,
        "one image of 60 is another's",
        _CLOSE,
        "mse",
        lambda x: in_turn(x, 60, x.roll(1, 0)),
    ),
    Harm(_FEW, "NaN in one latent of 32", _LOSSY, "tripwires", change=not_a_number),
    Harm(
        _LOOKS, "pixel noise, σ 0.02", _LOSSY, "fine_detail", lambda x: noisy(x, 0.02)
    ),
    Harm(
        _LOOKS, "blurred and sharpened in turn", _LOSSY, "detail_error", unevenly_sharp
    ),
    Harm(
        _LOOKS,
        "a fifth of the colour lost",
        _LOSSY,
        "colour_error",
        lambda x: faded(x, 0.8),
    ),
    Harm(
        _LOOKS,
        "contrast +8 % and −8 % in turn",
        _LOSSY,
        "contrast_error",
        uneven_contrast,
    ),
    Harm("geometry", "all mirrored", _LOSSY, "perceptual", lambda x: x.flip(-1)),
    Harm(
        "compression",
        "JPEG of quality 50",
        _LOSSY,
        "perceptual|fine_detail|detail_error",
        jpeg,
    ),
    Harm(
        "variety between seeds",
        "the seed ignored",
        _LOSSY,
        "perceptual",
        change=same_noise,
    ),
    Harm(
        "conditioning",
        "prompts shifted by one",
        _LOSSY,
        "perceptual|clip_score|tripwires",
        change=next_prompts,
    ),
    Harm(
        "conditioning",
        "text dropped late for one image of 6",
        _LOSSY,
        "perceptual|colour_error",
        change=late_text,
    ),
    Harm(
        "weights",
        "attention scaled by 0.999",
        _CLOSE,
        "latents_error",
        change=scaled_attention,
    ),
    Harm("weights", "weights in 5 bits", _LOSSY, "perceptual", change=few_bits),
)
"""Each kind once or twice; where a rule has a limit of its own, the harm is small."""
