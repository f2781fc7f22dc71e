"""The training loop of all stages: device, schedule, weight averaging, checkpoints, progress, random streams."""

import copy
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.attention_processor import AttnProcessor
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from sdopt.apps.training.config import TrainingConfig, TrainReferenceConfig
from sdopt.errors import UnavailableError, UsageError
from sdopt.hardware.probe import describe_cpu

LINE_SECONDS = 30.0
"""Seconds between progress lines."""

NOT_SETTINGS = ("share", "steps", "target", "contact_sheet")
"""Keys of a stage that do not say how the weights came about, or that the number of steps done says better."""


class DivergenceError(UnavailableError):
    """Raised if the loss of a training is not finite."""


@dataclass
class TrainingProgress:
    """The progress of a training, over all its runs; the loss is an exponential moving average."""

    steps: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


def train(
    config: TrainReferenceConfig,
    stage: str,
    network: nn.Module,
    loss: Callable[[int], Tensor],
    *,
    part: str = "",
    parts: int = 1,
    **facts: Any,
) -> nn.Module:
    """Trains a stage's network in place with AdamW, and returns a copy with the moving average of its weights.

    The stage's folder gets `log.jsonl` and `checkpoint/`, from which the same call continues. `state.json` of the
    checkpoint has what belongs in the recipe of the weights: settings, facts, hardware, and progress.

    Args:
        config: the whole configuration.
        stage: the stage, whose section of the configuration holds.
        network: trained in place.
        loss: the loss of step i, a scalar with a graph; all its randomness must come from `generator(seed, …, i)`.
        part: the name of this training among several of the stage, and of its folder.
        parts: number of trainings that share the stage's time.
        facts: what else belongs in the recipe, as the number of pictures.

    Raises:
        DivergenceError: the loss is not finite.
    """
    options: TrainingConfig = getattr(config, stage)
    budget_s = 60 * config.budget_minutes * options.share / parts
    settings = {
        key: value for key, value in asdict(options).items() if key not in NOT_SETTINGS
    } | facts
    settings["hardware"] = describe_hardware(
        pick_device(config.device), config.arithmetic
    )
    folder, title = Path(config.folder) / stage / part, f"{stage} {part}".rstrip()
    checkpoint, log = folder / "checkpoint", folder / "log.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    average = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        options.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=0.01,
    )
    done = TrainingProgress()
    if config.resume and checkpoint.exists():
        before = load_checkpoint(checkpoint, network, average, optimizer)
        done = TrainingProgress(
            *(before.pop(key) for key in ("steps", "seconds", "loss"))
        )
        settings["earlier"] = earlier_settings(before, settings, done.steps)
    else:
        log.unlink(missing_ok=True)

    def save() -> None:
        save_checkpoint(
            checkpoint, network, average, optimizer, {**settings, **asdict(done)}
        )

    trained: list[Tensor] = list(network.parameters())
    averaged: list[Tensor] = list(average.parameters())
    started = time.monotonic() - done.seconds
    last_checkpoint = time.monotonic()
    report = reporter(title, done, log)
    network.train()
    share = options.progress(done.steps, done.seconds, budget_s)
    while share < 1.0:
        rate = options.rate(done.steps, share)
        value = loss(done.steps)
        value.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Early on, the average must forget the random initial weights faster than with `ema`.
        keep = min(options.ema, (1 + done.steps) / (10 + done.steps))
        torch._foreach_lerp_(averaged, trained, 1 - keep)
        number = value.item()
        if not math.isfinite(number):
            raise DivergenceError(f"{title}: the loss of step {done.steps} is {number}")
        done.loss = (
            number if math.isnan(done.loss) else 0.98 * done.loss + 0.02 * number
        )
        done.steps += 1
        done.seconds = time.monotonic() - started
        share = options.progress(done.steps, done.seconds, budget_s)
        report(done, share, rate)
        now = time.monotonic()
        if now - last_checkpoint > 60 * config.checkpoint_minutes:
            save()
            last_checkpoint = now
    save()
    return average


def earlier_settings(
    before: Mapping[str, Any], settings: Mapping[str, Any], steps: int
) -> list[dict[str, Any]]:
    """Returns the earlier settings of a resumed training, each with the step `until_step` at which they ended."""
    earlier: list[dict[str, Any]] = before.get("earlier", [])
    changed = {
        key: before.get(key)
        for key, value in settings.items()
        if before.get(key) != value
    }
    return [*earlier, {"until_step": steps, **changed}] if changed else earlier


