"""Runs a server until it is told to end."""

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from typing_extensions import override

from sdopt.apps.serving.batcher import Batcher
from sdopt.apps.serving.config import Serving
from sdopt.apps.serving.engine import Engine
from sdopt.apps.serving.http import Interface
from sdopt.errors import ENDINGS, UnavailableError, UsageError
from sdopt.hardware.device import Device
from sdopt.worker.protocol import WorkerError

_KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that they may use again: else they would send on one that closes."""

_LAST_ANSWERS_S = 3.0
"""Time that clients have to receive their answers at the end; one that does not read would hold the server for ever."""


def listen(serving: Serving) -> socket.socket:
    """Returns the socket that a server accepts connections on. Raises UsageError."""
    host = serving.host
    try:
        family = socket.getaddrinfo(host, serving.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, serving.port), family=family, backlog=2048)
    except OSError as error:
        raise UsageError(
            f"serving.port={serving.port}, serving.host={host}: {error.strerror or error}; choose another, or 0 for a "
            "free port"
        ) from error


async def serve(
    engine: Engine,
    serving: Serving,
    device: Device,
    listening: socket.socket,
    use: Callable[[], Awaitable[None]],
) -> int | None:
    """Serves a variant until `use` returns, or until SIGTERM or Ctrl-C; then ends what is drawn, and returns.

    `use` is called once when requests are taken; where the server is told to end before it returns, it is cancelled.

    Returns:
        The number of the signal that ended it, if one did.

    Raises:
        UnavailableError: the worker cannot be started, or an option has no effect in it.
        Exception: what `use` raises.
    """
    variant, batcher, ready = engine.variant, Batcher(engine, serving), asyncio.Event()
    app = Interface(batcher, device).app()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        date_header=False,
    )
    server = _Server(config, batcher)

    async def used() -> None:
        await ready.wait()
        await use()

    def leave(used: "asyncio.Future[None]") -> None:
        if not used.cancelled():
            server.drain()

    drawing, using = (
        asyncio.ensure_future(batcher.run(ready.set)),
        asyncio.ensure_future(used()),
    )
    drawing.add_done_callback(lambda _: server.end())
    using.add_done_callback(leave)
    server.use = using
    try:
        await server.serve(sockets=[listening])
        await drawing
        return server.signal
    except (WorkerError, OSError) as error:
        if server.told:
            return server.signal
        reason = error.reason if isinstance(error, WorkerError) else error
        hint = (
            ""
            if len(variant.shapes) == 1
            else "; fewer or smaller workload.batch_size need less memory"
        )
        raise UnavailableError(
            f"{variant.name}: cannot be served: {reason}{hint}"
        ) from error
    finally:
        engine.stop()
        using.cancel()
        with suppress(asyncio.CancelledError):
            await using


class _Server(uvicorn.Server):
    """Drains before it stops accepting, so that whoever asks meanwhile is told."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher) -> None:
        super().__init__(config)
        self._batcher, self._loop = batcher, asyncio.get_running_loop()
        self.told = False
        """Whether it was told to end."""
        self.signal: int | None = None
        """The first signal that told it."""
        self.use: asyncio.Future[None] = self._loop.create_future()
        """What is cancelled then."""

    @override
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in ENDINGS:
                # As nohup leaves that of a terminal which is closed.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signal = self.signal or sig
        self._loop.call_soon_threadsafe(self._end_at_once if self.told else self.drain)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        last = self._loop.call_later(_LAST_ANSWERS_S, self._abort_connections)
        await super().shutdown(sockets)
        last.cancel()

    def end(self) -> None:
        """Stops accepting, and ends when all answers are sent."""
        self.should_exit = True

    def drain(self) -> None:
        """Ends when the call that runs has ended."""
        if not self.told:
            self.told = True
            self.use.cancel()
            self._draining = self._loop.create_task(self._drained())

    async def _drained(self) -> None:
        await self._batcher.drain()
        self.end()

    def _end_at_once(self) -> None:
        """Waits neither for the call that runs nor for clients that still receive."""
        self._batcher.engine.kill()
        if self.should_exit:
            self._abort_connections()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
