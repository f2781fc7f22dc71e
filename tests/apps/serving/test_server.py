"""A server with fake workers: what it takes, refuses and draws together, and how it ends."""

import asyncio
import base64
import gc
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from PIL import Image

from sdopt.apps.serving.config import Serving
from sdopt.apps.serving.engine import Engine, unservable
from sdopt.apps.serving.server import listen, serve
from sdopt.config.composer import HydraComposer
from sdopt.errors import UnavailableError
from sdopt.record.records import Status
from sdopt.record.samples import Evidence
from sdopt.variant import Variant
from sdopt.worker.protocol import TracedCall, WorkerError
from tests.command import SMOKE
from tests.fakes import Fakes, FakeWorker, failing, fake_study
from tests.fixtures import CPU

GREEDY = {"port": 0, "queue": 8, "deadline_s": 10.0, "drain_s": 5.0}

Composers = type[HydraComposer]


class Answer:
    """What a server said."""

    def __init__(self, status: int, headers: Any, body: Any) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def greys(self) -> list[int]:
        """The grey of each image."""
        images = [
            Image.open(BytesIO(base64.b64decode(each["b64_json"])))
            for each in self.body["data"]
        ]
        return [int(np.asarray(image)[0, 0, 0]) for image in images]

    @property
    def param(self) -> str | None:
        """The field that is at fault."""
        found: str | None = self.body["error"]["param"]
        return found


class Gate:
    """Holds the calls of fake workers until they may go on; those before it is closed are not held."""

    def __init__(self) -> None:
        self._open, self.held = threading.Event(), 0
        self._open.set()

    def __call__(self, worker: FakeWorker, name: str) -> None:
        if name == "render" and not self._open.is_set():
            self.held += 1
            assert self._open.wait(20)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


class Client:
    """Sends requests to a server, whose workers' calls a gate can hold."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        fakes: Fakes,
        gate: Gate,
        address: tuple[str, int],
    ) -> None:
        self.session, self.fakes, self.gate, self.address = (
            session,
            fakes,
            gate,
            address,
        )

    @property
    def rendered(self) -> list[tuple[list[int], int, dict[str, Any]]]:
        """The seeds, the batch size and the changed arguments of each call."""
        return self.fakes.rendered

    async def draw(self, seed: int | None = None, **fields: Any) -> Answer:
        body = {
            "prompt": "a red apple",
            **({} if seed is None else {"seed": seed}),
            **fields,
        }
        async with self.session.post("/v1/images/generations", json=body) as answer:
            return Answer(answer.status, answer.headers, await answer.json())

    def begin(self, seed: int | None = None, **fields: Any) -> "asyncio.Task[Answer]":
        return asyncio.create_task(self.draw(seed, **fields))

    async def hold(self) -> "asyncio.Task[Answer]":
        """Closes the gate, and asks for one image, whose call then waits."""
        self.gate.close()
        asked = self.begin(1)
        while not self.gate.held:
            await asyncio.sleep(0.01)
        return asked

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(path) as answer:
            return answer.status, await answer.text()

    async def until(self, path: str, says: str) -> None:
        while says not in "{} {}".format(*await self.get(path)):
            await asyncio.sleep(0.01)

    async def until_waiting(self, count: int) -> None:
        await self.until("/metrics", f"sdopt_waiting_images {count}.0")


Scenario = Callable[[Client], Awaitable[None]]


@pytest.fixture(autouse=True)
def attached() -> Iterator[None]:
    """Tests that run under nohup would ignore SIGHUP, as a server does then."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def served() -> Variant:
    """The baseline, at three batch sizes."""
    baseline = fake_study()[0].baseline
    return replace(
        baseline,
        name="served",
        workload=replace(baseline.workload, batch_size=[1, 2, 4]),
    )


