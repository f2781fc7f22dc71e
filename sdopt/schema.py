"""Typed dataclasses of the configuration sections: keys, types and ranges.

Each class is frozen and has no logic in its constructor. A field's type holds its range; `sdopt.config` lets pydantic
check it where a configuration is read, and nowhere else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic_core import core_schema

WORK = ("model", "task", "scheduler", "workload")
"""The sections that determine the images: two variants with equal sections do the same work."""

CHOICES = (
    "scheduler.",
    "workload.steps",
    "workload.guidance_scale",
    "hardware.threads",
    "hardware.price_per_hour",
)
"""Settings that a candidate may change; a difference in them is part of the comparison."""

AMOUNT = ("workload.batch_size", "workload.images_per_prompt")
"""Settings of how many images a call makes: two variants that differ in them are compared per image."""


class Configured:
    """The base class of what a node of the configuration becomes: where text is wanted, `17` is text too."""

    __pydantic_config__: ClassVar = ConfigDict(coerce_numbers_to_str=True)


@dataclass(frozen=True)
class OneOf:
    """Metadata of a key that takes one of some texts, for choices that code has the list of; others are `Literal`."""

    choices: Iterable[str]

    def __get_pydantic_core_schema__(
        self, _source: Any, _handler: Any
    ) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.choices))


@dataclass(frozen=True)
class OneOrMore:
    """Metadata of a key that takes a whole number, or a list of different ones, each within its range."""

    number: Any
    """The annotated type of each."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Any
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(
            self.validated, handler(source)
        )

    def validated(self, value: Any) -> Any:
        """Returns a number or a list of numbers. Raises ValueError, pydantic's or its own."""
        if not isinstance(value, list):
            return TypeAdapter(self.number).validate_python(value)
        several = Annotated[list[self.number], Field(min_length=1)]  # type: ignore[name-defined]
        numbers = TypeAdapter(several).validate_python(value)
        if len(set(numbers)) < len(numbers):
            raise ValueError("names one twice")
        return numbers


HIGHEST_SEED = 2**53
"""Of the seeds that Python, PyTorch, JSON and browsers all represent exactly."""

Seed = Annotated[int, Field(ge=0, le=HIGHEST_SEED)]

