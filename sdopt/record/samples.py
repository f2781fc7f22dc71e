"""Records the raw samples of one process: times, memory, evidence, and what disturbed them."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

Seconds = Annotated[float, Field(gt=0)]
"""A time that something took."""

NotNegative = Annotated[float, Field(ge=0)]


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
            others = (
                self.cuda_graph_pools_gib,
                self.cuda_elsewhere_gib,
                self.nvml_children_gib,
            )
            return "peak_allocated_gib", self.cuda_peak_allocated_gib + sum(
                other or 0.0 for other in others
            )
        return (
            None
            if self.peak_process_gib is None
            else ("peak_process_gib", self.peak_process_gib)
        )

    @property
    def peak_process_gib(self) -> float | None:
        """The peak of host memory of the worker and all processes that it started."""
        return (
            None
            if self.process_peak_gib is None
            else self.process_peak_gib + self.children_peak_gib
        )


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
    cores: float | None = None
    """Time for which its threads ran or waited for a core, over the time of the call: how many cores it asked for."""


@dataclass
class Call:
    """One timed call: a process makes one at each shape in each round.

    Prompts and noise differ between rounds, and are the same for all variants.
    """

    seconds: Seconds
    """From prompts until its images are bytes in the host's memory."""
    round: Annotated[int, Field(ge=0)] = 0
    """Number of its round in this process, from 0: rounds of the same number are paired within a session."""
    left_out: bool = False
    """Whether its round is left out because others disturbed it: in a session of interleaved rounds, for all processes
    at all shapes; in blocks, for its block at all shapes."""
    repeated: bool = False
    """Whether the process had been given its prompts and noise before, because there were too few prompts."""
    held_gib: float | None = None
    """Memory that the worker, with all that it started, held after the call: what PyTorch has allocated on a GPU and
    the driver counts of children, else the resident set."""
    interference: Interference | None = None
    """What disturbed it; None if the kernel does not count."""
    gpu: GpuState | None = None
    """State of the device right after it; None without NVML."""

    @property
    def disturbed(self) -> float | None:
        """The share that other work took of the processor or the GPU; None if it is not known."""
        if self.interference is None:
            return None
        return (
            self.interference.waited
            + self.interference.stolen
            + ((self.gpu and self.gpu.others) or 0.0)
        )


@dataclass
class TimedImage:
    """Comparison of a timed call's image with the image drawn in the quality pass from the same prompt and noise."""

    prompt_index: int
    image_index: int
    error: float | None
    """Mean squared difference of the two, as shares of the whole range; None if there is no drawn one."""


@dataclass
class ShapeSamples:
    """Raw samples of one worker process at one shape; all times in seconds."""

    cold_start_s: Seconds | None = None
    """The first call at this shape, compilation and autotuning included; of the first process of a variant alone."""
    compile_s: NotNegative | None = None
    """Compile time within that call, as the compiler reports it; only for the first process."""
    earlier_compile_s: NotNegative | None = None
    """Time that earlier processes took to compile the packages that were loaded in that call; None without packages."""
    graphs: int | None = None
    """Graphs that were compiled in that call; None if nothing is compiled."""
    recompiles: int | None = None
    """Graphs that were compiled in later calls at this shape; None if nothing is compiled."""
    warmup_s: list[Seconds] = field(default_factory=list)
    """Further calls before all processes are ready, two processes at a time on a CPU."""
    discarded_s: list[Seconds] = field(default_factory=list)
    """An untimed round after the warm-up of all processes, two processes at a time on a CPU: those that started early
    have been idle for long."""
    trial_s: list[Seconds] = field(default_factory=list)
    """Further warm calls of a variant whose first call was slow, to find out whether it is clearly slower;
    less the share of each that other work took. The first call is one of them if an option is known to be slow here."""
    trial_beside_s: list[Seconds] = field(default_factory=list)
    """The baseline's calls that these are compared with: before, between and after them, less what other
    work took, and for as many images as the variant's call makes; in blocks, those of its warm-up as they are."""
    calls: list[Call] = field(default_factory=list)
    """Its timed calls, in their order."""
    timed_images: list[TimedImage] = field(default_factory=list)
    """Comparisons of some timed calls' images with drawn ones; at the main shape, if images are drawn."""
    latency_before_s: list[Seconds] = field(default_factory=list)
    """In blocks: the baseline measured just before this process, by round; without `latency_after_s` the block broke
    off, and its samples are paired with nothing."""
    latency_after_s: list[Seconds] = field(default_factory=list)
    memory: Memory | None = None
    evidence: list[Evidence] = field(default_factory=list)
    denoiser_busy_s: NotNegative | None = None
    """Seconds for which the device worked in one call of the denoiser, from the trace; None on a CPU."""
    traced: dict[str, float] = field(default_factory=dict)
    """What ran in the traced call, as sdopt itself counted it: operators, kernels, types, calls, MiB of parameters; of
    the first process of a variant alone."""

    @property
    def latency_s(self) -> list[float]:
        """End-to-end times of all timed calls, in their order."""
        return [call.seconds for call in self.calls]

    @property
    def deciding_s(self) -> list[float]:
        """End-to-end times of the calls that count, in their order."""
        return [call.seconds for call in self.calls if not call.left_out]

    @property
    def deciding_rounds(self) -> list[int]:
        """The numbers of the rounds of these calls."""
        return [call.round for call in self.calls if not call.left_out]


