"""Checks that all that a LoRA holds would arrive in the networks of a model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError, one_line, some_of, with_type
from sdopt.pipelines.catalog import once_per_state, text_to_image
from sdopt.pipelines.factory import configs_of, known_class
from sdopt.pipelines.loading import (
    LoadedModel,
    family_of,
    folder_of,
    is_sdxl,
    part_config,
)
from sdopt.pipelines.lora_files import (
    ALPHA,
    BIAS,
    MATRIX,
    header_of_lora,
    pairs_in,
    rank_of,
    read_lora,
    tensors_of,
)
from sdopt.pipelines.loras import (
    exchangeable,
    for_transformer,
    has_adapter,
    networks_of_a_lora,
)
from sdopt.pipelines.parts import TEXT_ENCODERS, Pipeline, networks_of, quiet
from sdopt.pipelines.random_weights import empty_like, empty_part
from sdopt.pipelines.transformer_loras import changed_weights, letters_of
from sdopt.schema import Model
from sdopt.text_files import first_match

if TYPE_CHECKING:
    import torch

_BESIDE = (BIAS, "lora_magnitude_vector")
"""Parts of the names of what peft keeps beside the two matrices: a bias, and the magnitudes of DoRA."""

_KINDS = {
    r"dora_scale$": "a DoRA's magnitudes in LyCORIS's naming",
    r"\.hada_": "a LoHa",
    r"\.lokr_": "a LoKr",
    r"lora_mid": "a LoCon with a third matrix (CP decomposition)",
    r"\.diff(_b)?$": "a full difference of weights",
    r"[._]b?oft_": "an OFT or a BOFT",
    r"\.on_input$": "an IA³",
    r"\.[ab][12]\.": "a GLoRA",
    r"^bundle_emb|^emb_params$|^clip_[lg]$": "trained words (textual inversion)",
    r"\.[wb]_norm$": "a difference of norms",
}
"""Other formats than LoRA, by a pattern of the names of their tensors."""

_ADAPTER = "sdopt_check"


def misfits(file: Path, model: Model) -> list[str]:
    """Returns why a LoRA would not arrive as a whole in the networks of a model; [] if it does.

    Loads the file as diffusers and peft do, into networks without weights, and compares what arrives with what the file
    holds: each pair of matrices, with its scale. diffusers drops with a warning at most what it does not know.

    Where the model's files are not local yet, only the file itself is checked; once they are, the networks are too.
    """
    # A model that is loaded is not kept alive by a cache.
    problems_of = _misfits if isinstance(model, LoadedModel) else _misfits_once
    is_there = part_config(model, "") is not None
    return [f"{file.name} {problem}" for problem in problems_of(file, model, is_there)]


def misfits_in(pipe: Pipeline, file: Path) -> list[str]:
    """Returns why a LoRA would not arrive as a whole in a pipeline that a user's function has built; [] if it does."""
    model = LoadedModel(
        "pipeline",
        "path",
        class_name=text_to_image(known_class(pipe)),
        configs=configs_of(pipe),
        networks=networks_of(pipe),
    )
    return misfits(file, model)


def _misfits(file: Path, model: Model, _is_there: bool) -> list[str]:
    names = header_of_lora(file).shapes
    is_unet = family_of(model).is_unet
    for name in names:
        if is_unet and _is_of_a_lora(name):
            continue
        kind = first_match(_KINDS, name, "no matrix of a LoRA" if is_unet else "")
        if kind:
            return [f"holds {name}, which is {kind}, and would be left out"]
    if not is_unet:
        return _malformed(file) or _lost_in_transformer(file, model)
    if not (pairs := pairs_in(names)):
        return [
            "holds no LoRA: none of its names ends in .lora_A.weight or .lora_down.weight"
        ]
    if half := [module for module, pair in pairs.items() if len(pair) < 2]:
        return [f"has only one of the two matrices of {half[0]}"]
    return (
        _malformed(file)
        or _of_another_family(file, model)
        or _lost(file, model)
        or _idle(file)
    )


_misfits_once = once_per_state(_misfits)


