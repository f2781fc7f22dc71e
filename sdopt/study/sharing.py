"""How the processes of a study share a machine where nothing is timed: what is timed has it for itself."""

from dataclasses import dataclass

_SIDE_BY_SIDE = 2
"""So many processes work at once on a CPU: a single one leaves a part of it idle."""


@dataclass(frozen=True)
class Sharing:
    """How many processes work at once, and with how many threads.

    Attributes:
        cores: that a process may use.
        threads: with which a call is timed.
        on_gpu: whether calls run on a GPU, which two processes would take from each other.
    """

    cores: int
    threads: int
    on_gpu: bool

    @property
    def processes(self) -> int:
        """How many processes may work at once."""
        return 1 if self.on_gpu else _SIDE_BY_SIDE

    @property
    def calls(self) -> int:
        """How many of them may make calls with as many threads as timed ones have.

        Each of them waits for all its threads, many times a second. If these are more than there are cores, two calls
        at once take far longer than one after the other.
        """
        return max(1, min(self.processes, self.cores // self.threads))

    @property
    def drawing_threads(self) -> int | None:
        """With how many threads a process draws images beside others; None is as many as timed calls have."""
        count = max(1, self.threads // self.processes)
        return None if count == self.threads else count
