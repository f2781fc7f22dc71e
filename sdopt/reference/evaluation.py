"""Does the model draw what the caption says? A number beside the contact sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sdopt.reference.autoencoder import encode_all
from sdopt.reference.data import Dataset
from sdopt.reference.sheet import generate

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline


@dataclass(frozen=True)
class Recognition:
    """How often a caption's own drawing is among the nearest to the generated picture.

    Attributes:
        captions: how many were tried.
        candidates: drawings that were ranked, one of them right.
        top1: share of captions whose own drawing is the nearest.
        top5: share of captions whose own drawing is among the five nearest.
    """

    captions: int
    candidates: int
    top1: float
    top5: float


def recognise(
    pipeline: StableDiffusionPipeline, dataset: Dataset, captions: list[str], *, seed: int, guidance: float
) -> Recognition:
    """Generate a picture for each caption and rank all flat drawings, seen and held out, by distance to it.

    The distance is Euclidean between mean latents of the pipeline's own autoencoder, after encoding both pictures.

    Args:
        pipeline: in single precision.
        dataset: where the drawings are.
        captions: plain names; those without a flat drawing are skipped.
        seed: picture i starts from the noise of seed + i.
        guidance: classifier-free guidance scale.
    """
    import torch

    flat = [i for i, record in enumerate(dataset.records) if record.style == "flat"]
    place = {dataset.records[i].label: position for position, i in enumerate(flat)}
    captions = [text for text in captions if text in place]
    drawings = encode_all(pipeline.vae, dataset.images[flat])[0].flatten(1)
    pictures = encode_all(pipeline.vae, generate(pipeline, captions, seed=seed, guidance=guidance))[0].flatten(1)
    distances = torch.cdist(pictures, drawings)
    own = distances.gather(1, torch.tensor([[place[text]] for text in captions]))
    ranks = (distances < own).sum(dim=1).numpy()
    return Recognition(len(captions), len(flat), float(np.mean(ranks < 1)), float(np.mean(ranks < 5)))
