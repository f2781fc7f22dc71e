"""The loop that every stage of the training shares: schedule, average, checkpoints, progress."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.training.config import Device, Precision, TrainingConfig, TrainReferenceConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


LINE_SECONDS = 30.0
"""Between two printed lines where there is no terminal to redraw."""


@dataclass(frozen=True)
class Schedule:
    """How long a stage trains and how its learning rate moves.

    The rate grows linearly for `warmup_steps` and then follows half a cosine to zero along the *progress*: the share
    of `steps` done or, where `steps` is None, the share of `seconds` used. Time is the better yardstick on a machine
    whose speed is not known beforehand: the rate reaches zero just as the budget runs out.
    """

    learning_rate: float
    warmup_steps: int
    ema: float
    seconds: float
    steps: int | None = None

    def progress(self, step: int, seconds: float) -> float:
        """Share done, from 0 to 1, before step `step` (counted from 0) with `seconds` used."""
        done = seconds / self.seconds if self.steps is None else step / self.steps
        return min(1.0, done)

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of step `step`."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class Progress:
    """Where a stage stands.

    Attributes:
        steps: done so far, over all runs.
        seconds: used so far, over all runs.
        loss: exponential average of the loss.
    """

    steps: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


def pick_device(device: Device) -> torch.device:
    """The torch device to train on.

    Raises:
        UsageError: CUDA is asked for and missing.
    """
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise UsageError("device=cuda: no CUDA device is available; choices here: auto, cpu")
    use_cuda = device is Device.cuda or (device is Device.auto and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def pick_precision(precision: Precision, device: torch.device) -> Precision:
    """Resolve `auto`: bf16 where the hardware multiplies it natively, else fp32."""
    import torch

    if precision is not Precision.auto:
        return precision
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return Precision.bf16 if native else Precision.fp32


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which matrix products and convolutions run in the chosen precision."""
    import torch

    if pick_precision(precision, device) is Precision.fp32:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def describe_hardware(device: torch.device, precision: Precision) -> str:
    """The machine in words, for the card."""
    import torch

    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        # Linux leaves `platform.processor()` empty or generic.
        listing = Path("/proc/cpuinfo")
        model = re.search(r"model name\s*:\s*(.+)", listing.read_text()) if listing.exists() else None
        machine = f"{torch.get_num_threads()} cores of {model[1] if model else platform.processor()}"
    return f"{machine}, {pick_precision(precision, device).value}, torch {torch.__version__.partition('+')[0]}"


def read_figures(folder: Path) -> dict[str, Any]:
    """What a stage has to say for itself: its `figures.json`, and where its checkpoint stands.

    Raises:
        UsageError: the stage has not run.
    """
    files = (folder / "figures.json", folder / "checkpoint" / "state.json")
    for file in files:
        if not file.exists():
            raise missing_stage(folder.name, file)
    return {key: value for file in files for key, value in json.loads(file.read_text()).items()}


def missing_stage(stage: str, file: Path) -> UsageError:
    """The error for a file that an earlier stage should have written."""
    return UsageError(f"{file} is missing: run `sdopt train-reference stage={stage}` first")


