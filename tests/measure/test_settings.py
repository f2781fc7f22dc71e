"""An option leaves a process's settings as it found them."""

import gc
import os

import pytest
import torch

from sdopt.measure.settings import process_settings, require_restored


def test_nothing_is_said_of_settings_that_stay() -> None:
    require_restored(process_settings())


def test_what_changed_is_named_with_both_values() -> None:
    before = process_settings()
    gc.disable()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError) as caught:
            require_restored(before)
    finally:
        gc.enable()
        torch.set_default_dtype(torch.float32)
    assert "Python's garbage collection (True before, False now)" in str(caught.value)
    assert "PyTorch's default type (torch.float32 before, torch.float64 now)" in str(caught.value)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_cores_count() -> None:
    before, cores = process_settings(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with pytest.raises(RuntimeError, match="the cores that the process may use"):
            require_restored(before)
    finally:
        os.sched_setaffinity(0, cores)
