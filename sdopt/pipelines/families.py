"""Finds what a user's own model is, from its file, its folder or its repository: architecture, size, guidance scale."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED, class_name_of, read_json, text_to_image
from sdopt.pipelines.sampling import marks_in
from sdopt.pipelines.weights import Header

UNMARKED = (
    "nothing in the file says whether it predicts velocity, as Stable Diffusion 2.1 does at 768 pixels, or noise, as "
    "2.1-base at 512 pixels: choose model=sd21 or model=sd21_base beside model.path=…"
)
"""Why a file of Stable Diffusion 2.x without marks is refused, unless the architecture is named."""


def fitting_architectures(kind: str, width: int | None, channels: int | None = None) -> list[str]:
    """Returns the names of the architectures that come with sdopt and have these properties."""
    return [
        name for name, found in _architectures().items() if found[:2] == (kind, width) and channels in (None, found[2])
    ]


@cache
def _architectures() -> dict[str, tuple[str, int, int]]:
    folders = [path.parent for root in (ARCHITECTURES, PACKAGED) for path in sorted(root.glob("*/model_index.json"))]
    unets = {folder: read_json(folder / "unet" / "config.json") for folder in folders}
    return {
        folder.name: (class_name_of(folder), unet["cross_attention_dim"], unet["block_out_channels"][0])
        for folder, unet in unets.items()
    }


def text_width(shapes: Mapping[str, list[int]]) -> int | None:
    """Returns how many channels of text the denoiser in a single file reads, from its tensors' shapes."""
    return next((shape[1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight")), None)


def kind_of_file(shapes: Mapping[str, list[int]]) -> str:
    """Returns the class name of the text-to-image pipeline for a single file, from its tensors' names."""
    return f"StableDiffusion{'XL' if any(name.startswith('conditioner.') for name in shapes) else ''}Pipeline"


def family_of(file: Path) -> str | None:
    """Returns the name of the architecture of a single file in the original layout; None if sdopt has none that fits.

    Raises:
        UsageError: the file is not complete, or holds quantized weights; or it may be of two architectures.
    """
    header = Header.of(file, f"model.path={file}")
    first = header.shapes.get("model.diffusion_model.input_blocks.0.0.weight")
    found = fitting_architectures(kind_of_file(header.shapes), text_width(header.shapes), first[0] if first else 0)
    if len(found) > 1:  # the two of Stable Diffusion 2.1 differ in what they predict
        if (noise := predicts_noise(file)) is None:
            raise UsageError(f"model.path={file}: {UNMARKED}")
        return "sd21_base" if noise else "sd21"
    return found[0] if found else None


def predicts_noise(file: Path) -> bool | None:
    """Returns what a single file of Stable Diffusion 2.x says of its prediction and its size; None if it says nothing.

    The number of steps that the published 2.1-base was trained for is a mark, by which diffusers knows it, too.
    """
    from safetensors import safe_open

    header = Header.of(file, f"model.path={file}")
    if predicts := marks_in(file).get("prediction_type"):
        return bool(predicts == "epsilon")
    if resolution := header.metadata.get("modelspec.resolution"):
        return resolution.startswith("512")
    if "global_step" in header.shapes:
        with safe_open(file, "np") as tensors:
            return bool(tensors.get_tensor("global_step") == 875_000)
    return None


def further_inputs(channels: int, latent: int) -> str | None:
    """Returns why a denoiser cannot run, if it takes more than the latents that its VAE makes; None if it does not."""
    if channels == latent:
        return None
    kinds = {2 * latent + 1: "for inpainting only", 2 * latent: "that edits an image by an instruction"}
    way = "task=inpaint uses a text-to-image model" if channels == 2 * latent + 1 else "give a text-to-image model"
    kind = kinds.get(channels, "with a further input, such as a depth map or a small image")
    return (
        f"its denoiser takes {channels} channels, but latents have {latent}: a model {kind}, which sdopt does not run; "
        + way
    )


def settings_of(index: Mapping[str, Any], unet: Mapping[str, Any], vae: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the size and the guidance scale of a pipeline, by the key of the section `model`.

    What the configurations leave out is as diffusers takes it, or as all Stable Diffusion has it: eight pixels a side
    for each latent, as of a tiny autoencoder, which names its channels otherwise.
    """
    sdxl = "XL" in text_to_image(index.get("_class_name"))
    sample, levels = side_of(unet) or (128 if sdxl else 64), vae.get("block_out_channels")
    size = sample * 2 ** (len(levels) - 1 if isinstance(levels, list) else 3)
    return {"size": size, "guidance_scale": 5.0 if sdxl else 7.5}


def side_of(unet: Mapping[str, Any]) -> int | None:
    """Returns the height of the latents that a denoiser was made for, which is a number or a pair; None if unknown.

    Configurations from before diffusers 0.9 may say too little, which its pipelines put right (to 64).
    """
    size = unet.get("sample_size")
    height = size[0] if isinstance(size, list | tuple) and size else size
    if not isinstance(height, int):
        return None
    return max(height, 64) if re.match(r"0\.[0-8]\.", str(unet.get("_diffusers_version"))) else height


def settings_of_folder(folder: Path) -> dict[str, Any]:
    """Returns the size and the guidance scale of the pipeline in a folder; `require_folder` says what is wrong."""
    files = (folder / "model_index.json", folder / "unet" / "config.json", folder / "vae" / "config.json")
    return settings_of(*map(_read, files))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
