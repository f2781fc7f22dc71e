"""`sdopt serve` with the packaged model: OpenAI's client, the same image in every place, its end; on a Ray cluster."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import runners.serve
from sdopt.apps.loadtest.command import _measure
from sdopt.apps.serving.config import Serving
from sdopt.apps.traffic.generator import PATH, SendSchedule, generate
from sdopt.errors import ConflictError
from sdopt.gate.trust import SMALLEST_ERROR
from sdopt.reference import LORAS, MODEL
from sdopt.worker.protocol import Asked
from tests.command import Finished, Process, fork, refused, start
from tests.fixtures import CPU, Compose, Load
from tests.forked import ForkedCommand
from tests.pipelines.test_hub import MINE, in_cache, offline
from tests.runners import ray_head
from tests.tracking.postgres import free_port

# Beside tests that measure.
WORK = (
    "hardware=cpu",
    "hardware.threads=1",
    "hardware.exclusive=false",
    "workload.batch_size=[1,2]",
)


class Server:
    """The command in a process of its own."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        self.process: Process = fork(cwd, "serve", "serving.port=0", *WORK, *arguments)
        self.site = self._said("loading").partition(": ")[0]

    def _said(self, word: str) -> str:
        popen = self.process.popen
        assert isinstance(popen, ForkedCommand)
        while not (said := [line for line in popen.said.splitlines() if word in line]):
            assert popen.poll() is None, self.process.finish().shown
            time.sleep(0.05)
        return said[0]

    def until_ready(self) -> "Server":
        self._said("ready")
        return self

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urlopen(self.site + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.site}/v1", api_key="none", max_retries=0)

    def draw(self, seed: int) -> np.ndarray:
        with self.client as client:
            answer = client.images.generate(
                model="emoji", prompt="a red apple", extra_body={"seed": seed}
            )
        assert answer.data
        assert answer.data[0].b64_json
        return pixels_of(answer.data[0].b64_json)

    def end(self) -> Finished:
        os.kill(self.process.popen.pid, signal.SIGTERM)
        return self.process.finish()


def pixels_of(encoded: str) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(encoded))))


