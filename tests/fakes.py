"""Workers that load and call nothing: a study's orchestration in milliseconds.

A `FakeWorker` answers every request of a `PipelineHost` with figures of the right form. What goes wrong in it, a test
says with a fault: a function that is given the worker and the name of the request, and may raise a WorkerError.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import initialize_config_dir
from PIL import Image
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import save_file
from typing_extensions import override

from sdopt.config.composer import HydraComposer
from sdopt.config.paths import CONF
from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.hardware.probe import probe_device
from sdopt.programs.code import Unwritable
from sdopt.programs.writer import SAVING, written
from sdopt.record.configuration import RecordedConfig
from sdopt.record.programs import Program
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import Evidence, Memory
from sdopt.record.scores import ImageRecord
from sdopt.schema import Edge
from sdopt.study.designs import Plan
from sdopt.study.plan import plan_result
from sdopt.study.progress import Progress
from sdopt.study.run import run_study
from sdopt.study.timeline import Timeline
from sdopt.variant import Variant
from sdopt.worker.draws import Draw, latents_file, timed_draw
from sdopt.worker.host import describe_error
from sdopt.worker.machine import Machine
from sdopt.worker.process import Worker
from sdopt.worker.protocol import (
    Asked,
    Batch,
    Rendered,
    SampledImage,
    StagedCall,
    TimedCall,
    TracedCall,
    WorkerError,
)
from tests.command import SMOKE

Fault = Callable[["FakeWorker", str], None]


class FakeWorker(Worker):
    """A worker of `Fakes`."""

    def __init__(
        self,
        fakes: "Fakes",
        variant: Variant,
        log: Path,
        called: Callable[[float], None],
    ) -> None:
        self.variant, self.log, self.fakes, self._called = variant, log, fakes, called
        log.touch()
        self.requests: list[str] = []
        self.given: list[tuple[int, int]] = []
        """The shape and the number of the batch of each call."""
        self.graphs = self.packages = 0
        self.compile_s, self.earlier_s = 0.1, 0.0
        """What the next call compiles, in seconds for each graph, and what an earlier command did."""
        self.draw: Draw | None = None
        """That of the images it was last asked for."""
        self._alive = True

    @property
    @override
    def pid(self) -> int:
        return os.getpid()

    @property
    @override
    def alive(self) -> bool:
        return self._alive

    @property
    def beside(self) -> int:
        """How many others are alive."""
        return sum(other.alive for other in self.fakes.started) - 1

    @override
    def begin(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.__name__
        self.requests.append(name)
        self.draw = args[1] if name == "generate" else None

        def answer() -> Any:
            try:
                if fault := self.fakes.faults.get(self.variant.name):
                    fault(self, name)
            except WorkerError as error:
                self._alive = error.status not in (Status.KILLED, Status.TIMEOUT)
                raise
            try:
                return getattr(self, f"_{name}")(*args, **kwargs)
            except (OSError, SafetensorError) as error:  # the disk is full
                raise describe_error(error) from error

        return answer

    @override
    def stop(self) -> None:
        self._alive = False

    @override
    def kill(self) -> None:
        self._alive = False

    def _hello(self) -> None:
        pass

    def _prepare(self) -> float:
        return 0.5

    def _time_once(
        self,
        shape_index: int = 0,
        number: int = 0,
        memory: bool = False,
        every_image: bool = False,
    ) -> TimedCall:
        self.given.append((shape_index, number))
        self.fakes.called.append(self.log.stem)
        graphs, packages, earlier_s = self.graphs, self.packages, self.earlier_s
        self.graphs, self.packages, self.earlier_s = 0, 0, 0.0
        seconds = self.fakes.seconds.get(self.variant.name, 0.1) * float(
            self.fakes.random.lognormal(0, 0.01)
        )
        self._called(seconds)
        draw = timed_draw(self.variant, shape_index)
        image = SampledImage(
            number * draw.batch_size % len(draw.prompts),
            0,
            self._pixels(draw),
            self._finite,
        )
        every = (
            (
                replace(
                    image, latents=np.full((1, 2, 2), image.prompt_index, np.float32)
                ),
            )
            if every_image
            else ()
        )
        return TimedCall(
            seconds,
            None,
            0.3,
            self.compile_s * graphs,
            graphs,
            packages,
            earlier_s,
            self._memory_so_far() if memory else None,
            image,
            every,
        )

    def _memory_so_far(self) -> Memory:
        return Memory(0.2, 0.3)

    def _measure_energy(self, seconds: float) -> float:
        return seconds

    def _prove(self, shape_index: int = 0) -> TracedCall:
        evidence = [
            Evidence(axis, option, True, "seen")
            for axis, option in self.variant.choices.items()
        ]
        counts = {
            "operators": 1.0,
            f"option {sorted(self.variant.choices.items())}": 1.0,
        }
        return TracedCall(evidence, None, counts, [])

    def _time_stages(self) -> StagedCall:
        draw = timed_draw(self.variant)
        return StagedCall(
            {"denoiser_step": [0.05]},
            SampledImage(0, 0, self._pixels(draw), self._finite),
            {},
        )

    def _count_operations(self) -> float:
        return 0.001

    def _render(
        self, asked: Sequence[Asked], batch_size: int, changes: Mapping[str, Any]
    ) -> Rendered:
        """Draws squares whose grey is that of their seed."""
        time.sleep(self.fakes.render_s)
        self.fakes.rendered.append(
            ([image.seed for image in asked], batch_size, dict(changes))
        )
        size = self.variant.size
        pixels = np.stack(
            [np.full((size, size, 3), image.seed % 256, np.uint8) for image in asked]
        )
        return Rendered(
            pixels,
            [image.prompt != "not finite" for image in asked],
            self.fakes.render_s,
            0,
            0.3,
            ["prompt: cut" if "cut" in image.prompt else "" for image in asked],
        )

    def _generate(self, batch: int, draw: Draw, folder: Path) -> Batch:
        folder.mkdir(parents=True, exist_ok=True)
        start = batch * draw.batch_size
        records = []
        for index in draw.positions[start : start + draw.batch_size]:
            file = folder / f"{index}.png"
            Image.fromarray(self._pixels(draw)).save(file)
            latents = np.full((1, 2, 2), index, np.float32)
            save_file({"latents": latents}, latents_file(file))
            records.append(
                ImageRecord(
                    draw.prompts[index], index, 0, draw.seed + index, f"{index}.png"
                )
            )
        return Batch(records, 0.1, 0.3)

    @property
    def _finite(self) -> bool:
        """Black images are those of numbers that are not finite."""
        return self.variant.name not in self.fakes.black

    def _pixels(self, draw: Draw) -> np.ndarray:
        shade = 0 if self.variant.name in self.fakes.black else 100
        return np.full((draw.size, draw.size, 3), shade, np.uint8)


@dataclass
class Fakes:
    """Starts fake workers, in the place of `WorkerProcess`."""

    faults: Mapping[str, Fault] = field(default_factory=dict)
    """By variant."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of a call, by variant; others take 0.1 s."""
    black: Collection[str] = ()
    """The variants whose images are black; those of others are gray."""
    started: list[FakeWorker] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    """The log of the worker of each call that was to be timed, in their order."""
    timeout_s: float | None = None
    """The limit of each answer that the command gave its workers."""
    render_s: float = 0.0
    """The time that a server's call takes."""
    rendered: list[tuple[list[int], int, dict[str, Any]]] = field(default_factory=list)
    """The seeds, the batch size and the changed arguments of each call of a server."""
    random: np.random.Generator = field(
        default_factory=lambda: np.random.default_rng(0)
    )

    def __call__(
        self,
        variant: Variant,
        log: Path,
        scratch: Path,
        called: Callable[[float], None],
        warn: Callable[[str], None],
    ) -> FakeWorker:
        self.started.append(FakeWorker(self, variant, log, called))
        return self.started[-1]


