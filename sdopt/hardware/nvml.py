"""Asks NVML, NVIDIA's management library, for the driver's data on a card and on the processes that use it."""

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sdopt.record.samples import GpuState

if TYPE_CHECKING:
    from sdopt.hardware.device import Device

T = TypeVar("T")

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that hold clocks below the requested ones. An idle card and
# clocks that a user fixed (application clocks) are not among them.
_SLOWED = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "clocks tied to another card",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "external power brake",
    0x200: "board limit",
    0x400: "reliability",
}

# Policies of nvmlDeviceGetViolationStatus, which counts the time for which each held the clocks down.
_POLICIES = {0: "power limit", 1: "temperature", 3: "board limit", 5: "reliability"}

SLOWED_SHARE = 0.01
"""A call counts as throttled if a policy held the clocks down for more than this share of it."""

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def ask_nvml(question: Callable[[Any], T]) -> T | None:
    """Returns NVML's answer; None if there is no NVML, or it gives no answer.

    Virtual GPUs, slices of a GPU and containers leave many questions unanswered; no variant may fail for that.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except _errors(pynvml):
        return None


def _errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Returns the errors that pynvml raises without an answer; that of an outdated library is not an NVMLError."""
    return nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)


def nvml_handle(nvml: Any, device: "Device") -> Any:
    """Returns NVML's handle of a CUDA device, or of the slice (MIG) of a card that the device is.

    It is found by UUID, because NVML does not know `CUDA_VISIBLE_DEVICES`. PyTorch's UUID has no prefix, and NVML's
    has: `GPU-` for a card, `MIG-` for a slice.

    Raises:
        NVMLError: NVML knows neither.
    """
    uuid = str(torch.cuda.get_device_properties(device.index).uuid).removeprefix("GPU-").removeprefix("MIG-")
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _card_of(nvml: Any, handle: Any) -> tuple[Any, bool]:
    """Returns the handle of the whole card, and whether the given handle is the handle of a slice of it."""
    try:
        sliced = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
        return (nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if sliced else handle), sliced
    except nvml.NVMLError:  # a driver from before slices
        return handle, False


def process_gib(device: "Device", pids: Collection[int]) -> float | None:
    """Returns the memory that processes hold on a CUDA device, in GiB; None if there is no NVML, or it gives no answer.

    Args:
        device: the CUDA device.
        pids: the processes.
    """

    def held(nvml: Any) -> float | None:
        # In a container the driver may report another pid namespace, or no figure at all.
        found = [
            process.usedGpuMemory
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle(nvml, device))
            if process.pid in pids and process.usedGpuMemory is not None
        ]
        return sum(found) / 2**30 if found else None

    return ask_nvml(held) if pids else None


def describe_gpu(device: "Device") -> dict[str, Any]:
    """Returns the settings of a CUDA device, and the other processes on it; leaves out values that NVML does not give.

    `processes` holds pid and memory in GiB of each; in a container the driver may list none.
    """
    return (ask_nvml(lambda nvml: _settings(nvml, device)) or {}) if device.is_cuda else {}


def _settings(nvml: Any, device: "Device") -> dict[str, Any]:
    handle = nvml_handle(nvml, device)
    card, sliced = _card_of(nvml, handle)

    def processes() -> list[dict[str, Any]]:
        return [
            {"pid": other.pid, "gib": None if other.usedGpuMemory is None else other.usedGpuMemory / 2**30}
            for other in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if other.pid != os.getpid()
        ]

    questions: dict[str, Callable[[], Any]] = {
        "compute_mode": lambda: _COMPUTE_MODES.get(nvml.nvmlDeviceGetComputeMode(card), "unknown"),
        "persistence_mode": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(card)),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000,
        "default_power_limit_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(card) / 1000,
        "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_MEM),
        "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(card)[0]),
        "processes": processes,
    }
    answers = {name: _answer(nvml, question) for name, question in questions.items()}
    return {"mig_slice": sliced} | {name: answer for name, answer in answers.items() if answer is not None}


