"""Measures memory of this process and its children: from the kernel, from PyTorch's allocator, and from NVML."""

import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.hardware.device import Device
from sdopt.hardware.nvml import process_gib
from sdopt.measure.processes import held_elsewhere, started_by
from sdopt.record.samples import Memory

_STATUS = Path("/proc/self/status")

_CLEAR = Path("/proc/self/clear_refs")

_EVERY_S = 0.02
"""Seconds between readings of the children's memory, for which the kernel has no common peak, and of CUDA's peak."""

_REST = 9
"""Minimum time between two readings, in multiples of the time that one takes."""

_elsewhere: list[int] = []


@contextmanager
def allocating_elsewhere() -> Iterator[None]:
    """Counts memory of the current CUDA device that a library allocates or frees in the block outside PyTorch."""
    before = _free_bytes()
    yield
    _elsewhere.append(before - _free_bytes())


def _free_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else 0


def resident_gib() -> float:
    """Returns the resident set of this process (VmRSS), in GiB."""
    return _status_field("VmRSS")


def cap_memory(device: Device, limit_gib: float) -> None:
    """Limits PyTorch's allocator to the memory that a card of `limit_gib` has beside a CUDA context."""
    import torch

    fraction = (limit_gib - CUDA_CONTEXT_GIB) / device.memory_total_gib
    torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0), device.index)


class PeakMemory:
    """Measures the peak of memory, relative to the memory of the process when this object was built.

    The kernel's high-water mark is reset by writing 5 to `/proc/self/clear_refs` (proc(5)); sampling would miss peaks.
    Some sandboxes have no such file, or no mark: then the peak of the host is None. The memory of child processes, and
    of temporary files that are kept in memory, is sampled every 20 ms while `watch` is on, and whenever a peak is read.
    So is PyTorch's peak on a GPU, because a pipeline may reset it to measure its own memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle = resident_gib()
        self._loaded: float = 0.0
        self._cuda_loaded: float | None = None
        self._pools = 0.0
        self._marked = True
        self._children = 0.0
        self._highest_cuda = 0
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def loaded(self) -> None:
        """Marks the point at which the model is loaded."""
        import torch

        self._loaded = resident_gib() - self._idle
        if self._device.is_cuda:
            self._cuda_loaded = torch.cuda.memory_allocated() / 2**30

    def watch(self) -> None:
        """Starts a new peak, and samples the children's memory until it is read: for a call that is not timed."""
        import torch

        self._children = 0.0
        self._highest_cuda = 0
        try:
            _CLEAR.write_text("5", encoding="utf-8")
        except OSError:
            self._marked = False
        if self._device.is_cuda:
            self._pools = self._graph_pools_gib()
            torch.cuda.reset_peak_memory_stats()
        self._over.clear()
        self._watcher = threading.Thread(target=self._look_on, daemon=True)
        self._watcher.start()

    def _look_on(self) -> None:
        pause_s = _EVERY_S
        while not self._over.wait(pause_s):
            began = time.perf_counter()
            self._look()
            # Reading holds up a process that maps memory meanwhile, and a compiler starts many of them.
            pause_s = max(_EVERY_S, _REST * (time.perf_counter() - began))

    def _look(self) -> None:
        import torch

        self._children = max(self._children, _held_elsewhere())
        if self._device.is_cuda:
            # By its index: in each new thread CUDA's current device is the first one.
            self._highest_cuda = max(
                self._highest_cuda, torch.cuda.max_memory_allocated(self._device.index)
            )

    def read(self) -> Memory:
        """Returns the peak since `watch` was called, whose sampling ends."""
        import torch

        if self._watcher is not None:
            self._over.set()
            self._watcher.join()
            self._watcher = None
        self._look()
        memory = Memory(
            self._loaded, self._host_peak(), children_peak_gib=self._children
        )
        if self._device.is_cuda:
            memory.cuda_loaded_gib = self._cuda_loaded
            memory.cuda_peak_allocated_gib = self._highest_cuda / 2**30
            memory.cuda_peak_reserved_gib = torch.cuda.max_memory_reserved() / 2**30
            # Graphs captured since then were allocated meanwhile, and are already in the peak.
            now = torch.cuda.memory_allocated() / 2**30 + self._graph_pools_gib()
            memory.cuda_graph_pools_gib = max(
                self._pools, now - memory.cuda_peak_allocated_gib
            )
            memory.cuda_elsewhere_gib = sum(_elsewhere) / 2**30
            memory.nvml_process_gib = process_gib(self._device, [os.getpid()])
            memory.nvml_children_gib = process_gib(
                self._device, started_by(os.getpid())
            )
        return memory

    def forget_peak(self) -> None:
        """Starts a new peak, without sampling children: for a part of a call."""
        if self._device.is_cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device.index)
            return
        try:
            _CLEAR.write_text("5", encoding="utf-8")
        except OSError:
            self._marked = False

    def peak_gib(self) -> float | None:
        """Returns the peak since then: allocated on a GPU, else that of this process; None without a mark of it."""
        if not self._device.is_cuda:
            return self._host_peak()
        import torch

        return torch.cuda.max_memory_allocated(self._device.index) / 2**30

    def held_gib(self) -> float:
        """Returns the memory held now: PyTorch's on a GPU, else the resident set, each with the children's memory.

        For children on a GPU, it uses the driver's count, or 0 if the driver gives none, as in some containers.
        """
        import torch

        if self._device.is_cuda:
            children = process_gib(self._device, started_by(os.getpid()))
            return torch.cuda.memory_allocated() / 2**30 + (children or 0.0)
        return resident_gib() + _held_elsewhere()

    def _graph_pools_gib(self) -> float:
        import torch

        return graph_pools_gib(torch.cuda.memory_snapshot(), self._device.index)

    def _host_peak(self) -> float | None:
        try:
            return _status_field("VmHWM") - self._idle if self._marked else None
        except OSError:
            return None


class StagePeaks:
    """Measures the peak of memory within each stage of a call, of which each takes what all weights do besides.

    Attributes:
        gib: the largest peak by stage; without those of which there is no mark.
    """

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self.gib: dict[str, float] = {}

    def enter(self, _stage: str) -> None:
        """Starts the peak of a stage."""
        self._memory.forget_peak()

    def leave(self, stage: str, _output: Any) -> None:
        """Ends the peak of the stage that was entered last."""
        peak = self._memory.peak_gib()
        if peak is not None:
            self.gib[stage] = max(peak, self.gib.get(stage, peak))


def _held_elsewhere() -> float:
    return held_elsewhere(Path(tempfile.tempdir) if tempfile.tempdir else None)


def graph_pools_gib(segments: Iterable[Mapping[str, Any]], index: int) -> float:
    """Returns the memory of CUDA graphs on a device that PyTorch does not count as allocated, in GiB.

    A graph writes its activations into a private pool at every replay. After recording, PyTorch counts that memory as
    free, though nothing else can have it: a peak of allocated memory leaves it out. `segments` are those of
    `torch.cuda.memory_snapshot()`; in private pools they have another id than (0, 0).
    """
    held = 0
    for segment in segments:
        private = tuple(segment["segment_pool_id"]) != (0, 0)
        if private and segment.get("device", index) == index:
            held += segment["total_size"] - segment["allocated_size"]
    return float(held) / 2**30


def _status_field(name: str) -> float:
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 2**20
    raise OSError(f"{_STATUS} has no {name}")