def during(
    scenario: Scenario,
    variant: Variant,
    tmp_path: Path,
    fakes: Fakes | None = None,
    **serving: Any,
) -> Fakes:
    """Serves while a client asks."""
    gate, settings = Gate(), Serving(**{**GREEDY, **serving})
    fakes = fakes or Fakes({variant.name: gate})

    def start() -> FakeWorker:
        return fakes(variant, tmp_path / "log", tmp_path, lambda seconds: None, print)

    async def main() -> None:
        listening = listen(settings)
        address = listening.getsockname()[:2]
        site = "http://{}:{}".format(*address)

        asking: list[asyncio.Task[None]] = []

        async def ask() -> None:
            fakes.rendered.clear()
            async with aiohttp.ClientSession(
                site, timeout=aiohttp.ClientTimeout(20)
            ) as session:
                await scenario(Client(session, fakes, gate, address))

        async def use() -> None:
            asking.append(asyncio.create_task(ask()))
            await asyncio.shield(
                asking[0]
            )  # it reads answers after the server's end, too

        await serve(Engine(variant, settings, start), settings, CPU, listening, use)
        await asking[0]
        assert not [worker for worker in fakes.started if worker.alive]

    asyncio.run(main())
    return fakes


def serving(**settings: Any) -> Callable[[Scenario], Callable[[Variant, Path], None]]:
    """Makes a test of what a client asks of a server with these keys."""

    def made(scenario: Scenario) -> Callable[[Variant, Path], None]:
        def test(served: Variant, tmp_path: Path) -> None:
            during(scenario, served, tmp_path, **settings)

        return test

    return made


@serving()
async def test_the_same_seed_gives_the_same_image(client: Client) -> None:
    alone = await client.draw(7)
    assert (alone.status, alone.greys) == (200, [7])
    first = await client.hold()
    others = [client.begin(seed) for seed in (5, 6, 7)]
    await client.until_waiting(3)
    client.gate.open()
    assert [(await each).greys for each in (first, *others)] == [[1], [5], [6], [7]]
    assert [image["batch_size"] for image in (await others[0]).body["data"]] == [3]
    assert (await others[0]).body["data"][0]["queue_s"] > 0
    assert client.rendered == [([7], 1, {}), ([1], 1, {}), ([5, 6, 7], 3, {})]


@serving()
async def test_a_request_may_ask_for_several_and_learns_their_seeds(
    client: Client,
) -> None:
    asked = await client.draw(10, n=3)
    assert asked.greys == [10, 11, 12]
    assert [image["seed"] for image in asked.body["data"]] == [10, 11, 12]
    drawn = await client.draw()
    assert drawn.greys == [drawn.body["data"][0]["seed"] % 256]
    assert len(drawn.headers["X-Request-Id"]) == 16
    assert (await client.draw(1, prompt="not finite")).status == 500, (
        "an image without numbers is not sent"
    )


@serving()
async def test_a_prompt_that_is_cut_is_answered_with_a_warning(client: Client) -> None:
    for prompt, warning in (("a red apple", None), ("cut", "prompt: cut")):
        [image] = (await client.draw(1, prompt=prompt)).body["data"]
        assert image["warning"] == warning


def test_a_compiled_variant_is_called_at_the_batch_sizes_that_are_warm(
    composer: Composers, tmp_path: Path
) -> None:
    variant = composer(
        [*SMOKE, "workload.batch_size=[1,4]", "compiler=inductor"]
    ).variant("served")

    async def scenario(client: Client) -> None:
        assert (await client.draw(1, n=3)).greys == [1, 2, 3]

    assert during(scenario, variant, tmp_path).rendered == [([1, 2, 3], 4, {})]


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"max_batch": 1}, [1, 1, 1, 1, 1, 1]),
        ({}, [1, 4, 1]),
        ({"window_ms": 200.0}, [4, 2]),
    ],
)
def test_batches_are_formed_as_the_policy_says(
    served: Variant, tmp_path: Path, settings: dict[str, Any], batches: list[int]
) -> None:
    async def scenario(client: Client) -> None:
        # A window lets the first one wait for others, and nothing is held.
        first = [] if settings.get("window_ms") else [await client.hold()]
        others = [client.begin(seed) for seed in range(6 - len(first))]
        if first:
            await client.until_waiting(5)
            client.gate.open()
        await asyncio.gather(*first, *others)

    fakes = during(scenario, served, tmp_path, **settings)
    assert [len(seeds) for seeds, *_ in fakes.rendered] == batches


