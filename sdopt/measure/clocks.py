"""Clocks that time the stages of one call of the pipeline."""

import time
from typing import Any

import torch


class WallClock:
    """Times stages that run one after the other on the CPU."""

    def __init__(self) -> None:
        self._start = 0.0
        self._spans: dict[str, list[float]] = {}

    def enter(self, stage: str) -> None:
        """Starts the time of a stage."""
        self._start = time.perf_counter()

    def leave(self, stage: str, _output: Any) -> None:
        """Ends the time of the stage that was entered last."""
        self._spans.setdefault(stage, []).append(time.perf_counter() - self._start)

    def seconds(self) -> dict[str, list[float]]:
        """Returns the seconds of each stage, a value per entry of the stage."""
        return self._spans


class EventClock:
    """Times stages between CUDA events; read after a synchronise."""

    def __init__(self) -> None:
        self._opened: torch.cuda.Event | None = None
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(self, stage: str) -> None:
        """Starts the time of a stage."""
        self._opened = self._mark()

    def leave(self, stage: str, _output: Any) -> None:
        """Ends the time of the stage that was entered last."""
        self._spans.setdefault(stage, []).append((self._opened, self._mark()))

    def seconds(self) -> dict[str, list[float]]:
        """Returns the seconds of each stage, a value per entry of the stage."""
        return {stage: [start.elapsed_time(end) / 1000 for start, end in spans] for stage, spans in self._spans.items()}
