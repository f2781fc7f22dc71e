"""The typed configuration of `sdopt train-reference`; `conf/train_reference.yaml` has its values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sdopt.schema import (
    Configured,
    Factor,
    OneOf,
    PositiveShare,
    Seed,
    Share,
    ShareBelowOne,
    UpTo4096,
    UpTo10000,
)

STAGES = (
    "data",
    "tokenizer",
    "autoencoder",
    "tiny_autoencoder",
    "denoiser",
    "transformer",
    "loras",
    "few_steps",
    "clip",
    "export",
)
"""The stages in order. Each stage writes to the folder of its name."""

Weight = Annotated[float, Field(ge=0, le=1e6)]
"""A weight of a part of the loss."""

PositiveWeight = Annotated[float, Field(gt=0, le=1e6)]
Minutes = Annotated[float, Field(gt=0, le=1e6)]

SizeOrRank = Annotated[int, Field(ge=1, le=100_000)]
"""The size of a batch, or the rank of a LoRA."""

Count = Annotated[int, Field(ge=0, le=10**9)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Configured):
    """The data stage."""

    held_out_concepts: Annotated[int, Field(ge=0, le=10_000)]
    """Number of concepts to exclude from training."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Configured):
    """Settings common to all training stages."""

    share: PositiveShare
    """This stage's share of `budget_minutes`."""
    steps: Annotated[int, Field(ge=1, le=10**9)] | None
    """Number of steps, regardless of their duration; null trains for the stage's share of the budget."""
    batch_size: SizeOrRank
    """Pictures, or latents, per step."""
    learning_rate: Annotated[float, Field(gt=0, le=1000)]
    """Peak learning rate of the schedule."""
    warmup_steps: Count
    """Number of steps in which the learning rate grows linearly to its peak."""
    background_share: Share
    """Share of pictures on a colour instead of on white; captions name the colour."""
    ema: ShareBelowOne
    """Decay of the exponential moving average of the weights, which is the result of the training."""

    def progress(self, step: int, seconds: float, budget_s: float) -> float:
        """Returns the progress, from 0 to 1, before a step (counted from 0) with some seconds used.

        It is the share of `steps` done, or of the budget used. A time budget suits machines of unknown speed: the rate
        reaches zero exactly at the end of the budget.
        """
        done = seconds / budget_s if self.steps is None else step / self.steps
        return min(1.0, done)

    def rate(self, step: int, progress: float) -> float:
        """Returns the learning rate of a step: after `warmup_steps` it decays to zero with half a cosine of the progress."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(TrainingConfig):
    """The autoencoder stage."""

    edge_weight: Weight
    """Weight of the L1 distance between the pictures' finite differences."""
    kl_weight: Weight
    """Weight of the mean Kullback-Leibler divergence per latent number."""


@dataclass(frozen=True, kw_only=True)
class TinyAutoencoderConfig(TrainingConfig):
    """The tiny autoencoder stage, which distils the autoencoder."""

    edge_weight: Weight
    """Weight of the L1 distance between the pictures' finite differences."""
    latent_noise: Factor
    """Maximum noise on the latents to decode, in standard deviations, to imitate the denoiser's errors."""