@serving(mixed=True)
async def test_what_differs_is_drawn_apart(client: Client) -> None:
    asked = [await client.hold()]
    others: list[dict[str, Any]] = [
        {},
        {"num_inference_steps": 2},
        {"negative_prompt": "blue"},
        {},
    ]
    for number, fields in enumerate(others, 1):
        asked.append(client.begin(1 + number, **fields))
        await client.until_waiting(number)
    client.gate.open()
    assert [each.status for each in await asyncio.gather(*asked)] == [200] * 5
    assert client.rendered == [
        ([1], 1, {}),
        ([2, 5], 2, {}),
        ([3], 1, {"num_inference_steps": 2}),
        ([4], 1, {}),
    ]


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": " "}, 422, "prompt"),
    ({"prompt": "a \u0007 bell"}, 422, "prompt"),
    ({"prompt": "x" * 10_001}, 422, "prompt"),
    ({"prompt": "x" * 70_000}, 413, "body"),
    ({"prompt": 3}, 422, "prompt"),
    ({"model": "other"}, 404, "model"),
    ({"n": 0}, 422, "n"),
    ({"n": 5}, 422, "n"),
    ({"size": "512x512"}, 422, "size"),
    ({"num_inference_steps": 2}, 422, "num_inference_steps"),
    ({"guidance_scale": 2}, 422, "guidance_scale"),
    ({"guidance_scale": -1}, 422, "guidance_scale"),
    ({"seed": -1}, 422, "seed"),
    ({"seed": 2**53, "n": 2}, 422, "seed"),
    ({"negative_prompt": "\u0007"}, 422, "negative_prompt"),
    ({"response_format": "url"}, 422, "response_format"),
    ({"output_format": "webp"}, 422, "output_format"),
    ({"quality": "hd"}, 422, "quality"),
    ({"style": "vivid"}, 422, "style"),
    ({"background": "transparent"}, 422, "background"),
    ({"stream": True}, 422, "stream"),
    ({"moderation": "auto"}, 422, "moderation"),
]


@serving()
async def test_refusals_name_the_field(client: Client) -> None:
    for fields, status, param in WRONG:
        found = await client.draw(**fields)
        assert (found.status, found.param) == (status, param), found.body
        assert found.body["error"]["message"].startswith(f"{param}: ")
    for body, kind, status in (
        (b"{", "application/json", 422),
        (b'{"prompt": "x"}', "text/plain", 415),
    ):
        headers = {"Content-Type": kind}
        async with client.session.post(
            "/v1/images/generations", data=body, headers=headers
        ) as answer:
            assert answer.status == status
    assert not client.rendered


@serving()
async def test_what_clients_send_by_default_is_taken(client: Client) -> None:
    fields = {
        "quality": "auto",
        "style": None,
        "background": "opaque",
        "output_compression": 100,
        "stream": False,
    }
    assert (
        await client.draw(1, n=None, size="auto", user="me", model=None, **fields)
    ).greys == [1]


@serving(mixed=True, max_steps=10)
async def test_limits_hold_where_requests_may_differ(client: Client) -> None:
    assert (await client.draw(num_inference_steps=11)).param == "num_inference_steps"
    assert (await client.draw(guidance_scale=1)).param == "guidance_scale"
    assert (await client.draw(num_inference_steps=10, guidance_scale=2)).status == 200


@serving(queue=2, max_n=2)
async def test_a_full_queue_says_when_to_come_again(client: Client) -> None:
    asked = [await client.hold()]
    asked.append(client.begin(2, n=2))
    await client.until_waiting(2)
    refused = await client.draw(3)
    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) >= 1
    client.gate.open()
    assert [each.status for each in await asyncio.gather(*asked)] == [200, 200]


@serving(deadline_s=0.3)
async def test_what_waited_too_long_is_never_drawn(client: Client) -> None:
    running = await client.hold()
    assert (await client.draw(2)).status == 504
    client.gate.open()
    assert (await running).status == 200, "the deadline is for the queue"
    assert client.rendered == [([1], 1, {})]


@serving()
async def test_clients_that_leave_are_forgotten_if_they_wait_and_harm_nobody_if_they_do_not(
    client: Client,
) -> None:
    running = await client.hold()
    queued, stays = client.begin(2), client.begin(3)
    await client.until_waiting(2)
    queued.cancel()
    await client.until_waiting(1)
    running.cancel()
    await asyncio.sleep(0.1)
    client.gate.open()
    assert (await stays).greys == [3]
    assert (await client.draw(4)).greys == [4]
    assert 'sdopt_answers_total{status="499"} 2.0' in (await client.get("/metrics"))[1]
    assert [seeds for seeds, *_ in client.rendered] == [[1], [3], [4]]