@dataclass
class Measurement:
    """Measurements of one worker process."""

    replicate: Annotated[int, Field(ge=0)]
    session: int = 0
    """Number of the session that it belongs to. Only samples of the same session are paired."""
    shapes: list[ShapeSamples] = field(default_factory=lambda: [ShapeSamples()])
    """Its samples at each shape, in the order of `RecordedConfig.shapes`: it is first called at them in that order."""
    load_s: Seconds | None = None
    """None for all but the first process of a variant: the others are loaded, and called first, beside each other."""
    stages_s: dict[str, list[NotNegative]] = field(default_factory=dict)
    """Instrumented calls: `text_encoder`, `vae_encoder`, `denoiser_step` (one sample a step), `vae_decoder`."""
    stages_gib: dict[str, NotNegative] = field(default_factory=dict)
    """The peak of memory within each stage of these calls, with all weights: allocated on a GPU, else of the worker
    beyond what it held before loading."""
    energy_j: list[float] = field(default_factory=list)
    """Energy of the whole device in one call, in joules: the mean of calls made back to back for some seconds."""
    memory_after: Memory | None = None
    """Memory after the last round; its peak is that of all calls since `memory` was measured."""
    pass_s: list[Seconds] = field(default_factory=list)
    """Time of each call of the quality pass, less what it waited for a core: two processes draw at a time on a CPU. Of
    the first process of a variant alone."""
    pass_held_gib: list[float] = field(default_factory=list)
    """Memory held after each of these calls, as in `Call.held_gib`."""
    spared: bool = False
    """Whether it showed no evidence because `protocol.budget_s` left no time: the first process did."""
    complete: bool = False
    """Whether evidence, stages and images were taken after its rounds."""

    @property
    def main(self) -> ShapeSamples:
        """Its samples at the main shape."""
        return self.shapes[0]

    @property
    def memories(self) -> list[Memory]:
        """Its memory readings: in a call, and, unless it served several shapes, after the last round."""
        memories = (
            self.main.memory,
            None if len(self.shapes) > 1 else self.memory_after,
        )
        return [memory for memory in memories if memory]

    @property
    def peak(self) -> tuple[str, float] | None:
        """Its largest measured peak of memory, with its name; None without one."""
        peaks = [memory.headline for memory in self.memories if memory.headline]
        return max(peaks, key=lambda one: one[1], default=None)

    def at(self, shape_index: int) -> "Measurement":
        """Returns the samples at one shape as a measurement: what was measured at the first alone belongs to that."""
        return (
            Measurement(self.replicate, self.session, [self.shapes[shape_index]])
            if shape_index
            else self
        )
