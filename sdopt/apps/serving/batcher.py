"""Decides which images wait, which are drawn together, and which are refused."""

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from sdopt.apps.serving.config import Serving
from sdopt.apps.serving.engine import Engine, EngineWork
from sdopt.errors import UnavailableError
from sdopt.record.choices import as_choice
from sdopt.worker.protocol import Asked, Rendered, WorkerError

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Between attempts to start a worker again."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
"""Bounds of the histograms of times."""


class Meters:
    """What a server counts, in the form that Prometheus collects."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.answers = Counter(
            "sdopt_answers",
            "Answers to requests for images.",
            ["status"],
            registry=registry,
        )
        self.waiting = Gauge(
            "sdopt_waiting_images", "Images that wait for a call.", registry=registry
        )
        self.ready = Gauge(
            "sdopt_ready", "1 while requests are taken.", registry=registry
        )
        self.restarts = Counter(
            "sdopt_worker_restarts",
            "Workers started in the place of one.",
            registry=registry,
        )
        self.queue_s = Histogram(
            "sdopt_queue_seconds",
            "From an image's arrival to its call.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._images = Counter("sdopt_images", "Images generated.", registry=registry)
        self._calls = Histogram(
            "sdopt_call_images",
            "Images of one call.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self._compute_s = Histogram(
            "sdopt_compute_seconds",
            "Calls, from prompts to images.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._busy_s = Counter(
            "sdopt_busy_seconds",
            "Time in calls, as this process sees it.",
            registry=registry,
        )
        self._graphs = Counter(
            "sdopt_compiled_graphs", "Graphs compiled while serving.", registry=registry
        )
        self._held = Gauge(
            "sdopt_worker_memory_bytes",
            "Memory of the worker after its last call.",
            registry=registry,
        )

    def called(
        self, images: int, compute_s: float, call_s: float, graphs: int, held_gib: float
    ) -> None:
        """Counts a call of the worker."""
        self._images.inc(images)
        self._calls.observe(images)
        self._compute_s.observe(compute_s)
        self._busy_s.inc(call_s)
        self._graphs.inc(graphs)
        self.holds(held_gib)

    def holds(self, held_gib: float) -> None:
        """Notes what the worker held after a call, which may be one that warmed it."""
        self._held.set(held_gib * 2**30)

    def text(self) -> bytes:
        """Returns all of them in Prometheus's text format."""
        return generate_latest(self._registry)


