"""The typed form of every configuration section: its keys, their types and their ranges.

Each class is frozen and does nothing when built. A field's metadata holds its range (`ge`, `gt`, `le`, `lt`) or its
`choices`; `sdopt.config` checks them, so that an error can name the full key.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from itertools import product
from typing import Any

WORK = ("model", "task", "scheduler", "workload")
"""The sections that say which images are asked for: two variants that agree in all of them do the same work."""

CHOICES = ("scheduler.", "workload.steps", "hardware.threads", "hardware.price_per_hour")
"""Settings that a candidate may choose: where they differ, that is what is judged."""


SEEDS = {"ge": 0, "le": 2**53}
"""The seeds that all of Python, PyTorch, JSON and a browser take for the same number."""


def bounded(default: Any = MISSING, **limits: Any) -> Any:
    """Returns a dataclass field with limits, required if it has no default.

    Args:
        default: the field's value where none is given.
        limits: a range (`ge`, `gt`, `le`, `lt`), or `choices` for the value or for each of a list. `each` holds the
            range (`multiple_of` too) of a whole number that may also be a list of several, none of them twice.
    """
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Model:
    """Which text-to-image model is measured.

    `weights`: `packaged` come with sdopt; `hub` are fetched from the Hugging Face Hub once; `path` is a local diffusers
    folder, or a single file in the original layout; `random` has the model's exact architecture and no training.
    Weights are read from safetensors files only.
    """

    name: str = "emoji"
    """The packaged model, or the architecture of random weights and of a single file."""
    weights: str = bounded("packaged", choices=("packaged", "hub", "path", "random"))
    """Where the weights come from."""
    path: str | None = None
    """For `path`: the folder of a StableDiffusionPipeline or StableDiffusionXLPipeline, or a `.safetensors` file."""
    tokenizer: str | None = None
    """For a single file, which holds no vocabulary: a folder with CLIP's, as `tokenizer/` of a diffusers folder."""
    hub_id: str | None = None
    """For `hub`: the repository, as in `owner/name`."""
    revision: str | None = None
    """For `hub`: a branch, tag or commit; null is `main`."""
    variant: str | None = None
    """Variant of a folder's or repository's files, such as `fp16` for `….fp16.safetensors`; null: files without one."""
    size: int = bounded(64, ge=8, le=16384)
    """Height and width that the model was trained at, in pixels: the default of `workload.size`."""
    guidance_scale: float = bounded(7.5, ge=0, le=1000)
    """The default of `workload.guidance_scale`."""
    threads: int | None = bounded(None, ge=1, le=4096)
    """The default of `hardware.threads`."""


@dataclass(frozen=True)
class Task:
    """What an image is generated from, beside its prompt: noise alone, an image, or an image and a mask."""

    kind: str = bounded("txt2img", choices=("txt2img", "img2img", "inpaint"))
    """Text-to-image, image-to-image or inpainting."""
    image: str | None = None
    """File of the starting image, or `packaged`; every prompt gets the same one, scaled to the workload's size."""
    mask: str | None = None
    """For `inpaint`: file of the mask, white where the image is to be replaced, or `packaged`."""
    strength: float = bounded(1.0, gt=0, le=1)
    """Share of the steps that are run, from a starting image with as much noise; 1 starts from noise alone."""


@dataclass(frozen=True)
class Scheduler:
    """The sampler: a class of `diffusers`, and options that replace those of the model's own scheduler."""

    class_name: str = "DDIMScheduler"
    """Name of a scheduler class of diffusers."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class that replace those of the model's own scheduler."""
    distilled: bool = False
    """Whether it is made for a model that was distilled to a few steps: without a LoRA that does so it then is a
    conflict. Set it to false for a model that is distilled itself."""


@dataclass(frozen=True)
class Shape:
    """Size and number of the prompts of one pipeline call."""

    size: int
    """Height and width in pixels."""
    batch_size: int

    @property
    def name(self) -> str:
        """What metrics are called after, as `512x512b1`."""
        return f"{self.size}x{self.size}b{self.batch_size}"

    def __str__(self) -> str:
        return f"{self.size}×{self.size}, batch {self.batch_size}"


