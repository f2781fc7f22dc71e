"""Sends requests at the times of a schedule, whatever becomes of earlier ones.

It is a process of its own, so that neither the server nor what reads its answers delays what it sends. It reads a
`SendSchedule` as JSON from standard input, and writes the sent requests as JSON to standard output.
"""

import asyncio
import base64
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from tempfile import TemporaryFile
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

import aiohttp
from PIL import Image, UnidentifiedImageError, features

PATH = "/v1/images/generations"
"""Where servers with OpenAI's interface take requests for images."""
_SAID = 2**12
"""Bytes of an answer without an image that are kept: more than is shown, since a key that is cut is not found in it."""
_LARGEST_IMAGE = 64 * 2**20
"""Bytes of an image behind a link that are read at most."""
_KINDS = {
    "png": rb"\x89PNG",
    "jpeg": rb"\xff\xd8\xff",
    "gif": rb"GIF8",
    "webp": rb"RIFF....WEBP",
    "avif": rb"....ftyp(avi[fs]|mif1)",
    "heic": rb"....ftyphei[cx]",
}
"""How files of images begin; sounds and films begin with RIFF and ftyp, too."""
_BEGIN_ENCODED = 16
"""Characters of base64 that hold the bytes by which a file is known."""
_HEADER_ENCODED = 2**16
"""Characters of base64 that are decoded for the size of an image; a multiple of 4."""
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    RuntimeError,  # of an AVIF
    Image.DecompressionBombError,
)
"""What Pillow raises of files that it cannot read."""
_TOLD = ("batch_size", "queue_s", "compute_s")
"""What sdopt's servers tell of an image; others may mean something else by it."""
_AHEAD_S = 0.2
"""From reading the schedule to its time 0."""
_WATCHED_S = 1.0
"""After so long a pause it is seen that the process that wants the answers has ended."""
_PARENT = os.getppid()
"""That process, of one that only sends."""


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
    decodes: bool = True
    """Whether images are decoded once all requests are answered; sdopt's own server makes none that are not whole."""


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
    """A checksum of the image, so that answers from a cache are seen: of its pixels where it was decoded."""
    size: str = ""
    """Width and height of the image, as in `512x768`; "" where its header does not say."""
    kind: str = ""
    """Of the image's file: png, jpeg, …; "" without an image."""
    images: int = 0
    """Images of the answer, of which the first one is looked at; entries without one do not count."""

    @property
    def latency_s(self) -> float:
        """From its scheduled time, however late it was sent; infinite if it got no image."""
        return self.done_s - self.scheduled_s if self.status == 200 else float("inf")

    @property
    def failure(self) -> str:
        """Why there is no image, with the status of an answer that was no success."""
        return f"status {self.status}: {self.said}" if self.status else self.said


class _Images:
    """Files of images as they came, on disk: what is decoded while requests are out would delay them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[int, tuple[int, int]] = {}
        """Where a file begins and how many bytes it has, by its checksum."""

    def keep(self, file: bytes) -> int:
        """Keeps a file, in base64 or not; returns its checksum."""
        digest = zlib.crc32(file)
        if digest not in self._places:
            self._places[digest] = (self._file.seek(0, os.SEEK_END), len(file))
            self._file.write(file)
        return digest

    def decoded(self, sent: Sequence[Sent]) -> list[Sent]:
        """Returns the requests with checksums of pixels; those whose image cannot be decoded whole have none."""
        kinds = {one.digest: one.kind for one in sent if one.digest is not None}
        places = [self._places[digest] for digest in kinds]
        self._file.flush()
        with ThreadPoolExecutor() as pool:
            looked = pool.map(self._look, places, kinds.values())
            found = dict(zip(kinds, looked, strict=True))
        return [_with_pixels(one, found) for one in sent]

    def _look(self, place: tuple[int, int], kind: str) -> int | str | None:
        start, size = place
        file = os.pread(self._file.fileno(), size, start)
        if not _kind_of(file):
            file = _decoded(file.decode(), size)
        return _pixels_of(file, kind)


def _with_pixels(sent: Sent, found: Mapping[int, int | str | None]) -> Sent:
    """Returns a request with the checksum of its image's pixels, or without an image if there is a reason instead."""
    if sent.digest is None:
        return sent
    pixels = found[sent.digest]
    if isinstance(pixels, str):
        why = f"status 200, and an image that cannot be decoded whole: {pixels}"
        return Sent(sent.scheduled_s, sent.sent_s, sent.done_s, 0, said=why)
    return sent if pixels is None else replace(sent, digest=pixels)


