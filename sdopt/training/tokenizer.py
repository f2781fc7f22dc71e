"""The reference model's tokenizer: CLIP's byte-level BPE with a separate vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError

if TYPE_CHECKING:
    from transformers import CLIPTokenizer


VOCABULARY = 2048
"""Entries of the vocabulary, including the two special tokens."""

LENGTH = 24
"""Tokens of a caption after truncation or padding. The cost of cross-attention grows with this length, and the longest
training caption has about 20 tokens."""

START = "<|startoftext|>"

END = "<|endoftext|>"

WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
"""Pattern of a word, without the special tokens (Radford et al. 2021, `simple_tokenizer.py`)."""


def train_tokenizer(captions: Iterable[str], folder: Path) -> CLIPTokenizer:
    """Learns merges from `captions`, saves a tokenizer to `folder`, and returns the tokenizer loaded from there.

    The special tokens have the last two ids, as in CLIP, and the end token is also the padding token.

    Raises:
        UsageError: the captions have too few distinct words to fill the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    # Normalization and splitting must match those of `CLIPTokenizer`.
    learner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Includes every byte twice, also at a word's end, so that no prompt in any language has unknown tokens.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner.train_from_iterator(captions, trainer)
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learnt["merges"]]
    entries = list(dict.fromkeys([*alphabet, *(f"{byte}</w>" for byte in alphabet), *("".join(p) for p in merges)]))
    entries = entries[: VOCABULARY - 2]
    if len(entries) < VOCABULARY - 2:
        raise UsageError(f"the captions give {len(entries) + 2} tokens; the vocabulary needs {VOCABULARY}")
    kept = set(entries)
    merges = [pair for pair in merges if "".join(pair) in kept]
    vocabulary = {token: index for index, token in enumerate([*entries, START, END])}
    tokenizer = CLIPTokenizer(
        vocab=vocabulary,
        merges=merges,
        bos_token=START,
        eos_token=END,
        unk_token=END,
        pad_token=END,
        model_max_length=LENGTH,
    )
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    """Loads the tokenizer that `train_tokenizer` saved in `folder`.

    Raises:
        UsageError: the stage has not run.
    """
    from transformers import CLIPTokenizer

    if not (folder / "tokenizer.json").exists():
        raise UsageError(f"{folder / 'tokenizer.json'} is missing: run `sdopt train-reference stage=tokenizer` first")
    return CLIPTokenizer.from_pretrained(folder)
