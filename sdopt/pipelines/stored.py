"""Networks as they lie in a file: which tensors are of which, under the names of the original program."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import once_per_state
from sdopt.pipelines.family import Family
from sdopt.pipelines.originals import pipeline_in, prefix_in
from sdopt.pipelines.scales import (
    MARKER,
    UNREAD,
    formats_in,
    is_beside,
    multiplied,
    scales_of,
)
from sdopt.pipelines.weights import MATRIX, Header, of_zeros

if TYPE_CHECKING:
    import torch

TITLE = "modelspec.title"
"""What the author calls a model, by Stability AI's standard for metadata; GGUF files name it otherwise."""

ARCHITECTURE = "architecture"
"""Which network a GGUF file holds, by the name that llama.cpp has for it: `t5encoder`."""

_AS_THEY_ARE = ("t5", "t5encoder", "qwen2", "qwen3")
"""Architectures whose weights llama.cpp stores under other names alone; it adds 1 to norms of Gemma, and reorders rows of
Llama."""

VAE = ("first_stage_model.", "vae.")

_NUMBERS = {"F32", "F16"}
"""Types of GGUF files whose matrices become numbers once they are loaded, and are no blocks."""

_AVERAGES = "model_ema."
"""How the names of averages begin, which are of use in training alone."""

_TEXT = re.compile(
    rf"text_encoders\.(\w+?)\.(?:transformer\.(.+)|({MARKER})|(?:logit_scale|\w+_model))"
)
"""Names of a text encoder's tensors in a file of several networks; its tokenizer may lie beside it."""


