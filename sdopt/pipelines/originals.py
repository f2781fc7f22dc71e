"""Names that layers of transformers have in the original programs, as files and LoRAs of the web have them.

diffusers has converters of its own, which leave out what they do not know. Those for FLUX.1 and Chroma are made for one
width. Here the shapes of a network say how a joined matrix is parted, and whatever has no place is returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import TYPE_CHECKING, Any

from sdopt.pipelines.parts import shape_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Naming:
    """How an original program names the layers of a transformer.

    Attributes:
        pipeline: the class name of diffusers' text-to-image pipeline.
        marks: names of tensors that tell a file of it, each as an expression.
        outside: for a layer outside of the blocks, diffusers' name.
        blocks: for the name of a list of blocks, diffusers' name of it, and the layers of each block. A joined matrix
            has several names of diffusers: its rows are theirs, one after another.
        unused: layers that neither program reads.
    """

    pipeline: str
    marks: tuple[str, ...]
    outside: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


_QKV = "attn.to_q attn.to_k attn.to_v"

_ADDED_QKV = "attn.add_q_proj attn.add_k_proj attn.add_v_proj"

_STREAMS = {
    "img_attn.qkv": _QKV,
    "txt_attn.qkv": _ADDED_QKV,
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    # LoRAs of XLabs are named after attention processors; 1 is the image, and 2 the text.
    "processor.qkv1": _QKV,
    "processor.qkv2": _ADDED_QKV,
    "processor.proj1": "attn.to_out.0",
    "processor.proj2": "attn.to_add_out",
}

_DOUBLE = _STREAMS | {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}

_SINGLE = {
    "modulation.lin": "norm.linear",
    "linear1": f"{_QKV} proj_mlp",
    "linear2": "proj_out",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "processor.qkv": _QKV,
    "processor.proj": "proj_out",
}

_FLUX_BLOCKS = {
    "double_blocks": ("transformer_blocks", _DOUBLE),
    "single_blocks": ("single_transformer_blocks", _SINGLE),
}

_EMBEDDER = "time_text_embed.timestep_embedder"

_FLUX = Naming(
    "FluxPipeline",
    (r"double_blocks\.0\.", r"vector_in\."),
    {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": f"{_EMBEDDER}.linear_1",
        "time_in.out_layer": f"{_EMBEDDER}.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    _FLUX_BLOCKS,
)

_CHROMA = Naming(
    "ChromaPipeline",
    (r"double_blocks\.0\.", r"distilled_guidance_layer\."),
    {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "final_layer.linear": "proj_out",
    },
    {
        **_FLUX_BLOCKS,
        "distilled_guidance_layer.layers": (
            "distilled_guidance_layer.layers",
            {"in_layer": "linear_1", "out_layer": "linear_2"},
        ),
    },
)

_FLUX2 = Naming(
    "Flux2KleinPipeline",
    (r"double_blocks\.0\.", r"double_stream_modulation_img\."),
    {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
        "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    {
        "double_blocks": (
            "transformer_blocks",
            _STREAMS
            | {
                "img_mlp.0": "ff.linear_in",
                "img_mlp.2": "ff.linear_out",
                "txt_mlp.0": "ff_context.linear_in",
                "txt_mlp.2": "ff_context.linear_out",
            },
        ),
        "single_blocks": (
            "single_transformer_blocks",
            {
                "linear1": "attn.to_qkv_mlp_proj",
                "linear2": "attn.to_out",
                "norm.query_norm": "attn.norm_q",
                "norm.key_norm": "attn.norm_k",
            },
        ),
    },
)

_SD3 = Naming(
    "StableDiffusion3Pipeline",
    (r"joint_blocks\.0\.", r"y_embedder\."),
    {
        "pos_embed": "pos_embed.pos_embed",
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": f"{_EMBEDDER}.linear_1",
        "t_embedder.mlp.2": f"{_EMBEDDER}.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    {
        "joint_blocks": (
            "transformer_blocks",
            {
                "x_block.attn.qkv": _QKV,
                "x_block.attn.ln_q": "attn.norm_q",
                "x_block.attn.ln_k": "attn.norm_k",
                "x_block.attn.proj": "attn.to_out.0",
                "x_block.attn2.qkv": "attn2.to_q attn2.to_k attn2.to_v",
                "x_block.attn2.ln_q": "attn2.norm_q",
                "x_block.attn2.ln_k": "attn2.norm_k",
                "x_block.attn2.proj": "attn2.to_out.0",
                "x_block.adaLN_modulation.1": "norm1.linear",
                "x_block.mlp.fc1": "ff.net.0.proj",
                "x_block.mlp.fc2": "ff.net.2",
                "context_block.attn.qkv": _ADDED_QKV,
                "context_block.attn.ln_q": "attn.norm_added_q",
                "context_block.attn.ln_k": "attn.norm_added_k",
                "context_block.attn.proj": "attn.to_add_out",
                "context_block.adaLN_modulation.1": "norm1_context.linear",
                "context_block.mlp.fc1": "ff_context.net.0.proj",
                "context_block.mlp.fc2": "ff_context.net.2",
            },
        )
    },
)

_Z_BLOCK = {
    "attention.qkv": "attention.to_q attention.to_k attention.to_v",
    "attention.out": "attention.to_out.0",
    "attention.q_norm": "attention.norm_q",
    "attention.k_norm": "attention.norm_k",
}

_Z_IMAGE = Naming(
    "ZImagePipeline",
    (r"cap_pad_token$", r"cap_embedder\.", r"noise_refiner\.0\."),
    {
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    },
    {name: (name, _Z_BLOCK) for name in ("layers", "noise_refiner", "context_refiner")},
    unused=("norm_final",),
)

_LUMINA_BLOCK = {
    "attention.qkv": _QKV,
    "attention.out": "attn.to_out.0",
    "attention.q_norm": "attn.norm_q",
    "attention.k_norm": "attn.norm_k",
    "attention_norm2": "norm2",
    "feed_forward.w1": "feed_forward.linear_1",
    "feed_forward.w2": "feed_forward.linear_2",
    "feed_forward.w3": "feed_forward.linear_3",
}

_MODULATED = _LUMINA_BLOCK | {
    "adaLN_modulation.1": "norm1.linear",
    "attention_norm1": "norm1.norm",
}

_CAPTIONED = "time_caption_embed"

_LUMINA2 = Naming(
    "Lumina2Pipeline",
    (r"cap_embedder\.", r"noise_refiner\.0\.", r"layers\.0\.attention_norm1\."),
    {
        "t_embedder.mlp.0": f"{_CAPTIONED}.timestep_embedder.linear_1",
        "t_embedder.mlp.2": f"{_CAPTIONED}.timestep_embedder.linear_2",
        "cap_embedder.0": f"{_CAPTIONED}.caption_embedder.0",
        "cap_embedder.1": f"{_CAPTIONED}.caption_embedder.1",
        "final_layer.adaLN_modulation.1": "norm_out.linear_1",
        "final_layer.linear": "norm_out.linear_2",
    },
    {
        "layers": ("layers", _MODULATED),
        "noise_refiner": ("noise_refiner", _MODULATED),
        "context_refiner": (
            "context_refiner",
            _LUMINA_BLOCK | {"attention_norm1": "norm1"},
        ),
    },
    unused=("norm_final",),
)

_QWEN = Naming(
    "QwenImagePipeline", (r"transformer_blocks\.0\.img_mod\.1\.", r"txt_norm\.")
)

NAMINGS = (_CHROMA, _FLUX2, _FLUX, _SD3, _Z_IMAGE, _LUMINA2, _QWEN)

_OF_CLASS = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _CHROMA,
    "Flux2Transformer2DModel": _FLUX2,
    "SD3Transformer2DModel": _SD3,
    "ZImageTransformer2DModel": _Z_IMAGE,
    "Lumina2Transformer2DModel": _LUMINA2,
    "QwenImageTransformer2DModel": _QWEN,
}

_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.")


def prefix_in(names: Iterable[str]) -> str:
    """Returns how the names of a denoiser's tensors begin in a file that may hold other networks, too; "" if they do not.

    Programs that save a model write `model.` before all of its tensors, and language models before theirs.
    """
    all_names = tuple(names)
    for prefix in _PREFIXES[:-1]:
        if any(name.startswith(prefix) for name in all_names):
            return prefix
    everywhere = bool(all_names) and all(
        name.startswith(_PREFIXES[-1]) for name in all_names
    )
    return _PREFIXES[-1] if everywhere else ""


def pipeline_in(names: Iterable[str]) -> str | None:
    """Returns the class name of the text-to-image pipeline whose transformer has tensors of these names.

    None if the names are those of no original program that is known. FLUX.2 [klein] has no embedded guidance.
    """
    all_names = tuple(names)
    prefix = prefix_in(all_names)
    plain = [name.removeprefix(prefix) for name in all_names]
    for naming in NAMINGS:
        if all(any(map(re.compile(mark).match, plain)) for mark in naming.marks):
            if naming is _FLUX2 and any(
                name.startswith("guidance_in.") for name in plain
            ):
                return "Flux2Pipeline"
            return naming.pipeline
    return None


def shapes_as_config(kind: str, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """Returns what the tensors of a transformer of this pipeline say of its configuration, as diffusers names it."""
    prefix = prefix_in(shapes)
    plain = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    if kind == "StableDiffusion3Pipeline":
        places = plain.get("pos_embed", [1, 0])[1]
        return {
            "num_layers": _count(plain, "joint_blocks"),
            "pos_embed_max_size": isqrt(places),
        }
    if kind in ("ZImagePipeline", "Lumina2Pipeline"):
        return {
            "n_layers" if kind == "ZImagePipeline" else "num_layers": _count(
                plain, "layers"
            ),
            "cap_feat_dim": plain.get("cap_embedder.0.weight", [0])[0],
        }
    read = {"joint_attention_dim": plain.get("txt_in.weight", [0, 0])[1]}
    read["in_channels"] = plain.get("img_in.weight", [0, 0])[1]
    if kind == "QwenImagePipeline":
        return read | {"num_layers": _count(plain, "transformer_blocks")}
    if kind == "FluxPipeline":
        read["guidance_embeds"] = any(name.startswith("guidance_in.") for name in plain)
    blocks = {"num_layers": "double_blocks", "num_single_layers": "single_blocks"}
    return read | {key: _count(plain, name) for key, name in blocks.items()}


def _count(names: Iterable[str], blocks: str) -> int:
    """Returns how many blocks of a list there are."""
    matches = (re.match(rf"{blocks}\.(\d+)\.", name) for name in names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


@dataclass(frozen=True)
class Place:
    """Where a layer of an original program lies in a network of diffusers.

    Attributes:
        modules: diffusers' names, among which its rows are parted in this order.
        swapped: whether the halves of its rows are exchanged: shift and scale, which diffusers has the other way round.
    """

    modules: tuple[str, ...]
    swapped: bool = False


def places_in(network: Any) -> dict[str, Place]:
    """Returns where each layer lies in a network, by its name in the original program, and by its name in diffusers.

    A name in diffusers has precedence: Z-Image and Qwen-Image share most names with their original programs.
    """
    modules = dict(network.named_modules())
    holding = {re.sub(r"\.(weight|bias)$", "", key) for key in network.state_dict()}
    naming = _OF_CLASS.get(type(network).__name__, Naming("", ()))
    places: dict[str, Place] = {}
    for original, name in naming.outside.items():
        _add(places, original, (name,), holding, modules)
    for original, (blocks, layers) in naming.blocks.items():
        for number in range(len(modules.get(blocks, ()))):
            for layer, names in layers.items():
                there = tuple(f"{blocks}.{number}.{name}" for name in names.split())
                _add(places, f"{original}.{number}.{layer}", there, holding, modules)
    return places | {name: Place((name,)) for name in holding}


def _add(
    found: dict[str, Place],
    original: str,
    names: tuple[str, ...],
    holding: set[str],
    modules: Mapping[str, Any],
) -> None:
    """Adds a layer that the network has."""
    if holding.issuperset(names):
        outer = modules.get(names[0].rpartition(".")[0])
        found[original] = Place(
            names, swapped=type(outer).__name__ == "AdaLayerNormContinuous"
        )


def parted(
    tensor: torch.Tensor, place: Place, rows: list[int]
) -> list[torch.Tensor] | None:
    """Returns the rows of a tensor for each module of a place; None if it has not as many as these together."""
    import torch

    if tensor.ndim == 0 or tensor.shape[0] != sum(rows):
        return None
    if place.swapped:
        return [torch.cat([*tensor.chunk(2)][::-1])]
    return list(tensor.split(rows)) if len(rows) > 1 else [tensor]


def _in_dimensions(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns a tensor with as many dimensions as a place has: some programs leave out those of 1 in a GGUF file."""
    own = shape_of(tensor)
    sizes = [size for size in own if size > 1]
    if len(own) == len(shape) or sizes != [size for size in shape if size > 1]:
        return tensor
    if hasattr(tensor, "quant_type"):
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        tensor = dequantize_gguf_tensor(tensor)
    return tensor.reshape(shape)


def renamed(
    tensors: Mapping[str, torch.Tensor], network: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the tensors of a transformer under the names that diffusers gives them, and the names of those left over.

    Args:
        tensors: of the transformer alone, without a prefix.
        network: of diffusers' class, with or without weights.
    """
    places, shapes = (
        places_in(network),
        {name: tensor.shape for name, tensor in network.state_dict().items()},
    )
    unused = _OF_CLASS.get(type(network).__name__, Naming("", ())).unused
    by_name: dict[str, torch.Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in unused:
            continue
        end = "" if name in places else f".{'weight' if leaf == 'scale' else leaf}"
        place = places.get(name) or places.get(module)
        targets = [f"{target}{end}" for target in place.modules] if place else []
        parts = None
        if place and shapes.keys() >= {*targets} and not by_name.keys() & {*targets}:
            rows = [shapes[target][0] for target in targets]
            whole = tensor
            if len(targets) == 1:
                whole = _in_dimensions(tensor, shapes[targets[0]])
            parts = parted(whole, place, rows)
        if parts is None:
            unknown.append(name)
        else:
            by_name |= dict(zip(targets, parts, strict=True))
    return by_name, unknown
