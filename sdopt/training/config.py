"""What `sdopt train-reference` can be told, with types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from sdopt.errors import UsageError


class Stage(Enum):
    """A step of the training; `all` runs the others in this order."""

    all = "all"
    data = "data"
    tokenizer = "tokenizer"
    autoencoder = "autoencoder"
    tiny_autoencoder = "tiny_autoencoder"
    denoiser = "denoiser"
    loras = "loras"
    clip = "clip"
    export = "export"


class Device(Enum):
    """Where to train; `auto` takes the GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """Arithmetic of the forward pass; `auto` takes bf16 where the processor multiplies it natively."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class DataConfig:
    """The data stage.

    Attributes:
        held_out_concepts: concepts that training never sees.
    """

    held_out_concepts: int = MISSING


@dataclass
class TrainingConfig:
    """What every training can be told.

    Attributes:
        share: of `budget_minutes` that goes to this stage.
        steps: stop after so many steps instead of after the share of the budget.
        batch_size: pictures, or their latents, a step.
        learning_rate: the peak of the schedule.
        warmup_steps: of linear growth up to the peak.
        background_share: share of pictures on a colour, which captions name, instead of on white.
        ema: decay of the average whose weights are kept.
    """

    share: float = MISSING
    steps: int | None = MISSING
    batch_size: int = MISSING
    learning_rate: float = MISSING
    warmup_steps: int = MISSING
    background_share: float = MISSING
    ema: float = MISSING


@dataclass
class AutoencoderConfig(TrainingConfig):
    """The autoencoder stage.

    Attributes:
        edge_weight: weight of the L1 distance between the pictures' finite differences.
        kl_weight: weight of the mean Kullback-Leibler divergence per latent number.
    """

    edge_weight: float = MISSING
    kl_weight: float = MISSING


@dataclass
class TinyAutoencoderConfig(TrainingConfig):
    """The tiny autoencoder's stage, which distils the autoencoder.

    Attributes:
        edge_weight: weight of the L1 distance between the pictures' finite differences.
        latent_noise: latents to decode are drawn up to so many standard deviations away from the pictures' own, for
            those that a denoiser makes are never quite right.
    """

    edge_weight: float = MISSING
    latent_noise: float = MISSING


@dataclass
class DiffusionConfig(TrainingConfig):
    """What every training with the diffusion loss can be told.

    Attributes:
        snr_gamma: signal-to-noise ratio at which the loss's weight is cut.
        caption_dropout: share of captions replaced by the empty one, for guidance.
    """

    snr_gamma: float = MISSING
    caption_dropout: float = MISSING


@dataclass
class DenoiserConfig(DiffusionConfig):
    """The denoiser stage, which trains the text encoder too.

    Attributes:
        flat_weight: how much oftener pictures in the style of plain captions are drawn than the others.
    """

    flat_weight: float = MISSING


@dataclass
class LorasConfig(DiffusionConfig):
    """The stage of the style LoRAs, which share the time and the steps given here are each one's.

    Attributes:
        rank: of the low-rank updates.
        held_out_concepts: that the denoiser knows and the LoRAs never see, to tell a style from drawings learnt by
            heart.
    """

    rank: int = MISSING
    held_out_concepts: int = MISSING


@dataclass
class ClipConfig(TrainingConfig):
    """The stage of the CLIP, which also writes its folder; each picture of a step is of another concept.

    Attributes:
        extra_captions: further captions a step that every picture is held against.
        style_share: share of captions that name the style where `caption` would.
        spoilt_share: share of pictures that are spoilt in a way that their captions name.
        hidden_patches: share of each picture's patches that a step leaves out.
        held_out_share: share of the concepts drawn in several styles of which one picture is kept from training.
        start_from: a folder that this stage wrote, whose weights a training without a checkpoint starts from; null
            starts from random weights.
        target: the folder that becomes a `CLIPModel` with its tokenizer, image processor and card.
    """

    extra_captions: int = MISSING
    style_share: float = MISSING
    spoilt_share: float = MISSING
    hidden_patches: float = MISSING
    held_out_share: float = MISSING
    start_from: str | None = MISSING
    target: str = MISSING


@dataclass
class ExportConfig:
    """What the export writes, and when.

    Attributes:
        target: the folder that becomes a diffusers pipeline; `prompts.json` lands beside it.
        companions: the folder that gets `tiny_autoencoder/` and `loras/`.
        contact_sheet: the PNG file to draw, beside the export.
        every_minutes: also export while the denoiser trains; null exports only at the end.
    """

    target: str = MISSING
    companions: str = MISSING
    contact_sheet: str = MISSING
    every_minutes: float | None = MISSING


@dataclass
class TrainReferenceConfig:
    """The whole command.

    Attributes:
        stage: what to run.
        folder: where archives, data, checkpoints and logs live.
        budget_minutes: wall time to train for, shared out by the stages' `share`.
        seed: of everything random.
        device: where to train.
        arithmetic: precision of the forward pass.
        threads: of the CPU; null leaves torch's choice.
        resume: go on from the stage's last checkpoint, if there is one.
        start_from: a pipeline folder whose weights and tokenizer a training without a checkpoint starts from, and
            which the LoRAs are trained on where the work folder has no denoiser; null starts from random weights.
        checkpoint_minutes: between checkpoints.
    """

    stage: Stage = MISSING
    folder: str = MISSING
    budget_minutes: float = MISSING
    seed: int = MISSING
    device: Device = MISSING
    arithmetic: Precision = MISSING
    threads: int | None = MISSING
    resume: bool = MISSING
    start_from: str | None = MISSING
    checkpoint_minutes: float = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    tiny_autoencoder: TinyAutoencoderConfig = field(default_factory=TinyAutoencoderConfig)
    denoiser: DenoiserConfig = field(default_factory=DenoiserConfig)
    loras: LorasConfig = field(default_factory=LorasConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    export: ExportConfig = field(default_factory=ExportConfig)


def validate(config: TrainReferenceConfig) -> None:
    """Check what types cannot.

    Raises:
        UsageError: with one line for every value that is out of its range.
    """
    problems = [
        f"{key}={value}: must be {wanted}"
        for key, value, fine, wanted in (
            ("budget_minutes", config.budget_minutes, config.budget_minutes > 0, "positive"),
            ("checkpoint_minutes", config.checkpoint_minutes, config.checkpoint_minutes > 0, "positive"),
            ("threads", config.threads, config.threads is None or config.threads > 0, "positive, or null"),
            ("seed", config.seed, config.seed >= 0, "0 or more"),
            ("data.held_out_concepts", config.data.held_out_concepts, config.data.held_out_concepts >= 0, "0 or more"),
            ("denoiser.flat_weight", config.denoiser.flat_weight, config.denoiser.flat_weight > 0, "positive"),
            ("loras.rank", config.loras.rank, config.loras.rank > 0, "positive"),
            (
                "loras.held_out_concepts",
                config.loras.held_out_concepts,
                config.loras.held_out_concepts > 0,
                "positive: the card compares the LoRAs on them",
            ),
            ("clip.style_share", config.clip.style_share, 0 <= config.clip.style_share <= 1, "from 0 to 1"),
            ("clip.spoilt_share", config.clip.spoilt_share, 0 <= config.clip.spoilt_share <= 1, "from 0 to 1"),
            (
                "clip.hidden_patches",
                config.clip.hidden_patches,
                0 <= config.clip.hidden_patches < 1,
                "from 0, below 1",
            ),
            (
                "clip.held_out_share",
                config.clip.held_out_share,
                0 < config.clip.held_out_share <= 1,
                "above 0, at most 1",
            ),
            ("clip.extra_captions", config.clip.extra_captions, config.clip.extra_captions >= 0, "0 or more"),
            ("autoencoder.kl_weight", config.autoencoder.kl_weight, config.autoencoder.kl_weight >= 0, "0 or more"),
            (
                "tiny_autoencoder.latent_noise",
                config.tiny_autoencoder.latent_noise,
                config.tiny_autoencoder.latent_noise >= 0,
                "0 or more",
            ),
            (
                "export.companions",
                config.export.companions,
                Path(config.export.companions).resolve() != Path(config.folder).resolve(),
                "another folder than `folder`, where the stages of these names work",
            ),
            (
                "export.every_minutes",
                config.export.every_minutes,
                config.export.every_minutes is None or config.export.every_minutes > 0,
                "positive, or null",
            ),
        )
        if not fine
    ]
    # Where several stages have a key, it means the same.
    ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
        "share": (lambda value: 0 < value <= 1, "above 0, at most 1"),
        "steps": (lambda value: value is None or value > 0, "positive, or null"),
        "batch_size": (lambda value: value > 0, "positive"),
        "learning_rate": (lambda value: value > 0, "positive"),
        "warmup_steps": (lambda value: value >= 0, "0 or more"),
        "edge_weight": (lambda value: value >= 0, "0 or more"),
        "snr_gamma": (lambda value: value > 0, "positive"),
        "caption_dropout": (lambda value: 0 <= value <= 1, "from 0 to 1"),
        "background_share": (lambda value: 0 <= value <= 1, "from 0 to 1"),
        "ema": (lambda value: 0 <= value < 1, "from 0, below 1"),
    }
    for name in ("autoencoder", "tiny_autoencoder", "denoiser", "loras", "clip"):
        stage = asdict(getattr(config, name))
        problems += [
            f"{name}.{key}={stage[key]}: must be {wanted}"
            for key, (fine, wanted) in ranges.items()
            if key in stage and not fine(stage[key])
        ]
    if problems:
        raise UsageError(problems)
