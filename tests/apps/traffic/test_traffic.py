"""Load: traces, the simulated queue against theory, the generator against a server of known times, and figures."""

import asyncio
import base64
import math
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdopt.apps.traffic import generator
from sdopt.apps.traffic.figures import (
    Window,
    bracketing,
    early_stopping,
    interval_of,
    max_rate,
    percentile,
    wanted_share,
    window_of,
)
from sdopt.apps.traffic.generator import (
    PATH,
    SendSchedule,
    Sent,
    generate,
)
from sdopt.apps.traffic.twin import batched, highest_rate, unit_trace
from sdopt.errors import UsageError


def picture(width: int, height: int, kind: str = "PNG", **options: Any) -> bytes:
    random = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(random).save(file := BytesIO(), kind, quality=95, **options)
    return file.getvalue()


PICTURE = base64.b64encode(picture(64, 48)).decode()
SMALL = base64.b64encode(picture(8, 8)).decode().rstrip("=")
"""Some servers leave out what fills up the last four characters."""

LINKS = {
    "a link": "/a.png",
    "a slow link": "/slow.png",
    "a dead link": "/dead.png",
    "a page": "/page.png",
    "a file": "file:///etc/hostname",
    "no address": "http://[",
    "an inline image": f"data:image/png;base64,{PICTURE}",
    "an inline text": "data:image/png;base64,c29ycnksIG5vIGltYWdl",
    "an inline drawing": "data:image/svg+xml;utf8,<svg/>",
}
"""What a server links to, by the prompt."""

ODD = {
    "an error": {"b64_json": None, "error": "no such model"},
    "another server": {"url": "/a.png", "batch_size": "two", "queue_s": "none"},
    "no picture": {"b64_json": "c29ycnksIG5vIGltYWdl"},
    "a data URL": {"b64_json": f"data:image/png;base64,{PICTURE}"},
    "no numbers": {"b64_json": SMALL, "batch_size": math.nan},
}
"""What a server answers otherwise than sdopt's, by the prompt."""


