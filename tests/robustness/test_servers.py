"""Tracking servers that hang, fail, die or are something else: the result is safe, and one line says what to do."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest

from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.schema import Tracking
from sdopt.tracking import store
from sdopt.tracking.client import TrackingError
from sdopt.tracking.runs import download_run, log_study
from sdopt.tracking.store import end_process
from tests.robustness.damage import RESULT

pytestmark = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="mlflow is not installed"
)

NONE: Mapping[str, str] = MappingProxyType({})

Answer = Callable[[BaseHTTPRequestHandler], None]


def respond(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: Mapping[str, str] = NONE,
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def says(status: int, body: bytes, **headers: str) -> Answer:
    """Answers each request alike."""
    return lambda handler: respond(
        handler,
        status,
        body,
        {name.replace("_", "-"): it for name, it in headers.items()},
    )


def hangs(handler: BaseHTTPRequestHandler) -> None:
    handler.server.released.wait(20)  # type: ignore[attr-defined]


def drops(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def drips(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not handler.server.released.wait(0.2):  # type: ignore[attr-defined]
        handler.wfile.write(b" ")


@pytest.fixture
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The address of a server that answers every request as the parameter does; MLflow is patient for a second."""
    answer: Answer = request.param

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self)

        do_GET = do_POST = do_PUT = do_PATCH = _answer  # noqa: N815 (as the base class calls them)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    end_process()  # the next one has these
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    found.released = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    end_process()
    found.released.set()  # type: ignore[attr-defined]
    found.shutdown()
    found.server_close()


ANSWERS: dict[str, tuple[Answer, str]] = {
    "hangs": (hangs, "timed out|no complete answer"),
    "fails": (says(500, b"internal error"), "500"),
    "is another": (says(200, b"<html>a page to log in</html>"), "valid JSON"),
    "is empty": (says(200, b"{}"), ""),
    "drops": (drops, "closed connection"),
    "forbids": (
        says(403, b'{"error_code": "PERMISSION_DENIED", "message": "not you"}'),
        "PERMISSION_DENIED: not you",
    ),
    "knows nobody": (
        says(401, b"<html>401</html>"),
        "error code 401",
    ),
    "asks to wait": (says(429, b"slow down", Retry_After="3600"), "429"),
    "is elsewhere": (
        says(301, b"", Location="https://elsewhere.example"),
        "error code 301",
    ),
    "drips": (drips, r"no complete answer within 0.3 s; .*tracking\.deadline_s"),
}


@pytest.mark.parametrize(
    ("server", "said"),
    [
        # Each waits for MLflow's own process, which takes seconds to start.
        pytest.param(
            *case,
            id=name,
            marks=[] if name in ("forbids", "drips") else pytest.mark.slow,
        )
        for name, case in ANSWERS.items()
    ],
    indirect=["server"],
)
@pytest.mark.walk(1)
def test_what_it_does_is_one_line(
    server: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_GRACE_S", 0.5)
    tracking = Tracking(
        uri=server, images=False, deadline_s=0.3 if "within 0.3 s" in said else 3
    )
    began = time.monotonic()
    for work in (
        lambda: log_study(read_result(RESULT), tmp_path, tracking),
        lambda: download_run("a" * 32, tracking),
    ):
        with pytest.raises((TrackingError, UsageError)) as caught:
            work()
        assert isinstance(caught.value, TrackingError | UsageError)
        [problem] = caught.value.problems
        assert server in problem
        assert "\n" not in problem
        assert re.search(said, problem)
    assert time.monotonic() - began < 120
