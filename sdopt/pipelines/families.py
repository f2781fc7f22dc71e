"""Finds what a user's own model is, from its file, its folder or its repository: architecture, size, guidance scale."""

import math
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import (
    ARCHITECTURES,
    PACKAGED,
    class_name_of,
    distilled_of,
    read_json,
    text_to_image,
)
from sdopt.pipelines.family import Family, Guidance, family_named
from sdopt.pipelines.originals import shapes_as_config
from sdopt.pipelines.sampling import marks_in
from sdopt.pipelines.stored import header_of, transformer_in
from sdopt.pipelines.twins import calls, require_known_work, says
from sdopt.pipelines.weights import Header

UNMARKED = (
    "nothing in the file says whether it predicts velocity, as Stable Diffusion 2.1 does at 768 pixels, or noise, as "
    "2.1-base at 512 pixels: choose model=sd21 or model=sd21_base beside model.path=…"
)
"""Why a file of Stable Diffusion 2.x without marks is refused, unless the architecture is named."""


def fitting_architectures(
    kind: str, config: Mapping[str, Any], channels: int | None = None
) -> list[str]:
    """Returns the names of the architectures that come with sdopt and fit a denoiser.

    Args:
        kind: the class name of the text-to-image pipeline.
        config: of the denoiser, as far as it is known.
        channels: of a UNet's first layer, where they are known apart.
    """
    family, fitting = family_named(kind), []
    for name, (other, of_model) in _architectures().items():
        if other != kind or fits(family, config, of_model):
            continue
        if channels is None or channels == of_model["block_out_channels"][0]:
            fitting.append(name)
    return fitting


def fits(
    family: Family, config: Mapping[str, Any], other: Mapping[str, Any]
) -> list[str]:
    """Returns the keys that tell two denoisers of a family apart; [] if they are of one architecture.

    What the configuration of a transformer leaves out has its usual value.
    """
    keys = (
        family.marks
        if family.is_unet
        else [key for key in family.marks if key in config and key in other]
    )
    return [key for key in keys if config.get(key) != other.get(key)]


@cache
def _architectures() -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns for each architecture the class name of its pipeline, and the configuration of its denoiser."""
    by_name = {}
    for root in (ARCHITECTURES, PACKAGED):
        for file in sorted(root.glob("*/model_index.json")):
            kind = class_name_of(file.parent)
            by_name[file.parent.name] = (
                kind,
                read_json(file.parent / family_named(kind).denoiser / "config.json"),
            )
    return by_name


def text_width(shapes: Mapping[str, list[int]]) -> int | None:
    """Returns how many channels of text the denoiser in a single file reads, from its tensors' shapes."""
    return next(
        (
            shape[1]
            for name, shape in shapes.items()
            if name.endswith("attn2.to_k.weight")
        ),
        None,
    )


def kind_of_file(shapes: Mapping[str, list[int]]) -> str:
    """Returns the class name of the text-to-image pipeline for a single file, from its tensors' names."""
    return f"StableDiffusion{'XL' if any(name.startswith('conditioner.') for name in shapes) else ''}Pipeline"


def family_of(file: Path) -> str | None:
    """Returns the name of the architecture of a single file in the original layout; None if sdopt has none that fits.

    Raises:
        UsageError: the file is not complete, or holds weights that are not read; or it may be of two architectures.
    """
    if (kind := transformer_in(file)) is not None:
        return _published_transformer(file, kind)
    header = Header.of(file, f"model.path={file}")
    first = header.shapes.get("model.diffusion_model.input_blocks.0.0.weight")
    read = {"cross_attention_dim": text_width(header.shapes)}
    fitting = fitting_architectures(
        kind_of_file(header.shapes), read, first[0] if first else 0
    )
    if len(fitting) > 1:  # the two of Stable Diffusion 2.1 differ in what they predict
        if (noise := predicts_noise(file)) is None:
            raise UsageError(f"model.path={file}: {UNMARKED}")
        return "sd21_base" if noise else "sd21"
    return fitting[0] if fitting else None


def _published_transformer(file: Path, kind: str) -> str | None:
    """Returns the name of the published architecture of the transformer in a file; None if sdopt has none that fits.

    Raises:
        UsageError: several models have this architecture, and are sampled in different ways.
    """
    wanted = shapes_as_config(kind, header_of(file).shapes)
    fitting = []
    for name, (other, config) in _architectures().items():
        if other == kind and all(
            config.get(key) == value for key, value in wanted.items()
        ):
            fitting.append(name)
    if not fitting:
        return None
    require_known_work(file, kind, fitting[0])
    named = [name for name in (*fitting, *distilled_of(fitting)) if says(file, name)]
    if len(named) == 1:
        return named[0]
    if len(fitting) > 1:
        choice = " or ".join(f"model={name}" for name in fitting)
        raise UsageError(
            f"model.path={file}: holds {family_named(kind).title}, and nothing in it says of which model, whose steps "
            f"and guidance differ: choose {choice} beside model.path=…"
        )
    return fitting[0]


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
    kinds = {
        2 * latent + 1: "for inpainting only",
        2 * latent: "that edits an image by an instruction",
    }
    way = (
        "task=inpaint uses a text-to-image model"
        if channels == 2 * latent + 1
        else "give a text-to-image model"
    )
    kind = kinds.get(
        channels, "with a further input, such as a depth map or a small image"
    )
    return (
        f"its denoiser takes {channels} channels, but latents have {latent}: a model {kind}, which sdopt does not run; "
        + way
    )


