"""Takes the measurements that would disturb timings: energy, operation counts, images, stages and evidence."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from sdopt.record.records import append_reason
from sdopt.study.image_pass import draw_floors, draw_images, hold_against_drawn
from sdopt.study.session import Session, VariantProcess, batched
from sdopt.worker.host import PipelineHost

P = ParamSpec("P")
T = TypeVar("T")


class Inspection:
    """Completes the measurements of some processes, once, side by side.

    Every process shows evidence at every shape. Only the first process of each variant gives stages, energy and images;
    the images of all processes' timed calls are compared with those.

    Args:
        session: the session.
        group: the processes.
    """

    def __init__(self, session: Session, group: Sequence[VariantProcess]) -> None:
        self._session, self._study = session, session.study
        self._group = [process for process in group if process.living and not process.measurement.complete]

    def take(self) -> None:
        """Takes the measurements; one that cannot be taken is noted, and fails no variant."""
        scored = self._study.quality.metrics
        first = [process for process in self._group if process.first and not _inspected(process)]
        for process in first:
            self._take_energy(process)
            self._count_operations(process)
        # The control's images are the baseline's. They are drawn in other ways, to measure the floors.
        draw_images(self._session, [process for process in first if not (process.row.is_control and scored)])
        # After the images, because the image of this call is compared with one of them: options may change over calls.
        for process in first:
            self._take_stages(process)
        for process in self._group:
            self._call_again(process)
        # After every timing: on a GPU the profiler stays in the process and slows all later launches.
        self._take_evidence()
        for process in first:
            if process.living and process.row.is_control and scored:
                draw_floors(self._session, process)
        for process in self._group:
            if process.living:
                hold_against_drawn(self._study, process)
                process.measurement.complete = True

    def _call_again(self, process: VariantProcess) -> None:
        """Makes one more call of a process whose calls an earlier session timed, and did not live to compare."""
        if process.living and not process.images:
            number = self._session.next_batch(process, 0, 0)
            for _, call in self._ask([process], "timed calls", PipelineHost.time_once, 0, number):
                process.images += [] if call.image is None else [call.image]

    def _take_stages(self, process: VariantProcess) -> None:
        timed = self._study.protocol.stage_calls
        # A gate judges images only where a call has counted the steps of the denoiser.
        for number in range(max(timed, int(self._study.quality.metrics))):
            for _, found in self._ask([process], "stages", PipelineHost.time_stages):
                stages = found.stages_s
                process.row.denoiser_calls = len(stages.get("denoiser_step", [])) or process.row.denoiser_calls
                for stage, samples in stages.items() if number < timed else ():
                    process.measurement.stages_s.setdefault(stage, []).extend(samples)
                process.images.append(found.image)
            self._study.progress.advance()

    def _take_evidence(self) -> None:
        for shape_index in self._study.shapes:
            for part in batched(self._group, self._study.sharing.calls):
                for process, found in self._ask(part, "evidence", PipelineHost.prove, shape_index):
                    samples = process.measurement.shapes[shape_index]
                    samples.evidence, samples.denoiser_busy_s = found.evidence, found.denoiser_busy_s
                    samples.traced = found.counts if process.first else {}
                    left_set = [f"it leaves {setting}" for setting in found.left_set]
                    process.row.reason = append_reason(process.row, *left_set)
            self._study.progress.advance(len(self._group))

    def _take_energy(self, process: VariantProcess) -> None:
        seconds = self._study.protocol.energy_s
        if not seconds:
            return
        for _, joules in self._ask([process], "energy", PipelineHost.measure_energy, seconds):
            process.measurement.energy_j += [] if joules is None else [joules]

    def _count_operations(self, process: VariantProcess) -> None:
        """Notes the TFLOP of one image, counted once for all variants of the same work."""
        if any(option.saves_operations is None for _, option in process.variant.applied):
            return
        savings = [option for _, option in process.variant.applied if option.saves_operations]
        work, operations = repr((process.variant.work, savings)), self._study.operations
        if work not in operations:
            operations[work] = None
            for _, counted in self._ask([process], "operations", PipelineHost.count_operations):
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
        asked = [process for process in group if process.living]
        begin = [(process, partial(process.worker.begin, request, *args, **kwargs)) for process in asked]
        return self._session.ask_each(phase, begin, lenient=True)


def _inspected(process: VariantProcess) -> bool:
    """Returns whether an earlier first process of the variant was inspected."""
    return any(other.complete for other in process.row.measurements if not other.replicate)
