"""`sdopt serve engine=ray` on a real Ray cluster, in an environment that has the extra `ray-serve`."""

import json
import signal
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from sdopt.traffic.generator import Schedule, generate
from tests.command import sdopt, start
from tests.runners import ray_head
from tests.tracking.postgres import free_port

SMALL = ("hardware=cpu", "hardware.threads=1", "workload.steps=1", "workload.size=32", "workload.batch_size=[1,2]")


@pytest.fixture(scope="module")
def head() -> Iterator[ray_head.Head]:
    with ray_head.running("ray-serve", "ray.serve") as head:
        yield head


def ask(site: str, **fields: Any) -> tuple[int, Any]:
    body = json.dumps({"prompt": "a red apple", **fields}).encode()
    try:
        request = Request(f"{site}/v1/images/generations", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.slow
def test_replicas_serve_as_one_machine_does(head: ray_head.Head, tmp_path: Path) -> None:
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
        assert len({answer["data"][0]["b64_json"] for _, answer in answers}) == 1, "the same seed, on either replica"
        assert ask(site, num_inference_steps=9)[0] == 422
        sent = generate(Schedule(site, [number / 4 for number in range(12)], [{"prompt": "x", "seed": 1}] * 12, 60))
        assert {each.status for each in sent} == {200}
    finally:
        process.popen.send_signal(signal.SIGTERM)
        ended = process.finish(60)
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "ended")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_the_extra_is_named(tmp_path: Path) -> None:
    found = sdopt(tmp_path, "serve", "engine=ray", *SMALL)
    assert found.code == 2
    assert "engine=ray: needs an extra: pip install 'sdopt[ray-serve]'" in found.shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serving.replicas=2"], "serving.replicas=2: has no effect on one machine; choose engine=ray"),
        (["engine=ray", "serving.port=0"], "serving.port=0: Ray's proxies need a port that is named"),
        (["engine=rey"], "serving.engine=rey: choose one of local, ray"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], said: str) -> None:
    found = sdopt(tmp_path, "serve", *arguments)
    assert found.code == 2
    assert said in found.shown
