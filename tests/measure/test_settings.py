"""What an option leaves set in the process is named."""

import gc
import os

import pytest
import torch

from sdopt.worker.host import changed_settings, process_settings


def test_what_changed_is_named_with_both_values() -> None:
    before = process_settings()
    gc.disable()
    torch.set_default_dtype(torch.float64)
    try:
        found = changed_settings(before)
    finally:
        gc.enable()
        torch.set_default_dtype(torch.float32)
    assert found == [
        "Python's garbage collection (True before, False now)",
        "PyTorch's default type (torch.float32 before, torch.float64 now)",
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_cores_count() -> None:
    before, cores = process_settings(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        [found] = changed_settings(before)
    finally:
        os.sched_setaffinity(0, cores)
    assert found.startswith("the cores that the process may use")
