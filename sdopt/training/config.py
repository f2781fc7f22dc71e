"""The typed configuration of `sdopt train-reference`; `conf/train_reference.yaml` holds its values."""

from __future__ import annotations

from dataclasses import dataclass

from sdopt.schema import SEEDS, bounded

STAGES = ("data", "tokenizer", "autoencoder", "tiny_autoencoder", "denoiser", "loras", "clip", "export")
"""The stages in their order. Each works in the folder of its name."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data stage."""

    held_out_concepts: int = bounded(ge=0, le=10_000)
    """Concepts that training never sees."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What every stage that trains has."""

    share: float = bounded(gt=0, le=1)
    """Share of `budget_minutes` that this stage trains for."""
    steps: int | None = bounded(ge=1, le=10**9)
    """Number of steps, whatever time they take; null trains for the stage's share of the budget."""
    batch_size: int = bounded(ge=1, le=100_000)
    """Pictures, or their latents, per step."""
    learning_rate: float = bounded(gt=0, le=1000)
    """Peak of the schedule."""
    warmup_steps: int = bounded(ge=0, le=10**9)
    """Steps in which the learning rate grows linearly to its peak."""
    background_share: float = bounded(ge=0, le=1)
    """Share of pictures on a colour, which captions name, instead of on white."""
    ema: float = bounded(ge=0, lt=1)
    """Decay of the moving average whose weights are kept."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(TrainingConfig):
    """The autoencoder stage."""

    edge_weight: float = bounded(ge=0, le=1e6)
    """Weight of the L1 distance between the pictures' finite differences."""
    kl_weight: float = bounded(ge=0, le=1e6)
    """Weight of the mean Kullback-Leibler divergence per latent number."""


@dataclass(frozen=True, kw_only=True)
class TinyAutoencoderConfig(TrainingConfig):
    """The tiny autoencoder's stage, which distils the autoencoder."""

    edge_weight: float = bounded(ge=0, le=1e6)
    """Weight of the L1 distance between the pictures' finite differences."""
    latent_noise: float = bounded(ge=0, le=1000)
    """Largest noise on the latents to decode, in standard deviations: a denoiser's latents are never quite right."""


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(TrainingConfig):
    """What every stage with the diffusion loss has."""

    snr_gamma: float = bounded(gt=0, le=1e6)
    """Signal-to-noise ratio at which the loss's weight is cut."""
    caption_dropout: float = bounded(ge=0, le=1)
    """Share of captions replaced by the empty one, for guidance."""


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig(DiffusionConfig):
    """The denoiser stage, which trains the text encoder too."""

    flat_weight: float = bounded(gt=0, le=1e6)
    """How many times as often pictures in the style of plain captions are drawn as others."""


@dataclass(frozen=True, kw_only=True)
class LorasConfig(DiffusionConfig):
    """The stage of the style LoRAs. They share the stage's time; `steps` is the number of each."""

    rank: int = bounded(ge=1, le=100_000)
    """Rank of the updates."""
    held_out_concepts: int = bounded(ge=1, le=10_000)
    """Concepts that the denoiser knows and the LoRAs never see: the card compares the LoRAs on them."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig(TrainingConfig):
    """The stage of the CLIP, which also writes its folder. Each picture of a step is of another concept."""

    extra_captions: int = bounded(ge=0, le=10**9)
    """Further captions per step that every picture is compared with."""
    style_share: float = bounded(ge=0, le=1)
    """Share of captions that name the style where `caption` would."""
    spoilt_share: float = bounded(ge=0, le=1)
    """Share of pictures that are degraded in a way that their captions name."""
    hidden_patches: float = bounded(ge=0, lt=1)
    """Share of each picture's patches that a step leaves out."""
    held_out_share: float = bounded(gt=0, le=1)
    """Share of the concepts drawn in several styles of which one picture is kept from training."""
    start_from: str | None
    """Folder that this stage wrote, whose weights a training without a checkpoint starts from; null: random weights."""
    target: str
    """Folder that becomes a `CLIPModel` with its tokenizer, image processor and card."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What the export writes, and when."""

    target: str
    """Folder that becomes a diffusers pipeline; `prompts.json` and the reference pictures are written beside it."""
    companions: str
    """Folder that gets `tiny_autoencoder/` and `loras/`."""
    contact_sheet: str
    """PNG file of the contact sheet."""
    every_minutes: float | None = bounded(gt=0, le=1e6)
    """Also export at this interval while the denoiser trains; null exports only at the end."""


@dataclass(frozen=True, kw_only=True)
class TrainReferenceConfig:
    """The whole command."""

    stage: str = bounded(choices=("all", *STAGES))
    """Stage to run; `all` runs every stage in its order."""
    folder: str
    """Folder of archives, data, checkpoints and logs."""
    budget_minutes: float = bounded(gt=0, le=1e6)
    """Wall time to train for, divided among the stages by their `share`."""
    seed: int = bounded(**SEEDS)
    """Seed of every random choice."""
    device: str = bounded(choices=("auto", "cpu", "cuda"))
    """`auto` takes a CUDA device if there is one."""
    arithmetic: str = bounded(choices=("auto", "fp32", "bf16"))
    """Precision of the forward pass; `auto` takes bf16 where the processor multiplies it natively."""
    threads: int | None = bounded(ge=1, le=4096)
    """CPU threads; null leaves PyTorch's choice."""
    resume: bool
    """Continue from the stage's last checkpoint, if there is one."""
    start_from: str | None
    """Pipeline folder whose weights and tokenizer a training without a checkpoint starts from, and on which the LoRAs
    are trained if `folder` has no denoiser; null: random weights."""
    checkpoint_minutes: float = bounded(gt=0, le=1e6)
    """Minutes between checkpoints."""
    data: DataConfig
    autoencoder: AutoencoderConfig
    tiny_autoencoder: TinyAutoencoderConfig
    denoiser: DenoiserConfig
    loras: LorasConfig
    clip: ClipConfig
    export: ExportConfig
