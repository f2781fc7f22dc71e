"""sdopt serve: serve a pipeline over HTTP, as it was measured."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sdopt.errors import ConflictError, UsageError, print_problems
from sdopt.scratch import scratch_folder

from . import Arguments, composable, end_with_code, indented

if TYPE_CHECKING:
    from socket import socket

    from sdopt.apps.serving.config import Serving
    from sdopt.hardware.device import Device
    from sdopt.variant import Variant
    from sdopt.worker.forkserver import StartContext

_HELP = """\
usage: sdopt serve [--from RUN [--variant NAME]] [--config-dir DIR] [serving=single|greedy|window] [key=value ...]

Serve a pipeline over HTTP, with batches formed on the fly, from the worker with which sdopt measures. The interface is
OpenAI's for images, with seed, negative_prompt, num_inference_steps and guidance_scale; the same seed gives the same
image, alone or in any batch. GET / is a page to try it; /health/live, /health/ready and /metrics are for operators.

examples:
  sdopt serve                                                the packaged model, at http://127.0.0.1:8000
  sdopt serve caching=deepcache precision=bf16               with options, as in `sdopt run`
  sdopt serve --from outputs/runs/quickstart/TIME --variant "deep cache"      a variant that was measured
  sdopt serve model=sdxl 'workload.batch_size=[1,2,4]' serving=window serving.window_ms=200
  sdopt serve engine=ray serving.replicas=2 serving.most_replicas=8           from the Ray cluster at RAY_ADDRESS

  --from RUN       a run's folder, its result.json, or the id of its MLflow run; its batch sizes are those of the run
  --variant NAME   the variant's name, as tables show it

Of `sdopt run`'s keys it takes those of model, scheduler, hardware and the options, workload.batch_size (by default
[1,2,4,8]), workload.size, workload.steps, workload.guidance_scale, workload.negative_prompt and protocol.timeout_s.

keys of a server and their defaults:
{keys}

SIGTERM or Ctrl-C ends it: the call that runs is finished, what waits is answered with 503.
Exit codes: 0 it was told to end; 2 usage, configuration or conflict; 3 the pipeline cannot be served here."""


def _help() -> str:
    from sdopt.apps.serving.config import serving_config

    from .keys import own_keys

    return _HELP.format(keys=indented(own_keys(serving_config([])[0], "serving")))


@end_with_code
def main(argv: list[str]) -> int:
    """Serves until it is told to end; returns the exit code."""
    parser = Arguments(prog="sdopt serve", text=_help)
    parser.add_argument("--from", dest="run")
    parser.add_argument("--variant")
    parser.add_config_dir()
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parsed(argv)
    if arguments.variant is not None and arguments.run is None:
        parser.error("--variant: name the run that it is of with --from")

    from sdopt.worker.forkserver import independent_children, start_fork_server

    if find_spec("prometheus_client") is None:
        raise UsageError("a server needs an extra: pip install 'sdopt[serve]'")
    from sdopt.apps.serving.config import BATCHES, serving_config

    serving, overrides = serving_config(arguments.overrides)
    if arguments.run is None:  # else keys may belong to the options of that run
        composable(overrides, arguments.config_dir)
    context = start_fork_server()
    from sdopt.config.command import add_working_folder
    from sdopt.config.composer import composer_of
    from sdopt.library.loading import measured

    add_working_folder()
    if arguments.run is not None:
        variant = measured(
            arguments.run, arguments.variant, overrides, config_dir=arguments.config_dir
        )
    else:
        with composer_of([BATCHES, *overrides], arguments.config_dir) as composer:
            variant = composer.variant(None)
    with independent_children():
        _serve(variant, serving, context)
    return 0


def _serve(variant: "Variant", serving: "Serving", context: "StartContext") -> None:
    from sdopt.apps.serving.server import listen
    from sdopt.config.groups import data_sheets
    from sdopt.preparation import make_ready, remarks_on_variants
    from sdopt.worker.machine import find_machine

    machine, context = find_machine(context, variant.hardware, data_sheets)
    _require_servable(variant, serving, machine.device)
    listening = listen(serving) if serving.engine == "local" else None
    make_ready([variant], machine.device, context)
    print_problems([*machine.warnings, *remarks_on_variants([variant], machine)])
    if listening is None:
        from sdopt.apps.serving.ray import deploy

        site = f"http://{serving.host}:{serving.port}"
        described = f"{_described(variant, serving)}, {serving.replicas} replicas"
        print(f"{site}: loading {described}", flush=True)
        deploy(variant, serving, machine.device, lambda: _say_ready(site))
    else:
        _serve_here(variant, serving, context, machine.device, listening)
    print("ended", flush=True)


def _require_servable(variant: "Variant", serving: "Serving", device: "Device") -> None:
    """Raises ConflictError for what cannot be served; says that an address is open to others."""
    from sdopt.apps.serving.engine import unservable

    if serving.engine == "ray" and find_spec("ray") is None:
        raise ConflictError(
            ["engine=ray: needs an extra: pip install 'sdopt[ray-serve]'"]
        )
    if problems := unservable(variant, serving, device):
        raise ConflictError(problems)
    if serving.host not in ("127.0.0.1", "::1", "localhost"):
        print_problems(
            [
                f"serving.host={serving.host}: whoever reaches this address may use the server; it has no passwords"
            ]
        )


def _serve_here(
    variant: "Variant",
    serving: "Serving",
    context: "StartContext",
    device: "Device",
    listening: "socket",
) -> None:
    """Serves from a worker of this machine, for which studies wait until it ends."""
    import asyncio
    from contextlib import ExitStack
    from functools import partial

    from sdopt.apps.serving.engine import Engine
    from sdopt.apps.serving.server import serve
    from sdopt.locks import reserve
    from sdopt.worker.process import WorkerProcess

    host, port = listening.getsockname()[:2]
    site = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("serve"))
        if variant.hardware.exclusive and (
            holder := stack.enter_context(reserve(device, "sdopt serve"))
        ):
            print_problems(
                [f"{holder} measures on {device.name}, and this server disturbs it"]
            )
        start = partial(
            WorkerProcess,
            context,
            device,
            variant.protocol.timeout_s,
            variant,
            folder / "worker.log",
            folder,
        )
        print(f"{site}: loading {_described(variant, serving)}", flush=True)
        engine = Engine(variant, serving, start)

        async def until_told() -> None:
            _say_ready(site)
            await asyncio.Event().wait()

        asyncio.run(serve(engine, serving, device, listening, until_told))


def _described(variant: "Variant", serving: "Serving") -> str:
    sizes = [shape.batch_size for shape in variant.shapes]
    batches = f"at most {serving.largest(sizes)} in a call"
    return (
        f"{variant.model.name} ({variant.name}), {variant.size}×{variant.size}, {variant.workload.steps} steps, "
        f"{serving.policy}, {batches}"
    )


def _say_ready(site: str) -> None:
    print(f"{site}: ready", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
