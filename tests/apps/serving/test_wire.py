"""What clients, proxies and probes send to a server beside plain JSON in HTTP/1.1, and what it answers."""

import asyncio
import gzip
import json
from pathlib import Path

from sdopt.variant import Variant
from tests.apps.serving.test_server import Client, during, served  # noqa: F401

PATH = "/v1/images/generations"


def request(
    body: bytes,
    *headers: str,
    kind: str = "application/json",
    version: str = "1.1",
    method: str = "POST",
) -> bytes:
    lines = [
        f"{method} {PATH} HTTP/{version}",
        "Host: h",
        f"Content-Type: {kind}",
        "Connection: close",
        *headers,
    ]
    if not any(header.startswith("Transfer-Encoding") for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


BODY = json.dumps({"prompt": "a red apple", "seed": 7}).encode()
CHUNKS = (
    b"4\r\n"
    + BODY[:4]
    + b"\r\n"
    + b"%x\r\n" % len(BODY[4:])
    + BODY[4:]
    + b"\r\n0\r\n\r\n"
)
SAME_KEYS = b'{"prompt": "x", "seed": 1, "seed": 7}'

SENT = {
    "HTTP/1.0": (request(BODY, version="1.0"), 200),
    "chunks": (request(CHUNKS, "Transfer-Encoding: chunked"), 200),
    "expects to be told to go on": (request(BODY, "Expect: 100-continue"), 200),
    "JSON with its encoding": (
        request(BODY, kind="application/json; charset=utf-8"),
        200,
    ),
    "compressed": (request(gzip.compress(BODY), "Content-Encoding: gzip"), 422),
    "Latin-1": (request(b'{"prompt": "\xe4pfel"}'), 422),
    "half of a surrogate pair": (request(b'{"prompt": "\\ud83d"}'), 422),
    "UTF-16": (request(BODY.decode().encode("utf-16")), 422),
    "a seed twice": (request(SAME_KEYS), 422),
    "no JSON": (request(b"prompt=x"), 422),
    "a list": (request(b"[]"), 422),
    "nothing": (request(b""), 422),
    "a form": (request(b"prompt=x", kind="application/x-www-form-urlencoded"), 415),
    "OPTIONS": (request(b"", method="OPTIONS"), 405),
    "GET": (request(b"", method="GET"), 405),
    "two lengths": (request(BODY, "Content-Length: 3"), 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
}


def test_each_is_answered_and_the_next_one_served(
    served: Variant,  # noqa: F811
    tmp_path: Path,
) -> None:
    wrong = []

    async def scenario(client: Client) -> None:
        for name, (sent, status) in SENT.items():
            answer, stream = await asyncio.open_connection(*client.address)
            stream.write(sent)
            said = await asyncio.wait_for(answer.read(), 5)
            said = said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            stream.close()
            if not said.startswith(b"HTTP/1.1 %d " % status):
                wrong.append(f"{name}: {said[:300]!r}, not {status}")
            if status >= 415 and b'"error":' not in said:
                wrong.append(f"{name}: clients cannot read {said[:300]!r}")
        assert (await client.draw(7)).status == 200

    fakes = during(scenario, served, tmp_path)
    assert not wrong, "\n".join(wrong)
    assert [seeds for seeds, *_ in fakes.rendered] == [[7]] * (
        1 + sum(status == 200 for _, status in SENT.values())
    )