def generate(
    schedule: SendSchedule,
    started: Callable[["subprocess.Popen[str]"], None] = lambda process: None,
) -> list[Sent]:
    """Sends a schedule from a process of its own, and returns what became of each request.

    `started` receives the process, which a Ctrl-C in the terminal does not reach.

    Raises:
        RuntimeError: that process failed.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "sdopt.apps.traffic.generator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        started(process)
        try:
            out, err = process.communicate(json.dumps(asdict(schedule)))
        except BaseException:  # a Ctrl-C: nobody wants the requests that are left
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(
            f"the load generator failed: {' '.join(err.strip().splitlines()[-1:])}"
        )
    return [Sent(**each) for each in json.loads(out)]


def _sent(schedule: SendSchedule) -> list[Sent]:
    with TemporaryFile() as file:
        images = _Images(file)
        sent = asyncio.run(_send_all(schedule, images))
        return images.decoded(sent) if schedule.decodes else sent


async def _send_all(schedule: SendSchedule, images: _Images) -> list[Sent]:
    # Each request that waits has a file: with the usual thousand, further ones would fail here, not at the server.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a limit that the kernel has lowered since
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    timeout = aiohttp.ClientTimeout(total=schedule.timeout_s)
    # Each request is another client's: with a cookie, or on one connection, a load balancer would send all of them to
    # the same server; and a connection that a server closes after an answer would fail the next one. aiohttp's defaults
    # would hold back all but a hundred.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers=schedule.headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        start_s = time.perf_counter() + _AHEAD_S
        tasks = []
        for scheduled_s, body in zip(schedule.times_s, schedule.bodies, strict=True):
            await _until(start_s + scheduled_s)
            tasks.append(
                asyncio.create_task(
                    _send(session, schedule.address, scheduled_s, body, start_s, images)
                )
            )
        return list(await asyncio.gather(*tasks))


async def _until(due_s: float) -> None:
    """Waits until a time of `perf_counter`; ends this process where the one that wants its answers is gone."""
    while True:
        left_s = due_s - time.perf_counter()
        await asyncio.sleep(max(0.0, min(left_s, _WATCHED_S)))
        if os.getppid() != _PARENT:
            sys.exit("nobody waits for the answers")
        if left_s <= _WATCHED_S:
            return


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    scheduled_s: float,
    body: dict[str, Any],
    start_s: float,
    kept: _Images,
) -> Sent:
    sent_s = time.perf_counter() - start_s
    link_s, file, size, kind = None, b"", "", ""
    try:
        # Elsewhere a key would be read by another.
        async with session.post(url, json=body, allow_redirects=False) as answer:
            content = await answer.read()
            status = answer.status
        answered_s = time.perf_counter() - start_s
        images, said = (
            _images_in(content),
            " ".join(content[:_SAID].decode(errors="replace").split()),
        )
        image = images[0] if images else {}
        there = status == 200 and bool(image.get("b64_json") or image.get("url"))
        done_s = time.perf_counter() - start_s
        if there and not image.get("b64_json"):
            file, said = await _fetched(session, urljoin(url, str(image["url"])))
            there = not said
            done_s = time.perf_counter() - start_s
            link_s = done_s - answered_s
            size, kind = _size_of(file), _kind_of(file)
        elif there:
            encoded = str(image["b64_json"])
            kind = _kind_of(_decoded(encoded, _BEGIN_ENCODED))
            there = bool(kind)
            # An AVIF is read whole, or not at all.
            header = len(encoded) if kind == "avif" else _HEADER_ENCODED
            file, size = encoded.encode(), _size_of(_decoded(encoded, header))
    except (
        aiohttp.ClientError,
        OSError,
        TimeoutError,
        ValueError,
    ) as error:  # ValueError: a link that is no address
        said = str(error) or "no answer in time"
        return Sent(scheduled_s, sent_s, time.perf_counter() - start_s, 0, said=said)
    if not there:
        if status == 200:
            status, said = 0, f"status 200 without an image: {said}"
        return Sent(scheduled_s, sent_s, done_s, status, said=said)
    batch, queue_s, compute_s = (_number(image.get(key)) for key in _TOLD)
    return Sent(
        scheduled_s,
        sent_s,
        done_s,
        status,
        int(batch or 0),
        queue_s,
        compute_s,
        link_s=link_s,
        digest=kept.keep(file),
        size=size,
        kind=kind,
        images=sum(1 for one in images if one.get("b64_json") or one.get("url")),
    )


def _images_in(content: bytes) -> list[dict[str, Any]]:
    """Returns the images of an answer, with what is told of each; [] without one."""
    try:
        return [dict(image) for image in json.loads(content)["data"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


def _number(told: object) -> int | float | None:
    """Returns a number that a server tells; None for what is none."""
    return told if isinstance(told, int | float) and math.isfinite(told) else None


def _kind_of(file: bytes | bytearray) -> str:
    """Returns which kind of image a file is, as it begins; "" of what is none."""
    for kind, begin in _KINDS.items():
        if re.match(begin, file, re.DOTALL):
            return kind
    return ""


def _decoded(encoded: str, characters: int) -> bytes:
    """Returns the beginning of a file in base64, which some servers begin as a data URL; b"" if it is none."""
    _, _, encoded = encoded.rpartition("base64,")
    # Some break lines, which would leave a part that is no multiple of 4.
    encoded = "".join(encoded[: 2 * characters].split())[:characters]
    try:
        return base64.b64decode(encoded + "==")  # some leave it out
    except ValueError:
        return b""


def _pixels_of(file: bytes, kind: str) -> int | str | None:
    """Returns a checksum of an image's pixels, or why it cannot be decoded whole; None of a kind that is not known."""
    Image.init()
    optional = kind in features.modules
    if kind.upper() not in Image.OPEN or (optional and not features.check(kind)):
        return None
    try:
        with Image.open(BytesIO(file), formats=[kind.upper()]) as image:
            return zlib.crc32(image.tobytes(), image.width)
    except UnidentifiedImageError:
        return "what follows its beginning is none"
    except _UNREADABLE as error:
        return str(error)


