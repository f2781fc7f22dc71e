"""Governs Python's garbage collection; imports no library, so that a process can use it before it loads any."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Disables garbage collection in the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def garbage_of_block_collected() -> Iterator[None]:
    """Collects the garbage that the block leaves, without looking through what was there before it.

    Afterwards all objects belong to the oldest generation, through which only a full collection looks.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
