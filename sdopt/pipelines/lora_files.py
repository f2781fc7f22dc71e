"""Finds LoRA files and reads what they hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError
from sdopt.pipelines.hub import fetch_files
from sdopt.pipelines.transformer_loras import MATRIX as ANY_MATRIX
from sdopt.pipelines.transformer_loras import Scales, scales_beside
from sdopt.pipelines.weights import Header
from sdopt.reference import LORAS

if TYPE_CHECKING:
    import torch

MATRIX = re.compile(r"(.+?)[._]lora(?:_linear_layer)?[._](A|B|down|up)\.weight")
"""The names of a LoRA's two matrices, by peft (`….lora_A.weight`), by kohya (`….lora_down.weight`), by older diffusers
(`….lora.down.weight`, `….lora_linear_layer.down.weight`), and by diffusers when LoRAs were attention processors
(`….attn2.processor.to_k_lora.down.weight`). Groups: the module, and which of its matrices it is."""

ALPHA = ".alpha"
"""The suffix of the number that, divided by the rank, scales a module's update."""

BIAS = ".lora_B.bias"

USUAL_NAME = "pytorch_lora_weights.safetensors"
"""The name under which diffusers saves a LoRA, and which it looks for if none is given."""


def lora_file(path: str | None, weight_name: str | None, fetch: bool = False) -> Path:
    """Returns the safetensors file of a LoRA.

    Without a path, it is a packaged one, and without a name the usual one; `fetch` downloads what is not in the local
    cache of the hub.

    Raises:
        UsageError: the file does not exist, or is not a safetensors file.
    """
    if path is not None and is_on_hub(path):
        name = weight_name or USUAL_NAME
        at = f"lora.path={path}" + ("" if weight_name else " without lora.weight_name")
        if not name.endswith(".safetensors"):
            raise UsageError(
                f"lora.weight_name: name a .safetensors file of the repository {path}"
            )
        [file] = fetch_files(path, [name], at, fetch)
        return file
    path_given = LORAS if path is None else Path(path).expanduser()
    if path_given.is_file() and weight_name is not None:
        raise UsageError(
            f"lora.weight_name={weight_name}: only applies to a folder or a repository; lora.path is a file"
        )
    if path is not None and weight_name is None and (path_given / USUAL_NAME).is_file():
        weight_name = USUAL_NAME
    if path_given.is_dir() and weight_name is None:
        names = ", ".join(
            sorted(file.name for file in path_given.glob("*.safetensors"))
        )
        raise UsageError(
            f"lora.weight_name: name a file of {path_given}: {names or 'it holds none'}"
        )
    file = path_given / str(weight_name) if path_given.is_dir() else path_given
    if file.suffix != ".safetensors":
        raise UsageError(
            f"{file}: sdopt reads LoRAs from .safetensors files only, because others can run any code"
        )
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    return file


def is_on_hub(path: str | None) -> bool:
    """Returns whether a LoRA comes from the hub, so that nothing is known of it before it is downloaded."""
    if (
        path is None
        or Path(path).expanduser().exists()
        or path.endswith((".safetensors", ".ckpt", ".pt", ".bin"))
    ):
        return False
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None


def rank_of(file: Path) -> int:
    """Returns the highest rank among the matrices of a LoRA, however its trainer names them."""
    ranks = [0]
    for name, shape in header_of_lora(file).shapes.items():
        matrix = ANY_MATRIX.fullmatch(name)
        if matrix and matrix[3] in ("A", "down"):
            ranks.append(shape[0])
    return max(ranks)


def has_biases(file: Path) -> bool:
    """Returns whether a LoRA adds to biases, too."""
    return any(name.endswith(BIAS) for name in header_of_lora(file).shapes)


def trains_text_encoder(file: Path) -> bool:
    """Returns whether a LoRA changes a text encoder too."""
    return any(
        name.startswith(("text_encoder", "lora_te"))
        for name in header_of_lora(file).shapes
    )


def tensors_of(file: Path) -> dict[str, torch.Tensor] | None:
    """Returns the tensors of a LoRA as diffusers must get them, or None if it can read the file itself.

    PyTorch does not multiply numbers of 8 bits, which some files store to be small. And where alphas differ, or some
    are missing, diffusers scales some layers by another one's, and it reads alphas beside kohya's names only: here such
    alphas are multiplied into the weights. It knows kohya's names of matrices only beside kohya's names of modules.
    """
    import torch

    stored = read_lora(file)
    tensors = _renamed(stored)
    alphas = {float(tensors[name]) for name in tensors if name.endswith(ALPHA)}
    if alphas and (len(alphas) > 1 or not _all_by_kohya(tensors)):
        return scaled_tensors(file)
    in_8_bits = any(tensor.element_size() == 1 for tensor in stored.values())
    if tensors.keys() == stored.keys() and not in_8_bits:
        return None
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def _all_by_kohya(tensors: Collection[str]) -> bool:
    """Returns whether all modules are named as kohya's scripts name them, and have an alpha."""
    return all(
        module.startswith("lora_") and module + ALPHA in tensors
        for module in pairs_in(tensors)
    )


def scaled_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a UNet's LoRA in float32, with the scale of each module in its second matrix and its bias.

    Without alphas, the scales are those that the header of the file says.
    """
    import torch

    stored = _renamed(read_lora(file))
    said = scales_beside(file, header_of_lora(file).metadata)
    tensors = {}
    for name, tensor in stored.items():
        if not name.endswith(ALPHA):
            tensors[name] = tensor.to(torch.float32)
    for module, pair in pairs_in(tensors).items():
        rank = tensors[pair["down"]].shape[0]
        alpha = stored.get(module + ALPHA)
        if alpha is not None:
            scale = float(alpha) / rank
        else:
            network, _, layer = module.partition(".")
            scale = said.get(network, Scales()).of(layer, rank)
        for name in (pair["up"], module + BIAS):
            if name in tensors:
                tensors[name] = tensors[name] * scale
    return tensors


def padded(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a LoRA with all matrices of one rank: what they lack is zeros, which change nothing."""
    import torch

    filled = dict(tensors)
    for pair in pairs_in(tensors).values():
        for name, dimension in ((pair["down"], 0), (pair["up"], 1)):
            matrix = filled[name]
            shape = list(matrix.shape)
            shape[dimension] = rank - shape[dimension]
            zeros = torch.zeros(shape, dtype=matrix.dtype)
            filled[name] = torch.cat([matrix, zeros], dimension)
    return filled


def _renamed(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors with peft's names of matrices, except beside kohya's names of modules."""
    tensors = {}
    for name, tensor in stored.items():
        renamed = name.replace(".lora_down.", ".lora_A.")
        renamed = renamed.replace(".lora_up.", ".lora_B.")
        tensors[name if name.startswith("lora_") else renamed] = tensor
    return tensors


def pairs_in(tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the names of the two matrices (`down`, `up`) of each module."""
    pairs: dict[str, dict[str, str]] = {}
    for name in tensors:
        matrix = MATRIX.fullmatch(name)
        if matrix:
            which = "down" if matrix[2] in ("A", "down") else "up"
            pairs.setdefault(matrix[1], {})[which] = name
    return pairs


def header_of_lora(file: Path) -> Header:
    """Returns the types and shapes of a LoRA's tensors."""
    return Header.of_any(file, str(file.parent))


def read_lora(file: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a LoRA as they are stored."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(file)
    return found
