"""Finds a tokenizer's files. Loads CLIP's, or a substitute: the packaged model's words with CLIP's special tokens."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.reference import MODEL

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

_SIZE = 49_408
"""Tokens of CLIP's vocabulary."""

SENTENCEPIECE = "sentencepiece.bpe.model"
"""The file of an XLM-RoBERTa's vocabulary, as AltDiffusion has it: a protocol buffer, which runs no code."""


def has_vocabulary(folder: Path) -> bool:
    """Returns whether a folder holds a complete tokenizer, in one file or in the older format of two."""
    return (folder / "tokenizer.json").is_file() or all((folder / n).is_file() for n in ("vocab.json", "merges.txt"))


def lacking_vocabulary(folder: Path) -> str | None:
    """Returns why the tokenizer in a pipeline's folder cannot be read; None if it can."""
    if has_vocabulary(folder):
        return None
    if not (folder / SENTENCEPIECE).is_file():
        return "holds neither tokenizer.json nor vocab.json with merges.txt"
    return None if find_spec("sentencepiece") else f"holds {SENTENCEPIECE}, to be read by: pip install sentencepiece"


def load_tokenizer(folder: Path, vocabulary: Path | None = None) -> "CLIPTokenizer":
    """Loads the tokenizer of a pipeline folder, or a substitute for CLIP's if the folder has only its configuration.

    The substitute splits prompts with the packaged model's byte-level BPE, whose 2,046 tokens take the first ids of
    CLIP's 49,408, and starts, ends and pads them as the configuration says, to CLIP's length. The ids mean other words
    than CLIP's, which changes neither random weights nor the time that they take.

    Args:
        folder: has a tokenizer, or just its `tokenizer_config.json`.
        vocabulary: a folder with CLIP's own vocabulary, used instead of the substitute.
    """
    from transformers import CLIPTokenizer

    if has_vocabulary(folder):
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    if vocabulary is not None:
        length = config["model_max_length"]
        return CLIPTokenizer.from_pretrained(vocabulary, local_files_only=True, model_max_length=length, **special)
    words = json.loads((MODEL / "tokenizer" / "tokenizer.json").read_text())["model"]
    # CLIP's text encoder finds the end token as the largest id.
    vocabulary = words["vocab"] | {special["bos_token"]: _SIZE - 2, special["eos_token"]: _SIZE - 1}
    merges = [tuple(pair) for pair in words["merges"]]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=config["model_max_length"], **special)
