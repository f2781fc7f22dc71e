"""The parent's handle on the worker process of one variant.

Each variant has its own process, so that global state (TF32 flags, attention back ends, compiler caches, the CUDA
allocator) does not leak from one variant into the next, and a memory peak belongs to one variant.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from typing_extensions import override

from sdopt.hardware.device import Device
from sdopt.pipelines.factory import built
from sdopt.record.records import Status
from sdopt.variant import Variant
from sdopt.worker.child import (
    ChildDiedError,
    ChildProcess,
    ChildTimeoutError,
    print_warning,
)
from sdopt.worker.forkserver import StartContext
from sdopt.worker.host import PipelineHost, serve
from sdopt.worker.protocol import TimeUpError, WorkerError

P = ParamSpec("P")
R = TypeVar("R")

_SERVER_LOST = 255
"""What multiprocessing gives as the exit code of a process whose fork server is gone; a library may exit so, too."""

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS")
"""Signals with which CUDA libraries may end a process when the card's memory is full."""


class Worker(Protocol):
    """The worker of one variant: it answers one request at a time, each a method of `PipelineHost`."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def alive(self) -> bool:
        """Whether it is alive and can answer."""

    def begin(
        self,
        request: Callable[Concatenate[PipelineHost, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Callable[[], R]:
        """Sends a request; returns a function that waits for the answer, so that several workers can work at once.

        The answer must be fetched before the next request. Both steps raise WorkerError if the worker fails, dies or
        takes too long.
        """

    def ask(
        self,
        request: Callable[Concatenate[PipelineHost, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Sends a request, and returns the answer. Raises WorkerError as `begin` does."""
        return self.begin(request, *args, **kwargs)()

    def stop(self) -> None:
        """Ends it, gently if it still listens."""

    def kill(self) -> None:
        """Ends it and everything it started, at once."""


StartWorker = Callable[
    [Variant, Path, Path, Callable[[float], None], Callable[[str], None]], Worker
]
"""Starts the worker of a variant, as `WorkerProcess` does with its first three arguments given. Raises OSError."""


class WorkerProcess(ChildProcess, Worker):
    """The process of a variant, to which it sends requests; it starts as soon as this object is made, and runs `serve`.

    If it dies or takes too long, the request that waits for it raises WorkerError: the status is `killed` if a signal
    ended it, `timeout`, or else `failed`. What follows for the variant and the study is in `Session.note_failure`.
    After `deadline` it raises TimeUpError.

    Args:
        context: starts the process.
        device: the device that it runs on.
        timeout_s: limit for each request, in seconds.
        variant: the variant that it runs.
        log: file that receives everything the worker prints.
        scratch: folder for the compiler caches of several workers. A worker whose log has the same name as that of an
            earlier one reuses its cache. The folder is removed if the parent is killed.
        called: receives, with each answer, the seconds spent in calls of the pipeline.
        warn: receives a warning if a process does not end.
        deadline: end of the whole study, in seconds of the monotonic clock.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        context: StartContext,
        device: Device,
        timeout_s: float,
        variant: Variant,
        log: Path,
        scratch: Path,
        called: Callable[[float], None] = lambda seconds: None,
        warn: Callable[[str], None] = print_warning,
        deadline: float = math.inf,
    ) -> None:
        self._timeout_s, self._deadline = timeout_s, deadline
        self._called = called
        self._log = log
        self._memory_signals = (
            ("SIGKILL", *_CRASHES) if device.is_cuda else ("SIGKILL",)
        )
        cache = scratch / log.stem
        super().__init__(
            context,
            serve,
            variant,
            built(variant.model),
            device,
            log,
            cache,
            scratch=scratch,
            warn=warn,
        )

    @override
    def begin(
        self,
        request: Callable[Concatenate[PipelineHost, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Callable[[], R]:
        name = request.__name__

        def answer() -> R:
            with self._reporting_deaths(name):
                content: R = self.receive(
                    min(self._timeout_s, self._left_s), self._called
                )
            return content

        if self._left_s <= 0:
            raise TimeUpError
        with self._reporting_deaths(name):
            self.send((name, args, kwargs))
        return answer

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    @contextmanager
    def _reporting_deaths(self, request: str) -> Iterator[None]:
        """Raises WorkerError if the process dies or takes too long within a request."""
        try:
            yield
        except ChildTimeoutError:
            if self._left_s <= 0:
                raise TimeUpError from None
            limit = f"{self._timeout_s:g} s (protocol.timeout_s)"
            raise WorkerError(
                Status.TIMEOUT, f"no answer to '{request}' within {limit}"
            ) from None
        except ChildDiedError as died:
            if died.signal:
                hint = (
                    "; the kernel does so when memory runs out"
                    if died.signal == "SIGKILL"
                    else ""
                )
                may_be_memory = died.signal in self._memory_signals
                raise WorkerError(
                    Status.KILLED, f"{died} during '{request}'{hint}", may_be_memory
                ) from None
            if died.exit_code == _SERVER_LOST:
                hint = "; so it ends too where the process that started it was killed because memory ran out"
                last = _last_line(self._log)
                raise WorkerError(
                    Status.KILLED, f"{died} during '{request}'{hint}{last}", True
                ) from None
            raise WorkerError(
                Status.FAILED, f"{died} during '{request}'{_last_line(self._log)}"
            ) from None


def answers_of(
    requests: Sequence[Callable[[], Callable[[], R]]],
) -> list[R | WorkerError]:
    """Begins requests of several workers before it waits; returns the answer of each, or its error."""
    begun = [_or_error(request) for request in requests]
    answers: list[R | WorkerError] = []
    for answer in begun:
        answers.append(answer if isinstance(answer, WorkerError) else _or_error(answer))
    return answers


_BAR = "%|"
"""What stands before a bar of tqdm."""


def _or_error(function: Callable[[], R]) -> R | WorkerError:
    try:
        return function()
    except WorkerError as error:
        return error


def _last_line(log: Path) -> str:
    """Returns the last line of a log that is no bar of progress, after a colon; "" if there is none."""
    if not log.is_file():
        return ""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if _BAR not in line]
    return f": {lines[-1]}" if lines else ""
