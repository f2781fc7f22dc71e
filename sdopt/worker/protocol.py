"""What a study and its workers tell each other, beside the figures that are recorded."""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from sdopt.results.records import GpuState, Memory, Status


class WorkerError(Exception):
    """A worker could not answer: `status` says how it ended, `reason` why, in a line or two.

    Args:
        status: how the variant ends.
        reason: why.
        may_be_memory: whether it ended as it does where memory has run out, though that may not be the reason: the
            kernel kills with SIGKILL then, and some errors of libraries do not tell.
    """

    def __init__(self, status: Status, reason: str, may_be_memory: bool = False) -> None:
        self.status, self.reason, self.may_be_memory = status, reason, may_be_memory
        super().__init__(status, reason, may_be_memory)  # all of them, because it travels between processes

    @property
    def starved(self) -> bool:
        """Whether the worker may have lacked memory that other processes held."""
        return self.may_be_memory or self.status is Status.OUT_OF_MEMORY


@dataclass(frozen=True)
class Compiled:
    """What compilers made within one call."""

    seconds: float
    """Time that they themselves say they took."""
    graphs: int


class Mark(StrEnum):
    """What a worker tells while it makes a call, so that the study's own process can time it too."""

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
    """The state of the device right after it; None on a CPU, and without NVML."""
    compiled: Compiled
    memory: Memory | None = None
    """Its peak, where that was asked for."""
    held_gib: float = 0.0
    """Memory held after it, by the worker with all that it started."""
    image: SampledImage | None = None
    observed_s: float | None = None
    """Its time by the clock of the process that asked for it; that is right where no other was asked meanwhile."""
    over_after_s: float | None = None
    """Time by the same clock from the request to the end of the call."""
    around_s: float | None = None
    """Time by the same clock from the request to the answer, less the call itself."""

    @property
    def absurd(self) -> str:
        """Says why its time cannot be true; "" where it can."""
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            return f"its clock says that a call took {self.seconds:g} s"
        if self.over_after_s is not None and self.seconds > 1.01 * self.over_after_s:
            return (
                f"its clock says that a call took {self.seconds:.3g} s, which was over after {self.over_after_s:.3g} s"
            )
        return ""


MESSAGE_S = 0.01
"""What the messages around a call may take, and a process that waits for them, on a machine that is busy with it."""
