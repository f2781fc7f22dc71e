"""What is shipped beside the model: its tiny autoencoder and its LoRAs, and that all of it stays small and plain."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file

from sdopt.reference import LORAS, MODEL, TINY_AUTOENCODER
from sdopt.training.loras import TARGETS
from sdopt.training.packages import STYLES

SIZE_LIMIT = 24e6
TINY_LIMIT = 0.45e6
LORA_LIMIT = 0.35e6

STYLE_FILES = [f"{style.name}.safetensors" for style in STYLES]


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
    assert [str(file) for file in shipped if file.suffix not in kinds] == []
    assert sum(file.stat().st_size for file in shipped) < SIZE_LIMIT


@pytest.mark.parametrize(
    ("folder", "names", "limit"),
    [
        (TINY_AUTOENCODER, {"diffusion_pytorch_model.safetensors"}, TINY_LIMIT),
        *[pytest.param(LORAS, {name}, LORA_LIMIT) for name in STYLE_FILES],
    ],
)
def test_weights_are_in_half_precision_and_small(folder: Path, names: set[str], limit: float) -> None:
    for name in names:
        assert (folder / name).stat().st_size <= limit
        with safe_open(folder / name, "pt") as weights:
            assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"F16"}  # noqa: SIM118


def test_the_folders_hold_nothing_else() -> None:
    assert {file.name for file in TINY_AUTOENCODER.iterdir()} == {
        "README.md",
        "config.json",
        "evaluation.json",
        "recipe.json",
        "diffusion_pytorch_model.safetensors",
    }


def test_the_folder_of_the_loras_holds_nothing_else() -> None:
    assert {file.name for file in LORAS.iterdir()} == {"README.md", "evaluation.json", "recipe.json", *STYLE_FILES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_tiny_autoencoder_encodes_and_decodes(dtype: torch.dtype) -> None:
    tiny = AutoencoderTiny.from_pretrained(TINY_AUTOENCODER, torch_dtype=dtype, local_files_only=True)
    assert tiny.config.scaling_factor == 1.0
    with torch.inference_mode():
        pictures = tiny.decode(3 * torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)).sample
        latents = tiny.encode(pictures.clamp(-1, 1)).latents
    assert pictures.shape == (2, 3, 64, 64)
    assert latents.shape == (2, 8, 8, 8)
    assert torch.isfinite(pictures).all()
    assert torch.isfinite(latents).all()


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


def test_the_loras_have_the_same_layers_and_rank() -> None:
    shapes = [{name: tensor.shape for name, tensor in load_file(LORAS / file).items()} for file in STYLE_FILES]
    assert shapes[0] == shapes[1]
    assert all(name.startswith("unet.") for name in shapes[0])
    assert all(any(f".{target}.lora_A" in name for name in shapes[0]) for target in TARGETS)


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


def test_a_lora_swapped_in_place_draws_as_one_freshly_loaded(without_loras: StableDiffusionPipeline) -> None:
    first, second = STYLE_FILES
    without_loras.load_lora_weights(LORAS, weight_name=second)
    expected = draw(without_loras)
    without_loras.unload_lora_weights()
    without_loras.load_lora_weights(LORAS, weight_name=first, adapter_name="style")
    before = draw(without_loras)
    modules = len(list(without_loras.unet.modules()))
    without_loras.load_lora_weights(LORAS, weight_name=second, adapter_name="style", hotswap=True)
    assert len(list(without_loras.unet.modules())) == modules
    assert np.array_equal(draw(without_loras), expected)
    assert not np.allclose(before, expected, atol=0.05)


def test_a_fused_lora_draws_the_same_and_can_be_taken_out_again(without_loras: StableDiffusionPipeline) -> None:
    original = copy.deepcopy(without_loras.unet.state_dict())
    without_loras.load_lora_weights(LORAS, weight_name=STYLE_FILES[0])
    expected = draw(without_loras)
    without_loras.fuse_lora()
    assert np.allclose(draw(without_loras), expected, atol=1e-3)
    without_loras.unfuse_lora()
    without_loras.unload_lora_weights()
    restored = without_loras.unet.state_dict()
    assert restored.keys() == original.keys()
    assert all(torch.allclose(restored[name], original[name], atol=1e-5) for name in original)


def test_the_card_of_the_loras_attributes_every_source() -> None:
    card = (LORAS / "README.md").read_text()
    for style in STYLES:
        for text in (style.package.name, style.package.version, style.package.holder, style.package.licence):
            assert text in card
