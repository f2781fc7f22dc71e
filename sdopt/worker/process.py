"""The parent's handle on the worker process of one variant.

Each variant has its own process, so that global state (TF32 flags, attention back ends, compiler caches, the CUDA
allocator) does not leak from one variant into the next, and a memory peak belongs to one variant.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sdopt.hardware.device import Device
from sdopt.measure.processes import resident_gib_of
from sdopt.results.records import Status
from sdopt.results.samples import Memory
from sdopt.variant import Variant
from sdopt.worker.child import ChildDiedError, ChildProcess, ChildTimeoutError, print_warning
from sdopt.worker.forkserver import StartContext
from sdopt.worker.host import PipelineHost, serve
from sdopt.worker.protocol import Mark, TimedCall, WorkerError

P = ParamSpec("P")
R = TypeVar("R")

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS")
"""Signals with which CUDA libraries may end a process when the card's memory is full."""


_MEMORY_DIFFERS_GIB = 16 / 1024
"""GiB by which a worker's reading of its memory may be below the kernel's."""


class Worker:
    """Starts the process of a variant and sends it one request at a time.

    Each request is the method of `PipelineHost` of the same name. Each raises WorkerError if the worker fails, dies or
    takes too long.

    Args:
        context: starts the process.
        variant: the variant that it runs.
        device: the device that it runs on.
        log: file that receives everything the worker prints.
        scratch: folder for the compiler caches of several workers. A worker whose log has the same name as that of an
            earlier one reuses its cache. The folder is removed if the parent is killed.
        timeout_s: limit for each request, in seconds.
        called: receives, with each answer, the seconds spent in calls of the pipeline.
        warn: receives a warning if a process does not end.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        context: StartContext,
        variant: Variant,
        device: Device,
        log: Path,
        scratch: Path,
        timeout_s: float,
        called: Callable[[float], None] = lambda seconds: None,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self._timeout_s = timeout_s
        self._called = called
        self._log = log
        self._memory_signals = ("SIGKILL", *_CRASHES) if device.is_cuda else ("SIGKILL",)
        self._marks: dict[Mark, float] = {}
        self._asked = self._answered = 0.0
        self._idle_gib: float | None = None
        self._marked_again = False
        cache = scratch / log.stem
        self._child = ChildProcess(context, serve, variant, device, log, cache, scratch=scratch, warn=warn)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process is alive and can answer."""
        return self._child.alive

    @property
    def observed_s(self) -> float | None:
        """Seconds of the last call by the parent's clock; None if the worker did not mark its start and end.

        The time is valid only if the parent waited for no other worker meanwhile.
        """
        if self._marks.keys() < {*Mark}:
            return None
        return self._marks[Mark.ENDED] - self._marks[Mark.BEGUN]

    @property
    def passed_s(self) -> float:
        """Seconds from the last request to its answer, by the parent's clock: its call, and all work around it."""
        return self._answered - self._asked

    def hello(self) -> None:
        """Waits until the process has started."""
        self._ask(PipelineHost.hello)
        self._idle_gib = resident_gib_of(self.pid)

    def prepare(self) -> float:
        """Loads the pipeline and applies the optimizations; returns the seconds that this took."""
        return self._ask(PipelineHost.prepare)

    def time_once(self, shape_index: int = 0, number: int = 0, memory: bool = False) -> TimedCall:
        """Times one call at the shape `shape_index`, with the batch `number`, by the clocks of both processes.

        With `memory`, also measures the peak memory of the call. Raises WorkerError, also if the worker did not mark
        the start and the end of the call.
        """
        call = self._ask(PipelineHost.time_once, shape_index, number, memory=memory)
        if problem := self.contradiction(call.memory):
            raise WorkerError(Status.FAILED, problem)
        observed_s = self.observed_s
        if observed_s is None:
            raise WorkerError(Status.FAILED, "it did not mark the start and the end of its call")
        around_s = self.passed_s - observed_s
        over_after_s = self._marks.get(Mark.ENDED, self._asked) - self._asked
        return replace(call, observed_s=observed_s, over_after_s=over_after_s, around_s=around_s)

    def held_gib(self) -> float:
        """Returns the memory that the process holds now; reading that of a compiler's many processes takes time."""
        return self._ask(PipelineHost.held_gib)

    def memory_so_far(self) -> Memory:
        """Returns the peak memory of all calls since it was measured last."""
        memory = self._ask(PipelineHost.memory_so_far)
        if problem := self.contradiction(memory):
            raise WorkerError(Status.FAILED, problem)
        return memory

    def contradiction(self, memory: Memory | None) -> str:
        """Says how a reading of memory contradicts the kernel, which the parent asks itself; "" if it does not."""
        told = memory.process_peak_gib if memory else None
        if told is None or self._idle_gib is None:
            return ""
        highest = resident_gib_of(self.pid, highest=True) - self._idle_gib
        if highest - told <= _MEMORY_DIFFERS_GIB:
            return ""
        return f"it says that it held at most {1024 * told:.0f} MiB, but the kernel says {1024 * highest:.0f} MiB"

    def begin(
        self, request: Callable[Concatenate[PipelineHost, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], R]:
        """Sends a request; returns a function that waits for the answer, so that several workers can work at once.

        The answer must be fetched before the next request. Both steps raise WorkerError.
        """
        name = request.__name__

        def answer() -> R:
            with self._reporting_deaths(name):
                found: R = self._child.receive(self._timeout_s, self._note)
            self._answered = time.perf_counter()
            if self._marked_again:
                raise WorkerError(Status.FAILED, f"it marked the start or the end of '{name}' more than once")
            return found

        self._marks, self._marked_again = {}, False
        self._asked = time.perf_counter()
        with self._reporting_deaths(name):
            self._child.send((name, args, kwargs))
        return answer

    def _note(self, content: Mark | float) -> None:
        if isinstance(content, Mark):
            self._marked_again = self._marked_again or content in self._marks
            self._marks.setdefault(content, time.perf_counter())
        else:
            self._called(content)

    def _ask(self, request: Callable[Concatenate[PipelineHost, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.begin(request, *args, **kwargs)()

    @contextmanager
    def _reporting_deaths(self, request: str) -> Iterator[None]:
        """Raises WorkerError if the process dies or takes too long within a request."""
        try:
            yield
        except ChildTimeoutError:
            limit = f"{self._timeout_s:g} s (protocol.timeout_s)"
            raise WorkerError(Status.TIMEOUT, f"no answer to '{request}' within {limit}") from None
        except ChildDiedError as died:
            if died.signal:
                hint = "; the kernel does so when memory runs out" if died.signal == "SIGKILL" else ""
                may_be_memory = died.signal in self._memory_signals
                raise WorkerError(Status.KILLED, f"{died} during '{request}'{hint}", may_be_memory) from None
            raise WorkerError(Status.FAILED, f"{died} during '{request}'{_last_line(self._log)}") from None

    def stop(self) -> None:
        """Ends the worker, gently if it still listens."""
        self._child.stop()

    def kill(self) -> None:
        """Ends the worker and everything it started, at once."""
        self._child.kill()


def answers_of(requests: Sequence[Callable[[], Callable[[], R]]]) -> list[R | WorkerError]:
    """Sends requests to several workers before it waits; returns the answer of each, or its error.

    Args:
        requests: functions that each begin one request, such as `partial(worker.begin, request)`.
    """
    begun = [_or_error(request) for request in requests]
    return [answer if isinstance(answer, WorkerError) else _or_error(answer) for answer in begun]


def _or_error(function: Callable[[], R]) -> R | WorkerError:
    try:
        return function()
    except WorkerError as error:
        return error


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return f": {lines[-1].strip()}" if lines else ""