@dataclass(frozen=True, kw_only=True)
class CaptionedConfig(TrainingConfig):
    """Settings common to all stages that learn from captioned pictures."""

    caption_dropout: Share
    """Share of captions replaced by the empty caption, for classifier-free guidance."""


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(CaptionedConfig):
    """Settings common to all stages with the diffusion loss."""

    snr_gamma: PositiveWeight
    """Signal-to-noise ratio at which the weight of the loss is clipped."""


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig(DiffusionConfig):
    """The denoiser stage, which trains the text encoder too."""

    flat_weight: PositiveWeight
    """Sampling weight of pictures in the flat style, the style of plain captions; other styles have weight 1."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(CaptionedConfig):
    """The stage of the diffusion transformer, which learns from the pictures and from the denoiser of `start_from`."""

    flat_weight: PositiveWeight
    """Sampling weight of pictures in the flat style, the style of plain captions; other styles have weight 1."""
    shift: Annotated[float, Field(gt=0, le=100)]
    """How far noise levels are shifted towards noise, which decides the layout; 1 draws all levels alike."""
    teacher_share: Share
    """Share of the loss towards the velocity that the denoiser predicts; the rest is towards the true one."""
    target: str
    """Output folder for a `FluxPipeline`."""
    contact_sheet: str
    """Output PNG file of its contact sheet."""


@dataclass(frozen=True, kw_only=True)
class LorasConfig(DiffusionConfig):
    """The stage of the style LoRAs, which share the stage's time; `steps` is the number of steps per LoRA."""

    rank: SizeOrRank
    """Rank of the LoRAs."""
    held_out_concepts: UpTo10000
    """Number of concepts known to the denoiser that the LoRAs never see, for the evaluation in the card."""


@dataclass(frozen=True, kw_only=True)
class FewStepsConfig(TrainingConfig):
    """The stage of the LoRA for few steps, which distils the guided denoiser."""

    trajectories: Annotated[int, Field(ge=1, le=10**7)]
    """Number of the teacher's runs whose states the LoRA learns from; `batch_size` counts states."""
    snr_gamma: PositiveWeight
    """Signal-to-noise ratio at which the weight of the loss is clipped."""
    rank: SizeOrRank
    """Rank of the LoRA."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig(TrainingConfig):
    """The CLIP stage, which also exports the model. All pictures of a step have different concepts."""

    extra_captions: Count
    """Number of additional captions per step with which each picture is compared."""
    style_share: Share
    """Share of captions that keep the style word, if there is one."""
    spoilt_share: Share
    """Share of degraded pictures, whose captions name the degradation."""
    hidden_patches: ShareBelowOne
    """Share of each picture's patches that a step drops."""
    held_out_share: PositiveShare
    """Share of the concepts with several styles of which one picture is held out."""
    start_from: str | None
    """Folder written by this stage with initial weights for a training without a checkpoint; null: random weights."""
    target: str
    """Output folder for a `CLIPModel` with its tokenizer, image processor and card."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Configured):
    """The export's output folders."""

    target: str
    """Output folder for a diffusers pipeline; `prompts.json` and the reference pictures are written next to it."""
    companions: str
    """Output folder for `tiny_autoencoder/`, `loras/` and `loras/few_steps/`."""
    contact_sheet: str
    """Output PNG file of the contact sheet."""


@dataclass(frozen=True, kw_only=True)
class TrainReferenceConfig(Configured):
    """The configuration of the whole command."""

    stage: Annotated[str, OneOf(("all", *STAGES))]
    """Stage to run; `all` runs all stages in order."""
    folder: str
    """Work folder for archives, data, checkpoints and logs."""
    budget_minutes: Minutes
    """Training time, divided among the stages by their `share`."""
    seed: Seed
    """Seed of all random choices."""
    device: Literal["auto", "cpu", "cuda"]
    """`auto` takes a CUDA device if there is one."""
    arithmetic: Literal["auto", "fp32", "bf16"]
    """Precision of the forward pass; `auto` takes bf16 on hardware with native bf16 products."""
    threads: UpTo4096 | None
    """CPU threads; null is PyTorch's default."""
    resume: bool
    """Whether to continue from the stage's last checkpoint, if there is one."""
    start_from: str | None
    """Pipeline folder with initial weights and tokenizer for a training without a checkpoint, and the base of all LoRAs
    if `folder` has no denoiser; null: random weights."""
    checkpoint_minutes: Minutes
    """Minutes between checkpoints."""
    data: DataConfig
    autoencoder: AutoencoderConfig
    tiny_autoencoder: TinyAutoencoderConfig
    denoiser: DenoiserConfig
    transformer: TransformerConfig
    loras: LorasConfig
    few_steps: FewStepsConfig
    clip: ClipConfig
    export: ExportConfig
