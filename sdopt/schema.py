"""The typed form of every configuration section: what exists, of which type, in which range.

Each class is frozen and does nothing when built. A field's metadata holds its range (`ge`, `gt`, `le`) or `choices`;
`sdopt.config` checks them, so that an error can name the full key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"  # how OmegaConf writes a value that must be given


def bounded(default: Any, **limits: Any) -> Any:
    """A dataclass field with a range: `ge`, `gt`, `le` or `choices`."""
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Model:
    """Which text-to-image model is measured.

    `weights`: `packaged` come with sdopt; `hub` are fetched from the Hugging Face Hub once; `path` is a local diffusers
    folder, or a single file in the original layout; `random` has the model's exact architecture and no training.
    Weights are read from safetensors files only.
    """

    name: str = "emoji"
    """Names the architecture: of random weights, and of a single file."""
    weights: str = bounded("packaged", choices=("packaged", "hub", "path", "random"))
    path: str | None = None
    """For `path`: the folder of a StableDiffusionPipeline or StableDiffusionXLPipeline, or a `.safetensors` file."""
    tokenizer: str | None = None
    """For a single file, which holds no vocabulary: a folder with CLIP's, as `tokenizer/` of any diffusers folder."""
    hub_id: str | None = None
    """For `hub`: the repository, as in `owner/name`."""
    revision: str | None = None
    """For `hub`: a branch, tag or commit; `main` where it is null."""
    variant: str | None = None
    """Of a folder or repository: which of its files, as in `fp16` for `….fp16.safetensors`; the plain ones if null."""
    size: int = bounded(64, ge=8)
    """Height and width that the model was trained at, in pixels: the default of `workload.size`."""
    guidance_scale: float = bounded(7.5, ge=0)
    """What suits the model: the default of `workload.guidance_scale`."""


@dataclass(frozen=True)
class Task:
    """What is made of a prompt: an image from noise alone, from an image, or within the masked part of one."""

    kind: str = bounded("txt2img", choices=("txt2img", "img2img", "inpaint"))
    image: str | None = None
    """The image to begin with, a file; each prompt gets the same, scaled to the workload's size."""
    mask: str | None = None
    """For `inpaint`: a file that is white where the image is to be replaced."""
    strength: float = bounded(1.0, gt=0, le=1)
    """Share of the steps that are run, from a starting image with as much noise; 1 begins with noise alone."""


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
    guidance_scale: float | None = bounded(None, ge=0)
    """The model's own where it is null; 1 or less runs without guidance."""
    size: int | None = bounded(None, ge=8)
    """Height and width in pixels; the model's own size where it is null."""
    seed: int = bounded(0, ge=0)
    latents: str | None = None
    """A .pt or .safetensors file with the initial noise, of unit variance, instead of noise drawn from seeds: (n,
    channels, height / 8, width / 8), one for all images or one for each, all images of a prompt together."""


@dataclass(frozen=True)
class Protocol:
    """How time is measured. The unit of replication is the process: see `replicates`."""

    rounds: int = bounded(4, ge=1)
    """Timed calls of each process. More of them make each process's mean steadier, and replace no process."""
    warmup: int = bounded(1, ge=0)
    """Untimed calls after the first one, which is reported as the cold start."""
    replicates: int | None = bounded(None, ge=1)
    """Processes per variant; null is as many as the gate wants. Below three, no interval is given."""
    estimator: str = bounded("median", choices=("median", "mean", "last", "min"))
    """How a variant's latency is summarised. Speed-ups are always geometric means of ratios paired by round."""
    confidence: float = bounded(0.95, gt=0, lt=1)
    schedule: str = bounded("auto", choices=("auto", "interleaved", "blocks"))
    """`auto` interleaves all variants where they fit in memory together and falls back to blocks where not."""
    memory_fraction: float = bounded(0.85, gt=0, le=1)
    """Share of the memory free at the start that the variants may fill together."""
    shuffle_seed: int = bounded(0, ge=0)
    stage_calls: int = bounded(1, ge=0)
    """Calls of each process in the separate, instrumented pass that gives the time per stage."""
    timeout_s: float = bounded(1800.0, gt=0, le=604800)
    """Limit for preparing a worker, and for each call of it, in seconds; at most a week."""


@dataclass(frozen=True)
class Rates:
    """Peak rates by the type of the products that are multiplied, dense, in TFLOP/s (int8 in TOP/s).

    `fp16`, `bf16` and `fp8` accumulate in float32, as PyTorch does. Null where there is no such unit.
    """

    fp32: float | None = bounded(None, gt=0)
    tf32: float | None = bounded(None, gt=0)
    fp16: float | None = bounded(None, gt=0)
    bf16: float | None = bounded(None, gt=0)
    fp8: float | None = bounded(None, gt=0)
    int8: float | None = bounded(None, gt=0)


