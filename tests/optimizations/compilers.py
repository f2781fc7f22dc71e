"""What tests of compilers share: the latents that a variant ends with, and stand-ins for a machine."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from sdopt.results.records import Evidence
from sdopt.worker.draws import LATENTS, timed_draw
from sdopt.worker.session import PipelineHost

TWO_STEPS = "workload.steps=2"


def evidence(host: PipelineHost) -> Evidence:
    """The evidence of the option of the group `compiler`."""
    [found] = [item for item in host.prove() if item.axis == "compiler"]
    return found


def latents(host: PipelineHost, folder: Path) -> torch.Tensor:
    """The latents after the last step of the timed call, float32."""
    host.generate(0, timed_draw(host._variant), folder)
    found: torch.Tensor = load_file(folder / LATENTS)["latents"]
    return found
