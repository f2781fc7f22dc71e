"""Brings the processes of a session to their steady state: loading, first calls, warm-up, memory."""

from collections.abc import Sequence

from sdopt.hardware.device import Device
from sdopt.hardware.probe import host_memory_gib
from sdopt.study.budget import Spending
from sdopt.study.giving_up import GivingUp
from sdopt.study.session import Session, VariantProcess
from sdopt.worker.host import PipelineHost


class Warmup:
    """Prepares all processes of a session, and measures their memory; changes to blocks if they will not fit together.

    The first process of each variant loads, and makes its first call, while no other process works. On a CPU, further
    processes load two at a time if memory allows it, and make calls two at a time if there are cores for both.
    """

    def __init__(self, session: Session, spending: Spending) -> None:
        self._session, self._study = session, session.study
        self._giving_up, self._spending = GivingUp(session), spending

    def prepare(self) -> None:
        """Prepares the processes. Raises DoesNotFitError if some ran out of memory beside others."""
        self._spending.foretell()
        everyone = self._session.processes
        first = self._session.first_replicate
        self._prepare_all(
            [process for process in everyone if process.measurement.replicate == first],
            trials=True,
        )
        self._giving_up.settle()
        self._spending.choose_processes()
        self._prepare_all(
            [process for process in everyone if process.measurement.replicate != first]
        )
        self._session.require_fit()

    def _prepare_all(
        self,
        waiting: Sequence[VariantProcess],
        trials: bool = False,
    ) -> None:
        """Prepares some of the processes; with `trials`, finds out which of them are clearly slower."""
        budget_gib = memory_budget_gib(
            self._study.machine.device, self._study.protocol.memory_fraction
        )
        while waiting := [process for process in waiting if process.active]:
            group = self._next_group(waiting, budget_gib)
            waiting = waiting[len(group) :]
            self._prepare(group)
            for process in group if trials else ():
                self._giving_up.consider(process)
            if not self._session.interleaved:
                self._session.stop_all()
            self._study.checkpoint()
            self._spending.foretell()

    def _next_group(
        self,
        waiting: Sequence[VariantProcess],
        budget_gib: dict[str, float],
    ) -> Sequence[VariantProcess]:
        """Returns the processes to prepare at once; changes to blocks if not even one more would fit in memory."""
        session, together = self._session, self._study.sharing.processes
        footprints = [other.footprint_gib for other in session.with_worker]
        if session.interleaved and self._study.protocol.schedule == "auto":
            too_much = excess(footprints, budget_gib)
            if too_much is not None:
                session.use_blocks(too_much)
        # The memory of the first process predicts that of the others.
        if (
            not session.interleaved
            or not footprints
            or excess(footprints, budget_gib, together) is not None
        ):
            return waiting[:1]
        return waiting[:together]

    def _prepare(self, group: Sequence[VariantProcess]) -> None:
        """Starts the workers of a group, and calls each until it is warm."""
        # A variant reports the start of its first process, which then has the machine to itself.
        parts = [[process] for process in group if process.first] + [
            [p for p in group if not p.first]
        ]
        for part in parts:
            for process, load_s in self._load(part):
                if process.first:
                    process.measurement.load_s = load_s
        for shape_index in self._study.shapes:
            for part in parts:
                self._first_call(part, shape_index)
            for process in [
                process
                for process in group
                if process.takes_part and process.compiled_packages
            ]:
                self._load_packages(process, shape_index)
            for number in range(1, 1 + self._calls):
                memory = number == self._calls
                for process, call in self._session.call(
                    group, "warm-up", shape_index, number, memory=memory
                ):
                    process.measurement.shapes[shape_index].warmup_s.append(
                        call.seconds
                    )
                    self._session.note_call(process, shape_index, call)

    @property
    def _calls(self) -> int:
        """How many calls warm a process up before the others are prepared: the last one is the discarded round."""
        session = self._session
        return (
            max(0, self._study.warmup - 1)
            if session.interleaved and session.rounds
            else self._study.warmup
        )

    def _load(
        self, part: Sequence[VariantProcess]
    ) -> list[tuple[VariantProcess, float]]:
        """Starts workers and loads their pipelines, all at once; returns the seconds that each takes."""
        for process in part:
            if process.active:
                with self._session.noting_failure(process):
                    self._session.start(process)
        loaded = self._session.ask_each(
            part, "loading", lambda process: process.worker.begin(PipelineHost.prepare)
        )
        for process, _ in loaded:
            with self._session.noting_failure(process):
                self._session.require_same_files(process)
        self._study.progress.advance()
        return loaded

    def _first_call(self, part: Sequence[VariantProcess], shape_index: int) -> None:
        """Calls workers at a shape for the first time, which may compile."""
        # The memory of this call shows whether others fit beside it; without a warm-up, it is also the reported figure.
        for process, call in self._session.call(
            part, "cold start", shape_index, 0, memory=not self._calls
        ):
            self._session.note_call(process, shape_index, call)
            samples = process.measurement.shapes[shape_index]
            process.compiled_packages += call.packages
            process.compiles_for_others |= bool(call.packages)
            if process.first:
                samples.cold_start_s = call.seconds
                samples.earlier_compile_s = call.earlier_compile_s or None
            # An option that compiles does so in the first call at the first shape.
            if process.measurement.shapes[0].graphs or call.graphs:
                samples.graphs, samples.recompiles = call.graphs, 0
                samples.compile_s = call.compile_s if process.first else None

    def _load_packages(self, process: VariantProcess, last_shape: int) -> None:
        """Replaces a worker that compiled packages by one that loads them, and calls it at each shape up to the last.

        What compiling leaves in a worker's memory is no part of the variant: no later process of it compiles.
        """
        process.stop()
        process.compiled_packages = 0
        self._load([process])
        for shape_index in range(1 + last_shape):
            for _, call in self._session.call(
                [process], "first call", shape_index, 0, memory=not self._calls
            ):
                process.measurement.shapes[shape_index].memory = call.memory
                self._study.progress.advance()


def memory_budget_gib(device: Device, fraction: float) -> dict[str, float]:
    """Returns how many GiB all processes together may fill, for each memory that may run out."""
    free = {"host": device.memory_free_gib}
    if device.is_cuda:
        free = {"host": host_memory_gib()[1], "device": device.memory_free_gib}
    return {kind: gib * fraction for kind, gib in free.items()}


def excess(
    footprints_gib: Sequence[dict[str, float]],
    budget_gib: dict[str, float],
    more: int = 1,
) -> str | None:
    """Returns why no `more` processes as large as the largest would fit beside those that live; None if they would."""
    for kind, budget in budget_gib.items():
        needs = [footprint.get(kind, 0.0) for footprint in footprints_gib]
        if needs and sum(needs) + more * max(needs) > budget:
            return f"{len(needs) + more} processes of {max(needs):.2f} GiB exceed {budget:.2f} GiB of {kind} memory"
    return None
