"""What is shipped: the models load offline, draw, fit their size limit and hide no code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, FluxPipeline, StableDiffusionPipeline
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from sdopt.apps.training.captions import generate
from sdopt.apps.training.data import BACKGROUNDS
from sdopt.apps.training.evaluation import clip_score
from sdopt.apps.training.packages import STYLES
from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import (
    HELD_OUT,
    PRECOMPUTED,
    ReferenceSet,
    reference_set,
)
from sdopt.reference import CLIP, LORAS, MODEL, TINY_AUTOENCODER, TRANSFORMER

SIZE_LIMIT = 44.5e6


@pytest.fixture
def without_loras(
    pipeline: StableDiffusionPipeline,
) -> Iterator[StableDiffusionPipeline]:
    """The pipeline; whatever a test loads into it is gone afterwards."""
    yield pipeline
    pipeline.unload_lora_weights()


def draw(pipeline: StableDiffusionPipeline, *captions: str, steps: int) -> np.ndarray:
    """Pictures, float (n, 64, 64, 3) in [0, 1], each always from the same noise."""
    noise = [torch.Generator().manual_seed(i) for i in range(len(captions))]
    options: dict[str, Any] = {
        "num_inference_steps": steps,
        "guidance_scale": 4.5,
        "output_type": "np",
    }
    pictures: np.ndarray = pipeline(list(captions), generator=noise, **options).images
    return pictures


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
    assert [
        str(file)
        for file in shipped
        if file.suffix not in kinds and file.name != "LICENSE"
    ] == []
    assert sum(file.stat().st_size for file in shipped) < SIZE_LIMIT


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_the_transformer_has_the_other_networks_of_the_unet(part: str) -> None:
    own = next((TRANSFORMER / part).glob("*.safetensors"))
    theirs = next((MODEL / part.removesuffix("_2")).glob("*.safetensors"))
    assert own.read_bytes() == theirs.read_bytes()


def test_captions_steer_what_the_transformer_draws() -> None:
    pipeline = FluxPipeline.from_pretrained(TRANSFORMER, local_files_only=True)
    assert pipeline.transformer.dtype == pipeline.text_encoder.dtype == torch.float32
    red, blue = (
        generate(
            pipeline, ["red circle", "blue circle"], seed=0, num_inference_steps=12
        )
        / 255
    )
    centre = (slice(24, 40), slice(24, 40))
    assert red[centre][..., 0].mean() > red[centre][..., 2].mean() + 0.2
    assert blue[centre][..., 2].mean() > blue[centre][..., 0].mean() + 0.2
    assert red[:3, :3].mean() > 0.9


def test_the_tiny_autoencoder_takes_the_place_of_the_full_one(
    pipeline: StableDiffusionPipeline,
) -> None:
    full = pipeline.vae
    expected = draw(pipeline, "red apple", steps=4)
    try:
        pipeline.vae = AutoencoderTiny.from_pretrained(
            TINY_AUTOENCODER, torch_dtype=torch.float32
        )
        picture = draw(pipeline, "red apple", steps=4)
    finally:
        pipeline.vae = full
    # Were the latents scaled wrongly, or those of another autoencoder, it would be below 12.
    assert -10 * np.log10(np.square(picture - expected).mean()) > 20


@pytest.mark.parametrize("style", [style.name for style in STYLES])
def test_every_update_of_a_lora_is_loaded(
    without_loras: StableDiffusionPipeline, style: str
) -> None:
    file = LORAS / f"{style}.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        without_loras.load_lora_weights(
            LORAS, weight_name=file.name, adapter_name="style"
        )
    loaded = without_loras.unet.state_dict()
    for name, tensor in load_file(file).items():
        place = name.removeprefix("unet.").replace(".weight", ".style.weight")
        assert torch.equal(loaded[place], tensor.float())


def test_a_lora_changes_the_style(without_loras: StableDiffusionPipeline) -> None:
    # Neither names a colour: a caption with one, as "red apple", wins over the style's black lines.
    captions = ("airplane", "banana")
    plain = draw(without_loras, *captions, steps=12)
    without_loras.load_lora_weights(
        LORAS, weight_name="high_contrast.safetensors", local_files_only=True
    )
    for picture, before in zip(
        draw(without_loras, *captions, steps=12), plain, strict=True
    ):
        assert colourfulness(picture) < 0.5 * colourfulness(before)


def test_captions_steer_the_picture(pipeline: StableDiffusionPipeline) -> None:
    red, blue = draw(pipeline, "red circle", "blue circle", steps=12)
    assert red.shape == (64, 64, 3)
    centre = (slice(24, 40), slice(24, 40))
    assert red[centre][..., 0].mean() > red[centre][..., 2].mean() + 0.2
    assert blue[centre][..., 2].mean() > blue[centre][..., 0].mean() + 0.2
    assert red[:3, :3].mean() > 0.9


@pytest.fixture(scope="module")
def extractor() -> ClipFeatures:
    return ClipFeatures("emojiclip", str(CLIP))


def disc(colour: str, side: int = 64, behind: str = "white") -> Image.Image:
    """A disc as the emoji sets draw their coloured circles, drawn large and averaged down."""
    page = Image.new("RGB", (4 * side, 4 * side), behind)
    ImageDraw.Draw(page).ellipse(
        (side // 4, side // 4, 4 * side - side // 4, 4 * side - side // 4), fill=colour
    )
    return page.resize((side, side), Image.Resampling.BOX)


def embedded(extractor: ClipFeatures, *pictures: Image.Image) -> torch.Tensor:
    features: torch.Tensor = extractor(
        channels_first(np.stack([np.asarray(picture) for picture in pictures]))
    )
    return features


def test_it_loads_offline_as_transformers_documents_it() -> None:
    from transformers import CLIPModel, CLIPProcessor

    model = CLIPModel.from_pretrained(CLIP, local_files_only=True)
    assert model.dtype == torch.float32
    processor = CLIPProcessor.from_pretrained(CLIP, local_files_only=True)
    picture = disc("#0074ba", side=256)
    inputs = processor(
        text=["red circle", "blue circle"],
        images=[picture],
        padding=True,
        return_tensors="pt",
    )
    assert inputs["pixel_values"].shape == (1, 3, 64, 64)
    assert (
        -1
        <= float(inputs["pixel_values"].min())
        < float(inputs["pixel_values"].max())
        <= 1
    )
    with torch.inference_mode():
        red, blue = model(**inputs).logits_per_image[0]
    assert blue > red


def test_it_names_colours_of_things_and_of_backgrounds(extractor: ClipFeatures) -> None:
    pictures = embedded(extractor, disc("#f8312f"), disc("#0074ba"))
    texts = extractor.embed_texts(["red circle", "blue circle"])
    assert clip_score(pictures, texts) > clip_score(pictures, texts.flip(0)) + 5
    behind = ["#" + bytes(BACKGROUNDS[name]).hex() for name in ("green", "pink")]
    pictures = embedded(
        extractor, *(disc("#f8312f", behind=colour) for colour in behind)
    )
    texts = extractor.embed_texts(
        [f"red circle on a {name} background" for name in ("green", "pink")]
    )
    assert clip_score(pictures, texts) > clip_score(pictures, texts.flip(0)) + 5


def test_the_features_kept_of_the_held_out_pictures_are_theirs(
    extractor: ClipFeatures,
) -> None:
    kept, made = (
        ReferenceSet.load(PRECOMPUTED, extractor),
        ReferenceSet.of_folder(HELD_OUT, extractor),
    )
    assert torch.equal(reference_set("packaged", extractor).values, kept.values)
    assert len(kept.values) == len(made.values) == 120
    torch.testing.assert_close(kept.values, made.values, rtol=1e-3, atol=1e-3)
