"""What tests of searches share."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sdopt.hardware.cards import CPU_BFLOAT16
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine, probe_machine


@pytest.fixture(scope="module", autouse=True)
def few_misses() -> Iterator[None]:
    """Of a handful of combinations it is soon known that none is left: to ask Optuna twenty times takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdopt.search.trials._MISSES", 3)
        yield


@pytest.fixture(scope="module", autouse=True)
def bfloat16_in_hardware() -> Iterator[None]:
    """What is tried does not depend on the processor: searches leave out what it computes in software."""

    def probe(*of: Any) -> tuple[Machine, StartContext]:
        machine, context = probe_machine(*of)
        attributes = machine.device.attributes | {CPU_BFLOAT16: True}
        return replace(
            machine, device=replace(machine.device, attributes=attributes)
        ), context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdopt.worker.machine.probe_machine", probe)
        yield
