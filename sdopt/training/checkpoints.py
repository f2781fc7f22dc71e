"""Reads and writes the files of a stage: checkpoints, weights and figures."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class Progress:
    """The progress of a training.

    Attributes:
        steps: completed steps, over all runs.
        seconds: used time, over all runs.
        loss: exponential moving average of the loss.
    """

    steps: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


def read_figures(folder: Path) -> dict[str, Any]:
    """Reads a stage's `figures.json`, and the steps, seconds and loss of its checkpoint.

    Raises:
        UsageError: the stage has not run.
    """
    files = (folder / "figures.json", folder / "checkpoint" / "state.json")
    for file in files:
        if not file.exists():
            raise missing_stage(folder.name, file)
    return {key: value for file in files for key, value in json.loads(file.read_text()).items()}


def missing_stage(stage: str, file: Path) -> UsageError:
    """Returns the error for a file that an earlier stage should have written."""
    return UsageError(f"{file} is missing: run `sdopt train-reference stage={stage}` first")


def save_checkpoint(
    folder: Path, network: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, done: Progress
) -> None:
    """Writes a checkpoint to a new folder, and then replaces the old one, so that a checkpoint is always complete."""
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
    """Loads a checkpoint written by `save_checkpoint` into the arguments, without unpickling code."""
    import torch

    load_weights(folder / "network.safetensors", network)
    load_weights(folder / "average.safetensors", average)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return Progress(**json.loads((folder / "state.json").read_text()))


def load_weights(file: Path, module: nn.Module) -> None:
    """Loads the weights of `module` from a safetensors file.

    Raises:
        UsageError: the stage that writes the file has not run.
    """
    from safetensors.torch import load_file

    if not file.exists():
        raise missing_stage(file.parent.parent.name, file)
    module.load_state_dict(load_file(file))
