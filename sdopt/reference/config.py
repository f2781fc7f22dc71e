"""What `sdopt train-reference` can be told, with types."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from sdopt.errors import UsageError


class Stage(Enum):
    """A step of the training; `all` runs the others in this order."""

    all = "all"
    data = "data"
    tokenizer = "tokenizer"
    autoencoder = "autoencoder"
    denoiser = "denoiser"
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
class AutoencoderConfig:
    """The autoencoder stage.

    Attributes:
        share: of `budget_minutes` that goes to this stage.
        steps: stop after so many steps instead of after the share of the budget.
        batch_size: pictures a step.
        learning_rate: the peak of the schedule.
        warmup_steps: of linear growth up to the peak.
        edge_weight: weight of the L1 distance between the pictures' finite differences.
        kl_weight: weight of the mean Kullback-Leibler divergence per latent number.
        background_share: share of pictures shown on a random colour instead of on white.
        ema: decay of the average whose weights are kept.
    """

    share: float = MISSING
    steps: int | None = MISSING
    batch_size: int = MISSING
    learning_rate: float = MISSING
    warmup_steps: int = MISSING
    edge_weight: float = MISSING
    kl_weight: float = MISSING
    background_share: float = MISSING
    ema: float = MISSING


@dataclass
class DenoiserConfig:
    """The denoiser stage, which trains the text encoder too.

    Attributes:
        share: of `budget_minutes` that goes to this stage.
        steps: stop after so many steps instead of after the share of the budget.
        batch_size: latents a step.
        learning_rate: the peak of the schedule.
        warmup_steps: of linear growth up to the peak.
        snr_gamma: signal-to-noise ratio at which the loss's weight is cut.
        caption_dropout: share of captions replaced by the empty one, for guidance.
        flat_weight: how much oftener pictures in the style of plain captions are drawn than the others.
        background_share: share of pictures on a coloured background, which their captions name.
        ema: decay of the average whose weights are exported.
    """

    share: float = MISSING
    steps: int | None = MISSING
    batch_size: int = MISSING
    learning_rate: float = MISSING
    warmup_steps: int = MISSING
    snr_gamma: float = MISSING
    caption_dropout: float = MISSING
    flat_weight: float = MISSING
    background_share: float = MISSING
    ema: float = MISSING


@dataclass
class ClipConfig:
    """The stage of the CLIP, which also writes its folder.

    Attributes:
        share: of `budget_minutes` that goes to this stage.
        steps: stop after so many steps instead of after the share of the budget.
        batch_size: pictures a step, each of another concept.
        extra_captions: further captions a step that every picture is held against.
        refresh_steps: after how many steps the plain names of all concepts, which every picture is held against too,
            are embedded anew.
        learning_rate: the peak of the schedule.
        warmup_steps: of linear growth up to the peak.
        background_share: share of pictures on a coloured background, which their captions name.
        style_share: share of captions that name the style where `caption` would.
        hidden_patches: share of each picture's patches that a step leaves out.
        held_out_share: share of the concepts drawn in several styles of which one picture is kept from training.
        ema: decay of the average whose weights are exported.
        target: the folder that becomes a `CLIPModel` with its tokenizer, image processor and card.
    """

    share: float = MISSING
    steps: int | None = MISSING
    batch_size: int = MISSING
    extra_captions: int = MISSING
    refresh_steps: int = MISSING
    learning_rate: float = MISSING
    warmup_steps: int = MISSING
    background_share: float = MISSING
    style_share: float = MISSING
    hidden_patches: float = MISSING
    held_out_share: float = MISSING
    ema: float = MISSING
    target: str = MISSING


@dataclass
class ExportConfig:
    """What the export writes, and when.

    Attributes:
        target: the folder that becomes a diffusers pipeline; `prompts.json` lands beside it.
        contact_sheet: the PNG file to draw, beside the export.
        every_minutes: also export while the denoiser trains; null exports only at the end.
    """

    target: str = MISSING
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
        start_from: a pipeline folder whose weights and tokenizer a training without a checkpoint starts from; null
            starts from random weights.
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
    denoiser: DenoiserConfig = field(default_factory=DenoiserConfig)
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
            ("denoiser.snr_gamma", config.denoiser.snr_gamma, config.denoiser.snr_gamma > 0, "positive"),
            ("denoiser.flat_weight", config.denoiser.flat_weight, config.denoiser.flat_weight > 0, "positive"),
            (
                "denoiser.caption_dropout",
                config.denoiser.caption_dropout,
                0 <= config.denoiser.caption_dropout <= 1,
                "from 0 to 1",
            ),
            (
                "autoencoder.edge_weight",
                config.autoencoder.edge_weight,
                config.autoencoder.edge_weight >= 0,
                "0 or more",
            ),
            ("clip.style_share", config.clip.style_share, 0 <= config.clip.style_share <= 1, "from 0 to 1"),
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
            ("clip.refresh_steps", config.clip.refresh_steps, config.clip.refresh_steps > 0, "positive"),
            ("clip.extra_captions", config.clip.extra_captions, config.clip.extra_captions >= 0, "0 or more"),
            ("autoencoder.kl_weight", config.autoencoder.kl_weight, config.autoencoder.kl_weight >= 0, "0 or more"),
            (
                "export.every_minutes",
                config.export.every_minutes,
                config.export.every_minutes is None or config.export.every_minutes > 0,
                "positive, or null",
            ),
        )
        if not fine
    ]
    for name, stage in (
        ("autoencoder", config.autoencoder),
        ("denoiser", config.denoiser),
        ("clip", config.clip),
    ):
        problems += [
            f"{name}.{key}={value}: must be {wanted}"
            for key, value, fine, wanted in (
                ("share", stage.share, 0 < stage.share <= 1, "above 0, at most 1"),
                ("steps", stage.steps, stage.steps is None or stage.steps > 0, "positive, or null"),
                ("batch_size", stage.batch_size, stage.batch_size > 0, "positive"),
                ("learning_rate", stage.learning_rate, stage.learning_rate > 0, "positive"),
                ("warmup_steps", stage.warmup_steps, stage.warmup_steps >= 0, "0 or more"),
                ("ema", stage.ema, 0 <= stage.ema < 1, "from 0, below 1"),
                ("background_share", stage.background_share, 0 <= stage.background_share <= 1, "from 0 to 1"),
            )
            if not fine
        ]
    if problems:
        raise UsageError(problems)
