"""Takes the measurements that would disturb timings: energy, operation counts, images, stages and evidence."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from sdopt.errors import UsageError
from sdopt.quality.images import read_image
from sdopt.record.images import is_there
from sdopt.record.records import REDRAWN, VariantResult, append_reason
from sdopt.record.samples import TimedImage
from sdopt.record.scores import BrokenImage, ImageRecord
from sdopt.study.reuse import join_latents, kept_of, place_of
from sdopt.study.session import Session, Study, VariantProcess
from sdopt.study.work import batched, calls_of_stages
from sdopt.worker.draws import Draw, draw_of, floor_draws
from sdopt.worker.host import PipelineHost
from sdopt.worker.protocol import Batch, SampledImage, WorkerError

P = ParamSpec("P")
T = TypeVar("T")


KEEPING_S = 30.0
"""Seconds of images that a study may lose which is killed."""


class Inspection:
    """Completes the measurements of some processes, once, side by side.

    Every process shows evidence at every shape. Only the first process of each variant gives stages, energy and images;
    the images of all processes' timed calls are compared with those. After each batch of images `foretell` tells anew when
    the command ends: the machine may have become busy.
    """

    def __init__(
        self,
        session: Session,
        group: Sequence[VariantProcess],
        foretell: Callable[[], None],
    ) -> None:
        self._session, self._study = session, session.study
        self._foretell = foretell
        self._group = [
            process
            for process in group
            if process.takes_part and not process.measurement.complete
        ]

    def take(self) -> None:
        """Takes the measurements; one that cannot be taken is noted, and fails no variant."""
        study = self._study
        first = [process for process in self._group if process.first]
        # An earlier first process of a variant may have been inspected.
        first = [process for process in first if not _was_inspected(process.row)]
        for process in first:
            self._take_totals(process)
        drawing = [p for p in first if not study.draws_floors(p.row)]
        # An earlier session may have been interrupted after its images.
        drawing = [p for p in drawing if not _is_drawn(study, p)]
        draw_images(self._session, drawing, self._foretell)
        # After the images, because the image of this call is compared with one of them: options may change over calls.
        for process in first:
            self._take_stages(process)
        # Processes whose calls an earlier session timed, and did not live to compare, make one more.
        for process in self._group:
            if process.takes_part and not process.images and not process.pictures:
                number = self._session.next_batch(process, 0, 0)
                for _, call in self._ask(
                    [process], "timed calls", PipelineHost.time_once, 0, number
                ):
                    process.images += [] if call.image is None else [call.image]
        # After every timing: on a GPU the profiler stays in the process and slows all later launches.
        self._take_evidence()
        for process in first:
            if process.takes_part and study.draws_floors(process.row):
                draw_floors(self._session, process)
        for process in self._group:
            if process.takes_part:
                hold_against_drawn(study, process)
                process.measurement.complete = True

    def _take_stages(self, process: VariantProcess) -> None:
        if (budget := self._study.result.budget) and not budget.stages:
            return
        timed = self._study.protocol.stage_calls
        # A gate judges images only where a call has counted the steps of the denoiser.
        for number in range(calls_of_stages(self._study.protocol, self._study.quality)):
            for _, answer in self._ask([process], "stages", PipelineHost.time_stages):
                stages = answer.stages_s
                process.row.denoiser_calls = (
                    len(stages.get("denoiser_step", [])) or process.row.denoiser_calls
                )
                for stage, samples in stages.items() if number < timed else ():
                    process.measurement.stages_s.setdefault(stage, []).extend(samples)
                if number < timed:
                    peaks = process.measurement.stages_gib
                    peaks |= {
                        stage: max(peak, peaks.get(stage, peak))
                        for stage, peak in answer.stages_gib.items()
                    }
                process.images.append(answer.image)
            self._study.progress.advance()

    def _take_evidence(self) -> None:
        group = self._group
        if (budget := self._study.result.budget) and not budget.evidence:
            group = [process for process in group if process.first]
            for process in self._group:
                process.measurement.spared = not process.first
        for shape_index in self._study.shapes:
            for part in batched(group, self._study.sharing.calls):
                for process, answer in self._ask(
                    part, "evidence", PipelineHost.prove, shape_index
                ):
                    samples = process.measurement.shapes[shape_index]
                    samples.evidence, samples.denoiser_busy_s = (
                        answer.evidence,
                        answer.denoiser_busy_s,
                    )
                    samples.traced = answer.counts if process.first else {}
                    left_set = [f"it leaves {setting}" for setting in answer.left_set]
                    process.row.reason = append_reason(process.row, *left_set)
            self._study.progress.advance()

    def _take_totals(self, process: VariantProcess) -> None:
        """Notes the energy of a call, and the TFLOP of one image, counted once for all variants of the same work."""
        seconds = self._study.protocol.energy_s
        for _, joules in (
            self._ask([process], "energy", PipelineHost.measure_energy, seconds)
            if seconds
            else ()
        ):
            process.measurement.energy_j += [] if joules is None else [joules]
        if any(
            option.saves_operations is None for _, option in process.variant.applied
        ):
            return
        savings = [
            option for _, option in process.variant.applied if option.saves_operations
        ]
        work, operations = repr((process.variant.work, savings)), self._study.operations
        if work not in operations:
            operations[work] = None
            for _, counted in self._ask(
                [process], "operations", PipelineHost.count_operations
            ):
                operations[work] = counted
        process.row.tflop_per_image = operations[work]

    def _ask(
        self,
        group: Sequence[VariantProcess],
        phase: str,
        request: Callable[Concatenate[PipelineHost, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[tuple[VariantProcess, T]]:
        def begin(process: VariantProcess) -> Callable[[], T]:
            return process.worker.begin(request, *args, **kwargs)

        return self._session.ask_each(group, phase, begin, lenient=True)


@dataclass
class ImagePass:
    """One pass of a process over the prompts of a draw; its images are in a folder of this name, below the study's."""

    study: Study
    process: VariantProcess
    draw: Draw
    name: str
    records: list[ImageRecord] = field(default_factory=list)
    """Its images so far, by their paths in the run; at first those that need not be drawn."""
    asked: int = 0
    """How many of its batches the worker was asked for."""
    batches: list[Batch] = field(default_factory=list)
    """Those that were drawn."""

    @property
    def folder(self) -> Path:
        """The folder of the images."""
        return self.study.folder / "images" / self.name

    @property
    def ahead(self) -> bool:
        """Whether the worker, which must live, is still to be asked for batches."""
        return self.process.takes_part and self.asked < self.draw.calls

    def begin(self) -> Callable[[], Batch]:
        """Begins the next batch; returns a function that waits for it. Both raise WorkerError."""
        self.asked += 1
        return self.process.worker.begin(
            PipelineHost.generate, self.asked - 1, self.draw, self.folder
        )

    def receive(self, batch: Batch) -> None:
        """Notes images that were drawn."""
        self.batches.append(batch)
        for record in batch.records:
            path = f"images/{self.name}/{record.path}"
            self.records.append(replace(record, path=path))
        self.study.progress.advance()

    @property
    def images(self) -> list[ImageRecord]:
        """Its images so far in the order of prompts and images."""
        return sorted(self.records, key=place_of)


