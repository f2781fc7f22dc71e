"""Memory of this process: on the host from the kernel, on a CUDA device from PyTorch's allocator and from NVML."""

import os
from pathlib import Path
from typing import Any

import torch

from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.hardware.device import Device, ask_nvml, nvml_handle
from sdopt.results.records import Memory

_STATUS = Path("/proc/self/status")


def resident_gib() -> float:
    """Resident set of this process (VmRSS), in GiB."""
    return _status_field("VmRSS")


def cap_memory(device: Device, limit_gib: float) -> None:
    """Lets PyTorch's allocator take no more than a card of `limit_gib` would leave it beside a CUDA context."""
    fraction = (limit_gib - CUDA_CONTEXT_GIB) / device.memory_total_gib
    torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0), device.index)


class PeakMemory:
    """Peak memory of a stretch of work, counted from what the process held when this was built.

    The kernel's high-water mark is reset by writing 5 to `/proc/self/clear_refs` (proc(5)); sampling would miss peaks.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle = resident_gib()
        self._loaded: float = 0.0
        self._cuda_loaded: float | None = None

    def loaded(self) -> None:
        """Marks the point at which the model is in place."""
        self._loaded = resident_gib() - self._idle
        if self._device.is_cuda:
            self._cuda_loaded = torch.cuda.memory_allocated() / 2**30

    def reset(self) -> None:
        """Starts a new peak."""
        Path("/proc/self/clear_refs").write_text("5")
        if self._device.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> Memory:
        """The peak since the last reset."""
        memory = Memory(process_loaded_gib=self._loaded, process_peak_gib=_status_field("VmHWM") - self._idle)
        if self._device.is_cuda:
            memory.cuda_loaded_gib = self._cuda_loaded
            memory.cuda_peak_allocated_gib = torch.cuda.max_memory_allocated() / 2**30
            memory.cuda_peak_reserved_gib = torch.cuda.max_memory_reserved() / 2**30
            memory.nvml_process_gib = _nvml_process_gib(self._device)
        return memory


def _nvml_process_gib(device: Device) -> float | None:
    def held(nvml: Any) -> float | None:
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle(nvml, device)):
            # In a container the driver may report another pid namespace, or no figure at all.
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return float(process.usedGpuMemory) / 2**30
        return None

    return ask_nvml(held)


def _status_field(name: str) -> float:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 2**20
    raise OSError(f"{_STATUS} has no {name}")
