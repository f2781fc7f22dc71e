"""What a worker runs on, found out in a process that may touch the device."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sdopt.errors import UsageError


@dataclass(frozen=True)
class Device:
    """One device: `type` is `cpu` or `cuda`; memory in GiB, as free and total when it was probed."""

    type: str
    index: int = 0
    name: str = ""
    capability: tuple[int, int] | None = None
    memory_total_gib: float = 0.0
    memory_free_gib: float = 0.0
    driver: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def torch_name(self) -> str:
        return f"cuda:{self.index}" if self.type == "cuda" else "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.type == "cuda"

    def needs_cuda(self, what: str, capability: tuple[int, int] = (0, 0)) -> list[str]:
        """The conflict, if any, of something that runs on CUDA from a compute capability on."""
        if not self.is_cuda:
            return [f"{what} needs a CUDA device; this runs on {self.name or self.type}"]
        if self.capability is not None and self.capability < capability:
            have = ".".join(map(str, self.capability))
            return [f"{what} needs compute capability {'.'.join(map(str, capability))}; {self.name} has {have}"]
        return []


def probe_device(wanted: str) -> Device:
    """Describes the device that `hardware.device` names: `auto`, `cpu`, `cuda` or `cuda:N`.

    Initialises CUDA where there is one, so it belongs in a process of its own.

    Raises:
        UsageError: the name is none of these, or there is no such device.
    """
    kind, _, index = wanted.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise UsageError(f"hardware.device={wanted}: choose auto, cpu, cuda or cuda:N")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return _cpu()
    if not torch.cuda.is_available():
        why = (
            "this PyTorch is built without CUDA" if not torch.backends.cuda.is_built() else "no CUDA device is visible"
        )
        raise UsageError(f"hardware.device={wanted}: {why}; choose hardware=cpu or hardware=auto")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise UsageError(f"hardware.device={wanted}: there are {torch.cuda.device_count()} CUDA devices, from cuda:0")
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return Device(
        type="cuda",
        index=number,
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_total_gib=total / 2**30,
        memory_free_gib=free / 2**30,
        driver=_nvidia_driver(),
        attributes={"multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda},
    )


def describe_cpu() -> dict[str, Any]:
    """Name, cores that this process may use, and the vector units PyTorch dispatches to."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "name": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu() -> Device:
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
    }
    cpu = describe_cpu()
    return Device(
        type="cpu",
        name=cpu["name"],
        memory_total_gib=memory["MemTotal"] / 2**30,
        memory_free_gib=memory["MemAvailable"] / 2**30,
        attributes=cpu,
    )


@contextmanager
def nvml() -> Iterator[Any]:
    """NVIDIA's management library for the length of a block; None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def nvml_handle(library: Any, device: Device) -> Any:
    """NVML's handle of a CUDA device, found by UUID: NVML does not know `CUDA_VISIBLE_DEVICES`."""
    return library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device.index).uuid}")


@contextmanager
def energy_meter(device: Device) -> Iterator[Callable[[], float | None]]:
    """Gives a function that says how many joules the device took since the block began, or None where none counts."""
    if not device.is_cuda:
        yield lambda: None
        return
    with nvml() as library:
        if library is None:
            yield lambda: None
            return
        handle = nvml_handle(library, device)
        try:
            start = library.nvmlDeviceGetTotalEnergyConsumption(handle)
        except library.NVMLError:  # before Volta there is no counter
            yield lambda: None
            return
        yield lambda: (library.nvmlDeviceGetTotalEnergyConsumption(handle) - start) / 1000


def _nvidia_driver() -> str | None:
    with nvml() as library:
        return str(library.nvmlSystemGetDriverVersion()) if library else None
