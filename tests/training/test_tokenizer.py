"""The tokenizer's shape, its round trip and its save format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sdopt.errors import UsageError
from sdopt.reference import MODEL
from sdopt.training.tokenizer import LENGTH, VOCABULARY, load_tokenizer, train_tokenizer


def pseudo_words(count: int) -> list[str]:
    """Enough distinct words to fill the vocabulary."""
    random = np.random.default_rng(0)
    return ["".join(random.choice(list("abcdefghijklmnop"), 6)) for _ in range(count)]


def test_training_fills_the_vocabulary_and_round_trips(tmp_path: Path) -> None:
    words = pseudo_words(3000)
    tokenizer = train_tokenizer([" ".join(words[i : i + 5]) for i in range(0, 3000, 5)], tmp_path / "tokenizer")
    assert len(tokenizer) == VOCABULARY
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2046, 2047, 2047)
    ids = tokenizer("Abc, DEF ghi", padding="max_length", truncation=True, max_length=LENGTH).input_ids
    assert len(ids) == LENGTH
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc , def ghi"


def test_too_few_captions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2048"):
        train_tokenizer(["one two three"], tmp_path)


@pytest.mark.parametrize("text", ["police officer", "a woman 's hat", "señor ångström 日本 🦊"])
def test_the_packaged_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = load_tokenizer(MODEL / "tokenizer")
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_a_missing_tokenizer_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stage=tokenizer"):
        load_tokenizer(tmp_path)
