"""Stand-ins for a card, its driver and NVML, which let a machine without one run what reads them."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "8f1f5ab1-23f7-4b4c-b4a5-7d3a0a6f1c55"


class NVMLError(Exception):
    value = 999


class NVMLLibraryMismatchError(Exception):
    """What pynvml raises where the driver's library lacks the version of a function that it calls."""


class Nvml(ModuleType):
    """NVML of one card.

    Its `answers` go by the end of a function's name, as in `PowerUsage` or `ClockInfo:1`.
    Everything else raises NVMLError; an answer that is an exception is raised.
    """

    NVMLError, NVMLLibraryMismatchError = NVMLError, NVMLLibraryMismatchError
    NVML_ERROR_NOT_FOUND = 6
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **answers: Any) -> None:
        super().__init__("pynvml")
        self.answers = answers
        self.known = {f"GPU-{UUID}": "card"}

    def nvmlInit(self) -> None:  # noqa: N802 - as NVML calls it
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.known:
            raise NVMLError(uuid)
        return self.known[uuid]

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:  # noqa: N802
        return handle == "slice"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        assert handle == "slice"
        return "card"

    def __getattr__(self, name: str) -> Any:
        def answer(_handle: str = "", *arguments: Any) -> Any:
            short = name.removeprefix("nvmlDeviceGet").removeprefix("nvml")
            found = self.answers.get(":".join([short, *map(str, arguments)]), self.answers.get(short))
            if found is None:
                raise NVMLError(name)
            if isinstance(found, Exception):
                raise found
            return found

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return answer


def install(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, uuid: str = UUID) -> None:
    """Puts NVML in place, and a card with a UUID as PyTorch gives it."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid))
