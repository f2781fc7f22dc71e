"""Fetching, matching, rendering, splitting, captioning and reading, without a network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from runners.train_reference import main as train_reference
from sdopt.apps.training import captions
from sdopt.apps.training.captions import (
    caption,
    choose_prompts,
    draw_background,
    on_background,
)
from sdopt.apps.training.data import (
    BACKGROUNDS,
    WHITE,
    Dataset,
    PictureRecord,
    render,
    svg,
)
from sdopt.apps.training.networks import (
    LENGTH,
    VOCABULARY,
    load_tokenizer,
    train_tokenizer,
)
from sdopt.apps.training.packages import (
    EMOJIBASE,
    DataError,
    DrawingSet,
    Package,
    fetch,
)
from sdopt.errors import UsageError
from sdopt.reference import MODEL

RECORD = PictureRecord(
    "1F46E",
    "police officer",
    ("cop", "law"),
    1,
    "noto",
    held_out=False,
    unseen_background="red",
)


def test_flags_components_and_letters_are_left_out_and_whole_concepts_held_out(
    dataset: Dataset,
) -> None:
    assert len(dataset) == 16 * 4
    assert dataset.images.shape == (64, 64, 64, 3)
    training, held_out = (set(dataset.labels(held_out=each)) for each in (False, True))
    assert training | held_out >= {"red square", "blue circle"}
    assert not {"flag: nowhere", "red hair", "letter a"} & (training | held_out)
    assert len(held_out) == 4
    assert not training & held_out


def test_a_data_set_survives_saving(dataset: Dataset, tmp_path: Path) -> None:
    dataset.save(tmp_path / "data")
    again = Dataset.load(tmp_path / "data")
    assert again.records == dataset.records
    assert np.array_equal(again.images, dataset.images)
    assert np.array_equal(again.alphas, dataset.alphas)


def test_an_archive_that_is_not_the_pinned_one_is_refused(
    archives: tuple[Path, Package, tuple[DrawingSet, ...]],
) -> None:
    folder, names, _ = archives
    with pytest.raises(DataError, match="not the pinned"):
        fetch(replace(names, integrity="sha512-else"), folder)


def test_without_npm_the_command_ends_with_3_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train_reference([f"folder={tmp_path}", "stage=data"]) == 3
    assert (
        f"npm is needed to fetch {EMOJIBASE.name}@{EMOJIBASE.version}"
        in capsys.readouterr().err
    )


def test_aliases_are_followed_and_mirrored() -> None:
    icons = {
        "width": 32,
        "height": 32,
        "icons": {
            "left": {"body": '<rect x="0" y="0" width="16" height="32" fill="black"/>'}
        },
        "aliases": {
            "right": {"parent": "left", "hFlip": True},
            "again": {"parent": "right", "hFlip": True},
        },
    }
    left, right, again = (
        render(svg(icons, name) or "") for name in ("left", "right", "again")
    )
    assert svg(icons, "else") is None
    assert tuple(left[32, 0]) == (0, 0, 0, 255)
    assert tuple(left[32, 63]) == (255, 255, 255, 0)
    assert np.array_equal(left[:, ::-1], right)
    assert np.array_equal(left, again)


def test_a_drawing_can_stand_on_any_colour(dataset: Dataset) -> None:
    index = next(
        i for i, record in enumerate(dataset.records) if record.label == "red circle"
    )
    blue, white = dataset.on(
        np.array([index, index]), np.array([(100, 150, 220), WHITE], np.uint8)
    )
    assert np.array_equal(white, dataset.images[index])
    assert tuple(blue[0, 0]) == (100, 150, 220)
    assert tuple(blue[32, 32]) == (255, 0, 0)
    edge = (dataset.alphas[index] > 100) & (dataset.alphas[index] < 150)
    assert edge.any()
    # Half covered is half red, half blue.
    assert np.abs(blue[edge].mean(axis=0) - (177, 75, 110)).max() < 15


def test_training_never_shows_the_unseen_background() -> None:
    random = np.random.default_rng(0)
    drawn = [draw_background(RECORD, random, share=0.5) for _ in range(600)]
    assert set(drawn) == {None, *BACKGROUNDS} - {"red"}
    assert 0.4 < np.mean([name is None for name in drawn]) < 0.6
    assert all(
        "police officer on an orange background" in caption(RECORD, random, "orange")
        for _ in range(20)
    )


def test_prompts_are_disjoint_and_repeatable(dataset: Dataset) -> None:
    prompts = choose_prompts(dataset, seed=0)
    assert prompts == choose_prompts(dataset, seed=0)
    assert len(prompts["held_out"]) == 4
    assert len(prompts["gate"]) == 12
    assert len(prompts["contact_sheet"]) == 3
    assert not set(prompts["held_out"]) & (
        set(prompts["training"]) | set(prompts["contact_sheet"])
    )
    unseen = {
        record.label: record.unseen_background
        for record in dataset.records
        if not record.held_out
    }
    assert set(prompts["gate"]) == {
        on_background(label, colour) for label, colour in unseen.items()
    }


def test_references_are_real_pictures_that_training_never_saw(
    dataset: Dataset, tmp_path: Path
) -> None:
    chosen = choose_prompts(dataset, 0)["gate"]
    records = captions.records_of(dataset, chosen)
    assert not any(record.held_out for record in records)
    captions.write_references(dataset, chosen, tmp_path)
    pictures = np.stack(
        [
            np.asarray(Image.open(file))
            for file in sorted((tmp_path / "held_out").iterdir())
        ]
    )
    assert np.array_equal(pictures, captions.real_pictures(dataset, records))
    assert np.asarray(Image.open(tmp_path / "inputs/image.webp")).shape == (64, 64, 3)
    assert set(np.unique(np.asarray(Image.open(tmp_path / "inputs/mask.webp")))) == {
        0,
        255,
    }


def test_training_fills_the_vocabulary_and_round_trips(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2048"):
        train_tokenizer(["one two three"], tmp_path)
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefghijklmnop"), 6)) for _ in range(3000)]
    tokenizer = train_tokenizer(
        [" ".join(words[i : i + 5]) for i in range(0, 3000, 5)], tmp_path / "tokenizer"
    )
    assert len(tokenizer) == VOCABULARY
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        2046,
        2047,
        2047,
    )
    ids = tokenizer(
        "Abc, DEF ghi", padding="max_length", truncation=True, max_length=LENGTH
    ).input_ids
    assert len(ids) == LENGTH
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc , def ghi"


def test_the_packaged_tokenizer_round_trips_any_text() -> None:
    text, tokenizer = (
        "a woman 's hat, señor ångström 日本 🦊",
        load_tokenizer(MODEL / "tokenizer"),
    )
    assert tokenizer.decode(
        tokenizer(text).input_ids, skip_special_tokens=True
    ) == text.replace(",", " ,")
