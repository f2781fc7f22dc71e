"""The training loop of all stages: schedule, weight averaging, checkpoints, progress."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UnavailableError
from sdopt.training.checkpoints import Progress, load_checkpoint, save_checkpoint
from sdopt.training.config import TrainingConfig, TrainReferenceConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


LINE_SECONDS = 30.0
"""Seconds between progress lines if the output is not a terminal."""


@dataclass(frozen=True)
class Schedule:
    """The duration and the learning rate of a stage.

    The rate grows linearly for `warmup_steps` and then decays to zero with half a cosine of the *progress*: the share
    of `steps` done or, if `steps` is None, the share of `seconds` used. A time budget suits machines of unknown speed:
    the rate reaches zero exactly at the end of the budget.
    """

    learning_rate: float
    warmup_steps: int
    ema: float
    seconds: float
    steps: int | None = None

    def progress(self, step: int, seconds: float) -> float:
        """Returns the progress, from 0 to 1, before step `step` (counted from 0) with `seconds` used."""
        done = seconds / self.seconds if self.steps is None else step / self.steps
        return min(1.0, done)

    def rate(self, step: int, progress: float) -> float:
        """Returns the learning rate of step `step`."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Saving:
    """Where and how often a training is saved.

    Attributes:
        folder: the folder for `checkpoint/` and `log.jsonl`.
        resume: whether to continue from a checkpoint in `folder`, if there is one.
        checkpoint_seconds: time between checkpoints; the last step always writes one.
        export: called after a checkpoint.
        export_seconds: time between calls of `export`.
    """

    folder: Path
    resume: bool
    checkpoint_seconds: float
    export: Callable[[], None] | None = None
    export_seconds: float = math.inf


class DivergenceError(UnavailableError):
    """Raised if the loss of a training is not finite."""


def train(
    config: TrainReferenceConfig,
    options: TrainingConfig,
    network: nn.Module,
    average: nn.Module,
    loss: Callable[[int], Tensor],
    folder: Path,
    *,
    title: str,
    parts: int = 1,
    export: Callable[[], None] | None = None,
) -> Progress:
    """Calls `fit` with the schedule and the intervals of a stage's configuration.

    Args:
        config: the whole configuration.
        options: the stage's section of the configuration.
        network: trained in place.
        average: a copy of `network`; holds the averaged weights afterwards.
        loss: the loss function, as in `fit`.
        folder: the folder for the checkpoint and the log.
        title: the stage's name for the progress display.
        parts: number of trainings that share the stage's time.
        export: called every `export.every_minutes`.

    Raises:
        DivergenceError: the loss is not finite.
    """
    schedule = Schedule(
        options.learning_rate,
        options.warmup_steps,
        options.ema,
        seconds=60 * config.budget_minutes * options.share / parts,
        steps=options.steps,
    )
    minutes = config.export.every_minutes
    saving = Saving(
        folder,
        config.resume,
        checkpoint_seconds=60 * config.checkpoint_minutes,
        export=export,
        export_seconds=math.inf if minutes is None else 60 * minutes,
    )
    return fit(network, average, loss, schedule, saving, title)


def fit(
    network: nn.Module,
    average: nn.Module,
    loss: Callable[[int], Tensor],
    schedule: Schedule,
    saving: Saving,
    title: str,
) -> Progress:
    """Trains `network` in place with AdamW, and stores the moving average of its weights in `average`.

    Args:
        network: the network to train.
        average: a copy of `network`; holds the averaged weights afterwards.
        loss: the loss of step i, a scalar with a graph; all its randomness must come from `generator(seed, …, i)`.
        schedule: the duration and the learning rate.
        saving: where and how often to save.
        title: the stage's name for the progress display.

    Raises:
        DivergenceError: the loss is not finite.
    """
    import torch

    saving.folder.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(network.parameters(), schedule.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    checkpoint, log = saving.folder / "checkpoint", saving.folder / "log.jsonl"
    done = Progress()
    if saving.resume and checkpoint.exists():
        done = load_checkpoint(checkpoint, network, average, optimizer)
    else:
        log.unlink(missing_ok=True)
    average.requires_grad_(False)
    trained: list[Tensor] = list(network.parameters())
    averaged: list[Tensor] = list(average.parameters())
    started = time.monotonic() - done.seconds
    last_checkpoint = last_export = time.monotonic()
    network.train()
    with _display(title, schedule, done, log) as show:
        while (share := schedule.progress(done.steps, done.seconds)) < 1.0:
            rate = schedule.rate(done.steps, share)
            for group in optimizer.param_groups:
                group["lr"] = rate
            value = loss(done.steps)
            value.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # Early on, the average must forget the random initial weights faster than with `ema`.
            keep = min(schedule.ema, (1 + done.steps) / (10 + done.steps))
            torch._foreach_lerp_(averaged, trained, 1 - keep)
            number = value.item()
            if not math.isfinite(number):
                raise DivergenceError(f"{title}: the loss of step {done.steps} is {number}")
            done.loss = number if math.isnan(done.loss) else 0.98 * done.loss + 0.02 * number
            done.steps += 1
            done.seconds = time.monotonic() - started
            show(done, rate)
            now = time.monotonic()
            exporting = saving.export is not None and now - last_export > saving.export_seconds
            if exporting or now - last_checkpoint > saving.checkpoint_seconds:
                save_checkpoint(checkpoint, network, average, optimizer, done)
                last_checkpoint = now
            if exporting and saving.export is not None:
                saving.export()
                last_export = now
    save_checkpoint(checkpoint, network, average, optimizer, done)
    return done


@contextmanager
def _display(title: str, schedule: Schedule, start: Progress, log: Path) -> Iterator[Callable[[Progress, float], None]]:
    """Yields a function that shows progress, as a bar on a terminal or else as lines, and writes the log."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    first_steps, first_time = start.steps, time.monotonic()
    last = first_time
    console = Console(stderr=True)
    bar = Bar(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task(title, total=1.0, figures="")

    def show(done: Progress, rate: float) -> None:
        nonlocal last
        now = time.monotonic()
        share = schedule.progress(done.steps, done.seconds)
        speed = (done.steps - first_steps) / max(now - first_time, 1e-9)
        figures = f"step {done.steps}  loss {done.loss:.4f}  rate {rate:.2e}  {speed:.2f} steps/s"
        bar.update(task, completed=share, figures=figures)
        if now - last < LINE_SECONDS and share < 1.0:
            return
        last = now
        with log.open("a") as stream:
            entry = {"step": done.steps, "seconds": round(done.seconds, 1), "loss": done.loss, "rate": rate}
            stream.write(json.dumps(entry) + "\n")
        if not console.is_terminal:
            left = (1 - share) / max(share, 1e-9) * done.seconds
            print(f"{title}: {share:4.0%}  {figures}  {left / 60:.0f} min left", file=sys.stderr, flush=True)

    with bar:
        yield show
