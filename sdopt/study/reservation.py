"""Reserves the device for one study, because concurrent timings disturb each other."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sdopt.locks import reserve
from sdopt.worker.machine import Machine

_POLL_S = 1.0


@contextmanager
def reserved(
    machine: Machine, others: Callable[[], list[Machine]], study: str, waiting: Callable[[str, Machine], None]
) -> Iterator[Machine]:
    """Waits until no other study measures on the device, and keeps it for the block.

    Args:
        machine: the machine with the device.
        others: yields the machine with each other device that would do as well; used if the first device is taken.
        study: the description of this study that other studies see.
        waiting: called once before waiting, with the study that holds a device and the machine with that device.

    Yields:
        The machine with the reserved device.
    """
    machines, asked, announced = [machine], False, False
    while True:
        for found in machines:
            with reserve(found.device, study) as holder:
                if not holder:
                    yield found
                    return
        if not asked:
            machines, asked = [machine, *others()], True
            continue
        if not announced:
            waiting(holder, found)
            announced = True
        time.sleep(_POLL_S)
