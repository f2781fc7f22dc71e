"""Reads settings of the whole process, to name those that an option leaves changed."""

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


def changed_settings(before: dict[str, object]) -> list[str]:
    """Returns the settings that have changed since `before`, each with both values."""
    return [
        f"{name} ({before[name]} before, {now} now)" for name, now in process_settings().items() if now != before[name]
    ]