@pytest.fixture(scope="module")
def server(
    finished: Finished, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A variant that was measured, with other batch sizes."""
    measured = ("--from", str(finished.folder), "--variant", "batches of four")
    made = Server(tmp_path_factory.mktemp("serve"), *measured)
    yield made.until_ready()
    assert made.end().code == 0
    assert not made.process.left_behind()


def test_openais_client_gets_images(server: Server) -> None:
    with server.client as client:
        answer = client.images.generate(
            model="emoji",
            prompt="a red apple",
            n=2,
            size="auto",
            response_format="b64_json",
            extra_body={"seed": 5},
        )
    assert answer.data
    first, second = (pixels_of(image.b64_json or "") for image in answer.data)
    assert first.shape == (32, 32, 3), "as it was measured"
    assert '"variant":"batches of four"' in server.get("/v1/models")[1]
    assert error_of(first, server.draw(5)) <= SMALLEST_ERROR
    assert error_of(second, server.draw(6)) <= SMALLEST_ERROR
    assert error_of(first, second) > SMALLEST_ERROR
    with server.client as client:
        with pytest.raises(
            openai.UnprocessableEntityError,
            match="quality: Input should be 'auto' or 'standard'",
        ):
            client.images.generate(prompt="a red apple", quality="hd")
        with pytest.raises(openai.NotFoundError):
            client.images.generate(model="dall-e-3", prompt="a red apple")


def test_a_killed_worker_is_replaced(server: Server) -> None:
    before = server.draw(1)
    pid = int(re.findall(r'"worker":(\d+)', server.get("/health/live")[1])[0])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.draw, 2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError):
            asked.result()
    while server.get("/health/ready")[0] != 200:
        time.sleep(0.1)
    assert error_of(server.draw(1), before) <= SMALLEST_ERROR


def test_idle_it_waits_and_does_not_look_again_and_again(server: Server) -> None:
    def wakings() -> int:
        """How often its threads have begun to wait."""
        tasks = Path(f"/proc/{server.process.popen.pid}/task").glob("*/status")
        return sum(
            int(
                re.findall(
                    r"^voluntary_ctxt_switches:\s+(\d+)", task.read_text(), re.M
                )[0]
            )
            for task in tasks
        )

    time.sleep(0.1)
    before = wakings()
    time.sleep(0.4)
    assert wakings() - before < 16, (
        "uvicorn looks ten times a second whether it is to end"
    )


def error_of(one: np.ndarray, other: np.ndarray) -> float:
    """Mean squared difference of two images in 0…1."""
    return float(np.mean((one / 255.0 - other / 255.0) ** 2))


PROMPTS = ["a red apple", "a blue car", "a green cat", "a red star"]


def test_the_same_seed_gives_the_same_image_in_every_place(session: Load) -> None:
    """And a server that mixed up its images, or drew all from one seed, would be found."""
    host = session("workload.steps=2")
    images = [Asked(prompt, seed) for seed, prompt in enumerate(PROMPTS)]

    def draw(asked: Sequence[Asked], batch_size: int) -> list[np.ndarray]:
        found = list(host.render(asked, batch_size, {}).pixels)
        assert len(found) == len(asked)
        return found

    def worst(found: Sequence[np.ndarray], order: Sequence[int]) -> float:
        return max(
            error_of(image, alone[number])
            for image, number in zip(found, order, strict=True)
        )

    alone = [draw([image], 1)[0] for image in images]
    # The second and the last but one are filled up.
    for size, order in (
        (2, [1, 0]),
        (2, [2]),
        (4, [0, 1, 2, 3]),
        (4, [2, 0, 1]),
        (4, [3, 2, 1, 0]),
    ):
        found = draw([images[number] for number in order], size)
        assert worst(found, order) <= SMALLEST_ERROR
    assert worst(found[::-1], order) > 100 * SMALLEST_ERROR
    one_seed = [Asked(images[number].prompt, 0) for number in order]
    assert worst(draw(one_seed, 4), order) > 100 * SMALLEST_ERROR


def test_a_served_image_is_that_of_a_study(session: Load, tmp_path: Path) -> None:
    """A request with a prompt and a seed of the quality pass gets its image."""
    from sdopt.worker.draws import timed_draw

    host = session("workload.prompt_count=3")
    draw = timed_draw(host._variant)
    records = [
        record
        for batch in range(draw.calls)
        for record in host.generate(batch, draw, tmp_path).records
    ]
    for record in records:
        served = host.render([Asked(record.prompt, record.seed)], 1, {}).pixels[0]
        assert np.array_equal(served, np.asarray(Image.open(tmp_path / record.path)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["serving.port=-1"],
            "serving.port=-1: Input should be greater than or equal to 0",
        ),
        (["serving.que=1"], "serving.que: "),
        (["precision=tf32"], "precision=tf32: TensorFloat-32 needs a CUDA device"),
        (["serving.host=203.0.113.1"], "serving.host=203.0.113.1: "),
        (["--variant", "x"], "--variant: name the run"),
        (["--from", "nowhere/at/all"], "nowhere/at/all: no such folder"),
        (
            ["engine=ray", "serving.port=0"],
            "serving.port=0: Ray's proxies need a port that is named",
        ),
        (["engine=rey"], "serving.engine=rey: Input should be 'local' or 'ray'"),
    ],
)
def test_mistakes_end_it_before_anything_is_loaded(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    refused(tmp_path, "serve", "hardware=cpu", *arguments, says=said)


def test_what_has_no_effect_is_said_at_once(tmp_path: Path) -> None:
    given = ("gate=default", "workload.seed=3", "serving.replicas=2")
    found = refused(
        tmp_path,
        "serve",
        "hardware=cpu",
        *given,
        says="serving.replicas=2: has no effect on one machine",
    )
    assert "gate=default: has no effect on a server; leave it out" in found.err
    assert (
        "workload.seed=3: has no effect on a server; leave it out; of this section it reads"
        in found.err
    )


def test_what_is_known_once_a_model_is_here_is_refused_then(
    variant: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first time as any other time; before, nothing says that a LoRA fits in part."""
    offline(monkeypatch, tmp_path)
    tensors = load_file(LORAS / "fxemoji.safetensors")
    for which, shape in (("A", (4, 8)), ("B", (8, 4))):
        tensors[f"unet.down_blocks.9.lora_{which}.weight"] = torch.ones(shape)
    save_file(tensors, tmp_path / "more.safetensors")
    words = ["model.weights=hub", MINE, "model.name=small", "workload.size=32"]
    words += ["lora=loaded", f"lora.path={tmp_path / 'more.safetensors'}"]
    chosen, machine = variant(*words), SimpleNamespace(device=CPU, warnings=())

    def fetch(*_: object) -> None:
        shutil.rmtree(tmp_path / "models--somebody--small-emoji", ignore_errors=True)
        in_cache(tmp_path, MODEL, MINE.partition("=")[2])

    here: Any = (machine, None)
    monkeypatch.setattr("sdopt.worker.machine.find_machine", lambda *_: here)
    monkeypatch.setattr("sdopt.apps.serving.server.listen", lambda _: None)
    monkeypatch.setattr("sdopt.preparation.fetch", fetch)
    monkeypatch.setattr("sdopt.preparation.check_models", lambda *_: None)
    nothing: Any = None
    with pytest.raises(ConflictError, match=r"more\.safetensors holds"):
        runners.serve._serve(chosen, Serving(), nothing)
    rows, unsaid = [(chosen, Serving())], [list[str]()]
    with pytest.raises(ConflictError, match=r"more\.safetensors holds"):
        _measure(nothing, rows, unsaid, nothing, here[0], nothing, print)


def test_a_port_that_is_taken(server: Server, tmp_path: Path) -> None:
    port = f"serving.port={server.site.rpartition(':')[2]}"
    refused(
        tmp_path,
        "serve",
        "hardware=cpu",
        port,
        says="choose another, or 0 for a free port",
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_draws_in_a_browser(server: Server, tmp_path: Path) -> None:
    """The page as it is, with a script of the test's at its end that presses the button; what it says is text."""
    page = server.get("/")[1]
    press = "<script>setTimeout(() => document.getElementById('draw').click(), 500)</script></body>"
    prompt = "a red &lt;img src=x onerror=document.title=1&gt; apple"
    (tmp_path / "page.html").write_text(
        page.replace("</body>", press)
        .replace("'/v1/", f"'{server.site}/v1/")
        .replace("a red apple", prompt)
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security"]
    flags += [
        f"--user-data-dir={tmp_path}/user",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    command = ["chromium", *flags, (tmp_path / "page.html").as_uri()]
    dumped = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "data:image/png;base64,iVBOR" in dumped
    assert re.search(r"seed \d+: [\d.]+ s in the queue, [\d.]+ s computing", dumped)
    assert "emoji (" in dumped
    assert "<title>sdopt serve</title>" in dumped


SMALL = (
    "hardware=cpu",
    "hardware.threads=1",
    "workload.steps=1",
    "workload.size=32",
    "workload.batch_size=[1,2]",
)


@pytest.fixture(scope="module")
def head() -> Iterator[ray_head.Head]:
    with ray_head.running("ray-serve", "ray.serve") as head:
        yield head


def ask(site: str, **fields: Any) -> tuple[int, Any]:
    body = json.dumps({"prompt": "a red apple", **fields}).encode()
    try:
        request = Request(
            f"{site}/v1/images/generations", body, {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.slow
def test_replicas_serve_as_one_machine_does(
    head: ray_head.Head, tmp_path: Path
) -> None:
    port = free_port()
    site = f"http://127.0.0.1:{port}"
    ray = ("engine=ray", f"serving.port={port}", "serving.replicas=2")
    process = start(tmp_path, "serve", *ray, *SMALL, **head.environment)
    try:
        assert isinstance(process.popen, subprocess.Popen)
        assert process.popen.stdout is not None
        for line in process.popen.stdout:
            if line == f"{site}: ready\n":
                break
        else:
            pytest.fail(process.finish().shown)
        answers = [ask(site, seed=7) for _ in range(8)]
        assert {status for status, _ in answers} == {200}
        assert len({answer["data"][0]["b64_json"] for _, answer in answers}) == 1, (
            "the same seed, on either replica"
        )
        assert ask(site, num_inference_steps=9)[0] == 422
        sent = generate(
            SendSchedule(
                site + PATH,
                [number / 4 for number in range(12)],
                [{"prompt": "x", "seed": 1}] * 12,
                60,
            )
        )
        assert {each.status for each in sent} == {200}
    finally:
        process.popen.send_signal(signal.SIGTERM)
        ended = process.finish(60)
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "ended")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_the_extra_is_named(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "serve",
        "engine=ray",
        *SMALL,
        says="engine=ray: needs an extra: pip install 'sdopt[ray-serve]'",
    )
