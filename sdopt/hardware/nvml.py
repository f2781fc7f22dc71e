"""Asks NVML, NVIDIA's management library, for the driver's data on a card and on the processes that use it."""

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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

_COMPUTE_MODES = {
    0: "default",
    1: "exclusive thread",
    2: "prohibited",
    3: "exclusive process",
}


@dataclass(frozen=True)
class _Card:
    """A CUDA device as NVML knows it.

    Attributes:
        nvml: the module, while NVML is open.
        handle: of the device.
        whole: of the card, of which the device may be a slice (MIG).
        sliced: whether it is one.
    """

    nvml: Any
    handle: Any
    whole: Any
    sliced: bool

    def ask(self, name: str, *arguments: Any, handle: Any = None) -> Any:
        """Returns the answer of `nvmlDeviceGet<name>` about the whole card, or a handle; None if there is none."""
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{name}")(
                self.whole if handle is None else handle, *arguments
            )
        except _errors(self.nvml):
            return None

    def milli(self, name: str) -> float | None:
        """Returns an answer in thousandths as units, as milliwatts in watts; None if there is none."""
        answer = self.ask(name)
        return None if answer is None else float(answer) / 1000

    def processes(self) -> list[Any] | None:
        """Returns the processes on the device; None if NVML does not list them."""
        running: list[Any] | None = self.ask(
            "ComputeRunningProcesses", handle=self.handle
        )
        return running


def ask_nvml(question: Callable[[Any], T], close: bool = True) -> T | None:
    """Returns NVML's answer; None if there is no NVML, or it gives no answer. Else it stays open, if not to `close`.

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
            if close:
                pynvml.nvmlShutdown()
    except _errors(pynvml):
        return None


def _errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Returns the errors that pynvml raises without an answer; that of an outdated library is not an NVMLError."""
    return nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)


def _card_of(nvml: Any, device: "Device") -> _Card:
    """Returns a CUDA device, or the slice (MIG) of a card that it is.

    It is found by UUID, because NVML does not know `CUDA_VISIBLE_DEVICES`. PyTorch's UUID has no prefix, and NVML's
    has: `GPU-` for a card, `MIG-` for a slice.

    Raises:
        NVMLError: NVML knows neither.
    """
    import torch

    uuid = (
        str(torch.cuda.get_device_properties(device.index).uuid)
        .removeprefix("GPU-")
        .removeprefix("MIG-")
    )
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    try:
        sliced = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
        whole = (
            nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            if sliced
            else handle
        )
    except nvml.NVMLError:  # a driver from before slices
        whole, sliced = handle, False
    return _Card(nvml, handle, whole, sliced)


def process_gib(device: "Device", pids: Collection[int]) -> float | None:
    """Returns the GiB that processes hold on a CUDA device; None if there is no NVML, or it gives no answer."""

    def held(nvml: Any) -> float | None:
        # In a container the driver may report another pid namespace, or no figure at all.
        running = _card_of(nvml, device).processes() or []
        sizes = [
            p.usedGpuMemory
            for p in running
            if p.pid in pids and p.usedGpuMemory is not None
        ]
        return sum(sizes) / 2**30 if sizes else None

    return ask_nvml(held) if pids else None


def describe_gpu(device: "Device") -> dict[str, Any]:
    """Returns the settings of a CUDA device, and the other processes on it; leaves out values that NVML does not give.

    `processes` holds pid and memory in GiB of each; in a container the driver may list none.
    """
    return (
        (ask_nvml(lambda nvml: _settings(_card_of(nvml, device))) or {})
        if device.is_cuda
        else {}
    )


