"""What a study and its workers tell each other, beside the figures that are recorded."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class TimedCall:
    """One call from prompts to images."""

    seconds: float
    gpu: GpuState | None
    """The state of the device right after it; None on a CPU, and without NVML."""
    compiled: Compiled
    memory: Memory | None = None
    """Its peak, where that was asked for."""
