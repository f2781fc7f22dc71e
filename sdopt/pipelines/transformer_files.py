"""Transformers in files of the web: one network alone or several together, beside a pipeline that has the other parts.

A file names its tensors as the original program does. Weights of 8 bits are multiplied by their scales, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError, some_of
from sdopt.pipelines.catalog import (
    class_name_of,
    part_class,
    parts_in,
    path_of,
    read_json,
)
from sdopt.pipelines.families import latent_channels_of
from sdopt.pipelines.family import family_named
from sdopt.pipelines.latents import have_other_latents, size_of_latents
from sdopt.pipelines.originals import renamed
from sdopt.pipelines.parts import kept_in_float32, quiet, shape_of
from sdopt.pipelines.random_weights import empty_network
from sdopt.pipelines.stored import (
    VAE,
    Stored,
    header_of,
    names_of_encoder,
    networks_in,
    transformer_in,
    wrong_blocks,
)
from sdopt.pipelines.weights import Header, variants_of, weight_files, wrong_numbers
from sdopt.schema import Model

if TYPE_CHECKING:
    import torch


def is_transformer(model: Model) -> bool:
    """Returns whether a model is a file with a transformer, whose pipeline lies elsewhere."""
    if model.weights != "path" or model.path is None:
        return False
    file = Path(model.path).expanduser()
    if not file.is_file() or file.suffix not in (".safetensors", ".gguf"):
        return False
    try:
        return (
            file.suffix == ".gguf"
            or model.base is not None
            or transformer_in(file) is not None
        )
    except UsageError:
        return False  # `require_model` says what is wrong


def is_gguf(model: Model) -> bool:
    """Returns whether a model's transformer stays in the blocks of few bits of a GGUF file."""
    return is_transformer(model) and str(model.path).endswith(".gguf")


def base_of(model: Model) -> Model:
    """Returns the pipeline that has the other parts of a model that is a file with a transformer.

    Raises:
        UsageError: none is named.
    """
    named = model.base or model.hub_id
    if named is None:
        kind = transformer_in(path_of(model))
        title = family_named(kind).title if kind else "transformer"
        raise UsageError(
            f"model.path={model.path}: holds {title} without all of its encoders and its VAE: name the folder or the "
            "repository of a whole pipeline that has them, as model.base=FOLDER, or its model beside model.path"
        )
    if model.base is not None and Path(model.base).expanduser().exists():
        return Model(
            model.name,
            "path",
            path=str(Path(model.base).expanduser()),
            variant=model.variant,
        )
    return Model(model.name, "hub", hub_id=named, variant=model.variant)


def source_of(model: Model) -> str:
    """Returns where the last part of a model comes from, as `model.weights` names it: that of a base is on the hub."""
    if is_transformer(model) and (model.base or model.hub_id):
        return base_of(model).weights
    return model.weights


def stored_parts(model: Model, folder: Path) -> dict[str, Stored]:
    """Returns the networks of a model that lie in files, by the attributes of the pipeline in its base's `folder`.

    Raises:
        UsageError: a file is missing or not complete, or holds a part that the pipeline has not.
    """
    classes = {name: class_name for name, (_, class_name) in parts_in(folder).items()}
    family = family_named(class_name_of(folder))
    found = networks_in(path_of(model), family, classes)
    for part, path in (model.parts or {}).items():
        if part not in family.networks or part == family.denoiser:
            raise UsageError(
                f"model.parts.{part}: the parts of {family.title} are {', '.join(family.networks[1:])}"
            )
        if path is None:
            found.pop(part, None)
            continue
        file = Path(path).expanduser()
        is_encoder = part.startswith("text_encoder")
        if is_encoder and file.is_file() and file.suffix == ".gguf":
            network = empty_network(folder / part, *parts_in(folder)[part])
            found[part] = Stored(file, names_of_encoder(file, network))
            continue
        if not file.is_file() or file.suffix != ".safetensors":
            others = ", or a .gguf file" if is_encoder else ""
            raise UsageError(
                f"model.parts.{part}={path}: must be a .safetensors file{others}"
            )
        names = {}
        for name in header_of(file).shapes:
            plain = (
                name.partition(".")[2]
                if part == "vae" and name.startswith(VAE)
                else name
            )
            names[plain] = name
        found[part] = Stored(file, names)
    return found


