"""Imports libraries once, in the fork server, so that each worker starts with them loaded.

Must not compute: a tensor operation here would start threads, and a forked child that then multiplies matrices hangs.
"""

import ctypes
import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

MODULES = (
    "diffusers.guiders",
    *(f"diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion{task}" for task in ("", "_img2img", "_inpaint")),
    *(
        f"diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl{task}"
        for task in ("", "_img2img", "_inpaint")
    ),
    "diffusers.schedulers",
    "PIL.PngImagePlugin",
    "torch._dynamo",
    "torch._inductor.codecache",
    "torch.profiler",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    *(f"sdopt.optimizations.{group}" for group in ("attention", "compiler", "grad_mode", "layout", "precision")),
    "sdopt.worker.session",
)
"""Modules that a worker would otherwise import by itself, in its first calls."""


# xformers asks for the card's compute capability when it is imported, unless its Triton kernels are off; the question
# would start CUDA here, and then no worker could be forked. What is off with it, in workers too, is attention over few
# queries and many keys that share one head, which no denoiser of diffusers asks for. TorchAO, which diffusers imports
# where it is installed, asks whether there is a card: NVML answers without starting CUDA.
_ASKS_NO_CARD = {"XFORMERS_FORCE_DISABLE_TRITON": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# Where there is no driver, NVML does not answer, and PyTorch would ask CUDA itself: that spoils every later fork too.
_HIDES_CARDS = {"CUDA_VISIBLE_DEVICES": ""}

_DRIVERS = ("libnvidia-ml.so.1", "libcuda.so.1")

_TALKATIVE = ("torchao", "torch.utils._pytree", "xformers")
"""Loggers that warn, on the user's terminal, of kernels of TorchAO that this build of PyTorch has no use for, and of
those of xFormers: its wheel on PyPI is for CUDA 12, and beside PyTorch for CUDA 13 its attention runs PyTorch's."""


def import_all(modules: Iterable[str]) -> dict[str, str]:
    """Imports modules; returns the error of each that cannot be imported here, by name. Workers then import it."""
    failed = {}
    unasked = _ASKS_NO_CARD if any(map(_loads, _DRIVERS)) or _is_rocm() else _ASKS_NO_CARD | _HIDES_CARDS
    with _environment(unasked), _quiet(_TALKATIVE):
        for module in modules:
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:  # the server must survive whatever a library does on import
                failed[module] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return failed


def _loads(library: str) -> bool:
    """Returns whether a shared library exists, by loading it; NVML's and CUDA's libraries do nothing on loading."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _is_rocm() -> bool:
    """Returns whether this PyTorch is a ROCm build, whose CUDA devices are AMD cards with another driver."""
    try:
        return importlib.import_module("torch").version.hip is not None
    except Exception:  # the imports that follow report the reason
        return False


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet(names: Iterable[str]) -> Iterator[None]:
    """Restricts loggers to errors within the block."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, names)}
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
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("clip")
    with suppress(Exception):
        importlib.import_module("diffusers").DDIMScheduler._get_compatibles()


FAILED = import_all(MODULES)
"""The import error of each module that is missing here, by name."""

_prepare_loading()

SERVER_PID = os.getpid()
"""The process that imported this: a worker that finds its own pid here was not forked from a warm server."""
