"""The CLIP's data, loss and judge, and the judges of the family, by hand; its training for a few steps (slow)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor, nn

from runners.train_reference import training_config
from sdopt.apps.training.captions import choose_prompts
from sdopt.apps.training.cards import (
    CardFigure,
    read_evaluation,
    write_card,
    write_evaluation,
)
from sdopt.apps.training.clip import (
    contrastive_loss,
    embed_visible,
    hold_out_pictures,
    may_be_mirrored,
    place_drawings,
)
from sdopt.apps.training.data import Dataset, PictureRecord
from sdopt.apps.training.evaluation import (
    Evaluation,
    clip_score,
    concept_ranks,
    decoder_psnr,
    evaluate_clip,
    ranks,
    worsens,
)
from sdopt.apps.training.networks import (
    build_autoencoder,
    build_clip,
    build_tiny_autoencoder,
)
from sdopt.apps.training.packages import STYLES
from sdopt.apps.training.stages import run
from sdopt.quality.features import FeatureExtractor
from sdopt.reference import MODEL


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
    found = concept_ranks(
        features, ["a", "a", "a", "c"], drawings, ["a", "a", "b", "c"]
    )
    assert found.tolist() == [0, 1, 0, 2]


def test_figures_survive_and_say_whether_they_meet_their_target(tmp_path: Path) -> None:
    figures = [
        CardFigure("PSNR", (25.04,), "dB", 24),
        CardFigure("PSNR", (25, 23), "dB", 24),
        CardFigure("x", (0.1, 0.2)),
    ]
    assert [figure.met for figure in figures] == [True, False, None]
    assert [figure.shown for figure in figures] == [
        "25.0 dB",
        "25.0 → 23.0 dB",
        "0.1 → 0.2",
    ]
    write_evaluation(figures, tmp_path)
    assert read_evaluation(tmp_path) == figures
    assert read_evaluation(tmp_path / "missing") == []


SOURCES = (
    "Google LLC",
    "Microsoft Corporation",
    "Miles Johnson",
    "Apache License 2.0",
    "MIT License",
)


@pytest.mark.parametrize(
    ("model", "sources"),
    [
        ("emoji", SOURCES),
        ("clip", SOURCES),
        (
            "loras",
            [
                text
                for s in STYLES
                for text in (s.package.name, s.package.holder, s.package.licence)
            ],
        ),
        ("loras/few_steps", SOURCES),
        ("tiny_autoencoder", ["those of `../emoji`"]),
    ],
)
def test_the_packaged_cards_are_those_of_recipe_and_evaluation_and_attribute_every_source(
    model: str, sources: Sequence[str], tmp_path: Path
) -> None:
    folder, made = MODEL.parent / model, tmp_path / "README.md"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    made.unlink()
    write_card(tmp_path, folder.name)
    card = made.read_text()
    assert card == (folder / "README.md").read_text()
    assert [
        text
        for text in (*sources, *(each.shown for each in read_evaluation(folder)))
        if text not in card
    ] == []
    (tmp_path / "evaluation.json").unlink()
    write_card(tmp_path, folder.name)
    assert "Not evaluated yet" in made.read_text()


def test_the_tiny_autoencoder_is_compared_with_its_teacher_in_the_denoisers_scale() -> (
    None
):
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


@pytest.mark.slow
def test_the_packaged_model_is_judged_as_a_whole(
    dataset: Dataset, pipeline: StableDiffusionPipeline
) -> None:
    said: list[str] = []
    figures = Evaluation(
        pipeline, dataset, choose_prompts(dataset, 0), Thumbnails(), note=said.append
    ).generator()
    named = {figure.figure: figure for figure in figures}
    assert len(named) == len(figures)
    assert named["autoencoder: PSNR of held-out pictures"].values[0] > 15
    # Coloured squares and discs: sixteen concepts, some of which the model knows.
    assert (
        named[
            "captions seen in training: own concept among the 1 nearest of 16"
        ].values[0]
        > 20
    )
    assert all(np.isfinite(figure.values).all() for figure in figures)
    assert "autoencoder" in said


def test_held_out_pictures_are_one_of_each_concept_which_stays_known(
    dataset: Dataset,
) -> None:
    every = hold_out_pictures(dataset, 1.0, seed=0)
    concepts = [dataset.records[i].concept for i in every]
    assert len(concepts) == len(set(concepts)) == 16
    some = hold_out_pictures(dataset, 0.5, seed=0)
    assert 0 < len(some) < 16
    assert np.array_equal(some, hold_out_pictures(dataset, 0.5, seed=0))
    assert not np.array_equal(every, hold_out_pictures(dataset, 1.0, seed=1))


def test_only_what_means_the_same_in_a_mirror_is_mirrored() -> None:
    sided = ["person walking: facing right", "left-facing fist", "leftwards hand"]
    sided += ["four o'clock", "four-thirty", "alarm clock"]
    labels = {"red apple": 4, "keycap: 2": 8, "bright star": 5} | dict.fromkeys(
        sided, 1
    )
    records = [
        PictureRecord("1F34E", label, ("fruit",), group, "noto", False, "red")
        for label, group in labels.items()
    ]
    assert {record.label for record in records if may_be_mirrored(record)} == {
        "red apple",
        "bright star",
    }


def place(colours: list[tuple[float, float, float]], seed: int = 0) -> Tensor:
    count = len(colours)
    images, alphas = torch.ones(count, 3, 64, 64), torch.zeros(count, 1, 64, 64)
    images[:, :, 20:44, 20:44] = torch.tensor([0.8, 0.1, 0.1])[:, None, None]
    alphas[:, :, 20:44, 20:44] = 1.0
    random = torch.Generator().manual_seed(seed)
    return place_drawings(
        images,
        alphas,
        torch.tensor(colours),
        torch.ones(count, dtype=torch.bool),
        random,
    )


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
    assert torch.allclose(
        whole, model.get_image_features(pixel_values=pictures).pooler_output, atol=1e-6
    )
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
    assert float(contrastive_loss(images, texts, scale, none)) == pytest.approx(
        expected
    )
    # A text that fits too is no mistake, in either direction.
    same = torch.tensor([[False, True, True], [True, False, True]])
    assert float(contrastive_loss(images, texts, scale, same)) == pytest.approx(
        0.0, abs=1e-6
    )
    # The scale stops at 100.
    most, more = (
        contrastive_loss(images + 0.1, texts, torch.tensor(s), none)
        for s in (math.log(100.0), 9.0)
    )
    assert torch.equal(most, more)


def test_ties_count_half() -> None:
    found = ranks(
        np.array([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]),
        np.array([0, 1, 0]),
    )
    assert found.tolist() == [0, 1, 2]
    assert ranks(np.zeros((5, 40)), np.arange(5)).tolist() == [19.5] * 5


def test_the_clip_score_is_a_mean_cosine_in_hundredths() -> None:
    features, texts = (
        torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]),
        torch.tensor([[1.0, 0.0]] * 2 + [[-1.0, 0.0]]),
    )
    assert clip_score(features, texts) == pytest.approx(100 / 3)


def test_monotonicity_knows_each_metrics_direction() -> None:
    assert worsens(CardFigure("CLIP score, noise", (3, 2, 1)))
    assert not worsens(CardFigure("CLIP score, noise", (1, 2, 3)))
    assert worsens(CardFigure("FID, noise", (1, 2, 3)))
    assert not worsens(CardFigure("FID, noise", (1, 2, 2)))


@pytest.mark.slow
def test_it_trains_and_writes_a_folder_that_transformers_loads(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import CLIPModel, CLIPProcessor

    monkeypatch.setattr("sdopt.apps.training.loop.LINE_SECONDS", 0.0)
    target = work_folder / "shipped"
    options = [
        "steps=60",
        "batch_size=8",
        "extra_captions=8",
        "warmup_steps=5",
        "held_out_share=0.5",
    ]
    common = [
        f"folder={work_folder}",
        f"clip.target={target}",
        "stage=clip",
        "device=cpu",
        "arithmetic=fp32",
    ]
    run(training_config([*common, *(f"clip.{option}" for option in options)]))
    losses = [
        json.loads(line)["loss"]
        for line in (work_folder / "clip/log.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < 0.8 * losses[0]
    assert (
        CLIPModel.from_pretrained(target, local_files_only=True).dtype == torch.float32
    )
    CLIPProcessor.from_pretrained(target, local_files_only=True)
    card = (target / "README.md").read_text()
    assert "60 steps of 8 pictures" in card
    assert "sdopt evaluate-reference" in card
    figures = evaluate_clip(target, Dataset.load(work_folder / "data"))
    assert len({figure.figure for figure in figures}) == len(figures) == 4 + 4 * 4 + 1
    assert all(np.isfinite(figure.values).all() for figure in figures)
