"""Imported once by the fork server, so that each worker starts with the libraries in place.

Imports only: a tensor operation here would start threads, and a forked child that then multiplies matrices hangs.
"""

import importlib
import os

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


for _module in MODULES:
    importlib.import_module(_module)


SERVER_PID = os.getpid()
"""The process that imported this: a worker that finds its own pid here was not forked from a warm server."""
