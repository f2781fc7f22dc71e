"""Probes the device that a worker will use, in a process that may initialise it."""

import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError, one_line
from sdopt.hardware.cards import CPU_BFLOAT16
from sdopt.hardware.cgroups import core_limit, memory_limits
from sdopt.hardware.device import Device
from sdopt.hardware.nvml import ask_nvml

_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI")
"""Instruction sets, as `ONEDNN_MAX_CPU_ISA` names them, in which oneDNN has no kernels for bfloat16."""


def probe_device(wanted: str) -> Device:
    """Describes the device that `hardware.device` names: `auto`, `cpu`, `cuda` or `cuda:N`.

    Initialises CUDA if there is a card, so call it in a process of its own. `auto` means the CPU if CUDA cannot be
    used; the device's `warning` then says why, if there is a card.

    Raises:
        UsageError: the name is none of these, or there is no such device, or CUDA cannot be used.
    """
    import torch

    kind, _, index = wanted.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (
        index and not (kind == "cuda" and index.isdecimal())
    ):
        raise UsageError(f"hardware.device={wanted}: choose auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return _cpu()
    if kind == "auto" and not torch.cuda.is_available():
        return replace(_cpu(), warning=_why_idle())
    try:
        return _cuda(int(index or 0))
    except _UnusableError as error:
        if kind == "auto":
            return replace(
                _cpu(),
                warning=f"hardware.device=auto: {error}; this runs on the CPU instead",
            )
        raise UsageError(f"hardware.device={wanted}: {error}") from error


def list_cards() -> list[Device]:
    """Returns every CUDA device, also unusable ones; call it in a process of its own."""
    import torch

    cards = []
    for index in range(torch.cuda.device_count()):
        try:
            cards.append(_cuda(index))
        except _UnusableError as error:
            cards.append(Device("cuda", index, f"a card that cannot be used: {error}"))
    return cards


class _UnusableError(Exception):
    """CUDA cannot be used; the message says why, and what to do about it."""


def _cuda(index: int) -> Device:
    """Describes one CUDA device. Raises _UnusableError if there is none, or it cannot be used."""
    import torch

    if not torch.cuda.is_available():
        built = torch.backends.cuda.is_built()
        raise _UnusableError(
            "no CUDA device is visible"
            if built
            else "this PyTorch is built without CUDA"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise _UnusableError(f"there are {count} CUDA devices, numbered from cuda:0")
    try:
        # CUDA starts here. Before, PyTorch has only counted cards through NVML, which works with any driver.
        properties = torch.cuda.get_device_properties(index)
        capability = properties.major, properties.minor
        _require_kernels(properties.name, capability)
        free, total = torch.cuda.mem_get_info(index)
        attributes = {
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_head_dimension": _largest_cudnn_head(index),
            "xformers": _xformers_has_kernels(),
            "uuid": str(properties.uuid),
        }
    except (RuntimeError, AssertionError) as error:
        reason = one_line(error).rstrip(".")
        raise _UnusableError(f"CUDA does not start: {reason}") from error
    return Device(
        type="cuda",
        index=index,
        name=properties.name,
        capability=capability,
        memory_total_gib=total / 2**30,
        memory_free_gib=free / 2**30,
        driver=ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion())),
        attributes=attributes,
    )


def _largest_cudnn_head(index: int) -> int:
    """Returns the largest attention head that PyTorch passes to cuDNN; 0 for none.

    It depends on the card, on cuDNN and on PyTorch, so PyTorch is asked. UNets have heads of 40 to 160 channels.
    """
    import torch
    from torch.backends.cuda import SDPAParams

    for dimension in (256, 160, 128):
        head = torch.zeros(
            1, 1, 64, dimension, dtype=torch.float16, device=f"cuda:{index}"
        )
        with torch.cuda.device(index):
            if torch.backends.cuda.can_use_cudnn_attention(
                SDPAParams(head, head, head, None, 0.0, False, False)
            ):
                return dimension
    return 0


def _xformers_has_kernels() -> bool | None:
    """Returns whether the installed xFormers runs its attention on CUDA in this PyTorch; None if it is not installed.

    A wheel for another PyTorch or CUDA can be imported, and then refuses every call.
    """
    if find_spec("xformers") is None:
        return None
    try:
        return bool(import_module("xformers.ops.fmha.common")._built_with_cuda)
    except Exception:  # what does not import has no kernels
        return False


