"""What is shipped: it loads offline, draws, fits its size limit and hides no code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline


def draw(pipeline: StableDiffusionPipeline, captions: list[str], steps: int) -> np.ndarray:
    noise = [torch.Generator().manual_seed(i) for i in range(len(captions))]
    made: Any = pipeline(captions, num_inference_steps=steps, guidance_scale=4.5, generator=noise, output_type="np")
    pictures: np.ndarray = made.images
    return pictures


def test_it_draws_finite_pictures_in_two_steps(pipeline: StableDiffusionPipeline) -> None:
    images = draw(pipeline, ["police officer"], steps=2)
    assert images.shape == (1, 64, 64, 3)
    assert np.isfinite(images).all()


def test_captions_steer_the_picture(pipeline: StableDiffusionPipeline) -> None:
    red, blue = draw(pipeline, ["red circle", "blue circle"], steps=12)
    centre = (slice(24, 40), slice(24, 40))
    assert red[centre][..., 0].mean() > red[centre][..., 2].mean() + 0.2
    assert blue[centre][..., 2].mean() > blue[centre][..., 0].mean() + 0.2


@pytest.mark.parametrize("name", ["PNDMScheduler", "EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler"])
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
