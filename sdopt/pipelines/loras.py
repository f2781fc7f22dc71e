"""Finds LoRA files, and checks whether they fit a denoiser, without loading them."""

import re
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.reference import LORAS

_DOWN = (".lora_A.weight", ".lora_down.weight", ".lora.down.weight", "_lora.down.weight")
"""Suffixes of the names of the first of a LoRA's two matrices: by peft, by kohya, by older diffusers, and by diffusers
when LoRAs were attention processors (`….attn2.processor.to_k_lora.down.weight`)."""

_TEXT_KEYS = re.compile(r"unet.*attn2[._](processor[._])?to_k[._]")
"""Names of matrices that are applied to the states of the text encoder."""


def lora_file(path: str | None, weight_name: str | None, fetch: bool = False) -> Path:
    """Returns the safetensors file of a LoRA.

    Args:
        path: a file, a folder, or a repository on the hub (`owner/name`); None stands for the packaged LoRAs.
        weight_name: the file within a folder or a repository.
        fetch: whether to download files that are not in the local cache of the hub.

    Raises:
        UsageError: the file does not exist, or is not a safetensors file.
    """
    if path is not None and _is_repository(path):
        return _hub_file(path, weight_name, fetch)
    path_given = LORAS if path is None else Path(path).expanduser()
    if path_given.is_file() and weight_name is not None:
        raise UsageError(
            f"lora.weight_name={weight_name}: only applies to a folder or a repository; lora.path is a file"
        )
    if path_given.is_dir() and weight_name is None:
        raise UsageError(
            f"lora.weight_name: name a file of {path_given}: {', '.join(_names(path_given)) or 'it holds none'}"
        )
    file = path_given / str(weight_name) if path_given.is_dir() else path_given
    if file.suffix != ".safetensors":
        raise UsageError(f"{file}: sdopt reads LoRAs from .safetensors files only, because others can run any code")
    if not file.is_file():
        there = f"; {file.parent} holds {', '.join(_names(file.parent)) or 'none'}" if file.parent.is_dir() else ""
        raise UsageError(f"{file}: no such file{there}")
    return file


def is_on_hub(path: str | None) -> bool:
    """Returns whether a LoRA comes from the hub, so that nothing is known of it before it is downloaded."""
    return path is not None and _is_repository(path)


def rank_of(file: Path) -> int:
    """Returns the highest rank among the matrices of a LoRA."""
    return max((shape[0] for name, shape in _shapes(file).items() if name.endswith(_DOWN)), default=0)


def trains_text_encoder(file: Path) -> bool:
    """Returns whether a LoRA changes a text encoder too."""
    return any(name.startswith(("text_encoder", "lora_te")) for name in _shapes(file))


def misfits(file: Path, unet: dict[str, Any] | None) -> list[str]:
    """Returns why a LoRA does not fit a denoiser's configuration; [] if it fits, or if that is not known."""
    down = {name: shape for name, shape in _shapes(file).items() if name.endswith(_DOWN)}
    if not down:
        return [f"{file.name} holds no LoRA: none of its names ends in {_DOWN[0]} or {_DOWN[1]}"]
    width = next((shape[1] for name, shape in down.items() if _TEXT_KEYS.search(name)), None)
    if unet is None or width in (None, unet.get("cross_attention_dim")):
        return []
    wanted = unet.get("cross_attention_dim")
    return [f"{file.name} was made for text states of {width} channels, and this model's have {wanted}"]


def _is_repository(path: str) -> bool:
    exists = Path(path).expanduser().exists()
    return not exists and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None and not path.endswith(".safetensors")


def _hub_file(repository: str, weight_name: str | None, fetch: bool) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if weight_name is None or not weight_name.endswith(".safetensors"):
        raise UsageError(f"lora.weight_name: name a .safetensors file of the repository {repository}")
    try:
        return Path(hf_hub_download(repository, weight_name, local_files_only=not fetch))
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"lora.path={repository}: {weight_name} is not in the local cache, and the hub cannot be reached; fetch it "
            "where there is a network, and give the file as lora.path"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"lora.path={repository}: {weight_name} could not be fetched: {reason}") from error


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _shapes(file: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file}: not a complete safetensors file ({error}); copy or fetch it again") from error
