"""Defines the schema of `result.json`: a study's measurements, from which all tables and trackers are made."""

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.schema import (
    CHOICES,
    WORK,
    Gate,
    Hardware,
    Model,
    Protocol,
    Quality,
    Scheduler,
    Shape,
    Sheet,
    Task,
    Tracking,
    Workload,
)

SCHEMA_VERSION = 2
"""Version of the schema, raised with every change that breaks earlier readers; see `sdopt.results.migration`."""


@dataclass(frozen=True)
class RecordedConfig:
    """The composed configuration of a study or of one variant: sections typed, options as they were composed."""

    model: Model = field(default_factory=Model)
    task: Task = field(default_factory=Task)
    scheduler: Scheduler = field(default_factory=Scheduler)
    workload: Workload = field(default_factory=Workload)
    protocol: Protocol = field(default_factory=Protocol)
    quality: Quality = field(default_factory=Quality)
    gate: Gate = field(default_factory=Gate)
    hardware: Hardware = field(default_factory=Hardware)
    tracking: Tracking = field(default_factory=Tracking)
    study: dict[str, Any] = field(default_factory=dict)
    """The design with its own keys."""
    options: dict[str, Any] = field(default_factory=dict)
    """By axis, the keys of its option (`_target_` and arguments), or of several options that combine, by name."""
    objective: tuple[str, ...] = ()
    """Names of the metrics that a sweeper optimises."""
    dry_run: bool = False

    @property
    def replicates(self) -> int:
        """Processes per variant."""
        return self.protocol.replicates or 1

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the timed calls, the main one first."""
        return self.workload.shapes(self.model)

    def at(self, shape_index: int) -> "RecordedConfig":
        """Returns the configuration with the shape at this index as its only one; for the main shape, itself."""
        if not shape_index:
            return self
        return replace(self, workload=self.workload.at(self.shapes[shape_index]))

    @property
    def images_per_call(self) -> int:
        """Number of images that one call of the pipeline makes at the main shape."""
        return self.shapes[0].batch_size * self.workload.images_per_prompt

    @property
    def random_weights(self) -> bool:
        """Whether the model is untrained: its images show only how far variants agree."""
        return self.model.weights == "random"

    def flat(self) -> dict[str, Any]:
        """Returns every key by its full name, as on a command line (`workload.steps`), including the options' axes."""
        sections = asdict(self)
        return _flat(sections | sections.pop("options"))

    def differing(self, other: "RecordedConfig", sections: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """Returns the keys of some sections in which two configurations differ, by full name, with both values."""
        pairs = {section: (vars(getattr(self, section)), vars(getattr(other, section))) for section in sections}
        return {
            f"{section}.{key}": (mine[key], theirs[key])
            for section, (mine, theirs) in pairs.items()
            for key in mine
            if mine[key] != theirs[key]
        }

    def incomparable_work(self, other: "RecordedConfig") -> dict[str, tuple[Any, Any]]:
        """Returns the keys of the work and the hardware in which two variants differ and must not, with both values.

        What a candidate may choose (`CHOICES`) is part of the comparison.
        """
        differing = self.differing(other, (*WORK, "hardware")).items()
        return {key: values for key, values in differing if not key.startswith(CHOICES)}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


class Status(StrEnum):
    """How a variant ended."""

    PENDING = "pending"
    OK = "ok"
    NOT_ENGAGED = "not_engaged"
    """It ran, but an optimization left no evidence of having taken effect."""
    SKIPPED = "skipped"
    """It cannot run here, or its choices conflict; nothing was loaded."""
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    TIMEOUT = "timeout"
    """A request took longer than `protocol.timeout_s`, and its process was killed."""
    INTERRUPTED = "interrupted"

    @property
    def measured(self) -> bool:
        """Whether the variant's figures may be shown: an option without effect still has a latency."""
        return self in (Status.OK, Status.NOT_ENGAGED)

    @property
    def failure(self) -> bool:
        """Whether something went wrong, so that `retry_failed=true` measures it again."""
        return self in (Status.FAILED, Status.OUT_OF_MEMORY, Status.KILLED, Status.TIMEOUT)

    @property
    def timed(self) -> bool:
        """Whether the variant's samples may be compared: also samples of an interrupted study."""
        return self.measured or self is Status.INTERRUPTED


@dataclass
class Evidence:
    """The evidence that one optimization took effect, or did not."""

    axis: str
    option: str
    engaged: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Memory:
    """Memory of one worker process, in GiB.

    `process_*` is the growth of the process's resident set since before the model was loaded; `cuda_*` is the memory of
    PyTorch's allocator on the device; `nvml_process_gib` is the process's memory on the device by the driver's count.
    """

    process_loaded_gib: float
    process_peak_gib: float | None
    """None if the kernel keeps no high-water mark that can be reset, as in some sandboxes."""
    cuda_loaded_gib: float | None = None
    cuda_peak_allocated_gib: float | None = None
    cuda_peak_reserved_gib: float | None = None
    nvml_process_gib: float | None = None
    cuda_graph_pools_gib: float | None = None
    """Memory of CUDA graphs for their replays that the peak of allocated memory does not count."""
    cuda_elsewhere_gib: float | None = None
    """Known device memory that libraries hold outside PyTorch's allocator, such as DeepSpeed's workspace."""
    children_peak_gib: float = 0.0
    """Peak of the host memory of all processes that the worker started."""
    nvml_children_gib: float | None = None
    """Last device memory of these processes, by the driver's count; None if it gives none."""

    @property
    def headline(self) -> tuple[str, float] | None:
        """The figure from which memory ratios are computed, with its name; None if it could not be measured.

        It covers the worker and all processes that it started.
        """
        if self.cuda_peak_allocated_gib is not None:
            others = (self.cuda_graph_pools_gib, self.cuda_elsewhere_gib, self.nvml_children_gib)
            return "peak_allocated_gib", self.cuda_peak_allocated_gib + sum(other or 0.0 for other in others)
        return None if self.peak_process_gib is None else ("peak_process_gib", self.peak_process_gib)

    @property
    def peak_process_gib(self) -> float | None:
        """The peak of host memory of the worker and all processes that it started."""
        return None if self.process_peak_gib is None else self.process_peak_gib + self.children_peak_gib


@dataclass
class GpuState:
    """State of a CUDA device right after one timed call, from NVML; None for values that NVML does not give."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttled: list[str] = field(default_factory=list)
    """Causes that held the clocks down during the call."""
    others: float | None = None
    """Share of the time for which other processes than the study's ran kernels on the device, as the driver samples
    it."""


@dataclass
class Interference:
    """Counted causes that kept the processor from one worker during one timed call, from the kernel's counters.

    They include all processes that the worker started. No cause is derived from the call's time.
    """

    waited: float
    """Time for which its threads waited for a core while others ran on the cores that it may use: as a share of the
    processor time that it asked for, or of the call's time where that is more."""
    stolen: float
    """Share of the time of those cores that the hypervisor gave to others."""
    major_faults: int = 0
    """Pages that had to be read from disk."""
    switched_out: int = 0
    """How often a thread lost its core before it was done."""
    cpu_mhz: float | None = None
    """Mean frequency of those cores right after the call; None if it is not known."""
    unaccounted: float = 0.0
    """Share of the call, as the study's own process timed it, that the worker's clock leaves out, beyond what messages
    take."""
    cores: float | None = None
    """Time for which its threads ran or waited for a core, over the time of the call: how many cores it asked for."""


@dataclass
class TimedImage:
    """Comparison of a timed call's image with the image drawn in the quality pass from the same prompt and noise."""

    prompt_index: int
    image_index: int
    error: float | None
    """Mean squared difference of the two, as shares of the whole range; None if there is no drawn one."""


@dataclass(kw_only=True)
class ShapeSamples:
    """Raw samples of one worker process at one shape; all times in seconds."""

    cold_start_s: float | None = None
    """The first call at this shape, compilation and autotuning included; of the first process of a variant alone."""
    compile_s: float | None = None
    """Compile time within that call, as the compiler reports it; only for the first process."""
    earlier_compile_s: float | None = None
    """Time that earlier processes took to compile the packages that were loaded in that call; None without packages."""
    graphs: int | None = None
    """Graphs that were compiled in that call; None if nothing is compiled."""
    recompiles: int | None = None
    """Graphs that were compiled in later calls at this shape; None if nothing is compiled."""
    warmup_s: list[float] = field(default_factory=list)
    """Further calls before all processes are ready, two processes at a time on a CPU."""
    discarded_s: list[float] = field(default_factory=list)
    """An untimed round after the warm-up of all processes, two processes at a time on a CPU: those that started early
    have been idle for long."""
    latency_s: list[float] = field(default_factory=list)
    """End-to-end time of one call, by round, until its images are bytes in the host's memory; in blocks, of the block's
    own rounds. Prompts and noise differ between rounds, and are the same for all variants."""
    observed_s: list[float] = field(default_factory=list)
    """The same times by the clock of the study's own process, in the order of `latency_s`."""
    around_s: list[float] = field(default_factory=list)
    """Time from the request for each timed call to its answer, less the call itself, in the order of `latency_s`."""
    held_gib: list[float] = field(default_factory=list)
    """Memory that the worker, with all that it started, held after each timed call, in the order of `latency_s`: what
    PyTorch has allocated on a GPU and the driver counts of children, else the resident set."""
    timed_images: list[TimedImage] = field(default_factory=list)
    """Comparisons of some timed calls' images with drawn ones; at the main shape, if images are drawn."""
    repeated: int = 0
    """Timed calls whose prompts and noise the process had been given before, because there were too few prompts."""
    latency_before_s: list[float] = field(default_factory=list)
    """In blocks: the baseline measured just before this process, by round; without `latency_after_s` the block broke
    off, and its samples are paired with nothing."""
    latency_after_s: list[float] = field(default_factory=list)
    gpu: list[GpuState] = field(default_factory=list)
    """State of the device after each timed call, in the order of `latency_s`; empty without NVML."""
    interference: list[Interference | None] = field(default_factory=list)
    """What disturbed each timed call, in the order of `latency_s`; empty if the kernel does not count."""
    left_out: list[int] = field(default_factory=list)
    """Indices in `latency_s` of the rounds that are left out, because others disturbed them: in a session of
    interleaved rounds the same for all processes; in blocks each block's own. The same at all shapes."""
    memory: Memory | None = None
    evidence: list[Evidence] = field(default_factory=list)
    denoiser_busy_s: float | None = None
    """Seconds for which the device worked in one call of the denoiser, from the trace; None on a CPU."""
    traced: dict[str, float] = field(default_factory=dict)
    """What ran in the traced call, as sdopt itself counted it: operators, kernels, types, calls, MiB of parameters; of
    the first process of a variant alone."""

    @property
    def deciding_s(self) -> list[float]:
        """End-to-end times of the rounds that count, in their order."""
        dropped = set(self.left_out)
        return [seconds for index, seconds in enumerate(self.latency_s) if index not in dropped]


@dataclass
class Measurement(ShapeSamples):
    """Measurements of one worker process, at the main shape of its workload and, in `further`, at all others."""

    replicate: int
    session: Annotated[int, Field(alias="sitting")] = 0
    """Number of the session that it belongs to. Only samples of the same session are paired."""
    load_s: float | None = None
    """None for all but the first process of a variant: the others are loaded, and called first, beside each other."""
    stages_s: dict[str, list[float]] = field(default_factory=dict)
    """Instrumented calls: `text_encoder`, `vae_encoder`, `denoiser_step` (one sample a step), `vae_decoder`."""
    energy_j: list[float] = field(default_factory=list)
    """Energy of the whole device in one call, in joules: the mean of calls made back to back for some seconds."""
    memory_after: Memory | None = None
    """Memory after the last round; its peak is that of all calls since `memory` was measured."""
    idle_cpu: float | None = None
    """Processor time that the worker, with all that it started, used between its timed calls, as a share of that time
    on one core; None if others do not work beside it, or the kernel does not count."""
    drawn_s: list[float] = field(default_factory=list)
    """Times, by the clock of the study's own process, of some calls with prompts of the quality pass, from noise that
    no study has used before, made while no other process worked; of the first process of a variant alone."""
    drawn_batch: int | None = None
    """Prompts in each of these calls."""
    drawn_beside_s: list[float] = field(default_factory=list)
    """Times of the same calls in a process of the baseline, each made right before or after the one in `drawn_s`; empty
    for the baseline itself, and if no process of it was left beside this one."""
    other_noise: list[float] = field(default_factory=list)
    """Mean squared difference of each image of these calls from the one of the same prompt that is kept."""
    pass_s: list[float] = field(default_factory=list)
    """Time of each call of the quality pass, less what it waited for a core: two processes draw at a time on a CPU. Of
    the first process of a variant alone; empty if images were cached."""
    pass_held_gib: list[float] = field(default_factory=list)
    """Memory held after each of these calls, as in `held_gib`."""
    complete: bool = False
    """Whether evidence, stages and images were taken after its rounds."""
    further: list[ShapeSamples] = field(default_factory=list)
    """Samples at the further shapes, in the order of `RecordedConfig.shapes`; each was first called after the ones
    before it."""

    @property
    def shapes(self) -> list[ShapeSamples]:
        """The samples at each shape, the main one first."""
        return [self, *self.further]

    @property
    def memories(self) -> list[Memory]:
        """Its memory readings: in a call, and, unless it served several shapes, after the last round."""
        return [memory for memory in (self.memory, None if self.further else self.memory_after) if memory]

    @property
    def peak(self) -> tuple[str, float] | None:
        """Its largest measured peak of memory, with its name; None without one."""
        found = [memory.headline for memory in self.memories if memory.headline]
        return max(found, key=lambda one: one[1], default=None)

    def at(self, shape_index: int) -> "Measurement":
        """Returns the measurement with the shape at this index as its main one; samples are not copied."""
        return Measurement(self.replicate, self.session, **vars(self.further[shape_index - 1])) if shape_index else self


@dataclass
class ImageRecord:
    """One generated image; `path` is relative to the run's folder.

    `finite` says that neither its latents nor its pixels held a NaN or an infinity before they became bytes.
    """

    prompt: str
    prompt_index: int
    image_index: int
    seed: int
    path: str
    finite: bool = True


@dataclass
class Score:
    """One quality metric, of a variant's images or of a comparison's pairs; None stands for what is not finite.

    `per_prompt` is the mean over the images of each prompt, in the order of the prompts. A metric of a whole set of
    images, which has no value per prompt, has `leave_one_out` instead: its value without the images of each prompt.
    """

    estimate: float | None
    per_prompt: list[float | None] = field(default_factory=list)
    leave_one_out: list[float | None] = field(default_factory=list)
    note: str = ""
    """Why there is no estimate, or a remark on it."""
    worst: list[float | None] = field(default_factory=list)
    """The largest value of the images of each prompt, where a prompt has several: a mean hides one of eight."""


@dataclass
class Spread:
    """How far two baselines differ in one quality metric.

    `mean` is the mean of the distance, of a metric that compares two images, else of the difference; `deviation` is
    the standard deviation of one prompt's difference (of one pseudo-value, where the metric has no values by prompt).
    """

    mean: float
    deviation: float
    n: int


@dataclass
class BrokenImage:
    """An image that no intact pipeline would draw; `path` is relative to the run's folder, "" for all together."""

    wire: str
    path: str
    detail: str


@dataclass
class Promise:
    """What one optimization promises about the images, and what it is for: `latency`, `memory` or nothing."""

    contract: Contract
    claims: list[str]


@dataclass
class VariantResult:
    """One point of the ablation."""

    name: str
    role: str
    """`variant`, or `control`: the second baseline of the A/A comparison."""
    choices: dict[str, str]
    overrides: list[str]
    config: RecordedConfig
    contract: Contract = Contract.EXACT
    status: Status = Status.PENDING
    reason: str = ""
    measurements: list[Measurement] = field(default_factory=list)
    images: list[ImageRecord] = field(default_factory=list)
    content_key: str = ""
    """Hash of all settings that decide the images: two variants with the same key have the same images."""
    quality: dict[str, Score] = field(default_factory=dict)
    trips: list[BrokenImage] = field(default_factory=list)
    denoiser_calls: int | None = None
    """Number of denoiser runs in one call of the pipeline."""
    promises: dict[str, Promise] = field(default_factory=dict)
    """By axis, what its optimizations promise."""
    snippets: dict[str, list[str]] = field(default_factory=dict)
    """By axis, in the order in which they are applied, diffusers' code for its optimizations; [] if only sdopt has
    one."""
    tflop_per_image: float | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    """Digests of the weights, prompts and user's code that it was measured with."""

    @property
    def is_control(self) -> bool:
        """Whether it is the second baseline of the A/A comparison."""
        return self.role == "control"

    @property
    def samples(self) -> dict[int, list[float]]:
        """End-to-end times at the main shape of the rounds that decide, by replicate: of all its sessions in turn."""
        found: dict[int, list[float]] = {}
        for measurement in self.measurements:
            if measurement.latency_s:
                found.setdefault(measurement.replicate, []).extend(measurement.deciding_s)
        return found

    def at(self, shape_index: int) -> "VariantResult":
        """Returns the result with the shape at this index as its main one; only the first shape has images."""
        if not shape_index or len(self.config.shapes) == 1:
            return self
        return replace(
            self,
            config=self.config.at(shape_index),
            measurements=[measurement.at(shape_index) for measurement in self.measurements],
            images=[],
            quality={},
            trips=[],
            tflop_per_image=None,
        )

    def promises_beside(self, other: "VariantResult") -> list[Promise]:
        """Returns what its options promise on the axes where it differs from another variant."""
        mine, theirs = self.choices, other.choices
        return [promise for axis, promise in self.promises.items() if mine.get(axis) != theirs.get(axis)]

    def image(self, prompt_index: int, image_index: int) -> ImageRecord | None:
        """Returns one image of a prompt; None if it was not drawn."""
        place = prompt_index, image_index
        return next((record for record in self.images if (record.prompt_index, record.image_index) == place), None)

    @property
    def broken_images(self) -> int:
        """Number of images that tripped a wire; all of them if a tripwire for all images together tripped."""
        tripped = {trip.path for trip in self.trips}
        return len(self.images) if "" in tripped else len(tripped)


@dataclass
class Interval:
    """An estimate with a two-sided confidence interval; without bounds where there were too few samples for one."""

    estimate: float
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    n: int = 0
    unit: str = "round"
    """What was replicated: `round` (within one process) or `process`."""


@dataclass
class BreakEven:
    """Start-up cost of a candidate, and the number of images after which its faster calls have repaid it.

    `images` is None if its calls are no faster than the reference's, so that the cost is never repaid; also if the two
    differ by no more than the A/A floor, so that nothing is known. The bounds come from the speed-up's; without
    `confidence` there are none. `images_high` is None if the interval includes no gain.
    """

    first_image_s: float
    """Loading and the first call, with what is compiled, quantized or captured in them."""
    extra_s: float
    """By how much the start-up is longer than the reference's: loading and the first call at each of `shapes`."""
    call_s: float
    """Time of one call of the reference."""
    images: float | None
    images_low: float | None = None
    images_high: float | None = None
    confidence: float | None = None
    shapes: int = 1
    """Number of shapes whose first calls count in `extra_s`; `images` are those of the main shape."""
    within_floor: bool = False
    """Whether the calls of the two differ by no more than the A/A floor."""

    @property
    def is_slower(self) -> bool:
        """Whether the start-up takes longer by more than one call of the reference."""
        return self.extra_s > self.call_s


@dataclass(kw_only=True)
class ShapeRatios:
    """How two variants compare at one shape.

    `speedup` is time of the reference over time of the candidate; `memory_ratio` is memory of the candidate over that
    of the reference, and `tail_ratio` the largest call of a process over that of the reference's. `floor` is the ratio
    by which the speed of two identical workers differed: a claim must exceed it.
    """

    speedup: Interval | None = None
    memory_ratio: Interval | None = None
    tail_ratio: Interval | None = None
    floor: float | None = None


@dataclass
class Comparison(ShapeRatios):
    """A comparison of the study: a candidate, its reference, and the option to which the difference is credited.

    Its own ratios are those at the main shape.
    """

    candidate: str
    reference: str
    credit: str
    break_even: BreakEven | None = None
    note: str = ""
    quality: dict[str, Score] = field(default_factory=dict)
    """Distances between the paired images of both sides."""
    further: list[ShapeRatios] = field(default_factory=list)
    """At the further shapes, in the order of `RecordedConfig.shapes`."""

    @property
    def shapes(self) -> list[ShapeRatios]:
        """The ratios at each shape, the main one first."""
        return [self, *self.further]

    def at(self, shape_index: int) -> "Comparison":
        """Returns the comparison with the shape at this index as the main one."""
        if not shape_index:
            return self
        sides = self.candidate, self.reference, self.credit
        return Comparison(*sides, note=self.note, **vars(self.further[shape_index - 1]))


class Verdict(StrEnum):
    """A gate's verdict on a rule, a variant or a study; of several, the worst counts, in this order."""

    PASS = "pass"
    INCONCLUSIVE = "inconclusive"
    """The interval includes the margin: more prompts, rounds or processes would decide."""
    NOT_COMPARABLE = "not comparable"
    """Something is missing, not finite, or belongs to other work."""
    FAIL = "fail"


class Payoff(StrEnum):
    """What a gate found of an option's claims of a gain; its reason begins with the same word."""

    PAYS = "it pays"
    """A gain holds together with all other claims of the study."""
    HARM = "harm"
    """The option harms a measure that it claims to improve."""
    NO_BENEFIT = "no benefit"
    """It does no harm, and every gain that counts is excluded."""


@dataclass
class Ruling:
    """One rule applied to one comparison. `low` and `high` are one-sided bounds, each at the rule's confidence."""

    rule: str
    metric: str
    verdict: Verdict
    reason: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    payoff: Payoff | None = None
    """Of the rule that an option must pay; None for other rules, and where its claims are open."""
    doubt: str = ""
    """What keeps an inconclusive ruling open whatever its bounds say; rulings of one comparison may share it."""

    @property
    def because(self) -> str:
        """What decided the ruling: the doubt if there is one, else the reason."""
        return self.doubt or self.reason

    @property
    def text(self) -> str:
        """The reason, and the doubt if there is one."""
        return f"{self.reason}; but {self.doubt}" if self.doubt else self.reason


@dataclass
class Judgement:
    """A gate's verdict on one comparison: the worst of its rulings."""

    candidate: str
    reference: str
    credit: str
    contract: Contract
    verdict: Verdict
    rulings: list[Ruling]
    note: str = ""
    claims: dict[str, float] = field(default_factory=dict)
    """For each measure in which the candidate claims a gain, the one-sided p value that there is none that counts."""
    gains: list[str] = field(default_factory=list)
    """Measures in which a gain holds together with all other claims of the study."""


@dataclass
class Look:
    """One judging of one comparison: a digest of its data, and the share of the error rate α that it spent."""

    candidate: str
    reference: str
    gate: str
    judged: str
    data: str
    """Digest of the judged data: judging the same data again is the same look."""
    number: int
    allowed: int
    """Number of looks that the first look planned; later ones decide nothing."""
    spent: float
    """Share of α, over all looks so far; 1 is all of it."""
    processes: int
    rounds: int
    prompts: int
    verdict: Verdict


@dataclass
class Effect:
    """Of a factorial study: one option's main effect, or the interaction of two, as ratios.

    `aliased_with` names the effects that the measured variants cannot tell it apart from; it has no figure then.
    """

    options: tuple[str, ...]
    speedup: Interval | None = None
    memory_ratio: Interval | None = None
    aliased_with: list[str] = field(default_factory=list)


@dataclass
class Environment:
    """The machine, the device and the software with which a study ran."""

    sdopt_version: str
    sdopt_commit: str | None
    sdopt_dirty: bool | None
    python: str
    platform: str
    packages: dict[str, str]
    device: dict[str, Any]
    cpu: dict[str, Any]
    start_method: str
    command: list[str]
    code: str | None = None
    """Digest of sdopt's own Python files."""
    sheet: Sheet | None = None
    """The device's data sheet, if there is one."""
    gpu: dict[str, Any] = field(default_factory=dict)
    """Settings of the CUDA device, and the other processes on it, when the study began."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that were set and change how the libraries compute."""
    host: str = ""
    """The machine's name in its network."""
    warnings: list[str] = field(default_factory=list)
    """Deviations from the request: why `auto` chose the CPU, or why workers start slowly."""


@dataclass
class Schedule:
    """How the rounds were laid out: `interleaved`, or `blocks` with the reason and the drift of the baseline.

    `drift` holds, per block, the reference's time after the block over that before it.
    """

    kind: str = "interleaved"
    reason: str = ""
    drift: dict[str, float] = field(default_factory=dict)


@dataclass
class MeasurementSession:
    """One session of measuring with its own processes: the first, or a later one that measured what was missing.

    A session that times anything measures its own baseline and A/A control, because processes of different sessions
    are not comparable.
    """

    started: str
    schedule: str = "interleaved"
    disturbed_by: list[str] = field(default_factory=list)
    """Other studies that were measured on the same device at the same time."""


@dataclass
class Precision:
    """The course of a study with `protocol.precision` after its pilot, the first `protocol.replicates` processes."""

    needed: dict[str, int] = field(default_factory=dict)
    """By candidate, the number of processes that its speed-ups need, estimated from the pilot's deviation."""
    granted: int = 0
    """Processes of each variant, of those that it needs, that were to be measured so far."""
    spent_s: float = 0.0
    """Time that measuring took, the pilot included."""
    stopped: str = ""
    """Why the study ended before all candidates had the processes that they need; "" if they have them."""


@dataclass
class StudyResult:
    """Everything that one study found."""

    name: str
    design: str
    started: str
    environment: Environment
    config: RecordedConfig
    variants: list[VariantResult]
    comparisons: list[Comparison]
    baseline: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the study, by which a tracker recognises it."""
    schema_version: int = SCHEMA_VERSION
    finished: str | None = None
    floor: float | None = None
    """Ratio by which the two baseline workers differed, as in 1.02."""
    schedule: Schedule = field(default_factory=Schedule)
    """Of the last session; its drift is that of all blocks."""
    sessions: Annotated[list[MeasurementSession], Field(alias="sittings")] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    gate: str = ""
    """The gate that judged, and its verdict on each comparison."""
    judgements: list[Judgement] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    """Every judging of a comparison so far, the first one first."""
    redrawn: dict[str, list[ImageRecord]] = field(default_factory=dict)
    """The baseline's images drawn again: in other batches (`numerical`), and from other noise (`sampling`)."""
    feature_digests: dict[str, str] = field(default_factory=dict)
    """Hashes of the weights of the networks that quality was computed with."""
    floors: dict[str, dict[str, Spread]] = field(default_factory=dict)
    """How far two baselines differ, by quality metric: where they compute in another order (`numerical`: other batches
    and threads), and where they start from other noise (`sampling`). They are shown beside margins, which are fixed
    beforehand, and never made into one."""
    precision: Precision | None = None
    """The course of a study with `protocol.precision`; None without it."""
    status: str = "running"
    """`running`, `finished`, `interrupted`, or `crashed` by a mistake of sdopt's own."""

    def variant(self, name: str) -> VariantResult:
        """Returns the variant of a name. Raises UsageError if there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        names = ", ".join(variant.name for variant in self.variants)
        raise UsageError(f"variant={name}: not in the study; choose one of {names}")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes at which all variants were timed, the main one first; a single shape may differ by variant."""
        return self.config.shapes

    def at(self, shape_index: int) -> "StudyResult":
        """Returns the result with the shape at this index as its main one, to derive its figures."""
        if not shape_index:
            return self
        control = self.first_comparison(self.control.name) if self.control else None
        return replace(
            self,
            config=self.config.at(shape_index),
            variants=[variant.at(shape_index) for variant in self.variants],
            comparisons=[comparison.at(shape_index) for comparison in self.comparisons],
            floor=control.shapes[shape_index].floor if control else None,
        )

    @property
    def confidence(self) -> float:
        """Confidence of the two-sided intervals; a gate's one-sided bounds have the confidence of their rule."""
        return self.config.protocol.confidence

    def replicates_of(self, variant: str) -> int:
        """Returns how many processes a variant needs so far: by the protocol, or for its precision."""
        if self.precision is None:
            return self.config.replicates
        return max(self.config.replicates, min(self.precision.granted, self.precision.needed.get(variant, 0)))

    @property
    def control(self) -> VariantResult | None:
        """The second baseline of the A/A comparison."""
        return next((variant for variant in self.variants if variant.is_control), None)

    @property
    def candidates(self) -> list[VariantResult]:
        """All variants but the baseline and the A/A control."""
        return [variant for variant in self.variants if not variant.is_control and variant.name != self.baseline]

    def first_comparison(self, candidate: str) -> Comparison | None:
        """Returns a variant's first comparison, whose scores and ratios are shown; None for the baseline."""
        return next((edge for edge in self.comparisons if edge.candidate == candidate), None)
