"""Estimates the seconds that a session still takes, from what its calls and its images have taken so far.

The display of progress and `protocol.budget_s` follow the same estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from sdopt.record.samples import ShapeSamples
from sdopt.study.session import Session, VariantProcess
from sdopt.study.work import (
    PROFILED,
    batched,
    calls_of_stages,
    programs_s,
    report_s,
)
from sdopt.worker.draws import draw_of


@dataclass(frozen=True)
class Extent:
    """How much of its work a session does.

    Attributes:
        rounds: timed rounds in all.
        prompts: prompts of the quality pass; None for all of them.
        floor_prompts: prompts that the baseline draws again.
        evidence: whether every process shows evidence, and not only the first one of each variant.
        stages: whether the first process of each variant makes calls that time the stages.
        programs: how many programs that reports hand out are run; None for those of all variants.
    """

    rounds: int
    prompts: int | None = None
    floor_prompts: int | None = None
    evidence: bool = True
    stages: bool = True
    programs: int | None = None


class Ahead:
    """Estimates for one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._study = session.study

    def call_s(self, process: VariantProcess) -> float | None:
        """Returns the seconds of a warm call at all shapes together; None while no call is known."""
        row = process.row
        this_one = [m for m in row.measurements if m is process.measurement]
        for measurement in [*this_one, *row.measurements]:
            latest = list(map(_latest_s, measurement.shapes))
            known = [seconds for seconds in latest if seconds is not None]
            if len(known) == len(latest):
                return float(sum(known))
        return None

    def seconds(self, extent: Extent) -> float | None:
        """Returns the seconds until the command ends; None while nothing is known.

        Args:
            extent: how much is still to be done.
        """
        processes = [p for p in self._session.processes if p.active]
        if not any(self.call_s(process) for process in self._session.processes):
            return None
        total_s = self.report_s + self._programs_s(processes, extent)
        total_s += self._images_s(processes, extent)
        for process in processes:
            total_s += self._preparing_s(process)
            timed = process.measurement.shapes[0].calls
            rounds = max(0, extent.rounds - len(timed))
            if process.timed and process.row.name not in self._session.settled:
                total_s += rounds * self._call_or_baseline_s(process)
            total_s += self._inspecting_s(process, extent)
        if not self._session.interleaved:
            total_s += self._blocks_s(processes, extent.rounds)
        return total_s

    def _blocks_s(self, processes: Sequence[VariantProcess], rounds: int) -> float:
        """Returns the seconds of loading each process again, and of the passes of the baseline between blocks."""
        calls = 1 + self._study.warmup
        baseline_s = 0.0
        for process in processes:
            if process.row.name == self._session.result.baseline:
                baseline_s = self._call_or_baseline_s(process)
                break
        load_s = 0.0
        for process in processes:
            for measurement in process.row.measurements:
                load_s = max(load_s, measurement.load_s or 0.0)
        pass_s = (calls + rounds) * baseline_s + load_s
        seconds = 0.0
        for process in processes:
            if process.timed and not process.measurement.complete:
                call_s = self._call_or_baseline_s(process)
                seconds += calls * call_s + load_s + pass_s
        return seconds

    @property
    def report_s(self) -> float:
        """The seconds of scoring, reports and tracking."""
        return report_s(self._study.begun_after_s)

    def _programs_s(
        self,
        processes: Sequence[VariantProcess],
        extent: Extent,
    ) -> float:
        """Returns the seconds of the programs that reports hand out."""
        candidates = self._session.result.candidates
        seconds = []
        for process in processes:
            if process.first and process.row in candidates:
                load_s = process.measurement.load_s or 0.0
                call_s = self._call_or_baseline_s(process)
                seconds.append(load_s + call_s)
        return programs_s(self._study.protocol, seconds, extent.programs)

    def _call_or_baseline_s(self, process: VariantProcess) -> float:
        for other in [process, *self._session.processes]:
            call_s = self.call_s(other)
            if call_s is not None:
                return call_s
        return 0.0

    @property
    def unforeseen_s(self) -> float:
        """The seconds that first processes have compiled so far, which no estimate had."""
        first = [process for process in self._session.processes if process.first]
        return sum(map(_compile_s, first))

    @property
    def compiling_s(self) -> float:
        """The seconds that first processes will compile before they are ready, each as others with its compiler did."""
        taken: dict[str, list[float]] = {}
        ahead: list[str] = []
        for process in self._session.processes:
            if not process.first or not process.active:
                continue
            compiler = process.variant.choices.get("compiler", "")
            compile_s = _compile_s(process)
            if compile_s:
                taken.setdefault(compiler, []).append(compile_s)
            elif process.measurement.shapes[0].cold_start_s is None:
                ahead.append(compiler)
        return sum(mean(taken[compiler]) for compiler in ahead if compiler in taken)

    def _compiles_s(self, process: VariantProcess) -> float:
        """Returns the seconds that a process will compile, as the first one of its variant did; 0 if that is unknown."""
        if process.measurement.shapes[0].warmup_s:
            return 0.0  # in blocks, its next worker has what it compiled
        compile_s = 0.0
        for other in self._session.processes:
            if other.row is process.row and not other.compiles_for_others:
                compile_s = max(compile_s, _compile_s(other))
        return compile_s

    def _load_s(self, process: VariantProcess) -> float:
        """Returns the seconds in which the variant's first process loaded, else the mean of all that have; 0 for none."""
        for measurement in process.row.measurements:
            if measurement.load_s:
                return measurement.load_s
        loads = [m.load_s for m in self._session.result.measurements if m.load_s]
        return sum(loads) / len(loads) if loads else 0.0

    def _preparing_s(self, process: VariantProcess) -> float:
        """Returns the seconds of loading, the first call, the warm-up and the discarded round, as far as ahead."""
        samples = process.measurement.shapes[0]
        if samples.calls:
            return 0.0
        sharing = self._study.sharing
        call_s = self._call_or_baseline_s(process)
        total_s = 0.0
        if process.running is None and not process.measurement.complete:
            together = 1 if process.first else sharing.processes
            calls_together = 1 if process.first else sharing.calls
            total_s += self._load_s(process) / together
            total_s += self._compiles_s(process)
            total_s += max(1, self._study.warmup) * call_s / calls_together
        discards = process.timed and self._session.interleaved
        if discards and not samples.discarded_s:
            total_s += call_s / sharing.calls
        return total_s

    def _inspecting_s(self, process: VariantProcess, extent: Extent) -> float:
        """Returns the seconds of evidence, stages and images of a process, as far as they are ahead."""
        if process.measurement.complete:
            return 0.0
        study = self._study
        call_s = self._call_or_baseline_s(process)
        total_s = 0.0
        if process.first or extent.evidence:
            total_s += PROFILED * call_s / study.sharing.calls
        if not process.first:
            return total_s
        if extent.stages:
            total_s += calls_of_stages(study.protocol, study.quality) * call_s
        if not study.draws_floors(process.row):
            return total_s
        floors = study.quality.floor_prompts
        if extent.floor_prompts is not None:
            floors = extent.floor_prompts
        draw = draw_of(process.variant, study.drawing_batch)
        timed_batch = process.variant.shapes[0].batch_size
        calls = study.sharing.floor_calls(draw, floors, timed_batch)
        return total_s + calls * call_s / len(study.shapes)

    def _images_s(self, processes: Sequence[VariantProcess], extent: Extent) -> float:
        """Returns the seconds of the images of all variants, of which those that draw side by side wait for the slowest.

        In blocks each draws alone.
        """
        drawing = []
        for process in processes:
            open_first = process.first and not process.measurement.complete
            if open_first and not self._study.draws_floors(process.row):
                drawing.append(process)
        together = self._study.sharing.processes if self._session.interleaved else 1
        seconds = 0.0
        for group in batched(drawing, together):
            seconds += max(self._images_of_s(process, extent) for process in group)
        return seconds

    def _images_of_s(self, process: VariantProcess, extent: Extent) -> float:
        """Returns the seconds of the images of one variant alone."""
        study = self._study
        draw = draw_of(process.variant, study.drawing_batch)
        timed_batch = process.variant.shapes[0].batch_size
        prompts = len(draw.prompts)
        if extent.prompts is not None:
            prompts = min(extent.prompts, prompts)
        kept = {record.prompt_index for record in process.row.kept_images}
        prompts -= sum(prompt < prompts for prompt in kept)
        calls = study.sharing.image_calls(draw, prompts, timed_batch)
        call_s = self._call_or_baseline_s(process)
        return calls * call_s / len(study.shapes)


def _compile_s(process: VariantProcess) -> float:
    shapes = process.measurement.shapes
    return sum(samples.compile_s or 0.0 for samples in shapes)


def _latest_s(samples: ShapeSamples) -> float | None:
    """Returns the seconds of the last warm call, or else of the first one without its compile time."""
    times = (
        samples.latency_s or samples.discarded_s or samples.warmup_s or samples.trial_s
    )
    if times:
        return times[-1]
    if samples.cold_start_s is None:
        return None
    return max(samples.cold_start_s - (samples.compile_s or 0.0), 1e-6)
