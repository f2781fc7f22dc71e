"""Takes the measurements that would disturb timings: stages, evidence, operation counts and images."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from sdopt.errors import UsageError
from sdopt.quality.images import read_image
from sdopt.results.records import append_reason
from sdopt.results.samples import TimedImage
from sdopt.results.scores import ImageRecord
from sdopt.study.fingerprint import OPTIONS
from sdopt.study.image_cache import ImageCache, content_key
from sdopt.study.preparation import OutOfMemory, ask_each, batched, living
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.worker.draws import Draw, draw_of, floor_draws
from sdopt.worker.host import PipelineHost
from sdopt.worker.protocol import Batch, SampledImage, WorkerError

P = ParamSpec("P")
T = TypeVar("T")


def inspect_group(run: StudyRun, group: Sequence[VariantProcess]) -> OutOfMemory:
    """Completes the measurements of some processes, once, side by side; returns those that ran out of memory.

    Every process shows evidence at every shape. Only the first process of each variant gives stages, energy and images;
    the images of all processes' timed calls are compared with those.
    """
    inspection = _Inspection(run, [process for process in group if not process.measurement.complete])
    inspection.take()
    return inspection.out_of_memory


@dataclass
class _Inspection:
    run: StudyRun
    group: list[VariantProcess]
    out_of_memory: OutOfMemory = field(default_factory=list)

    def take(self) -> None:
        first = [process for process in self.group if process.first and not _inspected(process)]
        for process in first:
            self._take_energy(process)
            self._count_operations(process)
        self._draw_images([process for process in first if not process.row.is_control or not self._scored])
        # After the images, because the image of this call is compared with one of them: options may change over calls.
        for process in first:
            self._take_stages(process)
        # After every timing: on a GPU the profiler stays in the process and slows all later launches.
        self._take_evidence()
        for process in living(first):
            if process.row.is_control and self._scored:
                # The control's images are the baseline's. They are drawn in other ways, to measure the floors.
                _draw_floors(self.run, process)
        for process in living(self.group):
            _hold_against_drawn(self.run, process)
            process.measurement.complete = True

    @property
    def _scored(self) -> bool:
        return self.run.quality.metrics

    def _take_stages(self, process: VariantProcess) -> None:
        timed = self.run.protocol.stage_calls
        # A gate judges images only where a call has counted the steps of the denoiser.
        for number in range(max(timed, int(self._scored))):
            for _, found in self._ask([process], "stages", PipelineHost.time_stages):
                stages = found.stages_s
                process.row.denoiser_calls = len(stages.get("denoiser_step", [])) or process.row.denoiser_calls
                for stage, samples in stages.items() if number < timed else ():
                    process.measurement.stages_s.setdefault(stage, []).extend(samples)
                process.images.append(found.image)
            self.run.progress.advance()

    def _take_evidence(self) -> None:
        for shape_index in self.run.shapes:
            for part in batched(self.group, self.run.sharing.calls):
                for process, found in self._ask(part, "evidence", PipelineHost.prove, shape_index):
                    samples = process.measurement.shapes[shape_index]
                    samples.evidence, samples.denoiser_busy_s = found.evidence, found.denoiser_busy_s
                    samples.traced = found.counts if process.first else {}
                    left_set = [f"it leaves {setting}" for setting in found.left_set]
                    process.row.reason = append_reason(process.row, *left_set)
            self.run.progress.advance(len(self.group))

    def _take_energy(self, process: VariantProcess) -> None:
        seconds = self.run.protocol.energy_s
        if not seconds:
            return
        for _, joules in self._ask([process], "energy", PipelineHost.measure_energy, seconds):
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
            _Pass(
                run,
                process,
                draw_of(process.variant, run.drawing_batch, run.sharing.drawing_threads),
                run.slug(process.row),
            )
            for process in living(group)
        ]
        for drawing in passes:
            drawing.fetch()
        for batch in range(max((drawing.draw.calls for drawing in passes), default=0)):
            together = [drawing for drawing in passes if drawing.wants(batch) and living([drawing.process])]
            requests = [drawing.request(batch) for drawing in together]
            found = self._answered([drawing.process for drawing in together], "images", requests)
            for process, answer in found:
                next(drawing for drawing in together if drawing.process is process).receive(answer)
                run.progress.advance()
        for drawing in passes:
            if drawing.drawn:
                measurement = drawing.process.measurement
                measurement.pass_s = [batch.seconds for batch in drawing.batches]
                measurement.pass_held_gib = [batch.held_gib for batch in drawing.batches]
            if living([drawing.process]):
                row = drawing.process.row
                row.content_key, row.images = drawing.finish()

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
        found, out_of_memory = ask_each(self.run, asked, phase, requests, lenient=True)
        self.out_of_memory += out_of_memory
        return found


def _inspected(process: VariantProcess) -> bool:
    """Returns whether an earlier first process of the variant was inspected."""
    return any(other.complete for other in process.row.measurements if not other.replicate)


class _Pass:
    """One pass of a process over prompts.

    Args:
        run: the study.
        process: the process that draws the images.
        draw: the images to draw.
        name: the name of their folder, below the run's images.
    """

    def __init__(self, run: StudyRun, process: VariantProcess, draw: Draw, name: str) -> None:
        self.process, self.draw = process, draw
        self._run = run
        self._subfolder = Path("images") / name
        self._folder = run.folder / self._subfolder
        self._key = content_key(process.variant, draw, process.row.inputs, run.result.environment)
        # A user's own option may read files that it does not declare.
        self._images = ImageCache(None) if OPTIONS in process.row.inputs else run.images
        self._cached = False
        self.records: list[ImageRecord] = []
        self.batches: list[Batch] = []

    @property
    def whole(self) -> bool:
        """Whether every image is there."""
        return len(self.records) == len(self.draw.prompts) * self.process.variant.workload.images_per_prompt

    @property
    def drawn(self) -> bool:
        """Whether its process drew every image, rather than found it in the cache."""
        return self.whole and not self._cached and bool(living([self.process]))

    def fetch(self) -> bool:
        """Takes the images from the cache if they are there; returns whether they are."""
        records = self._images.fetch(self._key, self._folder)
        if records is None:
            return False
        self.records, self._cached = records, True
        self._run.progress.advance(self.draw.calls)
        return True

    def wants(self, batch: int) -> bool:
        """Returns whether a batch is to be drawn."""
        return batch < self.draw.calls and not self._cached

    def request(self, batch: int) -> Callable[[], Callable[[], Batch]]:
        """Returns a function that begins one batch."""
        return partial(self.process.worker.begin, PipelineHost.generate, batch, self.draw, self._folder)

    def receive(self, batch: Batch) -> None:
        """Notes images that were drawn."""
        self.batches.append(batch)
        self.records += batch.records

    def finish(self) -> tuple[str, list[ImageRecord]]:
        """Keeps whole passes in the cache; returns the content key, and the images by their paths in the run."""
        if self.whole:
            self._images.keep(self._key, self._folder, self.records)
        return self._key, [replace(record, path=str(self._subfolder / record.path)) for record in self.records]

    def discard(self) -> None:
        """Deletes the drawn images."""
        self.records = []
        shutil.rmtree(self._folder, ignore_errors=True)


def _hold_against_drawn(run: StudyRun, process: VariantProcess) -> None:
    """Compares the sampled images of a process's timed calls with those that the variant's first process drew."""
    row = process.row
    if not row.images and row.is_control:
        row = run.result.variant(run.result.baseline)  # whose images are the control's too
    drawn = {(record.prompt_index, record.image_index): record for record in row.images}

    def error(image: SampledImage) -> float | None:
        record = drawn.get((image.prompt_index, image.image_index))
        return None if record is None else _squared_difference(image.pixels, run.folder / record.path)

    measurement = process.measurement
    measurement.shapes[0].timed_images += [TimedImage(i.prompt_index, i.image_index, error(i)) for i in process.images]
    process.images = []


def _squared_difference(pixels: np.ndarray, file: Path) -> float | None:
    """Returns the mean squared difference of pixels in 0…1 to a file; None if that has no image of the same size."""
    try:
        return _error(pixels, read_image(file))
    except UsageError:
        return None


def _error(mine: np.ndarray, other: np.ndarray) -> float | None:
    """Returns the mean squared difference of pixels in 0…1; None if the two differ in size."""
    return float(np.mean(np.square(mine / 255 - other / 255))) if mine.shape == other.shape else None


def _draw_floors(run: StudyRun, process: VariantProcess) -> None:
    """Draws the baseline's images once more for each floor.

    A floor that cannot be drawn is left out and noted; the control and its timings stay valid.
    """
    drawn = draw_of(process.variant, run.drawing_batch, run.sharing.drawing_threads)
    for kind, draws in floor_draws(drawn, process.variant, run.quality.floor_prompts, run.sharing.threads).items():
        problems = []
        for draw in draws:
            drawing = _Pass(run, process, draw, f"floor-{kind}")
            try:
                if not drawing.fetch():
                    for batch in range(draw.calls):
                        run.progress.phase(process.row.name, "images")
                        drawing.receive(drawing.request(batch)()())
                        run.progress.advance()
                _, run.result.redrawn[kind] = drawing.finish()
                break
            except WorkerError as error:
                drawing.discard()
                problems.append(f"in batches of {draw.batch_size}: {error.reason}")
                if not process.worker.alive:
                    break
        if problems:
            how = "drawn in smaller batches" if kind in run.result.redrawn else "not drawn"
            process.row.reason = append_reason(process.row, f"the {kind} floor was {how}; {'; '.join(problems)}")
        if not process.worker.alive:
            return
