"""Floating-point operations of one image, counted without running it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sdopt.measure.garbage import no_garbage
from sdopt.measure.stages import DENOISER, TEXT_ENCODER, VAE_DECODER, VAE_ENCODER
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.parts import (
    denoiser_name,
    denoiser_of,
    text_encoders_of,
    unwrapped,
)
from sdopt.variant import Variant

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

_ENCODED = {"txt2img": 0, "img2img": 1, "inpaint": 2}
"""Pictures that the VAE encodes for one image: the input, and for inpainting the input without the masked part."""


def tflop_per_image(
    pipe: DiffusionPipeline, variant: Variant, call: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Operations (multiply and add count as two) of one image of a variant, in TFLOP, by stage and in `total`.

    Counted by PyTorch's FlopCounterMode on the meta device: on a CPU it counts nothing for fused attention.
    With guidance every step runs the denoiser on two samples, and the text encoders read two prompts, once for all
    images of a prompt; without a negative prompt SDXL reads one, and takes zeros for the empty one. Some schedulers run
    the denoiser more often than there are steps, and a task's strength leaves steps out.

    Options that make the denoiser leave out operations are applied to one on the meta device, which then makes all
    calls of an image. Without any, all calls are equal, and only one is run.

    Of a transformer, `call` makes an image in one step, and what its networks are given then is given to them again on
    the meta device: each kind has inputs of its own.

    Raises the model's own error if it cannot run on the meta device.
    """
    import torch

    if not family_of(variant.model).is_unet:
        return _as_called(pipe, variant, call)
    size = variant.size
    samples = 2 if variant.guidance_scale > 1 else 1
    denoiser, vae = unwrapped(denoiser_of(pipe)), pipe.vae
    channels = vae.config.latent_channels
    latent = size // (2 ** (len(vae.config.block_out_channels) - 1))
    length = pipe.tokenizer.model_max_length
    read = (
        1
        if pipe.config.get("force_zeros_for_empty_prompt") and not variant.negatives
        else samples
    )
    # Networks are many objects, at which Python would look through all others for garbage.
    with no_garbage(), torch.device("meta"):
        # A task may have changed the number of channels that the configuration gives: see `pipelines.tasks.adapt`.
        fresh_denoiser = type(denoiser).from_config(
            denoiser.config, in_channels=channels
        )
        fresh_vae = type(vae).from_config(vae.config)
        fresh_encoders = [_twin_of(encoder) for encoder in text_encoders_of(pipe)]
        states = torch.empty(samples, length, denoiser.config.cross_attention_dim)
        sample = torch.empty(samples, channels, latent, latent)
        conditioned = denoiser.config.get("addition_embed_type") == "text_time"
        added = (
            {"added_cond_kwargs": _conditions(denoiser.config, samples)}
            if conditioned
            else {}
        )
        step: Given = ((sample, torch.tensor(1), states), added)
        counted = {
            TEXT_ENCODER: sum(
                tflop(encoder, torch.zeros(read, length, dtype=torch.long))
                for encoder in fresh_encoders
            )
            / variant.workload.images_per_prompt,
            VAE_ENCODER: _ENCODED[variant.task.kind]
            * tflop(fresh_vae.encode, torch.empty(1, 3, size, size)),
            # Guidance is above 1 if each sample is there twice.
            DENOISER: _steps_tflop(
                pipe, variant, fresh_denoiser, float(samples), [step]
            ),
            VAE_DECODER: tflop(
                fresh_vae.decode, torch.empty(1, channels, latent, latent)
            ),
        }
    return counted | {"total": sum(counted.values())}


def _as_called(
    pipe: DiffusionPipeline, variant: Variant, call: Callable[[], Any]
) -> dict[str, float]:
    """Returns the operations of an image by stage, from the inputs of a call of one step."""
    import torch

    with _inputs_noted(pipe) as noted:
        call()
    images = variant.shapes[0].batch_size * variant.workload.images_per_prompt
    denoiser, vae = unwrapped(denoiser_of(pipe)), unwrapped(pipe.vae)
    with no_garbage(), torch.device("meta"):
        fresh = type(denoiser).from_config(denoiser.config)
        twin_vae = type(vae).from_config(vae.config)
        counted = {TEXT_ENCODER: 0.0, VAE_ENCODER: 0.0, VAE_DECODER: 0.0}
        for encoder in text_encoders_of(pipe):
            twin = _twin_of(encoder)
            # Other kinds of attention ask what a mask holds, which a tensor on the meta device does not say.
            twin.set_attn_implementation("eager")
            counted[TEXT_ENCODER] += _sum_of(twin, noted[encoder])
        for stage, run in (
            (VAE_ENCODER, twin_vae.encode),
            (VAE_DECODER, twin_vae.decode),
        ):
            counted[stage] = _sum_of(run, noted[stage])
        counted[DENOISER] = _steps_tflop(
            pipe, variant, fresh, variant.guidance_scale, noted[denoiser_of(pipe)]
        )
    per_image = {stage: tflops / images for stage, tflops in counted.items()}
    return per_image | {"total": sum(per_image.values())}


