"""Models that tests of this room load, what these draw, and what is said of those that cannot be."""

from typing import Any

import pytest
import torch

from sdopt.config.composer import HydraComposer
from sdopt.errors import UsageError
from sdopt.pipelines.loading import load_pipeline
from sdopt.schema import Model, Scheduler, Task


def load(
    model: Model, scheduler: Scheduler | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    return load_pipeline(
        model, scheduler or Scheduler(), Task(), "cpu", {"dtype": dtype}
    )


def latents(
    pipe: Any, prompt: str = "a red fox asleep in fresh snow", steps: int = 2
) -> torch.Tensor:
    noise = torch.randn((1, 8, 8, 8), generator=torch.Generator().manual_seed(0))
    found: torch.Tensor = pipe(
        prompt, num_inference_steps=steps, latents=noise, output_type="latent"
    ).images
    return found


def problem(composer: type[HydraComposer], *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        composer(list(overrides))
    [found] = caught.value.problems
    return found