def _was_inspected(row: VariantResult) -> bool:
    return any(m.complete and not m.replicate for m in row.measurements)


def _is_drawn(study: Study, process: VariantProcess) -> bool:
    """Returns whether all images of a variant are in the run's folder."""
    draw, images = _draw(study, process), process.row.images
    prompts = {record.prompt_index for record in images}
    whole = prompts.issuperset(draw.positions)
    return whole and all(is_there(study.folder, record) for record in images)


def draw_images(
    session: Session, group: Sequence[VariantProcess], foretell: Callable[[], None]
) -> None:
    """Draws the images of variants side by side, and calls `foretell` after each batch."""
    passes = {process: _image_pass(session.study, process) for process in group}
    while drawing_now := [
        process for process, drawing in passes.items() if drawing.ahead
    ]:
        for process, batch in session.ask_each(
            drawing_now, "images", lambda asked: passes[asked].begin(), lenient=True
        ):
            passes[process].receive(batch)
            process.row.kept_images = passes[process].records
        foretell()
        session.study.checkpoint(every_s=KEEPING_S)
    for process, drawing in passes.items():
        if process.takes_part:
            join_latents(drawing.folder, drawing.images)
            process.row.images, process.row.kept_images = drawing.images, []
            if len(drawing.batches) == drawing.draw.calls:
                process.measurement.pass_s = [
                    batch.seconds for batch in drawing.batches
                ]
                process.measurement.pass_held_gib = [
                    batch.held_gib for batch in drawing.batches
                ]