# Ranges that several keys have.
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Amount = Annotated[float, Field(ge=0, le=1e9)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Factor = Annotated[float, Field(ge=0, le=1000)]
UpTo4096 = Annotated[int, Field(ge=1, le=4096)]
UpTo10000 = Annotated[int, Field(ge=1, le=10_000)]
UpToMillion = Annotated[int, Field(ge=1, le=1_000_000)]
Side = Annotated[int, Field(ge=8, le=16384, multiple_of=8)]
UpTo1000 = Annotated[int, Field(ge=1, le=1000)]
Count = Annotated[int, Field(ge=0, le=100_000)]
Capacity = Annotated[float, Field(gt=0, le=1e6)]
Bound = Annotated[float, Field(ge=-1e9, le=1e9)]
Confidence = Annotated[float, Field(gt=0.5, lt=1)]
EveryNth = Annotated[int, Field(ge=2, le=1000)]


@dataclass(frozen=True)
class Model(Configured):
    """The text-to-image model to measure.

    `weights`: `packaged` weights come with sdopt; `hub` weights are downloaded once from the Hugging Face Hub; `path`
    is a local diffusers folder, or a single file in the original layout; `random` is the exact architecture, untrained;
    a `factory` is a function of one's own. Weights are read from safetensors files, and transformers from GGUF files,
    too.
    """

    name: str = "emoji"
    """Name of the packaged model, or of the architecture for random weights and for a single file."""
    weights: Literal["packaged", "hub", "path", "random", "factory"] = "packaged"
    """Where the weights come from."""
    path: str | None = None
    """For `path`: the folder of a pipeline, or a file: a Stable Diffusion or SDXL, or a transformer alone or with other
    networks (`.safetensors`, `.gguf`). `model=PATH` finds the other keys in it."""
    base: str | None = None
    """For a file with a transformer: a folder or a repository of a whole pipeline, with the parts that the file lacks,
    the tokenizers and the configurations. Null is `hub_id`."""
    parts: dict[str, str | None] | None = field(default=None, hash=False)
    """For a file with a transformer: files of other networks, as in `{text_encoder_2: t5xxl.safetensors}`. Null leaves
    out a part that the pipeline runs without, such as T5 (`text_encoder_3`) of SD 3."""
    tokenizer: str | None = None
    """For a single file, which has no vocabulary: a folder like `tokenizer/` in a diffusers folder; null is CLIP's."""
    hub_id: str | None = None
    """For `hub`: the repository, as in `owner/name`."""
    revision: str | None = None
    """For `hub`: a branch, tag or commit; null is `main`."""
    variant: str | None = None
    """Variant of the weight files, such as `fp16` for `….fp16.safetensors`; of a part that has none of it, the files
    without a variant are read. Null reads those of all parts."""
    factory: str | None = None
    """For `factory`: `my_file.py:make`, which returns a pipeline of diffusers; each process calls it without arguments.
    Scheduler and precision are then sdopt's, as for other models."""
    size: Side = 64
    """Height and width of the training images, in pixels: the default of `workload.size`."""
    guidance_scale: Factor = 7.5
    """The default of `workload.guidance_scale`."""
    steps: UpTo10000 = 25
    """The default of `workload.steps`."""
    distilled: bool = False
    """Whether the model itself was distilled to a few steps, so that such a scheduler needs no LoRA."""
    threads: UpTo4096 | None = None
    """The default of `hardware.threads`."""
    max_sequence_length: UpToMillion | None = None
    """For a diffusion transformer: tokens of a prompt that a call reads; null is the pipeline's own number.
    CLIP's encoders read 77 beside it."""

    @property
    def source(self) -> str:
        """What `model=…` takes for it: its repository, its path, its function, or its name."""
        return str(getattr(self, self._named_by))

    @property
    def title(self) -> str:
        """What tells it from other models whose figures stand beside its own: all files have one name in the group."""
        if self.weights == "random":
            return f"{self.name} (random weights)"
        if self.weights == "path" and self.path is not None:
            return Path(self.path).name or self.path
        if self.weights == "factory" and self.factory is not None:
            return Path(self.factory).name
        if self.name == "folder":
            return self.source
        return self.name

    @property
    def origin(self) -> str:
        """The key that says where it comes from, with its value, for messages."""
        return f"model.{self._named_by}={self.source}"

    @property
    def _named_by(self) -> str:
        return {"hub": "hub_id", "path": "path", "factory": "factory"}.get(
            self.weights, "name"
        )


@dataclass(frozen=True)
class Task(Configured):
    """The input of an image besides its prompt: noise only, a starting image, or a starting image and a mask."""

    kind: Literal["txt2img", "img2img", "inpaint"] = "txt2img"
    """Text-to-image, image-to-image or inpainting."""
    image: str | None = None
    """File of the starting image, or `packaged`; all prompts share the image, scaled to the workload's size."""
    mask: str | None = None
    """For `inpaint`: file of the mask, or `packaged`; white areas are replaced."""
    strength: PositiveShare = 1.0
    """Share of the steps to run, and noise level of the starting image; 1 starts from noise only."""


@dataclass(frozen=True)
class Scheduler(Configured):
    """The sampler: a scheduler class of diffusers, and options that override the model's own.

    What the model was trained for stays as its own scheduler's configuration, or the marks in a single file (`v_pred`,
    `ztsnr`, `modelspec.prediction_type`), say; a class that cannot keep it is a conflict.
    """

    class_name: str = "DDIMScheduler"
    """Name of a scheduler class of diffusers."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class that override the configuration of the model's own scheduler."""
    distilled: bool = False
    """Whether the scheduler needs a model distilled to a few steps: a variant without a LoRA is then a conflict, unless
    `model.distilled` says that the model itself is."""
    timesteps: list[int] | None = None
    """Timesteps, from the noisiest on, in place of the class's own spacing. For another number of steps, others are set
    between them, evenly in the logarithm of the noise level."""


@dataclass(frozen=True)
class Shape:
    """Image size and batch size of one pipeline call."""

    size: int
    """Height and width in pixels."""
    batch_size: int

    @property
    def name(self) -> str:
        """The name of the shape in metrics, such as `512x512b1`."""
        return f"{self.size}x{self.size}b{self.batch_size}"

    def __str__(self) -> str:
        return f"{self.size}×{self.size}, batch {self.batch_size}"


@dataclass(frozen=True)
class Workload(Configured):
    """The work of one timed call, and the images of the quality pass."""

    prompts: Any = "packaged"
    """`packaged`, a list of prompts, or a file: .csv, .tsv, .json, .jsonl, or text with one prompt per line."""
    prompt_column: str | None = None
    """Column of a .csv or .tsv file, or key of a .json or .jsonl file; null is the one named prompt, caption or text.
    A column named negative_prompt holds the negative prompts."""
    negative_prompt: str | None = None
    """What images should not show: the negative prompt of all prompts that have none of their own."""
    prompt_count: UpToMillion = 8
    """Number of prompts to use, starting at `prompt_start`."""
    prompt_start: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Number of prompts to skip at the start, for images that no earlier decision was based on."""
    images_per_prompt: UpTo4096 = 1
    """Images per prompt, each from different noise."""
    batch_size: Annotated[Any, OneOrMore(UpTo4096)] = 1
    """Prompts per pipeline call, which makes `batch_size * images_per_prompt` images. For a list, see `size`."""
    steps: UpTo10000 = 25
    """Denoising steps."""
    guidance_scale: Factor | None = None
    """Guidance scale; null is `model.guidance_scale`, 1 or less disables guidance."""
    size: Annotated[Any, OneOrMore(Side)] | None = None
    """Height and width in pixels, which are equal; null is `model.size`. With a list, each process is timed at every
    combination of size and `batch_size`; the first of each is the main shape, used for images, stages and energy."""
    seed: Seed = 0
    """Seed of the initial noise, which is the same for all variants."""
    latents: str | None = None
    """A .pt or .safetensors file with the initial noise, which is otherwise drawn from `seed`: unit variance, shape (n,
    channels, height / 8, width / 8); n is 1, or the number of images, grouped by prompt."""

    def shapes(self, model: Model) -> tuple[Shape, ...]:
        """Returns all combinations of size and batch size; the first is the main shape."""
        sizes = self.size if isinstance(self.size, Sequence) else [self.size]
        batches = self.batch_size
        if not isinstance(batches, Sequence):
            batches = [batches]
        return tuple(
            Shape(size or model.size, batch_size)
            for size, batch_size in product(sizes, batches)
        )

    def guidance(self, model: Model) -> float:
        """Returns its guidance scale (Ho and Salimans 2022), which is the model's if it names none.

        Above 1, every step runs the denoiser on two samples per image.
        """
        return (
            model.guidance_scale if self.guidance_scale is None else self.guidance_scale
        )

    def at(self, shape: Shape) -> "Workload":
        """Returns a copy of the workload with one shape."""
        return replace(self, size=shape.size, batch_size=shape.batch_size)


@dataclass(frozen=True)
class Protocol(Configured):
    """The measurement protocol. The unit of replication is the process: see `replicates`."""

    rounds: Annotated[int, Field(ge=1, le=100_000)] = 4
    """Timed calls per process. More rounds reduce the noise within a process, but do not replace processes."""
    warmup: Count = 1
    """Untimed calls after the first call, which is reported as the cold start. The last of them is a discarded round,
    so that interleaved processes always have one. Memory is measured in that round (with 0, in the first call), and
    again after the last round. At least 2 if a variant's compiler records CUDA graphs in the second call."""
    replicates: UpTo1000 | None = None
    """Processes per variant; null is `gate.replicates`. With fewer than three, no interval is given."""
    precision: Fraction | None = None
    """Target half-width of every speed-up's interval, as a share such as 0.03; processes are added until it is reached.
    `replicates` is then the size of the pilot, whose standard deviation determines the number of processes."""
    budget_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    """Time limit for the whole of `sdopt run`, in seconds. Rounds and processes are spent where a verdict is open, then
    on images; the answer says what was left out. One process of each variant, one round and a few images always
    complete; with `precision`, its pilot."""
    estimator: Literal["median", "mean", "last", "min"] = "median"
    """Summary statistic of a variant's latency. Speed-ups are always ratios of geometric means over the same rounds."""
    confidence: Fraction = 0.95
    """Confidence level of the intervals in tables."""
    schedule: Literal["auto", "interleaved", "blocks"] = "auto"
    """`auto` interleaves all variants if they fit in memory together, and otherwise uses blocks."""
    memory_fraction: PositiveShare = 0.85
    """Share of the initially free memory that all variants together may use."""
    shuffle_seed: Seed = 0
    """Seed of the order of the variants within each round."""
    stage_calls: Count = 1
    """Calls per process in the separate, instrumented pass that measures the time per stage; with quality metrics one
    is made in any case, to count the steps of the denoiser."""
    energy_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """Seconds of back-to-back calls, once per variant, that measure the energy of a call on a card with a counter; 0
    measures none."""
    timeout_s: Annotated[float, Field(gt=0, le=604800)] = 1800.0
    """Time limit for preparing a worker, and for each of its calls, in seconds; at most a week."""
    interference: Share | None = 0.02
    """A round is repeated if other programs took more than this share of the CPU (or GPU) time of any of its calls;
    null repeats none."""
    extra_rounds: Count | None = None
    """Maximum number of extra rounds per process, for disturbed ones; null is half of `rounds`, rounded up."""
    give_up: Annotated[float, Field(gt=1, le=1e6)] | None = 3.0
    """A variant whose first warm calls take more than this many times the baseline's, per image, is `slower`, and is
    not timed further; one that claims memory alone still has its memory measured. Null times all."""
    programs_s: Annotated[float, Field(ge=0, le=86_400)] | None = None
    """Seconds for running, after everything else, the program that reports hand out for each variant; null is a tenth
    of the time that the study took, but at least 180 s. The best variant's is run in any case, unless this is 0: then
    none is run, and none is handed out."""
    smallest_speedup: Factor = 0.01
    """The smallest change of speed that counts as faster or slower, as a share; a smaller one is too close to call. It
    holds for every table, plot and answer, and for a gate. `sdopt gate` may set another one for a finished result."""
    smallest_memory: Factor = 0.01
    """The smallest change of peak memory that counts, as a share of the reference's peak; likewise."""
    smallest_memory_mib: Amount = 16.0
    """The smallest change of peak memory that counts, in MiB; both thresholds must be exceeded."""


THRESHOLDS = ("smallest_speedup", "smallest_memory", "smallest_memory_mib")
"""Keys of the protocol that only decide what counts: another value can be set for what is measured already."""


@dataclass(frozen=True)
class Rates(Configured):
    """Dense peak rates by the type of the operands, in TFLOP/s (int8 in TOP/s).

    The rates of `fp16`, `bf16` and `fp8` are with accumulation in float32, as in PyTorch. Null: the device has no such
    unit.
    """

    fp32: Positive | None = None
    tf32: Positive | None = None
    fp16: Positive | None = None
    bf16: Positive | None = None
    fp8: Positive | None = None
    int8: Positive | None = None


@dataclass(frozen=True)
class Sheet(Configured):
    """A data sheet: the vendor's figures of a card, or the figures that `sdopt doctor` measured on a machine."""

    name: str
    device_names: list[str]
    """The device's names in the driver; case and a leading `NVIDIA` are ignored."""
    memory_gib: Capacity
    """Memory that a program sees (`torch.cuda.mem_get_info`): less than advertised, and dependent on the driver."""
    bandwidth_gb_s: Positive
    compute_capability: Annotated[float, Field(ge=1, le=100)] | None = None
    """CUDA compute capability, such as 8.6; null for a CPU."""
    vector: Rates = field(default_factory=Rates)
    """Rates of the vector units: CUDA cores, or a CPU."""
    tensor: Rates = field(default_factory=Rates)
    """Rates of the tensor cores."""
    sources: list[str] = field(default_factory=list)
    architecture: str | None = None
    """The generation, such as `ada` or `rdna3`; `sdopt plan` needs it, as it needs the keys below."""
    chip: str | None = None
    """The die, such as `AD102`, which cards of several names share."""
    pcie_gb_s: Capacity | None = None
    """Rate of the link to the host in one direction."""
    power_w: Capacity | None = None
    shares_host_memory: bool = False
    """Whether its memory is the host's, in which what waits for the device takes room, too."""
    half_accumulation: Positive | None = None
    """Tensor rate in fp16 with accumulation in fp16, where it differs: GeForce cards halve it for float32."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """The CUDA compute capability as (major, minor), or None."""
        if self.compute_capability is None:
            return None
        major, minor = divmod(round(10 * self.compute_capability), 10)
        return major, minor

    def peak(self, kind: str) -> float | None:
        """Returns the highest rate for a type (`fp32`, `tf32`, …) in TFLOP/s, or None if the sheet has none."""
        known = [
            rate
            for rates in (self.tensor, self.vector)
            if (rate := getattr(rates, kind)) is not None
        ]
        return max(known, default=None)


@dataclass(frozen=True)
class Hardware(Configured):
    """The device to run on. `auto` takes the first CUDA device, or else the CPU."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: UpTo4096 | None = None
    """CPU threads of a worker and of the process that scores images; null is `model.threads`, or else PyTorch's default
    of one per core."""
    price_per_hour: Amount | None = None
    """Price of this machine per hour, in any currency, for the cost per image."""
    exclusive: bool = True
    """Waits while another study of this user measures on the device; with several cards, `auto` takes a free one."""
    emulate_memory: bool = False
    """Limits each worker on a larger card to the memory of the data sheet's card."""
    sheet: Sheet | None = None
    """Data sheet of the card; null is the packaged sheet for the device's name."""


@dataclass(frozen=True)
class Tracking(Configured):
    """Where results are logged after `result.json` is written."""

    kind: Literal["mlflow", "none"] = "mlflow"
    """Where results are logged, in addition to `result.json`."""
    uri: str = "sqlite:///outputs/mlflow.db"
    """MLflow tracking URI of a database or a server."""
    artifacts: str | None = "outputs/mlartifacts"
    """Artifact folder of a local store; null leaves the choice to a tracking server."""
    images: bool = True
    """Whether to log the images and the contact sheet too."""
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Seconds for logging a study, all retries included; what a slow server does not get is logged by `sdopt sync`."""
    tags: dict[str, str] | None = None
    """Additional tags on a study's runs, as in `tracking.tags={team: vision}`."""
    note: str | None = None
    """A note shown above the answer in a study's run."""

    @property
    def own_tags(self) -> dict[str, str]:
        """Those that the user adds, as texts."""
        return {name: str(value) for name, value in (self.tags or {}).items()}


@dataclass(frozen=True)
class Quality(Configured):
    """The quality pass: images generated after timing, from equal prompts and noise for all variants, and metrics."""

    metrics: bool = True
    """Whether to compute metrics from the images."""
    prompt_count: UpToMillion | None = None
    """Number of prompts of the quality pass, from the first of `workload.prompts`; null is `gate.prompt_count`, or 0
    without metrics."""
    batch_size: UpTo4096 | None = None
    """Prompts per call, for all variants; null is up to 12 for small images, and `workload.batch_size` for large
    images, if an option is compiled for a batch size, and if a gate judges."""
    floor_prompts: Annotated[int, Field(ge=2, le=1_000_000)] = 12
    """Number of those prompts that the baseline repeats for each of the two floors."""
    features: list[str] | None = None
    """Feature extractors for CLIP score, FID, KID and CMMD; null is the packaged model's own, OpenAI's CLIP ViT-L/14
    for a model on the hub, and EfficientNet for others, if it is installed."""
    reference: str | None = None
    """Reference of FID, KID and CMMD: `packaged`, `baseline`, a folder of images or a saved reference set; null is
    `packaged` for the packaged model and `baseline` for other models."""
    lpips: bool | None = None
    """Whether to compute LPIPS, the learned perceptual distance, too; null does so where its weights are at hand."""


@dataclass(frozen=True)
class RuleTest:
    """A way in which a rule of a gate compares a figure with a limit; `gate/rulings.py` has a function for each.

    Attributes:
        passes: when it passes, in words.
        figure: what it compares: the `value` of a metric, its `change` from the reference's, or, of single prompts,
            whether they are `zero`, the `worst` one, or the `share` of those beyond the limit.
        side: on which side of the limit the figure is to be; in a change more is better.
        takes: the keys of a rule of which it needs one.
        needs: keys that it needs besides.
        reads: further keys that it reads.
        of_ratios: whether it tests speed and memory, too.
    """

    passes: str
    figure: Literal["value", "change", "zero", "worst", "share"]
    side: Literal["least", "most", "both"]
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    of_ratios: bool = False

    @property
    def by_prompt(self) -> bool:
        """Whether it needs a value for each prompt."""
        return self.figure in ("zero", "worst", "share")

    @property
    def has_bounds(self) -> bool:
        """Whether bounds decide, which take some prompts; the others pass or fail by a single one."""
        return self.figure not in ("zero", "worst")


_MARGINS = ("margin", "deviations")

_LIMITS = ("limit", "limits", "of_seeds")

TESTS = {
    "non_inferior": RuleTest(
        "the difference to the reference is not worse than the margin",
        "change",
        "least",
        takes=_MARGINS,
        reads=("least",),
    ),
    "equivalent": RuleTest(
        "the difference is within the margin on both sides",
        "change",
        "both",
        takes=_MARGINS,
        reads=("least",),
    ),
    "at_least": RuleTest(
        "the value is not below the limit",
        "value",
        "least",
        takes=_LIMITS,
        of_ratios=True,
    ),
    "at_most": RuleTest(
        "the value is not above the limit",
        "value",
        "most",
        takes=_LIMITS,
        reads=("of_floor", "least"),
        of_ratios=True,
    ),
    "within": RuleTest(
        "the value lies between two numbers",
        "value",
        "both",
        needs=("low", "high"),
    ),
    "exact": RuleTest("the value is zero for every prompt", "zero", "both"),
    "rarely": RuleTest(
        "at most a share of the prompts exceeds the limit: a mean hides a few bad images",
        "share",
        "most",
        takes=_LIMITS,
        needs=("share",),
        reads=("least",),
    ),
    "every": RuleTest(
        "no prompt exceeds the limit",
        "worst",
        "most",
        takes=_LIMITS,
        reads=("of_floor", "least"),
    ),
}
"""The tests of rules, by name."""


@dataclass(frozen=True)
class Rule(Configured):
    """One line of a gate: a metric, one of `TESTS`, and what that takes."""

    metric: str = ""
    """Name of the metric, without the name of its feature extractor; the run's own extractor is used."""
    test: Annotated[str, OneOf(TESTS)] = "non_inferior"
    margin: Amount | None = None
    """Allowed difference, in the metric's unit."""
    deviations: Amount | None = None
    """Instead of `margin`: a share of the calibration's standard deviation for one prompt."""
    limit: Bound | None = None
    limits: dict[str, float] = field(default_factory=dict)
    """Instead of `limit`: a limit for each coarsest type of the reference's arithmetic (`float32`, `float16`,
    `bfloat16`), because the rounding of that type sets the difference between two equivalent computations."""
    of_seeds: Amount | None = None
    """Instead of `limit`: a share of the calibrated mean between two images of a prompt from different noise."""
    of_floor: Positive | None = None
    """In addition to one of these: the limit is at most this multiple of the numerical floor, the mean difference
    between two baselines that compute in different orders. The cap does not apply if the two sides differ in
    precision, where the floor is not meaningful."""
    least: Amount = 0.0
    """Lower bound of the limit from `of_seeds`, `deviations` and `of_floor`, whose reference values may be zero."""
    share: Fraction | None = None
    """For `rarely`: allowed share of the prompts."""
    low: Bound | None = None
    high: Bound | None = None
    confidence: Confidence | None = 0.95
    """One-sided confidence level; null tests the estimate itself, as benchmarks with published windows do."""
    optional: bool = False
    """Whether the rule is left out, and that said, where none of the chosen features can measure its metric."""

    @property
    def how(self) -> RuleTest:
        """The test."""
        return TESTS[self.test]


@dataclass(frozen=True)
class Gate(Configured):
    """Named rules by contract, and the requirements for claims of speed or memory."""

    name: str = "none"
    rules: dict[str, list[Rule]] = field(default_factory=dict)
    """Rules by contract (`exact`, `equivalent`, `lossy`)."""
    must_pay: bool = True
    """Whether an option that claims latency or memory must show a gain: above what two identical baselines differ by,
    and corrected for all claims of the study."""
    spare_memory: Share | None = None
    """Growth of peak memory by less than this share of the device's memory, or of the machine's on a CPU, is no harm.
    Null is 0.02 on a GPU, and 0 on a CPU, whose memory other programs share."""
    confidence: Confidence = 0.95
    """Confidence level for all claims of a gain together: any of them is false with a probability of at most
    1 - `confidence`."""
    report_only: bool = False
    """Whether verdicts are only shown and logged, with exit code 0."""
    undecided_passes: bool = False
    """Whether a variant about which the measurements do not decide ends with exit code 0 instead of 3, as on a busy
    runner of CI. What could not be measured or compared still ends with 3."""
    replicates: UpTo1000 = 3
    """Processes per variant if `protocol.replicates` is null."""
    prompt_count: UpToMillion = 24
    """Prompts of the quality pass if `quality.prompt_count` is null."""
    calibration: str | None = None
    """A file written by `sdopt calibrate`; null is the packaged file for the model and workload. A calibration for
    other steps, guidance, size, scheduler or task is applied only if it is named here."""

    @property
    def judges(self) -> bool:
        """Whether the gate has any rules."""
        return bool(self.rules)


@dataclass(frozen=True)
class Edge(Configured):
    """A comparison of a candidate with a reference, and what the difference is credited to.

    In a configuration "" stands for the options in which the two differ.
    """

    candidate: str
    reference: str
    credit: str = ""


def wrong_name(name: str) -> str | None:
    """Returns why a name cannot name a study and its folders; None if it can."""
    if not name.strip():
        return "must not be empty"
    if len(name) > _LONGEST_NAME:
        return f"must have at most {_LONGEST_NAME} characters"
    if name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return "must be a name, not a path: no / and no \\, no control character, and not . or .."
    return None


def wrong_label(name: str) -> str | None:
    """Returns why a name cannot name a variant, which must be one line of text; None if it can."""
    return (
        None
        if name.strip() and name.isprintable()
        else "must be one line of text, and not empty"
    )


_LONGEST_NAME = 120
"""Leaves room for a date and a suffix within the 255 bytes of a file name."""
