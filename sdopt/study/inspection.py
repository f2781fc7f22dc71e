"""Takes from a process what would disturb its timings: stages, evidence, operation counts and images."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from sdopt.results.records import ImageRecord, Status
from sdopt.study.image_cache import content_key
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.study.status import append_reason
from sdopt.worker.draws import Draw, draw_of, floor_draws
from sdopt.worker.protocol import WorkerError

P = ParamSpec("P")
T = TypeVar("T")


def inspect_process(run: StudyRun, process: VariantProcess) -> None:
    """Completes the measurement of a process, once. Raises WorkerError if the worker is gone or ran out of memory."""
    measurement, row, worker = process.measurement, process.row, process.worker
    if measurement.complete:
        return
    if process.graphs:
        # A graph compiled after the first call was compiled in the warm-up or, worse, within a sample.
        measurement.recompiles = worker.compile_report().graphs - process.graphs
    for _ in range(run.protocol.stage_calls):
        run.progress.phase(row.name, "stages")
        stages = _ask_or_note(process, {}, worker.time_stages)
        row.denoiser_calls = len(stages.get("denoiser_step", [])) or row.denoiser_calls
        for stage, samples in stages.items():
            measurement.stages_s.setdefault(stage, []).extend(samples)
        run.progress.advance()
    run.progress.phase(row.name, "evidence")
    measurement.evidence = _ask_or_note(process, [], worker.prove)
    measurement.denoiser_busy_s = _ask_or_note(process, None, worker.denoiser_busy_s)
    run.progress.phase(row.name, "energy")
    joules = _ask_or_note(process, None, worker.measure_energy)
    measurement.energy_j += [] if joules is None else [joules]
    run.progress.advance()
    if measurement.replicate == 0 and not any(other.complete for other in row.measurements if not other.replicate):
        row.tflop_per_image = _operations(run, process)
        if row.role == "control" and run.quality.metrics:
            # Its images are the baseline's; what tells something is how they differ when drawn in another way.
            _draw_floors(run, process)
        else:
            _draw_images(run, process)
    measurement.complete = True


def _ask_or_note(
    process: VariantProcess, otherwise: T, request: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Asks for what is not a timing. If the worker cannot answer, that is noted, and the timings stay.

    Raises:
        WorkerError: the worker is gone, or ran out of memory.
    """
    try:
        return request(*args, **kwargs)
    except WorkerError as error:
        if error.status is not Status.FAILED:
            raise
        process.row.reason = append_reason(process.row, f"{request.__name__}: {error.reason}")
        return otherwise


def _operations(run: StudyRun, process: VariantProcess) -> float | None:
    """Returns the TFLOP of one image, counted once for all variants of the same work."""
    savings = [option for _, option in process.variant.applied if option.saves_operations]
    work = repr((process.variant.work, savings))
    if work not in run.operations:
        run.operations[work] = _ask_or_note(process, None, process.worker.count_operations)
    return run.operations[work]


def _draw_images(run: StudyRun, process: VariantProcess) -> None:
    """Draws the images of a variant for the quality pass."""

    def generate(batch: int, draw: Draw, folder: Path) -> list[ImageRecord]:
        return _ask_or_note(process, [], process.worker.generate, batch, draw, folder)

    row = process.row
    row.content_key, row.images = _images_of(
        run, process, draw_of(process.variant, run.drawing_batch), Path("images") / run.slug(row), generate
    )


def _draw_floors(run: StudyRun, process: VariantProcess) -> None:
    """Draws the baseline's images once more for each floor.

    A floor that cannot be drawn is left out and noted: it says nothing of the control, whose timings stay.
    """
    threads = process.variant.hardware.threads or int(run.machine.cpu["cores"])
    for kind, draws in floor_draws(process.variant, run.quality.floor_prompts, threads, run.drawing_batch).items():
        place, problems = Path("images") / f"floor-{kind}", []
        for draw in draws:
            try:
                _, run.result.redrawn[kind] = _images_of(run, process, draw, place, process.worker.generate)
                break
            except WorkerError as error:
                shutil.rmtree(run.folder / place, ignore_errors=True)
                problems.append(f"in batches of {draw.batch_size}: {error.reason}")
                if not process.worker.alive:
                    break
        if problems:
            drawn = "drawn in smaller batches" if kind in run.result.redrawn else "not drawn"
            process.row.reason = append_reason(process.row, f"the {kind} floor was {drawn}; {'; '.join(problems)}")
        if not process.worker.alive:
            return


def _images_of(
    run: StudyRun,
    process: VariantProcess,
    draw: Draw,
    place: Path,
    generate: Callable[[int, Draw, Path], list[ImageRecord]],
) -> tuple[str, list[ImageRecord]]:
    """Returns the content key and the images of a draw, from the cache if they are there.

    Args:
        run: the study.
        process: draws the images.
        draw: which ones.
        place: folder for the images, below the run's.
        generate: makes the images of one batch.
    """
    folder = run.folder / place
    key = content_key(process.variant, draw, process.row.inputs, run.result.environment)
    records = run.images.fetch(key, folder)
    if records is not None:
        run.progress.advance(draw.calls)
    else:
        records = []
        for batch in range(draw.calls):
            run.progress.phase(process.row.name, "images")
            records += generate(batch, draw, folder)
            run.progress.advance()
        if len(records) == len(draw.prompts) * process.variant.workload.images_per_prompt:
            run.images.keep(key, folder, records)
    return key, [replace(record, path=str(place / record.path)) for record in records]