def _answer(nvml: Any, question: Callable[[], T]) -> T | None:
    try:
        return question()
    except _errors(nvml):
        return None


class GpuMonitor:
    """Reads the state of a CUDA device around calls. It keeps NVML open, because opening it takes milliseconds.

    Without NVML, and on a CPU, every reading is None.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device

    @cached_property
    def _opened(self) -> "_Opened | None":
        # Not earlier than a process can report its errors: a card that cannot be used fails here.
        return _open(self._device) if self._device.is_cuda else None

    def throttled_ns(self) -> Mapping[str, int]:
        """Returns for how long each policy has held the clocks down since the driver was loaded, in nanoseconds."""
        if self._opened is None:
            return {}
        nvml, card = self._opened.nvml, self._opened.card

        def violated(policy: int) -> int:
            return int(nvml.nvmlDeviceGetViolationStatus(card, policy).violationTime)

        found = {name: _answer(nvml, partial(violated, policy)) for policy, name in _POLICIES.items()}
        return {name: time for name, time in found.items() if time is not None}

    def state(self, before: Mapping[str, int], seconds: float) -> GpuState | None:
        """Returns the state of the device now, right after a call.

        Args:
            before: `throttled_ns()` just before the call.
            seconds: how long the call took.
        """
        if self._opened is None:
            return None
        nvml, card = self._opened.nvml, self._opened.card
        others = self._others(seconds)
        power = _answer(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(card))
        limit = _answer(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card))
        return GpuState(
            sm_clock_mhz=_answer(nvml, lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=_answer(nvml, lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM)),
            temperature_c=_answer(nvml, lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            throttled=self._throttled(before, seconds),
            others=others,
        )

    def _others(self, seconds: float) -> float | None:
        """Returns the share of the last `seconds` in which processes outside the study ran kernels, as sampled.

        None if the driver does not list this process by its pid, as in a container: then the processes of the study
        cannot be told from others.
        """
        assert self._opened is not None
        nvml, handle = self._opened.nvml, self._opened.handle
        running = _answer(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if os.getpid() not in {process.pid for process in running or []}:
            return None
        begun_us = int((time.time() - seconds) * 1e6)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._opened.card, begun_us)
        except nvml.NVMLError as error:
            return 0.0 if error.value == nvml.NVML_ERROR_NOT_FOUND else None  # no process ran a kernel
        busy: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp >= begun_us and not _of_this_study(sample.pid):
                busy.setdefault(sample.pid, []).append(sample.smUtil)
        return min(1.0, sum(sum(found) / len(found) for found in busy.values()) / 100)

    def _throttled(self, before: Mapping[str, int], seconds: float) -> list[str]:
        assert self._opened is not None
        nvml, card = self._opened.nvml, self._opened.card
        after = self.throttled_ns()
        lasting = [name for name, time in after.items() if time - before.get(name, time) > SLOWED_SHARE * seconds * 1e9]
        # The counters, if there are any, are exact; the present reasons are only a sample at the end of the call.
        reasons = _answer(nvml, lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))) or 0
        return sorted({*lasting, *(name for bit, name in _SLOWED.items() if reasons & bit)})

    def energy_j(self) -> float | None:
        """Returns the energy that the card has used since its driver was loaded, in joules; None if it is not counted.

        It is not counted for a slice of a card: the card's counter includes the other slices.
        """
        if self._opened is None or self._opened.sliced:
            return None
        nvml, card = self._opened.nvml, self._opened.card
        return _answer(nvml, lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(card)) / 1000)


def _of_this_study(pid: int) -> bool:
    """Returns whether a process is this one, or another worker that the same parent started."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return pid == os.getpid()
    return pid == os.getpid() or parent == os.getppid()


@dataclass(frozen=True)
class _Opened:
    nvml: Any
    handle: Any
    card: Any
    sliced: bool


def _open(device: "Device") -> _Opened | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = nvml_handle(pynvml, device)
        return _Opened(pynvml, handle, *_card_of(pynvml, handle))
    except pynvml.NVMLError:
        return None