@contextmanager
def fake_workers(fakes: Fakes | None = None) -> Iterator[Fakes]:
    """Lets commands in this process measure with fake workers."""
    fakes = fakes or Fakes()

    def start(
        _context: object, _device: object, timeout_s: float, *of: Any, deadline: float
    ) -> FakeWorker:
        assert deadline > time.monotonic()
        fakes.timeout_s = timeout_s
        return fakes(*of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdopt.experiment.WorkerProcess", start)
        for module in ("rounds", "giving_up"):
            patch.setattr(f"sdopt.study.{module}.InterferenceMeter", NoMeter)
        patch.setattr("sdopt.programs.running.call_apart", _written_only)
        yield fakes


def _written_only(
    _context: object,
    _run: object,
    variant: Variant,
    _made: object,
    device: Device,
    *_of: Any,
    **_limit: Any,
) -> Program:
    """What running a program finds that draws what a fake worker drew: the program is written, and not run."""
    try:
        found = written(variant, device)
    except (Unwritable, UsageError) as error:
        return Program(reason=str(error))
    text = found.text + SAVING if found.public else ""
    return Program(
        text, found.lines, draws=True, error=0.0, limit=1e-6, levels=0, seconds=1.0
    )


def failing(
    status: Status, request: str = "prepare", *, call: int = 0, beside: bool = False
) -> Fault:
    """A fault in one kind of request.

    Args:
        status: what becomes of it.
        request: the request's name.
        call: its number in the worker, from 1; 0 is every one.
        beside: only while other workers live.
    """

    def fault(worker: FakeWorker, name: str) -> None:
        number = worker.requests.count(name)
        if name == request and call in (0, number) and (worker.beside or not beside):
            raise WorkerError(status, f"{status} in {name} {number}")

    return fault


@cache
def _baseline() -> Variant:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return HydraComposer([*SMOKE]).variant("baseline", plain=True)


@cache
def _planned(names: tuple[str, ...]) -> tuple[Plan, StudyResult, Machine]:
    machine = Machine(probe_device("cpu"), {"cores": 2}, preloaded=True, bad_fork=False)
    variants = (_baseline(), *(replace(_baseline(), name=name) for name in names))
    plan = Plan(variants, tuple(Edge(name, "baseline", name) for name in names))
    return (
        plan,
        plan_result(plan, "fake", "explicit", _baseline().config, machine, ["sdopt"]),
        machine,
    )


FakeStudy = tuple[Plan, StudyResult, Machine]


def fake_study(
    names: Collection[str] = ("it",),
    of: Mapping[str, Mapping[str, Any]] | None = None,
    **protocol: Any,
) -> FakeStudy:
    """A study that nothing of is measured: a baseline, and variants that are like it.

    Args:
        names: the variants.
        of: changed keys, by section of the configuration.
        protocol: changed keys of the protocol.
    """
    plan, result, machine = _planned(tuple(names))
    changes = {**(of or {}), "protocol": protocol}

    def changed(owner: Variant | RecordedConfig) -> dict[str, Any]:
        known = {
            section: keys
            for section, keys in changes.items()
            if hasattr(owner, section)
        }
        return {
            section: replace(getattr(owner, section), **keys)
            for section, keys in known.items()
        }

    config = replace(result.config, **changed(result.config))
    variants = tuple(
        replace(variant, config=config, **changed(variant)) for variant in plan.variants
    )
    result = replace(deepcopy(result), config=config)
    for row in result.variants:
        row.config = config
    for edge in result.comparisons:
        edge.shapes = [deepcopy(edge.shapes[0]) for _ in config.shapes]
    return replace(plan, variants=variants), result, machine


class NoMeter:
    """Counts nothing: the calls of fake workers take other times than they say."""

    off = ""

    def __init__(self, pid: int) -> None:
        del pid

    def stop(self, seconds: float) -> None:
        del seconds


def run_fake(
    folder: Path,
    study: tuple[Plan, StudyResult, Machine],
    fakes: Fakes | None = None,
    timeline: Timeline | None = None,
) -> tuple[StudyResult, Fakes]:
    """Measures what a study lacks with fake workers; `timeline` is that of the command."""
    (plan, result, machine), fakes, timeline = (
        study,
        fakes or Fakes(),
        timeline or Timeline(),
    )
    with (
        (folder / "shown.txt").open("a") as shown,
        Progress(Console(file=shown, width=200), timeline) as progress,
    ):
        run_study(plan, result, machine, fakes, folder, progress)
    return result, fakes
