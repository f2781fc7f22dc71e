"""Imported once by the fork server, so that each worker starts with the libraries in place.

Imports only: a tensor operation here would start threads, and a forked child that then multiplies matrices hangs.
"""

import importlib
import os
from collections.abc import Iterable

MODULES = (
    "diffusers.guiders",
    *(f"diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion{task}" for task in ("", "_img2img", "_inpaint")),
    *(
        f"diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl{task}"
        for task in ("", "_img2img", "_inpaint")
    ),
    "diffusers.schedulers",
    "torch._dynamo",
    "torch._inductor.codecache",
    "torch.profiler",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "sdopt.worker.session",
)
"""What a worker would otherwise import by itself, in its first calls."""


# xformers asks for the card's compute capability when it is imported, unless its Triton kernels are off; the question
# would start CUDA here, and then no worker could be forked. What is off with it, in workers too, is attention over few
# queries and many keys that share one head, which no denoiser of diffusers asks for.
_XFORMERS = "XFORMERS_FORCE_DISABLE_TRITON"


def import_all(modules: Iterable[str]) -> dict[str, str]:
    """Imports modules; returns why, by name, for each that cannot be imported here. Workers then try by themselves."""
    failed = {}
    users = os.environ.get(_XFORMERS)
    os.environ[_XFORMERS] = "1"
    try:
        for module in modules:
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:  # the server must live, whatever a library does on import
                failed[module] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        if users is None:
            del os.environ[_XFORMERS]
        else:
            os.environ[_XFORMERS] = users
    return failed


FAILED = import_all(MODULES)
"""Why modules are missing here, by name."""

SERVER_PID = os.getpid()
"""The process that imported this: a worker that finds its own pid here was not forked from a warm server."""
