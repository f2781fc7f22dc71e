"""Measures rows under load, one after the other: each a fresh server, and requests at several rates."""

import asyncio
import math
import os
import signal
import statistics
import subprocess
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sdopt.apps.loadtest.config import LoadConfig
from sdopt.apps.loadtest.record import (
    LoadRecord,
    LoadRow,
    Predicted,
    Replicate,
)
from sdopt.apps.loadtest.target import Target
from sdopt.apps.serving.config import Serving
from sdopt.apps.serving.engine import Engine
from sdopt.apps.serving.server import listen, serve
from sdopt.apps.traffic.figures import Window, bracketing, window_of
from sdopt.apps.traffic.generator import PATH, SendSchedule, Sent, generate
from sdopt.apps.traffic.twin import batched, highest_rate, unit_trace
from sdopt.errors import ENDINGS, SdoptError, UnavailableError
from sdopt.hardware.device import Device
from sdopt.hardware.nvml import GpuMonitor
from sdopt.measure.interference import InterferenceMeter
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, VariantResult
from sdopt.report.columns import OF_ONE_STUDY, further_columns, values_of
from sdopt.statistics.rows import Row
from sdopt.variant import Variant
from sdopt.worker.process import Worker
from sdopt.worker.protocol import Asked

_CALIBRATIONS = 3
"""Calls at each batch size that give its service time, their median."""

_ATTEMPTS = 3
"""Times that a window is sent if it was sent too late, or disturbed."""

_PATIENCE_S = 60.0
"""The least time in which an answer is waited for."""

_CLEARING = 10
"""How many times as long as for an answer a server is waited for that still has requests which were given up."""

_PAUSE_S = 1.0
"""Between requests that ask whether it answers again."""

_UNKNOWN = (400, 422)
"""How a server answers a field that it does not know."""

_LIMITS = 3.0
"""The limit, in single calls of the baseline, where nobody names one."""

_INTERRUPTED = "interrupted"
"""Why a row is not measured to the end that a signal broke off."""


@dataclass
class ServedRow:
    """A row that is measured."""

    row: LoadRow
    variant: Variant
    serving: Serving
    start: Callable[[], Worker]


