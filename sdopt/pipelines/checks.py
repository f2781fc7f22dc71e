"""Checks a model's files before anything is loaded: whole, of the right architecture, safetensors only."""

import json
import re
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED, architecture_folder, class_name_of, names_in_folder
from sdopt.pipelines.tokenizer import has_vocabulary
from sdopt.schema import Model

_PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl")

_NETWORKS = ("unet", "vae", "text_encoder", "text_encoder_2")

# What a single file of the original layout (Rombach et al. 2022) holds, by the beginning of its names.
_ORIGINAL = {
    "denoiser": ("model.diffusion_model.",),
    "VAE": ("first_stage_model.",),
    "text encoder": ("cond_stage_model.", "conditioner.embedders."),
}


def require_model(model: Model) -> None:
    """Looks at what is there, without loading or fetching it.

    Raises:
        UsageError: the model does not offer these weights, or its files are not there, not whole or not safetensors.
    """
    _require_no_idle_keys(model)
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
    """Raises UsageError for a key that these weights do not read: it would be ignored."""
    file = model.weights == "path" and model.path is not None and Path(model.path).expanduser().is_file()
    reads = {
        "path": (model.weights == "path", "model.weights=path"),
        "tokenizer": (file, "model.path of a single file"),
        "revision": (model.weights == "hub", "model.weights=hub"),
        "variant": (model.weights in ("hub", "path") and not file, "a repository or a folder"),
    }
    idle = [
        f"model.{key}={getattr(model, key)}: goes with {with_what}; here model.weights={model.weights}"
        for key, (read, with_what) in reads.items()
        if getattr(model, key) is not None and not read
    ]
    if idle:
        raise UsageError(idle)


def require_folder(folder: Path, model: Model) -> None:
    """Raises UsageError where a folder does not hold a pipeline that sdopt runs, whole and in safetensors."""
    at = f"model.hub_id={model.hub_id}" if model.weights == "hub" else f"model.path={folder}"
    if not (folder / "model_index.json").is_file():
        raise UsageError(f"{at}: there is no model_index.json; save a pipeline there with save_pretrained")
    index = _read_json(folder / "model_index.json", at)
    if index.get("_class_name") not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise UsageError(
            f"{at}: a {index.get('_class_name')}; sdopt runs StableDiffusionPipeline (SD 1.x and 2.x) and "
            "StableDiffusionXLPipeline"
        )
    for network in _NETWORKS:
        if network != "text_encoder_2" or "XL" in index["_class_name"]:
            _require_weights(folder / network, model.variant, at)
    _require_architecture(
        model,
        at,
        index["_class_name"],
        _read_json(folder / "unet" / "config.json", at).get("cross_attention_dim"),
    )


def _require_weights(folder: Path, variant: str | None, at: str) -> None:
    """One network's files, of one variant, complete and whole."""
    stem = "model" if folder.name.startswith("text_encoder") else "diffusion_pytorch_model"
    name = stem + (f".{variant}" if variant else "")
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    files = [path for path in found if re.fullmatch(rf"{re.escape(name)}(-\d+-of-\d+)?\.safetensors", path.name)]
    if not found:
        raise UsageError(f"{at}: {folder.name}/ holds no .safetensors file; sdopt loads no pickled weights")
    if not files:
        # What save_pretrained and the hub call a variant stands between the stem and the ending.
        others = {match[1] for path in found if (match := re.match(rf"{re.escape(stem)}\.([^.-]+)[.-]", path.name))}
        hint = f"model.variant={min(others - {'safetensors'}, default='null')}"
        wanted = f"{name}.safetensors" if variant else "file without a variant"
        raise UsageError(f"{at}: {folder.name}/ holds no {wanted} ({found[0].name} is there); try {hint}")
    parts = re.search(r"-of-(\d+)\.", files[0].name)
    if parts and len(files) != int(parts[1]):
        raise UsageError(f"{at}: {folder.name}/ holds {len(files)} of {int(parts[1])} parts; fetch it again")
    for file in files:
        _names_in(file, at)


def _require_original(path: Path, model: Model) -> None:
    """A single file in the layout in which Stable Diffusion was published."""
    at = f"model.path={path}"
    if path.suffix in _PICKLED:
        raise UsageError(
            f"{at}: a pickled file can run any code when it is read; sdopt reads .safetensors: convert it, "
            "or look for the same model in that format"
        )
    if path.suffix != ".safetensors":
        raise UsageError(f"{at}: neither the folder of a diffusers pipeline nor a .safetensors file")
    shapes = _names_in(path, at)
    missing = [part for part, starts in _ORIGINAL.items() if not any(name.startswith(starts) for name in shapes)]
    if missing:
        raise UsageError(
            f"{at}: not a whole Stable Diffusion in the original layout: there is no {' and no '.join(missing)} in it; "
            "a part or an adapter cannot be run alone"
        )
    if architecture_folder(model) is None:
        raise UsageError(
            f"{at}: a single file does not say how it is to be run; "
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
            f"{at}: its denoiser takes {channels} channels where latents have {wanted}: a model made for inpainting "
            "alone, which sdopt does not run; task=inpaint takes the plain one"
        )


def _require_vocabulary(model: Model) -> None:
    """Trained weights need the numbers that they were trained with: no stand-in will do."""
    folder = architecture_folder(model)
    if folder is None or has_vocabulary(folder / "tokenizer"):
        return
    if model.tokenizer is None:
        raise UsageError(
            "model.tokenizer: a single file holds no vocabulary; give the folder of CLIP's tokenizer, "
            "as it is in any diffusers folder of such a model: model.tokenizer=/path/of/tokenizer"
        )
    if not has_vocabulary(Path(model.tokenizer).expanduser()):
        raise UsageError(
            f"model.tokenizer={model.tokenizer}: holds neither tokenizer.json nor vocab.json with merges.txt"
        )


def _require_architecture(model: Model, at: str, kind: str, width: int | None) -> None:
    """A model that names a published architecture must be of it: its size, guidance and prompts follow from that."""
    folder = architecture_folder(model)
    if folder is None:
        return
    expected = _read_json(folder / "unet" / "config.json", at)["cross_attention_dim"]
    if (kind, width) != (class_name_of(folder), expected):
        raise UsageError(
            f"{at}: this is not of the architecture model={model.name}: a {kind} whose text has {width} channels, "
            f"not a {class_name_of(folder)} with {expected}"
        )


def _names_in(file: Path, at: str) -> dict[str, list[int]]:
    """Names and shapes of a file's tensors, from its header, whose lengths must add up to the file's."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{at}: {file.name} is not a whole safetensors file ({error}); copy or fetch it again"
        ) from error


def _read_json(file: Path, at: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{at}: {file.name} cannot be read ({error})") from error
    return content if isinstance(content, dict) else {}