class RefusalError(Exception):
    """A request that gets no image."""

    def __init__(
        self,
        status: int,
        reason: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status, self.reason, self.param, self.retry_after_s = (
            status,
            reason,
            param,
            retry_after_s,
        )
        super().__init__(status, reason)


@dataclass(frozen=True)
class Drawn:
    """An image, and how it came about."""

    pixels: np.ndarray
    """uint8 (height, width, 3)."""
    queue_s: float
    """From its arrival to the call that drew it."""
    compute_s: float
    """The call in the worker, from prompts to images."""
    batch: int
    """Images that were drawn in the same call."""
    cut: str
    """What of its prompts no text encoder reads."""


@dataclass(eq=False)
class Waiting:
    """An image that is asked for."""

    asked: Asked
    work: EngineWork
    arrived_s: float
    answer: "asyncio.Future[Drawn]"
    expiry: asyncio.TimerHandle | None = None
    """Answers it with 504."""


class Batcher:
    """The queue of a server, and the task that empties it. Everything but calls of the worker is in the event loop."""

    def __init__(self, engine: Engine, serving: Serving) -> None:
        self.engine, self.serving, self.meters = engine, serving, Meters()
        self.state = "loading"
        """`loading`, `ready`, `restarting` or `draining`; requests are taken while it is `ready`."""
        self._waiting: list[Waiting] = []
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._call_s = 1.0
        self._draining, self._ended = asyncio.Event(), asyncio.Event()

    def submit(self, asked: Sequence[Asked], work: EngineWork) -> list[Waiting]:
        """Lets images wait for a call, all or none. Raises RefusalError."""
        if self.state != "ready":
            raise RefusalError(
                503, f"this server is {self.state}", retry_after_s=self._call_s
            )
        waiting, limit = len(self._waiting), self.serving.queue
        if waiting + len(asked) > limit:
            calls = math.ceil(waiting / self.engine.largest)
            raise RefusalError(
                429,
                f"{waiting} images wait, of at most {limit}",
                retry_after_s=calls * self._call_s,
            )
        loop, added = asyncio.get_running_loop(), []
        for each in asked:
            image = Waiting(each, work, loop.time(), loop.create_future())
            image.expiry = loop.call_later(self.serving.deadline_s, self._expire, image)
            added.append(image)
        self._waiting += added
        self._note_change()
        return added

    def drop(self, images: Sequence[Waiting]) -> None:
        """Forgets images whose client has left: what still waits is never drawn."""
        for image in images:
            image.answer.cancel()
            self._leave(image)
        self._note_change()

    async def run(self, ready: Callable[[], None]) -> None:
        """Starts the worker, calls `ready`, and draws what is asked for, until `drain` is called.

        Raises:
            UnavailableError: an option has no effect in the worker.
            WorkerError: the worker cannot be prepared.
            OSError: its process cannot be started.
        """
        try:
            await self._in_thread(self.engine.start)
            for evidence in await self._in_thread(self.engine.prove):
                if not evidence.engaged:
                    raise UnavailableError(
                        f"{as_choice(evidence.axis, evidence.option)}: has no effect here: {evidence.summary}"
                    )
            if not self._draining.is_set():
                self._set_state("ready")
                ready()
            while batch := await self._next():
                await self._draw(batch)
                if self.engine.pid is None:
                    await self._restart()
        finally:
            self._set_state("draining")
            self._refuse_waiting()
            self._ended.set()

    async def drain(self) -> None:
        """Refuses what waits and what comes, and returns when the call that runs has ended or is ended."""
        patience_s = self.serving.drain_s if self.state == "ready" else 0
        self._draining.set()
        self._set_state("draining")
        self._refuse_waiting()
        while not self._ended.is_set():
            try:
                await asyncio.wait_for(self._ended.wait(), patience_s)
            except TimeoutError:
                self.engine.kill()
                patience_s = _FIRST_PAUSE_S

    async def _next(self) -> list[Waiting]:
        """Waits for the images of the next call, which are those that agree with the oldest; [] when it is over."""
        loop, window_s = asyncio.get_running_loop(), self.serving.window_ms / 1000
        while True:
            self._changed.clear()
            if self._draining.is_set():
                return []
            if self._waiting:
                oldest = self._waiting[0]
                agreeing = [
                    image
                    for image in self._waiting
                    if self.engine.together(oldest.work, image.work)
                ]
                batch = agreeing[: self.engine.largest]
                left_s = oldest.arrived_s + window_s - loop.time()
                if len(batch) == self.engine.largest or left_s <= 0:
                    for image in batch:
                        self._leave(image)
                    return batch
                timer = loop.call_later(left_s, self._changed.set)
                await self._changed.wait()
                timer.cancel()
            else:
                await self._changed.wait()

    async def _draw(self, batch: list[Waiting]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.meters.waiting.set(len(self._waiting))
        try:
            asked = [image.asked for image in batch]
            works = [image.work for image in batch]
            found: Rendered = await self._in_thread(
                partial(self.engine.render, asked, works)
            )
        except WorkerError as error:
            reason = error.reason
            if self._draining.is_set() and self.engine.pid is None:
                reason = "this server ended before they were (serving.drain_s)"
            print(
                f"sdopt: {len(batch)} images not generated: {reason}",
                file=sys.stderr,
                flush=True,
            )
            for image in batch:
                self._refuse(
                    image, RefusalError(500, "the call that makes this image failed")
                )
            return
        self._call_s = loop.time() - began_s
        self.meters.called(
            len(batch), found.seconds, self._call_s, found.graphs, found.held_gib
        )
        for cut in dict.fromkeys(filter(None, found.cut)):
            print(f"sdopt: {cut}", file=sys.stderr, flush=True)
        for image, pixels, finite, cut in zip(
            batch, found.pixels, found.finite, found.cut, strict=True
        ):
            if not finite:
                self._refuse(
                    image,
                    RefusalError(
                        500, "the image has values that are infinite or no numbers"
                    ),
                )
            elif not image.answer.done():
                queue_s = began_s - image.arrived_s
                self.meters.queue_s.observe(queue_s)
                image.answer.set_result(
                    Drawn(pixels, queue_s, found.seconds, len(batch), cut)
                )

    async def _restart(self) -> None:
        """Starts a worker in the place of one that has ended, again and again until one is warm."""
        pause_s = _FIRST_PAUSE_S
        while not self._draining.is_set():
            self._set_state("restarting")
            try:
                await self._in_thread(self.engine.start)
            except (WorkerError, OSError) as error:
                reason = error.reason if isinstance(error, WorkerError) else error
                print(
                    f"sdopt: the worker cannot be started: {reason}",
                    file=sys.stderr,
                    flush=True,
                )
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._draining.wait(), pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self.meters.restarts.inc()
                if not self._draining.is_set():
                    self._set_state("ready")
                return

    def _expire(self, image: Waiting) -> None:
        self._refuse(
            image,
            RefusalError(
                504,
                f"waited longer than {self.serving.deadline_s:g} s (serving.deadline_s)",
            ),
        )
        self._note_change()

    def _refuse_waiting(self) -> None:
        for image in list(self._waiting):
            self._refuse(image, RefusalError(503, "this server is draining"))
        self._note_change()

    def _refuse(self, image: Waiting, refusal: RefusalError) -> None:
        self._leave(image)
        if not image.answer.done():
            image.answer.set_exception(refusal)
            image.answer.exception()  # else asyncio logs those of clients that have left, which nobody reads

    def _leave(self, image: Waiting) -> None:
        """Takes an image out of the queue, if it is there."""
        if image.expiry is not None:
            image.expiry.cancel()
        if image in self._waiting:
            self._waiting.remove(image)

    def _note_change(self) -> None:
        self.meters.waiting.set(len(self._waiting))
        self._changed.set()

    def _set_state(self, state: str) -> None:
        self.state = state
        self.meters.ready.set(state == "ready")
        if state == "ready":
            self.meters.holds(self.engine.held_gib or 0.0)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
