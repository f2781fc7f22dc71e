"""Servers that want a path, a model, a key or headers of their own; and keys stay out of all that is written."""

import base64
import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sdopt.apps.loadtest.config import load_config
from sdopt.apps.loadtest.target import Target, address_of, target_of
from sdopt.apps.traffic.generator import generate
from sdopt.errors import UsageError
from tests.command import sdopt

KEY = "sk-3f9c0d-not-for-logs"
SENT_TO = ["url=http://h", "load.rates=[1]", "load.limit_s=1"]
Image.new("L", (1, 1)).save(PIXEL := BytesIO(), "PNG")
ENCODED = base64.b64encode(PIXEL.getvalue()).decode()
IMAGE = f'{{"created": 1, "data": [{{"b64_json": "{ENCODED}"}}]}}'.encode()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", "http://h:1/v1/images/generations"),
        ("http://h:1/", "http://h:1/v1/images/generations"),
        ("http://h/v1/", "http://h/v1/images/generations"),
        ("http://h/api/v3", "http://h/api/v3/images/generations"),
        ("http://h/proxy", "http://h/proxy/v1/images/generations"),
        (
            "https://h/openai/images/generations?api-version=1",
            "https://h/openai/images/generations?api-version=1",
        ),
        ("https://h/v1?a=b", "https://h/v1/images/generations?a=b"),
    ],
)
def test_addresses_as_clients_write_them(url: str, address: str) -> None:
    assert address_of(url) == address


