"""The CLIP's data, loss and judge, by hand; its training for a few steps (slow)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from runners.train_reference import training_config
from sdopt.training.cards import Figure
from sdopt.training.clip import contrastive_loss, embed_visible, hold_out_pictures, may_be_mirrored, place_drawings
from sdopt.training.data import Dataset, Record
from sdopt.training.evaluation import clip_score, evaluate_clip, ranks, worsens
from sdopt.training.networks import build_clip
from sdopt.training.stages import run


def record(label: str = "red apple", group: int = 4, style: str = "noto") -> Record:
    return Record("1F34E", label, ("fruit",), group, style, False, "red")


def test_held_out_pictures_are_one_of_each_concept_which_stays_known(dataset: Dataset) -> None:
    every = hold_out_pictures(dataset, 1.0, seed=0)
    concepts = [dataset.records[i].concept for i in every]
    assert len(concepts) == len(set(concepts)) == 16
    some = hold_out_pictures(dataset, 0.5, seed=0)
    assert 0 < len(some) < 16
    assert np.array_equal(some, hold_out_pictures(dataset, 0.5, seed=0))
    assert not np.array_equal(every, hold_out_pictures(dataset, 1.0, seed=1))


@pytest.mark.parametrize(
    ("label", "group", "allowed"),
    [
        ("red apple", 4, True),
        ("keycap: 2", 8, False),
        ("person walking: facing right", 1, False),
        ("left-facing fist", 1, False),
        ("leftwards hand", 1, False),
        ("four o'clock", 5, False),
        ("four-thirty", 5, False),
        ("alarm clock", 5, False),
        ("bright star", 5, True),
    ],
)
def test_only_what_means_the_same_in_a_mirror_is_mirrored(label: str, group: int, allowed: bool) -> None:
    assert may_be_mirrored(record(label, group)) is allowed


def place(colours: list[tuple[float, float, float]], seed: int = 0) -> Tensor:
    count = len(colours)
    images, alphas = torch.ones(count, 3, 64, 64), torch.zeros(count, 1, 64, 64)
    images[:, :, 20:44, 20:44] = torch.tensor([0.8, 0.1, 0.1])[:, None, None]
    alphas[:, :, 20:44, 20:44] = 1.0
    random = torch.Generator().manual_seed(seed)
    return place_drawings(images, alphas, torch.tensor(colours), torch.ones(count, dtype=torch.bool), random)


def test_placed_drawings_keep_their_colours_and_stand_on_their_backgrounds() -> None:
    white, blue = (1.0, 1.0, 1.0), (0.4, 0.6, 0.85)
    shown = place([white] * 20 + [blue] * 20)
    assert shown.shape == (40, 3, 64, 64)
    assert torch.equal(shown, place([white] * 20 + [blue] * 20))
    # A corner is background wherever the drawing went; white stays white, and a colour that colour.
    assert (shown[:20, :, 0, 0] == 1).all()
    corners = (shown[20:, :, 0, 0] + 1) / 2
    assert (corners - torch.tensor(blue)).abs().max() < 0.05
    centres = (shown[:, :, 32, 32] + 1) / 2
    assert (centres - torch.tensor([0.8, 0.1, 0.1])).abs().max() < 0.16
    # Some are where they were drawn and others are not.
    edges = shown[:, 0, 32].diff(dim=1).abs().argmax(dim=1)
    assert len(set(edges.tolist())) > 5


def test_with_all_patches_the_embedding_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    model = build_clip().eval().requires_grad_(False)
    pictures = torch.rand(3, 3, 64, 64)
    whole = embed_visible(model, pictures, 0.0, torch.Generator())
    assert torch.allclose(whole, model.get_image_features(pixel_values=pictures).pooler_output, atol=1e-6)
    hidden = embed_visible(model, pictures, 0.5, torch.Generator().manual_seed(0))
    assert hidden.shape == (3, 128)
    assert not torch.allclose(whole, hidden, atol=1e-3)


def test_the_loss_by_hand() -> None:
    images, texts = torch.eye(2, 3), torch.eye(3)
    scale = torch.tensor(math.log(2.0))
    none = torch.zeros(2, 3, dtype=torch.bool)
    towards_texts = -2 + math.log(math.exp(2) + 2)
    towards_images = -2 + math.log(math.exp(2) + 1)
    expected = (towards_texts + towards_images) / 2
    assert float(contrastive_loss(images, texts, scale, none)) == pytest.approx(expected)
    # A text that fits too is no mistake, in either direction.
    same = torch.tensor([[False, True, True], [True, False, True]])
    assert float(contrastive_loss(images, texts, scale, same)) == pytest.approx(0.0, abs=1e-6)
    # The scale stops at 100.
    assert torch.equal(
        contrastive_loss(images + 0.1, texts, torch.tensor(9.0), none),
        contrastive_loss(images + 0.1, texts, torch.tensor(math.log(100.0)), none),
    )


def test_ties_count_half() -> None:
    found = ranks(np.array([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]), np.array([0, 1, 0]))
    assert found.tolist() == [0, 1, 2]
    assert ranks(np.zeros((5, 40)), np.arange(5)).tolist() == [19.5] * 5


def test_the_clip_score_is_a_mean_cosine_in_hundredths() -> None:
    features, texts = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]] * 2 + [[-1.0, 0.0]])
    assert clip_score(features, texts) == pytest.approx(100 / 3)


def test_monotonicity_knows_each_metrics_direction() -> None:
    assert worsens(Figure("CLIP score, noise", (3, 2, 1)))
    assert not worsens(Figure("CLIP score, noise", (1, 2, 3)))
    assert worsens(Figure("FID, noise", (1, 2, 3)))
    assert not worsens(Figure("FID, noise", (1, 2, 2)))


@pytest.mark.slow
def test_it_trains_and_writes_a_folder_that_transformers_loads(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import CLIPModel, CLIPProcessor

    monkeypatch.setattr("sdopt.training.loop.LINE_SECONDS", 0.0)
    target = work_folder / "shipped"
    options = [
        f"folder={work_folder}",
        f"clip.target={target}",
        "stage=clip",
        "device=cpu",
        "arithmetic=fp32",
        "clip.batch_size=8",
        "clip.extra_captions=8",
        "clip.warmup_steps=5",
        "clip.held_out_share=0.5",
    ]
    run(training_config([*options, "clip.steps=60"]))
    losses = [json.loads(line)["loss"] for line in (work_folder / "clip/log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.8 * losses[0]
    assert CLIPModel.from_pretrained(target, local_files_only=True).dtype == torch.float32
    CLIPProcessor.from_pretrained(target, local_files_only=True)
    card = (target / "README.md").read_text()
    assert "60 steps of 8 pictures" in card
    assert "sdopt evaluate-reference" in card
    figures = evaluate_clip(target, Dataset.load(work_folder / "data"))
    assert len({figure.figure for figure in figures}) == len(figures) == 4 + 4 * 4 + 1
    assert all(np.isfinite(figure.values).all() for figure in figures)