@dataclass(frozen=True)
class Workload:
    """What one timed call does, and which images the generation pass makes."""

    prompts: Any = "packaged"
    """`packaged`, a list of prompts, or a file: .csv, .tsv or .jsonl, or text with one prompt a line."""
    prompt_column: str | None = None
    """Column of a .csv, .tsv or .jsonl file; null is the one named prompt, caption or text."""
    prompt_count: int = bounded(8, ge=1, le=1_000_000)
    """Number of prompts to use, from the first, or from `prompt_start`."""
    prompt_start: int = bounded(0, ge=0, le=1_000_000_000)
    """Prompts to leave out, from the first: for images that nothing was decided by before."""
    images_per_prompt: int = bounded(1, ge=1, le=4096)
    """Images of each prompt, each from noise of its own."""
    batch_size: Any = bounded(1, each={"ge": 1, "le": 4096})  # noqa: RUF009 (returns a field)
    """Prompts in one pipeline call; the call makes `batch_size * images_per_prompt` images. A list is as of `size`."""
    steps: int = bounded(25, ge=1, le=10_000)
    """Denoising steps."""
    guidance_scale: float | None = bounded(None, ge=0, le=1000)
    """Null is the model's own; 1 or less runs without guidance."""
    size: Any = bounded(None, each={"ge": 8, "le": 16384, "multiple_of": 8})  # noqa: RUF009 (returns a field)
    """Height and width in pixels; null is the model's own size. With a list, each process is timed at every size with
    every `batch_size`; the first of each is the main shape, which images, stages and energy are of."""
    seed: int = bounded(0, **SEEDS)
    """Seed of the noise that images start from; every variant starts from the same."""
    latents: str | None = None
    """A .pt or .safetensors file with the initial noise, instead of noise drawn from seeds: unit variance, shape (n,
    channels, height / 8, width / 8), one for all images or one for each, with the images of a prompt together."""

    def shapes(self, model: Model) -> tuple[Shape, ...]:
        """Returns the shapes of its calls, each size with each batch size; the first is the main one."""
        sizes, batches = (given if isinstance(given, Sequence) else [given] for given in (self.size, self.batch_size))
        return tuple(Shape(size or model.size, batch_size) for size, batch_size in product(sizes, batches))

    def at(self, shape: Shape) -> "Workload":
        """Returns the same with one shape alone."""
        return replace(self, size=shape.size, batch_size=shape.batch_size)


@dataclass(frozen=True)
class Protocol:
    """How time is measured. The unit of replication is the process: see `replicates`."""

    rounds: int = bounded(4, ge=1, le=100_000)
    """Timed calls of each process. More of them make each process's mean steadier, and replace no process."""
    warmup: int = bounded(1, ge=0, le=100_000)
    """Untimed calls after the first one, which is reported as the cold start. The last of them is a round that is
    discarded, so that interleaved processes have one in any case. Memory is measured in it (with 0, in the first call),
    and once more after the last round."""
    replicates: int | None = bounded(None, ge=1, le=1000)
    """Processes per variant; null is as many as the gate wants. Below three, no interval is given."""
    precision: float | None = bounded(None, gt=0, lt=1)
    """Goes on with more processes until the interval of every speed-up is within this share on both sides, as in 0.03;
    `replicates` are then the pilot, whose deviation decides how many there shall be."""
    budget_s: float | None = bounded(None, gt=0, le=31_536_000)
    """Limit for all measuring of a study with `precision`, in seconds; the pilot is measured whatever it takes."""
    estimator: str = bounded("median", choices=("median", "mean", "last", "min"))
    """How a variant's latency is summarised. Speed-ups are always ratios of geometric means over the same rounds."""
    confidence: float = bounded(0.95, gt=0, lt=1)
    """Confidence level of the intervals in tables."""
    schedule: str = bounded("auto", choices=("auto", "interleaved", "blocks"))
    """`auto` interleaves all variants where they fit in memory together and falls back to blocks where not."""
    memory_fraction: float = bounded(0.85, gt=0, le=1)
    """Share of the memory free at the start that the variants may fill together."""
    shuffle_seed: int = bounded(0, **SEEDS)
    """Seed of the order of the variants within each round."""
    stage_calls: int = bounded(1, ge=0, le=100_000)
    """Calls of each process in the separate, instrumented pass that gives the time per stage."""
    timeout_s: float = bounded(1800.0, gt=0, le=604800)
    """Limit for preparing a worker, and for each call of it, in seconds; at most a week."""
    interference: float | None = bounded(0.02, ge=0, le=1)
    """A round is timed again if others took more than this share of the processor (or of the GPU) from any of its
    calls, or a worker's clock leaves out as much of one; null times none again."""
    extra_rounds: int | None = bounded(None, ge=0, le=100_000)
    """How many rounds of a process may be timed again; null is half of `rounds`, rounded up."""


