"""Measures what a LoRA changes: compares generated pictures with the style's drawings and with the flat ones."""

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
"""Concepts of each kind that the card's figures are measured on."""

SHOWN = 12
"""Of them, those on the LoRA's contact sheet."""


def compare(
    pipeline: StableDiffusionPipeline, weights: Path, dataset: Dataset, base: Dataset, seed: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Compares pictures without and with a LoRA to the style's and the flat drawings of the same concepts.

    All figures are of the mean latents of the pictures in the pipeline's own autoencoder. A linear probe, fitted to the
    drawings of the LoRA's training concepts in both styles, tells the styles apart whatever is drawn. A contact sheet
    is written into `folder`: without the LoRA, with it, and the style's own drawing, concept by concept.

    Args:
        pipeline: in single precision; the LoRA is loaded as a user would load it, and unloaded again.
        weights: the LoRA's file.
        dataset: the style's drawings.
        base: the denoiser's data, with the flat drawings.
        seed: picture i starts from the noise of seed + i, with and without the LoRA.
        folder: for the contact sheet.

    Returns:
        For `training` and `held_out` concepts: how many `concepts`; the mean Euclidean distance to the style's drawing,
        `before` and `after`; the share of pictures nearer to it than to the flat drawing, `nearer_before` and
        `nearer_after`; and the share that the probe takes for the style's, `probe_before` and `probe_after`, beside
        that of the `probe_drawings` and of the `probe_flat_drawings`.
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
        """Encodes the style's drawings and the flat ones."""
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
    """Returns the figures of each LoRA in the table of the family, as they were measured after training."""
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
    """Fits a ridge regression that tells two equally large sets of features (n, d) apart.

    Returns:
        A function from features (m, d) to the share of them that it takes for `styled`.
    """
    import torch

    features = torch.cat([styled, flat])
    target = torch.cat([torch.ones(len(styled)), -torch.ones(len(flat))])
    centre = features.mean(dim=0)
    spread = features - centre
    # As strong as the data itself: there are about as many numbers to fit as drawings.
    ridge = spread.square().mean() * len(features) * torch.eye(features.shape[1])
    weights = torch.linalg.solve(spread.T @ spread + ridge, spread.T @ target)
    return lambda other: float(((other - centre) @ weights > 0).float().mean())
