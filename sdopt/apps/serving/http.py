"""The HTTP interface of a server: OpenAI's for images, and what operators and Prometheus ask for."""

import asyncio
import base64
import json
import secrets
import time
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from sdopt.apps.serving.batcher import Batcher, Drawn, RefusalError, Waiting
from sdopt.apps.serving.engine import EngineWork, refused_work
from sdopt.hardware.device import Device
from sdopt.pipelines.prompts import is_guided, wrong_prompt
from sdopt.schema import HIGHEST_SEED, Seed
from sdopt.worker.protocol import Asked

_CLIENT_LEFT = 499
"""The status that nginx writes for a client that did not wait for its answer."""

_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
"""The page shows nothing from anywhere else."""


class Generation(BaseModel):
    """The body of a request for images: that of OpenAI's interface, and what diffusers has beyond it.

    What this server cannot honour is refused, and not ignored.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    model: str | None = None
    n: Annotated[int | None, Field(ge=1)] = 1
    size: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    user: str | None = None
    """The client's name for its user, which changes nothing here nor at OpenAI."""
    # Clients send OpenAI's defaults, which ask for nothing but an image.
    quality: Literal["auto", "standard"] | None = None
    style: None = None
    background: Literal["auto", "opaque"] | None = None
    output_compression: Literal[100] | None = None
    stream: Literal[False] | None = None
    seed: Seed | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int | None, Field(ge=1)] = None
    guidance_scale: Annotated[
        float | None, Field(ge=0, le=1000, allow_inf_nan=False)
    ] = None


