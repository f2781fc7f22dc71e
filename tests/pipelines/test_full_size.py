"""The published architectures with random weights, at their full size on a CPU: minutes, and gigabytes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES
from sdopt.pipelines.checks import require_model
from sdopt.pipelines.loading import load_pipeline
from sdopt.pipelines.random_weights import empty_network
from sdopt.record.records import Status
from sdopt.schema import Model, Scheduler, Task
from tests.command import sdopt
from tests.fixtures import Compose, operations_of
from tests.pipelines.single_file import original_layout

pytestmark = pytest.mark.slow

HALF_LARGEST = torch.finfo(torch.float16).max


def load(model: Model, dtype: torch.dtype) -> Any:
    return load_pipeline(model, Scheduler(), Task(), "cpu", {"dtype": dtype})


@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_activations_are_far_from_the_limit_of_half_precision(name: str) -> None:
    """Every module's output, in the first steps and for latents as large as fifty of them can make: see `_draw`."""
    pipe = load(Model(name=name, weights="random"), torch.bfloat16)
    largest: dict[str, float] = {}

    def note(path: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                largest[path] = max(largest.get(path, 0.0), output.abs().max().item())

        return hook

    networks = {key: network for key, network in pipe.components.items() if isinstance(network, torch.nn.Module)}
    for key, network in networks.items():
        for path, module in network.named_modules():
            module.register_forward_hook(note(f"{key}.{path}"))
    noise = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
    size = {"height": 64, "width": 64, "output_type": "latent", "guidance_scale": 7.5}
    pipe("a red fox", num_inference_steps=2, latents=noise, **size)
    # Deterministic sampling adds, over all steps, at most the noise's range times what is predicted: below 15 times 10.
    found = pipe("a red fox", num_inference_steps=1, latents=noise * 150, **size).images
    pipe.vae.decode(found / pipe.vae.config.scaling_factor)
    assert len(largest) > 500
    assert not any(math.isnan(value) for value in largest.values())
    assert max(value for path, value in largest.items() if not path.startswith("vae")) < HALF_LARGEST / 20
    assert max(largest.values()) < HALF_LARGEST / 4


@pytest.mark.parametrize(("name", "tflop"), [("sd15", 0.803), ("sd21", 2.149), ("sdxl", 6.761)])
def test_operations_are_the_published_ones(variant: Compose, name: str, tflop: float) -> None:
    """Of one forward pass per sample; two samples a step with guidance."""
    chosen = variant(f"model={name}", "model.weights=random")
    index = json.loads((ARCHITECTURES / name / "model_index.json").read_text())

    class Pipe:
        config = index
        tokenizer = type("Tokenizer", (), {"model_max_length": 77})
        scheduler = type("Steps", (), {"set_timesteps": lambda self, steps: None, "timesteps": range(1)})()

    for component in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if component in index:
            setattr(Pipe, component, empty_network(ARCHITECTURES / name / component, *index[component]))
    pipe: Any = Pipe()
    counted = operations_of(pipe, chosen)
    assert counted["denoiser"] == pytest.approx(2 * tflop, rel=1e-3)
    decoder = {"sd15": 2.51, "sd21": 5.75, "sdxl": 10.47}[name]
    assert counted["vae_decoder"] == pytest.approx(decoder, rel=2e-3)


def test_a_single_file_is_read_with_the_configurations_in_the_package(tmp_path: Path) -> None:
    """Stable Diffusion 1.5 as it was published: no hub, every parameter in its place."""
    random = load(Model(name="sd15", weights="random"), torch.bfloat16)
    original_layout(random, tmp_path / "sd15.safetensors")
    model = Model(name="sd15", weights="path", path=str(tmp_path / "sd15.safetensors"))
    require_model(model)
    with pytest.raises(UsageError, match="not of the architecture model=sd21"):
        require_model(replace(model, name="sd21"))
    pipe = load(model, torch.bfloat16)
    for name in ("unet", "vae", "text_encoder"):
        theirs = dict(getattr(random, name).named_parameters())
        ours = dict(getattr(pipe, name).named_parameters())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert pipe.tokenizer.model_max_length == 77


def test_stable_diffusion_finishes_on_a_cpu(tmp_path: Path) -> None:
    finished = sdopt(
        tmp_path,
        *("run", "model=sd15", "model.weights=random", "workload.steps=1", "workload.size=256", "protocol=smoke"),
        *("quality=none", "tracking=none", "hardware=cpu", "workload.prompt_count=1"),
    )
    assert finished.code == 0, finished.err
    assert [row.status for row in finished.result.variants] == [Status.OK] * 2
    assert "Random weights" in finished.shown
    assert (finished.result.variants[0].tflop_per_image or 0) > 0.5
