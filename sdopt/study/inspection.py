"""Takes from processes what would disturb timings: stages, evidence, operation counts and images."""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from sdopt.errors import UsageError
from sdopt.quality.images import read_image
from sdopt.results.records import ImageRecord, TimedImage
from sdopt.study.fingerprint import OPTIONS
from sdopt.study.image_cache import ImageCache, content_key
from sdopt.study.preparation import Starved, ask_each, living
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.study.status import append_reason
from sdopt.worker.draws import Draw, draw_of, floor_draws
from sdopt.worker.protocol import SampledImage, WorkerError
from sdopt.worker.session import PipelineHost

P = ParamSpec("P")
T = TypeVar("T")

_ALONE, _MANY = 3, 6
"""So many calls of a quality pass are made while no other process works, where it has as many as `_MANY`; else one."""


def inspect_group(run: StudyRun, group: Sequence[VariantProcess]) -> Starved:
    """Completes the measurements of some processes, once, side by side; returns those that ran out of memory.

    Every process shows evidence at every shape. Stages, energy and images are those of the first process of each
    variant; images of all processes' timed calls are held against them.
    """
    inspection = _Inspection(run, [process for process in group if not process.measurement.complete])
    inspection.take()
    return inspection.starved


@dataclass
class _Inspection:
    run: StudyRun
    group: list[VariantProcess]
    starved: Starved = field(default_factory=list)

    def take(self) -> None:
        first = [process for process in self.group if process.first and not _inspected(process)]
        for process in first:
            self._take_stages(process)
            self._take_energy(process)
            self._count_operations(process)
        self._draw_images([process for process in first if process.row.role != "control" or not self._scored])
        # After all that is timed: on a GPU the profiler stays with a process, and slows its launches from then on.
        self._take_evidence()
        for process in living(first):
            if process.row.role == "control" and self._scored:
                # Its images are the baseline's; what tells something is how they differ when drawn in another way.
                _draw_floors(self.run, process)
        for process in living(self.group):
            _hold_against_drawn(self.run, process)
            process.measurement.complete = True

    @property
    def _scored(self) -> bool:
        return self.run.quality.metrics

    def _take_stages(self, process: VariantProcess) -> None:
        for _ in range(self.run.protocol.stage_calls):
            for _, stages in self._ask([process], "stages", PipelineHost.time_stages):
                process.row.denoiser_calls = len(stages.get("denoiser_step", [])) or process.row.denoiser_calls
                for stage, samples in stages.items():
                    process.measurement.stages_s.setdefault(stage, []).extend(samples)
            self.run.progress.advance()

    def _take_evidence(self) -> None:
        for place in self.run.shapes:
            for process, evidence in self._ask(self.group, "evidence", PipelineHost.prove, place):
                process.measurement.shapes[place].evidence = evidence
            for process, (busy_s, counts) in self._ask(self.group, "evidence", PipelineHost.traced):
                process.measurement.shapes[place].denoiser_busy_s = busy_s
                process.measurement.shapes[place].traced = counts if process.first else {}
            self.run.progress.advance(len(self.group))

    def _take_energy(self, process: VariantProcess) -> None:
        for _, joules in self._ask([process], "energy", PipelineHost.measure_energy):
            process.measurement.energy_j += [] if joules is None else [joules]

    def _count_operations(self, process: VariantProcess) -> None:
        """Notes the TFLOP of one image, counted once for all variants of the same work."""
        savings = [option for _, option in process.variant.applied if option.saves_operations]
        work, operations = repr((process.variant.work, savings)), self.run.operations
        if work not in operations:
            operations[work] = None
            for _, counted in self._ask([process], "operations", PipelineHost.count_operations):
                operations[work] = counted
        process.row.tflop_per_image = operations[work]

    def _draw_images(self, group: Sequence[VariantProcess]) -> None:
        """Draws the images of variants for the quality pass, or takes them from the cache, side by side."""
        run = self.run
        passes = [
            _Pass(run, process, draw_of(process.variant, run.drawing_batch), run.slug(process.row), timed=True)
            for process in living(group)
        ]
        for drawing in passes:
            drawing.fetch()
        for batch in range(max((drawing.draw.calls for drawing in passes), default=0)):
            open_ones = [p for p in passes if p.wants(batch) and living([p.process])]
            alone = [[drawing] for drawing in open_ones if batch in drawing.alone]
            for together in [*alone, [drawing for drawing in open_ones if batch not in drawing.alone]]:
                requests = [drawing.request(batch) for drawing in together]
                found = self._answered([drawing.process for drawing in together], "images", requests)
                for process, records in found:
                    next(drawing for drawing in together if drawing.process is process).take(batch, records)
                    run.progress.advance()
        for drawing in passes:
            if living([drawing.process]):
                drawing.process.row.content_key, drawing.process.row.images = drawing.finish()

    def _ask(
        self,
        group: Sequence[VariantProcess],
        phase: str,
        request: Callable[Concatenate[PipelineHost, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[tuple[VariantProcess, T]]:
        asked = living(group)
        requests = [partial(process.worker.begin, request, *args, **kwargs) for process in asked]
        return self._answered(asked, phase, requests)

    def _answered(
        self, asked: Sequence[VariantProcess], phase: str, requests: Sequence[Callable[[], Callable[[], T]]]
    ) -> list[tuple[VariantProcess, T]]:
        found, starved = ask_each(self.run, asked, phase, requests, lenient=True)
        self.starved += starved
        return found


def _inspected(process: VariantProcess) -> bool:
    """Returns whether an earlier first process of the variant was inspected."""
    return any(other.complete for other in process.row.measurements if not other.replicate)


class _Pass:
    """One pass of a process over prompts.

    Args:
        run: the study.
        process: draws the images.
        draw: which ones.
        name: of their folder, below the run's images.
        timed: whether some calls are made while no other process works, and timed.
    """

    def __init__(self, run: StudyRun, process: VariantProcess, draw: Draw, name: str, timed: bool = False) -> None:
        self.process, self.draw = process, draw
        self._run = run
        self._place = Path("images") / name
        self._folder = run.folder / self._place
        self._key = content_key(process.variant, draw, process.row.inputs, run.result.environment)
        # What a user's own option reads beside what it declares, nobody knows.
        self._images = ImageCache(None) if OPTIONS in process.row.inputs else run.images
        self._cached = False
        self.records: list[ImageRecord] = []
        # At random, so that no option knows which: and, as far as there are any, of prompts that were not timed.
        given = {number for place, number in process.given if not place}
        fresh = [batch for batch in range(draw.calls) if batch not in given]
        count = min(draw.calls, _ALONE if draw.calls >= _MANY else 1) if timed else 0
        self.alone = set(random.sample(fresh if len(fresh) >= count else range(draw.calls), count))
        """Batches that are drawn while no other process works, and so timed."""

    @property
    def whole(self) -> bool:
        """Whether every image is there."""
        return len(self.records) == len(self.draw.prompts) * self.process.variant.workload.images_per_prompt

    def fetch(self) -> bool:
        """Takes the images from the cache if they are there; returns whether they are."""
        records = self._images.fetch(self._key, self._folder)
        if records is None:
            return False
        self.records, self._cached = records, True
        self._run.progress.advance(self.draw.calls - len(self.alone))
        return True

    def wants(self, batch: int) -> bool:
        """Whether a batch is to be drawn: of those in the cache only what is timed, and compared with them."""
        return batch < self.draw.calls and (not self._cached or batch in self.alone)

    def request(self, batch: int) -> Callable[[], Callable[[], list[ImageRecord]]]:
        """Returns what begins one batch."""
        folder = self._again if self._cached else self._folder
        return partial(self.process.worker.begin, PipelineHost.generate, batch, self.draw, folder)

    def take(self, batch: int, records: list[ImageRecord]) -> None:
        """Takes over what was drawn of a batch."""
        measurement = self.process.measurement
        if batch in self.alone and self.process.worker.observed_s is not None:
            measurement.drawn_s.append(self.process.worker.observed_s)
            measurement.drawn_batch = self.draw.batch_size
        if not self._cached:
            self.records += records
            return
        for record in records:
            drawn = SampledImage(record.prompt_index, record.image_index, read_image(self._again / record.path))
            self.process.images.append(drawn)

    @property
    def _again(self) -> Path:
        """Where images are drawn that are in the cache already."""
        return self._run.scratch / self.process.slug / "drawn-again"

    def finish(self) -> tuple[str, list[ImageRecord]]:
        """Keeps whole passes in the cache; returns the content key, and the images by their paths in the run."""
        if self.whole:
            self._images.keep(self._key, self._folder, self.records)
        return self._key, [replace(record, path=str(self._place / record.path)) for record in self.records]

    def discard(self) -> None:
        """Deletes what was drawn."""
        self.records = []
        shutil.rmtree(self._folder, ignore_errors=True)


def _hold_against_drawn(run: StudyRun, process: VariantProcess) -> None:
    """Compares the images of a process's timed calls with those that the first process of its variant drew."""
    row = process.row
    if not row.images and row.role == "control":
        row = run.result.variant(run.result.baseline)  # whose images are the control's too
    drawn = {(record.prompt_index, record.image_index): record for record in row.images}
    for image in process.images:
        record = drawn.get((image.prompt_index, image.image_index))
        error = None if record is None else _squared_difference(image.pixels, run.folder / record.path)
        process.measurement.timed_images.append(TimedImage(image.prompt_index, image.image_index, error))
    process.images = []


def _squared_difference(pixels: np.ndarray, file: Path) -> float | None:
    """Returns the mean squared difference of two images, as shares of the whole range; None if it has none."""
    try:
        drawn = read_image(file)
    except UsageError:
        return None
    if drawn.shape != pixels.shape:
        return None
    return float(np.mean(np.square(drawn / 255 - pixels / 255)))


def _draw_floors(run: StudyRun, process: VariantProcess) -> None:
    """Draws the baseline's images once more for each floor.

    A floor that cannot be drawn is left out and noted: it says nothing of the control, whose timings stay.
    """
    threads = process.variant.hardware.threads or int(run.machine.cpu["cores"])
    for kind, draws in floor_draws(process.variant, run.quality.floor_prompts, threads, run.drawing_batch).items():
        problems = []
        for draw in draws:
            drawing = _Pass(run, process, draw, f"floor-{kind}")
            try:
                if not drawing.fetch():
                    for batch in range(draw.calls):
                        run.progress.phase(process.row.name, "images")
                        drawing.records += drawing.request(batch)()()
                        run.progress.advance()
                _, run.result.redrawn[kind] = drawing.finish()
                break
            except WorkerError as error:
                drawing.discard()
                problems.append(f"in batches of {draw.batch_size}: {error.reason}")
                if not process.worker.alive:
                    break
        if problems:
            drawn = "drawn in smaller batches" if kind in run.result.redrawn else "not drawn"
            process.row.reason = append_reason(process.row, f"the {kind} floor was {drawn}; {'; '.join(problems)}")
        if not process.worker.alive:
            return