def _is_of_a_lora(name: str) -> bool:
    beside = name.endswith(ALPHA) or any(part in name for part in _BESIDE)
    return beside or MATRIX.fullmatch(name) is not None


def _lost_in_transformer(file: Path, model: Model) -> list[str]:
    """Returns what of a LoRA has no layer in the networks of a model whose denoiser is a transformer."""
    pipe = _empty_pipeline(model)
    if pipe is None:
        return []
    if not hasattr(pipe, "load_lora_weights"):
        return [
            f"cannot be loaded: diffusers loads no LoRA into {family_of(model).title}"
        ]
    found = for_transformer(file, pipe)
    if problems := found.problems():
        return problems
    try:
        with quiet():
            pipe.load_lora_weights(dict(found.tensors), adapter_name=_ADAPTER)
    except Exception as error:  # as in `_lost`
        return [f"cannot be loaded into this model ({with_type(error)})"]
    arrived, _ = _arrived(pipe)
    for name, pair in pairs_in(found.tensors).items():
        marks = tuple(_mark(found.tensors[pair[which]]) for which in ("down", "up"))
        if 1.0 not in arrived[marks]:
            return [f"has an update of {name}, which diffusers would leave out"]
    return []


def _malformed(file: Path) -> list[str]:
    """Returns what is wrong with the tensors of a LoRA, whatever the model."""
    tensors = read_lora(file)
    for name, tensor in tensors.items():
        alpha, matrix = name.endswith(ALPHA), MATRIX.fullmatch(name)
        if not tensor.is_floating_point() and not alpha:
            return [
                f"holds {name} of type {str(tensor.dtype).removeprefix('torch.')}, which is no type of weights"
            ]
        if (alpha and tensor.numel() != 1) or (
            matrix and (tensor.ndim < 2 or not tensor.numel())
        ):
            return [
                f"holds {name} of shape {list(tensor.shape)}, which is no {'number' if alpha else 'matrix'}"
            ]
        if not tensor.float().isfinite().all():
            return [f"holds numbers in {name} that are not finite (NaN or infinite)"]
    metadata = header_of_lora(file).metadata
    if start := changed_weights(file, metadata):
        why = f"was trained beside weights that init_lora_weights={start} changed first"
        return [
            f"{why}, and would be added to others: convert it to a LoRA of the published weights"
        ]
    if tensors_of(file) is not None and _SETTINGS in metadata:
        return [
            f"has weights of 8 bits or alphas beside {_SETTINGS}, of which diffusers would lose one: save it anew"
        ]
    return []


_SETTINGS = "lora_adapter_metadata"
"""diffusers' key in the header of a file for the adapter's own settings, such as its scale."""


def _idle(file: Path) -> list[str]:
    tensors = tensors_of(file) or read_lora(file)
    for module, pair in pairs_in(tensors).items():
        alpha = tensors.get(module + ALPHA)
        if (alpha is None or float(alpha)) and all(
            bool(tensors[name].float().any()) for name in pair.values()
        ):
            return []
    return ["changes nothing: each of its updates is zero"]


def _of_another_family(file: Path, model: Model) -> list[str]:
    """Returns why a LoRA is for another family of models, by what its trainer wrote into the file.

    Self-attention has the same widths in Stable Diffusion 1.x and 2.x.
    """
    unet, marks = part_config(model, "unet"), header_of_lora(file).metadata
    if unet is None:
        return []
    own = (
        "xl"
        if is_sdxl(model)
        else "v2"
        if unet.get("cross_attention_dim") == _WIDTH_OF_SD2
        else "v1"
    )
    for key in ("ss_base_model_version", "modelspec.architecture"):
        mark = marks.get(key, "").lower()
        family = (
            next((family for family in _FAMILIES if family in mark), own)
            if _OF_SD.match(mark)
            else own
        )
        if family != own:
            return [
                f"says {key}={marks[key]}: it is for {_FAMILIES[family]}, and this model is {_FAMILIES[own]}"
            ]
    return []


