"""The CLIP that is shipped: it loads offline, knows what it sees, fits its size limit and hides no code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first
from sdopt.quality.reference_sets import HELD_OUT, PRECOMPUTED, ReferenceSet, reference_set
from sdopt.reference import CLIP
from sdopt.training.clip_evaluation import clip_score
from sdopt.training.data import BACKGROUNDS


@pytest.fixture(scope="module")
def extractor() -> ClipFeatures:
    return ClipFeatures("emojiclip", str(CLIP))


def disc(colour: str, side: int = 64, behind: str = "white") -> Image.Image:
    """A disc as the emoji sets draw their coloured circles, drawn large and averaged down."""
    page = Image.new("RGB", (4 * side, 4 * side), behind)
    ImageDraw.Draw(page).ellipse((side // 4, side // 4, 4 * side - side // 4, 4 * side - side // 4), fill=colour)
    return page.resize((side, side), Image.Resampling.BOX)


def embedded(extractor: ClipFeatures, *pictures: Image.Image) -> torch.Tensor:
    features: torch.Tensor = extractor(channels_first(np.stack([np.asarray(picture) for picture in pictures])))
    return features


def test_it_loads_offline_as_transformers_documents_it() -> None:
    from transformers import CLIPModel, CLIPProcessor

    model = CLIPModel.from_pretrained(CLIP, local_files_only=True)
    assert model.dtype == torch.float32
    processor = CLIPProcessor.from_pretrained(CLIP, local_files_only=True)
    picture = disc("#0074ba", side=256)
    inputs = processor(text=["red circle", "blue circle"], images=[picture], padding=True, return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 64, 64)
    assert -1 <= float(inputs["pixel_values"].min()) < float(inputs["pixel_values"].max()) <= 1
    with torch.inference_mode():
        red, blue = model(**inputs).logits_per_image[0]
    assert blue > red


def test_it_names_colours_of_things_and_of_backgrounds(extractor: ClipFeatures) -> None:
    pictures = embedded(extractor, disc("#f8312f"), disc("#0074ba"))
    texts = extractor.embed_texts(["red circle", "blue circle"])
    assert clip_score(pictures, texts) > clip_score(pictures, texts.flip(0)) + 5
    behind = ["#" + bytes(BACKGROUNDS[name]).hex() for name in ("green", "pink")]
    pictures = embedded(extractor, *(disc("#f8312f", behind=colour) for colour in behind))
    texts = extractor.embed_texts([f"red circle on a {name} background" for name in ("green", "pink")])
    assert clip_score(pictures, texts) > clip_score(pictures, texts.flip(0)) + 5


def test_the_features_kept_of_the_held_out_pictures_are_theirs(extractor: ClipFeatures) -> None:
    kept, made = ReferenceSet.load(PRECOMPUTED, extractor), ReferenceSet.of_folder(HELD_OUT, extractor)
    assert torch.equal(reference_set("packaged", extractor).values, kept.values)
    assert kept.n == made.n == 120
    torch.testing.assert_close(kept.values, made.values, rtol=1e-3, atol=1e-3)
