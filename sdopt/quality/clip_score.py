"""CLIP score: how well an image fits its prompt, according to a CLIP."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdopt.quality.features import ClipFeatures
from sdopt.quality.images import channels_first


def clip_scores(images: np.ndarray, prompts: Sequence[str], clip: ClipFeatures) -> tuple[float, ...]:
    """Returns 100 · max(cos(image, prompt), 0) of each image (Hessel et al. 2021, with torchmetrics' factor).

    Computed by torchmetrics, which clamps the mean at 0 instead of each image: the same if no image is below 0.

    Args:
        images: uint8 (n, height, width, 3).
        prompts: the prompt of each.
        clip: the CLIP that scores.

    Raises:
        ValueError: the numbers of images and prompts differ.
    """
    from torchmetrics.multimodal import CLIPScore

    if len(images) != len(prompts):
        raise ValueError(f"{len(images)} images for {len(prompts)} prompts")
    metric = CLIPScore(lambda: (_Model(clip), _Processor(clip)))
    scores = []
    with torch.inference_mode():
        for image, prompt in zip(channels_first(images).to(clip.device), prompts, strict=True):
            # One at a time: the metric keeps only a sum.
            metric.reset()
            metric.update(image, prompt)
            scores.append(float(metric.compute()))
    return tuple(scores)


class _Model:
    """Adapts the model to torchmetrics' calls: since transformers 5 its features are wrapped."""

    def __init__(self, clip: ClipFeatures) -> None:
        self._clip = clip
        self.config = clip.model.config

    def to(self, device: torch.device) -> "_Model":
        return self

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self._clip.embed_pixels(pixel_values)

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self._clip.embed_tokens(input_ids=input_ids, attention_mask=attention_mask)


class _Processor:
    """Adapts the processor to torchmetrics' calls; truncates prompts to the model's length, keeping the end token."""

    def __init__(self, clip: ClipFeatures) -> None:
        self._clip = clip

    def __call__(
        self, images: Sequence[Tensor] | None = None, text: Sequence[str] | None = None, **_: Any
    ) -> dict[str, Tensor]:
        if images is not None:
            return {"pixel_values": self._clip.pixels(images)}
        assert text is not None
        return self._clip.tokenize(text)