def settings_of(
    index: Mapping[str, Any], denoiser: Mapping[str, Any], vae: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the size, the guidance scale and the steps of a pipeline, by the key of the section `model`.

    What the configurations leave out is as the published models of its family have it; of UNets, the steps are those
    that all models have by default.
    """
    family = family_in(index)
    if side := side_of(denoiser):
        size = side * factor_of(vae)
    else:
        size = (
            int(vae.get("sample_size") or family.size)
            if not family.is_unet
            else family.size
        )
    if family.is_unet:
        return {"size": size, "guidance_scale": family.scale}
    distilled = is_distilled(family, {family.denoiser: denoiser, "": index})
    scale, steps = family.scale, family.steps
    if distilled:
        scale, steps = family.distilled_scale, family.distilled_steps or steps
    return {"size": size, "guidance_scale": scale, "steps": steps}


def is_distilled(family: Family, configs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether guidance was distilled into a pipeline's weights, from the configurations of its parts."""
    if family.distilled_if is None:
        return False
    part, key = family.distilled_if
    return bool(configs.get(part, {}).get(key))


def guidance_from(family: Family, configs: Mapping[str, Mapping[str, Any]]) -> Guidance:
    """Returns how a pipeline is guided, from the configurations of its parts; that of the part "" is its own."""
    return family.distilled if is_distilled(family, configs) else family.guidance


def factor_of(vae: Mapping[str, Any]) -> int:
    """Returns how many pixels a side each latent stands for, from the configuration of an autoencoder.

    Tiny autoencoders, which name their channels otherwise, have eight.
    """
    for key in ("block_out_channels", "encoder_block_out_channels"):
        if isinstance(levels := vae.get(key), list | tuple):
            return int(2 ** (len(levels) - 1))
    return int(2 ** len(vae.get("temperal_downsample") or [None] * 3))


def latent_channels_of(vae: Mapping[str, Any]) -> int | None:
    """Returns the channels of the latents of an autoencoder, from its configuration; None if that does not say."""
    return vae.get("latent_channels") or vae.get("z_dim")


def foreign_vae(kind: str, vae: Mapping[str, Any]) -> str | None:
    """Returns a line if an autoencoder scales its latents otherwise than all published models of a kind; else None.

    Autoencoders of several families have the same tensors, and a denoiser understands the latents of one.

    Args:
        kind: the class name of the text-to-image pipeline.
        vae: the configuration of its autoencoder.
    """
    if vae.get("latents_mean"):  # as that of Playground 2.5, which has each channel's
        return None
    scale = _scale_of(vae)
    published = [_scale_of(other) for other in _published_vaes(kind, vae)]
    if scale is None or not published or scale in published:
        return None
    family = family_named(kind)
    return (
        f"vae/ scales its latents by {scale:g}, and that of {family.title} by {published[0]:g}: it may be the VAE of "
        f"another family, and images are nonsense unless the {family.denoiser} was trained with it"
    )


def _scale_of(vae: Mapping[str, Any]) -> float | None:
    """Returns by how much an autoencoder scales its latents; None if its class does so in another way."""
    usual = 0.18215 if vae.get("_class_name") == "AutoencoderKL" else None
    scale: float | None = vae.get("scaling_factor", usual)
    return scale


def _published_vaes(kind: str, like: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the configurations of a kind's published autoencoders that have the class and the channels of another."""
    same = (like.get("_class_name"), latent_channels_of(like))
    found = []
    for name, (other, _) in _architectures().items():
        vae = _read(_folder_of(name) / "vae" / "config.json")
        if other == kind and (vae.get("_class_name"), latent_channels_of(vae)) == same:
            found.append(vae)
    return found


def side_of(unet: Mapping[str, Any]) -> int | None:
    """Returns the height of the latents that a denoiser was made for, which is a number or a pair; None if unknown.

    Configurations from before diffusers 0.9 may say too little, which its pipelines put right (to 64).
    """
    size = unet.get("sample_size")
    height = size[0] if isinstance(size, list | tuple) and size else size
    if not isinstance(height, int):
        return None
    return (
        max(height, 64)
        if re.match(r"0\.[0-8]\.", str(unet.get("_diffusers_version")))
        else height
    )


def published_twin(
    index: Mapping[str, Any],
    denoiser: Mapping[str, Any],
    scheduler: Mapping[str, Any],
    names: Collection[str],
) -> str | None:
    """Returns the model that comes with sdopt and whose denoiser a pipeline has, so that it is sampled as that one.

    Z-Image and Z-Image-Turbo differ in the shift of their sigmas, and not in their networks.

    Args:
        index: its `model_index.json`.
        denoiser: the configuration of that.
        scheduler: that of its scheduler.
        names: what its author calls it.
    """
    family = family_in(index)
    levels = denoiser.get("block_out_channels") or [None]
    fitting = fitting_architectures(family.pipeline, denoiser, levels[0])
    if len(fitting) > 1:
        shift = scheduler.get("shift")
        fitting = [
            name for name in fitting if _scheduler_of(name).get("shift") == shift
        ]
    if len(fitting) != 1:
        return None
    [name] = fitting
    published = _read(_folder_of(name) / "model_index.json")
    if is_distilled(family, {family.denoiser: denoiser, "": index}) != is_distilled(
        family, {family.denoiser: denoiser, "": published}
    ):
        return None  # as the base of FLUX.2 klein
    by_size = "use_dynamic_shifting"
    if bool(scheduler.get(by_size)) != bool(_scheduler_of(name).get(by_size)):
        return None  # as FLUX.1 [schnell] where it was trained on to be guided
    for other in distilled_of([name]):
        if any(calls(said, other) for said in names):
            return other
    return name


def _folder_of(name: str) -> Path:
    return next(
        root / name for root in (ARCHITECTURES, PACKAGED) if (root / name).is_dir()
    )


def _scheduler_of(name: str) -> dict[str, Any]:
    return _read(_folder_of(name) / "scheduler" / "scheduler_config.json")


def twin_of_folder(folder: Path) -> str | None:
    """Returns the model that comes with sdopt and whose denoiser the pipeline in a folder has; see `published_twin`."""
    scheduler = _read(folder / "scheduler" / "scheduler_config.json")
    index, denoiser = _index_and_denoiser(folder)
    return published_twin(index, denoiser, scheduler, titles_of_folder(folder))


def titles_of_folder(folder: Path) -> list[str]:
    """Returns what the author calls the pipeline in a folder: the folder's name, and that which it was loaded by."""
    loaded_by = [config.get("_name_or_path") for config in _index_and_denoiser(folder)]
    return [name_of_folder(folder), *map(str, filter(None, loaded_by))]


def name_of_folder(path: Path) -> str:
    """Returns the name of a folder; in a hub's cache, where it is a hash, that of the repository."""
    return path.parents[1].name if path.parent.name == "snapshots" else path.name


def settings_of_folder(folder: Path) -> dict[str, Any]:
    """Returns the settings of the pipeline in a folder, as `settings_of`; `require_folder` says what is wrong."""
    vae = _read(folder / "vae" / "config.json")
    settings = settings_of(*_index_and_denoiser(folder), vae)
    return settings | _length_of(folder, family_of_folder(folder))


def _index_and_denoiser(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the `model_index.json` of the pipeline in a folder, and the configuration of its denoiser."""
    index = _read(folder / "model_index.json")
    return index, _read(folder / family_in(index).denoiser / "config.json")


def _length_of(folder: Path, family: Family) -> dict[str, int]:
    """Returns the number of tokens that a call must not exceed, if the tokenizer has fewer than calls usually read."""
    usual = family.encoding.tokens[-1]
    length = _read(folder / family.tokenizers[-1] / "tokenizer_config.json").get(
        "model_max_length"
    )
    return (
        {"max_sequence_length": length}
        if usual and isinstance(length, int) and length < usual
        else {}
    )


def in_float32(folder: Path) -> bool:
    """Returns whether the denoiser in a folder is stored in float32, or without one its first text encoder."""
    family = family_of_folder(folder)
    for part in (family.denoiser, *family.encoders):
        for file in sorted((folder / part).glob("*.safetensors")):
            try:
                header = Header.of_any(file, f"model.path={folder}")
            except UsageError:
                return False  # `require_model` says what is wrong
            shapes = header.shapes
            largest = max(shapes, key=lambda name: math.prod(shapes[name]), default="")
            return header.types.get(largest) == "F32"
    return False


def family_of_folder(folder: Path) -> Family:
    """Returns the family of the pipeline in a folder; Stable Diffusion's if it says nothing."""
    return family_in(_read(folder / "model_index.json"))


def family_in(index: Mapping[str, Any]) -> Family:
    """Returns the family of the pipeline of a `model_index.json`; Stable Diffusion's if that says nothing."""
    return family_named(text_to_image(index.get("_class_name")))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
