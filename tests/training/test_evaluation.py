"""The judges of the family: ranks, figures and distances by hand, and the whole generator with simple features."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor, nn

from sdopt.quality.features import FeatureExtractor
from sdopt.reference import MODEL
from sdopt.training.captions import choose_prompts
from sdopt.training.cards import Figure, read_evaluation, write_card, write_evaluation
from sdopt.training.data import Dataset
from sdopt.training.evaluation import Evaluation, concept_ranks, decoder_psnr, speed_up
from sdopt.training.networks import build_autoencoder, build_tiny_autoencoder


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
    drawings = torch.tensor([[0.0], [5.0], [1.0], [9.0]])
    features = torch.tensor([[0.2], [0.9], [4.0], [4.0]])
    found = concept_ranks(features, ["a", "a", "a", "c"], drawings, ["a", "a", "b", "c"])
    assert found.tolist() == [0, 1, 0, 2]


def test_figures_survive_and_say_whether_they_meet_their_target(tmp_path: Path) -> None:
    figures = [
        Figure("PSNR", (25.04,), "dB", 24),
        Figure("PSNR", (25, 23), "dB", 24),
        Figure("x", (0.1, 0.2)),
    ]
    assert [figure.met for figure in figures] == [True, False, None]
    assert [figure.shown for figure in figures] == ["25.0 dB", "25.0 → 23.0 dB", "0.1 → 0.2"]
    write_evaluation(figures, tmp_path)
    assert read_evaluation(tmp_path) == figures
    assert read_evaluation(tmp_path / "missing") == []


@pytest.mark.parametrize("model", ["emoji", "clip", "loras", "tiny_autoencoder"])
def test_the_packaged_cards_are_those_of_their_recipe_and_evaluation(model: str, tmp_path: Path) -> None:
    folder = MODEL.with_name(model)
    shutil.copytree(folder, tmp_path / model)
    (tmp_path / model / "README.md").unlink()
    write_card(tmp_path / model, model)
    card = (tmp_path / model / "README.md").read_text()
    assert card == (folder / "README.md").read_text()
    assert read_evaluation(folder)
    assert all(figure.shown in card for figure in read_evaluation(folder))
    (tmp_path / model / "evaluation.json").unlink()
    write_card(tmp_path / model, model)
    assert "Not evaluated yet" in (tmp_path / model / "README.md").read_text()


def test_the_tiny_autoencoder_is_compared_with_its_teacher_in_the_denoisers_scale() -> None:
    torch.manual_seed(0)
    teacher, tiny = build_autoencoder().eval(), build_tiny_autoencoder().eval()
    latents = torch.randn(3, 8, 8, 8)
    teacher.register_to_config(scaling_factor=2.0)
    with torch.no_grad():
        expected = teacher.decode(latents / 2).sample.clamp(-1, 1)
    # Off by 0.2 everywhere, and towards grey, for pictures are cut to [-1, 1].
    shifted = expected - 0.2 * torch.where(expected > 0, 1.0, -1.0)
    tiny.decode = lambda scaled: SimpleNamespace(sample=shifted)
    assert abs(decoder_psnr(tiny, teacher, latents) - 20.0) < 1e-3
    assert speed_up(build_tiny_autoencoder(), teacher, latents, rounds=4) > 0


@pytest.mark.slow
def test_the_packaged_model_is_judged_as_a_whole(dataset: Dataset, pipeline: StableDiffusionPipeline) -> None:
    said: list[str] = []
    figures = Evaluation(pipeline, dataset, choose_prompts(dataset, 0), Thumbnails(), note=said.append).generator()
    named = {figure.figure: figure for figure in figures}
    assert len(named) == len(figures)
    assert named["autoencoder: PSNR of held-out pictures"].values[0] > 15
    # Coloured squares and discs: sixteen concepts, some of which the model knows.
    assert named["captions seen in training: own concept among the 1 nearest of 16"].values[0] > 20
    assert all(np.isfinite(figure.values).all() for figure in figures)
    assert "autoencoder" in said