def _settings(card: _Card) -> dict[str, Any]:
    mode, persistent, ecc = (
        card.ask(name) for name in ("ComputeMode", "PersistenceMode", "EccMode")
    )
    running = card.processes()
    others: list[dict[str, Any]] | None = None
    if running is not None:
        others = []
        for process in running:
            if process.pid != os.getpid():
                held = process.usedGpuMemory
                gib = None if held is None else held / 2**30
                others.append({"pid": process.pid, "gib": gib})
    settings = {
        "mig_slice": card.sliced,
        "compute_mode": None if mode is None else _COMPUTE_MODES.get(mode, "unknown"),
        "persistence_mode": None if persistent is None else bool(persistent),
        "power_limit_w": card.milli("EnforcedPowerLimit"),
        "default_power_limit_w": card.milli("PowerManagementDefaultLimit"),
        "max_sm_clock_mhz": card.ask("MaxClockInfo", card.nvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": card.ask("MaxClockInfo", card.nvml.NVML_CLOCK_MEM),
        "ecc": None if ecc is None else bool(ecc[0]),
        # What the slot allows: an idle card's own link is slower.
        "pcie_generation": card.ask("MaxPcieLinkGeneration"),
        "pcie_lanes": card.ask("MaxPcieLinkWidth"),
        "processes": others,
    }
    return {name: answer for name, answer in settings.items() if answer is not None}


class GpuMonitor:
    """Reads the state of a CUDA device around calls. It keeps NVML open, because opening it takes milliseconds.

    Without NVML, and on a CPU, every reading is None.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device

    @cached_property
    def _card(self) -> _Card | None:
        # Not earlier than a process can report its errors: a card that cannot be used fails here.
        return (
            ask_nvml(lambda nvml: _card_of(nvml, self._device), close=False)
            if self._device.is_cuda
            else None
        )

    def throttled_ns(self) -> Mapping[str, int]:
        """Returns for how long each policy has held the clocks down since the driver was loaded, in nanoseconds."""
        if self._card is None:
            return {}
        answers = {
            name: self._card.ask("ViolationStatus", policy)
            for policy, name in _POLICIES.items()
        }
        return {
            name: int(answer.violationTime)
            for name, answer in answers.items()
            if answer is not None
        }

    def state(self, before: Mapping[str, int], seconds: float) -> GpuState | None:
        """Returns the state of the device now, right after a call.

        `before` is `throttled_ns()` just before the call.
        """
        if (card := self._card) is None:
            return None
        others = self._others(card, seconds)
        return GpuState(
            sm_clock_mhz=card.ask("ClockInfo", card.nvml.NVML_CLOCK_SM),
            memory_clock_mhz=card.ask("ClockInfo", card.nvml.NVML_CLOCK_MEM),
            temperature_c=card.ask("Temperature", card.nvml.NVML_TEMPERATURE_GPU),
            power_w=card.milli("PowerUsage"),
            power_limit_w=card.milli("EnforcedPowerLimit"),
            throttled=self._throttled(card, before, seconds),
            others=others,
        )

    def _others(self, card: _Card, seconds: float) -> float | None:
        """Returns the share of the last `seconds` in which processes outside the study ran kernels, as sampled.

        None if the driver does not list this process by its pid, as in a container: then the processes of the study
        cannot be told from others.
        """
        if os.getpid() not in {process.pid for process in card.processes() or []}:
            return None
        begun_us = int((time.time() - seconds) * 1e6)
        try:
            samples = card.nvml.nvmlDeviceGetProcessUtilization(card.whole, begun_us)
        except card.nvml.NVMLError as error:
            return (
                0.0 if error.value == card.nvml.NVML_ERROR_NOT_FOUND else None
            )  # no process ran a kernel
        busy: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp >= begun_us and not _of_this_study(sample.pid):
                busy.setdefault(sample.pid, []).append(sample.smUtil)
        return min(
            1.0, sum(sum(shares) / len(shares) for shares in busy.values()) / 100
        )

    def _throttled(
        self, card: _Card, before: Mapping[str, int], seconds: float
    ) -> list[str]:
        after = self.throttled_ns()
        lasting = [
            name
            for name, time in after.items()
            if time - before.get(name, time) > SLOWED_SHARE * seconds * 1e9
        ]
        # The counters, if there are any, are exact; the present reasons are only a sample at the end of the call.
        reasons = int(card.ask("CurrentClocksThrottleReasons") or 0)
        return sorted(
            {*lasting, *(name for bit, name in _SLOWED.items() if reasons & bit)}
        )

    def energy_j(self) -> float | None:
        """Returns the energy that the card has used since its driver was loaded, in joules; None if it is not counted.

        It is not counted for a slice of a card: the card's counter includes the other slices.
        """
        if self._card is None or self._card.sliced:
            return None
        return self._card.milli("TotalEnergyConsumption")


def _of_this_study(pid: int) -> bool:
    """Returns whether a process is this one, or another worker that the same parent started."""
    try:
        parent = int(
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8")
            .rpartition(")")[2]
            .split()[1]
        )
    except (OSError, ValueError):
        return pid == os.getpid()
    return pid == os.getpid() or parent == os.getppid()
