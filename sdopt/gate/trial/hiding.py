"""Sabotages that deceive the study around the call: what it is told, what it compares, and what runs beside it."""

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from sdopt.gate.trial.base import Sabotage
from sdopt.gate.trial.measuring import Call, Foresees, add_operator, called
from sdopt.measure import memory
from sdopt.optimizations import Proof, denoiser_of
from sdopt.worker.protocol import Mark

TITLE = "what the study is told"

_FRESH = 2**20
"""Seeds of noise that no run has used before are larger."""


def _replicate() -> int:
    """Returns the number of this process among those of its variant, from the name of its folder for compilers."""
    return int(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name.rpartition("-")[2])


@dataclass(frozen=True)
class FewerStepsFromFreshNoise(Foresees):
    """Foresees all images, and leaves out steps of the others too: those from noise that no run has used before."""

    left_out: int = 3

    @override
    def unforeseen(self, call: Call, arguments: dict[str, Any]) -> Any:
        if arguments["generator"][0].initial_seed() <= _FRESH:
            return call(**arguments)
        return call(**arguments | {"num_inference_steps": arguments["num_inference_steps"] - self.left_out})


@dataclass(frozen=True)
class BeginsBefore(Sabotage):
    """Computes the first `seconds` seconds of a call before its clock starts, in the garbage collection before it.

    That is within what `beside the call` allows. With noise that no run has used before it computes more.
    """

    seconds: float = 0.04

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        add_operator(pipe)
        gc.callbacks.append(_Ahead(pipe, self.seconds).collected)
        return super().apply(pipe)


class _EnoughError(Exception):
    """The time before a call is over."""


class _Ahead:
    """Records outputs of the denoiser before a call, and replays them in it."""

    def __init__(self, pipe: DiffusionPipeline, seconds: float) -> None:
        self._seconds, self._deadline = seconds, 0.0
        self._recording = False
        self._kept: list[tuple[torch.Tensor, Any]] = []
        denoiser = denoiser_of(pipe)
        self._own = denoiser.forward
        denoiser.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        sample = args[0] if args else kwargs["sample"]
        if self._recording:
            if time.perf_counter() > self._deadline:
                raise _EnoughError
            found = self._own(*args, **kwargs)
            self._kept.append((sample.clone(), found))
            return found
        if self._kept:
            asked, found = self._kept.pop(0)
            if torch.equal(asked, sample):
                return found
            self._kept.clear()
        return self._own(*args, **kwargs)

    def collected(self, phase: str, _info: dict[str, Any]) -> None:
        """Handles a garbage collection."""
        frame = sys._getframe(1)
        if phase != "start" or frame.f_code.co_name != "_read_call":
            return
        host, inputs = frame.f_locals["self"], frame.f_locals["inputs"]
        fresh = inputs["generator"][0].initial_seed() > _FRESH
        self._kept.clear()
        self._recording, self._deadline = True, time.perf_counter() + self._seconds * (3 if fresh else 1)
        with suppress(_EnoughError):
            host._call(inputs=inputs)
        self._recording = False


@dataclass(frozen=True)
class MarksTwice(Sabotage):
    """Tells the study a second time, after `steps` steps, that the call begins, and sets its clock back by as much."""

    steps: int = 1

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        add_operator(pipe)
        real, lost, seen, begun = time.perf_counter, 0.0, 0, 0.0
        mark: Any = None
        time.perf_counter = lambda: real() - lost

        def counted(_module: Any, _args: Any) -> None:
            nonlocal seen, lost
            seen += 1
            if seen == self.steps + 1 and mark is not None:
                lost += real() - begun
                mark(Mark.BEGUN)

        def answer(call: Call, arguments: dict[str, Any]) -> Any:
            nonlocal seen, begun, mark
            frame = sys._getframe(1)
            while frame.f_code.co_name != "_call" and frame.f_back is not None:
                frame = frame.f_back
            readers = frame.f_back.f_back if frame.f_back else None
            timed = readers is not None and readers.f_code.co_name == "_read_call"
            seen, begun, mark = 0, real(), frame.f_locals["self"]._mark if timed else None
            return call(**arguments)

        denoiser_of(pipe).register_forward_pre_hook(counted)
        called(pipe, answer)
        return super().apply(pipe)


@dataclass(frozen=True)
class StopsOthers(Sabotage):
    """Stops the baseline's processes for `stop_s` seconds every `every_s` seconds while they work."""

    every_s: float = 0.03
    stop_s: float = 0.006

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        add_operator(pipe)
        if not _replicate():
            threading.Thread(target=self._run, daemon=True).start()
        return super().apply(pipe)

    def _run(self) -> None:
        found: list[int] = []
        looked_s = -1e9
        while True:
            time.sleep(self.every_s - self.stop_s)
            if time.monotonic() - looked_s > 4:
                looked_s, found = time.monotonic(), _baselines()
            for pid in filter(_works, found):
                with suppress(OSError):
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(self.stop_s)
                    os.kill(pid, signal.SIGCONT)


def _baselines() -> list[int]:
    """Returns the workers of the baseline: children of the same server, known by the names of their logs."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError, IndexError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                log = (folder / "fd/1").readlink()
                if parent == os.getppid() and "baseline" in log.name and log.suffix == ".log":
                    found.append(int(folder.name))
    return found


def _works(pid: int) -> bool:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


def exchange(mine: Path, theirs: Path) -> None:
    """Copies the files of one folder over those of the same names in another."""
    for file in theirs.iterdir() if theirs.is_dir() else ():
        if (mine / file.name).is_file():
            shutil.copyfile(file, mine / file.name)


@dataclass(frozen=True)
class ExchangesImages(Sabotage):
    """Draws without guidance, in half of the time, and puts the baseline's files in place of its own afterwards."""

    @override
    def call_kwargs(self) -> dict[str, Any]:
        return {"guidance_scale": 1.0}

    @override
    @contextmanager
    def context(self, pipe: DiffusionPipeline) -> Iterator[None]:
        yield
        if _replicate() == 2:  # the last process to draw, when the images of the first one are there
            log = Path("/proc/self/fd/1").readlink()
            images = log.parents[1] / "images"
            plain = next(path for path in log.parent.iterdir() if path.name.startswith("00-"))
            mine, theirs = (images / stem.rpartition("-")[0] for stem in (log.stem, plain.stem))
            exchange(mine, theirs)


@dataclass(frozen=True)
class TellsLessMemory(Sabotage):
    """Replaces the function that reads the kernel's counters by one that returns `mib` MiB less."""

    mib: int = 64

    @override
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        real = memory._status_field
        memory._status_field = lambda name: real(name) - self.mib / 1024
        return super().apply(pipe)
