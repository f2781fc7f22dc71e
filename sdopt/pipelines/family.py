"""What sdopt knows of each kind of pipeline: a row of data for each, so that no option knows a pipeline by its name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Form = Literal["batched", "sequential", "embedded", "none"]


@dataclass(frozen=True)
class Guidance:
    """How a pipeline is guided by a scale.

    Attributes:
        form: `batched` runs the denoiser on both branches, with and without the prompt, in one call; `sequential` in
            two calls, with the prompt first; `embedded` gives the scale to the denoiser; `none` ignores it.
        argument: the argument of the pipeline's call.
        above: the scale from which on both branches run.
        needs_negative: whether a call without a negative prompt runs without guidance, whatever its scale.
        takes_negative: whether a call takes a negative prompt.
        prompt_half: which half of a batch of both branches has the prompt; 0 is the first.
        off: the scale that switches guidance off.
    """

    form: Form
    argument: str = "guidance_scale"
    above: float = 1.0
    needs_negative: bool = False
    takes_negative: bool = True
    prompt_half: int = 1

    def guides(self, scale: float) -> bool:
        """Returns whether a step runs both branches, and so reads a negative prompt."""
        return self.form in ("batched", "sequential") and scale > self.above

    def counts(self, scale: float) -> bool:
        """Returns whether another scale gives other images."""
        return self.form == "embedded" or self.guides(scale)

    def calls_a_step(self, scale: float) -> int:
        """Returns how often a step calls the denoiser."""
        return 2 if self.form == "sequential" and self.guides(scale) else 1

    def samples_a_call(self, scale: float) -> int:
        """Returns how many samples of an image each call of the denoiser has."""
        return 2 if self.form == "batched" and self.guides(scale) else 1


@dataclass(frozen=True)
class Latents:
    """The latents of a pipeline.

    Attributes:
        layout: of the argument `latents`. `spatial` is (n, C, h, w); `packed` is (n, h·w/4, 4·C), each token a square
            of 2×2; `patchified` is (n, 4·C, h/2, w/2), which callbacks get packed.
        kept: the type that they keep whatever the denoiser computes in; None takes the denoiser's.
        last: the argument of the call that takes a function for each step's latents.
        multiple: of how many latents a side an image must be.
    """

    layout: Literal["spatial", "packed", "patchified"] = "spatial"
    kept: Literal["float32"] | None = None
    last: Literal["callback_on_step_end", "callback"] = "callback_on_step_end"
    multiple: int = 1


@dataclass(frozen=True)
class Encoding:
    """How a pipeline encodes prompts.

    Attributes:
        returns: for each output of `encode_prompt`, the argument of the call that takes it; "" for what the call makes
            anew. An argument of the other branch has the same name after `negative_`.
        tokens: how many tokens of a prompt a call reads, by encoder; None is the tokenizer's limit.
        masks: whether attention gets a mask: for a batch of prompts of different lengths only, or always.
        padded: whether a prompt is filled up to the longest one of its batch without a mask: its image depends on them.
        mixes: whether diffusers gives several images of each of several prompts the masks of one another's prompts.
        before: what a call writes before a prompt, which counts among the tokens that it reads.
        thinks: the same of a chat, and the setting of its template; None where prompts are no part of a chat.
    """

    returns: tuple[str, ...]
    tokens: tuple[int | None, ...] = (None,)
    masks: Literal["never", "batches", "always"] = "never"
    padded: bool = False
    mixes: bool = False
    before: str = ""
    thinks: bool | None = None


_MARKS = (
    *(
        "num_layers",
        "num_single_layers",
        "attention_head_dim",
        "num_attention_heads",
        "in_channels",
    ),
    *(
        "joint_attention_dim",
        "caption_channels",
        "guidance_embeds",
        "dim",
        "n_layers",
        "hidden_size",
        "cap_feat_dim",
    ),
    *("text_embed_dim", "pos_embed_max_size"),
)
"""Keys by which transformers of one class differ: depth, width, and what text they read."""


@dataclass(frozen=True)
class Family:
    """One kind of text-to-image pipeline of diffusers.

    Attributes:
        pipeline: its class name.
        title: what messages call it.
        denoiser: the attribute that holds the network that each step calls.
        encoders: the attributes that hold its text encoders, in the order of their calls.
        optional: those of its parts that it runs without.
        tasks: the class names of its pipelines, by task.
        guidance: how it is guided; `distilled` where the configuration says so.
        distilled_if: the part and the key whose value, if true, says that guidance was distilled into the weights; the
            part "" is the pipeline.
        sampling: `levels` of noise from betas, or a `flow` from noise to image by sigmas.
        schedulers: for a flow, the classes that sample it; for levels, any that has them.
        seeds_steps: whether its call gives the scheduler the generators of its images, for noise that steps draw.
        unread: keys of those schedulers from which its call doesn't compute a shift, as other pipelines' calls do.
        dtype: the type of the weights that it is published for.
        float16: what half precision does: `fine`, `clipped` (activations are clipped to its range), `overflows` (NaN).
        call: arguments of each call, so that an image is of the size that was asked for.
        upcasts_vae: whether diffusers decodes in float32 where the VAE's configuration has `force_upcast`.
        tiny_vae: the repository of a tiny autoencoder for its latents; None if sdopt knows none.
        marks: keys of the denoiser's configuration that tell its architectures apart.
        steps, scale, size: the defaults of the published models; the size counts where no configuration names one.
        distilled_scale, distilled_steps: those of models into whose weights guidance was distilled; the same steps, if
            None.
    """

    pipeline: str
    title: str
    encoders: tuple[str, ...]
    guidance: Guidance
    encoding: Encoding
    denoiser: str = "transformer"
    latents: Latents = field(default_factory=Latents)
    optional: tuple[str, ...] = ()
    tasks: Mapping[str, str] = field(default_factory=dict)
    distilled_if: tuple[str, str] | None = None
    distilled: Guidance = field(
        default_factory=lambda: Guidance("none", takes_negative=False)
    )
    sampling: Literal["levels", "flow"] = "flow"
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    seeds_steps: bool = False
    unread: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    float16: Literal["fine", "clipped", "overflows"] = "fine"
    call: Mapping[str, Any] = field(default_factory=dict)
    upcasts_vae: bool = False
    tiny_vae: str | None = None
    marks: tuple[str, ...] = _MARKS
    steps: int = 25
    scale: float = 7.5
    distilled_scale: float = 1.0
    distilled_steps: int | None = None
    size: int = 1024

    @property
    def is_unet(self) -> bool:
        """Whether its denoiser is a UNet, and not a transformer."""
        return self.denoiser == "unet"

    def steps_of(self, steps: int, strength: float) -> int:
        """Returns how many of `workload.steps` run, as `get_timesteps` of diffusers' pipelines counts them.

        Those of transformers round up what those of Stable Diffusion round down.
        """
        if self.is_unet:
            return int(steps * strength)
        return steps - int(steps - steps * strength)

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """The attributes that hold the tokenizers of its text encoders."""
        return tuple(
            name.replace("text_encoder", "tokenizer") for name in self.encoders
        )

    @property
    def networks(self) -> tuple[str, ...]:
        """The attributes that hold its networks."""
        return (self.denoiser, "vae", *self.encoders)

    @property
    def parts(self) -> tuple[str, ...]:
        """The attributes that hold its parts, of those that sdopt runs."""
        return (*self.networks, *self.tokenizers, "scheduler")

    def library_of(self, part: str) -> str:
        """Returns the library of a part's class, as `model_index.json` names it."""
        return (
            "diffusers"
            if part in (self.denoiser, "vae", "scheduler")
            else "transformers"
        )