def _sum_of(run: Callable[..., Any], calls: Iterable[Given]) -> float:
    """Counts the operations of some calls."""
    return sum(tflop(run, *args, **more) for args, more in calls)


def _twin_of(encoder: Any) -> Any:
    """Returns a text encoder as another one, with a configuration of its own, which says what computes attention."""
    network = unwrapped(encoder)
    return type(network)(copy.deepcopy(network.config))


def _steps_tflop(
    pipe: DiffusionPipeline,
    variant: Variant,
    denoiser: Any,
    guidance_scale: float,
    step: list[Given],
) -> float:
    """Counts the operations of all steps, each of which makes the calls of `step`; if all are equal, counts one."""
    steps = _denoiser_calls(pipe, variant)
    savings = [option for _, option in variant.applied if option.saves_operations]
    if not savings:
        return steps * _sum_of(denoiser, step)
    twin = copy.copy(pipe)
    setattr(twin, denoiser_name(pipe), denoiser)
    twin._num_timesteps = steps
    twin._guidance_scale = guidance_scale
    with ExitStack() as stack:
        for option in savings:
            option.apply(twin)
            stack.enter_context(option.context(twin))
        counted = 0.0
        for number in range(steps):
            twin.__dict__["scheduler"] = SimpleNamespace(
                step_index=number
            )  # by which options tell steps apart
            counted += _sum_of(denoiser, step)
        return counted


Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call, with tensors on the meta device."""


@contextmanager
def _inputs_noted(pipe: DiffusionPipeline) -> Iterator[dict[Any, list[Given]]]:
    """Notes what the networks are given in each call within the block: by network, and of the VAE by stage."""
    import torch
    from torch.utils._pytree import tree_map_only

    noted: dict[Any, list[Given]] = defaultdict(list)

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        # Networks on the meta device are in float32, whatever the type that is measured.
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=dtype)

    def note(key: Any, args: Any, more: Any) -> None:
        noted[key].append(tree_map_only(torch.Tensor, shape_of, (args, more)))

    methods = {"encode": VAE_ENCODER, "decode": VAE_DECODER}
    members = vars(pipe.vae)
    before = {name: members[name] for name in methods if name in members}

    def noting(run: Any, stage: str) -> Any:
        def noted_run(*args: Any, **more: Any) -> Any:
            note(stage, args, more)
            return run(*args, **more)

        return noted_run

    with ExitStack() as stack:
        stack.callback(members.update, before)
        for name, stage in methods.items():
            members[name] = noting(getattr(pipe.vae, name), stage)
            stack.callback(members.pop, name)
        for network in (denoiser_of(pipe), *text_encoders_of(pipe)):
            stack.callback(
                network.register_forward_pre_hook(note, with_kwargs=True).remove
            )
        yield noted


def _denoiser_calls(pipe: DiffusionPipeline, variant: Variant) -> int:
    import torch

    steps = variant.workload.steps
    with torch.device("cpu"):
        # A shift of the noise levels by the number of tokens does not change how many there are.
        shifted = (
            {"mu": 1.0} if pipe.scheduler.config.get("use_dynamic_shifting") else {}
        )
        pipe.scheduler.set_timesteps(steps, **shifted)
        if variant.task.kind == "txt2img":
            return len(pipe.scheduler.timesteps)
        timesteps, _ = pipe.get_timesteps(steps, variant.task.strength, "cpu")
        return len(timesteps)


def _conditions(config: Any, samples: int) -> dict[str, torch.Tensor]:
    """Returns SDXL's further inputs of the denoiser: the text's pooled states, and six numbers of size and crop."""
    import torch

    width = (
        config["projection_class_embeddings_input_dim"]
        - 6 * config["addition_time_embed_dim"]
    )
    return {
        "text_embeds": torch.empty(samples, width),
        "time_ids": torch.empty(samples, 6),
    }


def tflop(function: Any, *inputs: Any, **more: Any) -> float:
    """Returns the operations of one call, in TFLOP; modules and tensors must be on the meta device."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from sdopt.measure.norms import WithoutNorms

    with torch.no_grad(), WithoutNorms(), FlopCounterMode(display=False) as counter:
        function(*inputs, **more)
    return float(counter.get_total_flops()) / 1e12
