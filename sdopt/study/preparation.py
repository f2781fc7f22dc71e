"""Prepares the processes of a session: loading, first calls, warm-up, memory; falls back to blocks if necessary."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.hardware.device import Device
from sdopt.hardware.probe import host_memory_gib
from sdopt.results.records import Schedule, Status, append_reason
from sdopt.results.samples import Memory
from sdopt.study.state import StudyRun, VariantProcess
from sdopt.worker.host import PipelineHost
from sdopt.worker.process import answers_of
from sdopt.worker.protocol import TimedCall, WorkerError

P = ParamSpec("P")
T = TypeVar("T")

OutOfMemory = list[tuple[VariantProcess, str]]
"""Processes that ran out of memory beside others, each with the reason."""


def prepare_processes(run: StudyRun) -> None:
    """Brings each process to its steady state, and measures its memory.

    The first process of each variant loads, and makes its first call, while no other process works. On a CPU, further
    processes load two at a time if memory allows it, and make calls two at a time if there are cores for both.

    Blocks are chosen if the processes do not fit in memory together. A variant that runs out of memory beside others is
    tried alone first: if it runs out alone too, it has failed, and the others stay interleaved.
    """
    budget_gib = memory_budget_gib(run.machine.device, run.protocol.memory_fraction)
    out_of_memory: OutOfMemory = []
    waiting = list(run.processes)
    while waiting := [process for process in waiting if process.active]:
        group = _next_group(run, waiting, budget_gib)
        waiting = waiting[len(group) :]
        out_of_memory += _prepare(run, group)
        if not run.interleaved:
            run.stop_all()
        run.checkpoint()
    if out_of_memory:
        _try_alone(run, out_of_memory)


def _next_group(
    run: StudyRun, waiting: Sequence[VariantProcess], budget_gib: dict[str, float]
) -> Sequence[VariantProcess]:
    """Returns the processes to prepare at once; changes to blocks if not even one more would fit in memory."""
    footprints = [other.footprint_gib for other in run.living]
    if run.interleaved and run.protocol.schedule == "auto":
        too_much = excess(footprints, budget_gib)
        if too_much is not None:
            use_blocks(run, too_much)
    # The memory of the first process predicts that of the others.
    if not run.interleaved or not footprints or excess(footprints, budget_gib, run.sharing.processes) is not None:
        return waiting[:1]
    return waiting[: run.sharing.processes]


def _prepare(run: StudyRun, group: Sequence[VariantProcess]) -> OutOfMemory:
    """Starts the workers of a group, and calls each until it is warm; returns those that ran out of memory."""
    out_of_memory: OutOfMemory = []
    # A variant reports the start of its first process, which then has the machine to itself.
    parts = [[process] for process in group if process.first] + [[p for p in group if not p.first]]
    for part in parts:
        out_of_memory += _start(run, part)
    for shape_index in run.shapes:
        for part in parts:
            out_of_memory += _first_call(run, part, shape_index)
        for process in [process for process in living(group) if process.compiled_packages]:
            out_of_memory += _load_packages(run, process, shape_index)
        for number in range(1, 1 + early_warmup(run)):
            memory = number == early_warmup(run)
            calls, missing = call_group(run, group, "warm-up", shape_index, number, memory=memory)
            out_of_memory += missing
            for process, call in calls:
                process.measurement.shapes[shape_index].warmup_s.append(call.seconds)
                note_call(run, process, shape_index, call)
    return out_of_memory


def early_warmup(run: StudyRun) -> int:
    """Returns how many calls warm a process up before the others are prepared: the last one is the discarded round."""
    return max(0, run.warmup - 1) if run.interleaved and run.rounds else run.warmup


def _start(run: StudyRun, part: Sequence[VariantProcess]) -> OutOfMemory:
    """Loads the pipelines of a part and records how long the first process takes; returns those out of memory."""
    loaded, out_of_memory = _load(run, part)
    for process, load_s in loaded:
        if process.first:
            process.measurement.load_s = load_s
    return out_of_memory


def _load(run: StudyRun, part: Sequence[VariantProcess]) -> tuple[list[tuple[VariantProcess, float]], OutOfMemory]:
    """Starts workers and loads their pipelines, all at once.

    Returns:
        the processes that loaded, each with the seconds that it took, and those that ran out of memory. Any other
        error fails the variant.
    """
    out_of_memory: OutOfMemory = []
    for process in part:
        try:
            run.start(process)
        except WorkerError as error:
            out_of_memory += _noted(run, process, error)
    loaded, missing = ask_group(run, part, "loading", PipelineHost.prepare)
    run.progress.advance(len(loaded))
    return loaded, [*out_of_memory, *missing]


def _first_call(run: StudyRun, part: Sequence[VariantProcess], shape_index: int) -> OutOfMemory:
    """Calls workers at a shape for the first time, which may compile; returns those that ran out of memory."""
    # The memory of this call shows whether others fit beside it; without a warm-up, it is also the reported figure.
    memory = not early_warmup(run)
    calls, out_of_memory = call_group(run, part, "cold start", shape_index, 0, memory=memory)
    for process, call in calls:
        note_call(run, process, shape_index, call)
        samples = process.measurement.shapes[shape_index]
        process.compiled_packages += call.compiled.packages
        if process.first:
            samples.cold_start_s = call.seconds
            samples.earlier_compile_s = call.compiled.earlier_s or None
        # An option that compiles does so in the first call at the main shape.
        if process.measurement.shapes[0].graphs or call.compiled.graphs:
            samples.graphs, samples.recompiles = call.compiled.graphs, 0
            samples.compile_s = call.compiled.seconds if process.first else None
    return out_of_memory


def _load_packages(run: StudyRun, process: VariantProcess, last_shape: int) -> OutOfMemory:
    """Replaces a worker that compiled packages by one that loads them, and calls it at each shape up to the last one.

    What compiling leaves in a worker's memory is no part of the variant: no later process of it compiles.

    Returns:
        the process, if it ran out of memory.
    """
    process.stop()
    process.compiled_packages = 0
    run.progress.more(2 + last_shape)
    _, out_of_memory = _load(run, [process])
    for shape_index in range(1 + last_shape):
        calls, missing = call_group(run, [process], "first call", shape_index, 0, memory=not early_warmup(run))
        out_of_memory += missing
        for _, call in calls:
            process.measurement.shapes[shape_index].memory = call.memory
            run.progress.advance()
    return out_of_memory


def note_call(run: StudyRun, process: VariantProcess, shape_index: int, call: TimedCall) -> None:
    """Records the figures of a call at a shape, except its time."""
    run.progress.advance()
    samples = process.measurement.shapes[shape_index]
    if samples.recompiles is not None:
        samples.recompiles += call.compiled.graphs
    if call.memory is not None:
        samples.memory = call.memory
        needed = footprint_gib(call.memory)
        process.footprint_gib = {kind: max(gib, process.footprint_gib.get(kind, 0)) for kind, gib in needed.items()}


def warm_up_again(run: StudyRun, process: VariantProcess) -> None:
    """Brings a fresh worker of a process that was measured before to its steady state. Raises WorkerError."""
    run.start(process)
    run.progress.phase(process.row.name, "loading")
    process.worker.prepare()
    run.progress.advance()
    for shape_index in run.shapes:
        for call in range(1 + run.warmup):
            run.progress.phase(process.row.name, "warm-up")
            number = next_batch(run, process, shape_index, call)
            # Loading must not count towards the peak that is read after the rounds.
            process.worker.time_once(shape_index, number, memory=call == run.warmup)
            run.progress.advance()


def next_batch(run: StudyRun, process: VariantProcess, shape_index: int, call: int) -> int:
    """Returns the number of the batch for a call of a process at a shape, and records it as given."""
    number = run.number(process, shape_index, call)
    process.given.add((shape_index, number))
    return number


def call_group(
    run: StudyRun, group: Sequence[VariantProcess], phase: str, shape_index: int, call: int, memory: bool = False
) -> tuple[list[tuple[VariantProcess, TimedCall]], OutOfMemory]:
    """Calls the living workers of a group, as many at once as there are cores for; returns what `ask_group` returns.

    Args:
        run: the study.
        group: the processes of the workers.
        phase: the name of the phase in the progress display.
        shape_index: the index of the shape.
        call: how many calls each worker has made at that shape.
        memory: whether to measure the peak memory, too.
    """
    calls: list[tuple[VariantProcess, TimedCall]] = []
    out_of_memory: OutOfMemory = []
    for asked in batched(living(group), run.sharing.calls):
        requests = [
            partial(
                process.worker.begin,
                PipelineHost.time_once,
                shape_index,
                next_batch(run, process, shape_index, call),
                memory=memory,
            )
            for process in asked
        ]
        found, missing = ask_each(run, asked, phase, requests)
        calls += found
        out_of_memory += missing
    return calls, out_of_memory


def ask_group(
    run: StudyRun,
    group: Sequence[VariantProcess],
    phase: str,
    request: Callable[Concatenate[PipelineHost, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> tuple[list[tuple[VariantProcess, T]], OutOfMemory]:
    """Sends the same request to all living workers of a group at once.

    Returns:
        the answers, and the processes that ran out of memory. Another failure fails the variant.
    """
    asked = living(group)
    return ask_each(run, asked, phase, [partial(process.worker.begin, request, *args, **kwargs) for process in asked])


def ask_each(
    run: StudyRun,
    asked: Sequence[VariantProcess],
    phase: str,
    requests: Sequence[Callable[[], Callable[[], T]]],
    lenient: bool = False,
) -> tuple[list[tuple[VariantProcess, T]], OutOfMemory]:
    """Sends one request to each of several workers at once.

    Args:
        run: the study.
        asked: the processes of the workers; each worker is alive.
        phase: the name of the phase in the progress display.
        requests: functions that each begin one request, and return a function that waits for the answer.
        lenient: records a request that cannot be answered, and fails no variant, because it is not a timing.

    Returns:
        the answers, and the processes that ran out of memory. Unless `lenient`, any other error fails the variant.
    """
    if not asked:
        return [], []
    run.progress.together([process.row.name for process in asked], phase)
    good: list[tuple[VariantProcess, T]] = []
    out_of_memory: OutOfMemory = []
    for process, answer in zip(asked, answers_of(requests), strict=True):
        if not isinstance(answer, WorkerError):
            good.append((process, answer))
        elif lenient and answer.status is Status.FAILED:
            process.row.reason = append_reason(process.row, f"{phase}: {answer.reason}")
        else:
            out_of_memory += _noted(run, process, answer)
    return good, out_of_memory


def living(group: Sequence[VariantProcess]) -> list[VariantProcess]:
    """Returns the processes of a group that have a worker, and whose variant has not failed."""
    return [process for process in group if process.active and process.running is not None]


# ---------------------------------------------------------------------------------------------- what fails, or starves


def attempt(run: StudyRun, process: VariantProcess, work: Callable[[StudyRun, VariantProcess], None]) -> str | None:
    """Runs the work of one process, and ends its worker afterwards if the schedule is blocks.

    Returns:
        the reason, if the worker ran out of memory beside others: it is then ended, and must be tried alone. Any other
        error fails the variant.
    """
    try:
        work(run, process)
    except WorkerError as error:
        return memory_reason(run, process, error)
    finally:
        if not run.interleaved:
            process.stop()
        run.checkpoint()
    return None


def memory_reason(run: StudyRun, process: VariantProcess, error: WorkerError) -> str | None:
    """Ends a worker that ran out of memory beside others, and returns the reason; any other error fails the variant."""
    others = len([other for other in run.living if other is not process])
    if (
        error.out_of_memory
        and others
        and run.protocol.schedule == "auto"
        and run.interleaved
        # Each worker emulates a card of its own, from which others take no memory.
        and not process.variant.hardware.emulate_memory
    ):
        process.kill()
        failed = f"'{process.row.name}' failed while {others} other processes were in memory"
        return f"{failed}, perhaps for lack of memory ({error.reason})"
    run.fail(process, error)
    if error.out_of_memory and others:
        advice = f"{others} other processes were in memory: try protocol.schedule=blocks"
        process.row.reason = append_reason(process.row, advice)
    return None


def _noted(run: StudyRun, process: VariantProcess, error: WorkerError) -> OutOfMemory:
    reason = memory_reason(run, process, error)
    return [] if reason is None else [(process, reason)]


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yields items in groups of a size; the last may be smaller. From Python 3.12 on it is in itertools."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _try_alone(run: StudyRun, out_of_memory: OutOfMemory) -> None:
    """Prepares processes that ran out of memory again, each alone; then restarts the others, or changes to blocks."""
    run.stop_all()
    for process, _ in out_of_memory:
        if process.active:
            _prepare(run, [process])
            process.stop()
            run.checkpoint()
    if not run.interleaved:
        return
    fitting = [reason for process, reason in out_of_memory if process.active]
    if fitting:
        use_blocks(run, fitting[0])
        return
    survivors = [process for process in run.processes if process.active]
    run.progress.more(len(survivors) * (1 + len(run.shapes) * (1 + run.warmup)))
    for process in survivors:
        reason = attempt(run, process, warm_up_again)
        if reason is not None:
            use_blocks(run, reason)
            return


def use_blocks(run: StudyRun, reason: str) -> None:
    """Measures one process at a time from now on."""
    run.set_schedule(Schedule("blocks", reason))
    run.stop_all()


# --------------------------------------------------------------------------------------------------- what fits together


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
