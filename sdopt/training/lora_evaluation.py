"""Evaluates a LoRA: compares generated pictures with the style's drawings and with the flat drawings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.training.autoencoder import encode_all
from sdopt.training.data import Dataset
from sdopt.training.evaluation import Figure
from sdopt.training.sheet import draw_sheet, generate
from sdopt.training.styles import STREAM

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from torch import Tensor


COMPARED = 32
"""Number of concepts, of each split, for the card's figures."""

SHOWN = 12
"""Number of these concepts on the LoRA's contact sheet."""


def compare(
    pipeline: StableDiffusionPipeline, weights: Path, dataset: Dataset, base: Dataset, seed: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Compares pictures without and with a LoRA to the style's drawings and the flat drawings of the same concepts.

    All figures use mean latents from the pipeline's autoencoder. A linear probe, fitted to drawings of the LoRA's
    training concepts in both styles, classifies the style independent of the concept. A contact sheet in `folder` shows
    for each concept a picture without the LoRA, a picture with the LoRA, and the style's drawing.

    Args:
        pipeline: in single precision; the LoRA is loaded and unloaded with diffusers' public functions.
        weights: the file of the LoRA.
        dataset: the style's drawings.
        base: the denoiser's data, with the flat drawings.
        seed: picture i starts from the noise of seed + i, with and without the LoRA.
        folder: the folder for the contact sheet.

    Returns:
        For `training` and `held_out` concepts: the number of `concepts`; the mean Euclidean distance to the style's
        drawing without and with the LoRA, `before` and `after`; the share of pictures nearer to that drawing than to
        the flat drawing, `nearer_before` and `nearer_after`; and the share that the probe assigns to the style,
        `probe_before` and `probe_after`, and for drawings `probe_drawings` and `probe_flat_drawings`.
    """
    flat = {record.concept: index for index, record in enumerate(base.records) if record.style == "flat"}
    random = np.random.default_rng([seed, STREAM])
    chosen = {
        "training": random.permutation(dataset.indices(held_out=False))[:COMPARED],
        "held_out": random.permutation(dataset.indices(held_out=True))[:COMPARED],
    }
    captions = {split: [dataset.records[i].label for i in places] for split, places in chosen.items()}
    before = {split: generate(pipeline, texts, seed=seed) for split, texts in captions.items()}
    pipeline.load_lora_weights(weights.parent, weight_name=weights.name)
    after = {split: generate(pipeline, texts, seed=seed) for split, texts in captions.items()}
    pipeline.unload_lora_weights()

    def latents(pictures: np.ndarray) -> Tensor:
        return encode_all(pipeline.vae, pictures)[0].flatten(1)

    def both(places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns the latents of the style's drawings and of the flat drawings."""
        concepts = [dataset.records[i].concept for i in places]
        return latents(dataset.images[places]), latents(base.images[[flat[concept] for concept in concepts]])

    is_styled = fit_probe(*both(dataset.indices(held_out=False)))
    figures: dict[str, dict[str, float]] = {}
    for split, places in chosen.items():
        own, other = both(places)
        figures[split] = {
            "concepts": len(places),
            "probe_drawings": is_styled(own),
            "probe_flat_drawings": is_styled(other),
        }
        for time, pictures in (("before", before[split]), ("after", after[split])):
            made = latents(pictures)
            near, far = (made - own).norm(dim=1), (made - other).norm(dim=1)
            figures[split] |= {
                time: float(near.mean()),
                f"nearer_{time}": float((near < far).float().mean()),
                f"probe_{time}": is_styled(made),
            }
    shown, titles = [], []
    for split, places in chosen.items():
        for i, place in enumerate(places[:SHOWN]):
            shown += [before[split][i], after[split][i], dataset.images[place]]
            titles += [captions[split][i], f"with the LoRA ({split.replace('_', ' ')})", "the style's own"]
    draw_sheet(np.stack(shown), titles, folder / "contact_sheet.png")
    return figures


def lora_figures(figures: dict[str, dict[str, Any]]) -> list[Figure]:
    """Returns the figures of each LoRA for the family's table, as measured after training."""
    return [
        Figure(
            f"LoRA {name}",
            f"pictures that a probe takes for the style's (without it {100 * unseen['probe_before']:.0f} %)",
            100 * unseen["probe_after"],
            "%",
        )
        for name, unseen in ((name, of_style["comparison"]["held_out"]) for name, of_style in figures.items())
    ]


def fit_probe(styled: Tensor, flat: Tensor) -> Callable[[Tensor], float]:
    """Fits a ridge regression that classifies two equally large sets of features (n, d).

    Returns:
        A function from features (m, d) to the share classified as `styled`.
    """
    import torch

    features = torch.cat([styled, flat])
    target = torch.cat([torch.ones(len(styled)), -torch.ones(len(flat))])
    centre = features.mean(dim=0)
    spread = features - centre
    # Strong regularization, because there are about as many parameters as drawings.
    ridge = spread.square().mean() * len(features) * torch.eye(features.shape[1])
    weights = torch.linalg.solve(spread.T @ spread + ridge, spread.T @ target)
    return lambda other: float(((other - centre) @ weights > 0).float().mean())
