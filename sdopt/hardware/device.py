"""What a worker runs on, found out in a process that may touch the device."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
    _require_kernels(wanted, properties.name, (properties.major, properties.minor))
    free, total = torch.cuda.mem_get_info(number)
    return Device(
        type="cuda",
        index=number,
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_total_gib=total / 2**30,
        memory_free_gib=free / 2**30,
        driver=ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion())),
        attributes={
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "uuid": str(properties.uuid),
        },
    )


def _require_kernels(wanted: str, name: str, capability: tuple[int, int]) -> None:
    # PyTorch itself only warns, and fails at the first kernel: its builds for CUDA 13 left out Pascal and Volta.
    built = torch.cuda.get_arch_list()
    if built and not runs_on(built, capability):
        raise UsageError(
            f"hardware.device={wanted}: this PyTorch ({torch.__version__}) has kernels for {', '.join(built)}, and "
            f"{name} has compute capability {'.'.join(map(str, capability))}: install PyTorch for an older or a newer "
            f"CUDA (https://pytorch.org/get-started), or choose hardware=cpu"
        )


def runs_on(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a build with kernels for these architectures (`sm_86`, `compute_90`) runs on a compute capability.

    A kernel runs on later minor versions of its major version; intermediate code (`compute_…`) is compiled for any
    later one; an architecture that ends in `a` is that one alone.
    """

    def runs(architecture: str) -> bool:
        kind, _, digits = architecture.rstrip("af").partition("_")
        made_for = int(digits[:-1]), int(digits[-1])
        later = made_for < capability and not architecture.endswith("a")
        return made_for == capability or (later and (kind == "compute" or made_for[0] == capability[0]))

    return any(map(runs, built))


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
    cpu = describe_cpu()
    total, free = host_memory_gib()
    return Device(type="cpu", name=cpu["name"], memory_total_gib=total, memory_free_gib=free, attributes=cpu)


def host_memory_gib() -> tuple[float, float]:
    """Returns the host's memory, total and available, in GiB; at most what a container may hold."""
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
    }
    limit = _container_limit()
    return min(memory["MemTotal"], limit) / 2**30, min(memory["MemAvailable"], limit) / 2**30


def _container_limit() -> float:
    """Bytes that a container may hold (cgroup v2), or no limit."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return float(text) if text.isdecimal() else float("inf")


T = TypeVar("T")


def ask_nvml(question: Callable[[Any], T]) -> T | None:
    """What NVIDIA's management library answers; None where there is none, or it does not say.

    Virtual GPUs, slices of a GPU and containers leave many questions unanswered, and none of them is worth a variant.
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
    except pynvml.NVMLError:
        return None


def nvml_handle(library: Any, device: Device) -> Any:
    """NVML's handle of a CUDA device, found by UUID: NVML does not know `CUDA_VISIBLE_DEVICES`."""
    return library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device.index).uuid}")


def energy_j(device: Device) -> float | None:
    """What the whole device has taken since its driver was loaded, in joules; None where none counts it."""
    if not device.is_cuda:
        return None
    return ask_nvml(lambda nvml: nvml.nvmlDeviceGetTotalEnergyConsumption(nvml_handle(nvml, device)) / 1000)