@dataclass(frozen=True)
class Rates:
    """Dense peak rates by the type of the factors, in TFLOP/s (int8 in TOP/s).

    `fp16`, `bf16` and `fp8` accumulate in float32, as PyTorch does. Null: the device has no such unit.
    """

    fp32: float | None = bounded(None, gt=0, le=1e9)
    tf32: float | None = bounded(None, gt=0, le=1e9)
    fp16: float | None = bounded(None, gt=0, le=1e9)
    bf16: float | None = bounded(None, gt=0, le=1e9)
    fp8: float | None = bounded(None, gt=0, le=1e9)
    int8: float | None = bounded(None, gt=0, le=1e9)


@dataclass(frozen=True)
class Sheet:
    """A data sheet: a card as its vendor describes it, or a machine as `sdopt doctor` measured it."""

    name: str
    device_names: list[str]
    """The driver's names of it; a leading `NVIDIA` and upper case do not matter."""
    memory_gib: float = bounded(gt=0, le=1e6)
    """Memory that a program finds (`torch.cuda.mem_get_info`): less than advertised, and it differs by driver."""
    bandwidth_gb_s: float = bounded(gt=0, le=1e9)
    compute_capability: float | None = bounded(None, ge=1, le=100)
    """CUDA's, as in 8.6; null for a CPU."""
    tdp_w: float | None = bounded(None, gt=0, le=1e6)
    vector: Rates = field(default_factory=Rates)
    """Rates of the ordinary units: CUDA cores, or a CPU."""
    tensor: Rates = field(default_factory=Rates)
    """Rates of the tensor cores."""
    sources: list[str] = field(default_factory=list)

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability as major and minor version."""
        if self.compute_capability is None:
            return None
        major, minor = divmod(round(10 * self.compute_capability), 10)
        return major, minor

    def peak(self, kind: str) -> float | None:
        """Returns the fastest unit's rate for a type (`fp32`, `tf32`, …), in TFLOP/s; None if the sheet has none."""
        known = [rate for rates in (self.tensor, self.vector) if (rate := getattr(rates, kind)) is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class Hardware:
    """Where to run. `auto` takes the first CUDA device, else the CPU."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: int | None = bounded(None, ge=1, le=4096)
    """Threads of a worker's CPU operations; null is `model.threads`, or else PyTorch's choice: one for each core."""
    price_per_hour: float | None = bounded(None, ge=0, le=1e9)
    """Price of this machine, in the currency of your choice, for the cost per image."""
    exclusive: bool = True
    """Waits while another study of this user measures on the device; of several cards `auto` takes one that is free."""
    emulate_memory: bool = False
    """Caps each worker on a larger card to the memory of the sheet's card."""
    sheet: Sheet | None = None
    """Data sheet of the card; null is the packaged sheet of the device's name."""


@dataclass(frozen=True)
class Tracking:
    """Where results are shown, once `result.json` is written."""

    kind: str = bounded("mlflow", choices=("mlflow", "none"))
    """Where results go beside `result.json`."""
    uri: str = "sqlite:///outputs/mlflow.db"
    """MLflow's tracking URI: a database, or a server."""
    artifacts: str | None = "outputs/mlartifacts"
    """Folder for the artifacts of a local store; null leaves the choice to a tracking server."""
    images: bool = True
    """Also log the images and the contact sheet."""
    tags: dict[str, str] | None = None
    """Tags of your own on a study's runs, as in `tracking.tags={team: vision}`."""
    note: str | None = None
    """A note of your own, above the answer in a study's run."""


@dataclass(frozen=True)
class Quality:
    """The quality pass: images drawn after timing, same prompts and noise for all variants, and their metrics."""

    metrics: bool = True
    """Whether metrics are computed from the images."""
    prompt_count: int | None = bounded(None, ge=1, le=1_000_000)
    """Prompts to draw, from the first of `workload.prompts`; null is as many as the gate wants, else 24, and without
    metrics none."""
    batch_size: int | None = bounded(None, ge=1, le=4096)
    """Prompts drawn in one call, by all variants alike; null is up to 12 for small images, and `workload.batch_size`
    for large ones, where an option compiled its own, and where a gate judges."""
    floor_prompts: int = bounded(12, ge=2, le=1_000_000)
    """Prompts, of those above, that the baseline draws once more for each of the two floors."""
    features: list[str] | None = None
    """Feature extractors of CLIP score, FID, KID and CMMD; null is the model's own, if it has some."""
    reference: str | None = None
    """What FID, KID and CMMD compare with: `packaged`, `baseline`, a folder of images or a saved reference set; null is
    `packaged` for the packaged model and `baseline` for others."""
    lpips: bool = False
    """Also compute LPIPS, the learned perceptual distance; it needs the extra `lpips`."""
    cache: str | None = "outputs/cache/images"
    """Folder that caches images by everything they depend on, so that none is drawn twice; null caches none."""


TESTS = ("non_inferior", "equivalent", "at_least", "at_most", "within", "exact", "rarely", "every")


@dataclass(frozen=True)
class Rule:
    """One line of a gate.

    Tests: `non_inferior` (the difference to the reference is not worse than the margin), `equivalent` (it is within the
    margin on both sides), `at_least` and `at_most` (the value itself lies beyond `limit`), `within` (it lies between
    `low` and `high`), `exact` (it is zero for every prompt), `rarely` (no more than `share` of the prompts have a value
    above `limit`: a mean hides the few that went wrong), `every` (not one prompt has a value above `limit`).
    """

    metric: str = ""
    """Without the name of its features, where it has some: the run's own are meant."""
    test: str = bounded("non_inferior", choices=TESTS)
    margin: float | None = bounded(None, ge=0, le=1e9)
    """Of a difference, in the metric's own unit."""
    deviations: float | None = bounded(None, ge=0, le=1e9)
    """Instead of `margin`: as a share of the standard deviation that the calibration has for one prompt."""
    limit: float | None = bounded(None, ge=-1e9, le=1e9)
    limits: dict[str, float] = field(default_factory=dict)
    """Instead of `limit`: one by the coarsest type that the reference computes in (`float32`, `float16`, `bfloat16`);
    two ways to compute the same differ by as much as that type rounds."""
    of_seeds: float | None = bounded(None, ge=0, le=1e9)
    """Instead of `limit`: as a share of the calibrated mean between two images of a prompt from other noise."""
    of_floor: float | None = bounded(None, gt=0, le=1e9)
    """Beside one of these: the limit is at most so many times the numerical floor, the mean by which two baselines
    differ that compute in another order. Where the two sides chose another precision the floor says nothing, and the
    limit stays as it is."""
    least: float = bounded(0.0, ge=0, le=1e9)
    """What `of_seeds`, `deviations` and `of_floor` allow in any case: they are shares of what may be nothing."""
    share: float | None = bounded(None, gt=0, lt=1)
    """Of prompts, for `rarely`."""
    low: float | None = bounded(None, ge=-1e9, le=1e9)
    high: float | None = bounded(None, ge=-1e9, le=1e9)
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
    smallest_speedup: float = bounded(0.01, ge=0, le=1000)
    """The smallest change of speed that counts as a gain or as a harm, as a share."""
    smallest_memory: float = bounded(0.01, ge=0, le=1000)
    """The smallest change of peak memory that counts, as a share of the reference's."""
    smallest_memory_mib: float = bounded(16.0, ge=0, le=1e9)
    """The smallest change of peak memory that counts, in MiB; both must be exceeded."""
    confidence: float = bounded(0.95, gt=0.5, lt=1)
    """Of all claims of a gain together: the chance that any of them is false is at most what is left."""
    looks: int = bounded(1, ge=1, le=1000)
    """How often a study may be judged as it grows. The chance of error is shared among so many looks, and a study that
    is extended further cannot pass. The first look settles the number."""
    report_only: bool = False
    """Verdicts are shown and logged, but the exit code stays 0."""
    replicates: int = bounded(3, ge=1, le=1000)
    """Processes per variant, where `protocol.replicates` leaves it open."""
    prompt_count: int = bounded(24, ge=1, le=1_000_000)
    """Prompts of the quality pass, where `quality.prompt_count` leaves it open."""
    calibration: str | None = None
    """A file that `sdopt calibrate` wrote; null is the one that comes with sdopt for the model and its work. One
    that was measured at other steps, guidance, size or scheduler is applied only if it is named."""

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


_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
    "multiple_of": ("a multiple of", lambda value, factor: not value % factor),
}


