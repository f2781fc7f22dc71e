"""The LoRAs' data and updates, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.training.data import Dataset, Record, draw_style, icon_key
from sdopt.training.loras import TARGETS, add_lora
from sdopt.training.networks import build_denoiser
from sdopt.training.packages import STYLES, Style

RECORD = Record("2B50", "star", ("night",), 5, "flat", held_out=False, unseen_background="red")


def test_icons_are_found_by_todays_name_or_by_the_characters() -> None:
    by_character, by_label = STYLES
    assert icon_key(RECORD, by_label) == "star"
    assert icon_key(RECORD, by_character) == "whitemediumstar"
    assert icon_key(replace(RECORD, concept="2B50-FE0F"), by_character) == "whitemediumstar"
    assert icon_key(replace(RECORD, concept="1F469-200D-2695-FE0F"), by_character) == ""


def test_a_style_has_only_what_the_denoiser_knows(
    dataset: Dataset, styles: tuple[Style, ...], work_folder: Path
) -> None:
    discs, triangles = (
        draw_style(style, dataset, work_folder / "packages", held_out_concepts=3, seed=0, threads=1) for style in styles
    )
    known = {record.concept for record in dataset.records if not record.held_out}
    assert {record.concept for record in discs.records} == known
    assert len(discs) == len(triangles) == 12
    assert len(discs.indices(held_out=True)) == 3
    assert {record.style for record in discs.records} == {"fxemoji"}
    assert tuple(discs.images[0][32, 32]) == (0, 0, 0)
    assert tuple(triangles.images[0][32, 32]) == (0, 128, 0)


def test_more_held_out_concepts_than_drawings_are_a_mistake(
    dataset: Dataset, styles: tuple[Style, ...], work_folder: Path
) -> None:
    with pytest.raises(UsageError, match=r"loras.held_out_concepts=12: .* only 12 concepts"):
        draw_style(styles[0], dataset, work_folder / "packages", held_out_concepts=12, seed=0)


def test_only_the_updates_train_and_they_start_without_effect() -> None:
    import torch

    denoiser = build_denoiser().eval()
    inputs = torch.randn(2, 8, 8, 8), torch.tensor([10, 900]), torch.randn(2, 24, 144)
    with torch.no_grad():
        before = denoiser(*inputs).sample
    updates = add_lora(denoiser, rank=2)
    trained = {name for name, parameter in denoiser.named_parameters() if parameter.requires_grad}
    assert len(trained) == len(updates) > 0
    assert all(".lora_" in name for name in trained)
    assert all(any(f"{target}.lora_A" in name for name in trained) for target in TARGETS)
    with torch.no_grad():
        assert torch.allclose(denoiser(*inputs).sample, before)
