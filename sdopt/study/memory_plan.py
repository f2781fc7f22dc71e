"""Determines which processes of a study fit side by side in memory."""

from collections.abc import Sequence

from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.hardware.device import Device
from sdopt.hardware.probe import host_memory_gib
from sdopt.record.samples import Memory


def memory_budget_gib(device: Device, fraction: float) -> dict[str, float]:
    """Returns how many GiB all processes together may fill, for each memory that may run out."""
    free = {"host": device.memory_free_gib}
    if device.is_cuda:
        free = {"host": host_memory_gib()[1], "device": device.memory_free_gib}
    return {kind: gib * fraction for kind, gib in free.items()}


def footprint_gib(memory: Memory) -> dict[str, float]:
    """Returns how many GiB a worker needs at its peak, for each memory that may run out."""
    # In a sandbox, the kernel may not report the peak.
    host = memory.process_loaded_gib if memory.process_peak_gib is None else memory.process_peak_gib
    if memory.cuda_peak_reserved_gib is None:
        return {"host": host}
    counted = memory.cuda_peak_reserved_gib + (memory.cuda_elsewhere_gib or 0.0)
    on_card = memory.nvml_process_gib or counted + CUDA_CONTEXT_GIB
    return {"host": host, "device": on_card}


def excess(footprints_gib: Sequence[dict[str, float]], budget_gib: dict[str, float], more: int = 1) -> str | None:
    """Returns why no `more` processes as large as the largest would fit beside those that live; None if they would."""
    for kind, budget in budget_gib.items():
        needs = [footprint.get(kind, 0.0) for footprint in footprints_gib]
        if needs and sum(needs) + more * max(needs) > budget:
            return f"{len(needs) + more} processes of {max(needs):.2f} GiB exceed {budget:.2f} GiB of {kind} memory"
    return None
