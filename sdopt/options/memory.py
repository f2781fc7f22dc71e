"""memory: decodes in pieces, replaces or frees networks, or stores weights in fewer bits. The options combine.

Options that keep weights off the device until they are used are in `offload`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from sdopt.contract import LATENCY, MEMORY
from sdopt.errors import UsageError, counted
from sdopt.measure.stages import TEXT_ENCODER, VAE_DECODER
from sdopt.options import (
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
    Trace,
)
from sdopt.options.assumptions import (
    a_vae,
    no_projected_pictures,
    plain_weights,
    two_halves,
    usual_encoding,
)
from sdopt.options.base import Inputs, existing
from sdopt.options.caching import SpectralForecast, TokenMerging, WholeSteps
from sdopt.options.compiler import Inductor, Regional
from sdopt.options.conflicts import unguided, untold
from sdopt.options.declarations import Excludes
from sdopt.options.lora import (
    CHANGE_A_LORA,
    encoding_noted,
    lora_in_text_encoders,
    scaling_arguments,
)
from sdopt.options.precision import misfits
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.components import network_problems
from sdopt.pipelines.families import factor_of, guidance_from
from sdopt.pipelines.family import Guidance, family_of_pipe
from sdopt.pipelines.hub import NETWORK_WEIGHTS, hub_network
from sdopt.pipelines.loading import (
    LoadedModel,
    family_of,
    guidance_of,
    load_vae,
    part_config,
)
from sdopt.pipelines.parts import (
    CALL,
    TEXT_ENCODERS,
    Pipeline,
    casting_hook,
    denoiser_of,
    device_of,
    layers_with_weights,
    text_encoders_of,
)
from sdopt.reference import TINY_AUTOENCODER
from sdopt.schema import Model

if TYPE_CHECKING:
    import torch

    Embeddings = torch.Tensor | list[torch.Tensor]
    """What an encoder makes of prompts: a batch, or a tensor for each of them."""

_WHOLE_ONLY = "AsymmetricAutoencoderKL"
"""The only VAE of Stable Diffusion pipelines that diffusers cannot run in slices or tiles."""


_CHANNELS = 4
"""diffusers' default of a VAE's latent channels, which `AutoencoderTiny._tiled_encode` assumes."""

_TILED_BY_SIDES = ("AutoencoderKLQwenImage", "AutoencoderDC")
"""VAEs whose tiles have a height, a width and a stride of each."""

_OVERLAP, _TINY_OVERLAP = 4, 8
"""Tiles of diffusers' `AutoencoderKL` overlap by a fourth, those of `AutoencoderTiny` by an eighth."""


class VaeInPieces(Optimization):
    """The base class of options that pass the VAE its input in pieces."""

    stage = Stage.COMPONENTS
    assumes = (a_vae,)
    claims = MEMORY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        config = part_config(ctx.model, "vae") or {}
        return (
            [f"diffusers' {_WHOLE_ONLY} does not support it"]
            if config.get("_class_name") == _WHOLE_ONLY
            else []
        )