_OF_SD = re.compile(r"sd_?(v|xl)|stable-diffusion-(v|xl)")
"""How trainers name Stable Diffusion: kohya's (`sd_v1`, `sdxl_base_v1-0`), and the SAI model specification."""

_FAMILIES = {"xl": "SDXL", "v2": "Stable Diffusion 2.x", "v1": "Stable Diffusion 1.x"}
"""Families of models, by a part of the names that trainers give them; SDXL's names also contain `v1`."""

_WIDTH_OF_SD2 = 1024
"""Channels of the text states of Stable Diffusion 2.x."""


def _lost(file: Path, model: Model) -> list[str]:
    """Returns what would not arrive in the model's networks, if they are known."""
    pipe = _empty_pipeline(model)
    if pipe is None:
        return []
    given = tensors_of(file)
    tensors = given or read_lora(file)
    pairs = pairs_in(tensors)
    reasons = _misfitting(tensors, pipe)
    try:
        with quiet():
            pipe.load_lora_weights(
                given or str(file), adapter_name=_ADAPTER, local_files_only=True
            )
    except (
        Exception
    ) as error:  # diffusers, transformers, peft and PyTorch each raise their own
        reasons.append(f"({with_type(error)})")
        return [f"cannot be loaded into this model: {reasons[0]}"]
    arrived, empty = _arrived(pipe)
    if empty:
        return [
            f"holds only a part of what peft keeps for each layer: {empty[0]} would stay empty"
        ]

    def has_arrived(scale: float | None, *of: torch.Tensor) -> bool:
        """Takes away what holds the values of these tensors; whatever its scale, if that is None."""
        scales = arrived[tuple(map(_mark, of))]
        found = next((each for each in scales if scale in (None, each)), None)
        if found is not None:
            scales.remove(found)
        return found is not None

    lost = []
    for module, pair in pairs.items():
        down, up = tensors[pair["down"]], tensors[pair["up"]]
        alpha = tensors.get(module + ALPHA)
        # Without an alpha, the adapter's own metadata may give another scale than 1.
        if not has_arrived(
            None if alpha is None else _rounded(float(alpha) / down.shape[0]), down, up
        ):
            lost.append(f"the update of {module}")
    beside = (
        name
        for name in tensors
        if not MATRIX.fullmatch(name) and not name.endswith(ALPHA)
    )
    lost += [name for name in beside if not has_arrived(None, tensors[name])]
    if not lost:
        return []
    why = "this model's networks have no such layer"
    if not reasons and not any(map(_OF_A_NETWORK.match, pairs)):
        why = "no name begins with that of a network, such as unet.; save it again with pipe.save_lora_weights"
    return [f"holds {some_of(lost)}, which diffusers would leave out: {why}"]


_OF_A_NETWORK = re.compile(r"unet\.|text_encoder|lora_")


def unswappable(file: Path, other: Path, model: Model) -> list[str]:
    """Returns why another LoRA cannot take the place of one at run time, though both fit the model; [] if it can.

    peft keeps the layers of the first one: those that only the other one updates would be new.
    """
    known, others = (pairs_in(header_of_lora(each).shapes) for each in (file, other))
    if others and others.keys() <= known.keys():
        return []
    if (pipe := _empty_pipeline(model)) is None:
        return []
    rank = max(rank_of(file), rank_of(other))
    try:
        with quiet():
            for each, how in ((file, {}), (other, {"hotswap": True})):
                tensors = exchangeable(pipe, each, rank)
                pipe.load_lora_weights(tensors, adapter_name=_ADAPTER, **how)
    except RuntimeError as error:
        why = one_line(error)
        way = "make the LoRA of the most layers lora.weight_name"
        return [
            f"{other.name} cannot take the place of {file.name}, which lacks some of its layers: {way} ({why}…)"
        ]
    return []


_Mark = tuple[int, int, float]


def _mark(tensor: torch.Tensor) -> _Mark:
    """Returns what tells a tensor by its values, whatever its name, its type and the order of its dimensions of 1."""
    import torch

    plain = tensor.detach().float().contiguous()
    return (
        plain.numel(),
        int(torch.hash_tensor(plain).view(torch.int64)),
        float(plain.double().sum()),
    )


