"""What a session has to do, in calls of one process alone: processes that work side by side share the time.

A study in progress (`ahead`), the forecast of a dry run (`cost`) and the budget of a search count by it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sdopt.hardware.device import Device
from sdopt.schema import Protocol, Quality
from sdopt.study.plan import warmup_calls
from sdopt.variant import Variant
from sdopt.worker.draws import Draw, draw_of

T = TypeVar("T")

PROFILED = 2.0
"""Calls that the evidence of a process takes as long as: one is traced."""

_BATCHED, _BATCHED_BY_ONE, _BATCH = 0.5, 0.9, 4
"""Share of a single call that one image of the quality pass takes in a batch of at least `_BATCH`, and on a processor
on which PyTorch has no vector instructions."""

_SIDE_BY_SIDE = 2
"""Number of processes that work at once on a CPU: one process does not use all of it."""


LEAST_REPORT_S, _REPORT_SHARE = 8.0, 0.8
"""Seconds of scoring and of reports: at least, and as a multiple of what the command took to begin."""

_PROGRAM_S = 1.5
"""Seconds in which the process of a program starts, and compares its image, beside its load and its call."""

_COMMANDS_S = 2.0
"""Seconds in which the commands that measure the variants again are composed and compared."""

LOAD_S = 0.5
"""Seconds in which a process loads a model, where no run has told; a large one takes longer, as its calls do."""


def report_s(begun_after_s: float) -> float:
    """Returns the seconds of scoring, reports and tracking: they import about as much as the command did to begin."""
    return max(LEAST_REPORT_S, _REPORT_SHARE * begun_after_s)


def programs_s(
    protocol: Protocol, seconds: Iterable[float], most: int | None = None
) -> float:
    """Returns the seconds of the programs that reports hand out, those of the fastest variants first.

    Args:
        protocol: says whether they are run.
        seconds: of loading and of one call, by variant.
        most: how many are run; None for all.
    """
    if protocol.programs_s == 0:
        return 0.0
    each = sorted(_PROGRAM_S + of_variant for of_variant in seconds)
    return _COMMANDS_S + sum(each[:most])


@dataclass(frozen=True)
class Sharing:
    """How many processes work at once, and with how many threads.

    Attributes:
        cores: the number of cores that a process may use.
        threads: the number of threads of a timed call.
        on_gpu: whether calls run on a GPU, which serves one process at a time.
        has_vectors: whether PyTorch computes with vector instructions; without them a batch gains little.
    """

    cores: int
    threads: int
    on_gpu: bool
    has_vectors: bool = True

    @classmethod
    def of(cls, device: Device, cpu: Mapping[str, Any], baseline: Variant) -> "Sharing":
        """Returns how the processes of a study with some baseline share a device and its host's processor."""
        cores = int(cpu.get("cores", 1))
        threads = baseline.hardware.threads or cores
        has_vectors = device.is_cuda or cpu.get("capability") != "DEFAULT"
        return cls(cores, threads, device.is_cuda, has_vectors)

    @property
    def processes(self) -> int:
        """How many processes may work at once."""
        return 1 if self.on_gpu else _SIDE_BY_SIDE

    @property
    def calls(self) -> int:
        """How many processes may make calls at once with as many threads as timed calls have.

        A call waits for all its threads many times a second. With more threads than cores, two calls at once take far
        longer than one after the other.
        """
        return max(1, min(self.processes, self.cores // self.threads))

    @property
    def drawing_threads(self) -> int | None:
        """The number of threads with which a process draws images beside others; None is that of timed calls."""
        count = max(1, self.threads // self.processes)
        return None if count == self.threads else count

    def image_calls(self, draw: Draw, prompts: int, timed_batch: int) -> float:
        """Returns how many timed calls take as long as the images of some prompts, which one process makes alone."""
        batches = math.ceil(prompts / draw.batch_size)  # a short one is filled up
        if draw.batch_size == timed_batch:
            return batches
        share = _BATCHED if self.has_vectors else _BATCHED_BY_ONE
        if draw.batch_size < _BATCH:
            share = 1.0
        return batches * share * draw.batch_size / timed_batch

    def floor_calls(self, draw: Draw, prompts: int, timed_batch: int) -> float:
        """Returns how many timed calls take as long as the images of some prompts that show what is chance."""
        # In the other batch and number of threads, then from other noise.
        alone = prompts / timed_batch
        return alone + self.image_calls(draw, prompts, timed_batch)


@dataclass(frozen=True)
class Effort:
    """What a session does with one variant.

    Attributes:
        processes: how many it has.
        starts: of processes, in times of one alone.
        calls: at all shapes together after the first one of each process, in times of one alone, without images.
        repeated: the same of the repeated baseline, which makes images for the floors alone.
        images: as many calls as its images take alone.
        together: how many variants make their images side by side; the slowest of them is waited for.
    """

    processes: int
    starts: float
    calls: float
    repeated: float
    images: float = 0.0
    together: int = 1

    def images_s(self, calls_s: Sequence[float]) -> float:
        """Returns the seconds in which variants make their images, each with the seconds of its call, in their order."""
        return self.images * sum(map(max, batched(calls_s, self.together)))


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yields items in groups of a size; the last may be smaller. From Python 3.12 on it is in itertools."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def calls_of_stages(protocol: Protocol, quality: Quality) -> int:
    """Returns how many calls a variant makes for the times of its stages; images that are judged need one."""
    return max(protocol.stage_calls, int(quality.metrics))


def work_ahead(
    variants: Sequence[Variant],
    processes: int,
    protocol: Protocol,
    quality: Quality,
    batch: int | None,
    sharing: Sharing,
) -> Effort:
    """Returns what a session does with each of its variants, the first of which is the baseline.

    Args:
        variants: those that make images; their work is that of the baseline.
        processes: of each variant.
        protocol: how it measures.
        quality: which images it makes.
        batch: prompts in a call of the quality pass; None for those of a timed call.
        sharing: how processes share the machine.
    """
    baseline = variants[0]
    shapes = len(baseline.shapes)
    warmup = max(0, warmup_calls(variants, protocol) - 1)
    timed = warmup * (1 + (processes - 1) / sharing.calls)
    timed += processes * (1 + PROFILED) / sharing.calls  # a discarded round; evidence
    timed += processes * protocol.rounds
    timed += calls_of_stages(protocol, quality)
    draw, timed_batch = draw_of(baseline, batch), baseline.shapes[0].batch_size
    images = sharing.image_calls(draw, len(draw.prompts), timed_batch)
    floors = 0.0
    if quality.metrics:
        floors = sharing.floor_calls(draw, quality.floor_prompts, timed_batch)
    return Effort(
        processes,
        1 + (processes - 1) / sharing.processes,
        timed,
        timed + floors / shapes,
        images / shapes,
        sharing.processes,
    )