def save_checkpoint(
    folder: Path,
    network: nn.Module,
    average: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
) -> None:
    """Writes a checkpoint to a new folder, and then replaces the old one, so that a checkpoint is always complete."""
    fresh, old = (
        folder.with_name(f"{folder.name}.{suffix}") for suffix in ("new", "old")
    )
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, module in (("network", network), ("average", average)):
        save_model(module, str(fresh / f"{name}.safetensors"))
    torch.save(optimizer.state_dict(), fresh / "optimizer.pt")
    (fresh / "state.json").write_text(json.dumps(state))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    fresh.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path,
    network: nn.Module,
    average: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Loads a checkpoint into the networks and the optimizer, without unpickling code; returns its `state.json`."""
    load_model(network, folder / "network.safetensors")
    load_model(average, folder / "average.safetensors")
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    state: dict[str, Any] = json.loads(
        (folder / "state.json").read_text(encoding="utf-8")
    )
    return state


def load_average(folder: Path, network: nn.Module) -> None:
    """Loads the averaged weights of the stage in `folder` into an untrained network, and freezes it."""
    file = folder / "checkpoint" / "average.safetensors"
    if not file.exists():
        raise missing_stage(folder.name, file)
    load_model(network, file)
    network.eval().requires_grad_(False)


def missing_stage(stage: str, file: Path) -> UsageError:
    """Returns the error for a file that an earlier stage should have written."""
    return UsageError(
        f"{file} is missing: run `sdopt train-reference stage={stage}` first"
    )


def reporter(
    title: str, start: TrainingProgress, log: Path
) -> Callable[[TrainingProgress, float, float], None]:
    """Returns a function that writes progress, its share and the learning rate to the log and to stderr.

    It does so every half minute.
    """
    first_steps, first_time = start.steps, time.monotonic()
    last = first_time

    def report(done: TrainingProgress, share: float, rate: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_SECONDS and share < 1.0:
            return
        last = now
        with log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**asdict(done), "rate": rate}) + "\n")
        speed = (done.steps - first_steps) / max(now - first_time, 1e-9)
        left = (1 - share) / max(share, 1e-9) * done.seconds
        print(
            f"{title}: {share:4.0%}  step {done.steps}  loss {done.loss:.4f}  rate {rate:.2e}  {speed:.2f} steps/s  "
            f"{left / 60:.0f} min left",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    return report


# ---- device, precision, random streams -------------------------------------------------------------------------------

STREAMS = {
    "autoencoder": 1,
    "denoiser": 2,
    "clip": 3,
    "tiny_autoencoder": 4,
    "loras": 5,
    "few_steps": 6,
    "transformer": 7,
}
"""Number of each stage in the path of a random seed."""


def pick_device(device: str) -> torch.device:
    """Returns the device to train on: `auto`, `cpu` or `cuda`."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError(
            "device=cuda: there is no CUDA device; choose device=auto or device=cpu"
        )
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def pick_precision(arithmetic: str, device: torch.device) -> str:
    """Returns `fp32` or `bf16`; `auto` is bf16 on hardware with native bf16 products."""
    if arithmetic != "auto":
        return arithmetic
    native = (
        device.type == "cuda"
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )
    return "bf16" if native else "fp32"


def in_precision(arithmetic: str, device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context manager that sets the precision of matrix products and convolutions."""
    if pick_precision(arithmetic, device) == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def on_device(network: Any, device: torch.device) -> Any:
    """Returns a network of diffusers on its device, with attention by plain products.

    The default processor calls a fused kernel whose backward pass is slow on CPUs, especially in bf16.
    """
    network.to(device, memory_format=torch.channels_last).set_attn_processor(
        AttnProcessor()
    )
    return network


def describe_hardware(device: torch.device, arithmetic: str) -> str:
    """Returns a description of the machine, the precision and the PyTorch version for a card."""
    cpu = f"{torch.get_num_threads()} cores of {describe_cpu()['name']}"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return f"{machine}, {pick_precision(arithmetic, device)}, torch {torch.__version__.partition('+')[0]}"


def generator(
    seed: int, *path: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Returns a random generator that depends only on `seed` and `path` (stage, step), so that runs can resume."""
    words = np.random.SeedSequence([seed, *path]).generate_state(2)
    return torch.Generator(device).manual_seed((int(words[0]) << 31) ^ int(words[1]))
