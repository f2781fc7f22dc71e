"""Sends requests at the times of a schedule, whatever becomes of earlier ones.

It is a process of its own, so that neither the server nor what reads its answers delays what it sends. It reads a
`SendSchedule` as JSON from standard input, and writes the sent requests as JSON to standard output.
"""

import asyncio
import base64
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

PATH = "/v1/images/generations"
"""Where servers with OpenAI's interface take requests for images."""
_SAID = 300
"""Bytes of an answer without an image that are kept."""
_LARGEST_IMAGE = 64 * 2**20
"""Bytes of an image behind a link that are read at most."""
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"\x00\x00\x00")
"""How files of images begin: PNG, JPEG, WebP, GIF, AVIF."""
_LONGEST_BEGIN = max(map(len, _IMAGES))
_BEGIN_ENCODED = 8
"""Characters of base64 that hold so many bytes."""
_TOLD = ("batch_size", "queue_s", "compute_s")
"""What sdopt's servers tell of an image; others may mean something else by it."""
_AHEAD_S = 0.2
"""From reading the schedule to its time 0."""


@dataclass(frozen=True)
class SendSchedule:
    """What is sent, where, and when."""

    address: str
    """Where requests for images are sent."""
    times_s: Sequence[float]
    """Ascending, from the first."""
    bodies: Sequence[dict[str, Any]]
    """The body of each request."""
    timeout_s: float
    """Seconds after which a request is given up."""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """One request, with times in seconds from time 0 of the schedule."""

    scheduled_s: float
    sent_s: float
    done_s: float
    status: int
    """Of the answer; 0 if there was none, or if there was no image in it."""
    batch: int = 0
    """Images of its call; 0 where a server does not say so."""
    queue_s: float | None = None
    compute_s: float | None = None
    said: str = ""
    """Why there is no image, in the server's own words where it has some."""
    link_s: float | None = None
    """What it took to fetch the image behind a link, which its latency includes; None of an image in the answer."""
    digest: int | None = None
    """A checksum of the image in the answer, so that answers from a cache are seen; None of one behind a link."""

    @property
    def latency_s(self) -> float:
        """From its scheduled time, however late it was sent; infinite if it got no image."""
        return self.done_s - self.scheduled_s if self.status == 200 else float("inf")


def generate(
    schedule: SendSchedule, started: Callable[["subprocess.Popen[str]"], None] = lambda process: None
) -> list[Sent]:
    """Sends a schedule from a process of its own, and returns what became of each request.

    `started` receives the process, which a Ctrl-C in the terminal does not reach.

    Raises:
        RuntimeError: that process failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "sdopt.apps.traffic.generator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started(process)
    out, err = process.communicate(json.dumps(asdict(schedule)))
    if process.returncode:
        raise RuntimeError(f"the load generator failed: {' '.join(err.strip().splitlines()[-1:])}")
    return [Sent(**each) for each in json.loads(out)]


async def _send_all(schedule: SendSchedule) -> list[Sent]:
    # aiohttp's defaults would hold back all but a hundred requests.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=schedule.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=schedule.headers) as session:
        start_s = time.perf_counter() + _AHEAD_S
        tasks = []
        for scheduled_s, body in zip(schedule.times_s, schedule.bodies, strict=True):
            await asyncio.sleep(max(0.0, start_s + scheduled_s - time.perf_counter()))
            tasks.append(asyncio.create_task(_send(session, schedule.address, scheduled_s, body, start_s)))
        return list(await asyncio.gather(*tasks))


async def _send(
    session: aiohttp.ClientSession, url: str, scheduled_s: float, body: dict[str, Any], start_s: float
) -> Sent:
    sent_s = time.perf_counter() - start_s
    link_s = digest = None
    try:
        # Elsewhere a key would be read by another.
        async with session.post(url, json=body, allow_redirects=False) as answer:
            content = await answer.read()
            status = answer.status
        answered_s = time.perf_counter() - start_s
        image, said = _image_in(content), " ".join(content[:_SAID].decode(errors="replace").split())
        there = status == 200 and bool(image.get("b64_json") or image.get("url"))
        if there and not image.get("b64_json"):
            said = await _fetched(session, urljoin(url, str(image["url"])))
            there = not said
            link_s = time.perf_counter() - start_s - answered_s
        elif there:
            encoded = str(image["b64_json"])
            there = _is_image(encoded)
            digest = zlib.crc32(encoded.encode())
        done_s = time.perf_counter() - start_s
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        said = str(error) or "no answer in time"
        return Sent(scheduled_s, sent_s, time.perf_counter() - start_s, 0, said=said)
    if not there:
        return Sent(scheduled_s, sent_s, done_s, 0 if status == 200 else status, said=said)
    batch, queue_s, compute_s = (value if isinstance(value := image.get(key), int | float) else None for key in _TOLD)
    return Sent(scheduled_s, sent_s, done_s, status, int(batch or 0), queue_s, compute_s, link_s=link_s, digest=digest)


def _image_in(content: bytes) -> dict[str, Any]:
    """Returns the first image of an answer, with what is told of it; {} without one."""
    try:
        return dict(json.loads(content)["data"][0])
    except (ValueError, LookupError, TypeError):
        return {}


def _is_image(encoded: str) -> bool:
    """Returns whether a text in base64 begins as an image does; some servers begin it as a data URL."""
    _, _, encoded = encoded.rpartition("base64,")
    try:
        return base64.b64decode(encoded[:_BEGIN_ENCODED]).startswith(_IMAGES)
    except ValueError:
        return False


async def _fetched(session: aiohttp.ClientSession, link: str) -> str:
    """Fetches the image behind a link; returns why there is none, or "".

    Reads http and https alone, and sends a client's key to nobody else: the link may lead anywhere.
    Raises aiohttp.ClientError, OSError or TimeoutError.
    """
    parts = urlsplit(link)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"[:_SAID]  # what follows may be a key
    if link.startswith("data:image/"):
        return ""
    if parts.scheme not in ("http", "https"):
        return f"a link that is not fetched: {shown}"
    without_key = aiohttp.ClientSession(connector=session.connector, connector_owner=False, timeout=session.timeout)
    async with without_key, without_key.get(link) as answer:
        begins = await answer.content.read(_LONGEST_BEGIN)
        size = len(begins)
        async for chunk in answer.content.iter_chunked(2**16):
            size += len(chunk)
            if size > _LARGEST_IMAGE:
                return f"a link to more than {_LARGEST_IMAGE // 2**20} MiB: {shown}"
        if answer.status != 200:
            return f"a link that answers {answer.status}: {shown}"
    return "" if begins.startswith(_IMAGES) else f"a link to what is no image: {shown}"


if __name__ == "__main__":
    sent = asyncio.run(_send_all(SendSchedule(**json.load(sys.stdin))))
    json.dump([asdict(each) for each in sent], sys.stdout)
