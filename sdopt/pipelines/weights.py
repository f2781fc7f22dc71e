"""Finds the files of networks and tokenizers, and reads which tensors safetensors files hold, without their values."""

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError, with_type
from sdopt.pipelines.catalog import part_class, read_json
from sdopt.record.files import POINTER, is_pointer
from sdopt.reference import VOCABULARY

if TYPE_CHECKING:
    from transformers import CLIPTokenizer


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of its tensors: its metadata, and by name the type and the shape of each."""

    metadata: dict[str, str]
    types: dict[str, str]
    shapes: dict[str, list[int]]

    @classmethod
    def of(cls, file: Path, at: str, name: str | None = None) -> "Header":
        """Reads a file's header, and checks the file's length against it.

        Raises:
            UsageError: the file is not complete, or holds quantized weights, which would be read as plain numbers.
        """
        header = cls.of_any(file, at, name)
        way = "give the model in float32, float16 or bfloat16"
        if other := header.other_format:
            raise UsageError(f"{at}: {name or file.name} {other}; {way}")
        if quantized := header.quantized:
            raise UsageError(
                f"{at}: {name or file.name} holds quantized weights, such as {quantized} ({header.types[quantized]}), "
                f"which mean nothing without their scales; {way}"
            )
        return header

    @classmethod
    def of_any(cls, file: Path, at: str, name: str | None = None) -> "Header":
        """Reads a file's header, whatever the types of its tensors. Raises UsageError if the file is not complete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, "np") as tensors:
                slices = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118
                types = {key: str(part.get_dtype()) for key, part in slices.items()}
                shapes = {key: list(part.get_shape()) for key, part in slices.items()}
                return cls(dict(tensors.metadata() or {}), types, shapes)
        except (OSError, SafetensorError) as error:
            what = POINTER if is_pointer(file) else f"cannot be read ({error})"
            raise UsageError(f"{at}: {name or file.name} {what}") from error

    @property
    def other_format(self) -> str | None:
        """A line that names the format of weights that sdopt does not read; None if none is known."""
        for name in self.shapes:
            for end, what in _FORMATS.items():
                if name.endswith(end):
                    return f"holds {what}, such as {name}, which sdopt does not read"
        return None

    @property
    def quantized(self) -> str | None:
        """The first matrix of whole numbers, or of a float with a scale of its own; None if all are plain floats."""
        plain = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
        for name, kind in self.types.items():
            if name.endswith((".scale_weight", ".weight_scale")):
                return name
            is_matrix = len(self.shapes[name]) > 1
            if kind in plain or name.endswith("position_ids"):
                continue
            if is_matrix:
                return name
        return None


_FORMATS = {
    ".weight_scale_2": "weights of 4 bits in blocks (nvfp4)",
    ".absmax": "weights of 4 bits by bitsandbytes",
    ".wscales": "weights of 4 bits by SVDQuant (nunchaku)",
    ".qzeros": "weights in packed integers",
}
"""Formats that are not read, by the end of a name."""


def wrong_numbers(file: Path, name: str | None = None) -> list[str]:
    """Returns a line if weights in a file are NaN or infinite, or whole matrices of them zero.

    Whatever such weights take part in is noise, black or grey. Downloads that end early may leave zeros, since some
    programs make room for the whole file first. A few such matrices may be meant, as projections that were not trained.
    """
    import torch
    from safetensors import safe_open

    empty = []
    with safe_open(file, "pt") as tensors:
        for key in sorted(tensors.keys()):
            # Averages and levels of noise in a single file are not read.
            if key.startswith(("model_ema.", "denoiser.")) or "." not in key:
                continue
            tensor = tensors.get_tensor(key)
            if not (tensor.is_floating_point() and tensor.numel()):
                continue
            # Faster than `isfinite`, and a NaN among the numbers becomes both extremes.
            extremes = torch.stack(
                (tensor if tensor.element_size() > 1 else tensor.float()).aminmax()
            )
            if not extremes.isfinite().all():
                line = f"{name or file.name}: holds numbers in {key} that are not finite (NaN or infinite)"
                return [
                    f"{line}, and images would be noise; fetch or save the model again"
                ]
            if tensor.ndim > 1 and tensor.numel() >= MATRIX and not extremes.any():
                empty.append(key)
    return of_zeros(name or file.name, empty)