class LoadTest:
    """A load test of several rows.

    `say` takes lines of progress; the device is None of a server that is only known by its address.
    """

    def __init__(
        self,
        load: LoadConfig,
        record: LoadRecord,
        device: Device | None,
        say: Callable[[str], None],
    ) -> None:
        self._load, self._record, self._device, self._say = load, record, device, say
        self._random = np.random.default_rng(load.seed)
        self._generator: subprocess.Popen[str] | None = None
        self._ended = False
        """Whether a signal has ended the server of a row, which then gets no further requests."""
        self._next_seed = load.seed
        self._digests: set[int] = set()
        """Checksums of the images of a server that is only known by its address."""
        self._unfinished = False
        """Whether such a server may still have requests that were given up."""
        self._monitor = None if device is None else GpuMonitor(device)

    def run(self, candidates: Sequence[ServedRow]) -> None:
        """Measures all rows, the baseline first; later replicates in shuffled order.

        Raises:
            UnavailableError: the baseline cannot be served.
            KeyboardInterrupt: a signal ended it.
        """
        for replicate in range(self._load.replicates):
            order = list(candidates)
            if replicate:  # at first, the limit is the baseline's
                self._random.shuffle(order)
            for candidate in order:
                row = candidate.row
                if row.reason:
                    continue
                self._say(
                    f"{row.name}, replicate {replicate + 1} of {self._load.replicates}: loading"
                )
                try:
                    asyncio.run(self._measure(candidate, replicate))
                except SdoptError as error:
                    row.reason = "; ".join(error.problems)
                    self._say(f"{row.name}: {row.reason}")
                    if candidate is candidates[0] and not row.replicates:
                        raise
                except KeyboardInterrupt:
                    row.reason = _INTERRUPTED
                    raise

    def run_url(self, row: LoadRow, target: Target, prompts: Sequence[str]) -> None:
        """Measures a server that is only known by its address. Raises UnavailableError if it gives no image."""
        # The image itself; a link costs its client another request, which counts. Some servers know no such field.
        fields = {"response_format": "b64_json", **target.fields}
        target = self._require_image(
            "a first request", row, replace(target, fields=fields), prompts, target
        )
        row.rates = list(self._load.rates or ())
        row.own_seeds = "seed" not in target.fields
        row.asked_size, row.asked_kind = target.asked_size, target.asked_kind
        for replicate in range(self._load.replicates):
            windows: list[Window] = []
            try:
                for rate in self._shuffled(row.rates):
                    windows.append(
                        self._window(target, rate, prompts, replicate, row, None)
                    )
                if _some_without_images(windows):
                    self._require_image("a last request", row, target, prompts)
            except UnavailableError as error:
                row.reason = str(error)
            except KeyboardInterrupt:
                row.reason = _INTERRUPTED
                raise
            finally:
                if windows:
                    row.replicates.append(Replicate(replicate, windows, []))
            if row.reason:
                break
        if not row.replicates:
            raise UnavailableError(row.reason)

    async def _measure(self, candidate: ServedRow, number: int) -> None:
        """Serves a row, and sends it all windows of a replicate. Raises UnavailableError or KeyboardInterrupt."""
        assert self._device is not None
        listening = listen(candidate.serving)
        site = f"http://127.0.0.1:{listening.getsockname()[1]}{PATH}"
        target = Target(site, decodes=False)
        engine = Engine(candidate.variant, candidate.serving, candidate.start)
        replicate = Replicate(number, [], [])
        whole = False

        async def send() -> None:
            nonlocal whole
            try:
                await asyncio.to_thread(
                    self._replicate, candidate, engine, target, replicate
                )
                whole = True
            except asyncio.CancelledError:
                self._end()
                raise

        try:
            number_of_signal = await serve(
                engine, candidate.serving, self._device, listening, send
            )
        finally:
            if replicate.windows:
                # What a thread still sends to a server that has ended is no window.
                candidate.row.replicates.append(deepcopy(replicate))
        if not whole:  # a signal ended the server, and now the command
            if number_of_signal in ENDINGS:
                signal.raise_signal(number_of_signal)
            raise KeyboardInterrupt

    def _end(self) -> None:
        """Sends nothing more."""
        self._ended = True
        if self._generator is not None:
            self._generator.kill()

    def _note(self, generator: "subprocess.Popen[str]") -> None:
        self._generator = generator
        if self._ended:
            generator.kill()

    def _replicate(
        self, candidate: ServedRow, engine: Engine, target: Target, replicate: Replicate
    ) -> None:
        """Sends a row all windows of a replicate, which has those that came where a later one cannot be sent."""
        row, variant, number = candidate.row, candidate.variant, replicate.number
        service_s = calibrated(engine)
        if not row.service_s:
            row.service_s, row.columns = service_s, columns_of(variant, service_s)
        if not self._record.limit_s:
            self._record.limit_s = _LIMITS * service_s[min(service_s)]
        largest, window_s = engine.largest, candidate.serving.window_ms / 1000

        def seconds(images: int) -> float:
            size = engine.batch_for(images)
            return float(np.interp(size, list(service_s), list(service_s.values())))

        def latencies(rate: float) -> np.ndarray:
            return batched(self._arrivals(number, rate), seconds, largest, window_s)

        def attained(rate: float) -> float:
            return float((latencies(rate) <= self._record.limit_s).mean())

        def spare(rate: float) -> float:
            return attained(rate) - self._record.wanted(self._load.count(rate))

        # What carries less than a tenth of its single calls within the limit is not searched for further.
        slowest = 0.1 / seconds(1)
        if not row.rates:
            high = largest / seconds(largest)
            most = highest_rate(spare, 0.0, slowest, 2 * high)
            row.rates = list(
                self._load.rates
                or [float(f"{share * most:.4g}") for share in self._load.ladder]
            )

        def send(rate: float) -> Window:
            window = self._window(
                target, rate, variant.prompts, number, row, engine.pid
            )
            percentiles = np.quantile(
                latencies(rate), [0.5, 0.95, 0.99], method="higher"
            )
            replicate.predicted.append(
                Predicted(rate, attained(rate), *map(float, percentiles))
            )
            replicate.windows.append(window)
            row.memory_gib = engine.held_gib
            return window

        windows = [send(rate) for rate in self._shuffled(row.rates)]
        if self._load.rates is None:
            bracketing(windows, self._record.wanted, send, slowest)

    def _window(
        self,
        target: Target,
        rate: float,
        prompts: Sequence[str],
        replicate: int,
        row: LoadRow,
        worker: int | None,
    ) -> Window:
        """Sends a window, again if it was sent too late, or other work disturbed the process `worker`.

        What decides is the cause and never a latency, so that the choice does not favour quick windows.

        Raises:
            UnavailableError: it is always sent too late.
        """
        load = self._load
        times_s = self._arrivals(replicate, rate)
        timeout_s = max(_PATIENCE_S, 20 * self._record.limit_s)
        tried: list[Window] = []
        lags_ms = []
        for _ in range(_ATTEMPTS):
            self._say(
                f"{row.name}: {len(times_s)} requests at {rate:.3g}/s, {times_s[-1]:.0f} s"
            )
            seed = load.seed + replicate * len(times_s)
            if self._is_foreign:  # it may answer from a cache what was asked earlier
                seed = self._fresh_seed(len(times_s))
            schedule = target.schedule(prompts, seed, times_s.tolist(), timeout_s)
            if self._unfinished:
                self._await_answer(row, target, prompts, timeout_s)
            window = self._sent(schedule, rate, worker)
            window = replace(window, why=target.shown(window.why))
            if window.void:
                lags_ms.append(1000 * window.lag_s)
                self._say(
                    f"{row.name}: void, since requests were sent {lags_ms[-1]:.0f} ms late, of {load.lag_ms:g} ms at "
                    "most (load.lag_ms)"
                )
                continue
            tried.append(window)
            disturbed = window.disturbed or 0.0
            if not load.interference or disturbed <= load.interference:
                return window
            self._say(
                f"{row.name}: other work took {100 * disturbed:.0f} % (load.interference)"
            )
        if not tried:
            enough_ms = 10 * math.ceil(1.5 * max(lags_ms) / 10)
            raise UnavailableError(
                f"{row.name}: requests at {rate:.3g}/s cannot be sent in time here: at least {min(lags_ms):.0f} ms "
                f"late, of {load.lag_ms:g} ms at most; end other programs, or allow it with load.lag_ms={enough_ms}: "
                "latencies, which count from the schedule, then include it"
            )
        return min(tried, key=lambda window: window.disturbed or 0)

    @property
    def _is_foreign(self) -> bool:
        """Whether the server is only known by its address."""
        return self._device is None

    def _sent(
        self,
        schedule: SendSchedule,
        rate: float,
        worker: int | None,
    ) -> Window:
        """Sends the requests of a window; returns what came of them, and what other work and energy they took."""
        before_j = self._energy_j()
        meter = None if worker is None else InterferenceMeter(worker)
        begun_s = _processor_s()
        sent = generate(schedule, self._note)
        causes = None
        if meter is not None:
            causes = meter.stop(0.0, _processor_s() - begun_s)
        after_j = self._energy_j()
        self._unfinished = self._is_foreign and _some_given_up(sent, schedule.timeout_s)
        limit_s = self._record.limit_s
        lag_s = self._load.lag_ms / 1000
        window = window_of(sent, rate, limit_s, lag_s, self._digests)
        if self._is_foreign:
            self._digests |= {one.digest for one in sent if one.digest is not None}
        if causes is not None:
            window = replace(window, disturbed=causes.waited + causes.stolen)
        images = window.requests - window.rejected - window.errors
        if before_j is not None and after_j is not None and images:
            window = replace(window, image_j=(after_j - before_j) / images)
        return window

    def _require_image(
        self,
        request: str,
        row: LoadRow,
        target: Target,
        prompts: Sequence[str],
        otherwise: Target | None = None,
    ) -> Target:
        """Returns the server that gives an image: `otherwise` if it does not know a field. Raises UnavailableError."""
        sent = self._ask(target, prompts, _PATIENCE_S)
        if sent.status in _UNKNOWN and otherwise is not None:
            return self._require_image(request, row, otherwise, prompts)
        if sent.status != 200:
            raise UnavailableError(
                f"load.url={row.name}: {request} got no image ({target.shown(sent.failure)}); "
                f"see whether it is up, warm, and has OpenAI's interface at {target.shown(target.address)}, and "
                "whether it wants more (load.model, load.key, load.headers, load.fields)"
            )
        return target

    def _ask(self, target: Target, prompts: Sequence[str], timeout_s: float) -> Sent:
        """Asks for one image."""
        schedule = target.schedule(prompts, self._fresh_seed(1), [0.0], timeout_s)
        [sent] = generate(schedule)
        return sent

    def _await_answer(
        self, row: LoadRow, target: Target, prompts: Sequence[str], timeout_s: float
    ) -> None:
        """Waits until a server answers again, since the next window would find in its queue what was given up.

        Raises:
            UnavailableError: it does not.
        """
        self._say(f"{row.name}: waiting until it has done what was given up")
        until_s = time.monotonic() + _CLEARING * timeout_s
        while time.monotonic() < until_s:
            if self._ask(target, prompts, timeout_s).status == 200:
                return
            time.sleep(_PAUSE_S)
        raise UnavailableError(
            f"{row.name}: has given no image for {_CLEARING * timeout_s:.0f} s, since requests were given up after "
            f"{timeout_s:g} s"
        )

    def _fresh_seed(self, requests: int) -> int:
        """Returns the first seed of so many requests, whose seeds no other request has."""
        first = self._next_seed
        self._next_seed += requests
        return first

    def _energy_j(self) -> float | None:
        return None if self._monitor is None else self._monitor.energy_j()

    def _arrivals(self, replicate: int, rate: float) -> np.ndarray:
        """Returns when the requests of a window are sent, in seconds: the same trace for all rows, scaled."""
        return (
            unit_trace(
                self._load.arrivals, self._load.count(rate), self._load.seed + replicate
            )
            / rate
        )

    def _shuffled(self, rates: Sequence[float]) -> list[float]:
        return [float(rate) for rate in self._random.permutation(rates)]