def without_parts(model: Model, folder: Path) -> list[str]:
    """Returns the parts of a pipeline that a model leaves out, with their tokenizers.

    Raises:
        UsageError: the pipeline needs one of them.
    """
    family = family_named(class_name_of(folder))
    left = [part for part, path in (model.parts or {}).items() if path is None]
    if needed := [part for part in left if part not in family.optional]:
        raise UsageError(
            f"model.parts.{needed[0]}=null: {family.title} does not run without it"
        )
    return left + [part.replace("text_encoder", "tokenizer") for part in left]


def parts_apart(model: Model, folder: Path) -> set[str]:
    """Returns the parts whose weights the folder of the base need not have: they lie in files, or are left out."""
    if not is_transformer(model):
        return set()
    return {*stored_parts(model, folder), *without_parts(model, folder)}


# ------------------------------------------------------------------------------------------------------------- checks


def problems(model: Model, folder: Path) -> list[str]:
    """Returns why networks in files cannot be loaded as parts of the pipeline in `folder`; [] if all of them can."""
    found = []
    try:
        parts = stored_parts(model, folder)
        for part, stored in parts.items():
            found += [
                f"{stored.file.name}: {problem}"
                for problem in _problems_of(part, stored, folder)
            ]
        for file in dict.fromkeys(stored.file for stored in parts.values()):
            in_blocks = file.suffix == ".gguf"
            found += wrong_blocks(file) if in_blocks else wrong_numbers(file)
    except UsageError as error:
        return [problem.removeprefix(f"{model.origin}: ") for problem in error.problems]
    return found


def _problems_of(part: str, stored: Stored, folder: Path) -> list[str]:
    if wrong := stored.unread():
        return wrong
    if part.startswith("text_encoder"):
        _, faults = _text_encoder(stored.empty(), part, folder, None)
        return faults
    network = empty_network(folder / part, *parts_in(folder)[part])
    placed, left = _placed(stored.empty(), part, network)
    faults = _faults(placed, left, network)
    if not faults and type(network).__name__ == "AutoencoderKL":
        return _of_another_family(stored, network, folder / part)
    return faults


def _of_another_family(stored: Stored, network: Any, folder: Path) -> list[str]:
    """Returns a line if a VAE's latents are not those of the base's VAE, or not of the size for which that scales them.

    Those of FLUX.1 and of SD 3 have the same tensors, and those of Stable Diffusion 1.x and of SDXL, whose latents are
    nearly of one size; and a file does not say how its latents are scaled.
    """
    import torch

    placed, _ = _placed(stored.tensors(), "vae", network)
    vae = _filled(network, placed, folder, torch.float32)
    size = size_of_latents(vae)
    if size is None:
        return []
    of_base = vae_of_base(folder)
    if of_base is not None and have_other_latents(vae, of_base):
        what = "encodes pictures to latents that the VAE of the base does not decode"
    elif not 1 / _APART < size < _APART:
        by = "by the scaling_factor of the base, and not of about 1"
        what = f"encodes pictures to latents of {size:.2g} {by}"
    else:
        return []
    return [f"{what}: it is the VAE of another family, and images would be nonsense"]


def vae_of_base(folder: Path) -> Any:
    """Returns the VAE in a folder of a base, in float32; None if its weights are not there, or are damaged."""
    import torch

    variants = variants_of(folder, "diffusers")
    variant = None if None in variants else min(filter(None, variants), default=None)
    try:
        for file in weight_files(folder, "diffusers", variant, ""):
            Header.of(file, "")
        class_name = read_json(folder / "config.json")["_class_name"]
        with quiet():
            return part_class("diffusers", class_name).from_pretrained(
                folder,
                variant=variant,
                use_safetensors=True,
                local_files_only=True,
                dtype=torch.float32,
            )
    except (UsageError, OSError, ValueError, RuntimeError):
        return None  # a file takes its place


def uncompared_vae(model: Model, folder: Path) -> str | None:
    """Returns a line if a VAE's file may be of another family than its base in `folder`, and nothing tells.

    Latents of Stable Diffusion 1.x and of SDXL have four channels, and are nearly of one size.
    """
    file = (model.parts or {}).get("vae")
    if file is None or variants_of(folder / "vae", "diffusers"):
        return None
    if latent_channels_of(read_json(folder / "vae" / "config.json")) != _SHARED:
        return None
    return (
        f"model.parts.vae={file}: nothing says whether it is of Stable Diffusion 1.x or of SDXL, and the base has no "
        "VAE to compare it with: images are nonsense with that of the other one"
    )


