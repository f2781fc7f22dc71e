"""CLIP score against torchmetrics and arithmetic."""

import numpy as np
import pytest
import torch
from torchmetrics.multimodal import CLIPScore

from sdopt.quality import clip_score
from sdopt.quality.clip_score import clip_scores
from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first

PROMPTS = ["red apple", "police officer", "cat face", "sun", "red " * 100, "", "🍎 é", "clock"]


def test_scores_are_cosines_that_are_not_negative(clip: ClipFeatures, drawings: np.ndarray) -> None:
    found = clip_scores(drawings[:8], PROMPTS, clip)
    alone = torch.cat([clip.embed_texts([prompt]) for prompt in PROMPTS])
    cosines = torch.cosine_similarity(clip(channels_first(drawings[:8])), alone)
    np.testing.assert_allclose(found, 100 * cosines.clamp(min=0), atol=1e-3)
    assert len(set(found)) > 1


def test_their_mean_is_what_torchmetrics_gives(clip: ClipFeatures, drawings: np.ndarray) -> None:
    """Of images above zero: the metric cuts off the mean, not each. An untrained model's sign may need turning."""
    text = clip.model.text_projection.weight
    average = float(np.mean([float(x) for x in _cosines(clip, drawings)]))
    original = text.data.clone()
    try:
        text.data = original * (1 if average > 0 else -1)
        images = [index for index, cosine in enumerate(_cosines(clip, drawings)) if cosine > 0]
        assert len(images) >= 3
        metric = CLIPScore(lambda: (clip_score._Model(clip), clip_score._Processor(clip)))
        metric.update(channels_first(drawings[images]), [PROMPTS[index] for index in images])
        found = clip_scores(drawings[images], [PROMPTS[index] for index in images], clip)
        assert np.mean(found) == pytest.approx(float(metric.compute()), rel=1e-4)
        assert min(found) > 0
    finally:
        text.data = original


def _cosines(clip: ClipFeatures, drawings: np.ndarray) -> torch.Tensor:
    return torch.cosine_similarity(clip(channels_first(drawings[:8])), clip.embed_texts(PROMPTS))


def test_every_image_needs_its_prompt(clip: ClipFeatures, drawings: np.ndarray) -> None:
    with pytest.raises(ValueError, match="16 images for 8 prompts"):
        clip_scores(drawings, PROMPTS, clip)