class Strict(ThreadingHTTPServer):
    """Answers only who sends the key and the model; repeats the key to all others, as some servers do."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Strict

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        key = self.headers.get("Authorization", "")
        right = key == f"Bearer {KEY}" and body.get("model") == "mine"
        content = (
            IMAGE if right else f'{{"error": "wrong model, or key {key}"}}'.encode()
        )
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def strict() -> Iterator[Strict]:
    with Strict() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_key_reaches_the_server_and_no_file(
    strict: Strict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    site = f"url=http://127.0.0.1:{strict.server_port}/openai/images/generations?api-version=1"
    words = [
        site,
        "load.rates=[50]",
        "load.limit_s=5",
        "load.requests=10",
        "load.replicates=1",
        "load.lag_ms=60000",
    ]
    words += [
        "load.key=MY_KEY",
        "load.headers={x-team: a b,api-key: $MY_KEY}",
        "load.fields={seed: null,size: 64x64}",
    ]
    words += [
        f"tracking.uri=sqlite:///{tmp_path}/ml.db",
        f"tracking.artifacts={tmp_path}/artifacts",
    ]
    found = sdopt(tmp_path, "load-test", *words)
    assert found.code == 3
    assert "wrong model, or key Bearer ***" in found.shown
    assert KEY not in found.shown
    found = sdopt(tmp_path, "load-test", *words, "load.model=mine")
    assert found.code == 0, found.shown
    assert "requests are sent for about 1 min in all" in found.shown
    path, headers, body = strict.asked[-1]
    assert path == "/openai/images/generations?api-version=1"
    assert (headers["api-key"], headers["x-team"]) == (KEY, "a b")
    assert (body["model"], body["size"], "seed" in body) == ("mine", "64x64", False)
    query = (
        "SELECT value FROM experiment_tags WHERE key = 'mlflow.sharedViewState.sdopt'"
    )
    with closing(sqlite3.connect(tmp_path / "ml.db")) as store:
        [(view,)] = store.execute(query).fetchall()
    assert json.loads(view)["orderByKey"] == "metrics.`load/max_rate_per_s`"
    assert not [
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and KEY.encode() in file.read_bytes()
    ]


def test_no_image_is_asked_for_twice(
    strict: Strict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server with a cache would answer all windows but the first from it."""
    monkeypatch.setenv("MY_KEY", KEY)
    words = [
        f"url=http://127.0.0.1:{strict.server_port}?sig=7q-signed-q7&code=7q-signed-q7",
        "load.rates=[40,50]",
        "load.limit_s=5",
    ]
    words += [
        "load.requests=10",
        "load.replicates=2",
        "load.lag_ms=60000",
        "load.key=MY_KEY",
        "load.model=mine",
    ]
    words += [
        "load.fields={x_token: $MY_KEY}",
        "load.arrivals=constant",
        "tracking=none",
        "load.folder=loads",
    ]
    found = sdopt(tmp_path, "load-test", *words, "workload.prompts=[a,b,c]")
    assert found.code == 0, found.shown
    seeds = [body["seed"] for _, _, body in strict.asked]
    assert len({*seeds}) == len(seeds) == 41
    assert strict.asked[-1][2]["x_token"] == KEY
    [folder] = {file.parent for file in tmp_path.rglob("load.json")}
    text = (folder / "load.md").read_text()
    assert (
        "39 of 40 images are the same as another one, though each request has a seed of its own"
        in text
    )
    assert "with 3 prompts" in text
    assert "2 replicates, all with the same trace; no intervals" in text
    for secret in (KEY, "7q-signed-q7"):
        assert not [
            file for file in folder.iterdir() if secret.encode() in file.read_bytes()
        ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["load.key=NO_SUCH_NAME"], "load.key: is the name of an environment variable"),
        (
            ["load.headers={Api-Key: abc}"],
            "load.headers.Api-Key: would be written into the record",
        ),
        (
            ["load.fields={api_key: abc}"],
            "load.fields.api_key: would be written into the record",
        ),
        (
            ["load.fields={metadata: {api_key: abc}}"],
            "load.fields.metadata.api_key: would be written into the record",
        ),
        (
            ["load.headers={X-Credential: abc}"],
            "load.headers.X-Credential: would be written into the record",
        ),
        (
            ["load.headers={x: $NO_SUCH_NAME}"],
            "load.headers.x: the environment variable NO_SUCH_NAME is not set",
        ),
        (
            ["load.fields={n: 4}"],
            "load.fields.n: figures are of requests for one image each",
        ),
        (
            ["load.fields={prompt: x}"],
            "load.fields.prompt: workload.prompts has the prompts",
        ),
    ],
)
def test_what_would_be_recorded_or_has_no_effect_is_refused(
    words: list[str], said: str
) -> None:
    def read() -> None:
        load, *_ = load_config([*SENT_TO, *words])
        target_of(load, "http://h")

    with pytest.raises(UsageError, match=said):
        read()


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ("", ["load.key=LONG"]),
        ("me:p%40ss@", []),
        ("hf_abcdefghijkl@", []),
        ("", ["load.headers={authorization: $LONG}"]),
    ],
)
def test_words_that_repeat_a_secret_are_shown_without_it(
    strict: Strict, monkeypatch: pytest.MonkeyPatch, site: str, words: list[str]
) -> None:
    """Only the beginning of them is shown, which has the beginning of a long key."""
    monkeypatch.setenv("LONG", "eyJhbGciOi" + 400 * "x")
    url = f"http://{site}127.0.0.1:{strict.server_port}/v1"
    load, *_ = load_config([f"url={url}", "load.rates=[1]", "load.limit_s=1", *words])
    target = target_of(load, url)
    [sent] = generate(target.schedule(["a red apple"], 1, [0.0], 5))
    assert sent.status == 401
    [(_, headers, _)] = strict.asked
    key = headers.get("Authorization") or headers["authorization"]
    shown = target.shown(sent.said)
    assert "wrong model, or key" in shown
    assert key.split()[-1][:10] not in shown


def test_no_secret_is_shown_in_part() -> None:
    target = target_of(load_config(SENT_TO)[0], "http://h/v1?code=one&api-version=2")
    assert target.shown("no one has version 2") == "no *** has version 2"
    target = Target("http://h", secrets=["sk-1", "sk-1234"])
    assert target.shown("\x1b[31msk-1234") == "\\x1b[31m***"


def test_the_size_that_is_asked_for_has_two_spellings() -> None:
    load, *_ = load_config(
        [*SENT_TO, "load.fields={width: 64, height: 32, output_format: JPG}"]
    )
    target = target_of(load, "http://h")
    assert (target.asked_size, target.asked_kind) == ("64x32", "jpeg")


def test_a_key_given_by_mistake_is_not_shown(tmp_path: Path) -> None:
    words = [
        "url=http://127.0.0.1:9",
        "load.rates=[1]",
        "load.limit_s=1",
        "tracking=none",
        f"load.key={KEY}",
    ]
    found = sdopt(tmp_path, "load-test", *words)
    assert found.code == 2
    assert KEY not in found.shown


def test_keys_of_a_foreign_server_have_no_effect_on_ones_own() -> None:
    with pytest.raises(
        UsageError, match=r"load\.model: has no effect without load\.url"
    ):
        load_config(["load.model=x"])
