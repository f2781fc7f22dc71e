"""Settings of a whole process that an option must leave as it found them."""

import gc
import os

import torch


def process_settings() -> dict[str, object]:
    """Returns settings that reach beyond a pipeline: what changes them changes the program around it, too."""
    return {
        "Python's garbage collection": gc.isenabled(),
        "the thresholds of Python's garbage collection": gc.get_threshold(),
        "PyTorch's default type": torch.get_default_dtype(),
        "PyTorch's mode of gradients": torch.is_grad_enabled(),
        "the cores that the process may use": sorted(os.sched_getaffinity(0)),
        "the priority of the process": os.getpriority(os.PRIO_PROCESS, 0),
    }


def require_restored(before: dict[str, object]) -> None:
    """Raises RuntimeError where a setting is not what it was."""
    changed = [
        f"{name} ({before[name]} before, {now} now)" for name, now in process_settings().items() if now != before[name]
    ]
    if changed:
        raise RuntimeError(f"it changes {', '.join(changed)} and does not restore it (see Optimization.context)")