def _tasks(stem: str, *kinds: str) -> dict[str, str]:
    suffixes = {"txt2img": "", "img2img": "Img2Img", "inpaint": "Inpaint"}
    return {kind: f"{stem}{suffixes[kind]}Pipeline" for kind in ("txt2img", *kinds)}


_SD, _XL, _ALT = "StableDiffusion", "StableDiffusionXL", "AltDiffusion"

_MASKED = (
    "prompt_embeds",
    "prompt_attention_mask",
    "negative_prompt_embeds",
    "negative_prompt_attention_mask",
)

_LUMINA_SYSTEM = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts. <Prompt Start> "
)

_FLUX2_SYSTEM = (
    "[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on "
    "object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]"
)

_EULER, _HEUN = "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"

_BY_SIZE = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")

_UNIPC, _DPM = "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"

_UNET = Family(
    pipeline="StableDiffusionPipeline",
    tiny_vae="madebyollin/taesd",
    title="Stable Diffusion 1.x and 2.x",
    marks=("cross_attention_dim",),
    denoiser="unet",
    encoders=("text_encoder",),
    tasks=_tasks(_SD, "img2img", "inpaint"),
    guidance=Guidance("batched"),
    distilled_if=("unet", "time_cond_proj_dim"),
    distilled=Guidance("embedded", takes_negative=False),
    encoding=Encoding(("prompt_embeds", "negative_prompt_embeds")),
    sampling="levels",
    schedulers=(),
    seeds_steps=True,
    dtype="float32",
    size=512,
)

