"""The global random generators of a program that calls sdopt."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def kept_generators() -> Iterator[None]:
    """Puts the global generators back, those of CUDA devices too: what a program draws afterwards stays as it was.

    Options draw from them (peft) or seed them, and so do traced calls and the measuring of a machine's rates.
    """
    import torch

    of_numpy, of_python = np.random.get_state(), random.getstate()
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