def out_of_range(value: Any, limits: Mapping[str, Any]) -> str | None:
    """Returns what a value must be, or None if it is within its limits; numbers must be finite without any."""
    if any(isinstance(number, float) and not math.isfinite(number) for number in _numbers(value)):
        return "must be a finite number"
    if value is None or not limits:
        return None
    chosen = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    if "choices" in limits:
        choices = limits["choices"]
        return None if all(each in choices for each in chosen) else f"choose one of {', '.join(map(str, choices))}"
    if "each" in limits:
        return _any_out_of_range(chosen, limits["each"])
    bounds = [(word, holds, limits[key]) for key, (word, holds) in _BOUNDS.items() if key in limits]
    if all(holds(number, bound) for number in _numbers(value) for _, holds, bound in bounds):
        return None
    return f"must be {' and '.join(f'{word} {bound}' for word, _, bound in bounds)}"


def _each_out_of_range(chosen: Sequence[Any], limits: Mapping[str, Any]) -> str | None:
    if not all(isinstance(one, int) for one in chosen):
        return "must be a whole number, or a list of them"
    if len(set(chosen)) < max(1, len(chosen)):
        return "must name at least one" if not chosen else "names one twice"
    return next((wrong for one in chosen if (wrong := out_of_range(one, limits))), None)


