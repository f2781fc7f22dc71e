"""Checks a model's files before anything is loaded: complete, of the right architecture, safetensors only."""

import json
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.pipelines import families
from sdopt.pipelines.catalog import (
    ALT_DIFFUSION,
    ALT_ENCODERS,
    ARCHITECTURES,
    PACKAGED,
    PIPELINES,
    architecture_folder,
    class_name_of,
    class_named,
    is_in_a_file,
    missing_alt_diffusion,
    names_in_folder,
    parts_of,
    path_of,
    read_json,
    require_kind,
)
from sdopt.pipelines.factory import KEY
from sdopt.pipelines.families import (
    fits,
    fitting_architectures,
    further_inputs,
    kind_of_file,
    text_width,
)
from sdopt.pipelines.family import Family, family_named
from sdopt.pipelines.functions import defined
from sdopt.pipelines.hub import ANY_NETWORK, base_folder
from sdopt.pipelines.stored import denoiser_in, transformer_in
from sdopt.pipelines.transformer_files import (
    base_of,
    is_transformer,
    parts_apart,
)
from sdopt.pipelines.weights import (
    NO_VOCABULARY,
    PICKLED,
    Header,
    has_vocabulary,
    require_variant,
    variants_of,
    weight_files,
)
from sdopt.schema import Model, wrong_name

_MODULAR = "modular_model_index.json"
"""The index of a modular pipeline of diffusers, whose steps have no class that is called as a whole."""

# The networks in a single file of the original layout (Rombach et al. 2022), by the prefix of its tensors' names.
_ORIGINAL: dict[str, tuple[str, ...]] = {
    "denoiser": ("model.diffusion_model.",),
    "VAE": ("first_stage_model.", "vae."),
    "text encoder": ("cond_stage_model.", "conditioner.embedders."),
}


def require_model(model: Model) -> None:
    """Checks that a model's files can be loaded, without loading or fetching them.

    Raises:
        UsageError: the model has no such weights, its name is not valid, or its files are missing, incomplete or not
            safetensors.
    """
    _require_keys(model)
    if model.weights == "packaged":
        if not (PACKAGED / model.name / "model_index.json").is_file():
            raise UsageError(
                f"model.name={model.name}: packaged models are {names_in_folder(PACKAGED)}; "
                "choose model.weights=hub, path or random"
            )
    elif model.weights == "random":
        if architecture_folder(model) is None:
            raise UsageError(
                f"model.weights=random: the architecture of '{model.name}' does not come with sdopt; "
                f"choose model={names_in_folder(ARCHITECTURES)} or {names_in_folder(PACKAGED)}"
            )
    elif model.weights == "factory":
        defined(str(model.factory), KEY)
    elif model.weights == "path":
        _require_at_path(path_of(model), model)


def _require_at_path(path: Path, model: Model) -> None:
    if is_transformer(model):
        _require_transformer(path, model)
    elif path.is_file():
        _require_original(path, model)
    else:
        require_folder(path, model)


def _require_keys(model: Model) -> None:
    """Raises UsageError for a wrong name, and for keys that these weights do not use: they would be ignored."""
    if wrong := wrong_name(model.name):
        raise UsageError(f"model.name={model.name}: {wrong}")
    file = model.path is not None and is_in_a_file(model)
    transformer = is_transformer(model)
    reads = {
        "path": (model.weights == "path", "model.weights=path"),
        "factory": (model.weights == "factory", "model=factory"),
        "base": (transformer, "model.path of a file with a transformer"),
        "parts": (transformer, "model.path of a file with a transformer"),
        "tokenizer": (
            file and not transformer,
            "model.path of a Stable Diffusion in one file",
        ),
        "revision": (model.weights == "hub", "model.weights=hub"),
        "variant": (
            model.weights in ("hub", "path") and (transformer or not file),
            "a repository or a folder",
        ),
    }
    idle = []
    for key, (read, with_what) in reads.items():
        value = getattr(model, key)
        if value is not None and not read:
            idle.append(
                f"model.{key}={value}: only applies to {with_what}; here model.weights={model.weights}"
            )
    if idle:
        raise UsageError(idle)
    needed = {"hub": "hub_id", "factory": "factory", "path": "path"}.get(model.weights)
    if needed is not None and getattr(model, needed) is None:
        raise UsageError(
            f"model.{needed}: must be given with model.weights={model.weights}"
        )