class TestWorkers:
    def test_one_that_dies_is_replaced_and_its_batch_answered(
        self, served: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the first one in its place cannot be prepared, which then is none in its place."""
        monkeypatch.setattr("sdopt.apps.serving.batcher._FIRST_PAUSE_S", 0.01)
        deaths, failures = [Status.KILLED], [Status.OUT_OF_MEMORY]
        armed, may_start = threading.Event(), threading.Event()

        def fault(worker: FakeWorker, name: str) -> None:
            if name == "render" and armed.is_set() and deaths:
                raise WorkerError(deaths.pop(), "killed by SIGKILL during 'render'")
            if name == "prepare" and armed.is_set():
                assert may_start.wait(20)
                if failures:
                    raise WorkerError(failures.pop(), "out of memory")

        async def scenario(client: Client) -> None:
            armed.set()
            assert (await client.draw(1, n=2)).status == 500
            await client.until("/health/ready", '{"status":"restarting"}')
            assert (await client.draw(2)).status == 503
            assert (await client.get("/health/live"))[0] == 200
            may_start.set()
            await client.until("/health/ready", "200")
            assert (await client.draw(3)).greys == [3]
            assert (
                "sdopt_worker_restarts_total 1.0" in (await client.get("/metrics"))[1]
            )

        assert (
            len(during(scenario, served, tmp_path, Fakes({"served": fault})).started)
            == 3
        )

    def test_a_call_that_fails_fails_its_batch_alone(
        self, served: Variant, tmp_path: Path
    ) -> None:
        once = [True]

        def fault(worker: FakeWorker, name: str) -> None:
            if name == "render" and "prove" in worker.requests and once:
                once.pop()
                raise WorkerError(Status.OUT_OF_MEMORY, "out of memory")

        async def scenario(client: Client) -> None:
            assert (await client.draw(1)).status == 500
            assert (await client.draw(2)).greys == [2]

        assert (
            len(during(scenario, served, tmp_path, Fakes({"served": fault})).started)
            == 1
        )

    @pytest.mark.parametrize("starts", [False, True])
    def test_one_that_cannot_be_started_or_whose_option_has_no_effect_ends_the_server(
        self,
        served: Variant,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        starts: bool,
    ) -> None:
        none = TracedCall(
            [Evidence("precision", "bf16", False, "all products in float32")],
            None,
            {},
            [],
        )
        monkeypatch.setattr(FakeWorker, "_prove", lambda self: none)
        faults = {} if starts else {"served": failing(Status.OUT_OF_MEMORY)}
        said = (
            "precision=bf16: has no effect here: all products in"
            if starts
            else "out_of_memory.*; fewer or smaller"
        )
        with pytest.raises(UnavailableError, match=said):
            during(lambda _client: asyncio.sleep(0), served, tmp_path, Fakes(faults))


@serving()
async def test_the_end_finishes_what_runs_and_refuses_what_waits_and_comes(
    client: Client,
) -> None:
    running = await client.hold()
    waits = client.begin(2)
    await client.until_waiting(1)
    signal.raise_signal(signal.SIGTERM)
    assert (await waits).status == 503
    assert (await client.get("/health/ready")) == (503, '{"status":"draining"}')
    assert (await client.draw(3)).status == 503
    client.gate.open()
    assert (await running).greys == [1]


def test_the_end_does_not_wait_for_ever(
    served: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: Client) -> None:
        def kill(worker: FakeWorker) -> None:
            worker.stop()
            client.gate.open()

        monkeypatch.setattr(FakeWorker, "kill", kill)
        running = await client.hold()
        signal.raise_signal(signal.SIGTERM)
        with suppress(aiohttp.ClientError):
            await running

    during(scenario, served, tmp_path, drain_s=0.2)


HALF_A_REQUEST = (
    b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\n"
    b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)


def test_the_end_does_not_wait_for_a_client_that_stalls(
    served: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdopt.apps.serving.server._LAST_ANSWERS_S", 0.3)
    told_s: list[float] = []

    async def scenario(client: Client) -> None:
        for sent in (HALF_A_REQUEST, HALF_A_REQUEST[:40], b""):
            stalling = stack.enter_context(socket.create_connection(client.address))
            stalling.sendall(sent)
        assert (await client.draw(1)).status == 200
        signal.raise_signal(signal.SIGTERM)
        told_s.append(time.monotonic())

    with ExitStack() as stack:
        during(scenario, served, tmp_path)
        assert time.monotonic() - told_s[0] < 3


@serving(deadline_s=0.3)
async def test_a_body_that_does_not_arrive_is_refused_and_its_connection_closed(
    client: Client,
) -> None:
    answer, stream = await asyncio.open_connection(*client.address)
    stream.write(HALF_A_REQUEST)
    said = await asyncio.wait_for(answer.read(), 5)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b'"param":"body"' in said
    stream.close()


def test_clients_that_leave_leave_nothing_in_the_log(
    served: Variant, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(client: Client) -> None:
        running = await client.hold()
        leaving = [client.begin(seed, n=2) for seed in range(3)]
        await client.until_waiting(6)
        for asked in [running, *leaving[:2]]:
            asked.cancel()
        await client.until_waiting(2)
        signal.raise_signal(signal.SIGTERM)
        assert (await leaving[2]).status == 503
        client.gate.open()

    during(scenario, served, tmp_path)
    gc.collect()
    assert not [
        record.getMessage() for record in caplog.records if record.name == "asyncio"
    ]


@serving()
async def test_monitors_may_ask_with_head(client: Client) -> None:
    for path in ("/health/ready", "/health/live", "/v1/models", "/metrics", "/"):
        async with client.session.head(path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
    running = await client.hold()
    signal.raise_signal(signal.SIGHUP)  # as of a terminal that is closed
    await client.until("/health/ready", "draining")
    async with client.session.head("/health/ready") as answer:
        assert answer.status == 503
    client.gate.open()
    assert (await running).status == 200


@serving()
async def test_what_is_served_and_how_with_a_page_that_loads_nothing_else(
    client: Client,
) -> None:
    loaded = (await client.get("/metrics"))[1]
    assert "sdopt_worker_memory_bytes 3.221225472e+08" in loaded
    await client.draw(1, n=2)
    [model] = json.loads((await client.get("/v1/models"))[1])["data"]
    assert (model["id"], model["variant"], model["max_batch"], model["policy"]) == (
        "emoji",
        "served",
        4,
        "greedy",
    )
    assert (await client.get("/health/ready")) == (200, '{"status":"ready"}')
    text = (await client.get("/metrics"))[1]
    for line in (
        "sdopt_ready 1.0",
        "sdopt_images_total 2.0",
        "sdopt_compiled_graphs_total 0.0",
    ):
        assert line in text
    assert (await client.get("/docs"))[0] == 404

    async with client.session.get("/") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"https?://|innerHTML|src=\"|@import|url\(", page)


def test_what_cannot_be_served(composer: Composers) -> None:
    work = [
        "workload.size=[32,64]",
        "workload.batch_size=[1,2]",
        "workload.images_per_prompt=2",
    ]
    chosen = ["task=img2img", "workload.steps=2", "memory=[precomputed_embeddings]"]
    variant = composer([*SMOKE, *work, *chosen]).variant(None)
    # Of DPM++ SDE, for which a package is needed.
    drawing = replace(variant.scheduler, options={"noise_sampler_seed": 0})
    found = unservable(
        replace(variant, scheduler=drawing), Serving(max_batch=3, queue=3), CPU
    )
    for reason in (
        "workload.size=[32, 64]: a server makes images of one size",
        "task=img2img: a server makes images from prompts alone",
        "workload.images_per_prompt=2: a request names its number as n",
        "serving.max_batch=3: larger than any batch size",
        "serving.max_n=4: at most serving.queue=3",
        "memory.precomputed_embeddings: needs all prompts",
        "scheduler.options.noise_sampler_seed: draws the noise of all images of a call",
    ):
        assert [each for each in found if each.startswith(reason)], found
    [window] = unservable(composer([*SMOKE]).variant(None), Serving(window_ms=5.0), CPU)
    assert window.startswith("serving.window_ms: has no effect on calls of one image")