def _rounded(scale: float) -> float:
    return round(scale, 6)


def _arrived(pipe: Any) -> tuple[dict[tuple[_Mark, ...], list[float]], list[str]]:
    """Returns the scales of each pair of matrices in a pipeline's networks, by marks, and of what is beside them.

    Also names what is empty.
    """
    found: defaultdict[tuple[_Mark, ...], list[float]] = defaultdict(list)
    modules: list[tuple[str, Any]] = []
    for network in networks_of_a_lora(pipe):
        modules += network.named_modules()
    for path, layer in modules:
        if not has_adapter(layer) or _ADAPTER not in getattr(layer, "lora_A", {}):
            continue
        own = {
            name: each
            for name, each in layer.named_parameters()
            if "base_layer" not in name
        }
        if empty := [f"{path}.{name}" for name, each in own.items() if each.is_meta]:
            return found, empty
        down, up = (own.pop(f"lora_{which}.{_ADAPTER}.weight") for which in "AB")
        scaling: Any = layer.scaling
        found[_mark(down), _mark(up)].append(_rounded(float(scaling[_ADAPTER])))
        for each in own.values():
            found[(_mark(each),)].append(1.0)
    return found, []


def _misfitting(tensors: Mapping[str, torch.Tensor], pipe: Any) -> list[str]:
    """Returns which matrices do not fit a layer of the pipeline's networks; first those of other widths."""
    # By the letters and digits of their names, which both text encoders' layers share: input and output channels.
    sizes: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for network in networks_of_a_lora(pipe):
        for name, layer in network.named_modules():
            if getattr(layer, "weight", None) is not None and layer.weight.ndim > 1:
                sizes[letters_of(name.removeprefix("text_model."))].add(
                    (layer.weight.shape[1], layer.weight.shape[0])
                )
    widths, absent = [], []
    for module, pair in pairs_in(tensors).items():
        letters = letters_of(module)
        found = max(filter(letters.endswith, sizes), key=len, default=None)
        has = tensors[pair["down"]].shape[1], tensors[pair["up"]].shape[0]
        if found is None:
            # diffusers knows the names of the original program's layers for SDXL alone.
            absent += (
                []
                if _ORIGINAL.search(module) and hasattr(pipe, "text_encoder_2")
                else [module]
            )
        elif has not in sizes[found]:
            own, wanted = (
                " to ".join(map(str, each)) for each in (has, min(sizes[found]))
            )
            widths.append(
                f"its update of {module} is from {own} channels, and this model's layer from {wanted}"
            )
    return widths + [f"it has no layer for the update of {module}" for module in absent]


_ORIGINAL = re.compile(r"(in|out)put_blocks|middle_block|time_embed|label_emb|out_\d$")


def _empty_pipeline(model: Model) -> Any:
    """Returns a pipeline of the networks that a LoRA can change, without weights; None if they are not local.

    Their memory is reserved and never touched, so that the size of the model does not matter.
    """
    import diffusers

    family = family_of(model)
    names = (family.denoiser, *TEXT_ENCODERS[:2])
    if isinstance(model, LoadedModel):
        networks = {
            name: empty_like(model.networks[name])
            for name in names
            if name in model.networks
        }
    else:
        try:
            folder = folder_of(model)
        except UsageError:
            return None  # it is fetched later, and then checked
        networks = {
            name: empty_part(folder, name)
            for name in names
            if (folder / name / "config.json").is_file()
        }
    parts = dict.fromkeys(("vae", "tokenizer", "scheduler", "text_encoder")) | {
        name: network.to_empty(device="cpu") for name, network in networks.items()
    }
    if not family.is_unet:
        return getattr(diffusers, family.pipeline)(
            **dict.fromkeys(family.parts) | parts
        )
    if is_sdxl(model):
        return diffusers.StableDiffusionXLPipeline(
            **{"text_encoder_2": None, "tokenizer_2": None, "add_watermarker": False}
            | parts
        )
    return diffusers.StableDiffusionPipeline(
        **parts,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