class Interface:
    """Answers requests."""

    def __init__(self, batcher: Batcher, device: Device) -> None:
        self._batcher, self._device, self._begun = batcher, device, int(time.time())
        self._variant, self._serving, self._meters = (
            batcher.engine.variant,
            batcher.serving,
            batcher.meters,
        )

    def app(self) -> FastAPI:
        """Returns the application."""
        app = FastAPI(openapi_url=None)
        app.add_api_route("/v1/images/generations", self.generations, methods=["POST"])
        # Load balancers and monitors ask with HEAD.
        for path, answer in (
            ("/v1/models", self.models),
            ("/health/live", self.live),
            ("/health/ready", self.ready),
            ("/metrics", self.metrics),
            ("/", self.page),
        ):
            app.add_api_route(path, answer, methods=["GET", "HEAD"])
        return app

    async def generations(self, request: Request) -> Response:
        """Draws the images of one request."""
        name = request.headers.get("x-request-id", "")[:100]
        name = (
            name
            if name.isascii() and name.isprintable() and name
            else secrets.token_hex(8)
        )
        try:
            answer = await self._images(request)
        except RefusalError as refusal:
            answer = _error(refusal)
        except ClientDisconnect:
            answer = Response(status_code=_CLIENT_LEFT)
        self._meters.answers.labels(str(answer.status_code)).inc()
        answer.headers["X-Request-Id"] = name
        return answer

    async def models(self) -> dict[str, Any]:
        """Says what is served."""
        variant, engine = self._variant, self._batcher.engine
        served = {
            "id": variant.model.name,
            "object": "model",
            "created": self._begun,
            "owned_by": "sdopt",
            "variant": variant.name,
            "options": dict(variant.choices),
            "size": f"{variant.size}x{variant.size}",
            "num_inference_steps": variant.workload.steps,
            "guidance_scale": variant.guidance_scale,
            "batch_sizes": engine.batch_sizes,
            "max_batch": engine.largest,
            "policy": self._serving.policy,
            "max_n": self._serving.max_n,
        }
        return {"object": "list", "data": [served]}

    async def live(self) -> dict[str, Any]:
        """Says that this process answers."""
        return {"status": "live", "worker": self._batcher.engine.pid}

    async def ready(self) -> JSONResponse:
        """Says whether requests are taken."""
        state = self._batcher.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self) -> Response:
        """Returns the counters."""
        return Response(self._meters.text(), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> HTMLResponse:
        """Returns a page to try the server with."""
        return HTMLResponse(
            _PAGE,
            headers={
                "Content-Security-Policy": _PAGE_POLICY,
                "X-Frame-Options": "DENY",
            },
        )

    async def _images(self, request: Request) -> Response:
        """Raises RefusalError, or ClientDisconnect if the client leaves while it still sends."""
        given = await self._read(request)
        asked, work = self._asked(given)
        images = self._batcher.submit(asked, work)
        try:
            drawn = await _answers(request, images)
            pngs = await asyncio.gather(
                *(asyncio.to_thread(_png, each.pixels) for each in drawn)
            )
        finally:
            self._batcher.drop(images)
        data = [
            {
                "b64_json": png,
                "seed": each.seed,
                "batch_size": image.batch,
                "queue_s": image.queue_s,
                "compute_s": image.compute_s,
                "warning": image.cut or None,
            }
            for png, each, image in zip(pngs, asked, drawn, strict=True)
        ]
        found = {
            "created": int(time.time()),
            "data": data,
            "output_format": "png",
            "size": f"{self._variant.size}x{self._variant.size}",
        }
        return JSONResponse(found)

    async def _read(self, request: Request) -> Generation:
        """Reads the body, within its limit. Raises RefusalError."""
        # A page of another site may send a form here, but not JSON unless this server allows it.
        if (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
            != "application/json"
        ):
            raise RefusalError(415, "send application/json", "content-type")
        limit, deadline_s, body = (
            self._serving.body_kib * 1024,
            self._serving.deadline_s,
            bytearray(),
        )
        try:
            async with asyncio.timeout(deadline_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise RefusalError(
                            413, f"larger than {limit} bytes (serving.body_kib)", "body"
                        )
        except TimeoutError:
            raise RefusalError(
                408,
                f"did not arrive within {deadline_s:g} s (serving.deadline_s)",
                "body",
            ) from None
        try:
            generation = Generation.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(
                include_url=False, include_input=False, include_context=False
            )[0]
            field = str(first["loc"][0]) if first["loc"] else "body"
            unknown = first["type"] == "extra_forbidden"
            raise RefusalError(
                422,
                "not supported here; leave it out" if unknown else first["msg"],
                field,
            ) from None
        if twice := _named_twice(body):
            raise RefusalError(422, "is there twice", twice)
        return generation

    def _asked(self, given: Generation) -> tuple[list[Asked], EngineWork]:
        """Returns the images that a request asks for. Raises RefusalError, with the field that is at fault."""
        variant, count = self._variant, given.n or 1
        sizes = ("auto", f"{variant.size}x{variant.size}")
        negative = (
            variant.workload.negative_prompt
            if given.negative_prompt is None
            else given.negative_prompt
        )
        seed = secrets.randbelow(2**32) if given.seed is None else given.seed
        wrong = {
            "model": given.model not in (None, variant.model.name)
            and f"this server has {variant.model.name}",
            "prompt": wrong_prompt(given.prompt)
            if given.prompt.strip()
            else "is empty",
            "n": count > self._serving.max_n
            and f"at most {self._serving.max_n} (serving.max_n)",
            "size": given.size not in (None, *sizes)
            and f"this server makes {sizes[1]}",
            "seed": seed + count - 1 > HIGHEST_SEED
            and f"the last image's is above {HIGHEST_SEED}",
            "negative_prompt": given.negative_prompt is not None
            and self._wrong_negative(given.negative_prompt),
        }
        scale = given.guidance_scale
        work = self._batcher.engine.work_of(
            Asked(given.prompt, seed, negative),
            given.num_inference_steps or variant.workload.steps,
            variant.guidance_scale if scale is None else scale,
        )
        for field, reason in {
            **wrong,
            **refused_work(variant, self._serving, self._device, work),
        }.items():
            if reason:
                raise RefusalError(404 if field == "model" else 422, reason, field)
        return [
            Asked(given.prompt, seed + number, negative) for number in range(count)
        ], work

    def _wrong_negative(self, negative: str) -> str | None:
        if not is_guided(self._variant.workload, self._variant.model):
            return "has no effect, since this server generates without guidance"
        return wrong_prompt(negative)


def _named_twice(body: bytes | bytearray) -> str | None:
    """Returns a field that an object in JSON has more than once, of which a reader would take the last value."""
    fields = [name for name, _ in json.loads(body, object_pairs_hook=list)]
    return next((name for name in fields if fields.count(name) > 1), None)


async def _answers(request: Request, images: list[Waiting]) -> list[Drawn]:
    """Waits until all images are there. Raises RefusalError, or ClientDisconnect if the client does not wait."""
    left: asyncio.Future[Any] = asyncio.ensure_future(_left(request))
    try:
        drawn = []
        for image in images:
            await asyncio.wait(
                {image.answer, left}, return_when=asyncio.FIRST_COMPLETED
            )
            if not image.answer.done():
                raise ClientDisconnect
            drawn.append(image.answer.result())
        return drawn
    finally:
        left.cancel()


async def _left(request: Request) -> None:
    """Returns when the client closes the connection; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _png(pixels: np.ndarray) -> str:
    Image.fromarray(pixels).save(stream := BytesIO(), "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def _error(refusal: RefusalError) -> JSONResponse:
    """Returns a refusal as OpenAI's clients read it."""
    kind = "invalid_request_error" if refusal.status < 429 else "server_error"
    message = f"{refusal.param}: {refusal.reason}" if refusal.param else refusal.reason
    error = {"message": message, "type": kind, "param": refusal.param, "code": None}
    headers = (
        {}
        if refusal.retry_after_s is None
        else {"Retry-After": str(max(1, round(refusal.retry_after_s)))}
    )
    if refusal.status in (408, 413):
        headers["Connection"] = "close"  # what else is sent of the body is not read
    return JSONResponse({"error": error}, refusal.status, headers=headers)