def of_zeros(name: str, matrices: Sequence[str]) -> list[str]:
    """Returns a line if a file holds more matrices of nothing but zeros than may be meant."""
    if len(matrices) <= _MEANT:
        return []
    line = f"{name}: holds nothing but zeros in {len(matrices)} matrices, such as {matrices[0]}"
    return [
        f"{line}, as a download that was not complete; fetch or save the model again"
    ]


MATRIX, _MEANT = 1024, 16
"""Numbers of a matrix that cannot all be zero by chance, and the most such matrices that may be meant."""


def variants_of(folder: Path, library: str) -> set[str | None]:
    """Returns the variants in which the weights of one network lie in its folder; None is files without a variant."""
    return variants_among((path.name for path in folder.glob("*")), library)


def variants_among(names: Iterable[str], library: str) -> set[str | None]:
    """Returns the variants in which files of these names hold the weights of one network."""
    stem = _stem(library)
    patterns = (
        rf"{stem}(?:\.([^.]+?))?(?:-\d+-of-\d+)?\.safetensors",
        rf"{stem}-\d+-of-\d+\.([^.]+)\.safetensors",
        rf"{stem}\.safetensors\.index(?:\.([^.]+))?\.json",
        rf"{stem}\.safetensors\.([^.]+)\.index\.json",
    )
    matches = (
        re.fullmatch(pattern, name) for name, pattern in product(names, patterns)
    )
    return {match[1] for match in matches if match}


def weight_files(
    folder: Path, library: str, variant: str | None, at: str
) -> list[Path]:
    """Returns the files of one network that its library reads: those of a variant, or else those without one.

    One of the two must be there, as far as there are safetensors files.

    Raises:
        UsageError: they are missing or incomplete, or not in safetensors files.
    """
    variants, part, stem = variants_of(folder, library), folder.name, _stem(library)
    if not variants:
        raise UsageError(f"{at}: {part}/ holds no {stem}.safetensors")
    infix = f".{variant}" if variant and variant in variants else ""
    whole = folder / f"{stem}{infix}.safetensors"
    indices = [folder / f"{stem}.safetensors.index{infix}.json"]
    if library == "diffusers":
        indices.append(folder / f"{stem}.safetensors{infix}.index.json")
    index = next((path for path in indices if path.is_file()), None)
    # If there are both, diffusers reads the shards, and transformers the whole file.
    if index is None or (library != "diffusers" and whole.is_file()):
        if not (whole.is_file() or whole.is_symlink()):
            raise UsageError(
                f"{at}: {part}/ holds shards without {indices[0].name}, which says what lies where"
            )
        return [whole]
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in places.values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{at}: {part}/{index.name} cannot be read ({with_type(error)})"
        ) from error
    there: set[tuple[str, str]] = set()
    for name in files:
        header = Header.of(folder / name, at, f"{part}/{name}")
        there.update((name, key) for key in header.shapes)
    if lost := sorted(
        f"{key} in {name}" for key, name in places.items() if (name, key) not in there
    ):
        raise UsageError(
            f"{at}: {part}/ lacks {len(lost)} tensors that {index.name} names, such as {lost[0]}"
        )
    if twice := sorted(
        (key, name) for name, key in there if places.get(key, name) != name
    ):
        key, name = twice[0]
        raise UsageError(
            f"{at}: {part}/{name} holds {key} too, which {index.name} places in {places[key]}: two savings were mixed"
        )
    return [folder / name for name in files]


def require_variant(
    found: Mapping[str, set[str | None]], variant: str | None, at: str
) -> None:
    """Raises UsageError if parts of a pipeline have files of other variants only, given those that each has."""
    listed = {}
    for name, there in found.items():
        if there:
            listed[name] = ", ".join(sorted(form or "null" for form in there))
    if variant is not None and all(variant not in there for there in found.values()):
        has = "; ".join(f"{name}/ {variants}" for name, variants in listed.items())
        raise UsageError(
            f"{at}: no part holds files of model.variant={variant}; there are {has}"
        )
    for name, there in found.items():
        if there and not {variant, None} & there:
            raise UsageError(
                f"{at}: {name}/ holds only files of a variant ({listed[name]})"
            )


