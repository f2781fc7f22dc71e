"""A small CLIP, untrained, in a folder as the packaged one is, and images to look at."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter

from sdopt.quality.features import ClipFeatures, feature_extractor
from sdopt.reference import MODEL


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained CLIPModel for 64×64 images and the packaged tokenizer's vocabulary, saved whole."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    folder = tmp_path_factory.mktemp("clips") / "tiny-CLIP"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {
        "vocab_size": 2048,
        "max_position_embeddings": 24,
        "eos_token_id": 2047,
        "bos_token_id": 2046,
    }
    config = CLIPConfig(
        text_config=sizes | text,
        vision_config=sizes | {"image_size": 64, "patch_size": 8},
        projection_dim=16,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    size = {"height": 64, "width": 64}
    half = [0.5, 0.5, 0.5]
    CLIPImageProcessorPil(
        size=size, do_center_crop=False, image_mean=half, image_std=half
    ).save_pretrained(folder)
    shutil.copytree(MODEL / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def clip(clip_folder: Path) -> ClipFeatures:
    made = feature_extractor(f"clip:{clip_folder}")
    assert isinstance(made, ClipFeatures)
    return made


@pytest.fixture(scope="session")
def drawings() -> np.ndarray:
    """Sixteen different drawings on white, in the manner of emoji: uint8 (16, 64, 64, 3)."""
    return np.stack([_drawing(seed) for seed in range(16)])


def _drawing(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    image = Image.new("RGB", (256, 256), "white")
    pen = ImageDraw.Draw(image)
    for _ in range(4):
        colour = tuple(int(value) for value in random.integers(20, 240, 3))
        left, top = random.integers(20, 120, 2)
        width, height = random.integers(40, 116, 2)
        shape = pen.ellipse if random.random() < 0.5 else pen.rectangle
        shape((left, top, left + width, top + height), fill=colour)
    return np.asarray(image.resize((64, 64), Image.Resampling.LANCZOS))


def noisy(images: np.ndarray, sigma: float, seed: int = 0) -> np.ndarray:
    """Gaussian noise of standard deviation `sigma` (of a range of 1) on every value."""
    noise = np.random.default_rng(seed).normal(0, 255 * sigma, images.shape)
    return np.clip(np.rint(images + noise), 0, 255).astype(np.uint8)


def blurred(images: np.ndarray, radius: float) -> np.ndarray:
    """Gaussian blur with a standard deviation of `radius` pixels."""
    return np.stack(
        [
            np.asarray(Image.fromarray(i).filter(ImageFilter.GaussianBlur(radius)))
            for i in images
        ]
    )