def require_folder(folder: Path, model: Model, without: Collection[str] = ()) -> None:
    """Raises UsageError if a folder does not hold a complete pipeline that sdopt runs, in safetensors files.

    Of the parts `without` weights, only the configurations must be there.
    """
    at = model.origin
    if not folder.is_dir():
        raise UsageError(f"{at}: there is no such file or folder")
    if not (folder / "model_index.json").is_file():
        what = "holds no model_index.json, as a pipeline's folder does"
        if (folder / _MODULAR).is_file():
            kind = _read_json(folder / _MODULAR, at).get("_class_name")
            what = f"is a {kind}, a modular pipeline, which sdopt does not run; sdopt runs {', '.join(PIPELINES)}"
        raise UsageError(f"{at}: {what}")
    index = _read_json(folder / "model_index.json", at)
    kind = require_kind(index, at)
    alt = kind == ALT_DIFFUSION
    if alt and (missing := missing_alt_diffusion()):
        raise UsageError([f"{at}: {reason}" for reason in missing])
    family, parts = family_named(kind), parts_of(index)
    for name in parts:
        if not (alt and name == "text_encoder" and index.get(name) in ALT_ENCODERS):
            _require_class(index.get(name), name, family.library_of(name), at)
    for name in parts:
        for file in sorted((folder / name).glob("*config.json")):
            _read_json(file, at)
    networks = [
        name for name in parts if name in family.networks and name not in without
    ]
    _require_weights(folder, family, networks, model.variant, at)
    _require_architecture(
        model, at, kind, _read_json(folder / family.denoiser / "config.json", at)
    )


def _require_weights(
    folder: Path, family: Family, parts: list[str], variant: str | None, at: str
) -> None:
    """Raises UsageError if files of a network are missing or damaged: those of the variant, or else without one."""
    require_variant(
        {name: variants_of(folder / name, family.library_of(name)) for name in parts},
        variant,
        at,
    )
    for name in parts:
        for file in weight_files(folder / name, family.library_of(name), variant, at):
            Header.of(file, at, f"{name}/{file.name}")


def _require_class(value: Any, name: str, library: str, at: str) -> None:
    """Raises UsageError if `model_index.json` names, for a part, anything other than a class of its library."""
    named = (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(part, str) for part in value)
    )
    if not named or value[0] != library or not value[1].isidentifier():
        raise UsageError(
            f"{at}: model_index.json names {json.dumps(value)} as its {name}; it must be a class of {library}: "
            "sdopt runs no code that comes with a model"
        )


def _require_transformer(path: Path, model: Model) -> None:
    """Raises UsageError if a file holds no transformer that is read, or not one for the pipeline of its base."""
    kind, named = transformer_in(path), class_named(model)
    if kind and named and kind != named:
        fitting = families.family_of(path)
        raise UsageError(
            f"{model.origin}: holds {family_named(kind).title}, not {family_named(named).title}, as model={model.name} "
            f"is; choose model={fitting or 'its own model'}"
        )
    if unread := denoiser_in(path).unread():
        raise UsageError(f"{model.origin}: {unread[0]}")  # before a base is fetched
    base = base_of(model)
    folder = Path(str(base.path))
    if base.weights == "hub":
        try:
            folder = base_folder(model)
        except UsageError:
            return  # it is fetched, and then checked
    require_folder(folder, base, without=ANY_NETWORK)
    require_folder(folder, base, without=parts_apart(model, folder))


