"""Types that a study and its workers exchange, besides the recorded figures."""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from sdopt.results.records import Status
from sdopt.results.samples import GpuState, Memory


class WorkerError(Exception):
    """A worker could not answer: `status` says how it ended, `reason` why, in a line or two.

    Args:
        status: the status of the variant.
        reason: the reason for it.
        may_be_memory: whether the failure looks like a lack of memory without proving it: the kernel then kills with
            SIGKILL, and some libraries crash, or raise errors that do not name the cause.
    """

    def __init__(self, status: Status, reason: str, may_be_memory: bool = False) -> None:
        self.status, self.reason, self.may_be_memory = status, reason, may_be_memory
        super().__init__(status, reason, may_be_memory)  # all of them, because the error is pickled

    @property
    def out_of_memory(self) -> bool:
        """Whether the worker may have lacked memory that other processes held."""
        return self.may_be_memory or self.status is Status.OUT_OF_MEMORY


@dataclass(frozen=True)
class Compiled:
    """The graphs that compilers made within one call."""

    seconds: float
    """Time that the compilers report."""
    graphs: int
    packages: int = 0
    """Packages that were compiled to disk, from where a new process loads them."""
    earlier_s: float = 0.0
    """Time that other processes had taken to compile the packages that were loaded."""


class Mark(StrEnum):
    """A message that a worker sends around a call, so that the parent can time the call, too."""

    BEGUN = "begun"
    ENDED = "ended"


@dataclass(frozen=True)
class SampledImage:
    """One image of a timed call."""

    prompt_index: int
    image_index: int
    pixels: np.ndarray
    """uint8 (height, width, 3)."""


@dataclass(frozen=True)
class TimedCall:
    """One call from prompts to images in the host's memory."""

    seconds: float
    gpu: GpuState | None
    """The state of the device right after the call; None on a CPU, and without NVML."""
    compiled: Compiled
    memory: Memory | None = None
    """The peak memory of the call, if requested."""
    image: SampledImage | None = None
    observed_s: float | None = None
    """Time of the call by the parent's clock; valid only if the parent waited for no other worker meanwhile."""
    over_after_s: float | None = None
    """Time by the parent's clock from the request to the end of the call."""
    around_s: float | None = None
    """Time by the parent's clock from the request to the answer, without the call itself."""

    @property
    def absurd(self) -> str:
        """Why the time cannot be true; "" if it can."""
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            return f"its clock says that a call took {self.seconds:g} s"
        if self.over_after_s is not None and self.seconds > 1.01 * self.over_after_s:
            claim = f"its clock says that a call took {self.seconds:.3g} s"
            return f"{claim}, but the call was over after {self.over_after_s:.3g} s"
        return ""


MESSAGE_S = 0.01
"""Seconds that the messages around a call, and waiting for them, may take on a busy machine."""