class VaeSlicing(VaeInPieces):
    """Decodes a batch one image at a time, so that peak memory does not grow with the batch."""

    contract = Contract.EQUIVALENT
    diffusers_lines = ("pipe.vae.enable_slicing()",)

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        images = ctx.workload.batch_size * ctx.workload.images_per_prompt
        return (
            []
            if images > 1
            else [
                "needs a batch of several images: set workload.batch_size to 2 or more"
            ]
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        pipe.vae.enable_slicing()

        def proof(trace: Trace) -> Finding:
            most = max((shape[0] for shape in trace.decoder_inputs), default=0)
            batch = max((shape[0] for shape in trace.decoded), default=0)
            calls = len(trace.decoder_inputs)
            summary = f"a batch of {batch} decoded with at most {most} at a time, in {calls} calls"
            return Finding(
                most == 1 < batch,
                summary,
                {"batch": batch, "at_a_time": most, "decoder_calls": calls},
            )

        return proof


@dataclass(frozen=True)
class VaeTiling(VaeInPieces):
    """Decodes an image in overlapping, blended tiles, so that peak memory does not grow with the image."""

    contract = Contract.LOSSY

    tile_size: Annotated[int, Field(ge=64, le=16384)] | None = None
    """Height and width of a tile in pixels, a multiple of 32; null is the VAE's default, the size of its training
    images."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        if self.tile_size is None:
            return ("pipe.vae.enable_tiling()",)
        latents = (
            f"pipe.vae.tile_latent_min_size = {self.tile_size} // pipe.vae_scale_factor"
        )
        return (
            "pipe.vae.enable_tiling()",
            f"pipe.vae.tile_sample_min_size = {self.tile_size}",
            latents,
        )

    @override
    def lines_for(self, model: Model) -> tuple[str, ...]:
        config = part_config(model, "vae") or {}
        if self.tile_size is None or config.get("_class_name") not in _TILED_BY_SIDES:
            return self.diffusers_lines
        side, stride = self.tile_size, self._stride
        return (f"pipe.vae.enable_tiling({side}, {side}, {stride}, {stride})",)

    @property
    def _stride(self) -> int:
        """From one tile to the next, in pixels: the rest overlaps."""
        assert self.tile_size is not None
        return self.tile_size - self.tile_size // _OVERLAP

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        return [
            *super().conflicts(ctx),
            *self._misjoined(ctx),
            *self._cannot_encode(ctx),
        ]

    def _misjoined(self, ctx: Context) -> list[str]:
        """Returns the conflict, if any, of a tile whose overlap is no whole number of latents.

        diffusers rounds it, and joins the tiles to an image of another size.
        """
        tile, config = self._tile(ctx), self._vae_config(ctx) or {}
        factor = factor_of(config)
        share = _OVERLAP
        if "memory.tiny_vae" in ctx.chosen:
            # Its decoder joins whole latents at any size; its encoder does not.
            share = 1 if ctx.task.kind == "txt2img" else _TINY_OVERLAP
        if tile is None or tile % (share * factor) == 0:
            return []
        unit = f"must be a multiple of {share * factor}, or diffusers joins tiles at the wrong places"
        if self.tile_size is None:
            return [
                f"the VAE's own tile of {tile} pixels {unit}: set memory.vae_tiling.tile_size"
            ]
        return [f"memory.vae_tiling.tile_size={tile}: {unit}"]

    def _cannot_encode(self, ctx: Context) -> list[str]:
        """Returns the conflict, if any, of a start image with a tiny VAE, whose tiled encoder assumes four channels."""
        channels = (part_config(ctx.model, "vae") or {}).get(
            "latent_channels", _CHANNELS
        )
        if (
            "memory.tiny_vae" not in ctx.chosen
            or ctx.task.kind == "txt2img"
            or channels == _CHANNELS
        ):
            return []
        reason = f"with memory.tiny_vae, diffusers encodes tiles of a start image to {_CHANNELS} channels"
        return [
            f"{reason}, and this model has {channels}: choose one of the two options"
        ]

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        tile, size = self._tile(ctx), ctx.workload.size or ctx.model.size
        if tile is None or size > tile:
            return []
        advice = "set a larger workload.size or a smaller memory.vae_tiling.tile_size"
        return [f"a tile of {tile} pixels holds the whole image of {size}: {advice}"]

    def _vae_config(self, ctx: Context) -> Mapping[str, Any] | None:
        return {} if "memory.tiny_vae" in ctx.chosen else part_config(ctx.model, "vae")

    def _tile(self, ctx: Context) -> int | None:
        """Returns the side of a tile in pixels; None if the VAE is not known."""
        if self.tile_size is not None:
            return self.tile_size
        config = self._vae_config(ctx)
        if config is None:
            return None
        usual = 256 if config.get("temperal_downsample") else 512
        default = config.get("sample_size", usual)  # AutoencoderTiny has none
        return int(default[0] if isinstance(default, list) else default)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        vae, factor = pipe.vae, factor_of(pipe.vae.config)
        vae.enable_tiling()
        if self.tile_size is not None and hasattr(vae, "tile_sample_min_size"):
            vae.tile_sample_min_size, vae.tile_latent_min_size = (
                self.tile_size,
                self.tile_size // factor,
            )
        elif self.tile_size is not None:
            side, stride = self.tile_size, self._stride
            vae.enable_tiling(side, side, stride, stride)

        def proof(trace: Trace) -> Finding:
            tile = max(
                (factor * max(shape[2:]) for shape in trace.decoder_inputs), default=0
            )
            image = max((max(shape[2:]) for shape in trace.decoded), default=0)
            calls = len(trace.decoder_inputs)
            summary = f"images of {image} pixels decoded in tiles of at most {tile}, in {calls} calls"
            as_wide = self.tile_size is None or tile == self.tile_size
            return Finding(
                0 < tile < image and as_wide,
                summary,
                {"image": image, "tile": tile, "decoder_calls": calls},
            )

        return proof


@dataclass(frozen=True)
class TinyVae(Optimization):
    """Decodes with a small autoencoder that was distilled from the model's own, to save time and memory.

    The packaged model comes with such an autoencoder. Stable Diffusion 1.x and 2.x use TAESD, and SDXL uses TAESDXL
    (https://github.com/madebyollin/taesd). A model with random weights gets a tiny autoencoder with random weights.
    """

    stage = Stage.LOAD
    contract = Contract.LOSSY
    claims = LATENCY | MEMORY

    path: str | None = None
    """Folder with a diffusers `AutoencoderTiny`, instead of the model's default."""
    hub_id: str | None = None
    """Hugging Face Hub repository with a diffusers `AutoencoderTiny`, as in `owner/name`, instead of the default."""

    @override
    def lacking(self, ctx: Context) -> list[str]:
        family = family_of(ctx.model)
        if family.tiny_vae is not None or self.path or self.hub_id:
            return []
        return [
            f"no tiny autoencoder for the latents of {family.title} is known: set memory.tiny_vae.path to one"
        ]

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        if self.path and self.hub_id:
            return [
                "memory.tiny_vae.path and memory.tiny_vae.hub_id: set only one of them"
            ]
        try:
            folder = self._folder(ctx.model, fetch=False)
        except UsageError:
            return []  # `files` fetches it, or reports that it is missing, once it is needed
        at = "memory.tiny_vae"
        if self.path or self.hub_id:
            at += f".path={self.path}" if self.path else f".hub_id={self.hub_id}"
        usual = {"latent_channels": _CHANNELS}
        damaged = [] if self._is_random(ctx.model) else network_problems(folder, at)
        return damaged or misfits(folder, at, ctx.model, "AutoencoderTiny", usual)

    @override
    def files(self, model: Model, fetch: bool) -> list[Path]:
        folder = self._folder(model, fetch)
        weights = [] if self._is_random(model) else [folder / NETWORK_WEIGHTS]
        return existing([folder / "config.json", *weights], "memory.tiny_vae")

    @override
    def parts(self, model: Model, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "vae": load_vae(
                self._folder(model, fetch=False), dtype, self._is_random(model)
            )
        }

    def _is_random(self, model: Model) -> bool:
        return model.weights == "random" and not self.path and not self.hub_id

    def _folder(self, model: Model, fetch: bool) -> Path:
        if self.path:
            return Path(self.path).expanduser()
        if self.hub_id:
            return hub_network(self.hub_id, "memory.tiny_vae", fetch)
        if (PACKAGED / model.name).is_dir() and model.weights in ("packaged", "random"):
            return TINY_AUTOENCODER
        if model.weights == "random":
            return ARCHITECTURES / "taesd"
        return hub_network(str(family_of(model).tiny_vae), "memory.tiny_vae", fetch)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        def proof(trace: Trace) -> Finding:
            kind, seen = type(pipe.vae).__name__, trace.stages[VAE_DECODER]
            # A full decoder has group norms, and a tiny one has none.
            norms = seen.operators["aten::native_group_norm"]
            size = sum(parameter.numel() for parameter in pipe.vae.decoder.parameters())
            engaged = kind == "AutoencoderTiny" and seen.calls > 0 and not norms
            facts = {
                "class": kind,
                "decoder_parameters": size,
                "calls": seen.calls,
                "group_norms": norms,
            }
            return Finding(
                engaged,
                f"{kind} of {size:,} parameters decoded in {counted(seen.calls, 'call')}",
                facts,
            )

        return proof


class WithoutT5(Optimization):
    """Loads the pipeline without the text encoder that it can do without, for which zeros stand in the states.

    It is T5 of Stable Diffusion 3 (Esser et al. 2024, section 5.3.2), which has most of the weights of a medium model.
    """

    stage = Stage.LOAD
    contract = Contract.LOSSY
    claims = MEMORY
    diffusers_lines = ("pipe.register_modules(text_encoder_3=None, tokenizer_3=None)",)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        family = family_of(ctx.model)
        if not family.optional:
            return [f"{family.title} runs with all of its text encoders"]
        parts = part_config(ctx.model, "") or {}
        has = all(parts.get(name, [None])[0] for name in family.optional)
        return [] if has or not parts else ["the model has no T5 already"]

    @override
    def parts(self, model: Model, dtype: torch.dtype) -> dict[str, Any]:
        return dict.fromkeys(family_of(model).optional)

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        names = family_of_pipe(pipe).optional

        def proof(trace: Trace) -> Finding:
            left = [name for name in names if getattr(pipe, name, None) is not None]
            encoders, calls = text_encoders_of(pipe), trace.stages[TEXT_ENCODER].calls
            summary = f"{len(encoders)} text encoders, which ran {calls} times"
            if left:
                summary += f"; {' and '.join(left)} are still there"
            return Finding(
                not left and calls > 0,
                summary,
                {"encoders": len(encoders), "calls": calls, "left": left},
            )

        return proof


@dataclass(frozen=True)
class PrecomputedEmbeddings(Optimization):
    """Encodes all prompts before the first call and frees the text encoders; calls get embeddings.

    Calls then exclude the time of the text encoders: the measurement applies to prompts that were encoded before.
    """

    stage = Stage.COMPONENTS
    assumes = (usual_encoding,)
    # Each prompt is encoded alone, and a batch computes in another order.
    contract = Contract.EQUIVALENT
    claims = MEMORY

    max_sequence_length: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """How many tokens of a prompt the calls read; null is `model.max_sequence_length`, or what the pipeline's call does
    by default. Only for a transformer; a study's baseline reads as many."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        if family_of(ctx.model).is_unet and self.max_sequence_length is not None:
            return [
                "memory.precomputed_embeddings.max_sequence_length: a UNet's pipeline takes none; leave it out"
            ]
        if not family_of(ctx.model).encoding.returns:
            return [f"how {family_of(ctx.model).title} encodes prompts is not known"]
        reasons = self._of_other_length(ctx)
        if not family_of(ctx.model).is_unet and ctx.workload.images_per_prompt != 1:
            reasons.append(
                "diffusers draws one image of each embedding with such a model: set workload.images_per_prompt=1"
            )
        return reasons

    def _of_other_length(self, ctx: Context) -> list[str]:
        """Returns the conflict, if any, of prompts that would be read to another length than the baseline's.

        The denoiser of one that reads fewer tokens has less to do.
        """
        length = self.max_sequence_length
        read = ctx.model.max_sequence_length or family_of(ctx.model).encoding.tokens[-1]
        # A program may call its pipeline with any length.
        if length in (None, read) or isinstance(ctx.model, LoadedModel):
            return []
        way = f"set model.max_sequence_length={length}, which is the baseline's too"
        return [
            f"memory.precomputed_embeddings.max_sequence_length={length}: without it, {read} tokens are read: {way}"
        ]

    @override
    def comes_after(self, pipe: Pipeline) -> Mapping[str, str]:
        gone = "memory=precomputed_embeddings: the text encoders are gone, which"
        loading = (
            ("load_lora_weights", "a LoRA"),
            ("load_textual_inversion", "a textual inversion"),
        )
        methods = {
            name: f"{gone} {what} changes too: load it before" for name, what in loading
        }
        if lora_in_text_encoders(pipe):
            methods |= dict.fromkeys(
                CHANGE_A_LORA,
                f"{gone} had a part of the LoRA: call sdopt.undo(pipe) first",
            )
        return methods

    @override
    def prepare_inputs(
        self, pipe: Pipeline, prompts: Sequence[str]
    ) -> Callable[[Inputs], Inputs]:
        call = dict(vars(pipe).get(CALL, {}))
        if self.max_sequence_length is not None:
            call[_LENGTH] = self.max_sequence_length
        embedded = _Embedded(pipe, prompts, call)
        for name in TEXT_ENCODERS:
            if getattr(pipe, name, None) is not None:
                setattr(pipe, name, None)
        embedded.note_parts()
        # With model offloading, hooks hold references to the text encoders.
        pipe.maybe_free_model_hooks()
        gc.collect()
        return embedded

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        def proof(trace: Trace) -> Finding:
            left, calls = len(text_encoders_of(pipe)), trace.stages[TEXT_ENCODER].calls
            summary = f"{left} text encoders left; text encoders ran {calls} times in the call"
            return Finding(
                not left and not calls, summary, {"text_encoders": left, "calls": calls}
            )

        return proof


class _Embedded:
    """Gives calls the embeddings of prompts that were encoded before.

    Args:
        pipe: the pipeline, with its text encoders.
        prompts: all that calls may have.
        call: the arguments of all calls, of which some change how prompts are encoded.
    """

    def __init__(
        self, pipe: Pipeline, prompts: Sequence[str], call: Mapping[str, Any]
    ) -> None:
        import torch

        guidance = guidance_of_pipe(pipe)
        self._pipe, self._call, self._device = pipe, call, device_of(pipe)
        self._parts: dict[str, Any] = {}
        self._encodes = set(signature(pipe.encode_prompt).parameters)
        self._instead = _instead_of_defaults(pipe)
        # Its other branch is encoded as a prompt, the empty one by default.
        has_branches = guidance.form == "sequential"
        self._takes_negative = guidance.takes_negative or not has_branches
        texts = (*prompts, "") if has_branches else tuple(prompts)
        self._positive: dict[str, dict[str, Embeddings]] = {}
        self._negative: dict[str | None, dict[str, Embeddings]] = {None: {}}
        with torch.no_grad(), encoding_noted(pipe):
            for text in texts:
                encoded = _encoded(pipe, text, self._device, call)
                self._positive[text] = encoded
                self._negative[text] = _encoded_as_negative(
                    pipe, text, self._device, call, encoded
                )
        self._names = set(chain(*self._positive.values(), *self._negative.values()))

    def note_parts(self) -> None:
        """Notes the parts that would encode, of which others are not what the prompts were encoded with."""
        for name, part in self._pipe.components.items():
            if name.startswith(("text_encoder", "tokenizer")):
                self._parts[name] = part

    def _require_parts(self) -> None:
        for name, part in self._parts.items():
            if getattr(self._pipe, name) is not part:
                raise UsageError(
                    f"memory=precomputed_embeddings: the prompts were encoded before pipe.{name} was exchanged: "
                    "call sdopt.undo(pipe), exchange it, and apply the options again"
                )

    def __call__(self, inputs: Inputs) -> Inputs:
        """Returns the arguments of a call with embeddings. Raises UsageError for what was not encoded."""
        given = {name for name, value in inputs.items() if value is not None}
        self._require_encoded(inputs, given)
        of_caller = given & self._names
        if of_caller and "prompt" in given:
            raise UsageError(
                f"memory=precomputed_embeddings: give prompt or {min(of_caller)}, and not both"
            )
        if not given & {"prompt", "prompt_embeds"}:
            return inputs
        self._require_parts()
        rows = self._rows(inputs, own_embeddings=bool(of_caller))
        like = inputs["prompt_embeds"] if of_caller else self._device
        masked = any("mask" in name for name in self._names)
        texts = ("prompt", "negative_prompt")
        rest = {name: value for name, value in inputs.items() if name not in texts}
        rest |= self._instead
        for name in rows[0]:
            is_negative = name.startswith("negative") and name not in of_caller
            if is_negative or not of_caller:
                rest[name] = _in_a_batch(rows, name, like, masked)
        return rest

    def _require_encoded(self, inputs: Inputs, given: Collection[str]) -> None:
        """Raises UsageError for an argument that changes how prompts are encoded, and that they were not encoded with."""
        for name in scaling_arguments(inputs):
            scales = f"{name} scales a LoRA in the text encoders too, which are gone"
            raise UsageError(
                f"memory=precomputed_embeddings: {scales}: scale it by pipe.set_adapters before"
            )
        arguments = {"prompt", "negative_prompt", "num_images_per_prompt", *self._names}
        if inputs.get(_LENGTH) == self._call.get(_LENGTH):
            arguments.add(_LENGTH)
        further = sorted(self._encodes.intersection(given) - arguments)
        if not further:
            return
        way = "leave it out"
        if further[0] == _LENGTH:
            way = f"set memory.precomputed_embeddings.{_LENGTH}"
        raise UsageError(
            f"memory=precomputed_embeddings: {further[0]} was not encoded: {way}"
        )

    def _rows(
        self, inputs: Inputs, own_embeddings: bool
    ) -> list[dict[str, Embeddings]]:
        """Returns the embeddings of each prompt of a call and of its negative prompt."""
        count = len(inputs["prompt_embeds" if own_embeddings else "prompt"])
        negative = inputs.get("negative_prompt") if self._takes_negative else ""
        negatives = [negative] * count
        if not isinstance(negative, str | None):
            negatives = list(negative)
        if len(negatives) != count:
            raise UsageError(
                "memory=precomputed_embeddings: give a negative prompt for each prompt, or one"
            )
        # With embeddings of the caller's own, only those of the negative prompt may be missing: an empty one's.
        first = next(iter(self._positive))
        texts = [first] * count if own_embeddings else inputs["prompt"]
        for text in (*texts, *negatives):
            if text not in self._negative:
                raise UsageError(
                    f"memory=precomputed_embeddings: the prompt '{text}' was not encoded"
                )
        pairs = zip(texts, negatives, strict=True)
        return [
            self._positive[text] | self._negative[negative] for text, negative in pairs
        ]


def _instead_of_defaults(pipe: Pipeline) -> dict[str, None]:
    """Returns what keeps a call from a negative prompt that it has by default, beside embeddings of one."""
    negative = signature(type(pipe).__call__).parameters.get("negative_prompt")
    return (
        {"negative_prompt": None}
        if negative is not None and isinstance(negative.default, str)
        else {}
    )


def _encoded_as_negative(
    pipe: Pipeline,
    text: str,
    device: torch.device,
    arguments: Mapping[str, Any],
    encoded: dict[str, Embeddings],
) -> dict[str, Embeddings]:
    """Returns the embeddings of a text as a negative prompt, by call argument; `encoded` is what it is as a prompt.

    Sana writes an instruction before each prompt, and Lumina 2 one of its own, but not before negative ones.
    """
    family = family_of_pipe(pipe)
    names = [name for name in family.encoding.returns if name.startswith("negative_")]
    if family.is_unet or not names:
        return {
            f"negative_{name}": value
            for name, value in encoded.items()
            if not name.startswith("negative_")
        }
    both = _encoded(pipe, text, device, arguments, text)
    return {name: both[name] for name in names}


_LENGTH = "max_sequence_length"


def _encoded(
    pipe: Pipeline,
    prompt: str,
    device: torch.device,
    arguments: Mapping[str, Any],
    negative: str | None = None,
) -> dict[str, Embeddings]:
    """Returns a prompt's embeddings by call argument, on the CPU, since there may be thousands of prompts.

    Beside those of a negative prompt: `negative`, or what a call has by default.

    What a call passes on to `encode_prompt` by default is passed on here, too, such as the number of tokens, unless
    `arguments` of all calls have another one.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    takes, call = (
        signature(pipe.encode_prompt).parameters,
        signature(type(pipe).__call__).parameters,
    )
    arguments_given: dict[str, Any] = {}
    for name, parameter in takes.items():
        if name in call and name != "prompt":
            default = call[name].default
            arguments_given[name] = (
                default if parameter.default is not parameter.empty else None
            )
    arguments_given |= arguments
    arguments_given |= {
        "device": device,
        "num_images_per_prompt": 1,
        "do_classifier_free_guidance": True,
    }
    if negative is not None:
        arguments_given["negative_prompt"] = [negative]
    if family_of_pipe(pipe).is_unet:
        answer = pipe.encode_prompt(
            prompt, **{name: arguments_given[name] for name in _OF_UNETS}
        )
    else:
        answer = pipe.encode_prompt(
            [prompt],
            **{name: value for name, value in arguments_given.items() if name in takes},
        )
    names = family_of_pipe(pipe).encoding.returns
    on_cpu = tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().cpu(), tuple(answer)
    )
    embeddings = {
        name: value for name, value in zip(names, on_cpu, strict=False) if name
    }
    for name in [name for name, value in embeddings.items() if value is None]:
        # A mask that leaves nothing out. Beside a longer prompt it does.
        embeddings[name] = torch.ones(
            embeddings["prompt_embeds"].shape[:2], dtype=torch.long
        )
    return embeddings


_OF_UNETS = ("device", "num_images_per_prompt", "do_classifier_free_guidance")
"""What a UNet's pipeline encodes a prompt with."""


def _in_a_batch(
    prompts: Sequence[Mapping[str, Embeddings]], name: str, like: Any, masked: bool
) -> Embeddings:
    """Returns embeddings of several prompts as one batch: shorter ones are filled up with zeros, as masks are.

    A row without a mask reads all its tokens.

    Raises:
        UsageError: they are of several lengths, and the pipeline has no mask: it encodes them otherwise together.
    """
    import torch

    rows = [prompt.get(name) for prompt in prompts]
    if any(isinstance(row, list) for row in rows):
        lists = [row for row in rows if isinstance(row, list)]
        return [tensor.to(like) for tensor in chain.from_iterable(lists)]
    tensors = [row for row in rows if isinstance(row, torch.Tensor)]
    longest = max(tensor.shape[1] for tensor in tensors)
    if not masked and any(tensor.shape[1] < longest for tensor in tensors):
        alike = "prompts of several lengths, which this pipeline encodes otherwise in a batch than alone"
        raise UsageError(
            f"memory=precomputed_embeddings: {alike}: draw one prompt per call"
        )
    filled = []
    for tensor in tensors:
        pad = (0, 0) * (tensor.ndim - 2) + (0, longest - tensor.shape[1])
        filled.append(torch.nn.functional.pad(tensor, pad))
    return torch.cat(filled).to(like)


def guidance_of_pipe(pipe: Pipeline) -> Guidance:
    """Returns how a pipeline that is loaded is guided."""
    family = family_of_pipe(pipe)
    configs = {family.denoiser: dict(denoiser_of(pipe).config), "": dict(pipe.config)}
    return guidance_from(family, configs)


class SequentialGuidance(Optimization):
    """Runs the denoiser without and then with the prompt, on half of the samples each, instead of on both in a batch.

    Halves what the denoiser's layers keep while they compute. A large GPU is slower on small batches.
    """

    stage = Stage.COMPONENTS
    assumes = (two_halves,)
    excludes = (
        Excludes(
            "caching",
            "calls the denoiser twice in a step, which this cache counts: choose caching=none or spectrum",
            unless=(WholeSteps, SpectralForecast, TokenMerging),
        ),
        Excludes(
            "compiler",
            "cannot be in this compiler's graph: choose compiler=eager, inductor or regional",
            unless=(Inductor, Regional),
        ),
    )
    contract = Contract.EQUIVALENT  # another batch size computes in another order
    claims = MEMORY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = unguided(ctx, "guidance, and so no second half") + untold(
            ctx, "do_classifier_free_guidance"
        )
        if guidance_of(ctx.model).form == "sequential":
            reasons.append(
                "this kind of model calls its denoiser for each branch anyway: leave the option out"
            )
        return reasons

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.skipping import EachHalf

        denoiser = denoiser_of(pipe)
        denoiser.forward = halves = EachHalf(pipe, denoiser.forward)

        def proof(trace: Trace) -> Finding:
            images = max((shape[0] for shape in trace.decoded), default=0)
            # A graph hides the batches of its convolutions.
            most = max(trace.denoiser.samples, default=0)
            ran = f"on at most {most} samples at a time" if most else "in a graph"
            summary = f"{images} images with guidance; the denoiser ran {ran}, and {halves.halved} times on two halves"
            facts = {"images": images, "samples": most, "halved": halves.halved}
            return Finding(halves.halved > 0 and most <= images, summary, facts)

        return proof


@dataclass(frozen=True)
class LayerwiseCasting(Optimization):
    """Stores the denoiser's weights in 8-bit floating point, and casts each layer's weights while it computes.

    Normalization layers keep their type, as diffusers recommends (`enable_layerwise_casting`).
    """

    stage = Stage.QUANTIZE
    assumes = (plain_weights, no_projected_pictures)
    contract = Contract.LOSSY
    claims = MEMORY

    excludes = (
        Excludes(
            "compiler",
            "its hooks would cast weights inside compiled code: choose compiler=eager",
        ),
    )

    storage: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"
    """The type of stored weights: 3 bits of mantissa, or 2 bits with a wider range."""

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        types = f"storage_dtype=torch.{self.storage}, compute_dtype=pipe.unet.dtype"
        return "import torch", f"pipe.unet.enable_layerwise_casting({types})"

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        denoiser = denoiser_of(pipe)
        compute, storage = denoiser.dtype, getattr(torch, self.storage)
        denoiser.enable_layerwise_casting(storage_dtype=storage, compute_dtype=compute)
        hooked = [
            layer for layer in denoiser.modules() if casting_hook(layer) is not None
        ]

        def proof(trace: Trace) -> Finding:
            stored = []
            for layer in hooked:
                types = {parameter.dtype for parameter in layer.parameters()}
                if casting_hook(layer) and types <= {storage}:
                    stored.append(layer)
            products = dict(trace.denoiser.product_dtypes)
            kinds = Counter(type(layer).__name__ for layer in stored)
            left = (
                Counter(type(layer).__name__ for layer in layers_with_weights(denoiser))
                - kinds
            )
            shown = (
                ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
                or "no layers"
            )
            summary = f"{shown} stored in {self.storage}; products in {', '.join(sorted(products))}"
            engaged = (
                0 < len(stored) == len(hooked)
                and bool(products)
                and self.storage not in products
            )
            return Finding(
                engaged,
                summary,
                {"stored": kinds, "left_alone": left, "products": products},
            )

        return proof