_SHARED = 4
"""Latent channels of VAEs of two families."""

_APART = 2.5
"""How far the size of scaled latents may be from 1; those of FLUX.1 and SD 3 are 4.2 times apart."""


def _faults(
    placed: Mapping[str, torch.Tensor], left: list[str], network: Any
) -> list[str]:
    """Returns how the tensors of a file differ from those of a network."""
    kind, wanted = type(network).__name__, network.state_dict()
    missing = wanted.keys() - placed.keys()
    if not placed or len(missing) > len(wanted) / 2:
        return [
            f"holds no weights of {kind}: {len(missing)} of its {len(wanted)} tensors are missing"
        ]
    if left:
        return [
            f"holds {some_of(left)}, which {kind} of this configuration has not, and would run without"
        ]
    if missing:
        return [f"lacks {some_of(sorted(missing))} of {kind}, and nothing is filled in"]
    for name, tensor in placed.items():
        shape, needed = list(shape_of(tensor)), list(wanted[name].shape)
        if shape != needed:
            return [
                f"holds {name} of shape {shape}, and the configuration of the base says {needed}"
            ]
    return []


def _placed(
    tensors: Mapping[str, torch.Tensor], part: str, network: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the tensors of a transformer or a VAE under diffusers' names, and the names of those left over."""
    if part != "vae":
        return renamed(tensors, network)
    if network.state_dict().keys() == tensors.keys():
        return dict(tensors), []
    import torch
    from diffusers.loaders.single_file_utils import (
        convert_ldm_vae_checkpoint,
        convert_wan_vae_to_diffusers,
    )

    of_images = "down_block_types" in network.config
    convert: Callable[..., Any] = (
        convert_ldm_vae_checkpoint if of_images else convert_wan_vae_to_diffusers
    )
    placed: dict[str, torch.Tensor] = {}
    given: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        # Of FLUX.2: its statistics have no other name, and its makers count what is between both halves to these.
        inner = re.sub(r"^(en|de)coder\.(?=(post_)?quant_conv\.)", "", name)
        (placed if name.startswith("bn.") else given)[inner] = tensor
    placed |= convert(dict(given), config=dict(network.config))
    known = network.state_dict().keys()
    placed = {name: tensor for name, tensor in placed.items() if name in known}
    used = {_root(tensor) for tensor in placed.values()}
    if _COUNT in known:
        placed.setdefault(_COUNT, torch.tensor(0))
    return placed, [name for name, tensor in given.items() if _root(tensor) not in used]


_COUNT = "bn.num_batches_tracked"
"""How many batches the statistics of FLUX.2's VAE are of, which training alone reads."""


def _root(tensor: torch.Tensor) -> int:
    """Returns what a tensor and views of it have in common; one that is read from a file may be a view itself."""
    return id(tensor if tensor._base is None else tensor._base)


# ------------------------------------------------------------------------------------------------------------ loading


def load_parts(
    model: Model, folder: Path, dtype: torch.dtype, without: set[str] | None = None
) -> dict[str, Any]:
    """Loads the networks that lie in files on the CPU, by the attributes of the pipeline in `folder`.

    Those of `without` are not loaded. A part that the model leaves out is None.

    Raises:
        UsageError: a file does not fit the configuration of the base.
    """
    found: dict[str, Any] = dict.fromkeys(without_parts(model, folder))
    for part, stored in stored_parts(model, folder).items():
        if part not in (without or ()):
            found[part] = load_stored(model, part, stored, folder, dtype)
    return found


def load_stored(
    model: Model, part: str, stored: Stored, folder: Path, dtype: torch.dtype
) -> Any:
    """Loads one network from its file on the CPU, with weights of the given type."""
    tensors = stored.tensors()
    if part.startswith("text_encoder"):
        network, faults = _text_encoder(_plain(tensors), part, folder, dtype)
    else:
        network = empty_network(folder / part, *parts_in(folder)[part])
        placed, left = _placed(tensors, part, network)
        faults = _faults(placed, left, network)
        if not faults:
            network = _filled(network, placed, folder / part, dtype)
    if faults:
        raise UsageError(f"{model.origin}: {stored.file.name}: {faults[0]}")
    return network.eval()


def _filled(
    network: Any, tensors: Mapping[str, torch.Tensor], folder: Path, dtype: torch.dtype
) -> Any:
    """Returns a network with these tensors as its weights."""
    import torch

    kept = kept_in_float32(network, dtype)
    if any(hasattr(tensor, "quant_type") for tensor in tensors.values()):
        return _in_blocks(network, tensors, folder, dtype)
    values = {}
    for name, tensor in tensors.items():
        values[name] = tensor.to(
            torch.float32 if name in kept or not tensor.is_floating_point() else dtype
        )
    network.load_state_dict(values, assign=True)
    return network.requires_grad_(False)


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors as numbers, where some are blocks of a GGUF file, which transformers does not know."""
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    return {name: dequantize_gguf_tensor(tensor) for name, tensor in tensors.items()}


def _in_blocks(
    network: Any, tensors: Mapping[str, torch.Tensor], folder: Path, dtype: torch.dtype
) -> Any:
    """Returns a network whose linear layers keep the blocks of a GGUF file, and compute in `dtype`.

    diffusers keeps blocks in other layers, too, which then compute with their bytes.
    """
    import torch
    from diffusers import GGUFQuantizationConfig
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    layers = dict(network.named_modules())
    linear = {
        f"{name}.weight"
        for name, layer in layers.items()
        if isinstance(layer, torch.nn.Linear)
    }
    weights = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "quant_type") and name not in linear:
            weights[name] = dequantize_gguf_tensor(tensor).to(dtype)
        else:
            weights[name] = tensor
    # The names are diffusers' own, so that nothing is converted.
    return type(network).from_single_file(
        weights,
        config=str(folder),
        quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
        torch_dtype=dtype,
        local_files_only=True,
    )


def _text_encoder(
    tensors: dict[str, torch.Tensor], part: str, folder: Path, dtype: torch.dtype | None
) -> tuple[Any, list[str]]:
    """Returns a text encoder with these tensors, and what is wrong with them.

    CLIP-L is published without its last projection, which is then the identity, as diffusers and ComfyUI have it.
    """
    import torch

    cls: Any = part_class(*parts_in(folder)[part])
    config = cls.config_class.from_pretrained(folder / part, local_files_only=True)
    projection, width = (
        "text_projection.weight",
        getattr(config, "projection_dim", None),
    )
    lacks = cls.__name__ == "CLIPTextModelWithProjection" and projection not in tensors
    if lacks and width == config.hidden_size:
        tensors = tensors | {
            projection: torch.eye(width, device=next(iter(tensors.values())).device)
        }
    if cls.__name__ == "CLIPTextModel":
        tensors = {
            name: tensor for name, tensor in tensors.items() if name != projection
        }
    if cls.__name__.endswith(_WITH_A_HEAD) and _HEAD not in tensors:
        tensors = tensors | _embeddings_as_head(tensors)
    with quiet():
        place = {"device_map": {"": "meta"}} if dtype is None else {"dtype": dtype}
        network, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **place,
        )
    if lacking := sorted(info["missing_keys"]):
        return network, [
            f"lacks {some_of(lacking)} of the {part}, and nothing is filled in"
        ]
    if others := sorted(
        info["mismatched_keys"]
    ):  # which would be random: LongCLIP has more places for tokens
        name, has, wanted = others[0]
        return network, [
            f"holds {name} of shape {list(has)}, and the {part} of the base has {list(wanted)}"
        ]
    left = [name for name in info["unexpected_keys"] if not name.endswith(_IDLE)]
    if left:
        return network, [f"holds {some_of(left)}, which the {part} of the base has not"]
    return network, []


_HEAD = "lm_head.weight"
"""The last matrix of a language model, which predicts words; pipelines read the states before it."""

_WITH_A_HEAD = ("ForCausalLM", "ForConditionalGeneration")

_IDLE = ("position_ids", "logit_scale", _HEAD, "spiece_model", "tekken_model")
"""Ends of the names of what a text encoder's file may hold beside its weights: counts, and ComfyUI's tokenizers."""


def _embeddings_as_head(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a head for a language model that was saved without one: its embeddings, so that it takes no memory."""
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            return {_HEAD: tensor}
    return {}
