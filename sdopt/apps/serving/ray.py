"""Serves a variant from a Ray cluster: each replica has a queue, a worker and an interface of its own.

A replica is all that `sdopt.apps.serving.server` runs, in a process that Ray Serve starts and watches, and adds and
takes away by the load; Ray's proxy spreads the requests.
"""

import asyncio
import logging
import multiprocessing
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI

from sdopt.apps.serving.batcher import Batcher
from sdopt.apps.serving.config import Serving
from sdopt.apps.serving.engine import Engine
from sdopt.apps.serving.http import Interface
from sdopt.errors import UnavailableError
from sdopt.hardware.device import Device
from sdopt.scratch import scratch_folder
from sdopt.variant import Variant
from sdopt.worker.machine import find_machine
from sdopt.worker.process import WorkerProcess

_NAME = "sdopt"

_STARTS = 3
"""Attempts of Ray to start a replica before a deployment counts as failed."""


def deploy(
    variant: Variant, serving: Serving, device: Device, ready: Callable[[], None]
) -> None:
    """Serves a variant from the Ray cluster at RAY_ADDRESS until SIGTERM or Ctrl-C.

    `ready` is called once when requests are taken.

    Raises:
        UnavailableError: there is no cluster, or no replica gets ready.
    """
    import ray
    from ray import serve

    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    except ConnectionError as error:
        reason = "no Ray cluster is reached: start one with `ray start --head`, or set RAY_ADDRESS"
        raise UnavailableError(reason) from error
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())

    def build() -> FastAPI:  # Ray asks for a function
        return application(variant, serving)

    replicas = {
        "min_replicas": serving.replicas,
        "max_replicas": max(serving.replicas, serving.most_replicas or 0),
    }
    largest = serving.largest([shape.batch_size for shape in variant.shapes])
    replica = serve.deployment(
        serve.ingress(build)(_Replica),
        name=_NAME,
        autoscaling_config={**replicas, "target_ongoing_requests": largest},
        max_ongoing_requests=serving.queue + largest,
        max_constructor_retry_count=_STARTS,
        graceful_shutdown_timeout_s=serving.drain_s + 5,
        ray_actor_options={
            "num_cpus": variant.hardware.threads or 1,
            "num_gpus": int(device.is_cuda),
        },
    )
    try:
        serve.start(http_options={"host": serving.host, "port": serving.port})
        serve.run(replica.bind(), name=_NAME)
        ready()
        told.wait()
    except RuntimeError as error:
        found = serve.status().applications[_NAME].deployments[_NAME].message
        raise UnavailableError(
            f"{variant.name}: no replica gets ready: {found}"
        ) from error
    finally:
        serve.delete(_NAME)
        ray.shutdown()


class _Replica:
    """What Ray Serve starts; the application does all."""


def application(variant: Variant, serving: Serving) -> FastAPI:
    """Returns a replica's application, which starts its worker before Ray counts it as running."""
    context = multiprocessing.get_context(
        "spawn"
    )  # a fork server needs the main thread, which is Ray's
    device = find_machine(context, variant.hardware, dict)[0].device
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder("serve"))
    log, timeout_s = folder / "worker.log", variant.protocol.timeout_s
    engine = Engine(
        variant,
        serving,
        partial(WorkerProcess, context, device, timeout_s, variant, log, folder),
    )

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        begun = asyncio.Event()
        drawing, first = (
            asyncio.ensure_future(batcher.run(begun.set)),
            asyncio.ensure_future(begun.wait()),
        )
        with stack:
            try:
                await asyncio.wait(
                    {drawing, first}, return_when=asyncio.FIRST_COMPLETED
                )
                if drawing.done():
                    await drawing
                yield
                await batcher.drain()
            finally:
                first.cancel()
                engine.stop()

    batcher = Batcher(engine, serving)
    app = Interface(batcher, device).app()
    app.router.lifespan_context = running
    return app
