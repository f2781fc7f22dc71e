"""Checks a model's files before anything is loaded: complete, of the right architecture, safetensors only."""

import json
import re
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import (
    ALT_DIFFUSION,
    ALT_ENCODERS,
    ARCHITECTURES,
    PACKAGED,
    PIPELINES,
    architecture_folder,
    class_name_of,
    class_named,
    missing_alt_diffusion,
    names_in_folder,
)
from sdopt.pipelines.tokenizer import has_vocabulary
from sdopt.schema import Model, wrong_name

_PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl")

_NETWORKS = ("unet", "vae", "text_encoder", "text_encoder_2")

_USUAL = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "scheduler": "DDIMScheduler",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "tokenizer": "CLIPTokenizer",
    "tokenizer_2": "CLIPTokenizer",
}

_LIBRARIES = {name: "transformers" if name.startswith("t") else "diffusers" for name in _USUAL}

# The networks in a single file of the original layout (Rombach et al. 2022), by the prefix of its tensors' names.
_ORIGINAL = {
    "denoiser": ("model.diffusion_model.",),
    "VAE": ("first_stage_model.",),
    "text encoder": ("cond_stage_model.", "conditioner.embedders."),
}


def require_model(model: Model) -> None:
    """Checks that a model's files can be loaded, without loading or fetching them.

    Raises:
        UsageError: the model has no such weights, its name is not valid, or its files are missing, incomplete or not
            safetensors.
    """
    _require_no_idle_keys(model)
    if wrong := wrong_name(model.name):
        raise UsageError(f"model.name={model.name}: {wrong}")
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
    elif model.weights == "hub":
        if model.hub_id is None:
            raise UsageError("model.hub_id: model.weights=hub needs a repository, as in model.hub_id=owner/name")
    else:
        if model.path is None:
            raise UsageError("model.path: model.weights=path needs the folder of a diffusers pipeline, or a file")
        path = Path(model.path).expanduser()
        if path.is_file():
            _require_original(path, model)
        else:
            require_folder(path, model)


def _require_no_idle_keys(model: Model) -> None:
    """Raises UsageError for keys that these weights do not use: they would be ignored."""
    file = model.weights == "path" and model.path is not None and Path(model.path).expanduser().is_file()
    reads = {
        "path": (model.weights == "path", "model.weights=path"),
        "tokenizer": (file, "model.path of a single file"),
        "revision": (model.weights == "hub", "model.weights=hub"),
        "variant": (model.weights in ("hub", "path") and not file, "a repository or a folder"),
    }
    idle = [
        f"model.{key}={getattr(model, key)}: only applies to {with_what}; here model.weights={model.weights}"
        for key, (read, with_what) in reads.items()
        if getattr(model, key) is not None and not read
    ]
    if idle:
        raise UsageError(idle)


def require_folder(folder: Path, model: Model) -> None:
    """Raises UsageError if a folder does not hold a complete pipeline that sdopt runs, in safetensors files."""
    at = f"model.hub_id={model.hub_id}" if model.weights == "hub" else f"model.path={folder}"
    if not folder.is_dir():
        raise UsageError(f"{at}: there is no such folder")
    if not (folder / "model_index.json").is_file():
        raise UsageError(f"{at}: holds no model_index.json; save a pipeline there with save_pretrained")
    index = _read_json(folder / "model_index.json", at)
    if index.get("_class_name") not in PIPELINES:
        raise UsageError(
            f"{at}: is a {index.get('_class_name')}; sdopt runs StableDiffusionPipeline (SD 1.x and 2.x), "
            f"StableDiffusionXLPipeline and {ALT_DIFFUSION}"
        )
    alt = index["_class_name"] == ALT_DIFFUSION
    if alt and (missing := missing_alt_diffusion()):
        raise UsageError([f"{at}: {reason}" for reason in missing])
    for name, library in _LIBRARIES.items():
        if not name.endswith("_2") or "XL" in index["_class_name"]:
            if not (alt and name == "text_encoder" and index.get(name) in ALT_ENCODERS):
                _require_class(index.get(name), name, library, at)
            if name in _NETWORKS:
                weight_files(folder / name, model.variant, at)
    _require_architecture(
        model,
        at,
        index["_class_name"],
        _read_json(folder / "unet" / "config.json", at).get("cross_attention_dim"),
    )


def _require_class(value: Any, name: str, library: str, at: str) -> None:
    """Raises UsageError if `model_index.json` names, for a part, anything other than a class of its library."""
    named = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    if not named or value[0] != library or not value[1].isidentifier():
        raise UsageError(
            f"{at}: model_index.json names {json.dumps(value)} as its {name}; it must be a class of {library}, as in "
            f'["{library}", "{_USUAL[name]}"]: sdopt runs no code that comes with a model'
        )


