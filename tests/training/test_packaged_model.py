"""What is shipped: it loads offline, draws, fits its size limit and hides no code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from sdopt.reference import MODEL, PROMPTS


def draw(pipeline: StableDiffusionPipeline, captions: list[str], steps: int) -> np.ndarray:
    noise = [torch.Generator().manual_seed(i) for i in range(len(captions))]
    made: Any = pipeline(captions, num_inference_steps=steps, guidance_scale=4.5, generator=noise, output_type="np")
    pictures: np.ndarray = made.images
    return pictures


def test_it_draws_finite_pictures_in_two_steps(pipeline: StableDiffusionPipeline) -> None:
    images = draw(pipeline, ["police officer"], steps=2)
    assert images.shape == (1, 64, 64, 3)
    assert np.isfinite(images).all()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_all_networks_load_in_one_type(dtype: torch.dtype | None) -> None:
    asked = {} if dtype is None else {"dtype": dtype}
    pipeline = StableDiffusionPipeline.from_pretrained(MODEL, local_files_only=True, **asked)
    pipeline.set_progress_bar_config(disable=True)
    networks = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    assert {network.dtype for network in networks} == {dtype or torch.float32}
    assert np.isfinite(draw(pipeline, ["red circle"], steps=2)).all()


def test_captions_steer_the_picture(pipeline: StableDiffusionPipeline) -> None:
    red, blue = draw(pipeline, ["red circle", "blue circle"], steps=12)
    centre = (slice(24, 40), slice(24, 40))
    assert red[centre][..., 0].mean() > red[centre][..., 2].mean() + 0.2
    assert blue[centre][..., 2].mean() > blue[centre][..., 0].mean() + 0.2


@pytest.mark.parametrize(
    "name",
    [
        "DDIMScheduler",
        "PNDMScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "DPMSolverMultistepScheduler",
        "UniPCMultistepScheduler",
    ],
)
def test_every_solver_works_from_the_shipped_schedule(pipeline: StableDiffusionPipeline, name: str) -> None:
    import diffusers

    original = pipeline.scheduler
    try:
        pipeline.scheduler = getattr(diffusers, name).from_config(original.config)
        red = draw(pipeline, ["red circle"], steps=20)[0]
    finally:
        pipeline.scheduler = original
    assert np.isfinite(red).all()
    assert red[28:36, 28:36, 0].mean() > red[28:36, 28:36, 2].mean() + 0.2
    assert red[:3, :3].mean() > 0.9


def test_there_is_no_safety_checker_and_the_latents_are_scaled() -> None:
    index = json.loads((MODEL / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None]
    assert index["requires_safety_checker"] is False
    assert json.loads((MODEL / "vae/config.json").read_text())["scaling_factor"] != 0.18215


def test_prompts_are_many_and_disjoint() -> None:
    prompts = json.loads(PROMPTS.read_text())
    assert len(prompts["held_out"]) >= 200
    assert len(prompts["training"]) == 200
    assert len(prompts["contact_sheet"]) == 24
    assert not set(prompts["held_out"]) & (set(prompts["training"]) | set(prompts["contact_sheet"]))