_XL_EMBEDDINGS = (
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_prompt_embeds",
    "negative_pooled_prompt_embeds",
)

FAMILIES = (
    _UNET,
    Family(
        pipeline="StableDiffusionXLPipeline",
        tiny_vae="madebyollin/taesdxl",
        upcasts_vae=True,
        title="SDXL",
        marks=("cross_attention_dim",),
        denoiser="unet",
        encoders=("text_encoder", "text_encoder_2"),
        tasks=_tasks(_XL, "img2img", "inpaint"),
        guidance=Guidance("batched"),
        distilled_if=("unet", "time_cond_proj_dim"),
        distilled=Guidance("embedded", takes_negative=False),
        encoding=Encoding(_XL_EMBEDDINGS, tokens=(None, None)),
        sampling="levels",
        schedulers=(),
        seeds_steps=True,
        dtype="float32",
        scale=5.0,
    ),
    Family(
        pipeline="AltDiffusionPipeline",
        tiny_vae="madebyollin/taesd",
        title="AltDiffusion",
        marks=("cross_attention_dim",),
        denoiser="unet",
        encoders=("text_encoder",),
        tasks=_tasks(_ALT, "img2img"),
        guidance=Guidance("batched"),
        distilled_if=("unet", "time_cond_proj_dim"),
        distilled=Guidance("embedded", takes_negative=False),
        encoding=Encoding(("prompt_embeds", "negative_prompt_embeds")),
        sampling="levels",
        schedulers=(),
        seeds_steps=True,
        dtype="float32",
        size=512,
    ),
    Family(
        pipeline="StableDiffusion3Pipeline",
        tiny_vae="madebyollin/taesd3",
        title="SD 3",
        encoders=("text_encoder", "text_encoder_2", "text_encoder_3"),
        optional=("text_encoder_3", "tokenizer_3"),
        tasks=_tasks("StableDiffusion3", "img2img", "inpaint"),
        guidance=Guidance("batched"),
        encoding=Encoding(_XL_EMBEDDINGS, tokens=(77, 77, 256)),
        latents=Latents(multiple=2),
        schedulers=(_EULER, _HEUN, _UNIPC, _DPM),
        steps=28,
        scale=7.0,
    ),
    Family(
        pipeline="FluxPipeline",
        tiny_vae="madebyollin/taef1",
        title="FLUX.1",
        encoders=("text_encoder", "text_encoder_2"),
        tasks=_tasks("Flux", "img2img", "inpaint"),
        # Guidance beside the embedded scale is not run: it would take two calls a step, and two scales.
        guidance=Guidance("sequential", "true_cfg_scale", needs_negative=True),
        distilled_if=("transformer", "guidance_embeds"),
        distilled=Guidance("embedded", takes_negative=False),
        encoding=Encoding(
            ("prompt_embeds", "pooled_prompt_embeds", ""), tokens=(77, 512)
        ),
        latents=Latents("packed", multiple=2),
        schedulers=(_EULER, _UNIPC, _DPM),
        float16="clipped",
        # Of [schnell], which draws in four steps, sdopt has the architecture.
        steps=28,
        scale=1.0,
        distilled_scale=3.5,
        distilled_steps=28,
    ),
    Family(
        pipeline="Flux2KleinPipeline",
        title="FLUX.2 klein",
        encoders=("text_encoder",),
        tasks=_tasks("Flux2Klein", "inpaint"),
        guidance=Guidance("sequential", takes_negative=False),
        distilled_if=("", "is_distilled"),
        encoding=Encoding(("prompt_embeds", ""), tokens=(512,), thinks=False),
        latents=Latents("patchified", multiple=2),
        schedulers=(_EULER, _UNIPC),
        unread=_BY_SIZE,
        float16="clipped",
        steps=50,
        scale=4.0,
        distilled_steps=4,
    ),
    Family(
        pipeline="Flux2Pipeline",
        title="FLUX.2",
        encoders=("text_encoder",),
        tasks=_tasks("Flux2"),
        guidance=Guidance("embedded", takes_negative=False),
        encoding=Encoding(("prompt_embeds", ""), (512,), before=_FLUX2_SYSTEM),
        latents=Latents("patchified", multiple=2),
        unread=_BY_SIZE,
        float16="clipped",
        steps=50,
        scale=4.0,
    ),
    Family(
        pipeline="ZImagePipeline",
        tiny_vae="madebyollin/taef1",
        title="Z-Image",
        encoders=("text_encoder",),
        tasks=_tasks("ZImage", "img2img", "inpaint"),
        # cond + s · (cond - uncond): the scale is one less than elsewhere.
        guidance=Guidance("batched", above=0.0, prompt_half=0),
        encoding=Encoding(
            ("prompt_embeds", "negative_prompt_embeds"),
            tokens=(512,),
            masks="batches",
            thinks=True,
        ),
        latents=Latents(kept="float32", multiple=2),
        float16="overflows",
        steps=50,
        scale=5.0,
    ),
    Family(
        pipeline="QwenImagePipeline",
        title="Qwen-Image",
        encoders=("text_encoder",),
        tasks=_tasks("QwenImage", "img2img", "inpaint"),
        guidance=Guidance("sequential", "true_cfg_scale", needs_negative=True),
        distilled_if=("transformer", "guidance_embeds"),
        distilled=Guidance("embedded", takes_negative=False),
        encoding=Encoding(
            ("prompt_embeds", "prompt_embeds_mask"),
            tokens=(512,),
            masks="batches",
            mixes=True,
        ),
        latents=Latents("packed", multiple=2),
        schedulers=(_EULER, _UNIPC),
        # Clipped, and yet: https://github.com/modelscope/DiffSynth-Studio/issues/1379,
        # https://github.com/HM-RunningHub/ComfyUI_RH_Qwen-Image/issues/4, https://github.com/Comfy-Org/ComfyUI/pull/12522.
        float16="overflows",
        steps=50,
        scale=4.0,
    ),
    Family(
        pipeline="ChromaPipeline",
        tiny_vae="madebyollin/taef1",
        title="Chroma",
        encoders=("text_encoder",),
        # diffusers' 0.42.1 for inpainting asks a Chroma for a key of FLUX.1's configuration, and fails.
        tasks=_tasks("Chroma", "img2img"),
        guidance=Guidance("sequential"),
        encoding=Encoding(
            (
                *("prompt_embeds", "", "prompt_attention_mask"),
                *("negative_prompt_embeds", "", "negative_prompt_attention_mask"),
            ),
            tokens=(512,),
            masks="always",
        ),
        latents=Latents("packed", multiple=2),
        schedulers=(_EULER, _UNIPC),
        float16="clipped",
        steps=40,
        scale=3.0,
    ),
    Family(
        pipeline="PixArtSigmaPipeline",
        tiny_vae="madebyollin/taesdxl",
        title="PixArt-Sigma",
        encoders=("text_encoder",),
        tasks=_tasks("PixArtSigma"),
        guidance=Guidance("batched"),
        encoding=Encoding(_MASKED, tokens=(300,), masks="always"),
        latents=Latents(last="callback", multiple=2),
        sampling="levels",
        schedulers=(),
        seeds_steps=True,
        call={"use_resolution_binning": False},
        steps=20,
        scale=4.5,
    ),
    Family(
        pipeline="SanaPipeline",
        title="Sana",
        encoders=("text_encoder",),
        tasks=_tasks("Sana"),
        guidance=Guidance("batched"),
        encoding=Encoding(_MASKED, tokens=(300,), masks="always", mixes=True),
        latents=Latents(kept="float32"),
        schedulers=(_EULER, _HEUN, _UNIPC, _DPM),
        seeds_steps=True,
        call={"use_resolution_binning": False},
        # Its text encoder and VAE: https://huggingface.co/docs/diffusers/api/pipelines/sana
        float16="overflows",
        steps=20,
        scale=4.5,
    ),
    Family(
        pipeline="Lumina2Pipeline",
        tiny_vae="madebyollin/taef1",
        title="Lumina 2",
        encoders=("text_encoder",),
        tasks=_tasks("Lumina2"),
        guidance=Guidance("sequential"),
        encoding=Encoding(
            _MASKED, (256,), masks="always", mixes=True, before=_LUMINA_SYSTEM
        ),
        latents=Latents(multiple=2),
        schedulers=(_EULER, _UNIPC),
        # Gemma 2 and the transformer: _FLOAT16_NOT_SUPPORTED_MODELS of vLLM, supported_inference_dtypes of ComfyUI.
        float16="overflows",
        steps=30,
        scale=4.0,
    ),
    Family(
        pipeline="AuraFlowPipeline",
        tiny_vae="madebyollin/taesdxl",
        upcasts_vae=True,
        title="AuraFlow",
        encoders=("text_encoder",),
        tasks=_tasks("AuraFlow"),
        guidance=Guidance("batched"),
        encoding=Encoding(_MASKED, tokens=(256,)),
        latents=Latents(multiple=2),
        steps=50,
        scale=3.5,
    ),
    Family(
        pipeline="CogView4Pipeline",
        title="CogView4",
        encoders=("text_encoder",),
        tasks=_tasks("CogView4"),
        guidance=Guidance("sequential"),
        # Shorter prompts of a batch are filled up in front.
        encoding=Encoding(
            ("prompt_embeds", "negative_prompt_embeds"), tokens=(1024,), padded=True
        ),
        latents=Latents(kept="float32", multiple=2),
        unread=("max_image_seq_len",),
        # "Only supports BF16, FP32": https://github.com/THUDM/CogView4
        float16="overflows",
        steps=50,
        scale=5.0,
    ),
)
"""All pipelines that sdopt runs, the UNets first."""