def _stem(library: str) -> str:
    return "diffusion_pytorch_model" if library == "diffusers" else "model"


PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
"""Suffixes of files that can run any code when they are loaded."""


# ---- tokenizers ------------------------------------------------------------------------------------------------------

SENTENCEPIECE = "sentencepiece.bpe.model"
"""The file of an XLM-RoBERTa's vocabulary, as AltDiffusion has it: a protocol buffer, which runs no code."""

SENTENCEPIECES = (SENTENCEPIECE, "spiece.model", "tokenizer.model")
"""Names of such files: of XLM-RoBERTa, of T5 and of Gemma."""


def has_vocabulary(folder: Path) -> bool:
    """Returns whether a folder holds a complete tokenizer, in one file or in the older format of two."""
    return (folder / "tokenizer.json").is_file() or all(
        (folder / n).is_file() for n in ("vocab.json", "merges.txt")
    )


NO_VOCABULARY = "holds neither tokenizer.json nor vocab.json with merges.txt"


def lacking_vocabulary(folder: Path) -> str | None:
    """Returns why the tokenizer in a pipeline's folder cannot be read; None if it can."""
    if has_vocabulary(folder) or (folder / "vocab.txt").is_file():  # that of BERT
        return None
    pieces = [name for name in SENTENCEPIECES if (folder / name).is_file()]
    if not pieces:
        return NO_VOCABULARY
    return (
        None
        if find_spec("sentencepiece")
        else f"holds {pieces[0]}, to be read by: pip install sentencepiece"
    )


def load_tokenizer(folder: Path, vocabulary: str | None = None) -> "CLIPTokenizer":
    """Loads the tokenizer of a pipeline folder; CLIP's vocabulary comes with sdopt, if the folder has none.

    Args:
        folder: has a tokenizer, or just its `tokenizer_config.json`, which says how prompts start, end and are padded.
        vocabulary: a folder with another vocabulary than CLIP's; None is that.
    """
    from transformers import CLIPTokenizer

    if vocabulary is None and has_vocabulary(folder):
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    own = VOCABULARY if vocabulary is None else Path(vocabulary).expanduser()
    return CLIPTokenizer.from_pretrained(
        own, local_files_only=True, **tokenizer_settings(folder)
    )


def random_tokenizer(folder: Path, library: str, class_name: str) -> Any:
    """Returns a tokenizer for a model with random weights: its own, or one with a vocabulary that comes with sdopt.

    The words that a model with random weights reads make no difference, but their number does: T5 gets its prompts
    letter by letter, and others the words of CLIP.
    """
    cls = part_class(library, class_name)
    if class_name.startswith("CLIP"):
        return load_tokenizer(folder)
    if has_vocabulary(folder):
        return cls.from_pretrained(folder, local_files_only=True)
    config = read_json(folder / "tokenizer_config.json")
    longest = min(int(config.get("model_max_length", _LONGEST)), _LONGEST)
    if class_name.startswith("T5"):
        letters = [(letter, -3.0) for letter in string.printable.strip()]
        special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
        return cls(vocab=[*special, *letters], extra_ids=0, model_max_length=longest)
    vocabulary = read_json(VOCABULARY / "vocab.json")
    lines = (VOCABULARY / "merges.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#version"))
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    tokenizer = part_class("transformers", "Qwen2Tokenizer")(
        vocab=vocabulary, merges=merges, model_max_length=longest
    )
    tokenizer.chat_template = config.get("chat_template") or _CHAT
    return tokenizer


_LONGEST = 4096
"""The most tokens of a prompt, where a tokenizer names no limit or one beyond what any pipeline reads."""

_CHAT = "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
"""How a conversation becomes text, for encoders that are chat models."""


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns how the tokenizer of a pipeline folder starts, ends, pads and cuts prompts, as CLIP's class takes it."""
    config = read_json(folder / "tokenizer_config.json")
    return {
        name: config[name]
        for name in (
            "bos_token",
            "eos_token",
            "pad_token",
            "unk_token",
            "model_max_length",
        )
    }
