"""Reads settings of the whole process, and checks that an option leaves them unchanged."""

import gc
import os

import torch


def process_settings() -> dict[str, object]:
    """Returns settings that affect not only a pipeline but the whole program."""
    return {
        "Python's garbage collection": gc.isenabled(),
        "the thresholds of Python's garbage collection": gc.get_threshold(),
        "PyTorch's default type": torch.get_default_dtype(),
        "PyTorch's mode of gradients": torch.is_grad_enabled(),
        "the cores that the process may use": sorted(os.sched_getaffinity(0)),
        "the priority of the process": os.getpriority(os.PRIO_PROCESS, 0),
    }


def require_restored(before: dict[str, object]) -> None:
    """Raises RuntimeError if a setting has changed."""
    changed = [
        f"{name} ({before[name]} before, {now} now)" for name, now in process_settings().items() if now != before[name]
    ]
    if changed:
        raise RuntimeError(f"it changes {', '.join(changed)} and does not restore it (see Optimization.context)")
