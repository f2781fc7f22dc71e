"""The judge of the reference model: ranks and distances by hand, and the whole of it with simple features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sdopt.quality.features import FeatureExtractor
from sdopt.reference import MODEL
from sdopt.training.data import WHITE, Dataset
from sdopt.training.evaluation import (
    Drawings,
    Figure,
    at_least,
    drawings_on,
    evaluate_generator,
    ranks,
    read_evaluation,
    write_evaluation,
)
from sdopt.training.prompts import choose_prompts
from sdopt.training.references import real_pictures, records_of, write_references


class Thumbnails(FeatureExtractor):
    """A picture's own 8×8 thumbnail: simple features, but features."""

    name, dimension = "thumbnails", 3 * 64

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1) / 255, requires_grad=False)

    def _prepared(self, images: Tensor) -> Tensor:
        return images.float() * self.scale

    def _features(self, inputs: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(inputs, 8).flatten(1)


def test_ranks_count_the_concepts_that_are_nearer() -> None:
    drawings = Drawings(torch.tensor([[0.0], [5.0], [1.0], [9.0]]), ("a", "a", "b", "c"))
    found = ranks(torch.tensor([[0.2], [0.9], [4.0], [4.0]]), ["a", "a", "a", "c"], drawings)
    assert found.tolist() == [0, 1, 0, 2]


def test_features_of_drawings_are_kept_and_only_reused_for_the_same_pictures(dataset: Dataset, tmp_path: Path) -> None:
    extractor, chosen = Thumbnails(), np.arange(8)
    made = drawings_on(dataset, chosen, WHITE, extractor, tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    before = file.stat().st_mtime_ns
    again = drawings_on(dataset, chosen, WHITE, extractor, tmp_path / "kept")
    assert torch.equal(made.features, again.features)
    assert file.stat().st_mtime_ns == before
    other = drawings_on(dataset, chosen + 1, WHITE, extractor, tmp_path / "kept")
    assert not torch.equal(made.features, other.features)


def test_references_are_real_pictures_that_training_never_saw(dataset: Dataset, tmp_path: Path) -> None:
    from PIL import Image

    captions = choose_prompts(dataset, 0)["gate"]
    records = records_of(dataset, captions)
    assert not any(record.held_out for record in records)
    write_references(dataset, captions, tmp_path)
    files = sorted((tmp_path / "held_out").iterdir())
    pictures = np.stack([np.asarray(Image.open(file)) for file in files])
    assert np.array_equal(pictures, real_pictures(dataset, records))
    assert np.asarray(Image.open(tmp_path / "inputs/image.webp")).shape == (64, 64, 3)
    mask = np.asarray(Image.open(tmp_path / "inputs/mask.webp"))
    assert set(np.unique(mask)) == {0, 255}


def test_figures_survive_and_say_whether_they_meet_their_target(tmp_path: Path) -> None:
    figures = [
        at_least("vae", "PSNR", 25.04, "dB", 24),
        at_least("vae", "PSNR", 23, "dB", 24),
        Figure("clip", "x", 0.1),
    ]
    assert [figure.met for figure in figures] == [True, False, None]
    assert figures[0].shown == "25.0 dB"
    write_evaluation(figures, "thumbnails", tmp_path / "evaluation.json")
    assert read_evaluation(tmp_path / "evaluation.json") == figures
    assert read_evaluation(tmp_path / "missing.json") == []


@pytest.mark.slow
def test_the_packaged_model_is_judged_as_a_whole(dataset: Dataset, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
    prompts = choose_prompts(dataset, 0)
    said: list[str] = []
    figures = evaluate_generator(pipeline, dataset, prompts, Thumbnails(), tmp_path, note=said.append)
    named = {figure.figure: figure for figure in figures}
    assert len(named) == len(figures)
    assert named["PSNR of held-out pictures"].value > 15
    # Coloured squares and discs: sixteen concepts, some of which the model knows.
    assert named["captions seen in training: own concept among the 1 nearest of 16"].value > 20
    assert all(np.isfinite(figure.value) for figure in figures)
    assert "autoencoder" in said