@dataclass(frozen=True)
class Stored:
    """The tensors of one network in a file.

    Attributes:
        file: where they lie.
        names: for the name of each without what tells the networks of a file apart, its name in the file.
    """

    file: Path
    names: Mapping[str, str]

    def header(self) -> Header:
        """Returns the types and shapes of the tensors."""
        whole = header_of(self.file)
        types = {name: whole.types[key] for name, key in self.names.items()}
        shapes = {name: whole.shapes[key] for name, key in self.names.items()}
        return Header(whole.metadata, types, shapes)

    def scales(self) -> tuple[dict[str, str], list[str]]:
        """Returns the scales of weights, and what cannot be read: see `scales_of`; blocks of GGUF files hold their own."""
        if self.file.suffix == ".gguf":
            return {}, []
        formats = _formats(self.file)
        of_layers = {UNREAD: formats[UNREAD]} if UNREAD in formats else {}
        for name, key in self.names.items():
            layer = name.rpartition(".")[0]
            said = formats.get(key.rpartition(".")[0]) or formats.get(layer)
            if said:
                of_layers[layer] = said
        return scales_of(self.header(), of_layers)

    def unread(self) -> list[str]:
        """Returns what of the tensors cannot be read as weights, one line at most."""
        if self.file.suffix == ".gguf":
            return unread_blocks(self.file)
        return self.scales()[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Reads the tensors; those of 8 bits with scales are multiplied by them, and are in float32."""
        if self.file.suffix == ".gguf":
            return self._blocks()
        from safetensors import safe_open

        with safe_open(self.file, "pt") as opened:
            tensors = {name: opened.get_tensor(key) for name, key in self.names.items()}
        scales, _ = self.scales()
        return multiplied(tensors, scales)

    def _blocks(self) -> dict[str, torch.Tensor]:
        """Reads a GGUF file, whose matrices stay in blocks: their first dimension is that of the rows."""
        from diffusers.models.model_loading_utils import load_gguf_checkpoint
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        read = load_gguf_checkpoint(str(self.file))
        tensors = {}
        for name, key in self.names.items():
            tensor = read[key]
            tensors[name] = (
                tensor if tensor.ndim == 2 else dequantize_gguf_tensor(tensor)
            )
        return tensors

    def bytes_in_blocks(self, itemsize: int) -> float:
        """Returns the bytes of weights of a GGUF file once they are loaded, where matrices stay in their blocks.

        Args:
            itemsize: bytes of all other numbers.
        """
        import gguf

        header, total = self.header(), 0.0
        for name, shape in header.shapes.items():
            bytes_each = float(itemsize)
            if len(shape) == 2 and header.types[name] not in _NUMBERS:
                kind = gguf.GGMLQuantizationType[header.types[name]]
                numbers, stored = gguf.GGML_QUANT_SIZES[kind]
                bytes_each = stored / numbers
            total += math.prod(shape) * bytes_each
        return total

    def empty(self) -> dict[str, torch.Tensor]:
        """Returns tensors of the same shapes, without values and without scales."""
        import torch

        in_blocks = self.file.suffix == ".gguf"
        tensors = {}
        for name, shape in self.header().shapes.items():
            if in_blocks or not is_beside(name):
                tensors[name] = torch.empty(shape, device="meta")
        return tensors


@once_per_state
def header_of(file: Path) -> Header:
    """Returns what a safetensors or GGUF file says of its tensors.

    Raises:
        UsageError: the file is not complete, or reading it needs a package.
    """
    if file.suffix != ".gguf":
        return Header.of_any(file, f"model.path={file}")
    if find_spec("gguf") is None:
        raise UsageError(
            f"model.path={file}: a GGUF file, to be read by: pip install 'sdopt[gguf]'"
        )
    import gguf

    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(
            f"model.path={file}: cannot be read as GGUF ({error})"
        ) from error
    types, shapes = {}, {}
    for tensor in reader.tensors:
        types[tensor.name] = tensor.tensor_type.name
        shapes[tensor.name] = [int(size) for size in reversed(tensor.shape)]
    metadata = {}
    for key, field in {
        TITLE: "general.name",
        ARCHITECTURE: "general.architecture",
    }.items():
        if (said := reader.fields.get(field)) is not None:
            metadata[key] = bytes(said.parts[said.data[0]]).decode(errors="replace")
    return Header(metadata, types, shapes)


@once_per_state
def _formats(file: Path) -> dict[str, dict[str, Any]]:
    """Returns how a file says that its layers are stored.

    A header may name them with a prefix from before: such a name is of the layer with which it ends.
    """
    header = header_of(file)
    layers = {name.rpartition(".")[0] for name in header.shapes}
    formats = {}
    for named, said in formats_in(file, header).items():
        layer = named
        if named not in layers:
            ends = [each for each in layers if named.endswith(f".{each}")]
            layer = max(ends, key=len, default=named)
        formats[layer] = said
    return formats


def unread_blocks(file: Path) -> list[str]:
    """Returns which tensor of a GGUF file is of a type that diffusers does not read; [] if it reads all of them."""
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES

    read = {kind.name for kind in SUPPORTED_GGUF_QUANT_TYPES} | _NUMBERS
    for name, kind in header_of(file).types.items():
        if kind not in read:
            return [
                f"holds {name} in {kind}, which diffusers does not read: give the model in another type, as Q8_0 or Q4_K"
            ]
    return []


def names_of_encoder(file: Path, network: Any) -> dict[str, str]:
    """Returns the names of a text encoder's tensors in a GGUF file, as llama.cpp gives them, by those of transformers.

    What has no name in `network`, which may be without values, keeps its own.

    Raises:
        UsageError: the file is of an architecture whose weights are stored in another way.
    """
    header = header_of(file)
    import gguf

    architecture = header.metadata.get(ARCHITECTURE, "")
    if architecture not in _AS_THEY_ARE:
        raise UsageError(
            f"{file.name}: of a text encoder of the architecture {architecture or 'unknown'}, whose weights sdopt does "
            f"not read from GGUF, as those of {', '.join(_AS_THEY_ARE)}: give it as .safetensors"
        )
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    # There are no more layers than tensors.
    known = gguf.get_tensor_name_map(kinds[architecture], len(header.shapes))
    names = {}
    for name in [*network.state_dict(), "lm_head.weight"]:
        stored = None
        for wanted in (name, f"model.{name}"):
            stored = stored or known.get_name(wanted, try_suffixes=(".weight", ".bias"))
        if stored in header.shapes:
            names[name] = stored
    left = header.shapes.keys() - set(names.values())
    return names | {name: name for name in left}


def wrong_blocks(file: Path) -> list[str]:
    """Returns a line if whole matrices of a GGUF file are zero, as where a download ended early: see `wrong_numbers`."""
    import gguf

    empty = []
    for tensor in gguf.GGUFReader(file).tensors:
        is_matrix = len(tensor.shape) > 1 and tensor.n_elements >= MATRIX
        if is_matrix and not tensor.data.any():
            empty.append(tensor.name)
    return of_zeros(file.name, empty)


def kinds_of_blocks(file: Path) -> set[str]:
    """Returns in which types a GGUF file holds its matrices."""
    header = header_of(file)
    return {
        header.types[name] for name, shape in header.shapes.items() if len(shape) == 2
    }


@once_per_state
def transformer_in(file: Path) -> str | None:
    """Returns the class name of the pipeline whose transformer a file holds; None if it holds none that is known."""
    return pipeline_in(header_of(file).shapes)


def denoiser_in(file: Path) -> Stored:
    """Returns the tensors of the denoiser in a file that may hold other networks, too."""
    names = header_of(file).shapes
    prefix = prefix_in(names)
    own = (name for name in names if name.startswith(prefix))
    return Stored(file, {name.removeprefix(prefix): name for name in own})


def networks_in(
    file: Path, family: Family, classes: Mapping[str, str]
) -> dict[str, Stored]:
    """Returns the networks in one file; without prefixes, all of it is the transformer."""
    names = header_of(file).shapes
    prefix = prefix_in(names)
    if not prefix:
        return {family.denoiser: Stored(file, {name: name for name in names})}
    networks: dict[str, dict[str, str]] = {}
    for name in names:
        text = _TEXT.fullmatch(name)
        if name.startswith(prefix):
            networks.setdefault(family.denoiser, {})[name.removeprefix(prefix)] = name
        elif name.startswith(VAE):
            networks.setdefault("vae", {})[name.partition(".")[2]] = name
        elif text:
            part = _encoder_named(text[1], classes)
            if part is None:
                raise UsageError(
                    f"model.path={file}: holds a text encoder {text[1]}, which {family.title} has not"
                )
            if plain := text[2] or text[3]:
                networks.setdefault(part, {})[plain] = name
        elif name == MARKER:
            networks.setdefault(family.denoiser, {})[name] = name
        elif not name.startswith(_AVERAGES):
            raise UsageError(
                f"model.path={file}: holds {name}, which is of no network of {family.title}"
            )
    return {part: Stored(file, tensors) for part, tensors in networks.items()}


def _encoder_named(word: str, classes: Mapping[str, str]) -> str | None:
    """Returns the attribute of a text encoder by its name in a file, such as `clip_l`, `t5xxl` or `qwen3_4b`."""
    kinds: dict[str, list[str]] = {"clip": [], "t5": [], "language model": []}
    for name, class_name in classes.items():
        if not name.startswith("text_encoder"):
            continue
        if class_name.startswith("CLIP"):
            kinds["clip"].append(name)
        elif class_name.startswith(("T5", "UMT5")):
            kinds["t5"].append(name)
        else:
            kinds["language model"].append(name)
    place = 1 if word == "clip_g" else 0
    kind = (
        "clip"
        if word.startswith("clip")
        else "t5"
        if "t5" in word
        else "language model"
    )
    encoders = kinds[kind]
    return encoders[place] if place < len(encoders) else None
