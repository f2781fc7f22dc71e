"""How worker processes start. Light: imported before anything heavy, so that the server loads beside the parent."""

import multiprocessing
import multiprocessing.context
import os


def start_fork_server() -> multiprocessing.context.BaseContext:
    """Starts the process that workers are forked from, and returns without waiting for its imports.

    Its environment is frozen from here on. Where the platform has no fork, workers are spawned, in seconds each.
    """
    # Importing xformers asks torch.cuda.is_available(), which would initialise CUDA and spoil every later fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Idle siblings of the worker that is being timed must sleep, not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # What these libraries print on import (of extras that are not installed) is no news to a user.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sdopt.preload"])
    forkserver.ensure_running()
    return context
