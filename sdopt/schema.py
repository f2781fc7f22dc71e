"""The typed form of every configuration section: what exists, of which type, in which range.

Each class is frozen and does nothing when built. A field's metadata holds its range (`ge`, `gt`, `le`) or `choices`;
`sdopt.config` checks them, so that an error can name the full key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def bounded(default: Any, **limits: Any) -> Any:
    """A dataclass field with a range: `ge`, `gt`, `le` or `choices`."""
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Model:
    """Which text-to-image model is measured.

    `packaged` weights come with sdopt; `path` is a local diffusers folder in safetensors format.
    """

    name: str = "emoji"
    weights: str = bounded("packaged", choices=("packaged", "path"))
    path: str | None = None
    size: int = bounded(64, ge=8)
    """Height and width that the model was trained at, in pixels: the default of `workload.size`."""


@dataclass(frozen=True)
class Scheduler:
    """The sampler: a class of `diffusers`, and options that replace those of the model's own scheduler."""

    class_name: str = "DDIMScheduler"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """What one timed call does, and which images the generation pass makes."""

    prompts: Any = "packaged"
    """`packaged`, a list of prompts, or a file: .csv, .tsv or .jsonl, or text with one prompt a line."""
    prompt_column: str | None = None
    """Column of a .csv, .tsv or .jsonl file; the one called prompt, caption or text where it is null."""
    prompt_count: int = bounded(8, ge=1)
    """How many of the prompts are used, from the first."""
    images_per_prompt: int = bounded(1, ge=1)
    batch_size: int = bounded(1, ge=1)
    """Prompts in one pipeline call; the call makes `batch_size * images_per_prompt` images."""
    steps: int = bounded(25, ge=1)
    guidance_scale: float = bounded(7.5, ge=0)
    size: int | None = bounded(None, ge=8)
    """Height and width in pixels; the model's own size where it is null."""
    seed: int = bounded(0, ge=0)
    latents: str | None = None
    """A .pt or .safetensors file with the initial noise, of unit variance, instead of noise drawn from seeds: (n,
    channels, height / 8, width / 8), one for all images or one for each, all images of a prompt together."""


@dataclass(frozen=True)
class Protocol:
    """How time is measured. The unit of replication is the process: see `replicates`."""

    rounds: int = bounded(10, ge=1)
    """Timed calls of each process; below six, no interval is given."""
    warmup: int = bounded(2, ge=0)
    """Untimed calls after the first one, which is reported as the cold start."""
    replicates: int = bounded(1, ge=1)
    """Processes per variant."""
    estimator: str = bounded("median", choices=("median", "mean", "last", "min"))
    """How a variant's latency is summarised. Speed-ups are always geometric means of ratios paired by round."""
    confidence: float = bounded(0.95, gt=0, lt=1)
    schedule: str = bounded("auto", choices=("auto", "interleaved", "blocks"))
    """`auto` interleaves all variants where they fit in memory together and falls back to blocks where not."""
    memory_fraction: float = bounded(0.85, gt=0, le=1)
    """Share of the memory free at the start that the variants may fill together."""
    shuffle_seed: int = bounded(0, ge=0)
    stage_calls: int = bounded(3, ge=0)
    """Calls of the separate, instrumented pass that gives the time per stage."""
    timeout_s: float = bounded(1800.0, gt=0, le=604800)
    """Limit for preparing a worker, and for each call of it, in seconds; at most a week."""


@dataclass(frozen=True)
class Hardware:
    """Where to run. `auto` takes the first CUDA device, else the CPU."""

    device: str = "auto"
    threads: int | None = bounded(None, ge=1)
    """Threads of a worker's CPU operations; PyTorch's choice where it is null."""
    price_per_hour: float | None = bounded(None, ge=0)
    """Price of this machine, in the currency of your choice, for the cost per image."""


@dataclass(frozen=True)
class Tracking:
    """Where results are shown, once `result.json` is written."""

    kind: str = bounded("mlflow", choices=("mlflow", "none"))
    uri: str = "sqlite:///outputs/mlflow.db"
    artifacts: str | None = "outputs/mlartifacts"
    """Folder for the artifacts of a local store; null leaves the choice to a tracking server."""
    images: bool = True


@dataclass(frozen=True)
class ExplicitEdge:
    """A comparison written out by hand."""

    candidate: str
    reference: str
    credit: str | None = None


def out_of_range(value: Any, limits: Mapping[str, Any]) -> str | None:
    """Says what a value should have been, or nothing where it is within its limits."""
    if value is None or not limits:
        return None
    if "choices" in limits:
        choices = limits["choices"]
        return None if value in choices else f"choose one of {', '.join(choices)}"
    bounds = [
        (f"{word} {limits[key]}", holds(value, limits[key]))
        for key, word, holds in (
            ("ge", "at least", lambda v, b: v >= b),
            ("gt", "above", lambda v, b: v > b),
            ("le", "at most", lambda v, b: v <= b),
            ("lt", "below", lambda v, b: v < b),
        )
        if key in limits
    ]
    return None if all(ok for _, ok in bounds) else f"must be {' and '.join(text for text, _ in bounds)}"