_OF_DIFFUSERS = {
    "down_blocks.0.resnets.0.conv1.weight",
    "encoder.down_blocks.0.resnets.0.conv1.weight",
    "transformer_blocks.0.attn.to_q.weight",
}
"""Tensors of diffusers' U-Nets and ControlNets, autoencoders and transformers, in no file in the original layout."""


def _require_original(path: Path, model: Model) -> None:
    """Raises UsageError if a file is not a Stable Diffusion model in its original layout."""
    at = f"model.path={path}"
    if path.suffix in PICKLED:
        raise UsageError(
            f"{at}: a pickled file can run any code when it is loaded; sdopt reads .safetensors"
        )
    shapes = Header.of(path, at).shapes
    if _OF_DIFFUSERS & shapes.keys():
        raise UsageError(
            f"{at}: holds a single network in diffusers' names: load it into its pipeline in diffusers, save that with "
            "save_pretrained, and give the folder"
        )
    missing = []
    for part, starts in _ORIGINAL.items():
        if not any(name.startswith(starts) for name in shapes):
            missing.append(part)
    if missing:
        raise UsageError(
            f"{at}: not a complete Stable Diffusion in the original layout: it has no {' and no '.join(missing)}"
        )
    if architecture_folder(model) is None:
        raise UsageError(
            f"{at}: of no architecture that comes with sdopt ({names_in_folder(ARCHITECTURES)}): its denoiser reads "
            f"{text_width(shapes)} channels of text; load it in diffusers, save that with save_pretrained, and give "
            "the folder: model=…"
        )
    if model.tokenizer is not None and not has_vocabulary(
        Path(model.tokenizer).expanduser()
    ):
        raise UsageError(f"model.tokenizer={model.tokenizer}: {NO_VOCABULARY}")
    _require_architecture(
        model, at, kind_of_file(shapes), {"cross_attention_dim": text_width(shapes)}
    )
    channels = shapes.get("model.diffusion_model.input_blocks.0.0.weight", [0, 0])[1]
    latent = next(
        (
            shape[0]
            for name, shape in shapes.items()
            if name.endswith(".post_quant_conv.weight")
        ),
        channels,
    )
    if problem := further_inputs(channels, latent):
        raise UsageError(f"{at}: {problem}")
    # Averages and words that are trained, which only training uses.
    prefixes = (
        *chain.from_iterable(_ORIGINAL.values()),
        "model_ema.",
        "embedding_manager.",
    )
    # Single numbers and rows of numbers are marks, and levels of noise.
    if others := [
        name
        for name, shape in shapes.items()
        if len(shape) > 1 and not name.startswith(prefixes)
    ]:
        raise UsageError(
            f"{at}: holds {len(others)} tensors of a further network, such as {others[0]}, which sdopt does not run: "
            "they would be left out"
        )


def _require_architecture(
    model: Model, at: str, kind: str, config: Mapping[str, Any]
) -> None:
    """Raises UsageError if files do not have the architecture that the model names, which sets size and guidance.

    `config` is that of the denoiser, as far as it is known.
    """
    folder = architecture_folder(model)
    if folder is None:
        if (named := class_named(model)) not in (None, kind):
            raise UsageError(
                f"{at}: not of the architecture model={model.name}: a {kind}, not an {named}"
            )
        return
    family = family_named(class_name_of(folder))
    expected = _read_json(folder / family.denoiser / "config.json", at)
    if kind == family.pipeline and not (differing := fits(family, config, expected)):
        return
    fitting = fitting_architectures(kind, config)
    way = (
        f"choose model={' or '.join(fitting)}"
        if fitting
        else "sdopt has no other architecture that fits"
    )
    key = differing[0] if kind == family.pipeline else family.marks[0]
    raise UsageError(
        f"{at}: not of the architecture model={model.name}: a {kind} with {key}={config.get(key)}, "
        f"not a {family.pipeline} with {expected.get(key)}; {way}"
    )


def _read_json(file: Path, at: str) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{at}: {file} cannot be read ({error})") from error
    return content if isinstance(content, dict) else {}