def _numbers(value: Any) -> Iterator[float]:
    """Yields the numbers of a value: itself, or those in a list or a mapping of it."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _numbers(each)


def wrong_name(name: str) -> str | None:
    """Returns what is wrong with the name of a study, which is also that of folders; None if it is a name."""
    if not name.strip():
        return "must not be empty"
    if len(name) > _LONGEST_NAME:
        return f"must have at most {_LONGEST_NAME} characters"
    if name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return "must be a name, not a path: no / and no \\, no control character, and not . or .."
    return None


def wrong_label(name: str) -> str | None:
    """Returns what is wrong with the name of a variant, which is a line of text; None if it is one."""
    return None if name.strip() and name.isprintable() else "must be one line of text, and not empty"


_LONGEST_NAME = 120
"""With a date and a suffix it is still the name of a file."""


def _any_out_of_range(numbers: Sequence[Any], limits: Mapping[str, Any]) -> str | None:
    """Returns what a whole number, or each of several different ones, must be; None if all are within the limits."""
    if any(type(number) is not int for number in numbers):
        return "must be a whole number, or a list of them"
    if len(set(numbers)) < max(1, len(numbers)):
        return "must name at least one" if not numbers else "names one twice"
    return next((wrong for number in numbers if (wrong := out_of_range(number, limits))), None)
