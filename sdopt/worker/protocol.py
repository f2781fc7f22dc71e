"""Types that a study and its workers exchange, besides the recorded figures."""

from dataclasses import dataclass, field

import numpy as np

from sdopt.record.records import Status
from sdopt.record.samples import Evidence, GpuState, Memory
from sdopt.record.scores import ImageRecord


class TimeUpError(Exception):
    """The time of a whole study is up: what is measured is kept, and nothing more is asked of any worker."""


class WorkerError(Exception):
    """A worker could not answer: `status` says how it ended, `reason` why, in a line or two.

    Args:
        status: the status of the variant.
        reason: the reason for it.
        may_be_memory: whether the failure looks like a lack of memory without proving it: the kernel then kills with
            SIGKILL, and some libraries crash, or raise errors that do not name the cause.
    """

    def __init__(
        self, status: Status, reason: str, may_be_memory: bool = False
    ) -> None:
        self.status, self.reason, self.may_be_memory = status, reason, may_be_memory
        super().__init__(
            status, reason, may_be_memory
        )  # all of them, because the error is pickled

    @property
    def out_of_memory(self) -> bool:
        """Whether the worker may have lacked memory that other processes held."""
        return self.may_be_memory or self.status is Status.OUT_OF_MEMORY


@dataclass(frozen=True)
class SampledImage:
    """One image of a timed call."""

    prompt_index: int
    image_index: int
    pixels: np.ndarray
    """uint8 (height, width, 3)."""
    finite: bool
    """Whether all pixels were finite before rounding, and all latents."""
    latents: np.ndarray | None = None
    """Its final latents, float32 (channels, height, width); None of an image that is only compared."""


@dataclass(frozen=True)
class TimedCall:
    """One call from prompts to images in the host's memory."""

    seconds: float
    gpu: GpuState | None
    """The state of the device right after the call; None on a CPU, and without NVML."""
    held_gib: float
    """Memory that the worker holds after the call, with all that it started."""
    compile_s: float = 0.0
    """Time that compilers report within the call."""
    graphs: int = 0
    """Graphs that they made."""
    packages: int = 0
    """Packages that were compiled to disk, from where a new process loads them."""
    earlier_compile_s: float = 0.0
    """Time that other processes had taken to compile the packages that were loaded."""
    memory: Memory | None = None
    """The peak memory of the call, if requested."""
    image: SampledImage | None = None
    """One of its images, at a position that changes from call to call."""
    images: tuple[SampledImage, ...] = ()
    """All of them, if requested."""


@dataclass(frozen=True)
class Asked:
    """One image that a server is asked for."""

    prompt: str
    seed: int
    negative: str | None = None
    """What it should not show; None gives the call no negative prompt, which for SDXL is not the same as ""."""
    guidance_scale: float | None = None
    """Its own scale, if the images of a call differ in it; either all or none have one."""


@dataclass(frozen=True)
class Rendered:
    """The images of a server's call."""

    pixels: np.ndarray
    """uint8 (n, height, width, 3), in the order in which they were asked for."""
    finite: list[bool]
    """Whether each image has no value that is infinite or no number."""
    seconds: float
    """Time of the call, from prompts to images in the host's memory."""
    graphs: int
    """Graphs that compilers made within the call."""
    held_gib: float
    """Memory that the worker holds after the call, with all that it started."""
    cut: list[str]
    """What of each image's prompts no text encoder reads; "" where one reads the whole."""


@dataclass(frozen=True)
class TracedCall:
    """What a traced call showed."""

    evidence: list[Evidence]
    """For each optimization, whether it took effect."""
    denoiser_busy_s: float | None
    """Seconds for which the device worked in one call of the denoiser; None on a CPU."""
    counts: dict[str, float]
    """What ran, as sdopt itself counted it: see `Trace.counts`."""
    left_set: list[str]
    """Settings of the whole process that an option changed and did not restore, each with both values."""


@dataclass(frozen=True)
class StagedCall:
    """One call whose stages were timed."""

    stages_s: dict[str, list[float]]
    """Seconds of each stage; of the denoiser, `denoiser_step`, one sample a step."""
    image: SampledImage
    """An image of the call, for which the pipeline itself drew the noise, from the seeds."""
    stages_gib: dict[str, float] = field(default_factory=dict)
    """Peak of memory within each stage, as `StagePeaks` measures it."""


@dataclass(frozen=True)
class Batch:
    """The images of one call of a pass."""

    records: list[ImageRecord]
    seconds: float
    """Time of the call, less what it waited for a core."""
    held_gib: float
    """Memory that the worker holds after the call, with all that it started."""