def generator(seed: int, *path: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A random stream that depends on `seed` and `path` only (stage, step), so that a resumed run repeats it."""
    import numpy as np
    import torch

    words = np.random.SeedSequence([seed, *path]).generate_state(2)
    return torch.Generator(device).manual_seed((int(words[0]) << 31) ^ int(words[1]))


def train(
    config: TrainReferenceConfig,
    options: TrainingConfig,
    network: nn.Module,
    loss: Callable[[int], Tensor],
    folder: Path,
    *,
    title: str,
    average: nn.Module,
    parts: int = 1,
    export: Callable[[], None] | None = None,
) -> Progress:
    """`fit` as a stage's configuration has it.

    Args:
        config: the whole configuration.
        options: the stage's part of it.
        network: as in `fit`, like `loss`, `folder`, `title` and `average`.
        parts: how many trainings share the stage's time.
        export: called every `export.every_minutes`.
    """
    schedule = Schedule(
        options.learning_rate,
        options.warmup_steps,
        options.ema,
        seconds=60 * config.budget_minutes * options.share / parts,
        steps=options.steps,
    )
    minutes = config.export.every_minutes
    return fit(
        network,
        loss,
        schedule,
        folder,
        title=title,
        resume=config.resume,
        checkpoint_seconds=60 * config.checkpoint_minutes,
        average=average,
        export=export,
        export_seconds=None if minutes is None else 60 * minutes,
    )


def fit(
    network: nn.Module,
    loss: Callable[[int], Tensor],
    schedule: Schedule,
    folder: Path,
    *,
    title: str,
    resume: bool,
    checkpoint_seconds: float,
    average: nn.Module,
    export: Callable[[], None] | None = None,
    export_seconds: float | None = None,
) -> Progress:
    """Train `network` in place with AdamW and keep the moving average of its weights in `average`.

    Args:
        network: what to train.
        loss: the loss of step i, a scalar with a graph; all its randomness must come from `generator(seed, …, i)`.
        schedule: how long and how fast.
        folder: keeps `checkpoint/` and `log.jsonl`.
        title: the stage's name for the progress display.
        resume: go on from the checkpoint in `folder`; without one, or with False, start afresh.
        checkpoint_seconds: between checkpoints; the last step always writes one.
        average: a copy of `network`; holds the averaged weights afterwards.
        export: called every `export_seconds` (None: never), just after a checkpoint.
        export_seconds: between calls of `export`.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(network.parameters(), schedule.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    done = Progress()
    checkpoint = folder / "checkpoint"
    if resume and checkpoint.exists():
        done = load_checkpoint(checkpoint, network, average, optimizer)
    elif (folder / "log.jsonl").exists():
        (folder / "log.jsonl").unlink()
    for parameter in average.parameters():
        parameter.requires_grad_(False)
    trained: list[Tensor] = list(network.parameters())
    averaged: list[Tensor] = list(average.parameters())
    started = time.monotonic() - done.seconds
    last_checkpoint = last_export = time.monotonic()
    network.train()
    with _display(title, schedule, done, folder / "log.jsonl") as show:
        while (share := schedule.progress(done.steps, done.seconds)) < 1.0:
            rate = schedule.rate(done.steps, share)
            for group in optimizer.param_groups:
                group["lr"] = rate
            value = loss(done.steps)
            value.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # A young average must forget the random initial weights faster than `ema` would.
            keep = min(schedule.ema, (1 + done.steps) / (10 + done.steps))
            torch._foreach_lerp_(averaged, trained, 1 - keep)
            number = value.item()
            if not math.isfinite(number):
                raise FloatingPointError(f"{title}: the loss of step {done.steps} is {number}")
            done.loss = number if math.isnan(done.loss) else 0.98 * done.loss + 0.02 * number
            done.steps += 1
            done.seconds = time.monotonic() - started
            show(done, rate)
            now = time.monotonic()
            exporting = export is not None and export_seconds is not None and now - last_export > export_seconds
            if exporting or now - last_checkpoint > checkpoint_seconds:
                save_checkpoint(checkpoint, network, average, optimizer, done)
                last_checkpoint = now
            if exporting and export is not None:
                export()
                last_export = now
    save_checkpoint(checkpoint, network, average, optimizer, done)
    return done


def save_checkpoint(
    folder: Path, network: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, done: Progress
) -> None:
    """Write a checkpoint beside the old one and then swap them, so that a killed run never leaves half of one."""
    import torch
    from safetensors.torch import save_file

    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, module in (("network", network), ("average", average)):
        save_file({k: v.contiguous() for k, v in module.state_dict().items()}, fresh / f"{name}.safetensors")
    torch.save(optimizer.state_dict(), fresh / "optimizer.pt")
    state = {"steps": done.steps, "seconds": done.seconds, "loss": done.loss}
    (fresh / "state.json").write_text(json.dumps(state))
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    fresh.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, network: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Read what `save_checkpoint` wrote, without unpickling code."""
    import torch

    load_weights(folder / "network.safetensors", network)
    load_weights(folder / "average.safetensors", average)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return Progress(**json.loads((folder / "state.json").read_text()))


def load_weights(file: Path, module: nn.Module) -> None:
    """Fill `module` from a safetensors file.

    Raises:
        UsageError: the stage that writes it has not run.
    """
    from safetensors.torch import load_file

    if not file.exists():
        raise missing_stage(file.parent.parent.name, file)
    module.load_state_dict(load_file(file))


@contextmanager
def _display(title: str, schedule: Schedule, start: Progress, log: Path) -> Iterator[Callable[[Progress, float], None]]:
    """Yield a function that shows progress: a live bar on a terminal, a line now and then elsewhere, a log always."""
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
