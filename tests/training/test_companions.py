"""What is shipped beside the model: its tiny autoencoder and its LoRAs, and that all of it stays small and plain."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, StableDiffusionPipeline
from safetensors.torch import load_file

from sdopt.reference import LORAS, MODEL, TINY_AUTOENCODER
from sdopt.training.packages import STYLES

WEIGHTS = "diffusion_pytorch_model.safetensors"

STYLE_FILES = [f"{style.name}.safetensors" for style in STYLES]

SIZE_LIMIT = 25.5e6

SOURCES = ("Google LLC", "Microsoft Corporation", "Miles Johnson", "Apache License 2.0", "MIT License")


@pytest.fixture
def without_loras(pipeline: StableDiffusionPipeline) -> Iterator[StableDiffusionPipeline]:
    """The pipeline; whatever a test loads into it is gone afterwards."""
    yield pipeline
    pipeline.unload_lora_weights()


def draw(pipeline: StableDiffusionPipeline, caption: str = "red apple", steps: int = 4) -> np.ndarray:
    """One picture, float (64, 64, 3) in [0, 1], always from the same noise."""
    noise = torch.Generator().manual_seed(0)
    made: Any = pipeline(caption, num_inference_steps=steps, guidance_scale=4.5, generator=noise, output_type="np")
    picture: np.ndarray = made.images[0]
    return picture


def psnr(left: np.ndarray, right: np.ndarray) -> float:
    return float(-10 * np.log10(np.square(left - right).mean()))


def colourfulness(picture: np.ndarray) -> float:
    return float((picture.max(axis=-1) - picture.min(axis=-1)).mean())


def test_everything_shipped_is_weights_json_text_or_an_image_within_the_limit() -> None:
    package = MODEL.parent
    shipped = [
        file
        for file in package.rglob("*")
        if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts
    ]
    kinds = {".safetensors", ".json", ".md", ".txt", ".webp", ".png"}
    assert [str(file) for file in shipped if file.suffix not in kinds and file.name != "LICENSE"] == []
    assert sum(file.stat().st_size for file in shipped) < SIZE_LIMIT


@pytest.mark.parametrize(
    ("model", "sources"),
    [
        ("emoji", SOURCES),
        ("clip", SOURCES),
        ("loras/few_steps", SOURCES),
        ("loras", [text for s in STYLES for text in (s.package.name, s.package.holder, s.package.licence)]),
    ],
)
def test_the_cards_attribute_every_source(model: str, sources: Sequence[str]) -> None:
    card = (MODEL.parent / model / "README.md").read_text()
    assert [text for text in sources if text not in card] == []


def test_the_tiny_autoencoder_takes_the_place_of_the_full_one(pipeline: StableDiffusionPipeline) -> None:
    full = pipeline.vae
    expected = draw(pipeline, steps=12)
    try:
        pipeline.vae = AutoencoderTiny.from_pretrained(TINY_AUTOENCODER, torch_dtype=torch.float32)
        picture = draw(pipeline, steps=12)
    finally:
        pipeline.vae = full
    # Were the latents scaled wrongly, or those of another autoencoder, it would be below 12.
    assert psnr(picture, expected) > 20


@pytest.mark.parametrize("file", STYLE_FILES)
def test_every_update_of_a_lora_is_loaded(without_loras: StableDiffusionPipeline, file: str) -> None:
    weights = load_file(LORAS / file)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        without_loras.load_lora_weights(LORAS, weight_name=file, adapter_name="style")
    loaded = without_loras.unet.state_dict()
    for name, tensor in weights.items():
        place = name.removeprefix("unet.").replace(".weight", ".style.weight")
        assert torch.equal(loaded[place], tensor.float())


def test_a_lora_changes_the_style(without_loras: StableDiffusionPipeline) -> None:
    # None of them names a colour: a caption with one, as "red apple", wins over the style's black lines.
    captions = ("airplane", "banana", "file folder", "frog")
    plain = [draw(without_loras, caption, steps=12) for caption in captions]
    without_loras.load_lora_weights(LORAS, weight_name="high_contrast.safetensors", local_files_only=True)
    for caption, before in zip(captions, plain, strict=True):
        assert colourfulness(draw(without_loras, caption, steps=12)) < 0.5 * colourfulness(before)
    without_loras.unload_lora_weights()
    assert np.array_equal(draw(without_loras, captions[0], steps=12), plain[0])