def _some_without_images(windows: Sequence[Window]) -> bool:
    """Returns whether a window got none: of a server that is gone, a balancer says 503."""
    return any(each.errors + each.rejected == each.requests for each in windows)


def _processor_s() -> float:
    """Returns the processor time of this process and of those that it started and that have ended.

    They take it as a server and its clients do.
    """
    return sum(os.times()[:4])


def _some_given_up(sent: Sequence[Sent], timeout_s: float) -> bool:
    """Returns whether requests were given up while others were served: some servers draw for clients that have left."""
    served = any(each.status == 200 for each in sent)
    return served and any(
        each.status == 0 and each.done_s - each.sent_s >= timeout_s for each in sent
    )


def columns_of(
    variant: Variant, service_s: Mapping[int, float]
) -> dict[str, float | str]:
    """Returns what further columns of tables say of a variant, by its time of a call without load."""
    measured = VariantResult(
        name=variant.name,
        role="variant",
        choices=dict(variant.choices),
        overrides=list(variant.overrides),
        config=variant.config,
        status=Status.OK,
    )
    images = min(service_s)
    seconds = service_s[images]
    figures = {
        "latency/p50_s": seconds,
        "latency/image_s": seconds / images,
        "throughput/images_per_s": images / seconds,
    }
    row = Row(measured, variant.shapes[0], latency=Interval(seconds), figures=figures)
    return values_of(row, further_columns(OF_ONE_STUDY))


def calibrated(engine: Engine) -> dict[int, float]:
    """Returns the seconds of a call by its number of images, as the server's process sees it, without load."""
    workload, found = engine.variant.workload, {}
    for size in sorted(
        {
            1,
            *(size for size in engine.batch_sizes if size <= engine.largest),
            engine.largest,
        }
    ):
        asked = [
            Asked("a red apple", seed, workload.negative_prompt) for seed in range(size)
        ]
        work = engine.work_of(asked[0], workload.steps, engine.variant.guidance_scale)
        taken_s = timeit.repeat(
            partial(engine.render, asked, [work] * size), number=1, repeat=_CALIBRATIONS
        )
        found[size] = statistics.median(taken_s)
    return found
