"""Decides how the processes of a study share a machine while none is timed; a timed process has it to itself."""

from dataclasses import dataclass

_SIDE_BY_SIDE = 2
"""Number of processes that work at once on a CPU: one process does not use all of it."""


@dataclass(frozen=True)
class Sharing:
    """How many processes work at once, and with how many threads.

    Attributes:
        cores: the number of cores that a process may use.
        threads: the number of threads of a timed call.
        on_gpu: whether calls run on a GPU, which serves one process at a time.
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
        """How many processes may make calls at once with as many threads as timed calls have.

        A call waits for all its threads many times a second. With more threads than cores, two calls at once take far
        longer than one after the other.
        """
        return max(1, min(self.processes, self.cores // self.threads))

    @property
    def drawing_threads(self) -> int | None:
        """The number of threads with which a process draws images beside others; None is that of timed calls."""
        count = max(1, self.threads // self.processes)
        return None if count == self.threads else count