_BY_PIPELINE = {family.pipeline: family for family in FAMILIES}

_BY_TASK: dict[str, Family] = {}
for _family in FAMILIES:
    _BY_TASK |= dict.fromkeys(_family.tasks.values(), _family)


def family_named(class_name: str) -> Family:
    """Returns the family of a pipeline by its class name, also of one with further networks, such as a ControlNet.

    It is that whose name begins alike; of an unknown one, that of Stable Diffusion.
    """
    if class_name in _BY_PIPELINE:
        return _BY_PIPELINE[class_name]
    alike = [
        family
        for family in FAMILIES
        if class_name.startswith(family.pipeline.removesuffix("Pipeline"))
    ]
    return max(alike, key=lambda family: len(family.pipeline), default=_UNET)


def unknown_transformer(pipeline: str, encoders: tuple[str, ...]) -> Family:
    """Returns what is known of a kind of pipeline with a transformer that has no row: its name and text encoders."""
    return Family(
        pipeline=pipeline,
        title=pipeline.removesuffix("Pipeline"),
        encoders=encoders,
        guidance=Guidance("batched"),
        encoding=Encoding(()),
        sampling="levels",
        seeds_steps=True,
    )


def family_of_class(class_name: str) -> Family | None:
    """Returns the family of a pipeline for any task by its class name; None if sdopt runs none of that name."""
    return _BY_TASK.get(class_name)


def class_of(pipe: Any) -> str:
    """Returns the name of diffusers' class of a loaded pipeline, from which a program may have derived its own.

    Of one that is derived from none, as the community's are, the networks say whether it is an SDXL.
    """
    cls = type(pipe)
    for base in cls.__mro__:
        is_whole = base.__name__.endswith("Pipeline") and base.__name__ != _ANY
        if is_whole and base.__module__.startswith("diffusers.pipelines."):
            return base.__name__
    name = str(cls.__name__)
    has_two = getattr(pipe, "unet", None) and getattr(pipe, "text_encoder_2", None)
    if not has_two or name.startswith(_XL):
        return name
    kind = re.search("(Img2Img|Inpaint)?Pipeline$", name)
    return f"{_XL}{kind[0] if kind else 'Pipeline'}"


_ANY = "DiffusionPipeline"


def family_of_pipe(pipe: Any) -> Family:
    """Returns the family of a loaded pipeline."""
    return family_named(class_of(pipe))