def _image_pass(study: Study, process: VariantProcess) -> ImagePass:
    draw = _draw(study, process)
    images = kept_of(process.row, draw, study.folder)
    others = frozenset(record.prompt_index for record in images)
    rest = replace(draw, others=others)
    return ImagePass(study, process, rest, study.slug(process.row), images)


def _draw(study: Study, process: VariantProcess) -> Draw:
    draw = draw_of(process.variant, study.drawing_batch, study.sharing.drawing_threads)
    budget = study.result.budget
    return (
        draw
        if budget is None
        else replace(draw, prompts=draw.prompts[: budget.prompts])
    )


def draw_floors(session: Session, process: VariantProcess) -> None:
    """Draws the baseline's images once more for each floor.

    A floor that cannot be drawn is left out and noted; the control and its timings stay valid.
    """
    study = session.study
    prompts, threads = study.quality.floor_prompts, study.sharing.threads
    if (budget := study.result.budget) and budget.floor_prompts is not None:
        prompts = budget.floor_prompts
    floors = floor_draws(_draw(study, process), process.variant, prompts, threads)
    for kind, draws in floors.items():
        problems = []
        for draw in draws:
            drawing = ImagePass(study, process, draw, f"floor-{kind}")
            try:
                while drawing.ahead:
                    study.progress.phase(process.row.name, "images")
                    drawing.receive(drawing.begin()())
                join_latents(drawing.folder, drawing.images)
                study.result.redrawn[kind] = drawing.images
                break
            except WorkerError as error:
                shutil.rmtree(drawing.folder, ignore_errors=True)
                problems.append(f"in batches of {draw.batch_size}: {error.reason}")
                if not process.worker.alive:
                    break
        if problems:
            how = (
                "drawn in smaller batches"
                if kind in study.result.redrawn
                else "not drawn"
            )
            process.row.reason = append_reason(
                process.row, f"{REDRAWN[kind]}: {how}; {'; '.join(problems)}"
            )
        if not process.worker.alive:
            return


def hold_against_drawn(study: Study, process: VariantProcess) -> None:
    """Compares the sampled images of a process's timed calls with those that the variant's first process drew."""
    row = process.row
    if not row.images and row.is_control:
        row = study.result.variant(
            study.result.baseline
        )  # whose images are the control's too
    drawn = {
        (record.prompt_index, record.image_index): record
        for record in row.images
        if record.process is None
    }

    def error(image: SampledImage) -> float | None:
        record = drawn.get((image.prompt_index, image.image_index))
        return (
            None
            if record is None
            else _squared_difference(image.pixels, study.folder / record.path)
        )

    timed_images = process.measurement.shapes[0].timed_images
    again = [process.pictures[place] for place in drawn if place in process.pictures]
    timed_images += [
        TimedImage(i.prompt_index, i.image_index, error(i))
        for i in [*again, *process.images]
    ]
    if not study.quality.metrics:  # else all tripwires look at the images
        paths = [record.path for record in process.row.images if not record.finite]
        paths = paths or ["" for image in process.images if not image.finite][:1]
        broken = [
            BrokenImage("non_finite", path, "pixels are NaN or infinite")
            for path in paths
        ]
        at_shapes = process.row.trips_at_shapes
        drawn_so = [trip for trip in process.row.trips if trip not in at_shapes]
        process.row.trips = [*(drawn_so or broken), *at_shapes]
    process.images, process.pictures = [], {}


def _squared_difference(pixels: np.ndarray, file: Path) -> float | None:
    """Returns the mean squared difference of pixels in 0…1 to a file; None if that has no image of the same size."""
    try:
        other = read_image(file)
    except UsageError:
        return None
    return (
        float(np.mean(np.square(pixels / 255 - other / 255)))
        if pixels.shape == other.shape
        else None
    )