KINDS = {
    "a large AVIF": picture(320, 240, "AVIF"),
    "a damaged AVIF": picture(32, 32, "AVIF").replace(b"pitm", b"xxxx"),
    "a WebP": picture(32, 32, "WEBP"),
    "a sound": b"RIFF\x24\x00\x00\x00WAVEfmt ",
    "a film": b"\x00\x00\x00\x20ftypisom",
}
ODD |= {
    prompt: {"b64_json": base64.b64encode(file).decode()}
    for prompt, file in KINDS.items()
}
for kind in ("PNG", "JPEG", "WEBP", "AVIF"):
    file = picture(32, 32, kind)
    ODD[f"a cut {kind}"] = {
        "b64_json": base64.b64encode(file[: 3 * len(file) // 4]).decode()
    }
    ODD[f"a {kind} cut by lines"] = {
        "b64_json": base64.encodebytes(file[:-30]).decode()
    }
note = PngInfo()
note.add_text("parameters", "Seed: 7")
ODD["a note"] = {"b64_json": base64.b64encode(picture(64, 48, pnginfo=note)).decode()}
LINKS["a cut image inline"] = f"data:image/png;base64,{PICTURE[:-40]}"


@pytest.fixture
def site() -> Iterator[str]:
    """The address of a server that takes one request at a time, each for as many seconds as its prompt says."""
    lock = asyncio.Lock()
    peers: set[object] = set()

    async def draw(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        if prompt == "no image":
            return web.json_response({"data": []})
        if prompt == "a deep list":
            return web.Response(text="[" * 100_000)
        if prompt in ODD:
            return web.json_response({"data": [ODD[prompt]]})
        if prompt == "a cookie":
            peer = request.transport and request.transport.get_extra_info("peername")
            again = len(request.cookies) + (peer in peers)
            peers.add(peer)
            answer = web.json_response({"data": [{"b64_json": PICTURE}] * (1 + again)})
            answer.set_cookie("server", "7")
            return answer
        if prompt in LINKS:
            return web.json_response({"data": [{"url": LINKS[prompt]}]})
        if prompt == "stand still":
            time.sleep(0.4)
            prompt = "0"
        async with lock:
            await asyncio.sleep(float(prompt))
        return web.json_response(
            {
                "data": [
                    {
                        "b64_json": SMALL,
                        "batch_size": 1,
                        "queue_s": 0.1,
                        "compute_s": float(prompt),
                    }
                ]
            }
        )

    async def linked(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3 if request.path == "/slow.png" else 0)
        if request.path == "/dead.png":
            raise web.HTTPNotFound
        return web.Response(
            body=b"<html>" if request.path == "/page.png" else picture(32, 16)
        )

    app, loop = web.Application(), asyncio.new_event_loop()
    app.router.add_post("/v1/images/generations", draw)
    app.router.add_get("/{file}", linked)
    server = TestServer(app)
    loop.run_until_complete(server.start_server())
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.port}"
    loop.call_soon_threadsafe(loop.stop)
    serving.join()
    loop.run_until_complete(server.close())
    loop.close()


class TestTraces:
    @pytest.mark.parametrize("kind", ["poisson", "constant"])
    def test_have_a_mean_rate_of_one(self, kind: str) -> None:
        trace = unit_trace(kind, 10_000, seed=1)
        assert len(trace) == 10_000
        assert trace[0] == 0
        assert (np.diff(trace) > 0).all()
        assert trace[-1] / 9999 == pytest.approx(1)
        assert np.diff(trace).std() == pytest.approx(
            1 if kind == "poisson" else 0, abs=0.05
        )

    def test_of_few_requests_have_that_rate_too(self) -> None:
        assert unit_trace("poisson", 12, seed=1)[-1] == pytest.approx(11)
        assert unit_trace("poisson", 1, seed=1).tolist() == [0]

    def test_depend_on_their_seed_alone(self) -> None:
        assert np.array_equal(unit_trace("poisson", 9, 3), unit_trace("poisson", 9, 3))
        assert not np.array_equal(
            unit_trace("poisson", 9, 3), unit_trace("poisson", 9, 4)
        )

    def test_may_be_recorded(self, tmp_path: Path) -> None:
        (tmp_path / "arrivals").write_text("10\n10.5\n14\n20\n")
        assert unit_trace(str(tmp_path / "arrivals"), 3, 0).tolist() == [0, 0.25, 2]

    @pytest.mark.parametrize(
        "content", ["1\n2", "2\n1\n3", "1\nx\n3", "1\nnan\n3", "1\n1\n1", "1\n1\n1\n2"]
    )
    def test_that_are_none_are_refused(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "arrivals").write_text(content)
        with pytest.raises(UsageError, match=r"load\.arrivals="):
            unit_trace(str(tmp_path / "arrivals"), 3, 0)


class TestTheSimulatedQueue:
    def test_agrees_with_theory(self) -> None:
        """Batches of one are M/D/1, whose mean is S·(1 + ρ / (2·(1 - ρ)))."""
        load = 0.5
        found = batched(unit_trace("poisson", 20_000, 3), lambda images: load, 1)
        assert found.mean() == pytest.approx(
            load * (1 + load / (2 * (1 - load))), rel=0.02
        )

    @pytest.mark.parametrize(
        ("arrivals", "window_s", "latencies"),
        [
            (
                [0, 0.1, 0.2, 0.3],
                0,
                [1.1, 2.3, 2.2, 2.1],
            ),  # one alone, then three together
            (
                [0, 0.1, 0.2, 5],
                0.15,
                [1.35, 1.25, 2.25, 1.25],
            ),  # the oldest waits for the second
            (
                [0, 0.1, 0.2, 0.25, 5],
                10,
                [1.65, 1.55, 1.45, 1.4, 11.1],
            ),  # a full batch does not wait
        ],
    )
    def test_forms_batches_as_a_server_does(
        self, arrivals: list[float], window_s: float, latencies: list[float]
    ) -> None:
        def service(images: int) -> float:
            return 1 + images / 10

        assert batched(arrivals, service, 4, window_s) == pytest.approx(latencies)

    def test_finds_the_highest_rate(self) -> None:
        assert highest_rate(
            lambda rate: float(rate <= 3), 0.99, 0.01, 100
        ) == pytest.approx(3, rel=0.011)
        assert highest_rate(lambda rate: 1.0, 0.99, 0.01, 100) == 100


class TestTheGenerator:
    def test_size_of_an_image_in_broken_lines(self) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
        file = BytesIO()
        Image.fromarray(noise).save(file, "PNG")
        encoded = base64.encodebytes(file.getvalue()).decode()
        begins = generator._decoded(encoded, generator._HEADER_ENCODED)
        assert generator._size_of(begins) == "400x300"

    def test_counts_from_the_scheduled_arrival(self, site: str) -> None:
        """100 ms a request and fifty a second: a clock that starts when the server is free would show 100 ms."""
        sent = generate(
            SendSchedule(
                site + PATH,
                [number / 50 for number in range(8)],
                [{"prompt": "0.1"}] * 8,
                30,
            )
        )
        errors = np.array([each.latency_s for each in sent]) - (
            0.1 + 0.08 * np.arange(8)
        )
        assert errors.min() >= -0.001
        assert np.median(errors) <= 0.25, "a busy machine delays each hop"
        assert [(each.batch, each.queue_s, each.compute_s) for each in sent] == [
            (1, 0.1, 0.1)
        ] * 8

    def test_a_server_that_stands_still_makes_all_that_arrive_late(
        self, site: str
    ) -> None:
        bodies = [
            {"prompt": "stand still" if number == 4 else "0"} for number in range(20)
        ]
        sent = generate(
            SendSchedule(site + PATH, [number / 40 for number in range(20)], bodies, 30)
        )
        assert [each.status for each in sent] == [200] * 20, "none is missing"
        late = [each.latency_s for each in sent if each.latency_s > 0.15]
        assert len(late) >= 8, "a quarter of a second of arrivals"
        assert max(late) >= 0.35

    def test_says_who_gets_no_answer_and_what_is_sent_late(self, site: str) -> None:
        bodies = [{"prompt": "0"}, {"prompt": "an error"}, *[{"prompt": "0.2"}] * 4]
        late, empty, first, *_, last = generate(
            SendSchedule(
                site + PATH, [-1, 0, 0, 0.05, 0.1, 0.15], bodies, timeout_s=0.5
            )
        )
        assert [each.status for each in (late, empty, first, last)] == [200, 0, 200, 0]
        assert late.sent_s - late.scheduled_s >= 0.75, (
            "it was due before it could begin"
        )
        assert late.latency_s >= 0.75
        assert empty.latency_s == last.latency_s == math.inf
        assert "no such model" in empty.said
        assert last.said == "no answer in time"

    def test_waits_for_more_answers_than_a_shell_lets_a_program_have_files(
        self, site: str
    ) -> None:
        """A request that fails here would count as one that the server lost."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)

        def started(_: object) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

        count = 80
        schedule = SendSchedule(
            site + PATH, [0.0] * count, [{"prompt": "0.005"}] * count, 30
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        try:
            sent = generate(schedule, started)
        finally:
            started(None)
        assert {each.status for each in sent} == {200}

    def test_sends_nothing_once_who_asked_is_interrupted(
        self, site: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has a session of its own, which a Ctrl-C in the terminal does not reach."""

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        started: list[subprocess.Popen[str]] = []
        monkeypatch.setattr("subprocess.Popen.communicate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(SendSchedule(site + PATH, [60.0], [{}], 90), started.append)
        assert started[0].returncode is not None

    def test_a_link_counts_when_its_image_is_there(self, site: str) -> None:
        found = generate(
            SendSchedule(
                site + PATH,
                [0.0] * len(LINKS),
                [{"prompt": prompt} for prompt in LINKS],
                timeout_s=5,
            )
        )
        sent = dict(zip(LINKS, found, strict=True))
        assert {
            prompt: one.status for prompt, one in sent.items() if one.status != 200
        } == {
            "a dead link": 0,
            "a page": 0,
            "a file": 0,
            "no address": 0,
            "an inline text": 0,
            "an inline drawing": 0,
            "a cut image inline": 0,
        }
        slow = sent["a slow link"]
        assert slow.latency_s >= (slow.link_s or 0) >= 0.3
        assert slow.size == "32x16"
        assert slow.digest == sent["a link"].digest, (
            "the same image from a cache is seen"
        )
        assert "404" in sent["a dead link"].said
        assert "file:" in sent["a file"].said

    def test_an_image_begins_as_images_do(self, site: str) -> None:
        bodies = [
            {"prompt": prompt} for prompt in ("no picture", "a data URL", "0", "0")
        ]
        text, inline, *twice = generate(
            SendSchedule(site + PATH, [0.0] * 4, bodies, timeout_s=5)
        )
        assert (text.status, inline.status) == (0, 200)
        assert twice[0].digest == twice[1].digest != inline.digest
        assert window_of([inline, *twice], 1.0, 5.0, 5.0).repeated == 1

    def test_images_are_told_from_sounds_and_films(self, site: str) -> None:
        bodies = [{"prompt": prompt} for prompt in KINDS]
        found = generate(SendSchedule(site + PATH, [0.0] * 5, bodies, timeout_s=5))
        assert [(one.status, one.kind, one.size) for one in found] == [
            (200, "avif", "320x240"),
            (0, "", ""),
            (200, "webp", "32x32"),
            (0, "", ""),
            (0, "", ""),
        ]
        assert window_of(found, 1.0, 5.0, 5.0).kinds == ["avif", "webp"]

    def test_what_cannot_be_decoded_whole_is_no_image(self, site: str) -> None:
        prompts = (
            "another server",
            "a cookie",
            *(file for file in ODD if "cut" in file),
            "a cut image inline",
        )
        bodies = [{"prompt": prompt} for prompt in prompts]
        schedule = SendSchedule(site + PATH, [0.0] * len(bodies), bodies, timeout_s=5)
        whole, also, *cut = generate(schedule)
        assert (whole.status, also.status) == (200, 200)
        window = window_of(cut, 1.0, 5.0, 5.0)
        assert (window.errors, window.attainment) == (len(cut), 0.0)
        for one in cut:
            assert one.failure.startswith(
                "status 200, and an image that cannot be decoded whole"
            )
        assert {one.status for one in generate(replace(schedule, decodes=False))} == {
            200
        }

    def test_images_are_the_same_whatever_their_files_say_of_them(
        self, site: str
    ) -> None:
        bodies = [{"prompt": "a data URL"}, {"prompt": "a note"}]
        one, other = generate(SendSchedule(site + PATH, [0.0] * 2, bodies, timeout_s=5))
        assert one.digest == other.digest

    def test_each_request_is_another_clients(self, site: str) -> None:
        """With a cookie, or on one connection, a load balancer would send all requests to one of its servers."""
        address = site.replace("127.0.0.1", "localhost") + PATH
        sent = generate(
            SendSchedule(address, [0.0, 0.5], [{"prompt": "a cookie"}] * 2, timeout_s=5)
        )
        assert [(each.size, each.images) for each in sent] == [("64x48", 1)] * 2

    def test_other_servers_answer_otherwise(self, site: str) -> None:
        prompts = (
            "another server",
            "no image",
            "not a time",
            "no numbers",
            "a deep list",
        )
        found = generate(
            SendSchedule(
                site + PATH,
                [0] * len(prompts),
                [{"prompt": prompt} for prompt in prompts],
                timeout_s=5,
            )
        )
        assert [(each.status, each.batch, each.queue_s) for each in found] == [
            (200, 0, None),
            (0, 0, None),
            (500, 0, None),
            (200, 0, None),
            (0, 0, None),
        ]


def sent(latencies: list[float], lag_s: float = 0.0) -> list[Sent]:
    return [
        Sent(
            number / 10,
            number / 10 + lag_s,
            number / 10 + latency,
            200 if latency < 9 else 429,
            2,
            0.1,
            0.2,
        )
        for number, latency in enumerate(latencies)
    ]


class TestFigures:
    def test_of_a_window(self) -> None:
        found = window_of(
            sent([0.3] * 90 + [0.6] * 8 + [9.0] * 2),
            10.0,
            limit_s=0.5,
            lag_limit_s=0.02,
        )
        assert (found.attainment, found.rejected, found.errors, found.void) == (
            0.9,
            2,
            0,
            False,
        )
        assert found.p50_s == pytest.approx(0.3)
        assert found.p95_s == pytest.approx(0.6)
        assert found.p99_s is None
        assert found.batch == 2
        assert found.goodput == pytest.approx(0.9 * 10.0)
        assert found.link_s is None

    def test_of_a_window_tell_what_was_answered_before(self) -> None:
        images = [
            replace(one, digest=number, size="8x8", images=2)
            for number, one in enumerate(sent([0.3] * 4))
        ]
        found = window_of(images, 10.0, limit_s=0.5, lag_limit_s=0.02, earlier={1, 2})
        assert (found.repeated, found.sizes, found.most_images) == (2, ["8x8"], 2)

    def test_of_a_window_say_why_a_request_failed(self) -> None:
        served, busy = sent([0.3, 9.0])
        failed = replace(served, status=400, said="not this prompt")
        assert window_of([served, busy], 10.0, 0.5, 0.02).why == ""
        found = window_of([served, busy, failed], 10.0, 0.5, 0.02)
        assert (found.errors, found.why) == (1, "status 400: not this prompt")

    def test_of_a_window_do_not_wait_for_what_is_given_up(self) -> None:
        images = sent([0.3] * 11)
        given_up = replace(images[5], status=0, done_s=60.0)
        found = window_of([*images[:5], given_up, *images[6:]], 10.0, 0.5, 0.02)
        assert found.achieved == pytest.approx(10 / 1.3)
        gone = [*images[:5], *(replace(one, status=0) for one in images[5:])]
        assert window_of(gone, 10.0, 0.5, 0.02).achieved == pytest.approx(5)

    def test_of_a_window_have_what_links_take(self) -> None:
        behind_links = [replace(one, link_s=0.2) for one in sent([0.3, 0.3])]
        assert window_of(
            behind_links, 10.0, limit_s=0.5, lag_limit_s=0.02
        ).link_s == pytest.approx(0.2)

    def test_no_percentile_below_the_requests_that_it_needs(self) -> None:
        assert percentile(np.ones(458), 99) is None
        assert percentile(np.ones(459), 99) == 1
        assert percentile(np.ones(58), 95) is None
        assert percentile(np.array([1.0] * 90 + [math.inf] * 10), 95) is None, (
            "a refused request has no latency"
        )

    def test_what_was_sent_late_is_void(self) -> None:
        assert window_of(sent([0.3] * 50, lag_s=0.05), 10.0, 0.5, 0.02).void
        assert not window_of(sent([0.3] * 50, lag_s=0.01), 10.0, 0.5, 0.02).void

    @pytest.mark.parametrize(
        ("attained", "expected"),
        [
            ([1.0, 0.99, 0.98], (2.0, "=")),
            ([1.0, 1.0, 0.98], (2.5, "=")),
            ([1, 1, 1], (3, ">")),
            ([0.9, 0, 0], (1, "<")),
        ],
    )
    def test_the_highest_rate_is_interpolated_or_a_bound(
        self, attained: list[float], expected: tuple[float, str]
    ) -> None:
        windows = [
            window_of(
                sent([0.1] * round(100 * share) + [9.0] * (100 - round(100 * share))),
                rate,
                0.5,
                1.0,
            )
            for rate, share in enumerate(attained, 1)
        ]
        rate, bound = max_rate(windows, lambda requests: 0.99)
        assert rate == pytest.approx(expected[0])
        assert bound == expected[1]

    @pytest.mark.parametrize(
        ("first", "carries", "slowest", "sent_at", "bound"),
        [
            ([1.0, 2.0], 3.0, 0.1, [2.6, 3.38], "="),
            ([1.0, 2.0], 0.7, 0.1, [0.7692, 0.5917], "="),
            ([1.0, 2.0], 1.5, 0.1, [], "="),
            ([1.0], 100.0, 0.1, [1.3, 1.69, 2.197, 2.856, 3.713, 4.827], ">"),
            ([1.0], 0.1, 0.6, [0.7692], "<"),
        ],
    )
    def test_further_rates_bracket_the_highest_one(
        self,
        first: list[float],
        carries: float,
        slowest: float,
        sent_at: list[float],
        bound: str,
    ) -> None:
        def send(rate: float) -> Window:
            return window_of(
                sent([0.1 if rate <= carries else 9.0] * 100), rate, 0.5, 1.0
            )

        windows = [send(rate) for rate in first]
        further = bracketing(windows, lambda requests: 0.99, send, slowest)
        assert [window.rate for window in further] == pytest.approx(sent_at)
        assert max_rate([*windows, *further], lambda requests: 0.99)[1] == bound

    def test_stops_early_as_mlperf_does(self) -> None:
        """The least requests that pass with some late, as `loadgen/early_stopping.cc` computes them."""
        table = {0: 459, 1: 662, 2: 838, 3: 1001, 5: 1307, 10: 2010}
        assert {late: early_stopping(late, 0.99) for late in table} == table
        for late, fewest in table.items():
            assert wanted_share(0.99, fewest, True) == 1 - late / fewest
            assert wanted_share(0.99, fewest - 1, True) > 1 - late / (fewest - 1)
        assert wanted_share(0.99, 100, False) == 0.99

    def test_the_interval_covers_what_it_should(self) -> None:
        random = np.random.default_rng(0)
        covered = 0
        for _ in range(1000):
            found = interval_of(list(np.exp(random.normal(0.3, 0.1, 3))))
            assert found.low is not None
            assert found.high is not None
            covered += found.low <= math.exp(0.3) <= found.high
        assert 930 <= covered <= 970
        assert interval_of([2.0, 2.0]).low is None
