"""Imports libraries once, in the fork server, so that each worker starts with them loaded.

Must not compute: a tensor operation here would start threads, and a forked child that then multiplies matrices hangs.
"""

import atexit
import gc
import importlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sdopt.errors import with_type
from sdopt.measure.garbage import no_garbage
from sdopt.worker.forkserver import TALKATIVE, environment

MODULES = (
    "diffusers.guiders",
    *(
        f"diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion{task}"
        for task in ("", "_img2img", "_inpaint")
    ),
    *(
        f"diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl{task}"
        for task in ("", "_img2img", "_inpaint")
    ),
    "diffusers.schedulers",
    "PIL.PngImagePlugin",
    "safetensors.torch",
    "torch._dynamo",
    "torch._inductor.codecache",
    "torch.profiler",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    *(
        f"sdopt.options.{group}"
        for group in ("attention", "compiler", "grad_mode", "layout", "precision")
    ),
    "sdopt.options.compiler.graphs",
    "sdopt.worker.host",
)
"""Modules that a worker would otherwise import by itself, in its first calls."""


# Some libraries query CUDA on import: xFormers and TorchAO, which diffusers and transformers import if they are
# installed, query the compute capability. The query would start CUDA here, and then no worker could be forked. So they
# are imported as on a machine without a card; PyTorch counts cards without starting CUDA if it may ask NVML. Without a
# visible card, xFormers and TorchAO do not define some Triton kernels, in workers either; diffusers' denoisers use none
# of them.
_HIDES_CARDS = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "XFORMERS_FORCE_DISABLE_TRITON": "1",
}

# ROCm has variables of its own.
_ROCM = {
    key: value for key, value in _HIDES_CARDS.items() if key != "CUDA_VISIBLE_DEVICES"
}


def import_all(modules: Iterable[str]) -> dict[str, str]:
    """Imports modules; returns the error of each that cannot be imported here, by name. Workers then import it."""
    failed = {}
    hidden = _ROCM if _is_rocm() else _HIDES_CARDS
    # Imports leave hardly any garbage, and a seventh of their time went into collecting it.
    with (
        environment(hidden),
        _quiet(),
        no_garbage(),
        warnings.catch_warnings(),
    ):
        # TorchAO has invalid escape sequences, which Python reports when it compiles the file for the first time.
        warnings.simplefilter("ignore", SyntaxWarning)
        for module in modules:
            try:
                importlib.import_module(module)
            except (
                Exception,
                SystemExit,
            ) as error:  # the server must survive whatever a library does on import
                failed[module] = with_type(error)
    return failed


def _is_rocm() -> bool:
    """Returns whether this PyTorch is a ROCm build, whose CUDA devices are AMD cards with another driver."""
    try:
        return importlib.import_module("torch").version.hip is not None
    except Exception:  # the imports that follow report the reason
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Restricts loggers to errors within the block."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, TALKATIVE)}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def _prepare_loading() -> None:
    """Builds tables that libraries would otherwise build in each worker that loads a pipeline.

    These are the table of names by which transformers converts weights, and the list of schedulers that accept the
    configuration of the default one.
    """
    # A version without such a table does not build it in a worker either.
    with suppress(Exception):
        importlib.import_module(
            "transformers.conversion_mapping"
        ).get_checkpoint_conversion_mapping("clip")
    with suppress(Exception):
        importlib.import_module("diffusers").DDIMScheduler._get_compatibles()


def _forget_missing_cards() -> None:
    """Makes PyTorch look again for devices that compile and run Triton: while cards were hidden, it found none."""
    with suppress(Exception):
        for function in vars(importlib.import_module("torch.utils._triton")).values():
            if callable(clear := getattr(function, "cache_clear", None)):
                clear()
    with suppress(Exception):
        backends: Any = importlib.import_module("diffusers.utils.torch_utils")
        backends.TorchDeviceBackend._detect_device_type.cache_clear()
    with suppress(Exception):
        interfaces: Any = importlib.import_module("torch._dynamo.device_interface")
        interfaces._device_initialized = False


FAILED = import_all(MODULES)
"""The import error of each module that is missing here, by name."""

with no_garbage():
    _prepare_loading()
_forget_missing_cards()

# A command waits for the server's end, and that for a look for garbage among all objects. A worker ends without it.
atexit.register(gc.freeze)

SERVER_PID = os.getpid()
"""The process that imported this module; equals a worker's own pid if it was not forked from the fork server."""