def _why_idle() -> str:
    """Returns why CUDA is not available on a machine with a card; "" if there is no card, or it is hidden."""
    import torch

    if "CUDA_VISIBLE_DEVICES" in os.environ or not ask_nvml(
        lambda nvml: nvml.nvmlDeviceGetCount()
    ):
        return ""
    why = (
        "PyTorch finds no CUDA device"
        if torch.backends.cuda.is_built()
        else "this PyTorch is built without CUDA"
    )
    return (
        f"hardware.device=auto: there is an NVIDIA card, but {why}: install PyTorch for CUDA "
        f"(https://pytorch.org/get-started); this runs on the CPU instead"
    )


def _require_kernels(name: str, capability: tuple[int, int]) -> None:
    import torch

    # PyTorch itself only warns, and fails at the first kernel: its builds for CUDA 13 left out Pascal and Volta.
    built = torch.cuda.get_arch_list()
    if built and not runs_on(built, capability):
        raise _UnusableError(
            f"this PyTorch ({torch.__version__}) has kernels for {', '.join(built)}, and {name} has compute "
            f"capability {'.'.join(map(str, capability))}: install PyTorch for an older or a newer CUDA "
            f"(https://pytorch.org/get-started)"
        )


def runs_on(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Returns whether a build for these architectures (`sm_86`, `compute_90`) runs on a compute capability.

    A kernel runs on later minor versions of its major version; intermediate code (`compute_…`) is compiled for any
    later one; an architecture that ends in `a` runs on exactly that one.
    """

    def runs(architecture: str) -> bool:
        kind, _, digits = architecture.rstrip("af").partition("_")
        made_for = int(digits[:-1]), int(digits[-1])
        later = made_for < capability and not architecture.endswith("a")
        return made_for == capability or (
            later and (kind == "compute" or made_for[0] == capability[0])
        )

    return any(map(runs, built))


def describe_cpu() -> dict[str, Any]:
    """Returns the CPU's name, the cores that this process may use, and the vector units that PyTorch uses."""
    import torch

    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    facts = {
        "name": info.get("model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if platform.machine() == "x86_64":
        facts[CPU_BFLOAT16] = computes_bfloat16(
            info.get("flags", "").split(), os.environ
        )
    return facts


def computes_bfloat16(flags: Collection[str], variables: Mapping[str, str]) -> bool:
    """Returns whether oneDNN computes bfloat16 with vector instructions on an x86-64 processor.

    It does from AVX-512 on, and with those of AVX-NE-CONVERT; elsewhere it computes element by element. `flags` are
    the processor's, and `variables` those of the environment, of which one may restrict oneDNN to fewer instructions.
    """
    limit = variables.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in _WITHOUT_BFLOAT16:
        return False
    return {"avx512bw", "avx512dq", "avx512vl"} <= set(
        flags
    ) or "avx_ne_convert" in flags


def default_threads() -> int:
    """Returns the threads that PyTorch uses unless it is told: `OMP_NUM_THREADS`, or the cores that it may use.

    By itself it sees all cores of the machine, even if the container is limited to fewer.
    """
    import torch

    return min(torch.get_num_threads(), usable_cores())


def busy_with_other_work() -> str:
    """Returns in words that more processes wanted the processor in the last minute than it has cores; "" if not so."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load <= _BUSY * cores:
        return ""
    return f"this machine is busy with other work (load {load:.1f} on {cores} cores)"


def slowed_by_other_work() -> float:
    """Returns how many times longer a call takes beside what makes this machine busy; 1 if nothing does."""
    if not busy_with_other_work():
        return 1.0
    return 1 + os.getloadavg()[0] / usable_cores()


_BUSY = 1.5
"""Processes for each core, on average over a minute, from which a machine is called busy: sdopt's own take fewer."""


def usable_cores() -> int:
    """Returns how many cores this process may use: the cores of its affinity, or the limit of its groups, if less."""
    affinity = len(os.sched_getaffinity(0))
    return max(1, round(min(affinity, core_limit())))


def _cpu() -> Device:
    cpu = describe_cpu()
    total, free = host_memory_gib()
    return Device(
        type="cpu",
        name=cpu["name"],
        memory_total_gib=total,
        memory_free_gib=free,
        attributes=cpu,
    )


def host_memory_gib() -> tuple[float, float]:
    """Returns the host's memory, total and available, in GiB; at most what its control groups allow."""
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    }
    most, left = memory_limits()
    return min(memory["MemTotal"], most) / 2**30, min(
        memory["MemAvailable"], left
    ) / 2**30