@dataclass(frozen=True)
class Sheet:
    """A data sheet: a card as its vendor describes it, or a machine as `sdopt doctor` measured it."""

    name: str
    device_names: list[str]
    """What the driver calls it; `NVIDIA` in front and upper case do not matter."""
    memory_gib: float = bounded(MISSING, gt=0)
    """What a program finds there (`torch.cuda.mem_get_info`): less than is sold, and a little different by driver."""
    bandwidth_gb_s: float = bounded(MISSING, gt=0)
    compute_capability: float | None = bounded(None, ge=1)
    """CUDA's, as in 8.6; null for a CPU."""
    tdp_w: float | None = bounded(None, gt=0)
    vector: Rates = field(default_factory=Rates)
    """Of the ordinary units: CUDA cores, or a CPU."""
    tensor: Rates = field(default_factory=Rates)
    """Of the tensor cores."""
    sources: list[str] = field(default_factory=list)

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability as major and minor version."""
        if self.compute_capability is None:
            return None
        major, minor = divmod(round(10 * self.compute_capability), 10)
        return major, minor

    def peak(self, kind: str) -> float | None:
        """The rate of the fastest unit for products of a type (`fp32`, `tf32`, …), in TFLOP/s; none where unknown."""
        known = [rate for rates in (self.tensor, self.vector) if (rate := getattr(rates, kind)) is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class Hardware:
    """Where to run. `auto` takes the first CUDA device, else the CPU."""

    device: str = "auto"
    threads: int | None = bounded(None, ge=1)
    """Threads of a worker's CPU operations; PyTorch's choice where it is null."""
    price_per_hour: float | None = bounded(None, ge=0)
    """Price of this machine, in the currency of your choice, for the cost per image."""
    emulate_memory: bool = False
    """Caps each worker on a larger card to the memory of the sheet's card."""
    sheet: Sheet | None = None
    """The card that is meant; where it is null, the packaged sheet of the device's name."""


@dataclass(frozen=True)
class Tracking:
    """Where results are shown, once `result.json` is written."""

    kind: str = bounded("mlflow", choices=("mlflow", "none"))
    uri: str = "sqlite:///outputs/mlflow.db"
    artifacts: str | None = "outputs/mlartifacts"
    """Folder for the artifacts of a local store; null leaves the choice to a tracking server."""
    images: bool = True


@dataclass(frozen=True)
class Quality:
    """The quality pass: images drawn after timing, the same prompts and noise for every variant, and their metrics."""

    metrics: bool = True
    """Whether anything is computed from the images; without, those of the workload's prompts are drawn to look at."""
    prompt_count: int | None = bounded(None, ge=1)
    """Prompts to draw, from the first of `workload.prompts`; null is as many as the gate wants, else 24."""
    floor_prompts: int = bounded(24, ge=2)
    """Prompts, of those above, that the baseline draws once more for each of the two floors."""
    features: list[str] | None = None
    """Feature extractors of CLIP score, FID, KID and CMMD; null is the model's own, if there are some."""
    reference: str | None = None
    """What FID, KID and CMMD compare with: `packaged`, `baseline`, a folder of images or a saved reference set; null is
    `packaged` for the packaged model and `baseline` for others."""
    lpips: bool = False
    """The learned perceptual distance as well; it needs the extra `lpips`."""
    cache: str | None = "outputs/cache/images"
    """Folder that keeps images by everything they depend on, so that none is drawn twice; null keeps none."""


TESTS = ("non_inferior", "equivalent", "at_least", "at_most", "within", "exact", "rarely")


@dataclass(frozen=True)
class Rule:
    """One line of a gate.

    Tests: `non_inferior` (the difference to the reference is not worse than the margin), `equivalent` (it is within the
    margin on both sides), `at_least` and `at_most` (the value itself lies beyond `limit`), `within` (it lies between
    `low` and `high`), `exact` (it is zero for every prompt), `rarely` (no more than `share` of the prompts have a value
    above `limit`: a mean hides the few that went wrong).
    """

    metric: str = ""
    """Without the name of its features, where it has some: the run's own are meant."""
    test: str = bounded("non_inferior", choices=TESTS)
    margin: float | None = bounded(None, ge=0)
    """Of a difference, in the metric's own unit."""
    deviations: float | None = bounded(None, ge=0)
    """Instead of `margin`: as a share of the standard deviation that the calibration has for one prompt."""
    limit: float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    """Instead of `limit`: one by the coarsest type that the reference computes in (`float32`, `float16`, `bfloat16`);
    two ways to compute the same differ by as much as that type rounds."""
    of_seeds: float | None = bounded(None, ge=0)
    """Instead of `limit`: as a share of the calibrated mean between two images of a prompt from other noise."""
    share: float | None = bounded(None, gt=0, lt=1)
    """Of prompts, for `rarely`."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = bounded(0.95, gt=0.5, lt=1)
    """One-sided; null judges the estimate alone, as benchmarks with published windows do."""


@dataclass(frozen=True)
class Gate:
    """A named list of rules by contract, and what a claim of speed or memory must show."""

    name: str = "none"
    rules: dict[str, list[Rule]] = field(default_factory=dict)
    """By contract (`exact`, `equivalent`, `lossy`)."""
    must_pay: bool = True
    """An option that claims latency or memory must gain: beyond the A/A floor, and among all claims of the study."""
    smallest_speedup: float = bounded(0.01, ge=0)
    """The smallest change of speed that counts as a gain or as a harm, as a share."""
    smallest_memory: float = bounded(0.01, ge=0)
    """The smallest change of peak memory that counts, as a share of the reference's."""
    smallest_memory_mib: float = bounded(16.0, ge=0)
    """The smallest change of peak memory that counts, in MiB; both must be exceeded."""
    confidence: float = bounded(0.95, gt=0.5, lt=1)
    """Of all claims of a gain together: the chance that any of them is false is at most what is left."""
    looks: int = bounded(1, ge=1)
    """How often a study may be judged as it grows. The chance of error is shared among so many looks, and a study that
    is extended further cannot pass. The first look settles the number."""
    report_only: bool = False
    """Verdicts are shown and logged, but the exit code stays 0."""
    replicates: int = bounded(3, ge=1)
    """Processes per variant, where `protocol.replicates` leaves it open."""
    prompt_count: int = bounded(24, ge=1)
    """Prompts of the quality pass, where `quality.prompt_count` leaves it open."""
    calibration: str | None = None
    """A file that `sdopt calibrate` wrote; null is the one that comes with sdopt for the model."""

    @property
    def judges(self) -> bool:
        """Whether there is a rule to judge by."""
        return bool(self.rules)


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
