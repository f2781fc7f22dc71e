"""Finds a tokenizer's files, and loads CLIP's: a single file and random weights take the vocabulary that sdopt has."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import read_json
from sdopt.reference import VOCABULARY

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

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


def require_vocabulary(folder: str) -> Path:
    """Returns the folder of `model.tokenizer`. Raises UsageError if it holds no vocabulary."""
    found = Path(folder).expanduser()
    if not has_vocabulary(found):
        raise UsageError(f"model.tokenizer={folder}: holds neither tokenizer.json nor vocab.json with merges.txt")
    return found


def load_tokenizer(folder: Path, vocabulary: str | None = None) -> "CLIPTokenizer":
    """Loads the tokenizer of a pipeline folder; CLIP's vocabulary comes with sdopt, if the folder has none.

    Args:
        folder: has a tokenizer, or just its `tokenizer_config.json`, which says how prompts start, end and are padded.
        vocabulary: a folder with another vocabulary than CLIP's; None is that.

    Raises:
        UsageError: that folder holds no vocabulary.
    """
    from transformers import CLIPTokenizer

    if vocabulary is not None:
        own = require_vocabulary(vocabulary)
        return CLIPTokenizer.from_pretrained(own, local_files_only=True, **tokenizer_settings(folder))
    if has_vocabulary(folder):
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    return CLIPTokenizer.from_pretrained(VOCABULARY, local_files_only=True, **tokenizer_settings(folder))


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns how the tokenizer of a pipeline folder starts, ends, pads and cuts prompts, as CLIP's class takes it."""
    config = read_json(folder / "tokenizer_config.json")
    return {name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token", "model_max_length")}
