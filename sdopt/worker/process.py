"""The process that one variant lives in, and the parent's handle on it.

Global state (TF32 flags, attention back ends, compiler caches, the CUDA allocator) must not leak from one variant into
the next, and a peak of memory must belong to one variant: so each has a process of its own.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sdopt.hardware.device import Device
from sdopt.results.records import Status
from sdopt.variant import Variant
from sdopt.worker.forkserver import StartContext, start
from sdopt.worker.protocol import WorkerError
from sdopt.worker.session import serve


class Worker:
    """The parent's side: starts the process, asks it one thing at a time, and waits without spinning.

    Args:
        log: file that takes everything the worker prints.
        timeout_s: limit for each request, in seconds.
        called: told after each request how many seconds of it were calls of the pipeline.
    """

    def __init__(
        self,
        context: StartContext,
        variant: Variant,
        device: Device,
        log: Path,
        timeout_s: float,
        called: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._called = called
        self._log = log
        self._cache = Path(tempfile.mkdtemp(prefix="sdopt-inductor-"))
        self._connection, theirs = context.Pipe()
        life, self._life = context.Pipe(duplex=False)
        self._process = context.Process(
            target=serve, args=(theirs, life, variant, device, str(log), str(self._cache)), daemon=False
        )
        start(self._process)
        theirs.close()
        life.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, request: str, **arguments: Any) -> Any:
        """One request, one answer. Raises WorkerError where the worker fails, dies or takes too long."""
        try:
            self._connection.send((request, arguments))
            ready = wait([self._connection, self._process.sentinel], timeout=self._timeout_s)
            if not ready:
                self.kill()
                limit = f"{self._timeout_s:g} s (protocol.timeout_s)"
                raise WorkerError(Status.TIMEOUT, f"no answer to '{request}' within {limit}")
            if self._connection not in ready and not self._connection.poll(0.2):
                raise EOFError
            answer, in_calls_s = self._connection.recv()
        except (EOFError, OSError):
            raise self._died(request) from None
        self._called(in_calls_s)
        if isinstance(answer, WorkerError):
            raise answer
        return answer

    def stop(self) -> None:
        """Ends the worker, gently where it still listens."""
        self._connection.close()
        self._process.join(timeout=5)
        self.kill()

    def kill(self) -> None:
        """Ends the worker and everything it started, at once."""
        if self._process.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
        self._process.join()
        self._life.close()
        shutil.rmtree(self._cache, ignore_errors=True)

    def _died(self, request: str) -> WorkerError:
        self._process.join(timeout=10)
        code = self._process.exitcode
        tail = _last_line(self._log)
        self.kill()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "; the kernel does so when memory runs out" if name == "SIGKILL" else ""
            return WorkerError(Status.KILLED, f"killed by {name} during '{request}'{hint}")
        return WorkerError(Status.FAILED, f"ended with exit code {code} during '{request}'{tail}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return f": {lines[-1].strip()}" if lines else ""