def weight_files(folder: Path, variant: str | None, at: str) -> dict[Path, dict[str, list[int]]]:
    """Returns the files of one network, each with the names and shapes of its tensors.

    Raises:
        UsageError: they are missing or incomplete, or none is of the variant.
    """
    stem = "model" if folder.name.startswith("text_encoder") else "diffusion_pytorch_model"
    name = stem + (f".{variant}" if variant else "")
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    files = [path for path in found if re.fullmatch(rf"{re.escape(name)}(-\d+-of-\d+)?\.safetensors", path.name)]
    if not found:
        raise UsageError(
            f"{at}: {folder.name}/ holds no .safetensors file; sdopt loads no pickled weights: convert them, or look "
            "for the same model in that format"
        )
    if not files:
        # The variant stands between the stem and the suffix.
        others = {match[1] for path in found if (match := re.match(rf"{re.escape(stem)}\.([^.-]+)[.-]", path.name))}
        hint = f"model.variant={min(others - {'safetensors'}, default='null')}"
        wanted = f"{name}.safetensors" if variant else "file without a variant"
        raise UsageError(f"{at}: {folder.name}/ holds no {wanted} ({found[0].name} is there); try {hint}")
    parts = re.search(r"-of-(\d+)\.", files[0].name)
    if parts and len(files) != int(parts[1]):
        raise UsageError(f"{at}: {folder.name}/ holds {len(files)} of {int(parts[1])} parts; fetch it again")
    return {file: _names_in(file, at) for file in files}


def _require_original(path: Path, model: Model) -> None:
    """Raises UsageError if a file is not a Stable Diffusion model in its original layout."""
    at = f"model.path={path}"
    if path.suffix in _PICKLED:
        raise UsageError(
            f"{at}: a pickled file can run any code when it is loaded; sdopt reads .safetensors: convert it, "
            "or look for the same model in that format"
        )
    if path.suffix != ".safetensors":
        raise UsageError(f"{at}: neither the folder of a diffusers pipeline nor a .safetensors file")
    shapes = _names_in(path, at)
    missing = [part for part, starts in _ORIGINAL.items() if not any(name.startswith(starts) for name in shapes)]
    if missing:
        raise UsageError(
            f"{at}: not a complete Stable Diffusion in the original layout: it has no {' and no '.join(missing)}; "
            "a single component or an adapter cannot be run on its own"
        )
    if architecture_folder(model) is None:
        raise UsageError(
            f"{at}: a single file does not name its architecture; "
            f"choose model={names_in_folder(ARCHITECTURES)} with model.weights=path"
        )
    _require_vocabulary(model)
    width = next((shape[1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight")), None)
    xl = any(name.startswith("conditioner.") for name in shapes)
    _require_architecture(model, at, f"StableDiffusion{'XL' if xl else ''}Pipeline", width)
    channels = shapes.get("model.diffusion_model.input_blocks.0.0.weight", [0, 0])[1]
    wanted = shapes.get("first_stage_model.post_quant_conv.weight", [channels])[0]
    if channels != wanted:
        raise UsageError(
            f"{at}: its denoiser takes {channels} channels, but latents have {wanted}: a model for inpainting only, "
            "which sdopt does not run; task=inpaint uses the text-to-image model"
        )


def _require_vocabulary(model: Model) -> None:
    """Raises UsageError if a single file's vocabulary is missing: trained weights need their own vocabulary."""
    folder = architecture_folder(model)
    if folder is None or has_vocabulary(folder / "tokenizer"):
        return
    if model.tokenizer is None:
        raise UsageError(
            "model.tokenizer: a single file holds no vocabulary; give the folder of CLIP's tokenizer, which every "
            "diffusers folder of such a model has: model.tokenizer=/path/of/tokenizer"
        )
    if not has_vocabulary(Path(model.tokenizer).expanduser()):
        raise UsageError(
            f"model.tokenizer={model.tokenizer}: holds neither tokenizer.json nor vocab.json with merges.txt"
        )


def _require_architecture(model: Model, at: str, kind: str, width: int | None) -> None:
    """Raises UsageError if files do not have the architecture that the model names, which sets size and guidance."""
    folder = architecture_folder(model)
    if folder is None:
        if (named := class_named(model)) not in (None, kind):
            raise UsageError(f"{at}: not of the architecture model={model.name}: a {kind}, not an {named}")
        return
    expected = _read_json(folder / "unet" / "config.json", at)["cross_attention_dim"]
    if (kind, width) != (class_name_of(folder), expected):
        raise UsageError(
            f"{at}: not of the architecture model={model.name}: a {kind} with {width} text channels, "
            f"not a {class_name_of(folder)} with {expected}"
        )


def _names_in(file: Path, at: str) -> dict[str, list[int]]:
    """Reads the names and shapes of a file's tensors from its header, and checks the file's length against it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{at}: {file.name} is not a complete safetensors file ({error}); copy or fetch it again"
        ) from error


def _read_json(file: Path, at: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{at}: {file.name} cannot be read ({error})") from error
    return content if isinstance(content, dict) else {}