def _size_of(begins: bytes) -> str:
    """Returns the size that the header of an image says, as in `512x768`; "" if it does not."""
    try:
        with Image.open(BytesIO(begins)) as image:
            return f"{image.width}x{image.height}"
    except _UNREADABLE:
        return ""


async def _fetched(session: aiohttp.ClientSession, link: str) -> tuple[bytes, str]:
    """Fetches the image behind a link; returns its file and "", or why there is none.

    Reads http and https alone, and sends a client's key to nobody else: the link may lead anywhere.
    Raises aiohttp.ClientError, OSError, TimeoutError, or ValueError if it is no address.
    """
    parts = urlsplit(link)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"[
        :_SAID
    ]  # what follows may be a key
    if link.startswith("data:image/"):
        inline = _decoded(link, len(link))
        return inline, "" if _kind_of(inline) else "a data URL that holds no image"
    if parts.scheme not in ("http", "https"):
        return b"", f"a link that is not fetched: {shown}"
    without_key = aiohttp.ClientSession(
        connector=session.connector, connector_owner=False, timeout=session.timeout
    )
    file = bytearray()
    async with without_key, without_key.get(link) as answer:
        async for chunk in answer.content.iter_chunked(2**16):
            file += chunk
            if len(file) > _LARGEST_IMAGE:
                return (
                    b"",
                    f"a link to more than {_LARGEST_IMAGE // 2**20} MiB: {shown}",
                )
        if answer.status != 200:
            return b"", f"a link that answers {answer.status}: {shown}"
    said = "" if _kind_of(file) else f"a link to what is no image: {shown}"
    return bytes(file), said


if __name__ == "__main__":
    sent = _sent(SendSchedule(**json.load(sys.stdin)))
    json.dump([asdict(each) for each in sent], sys.stdout)
