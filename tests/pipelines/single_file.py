"""A diffusers pipeline written as one file in the original layout (Rombach et al. 2022), and changed configurations."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sdopt.pipelines.random_weights import empty_network

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def edit(file: Path, **values: Any) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def original_layout(pipe: Any, path: Path) -> None:
    """Writes a `StableDiffusionPipeline` with a text encoder of CLIP's, as SD 1.x has it, of any depth and width."""
    tensors = _without_text(pipe.unet, pipe.vae) | _clip(
        pipe.text_encoder, "cond_stage_model"
    )
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _without_text(unet: Any, vae: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a denoiser and of a VAE."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in unet.state_dict().items():
        tensors["model.diffusion_model." + _denoiser_name(name, unet.config)] = tensor
    levels = len(vae.config.block_out_channels)
    for name, tensor in vae.state_dict().items():
        renamed = autoencoder_name(name, levels)
        # Attention of the VAE was written as convolutions of one pixel.
        tensors["first_stage_model." + renamed] = (
            tensor[:, :, None, None]
            if ".attn_1." in renamed and tensor.ndim == 2
            else tensor
        )
    return tensors


def _clip(text_encoder: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a text encoder of CLIP's."""
    tensors = text_encoder.state_dict().items()
    return {
        f"{prefix}.transformer.text_model.{name.removeprefix('text_model.')}": each
        for name, each in tensors
    }


def _denoiser_name(name: str, config: Any) -> str:
    outside = {
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }
    for theirs, ours in outside.items():
        if name.startswith(theirs + "."):
            return ours + name.removeprefix(theirs)
    layers = config.layers_per_block
    if match := re.match(
        r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", name
    ):
        block = 1 + int(match[1]) * (layers + 1) + int(match[3])
        return f"input_blocks.{block}.{_part(match[2], match[4])}"
    if match := re.match(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.*)", name):
        return f"input_blocks.{(int(match[1]) + 1) * (layers + 1)}.0.op.{match[2]}"
    if match := re.match(r"mid_block\.(resnets|attentions)\.(\d+)\.(.*)", name):
        place = 1 if match[1] == "attentions" else 2 * int(match[2])
        return f"middle_block.{place}.{_part(match[1], match[3]).partition('.')[2]}"
    if match := re.match(r"up_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", name):
        block = int(match[1]) * (layers + 1) + int(match[3])
        return f"output_blocks.{block}.{_part(match[2], match[4])}"
    match = re.match(r"up_blocks\.(\d+)\.upsamplers\.0\.conv\.(.*)", name)
    assert match, name
    place = 2 if config.up_block_types[int(match[1])].startswith("CrossAttn") else 1
    return (
        f"output_blocks.{int(match[1]) * (layers + 1) + layers}.{place}.conv.{match[2]}"
    )


def _part(kind: str, rest: str) -> str:
    if kind == "attentions":
        return f"1.{rest}"
    layer, _, leaf = rest.partition(".")
    return f"0.{_RESNET[layer]}.{leaf}"


def autoencoder_name(name: str, levels: int) -> str:
    name = re.sub(
        r"mid_block\.resnets\.(\d)",
        lambda match: f"mid.block_{int(match[1]) + 1}",
        name,
    )
    name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(
        r"up_blocks\.(\d)\.resnets",
        lambda match: f"up.{levels - 1 - int(match[1])}.block",
        name,
    )
    name = re.sub(
        r"up_blocks\.(\d)\.upsamplers\.0",
        lambda match: f"up.{levels - 1 - int(match[1])}.upsample",
        name,
    )
    for theirs, ours in {
        "mid_block.attentions.0": "mid.attn_1",
        "conv_norm_out": "norm_out",
        "conv_shortcut": "nin_shortcut",
        "group_norm": "norm",
        "to_q": "q",
        "to_k": "k",
        "to_v": "v",
        "to_out.0": "proj_out",
    }.items():
        name = name.replace(theirs, ours)
    return name


def original_names(folder: Path) -> dict[str, list[int]]:
    """Returns the names and shapes of the tensors of a published model's single file, by its architecture's folder."""
    parts = json.loads((folder / "model_index.json").read_text())
    xl = "text_encoder_2" in parts
    networks: list[Any] = [
        empty_network(folder / name, *parts[name])
        for name in ("unet", "vae", "text_encoder")
    ]
    unet, vae, text = networks
    tensors, open_clip = _without_text(unet, vae), dict[str, list[int]]()
    if text.config.hidden_size == 1024:
        open_clip = _open_clip(text, "cond_stage_model.model.")
    else:
        tensors |= _clip(text, "conditioner.embedders.0" if xl else "cond_stage_model")
    if xl:
        second = empty_network(folder / "text_encoder_2", *parts["text_encoder_2"])
        open_clip = _open_clip(second, "conditioner.embedders.1.model.")
    return {name: list(tensor.shape) for name, tensor in tensors.items()} | open_clip


def _open_clip(network: Any, prefix: str) -> dict[str, list[int]]:
    """Returns the tensors of a text encoder as OpenCLIP names them, with one matrix for queries, keys and values."""
    outside = {
        "embeddings.position_embedding.weight": "positional_embedding",
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "final_layer_norm.weight": "ln_final.weight",
        "final_layer_norm.bias": "ln_final.bias",
        "text_projection.weight": "text_projection",
    }
    inside = {
        "encoder.layers.": "transformer.resblocks.",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        ".fc1.": ".c_fc.",
        ".fc2.": ".c_proj.",
        ".self_attn": ".attn",
    }
    found = {}
    for key, tensor in network.state_dict().items():
        name, shape = key.removeprefix("text_model."), list(tensor.shape)
        if match := re.match(r"(.*self_attn\.)[qkv]_proj\.(.*)", name):
            name, shape = f"{match[1]}in_proj_{match[2]}", [3 * shape[0], *shape[1:]]
        renamed = outside.get(name, name)
        for theirs, ours in inside.items():
            renamed = renamed.replace(theirs, ours)
        found[prefix + renamed] = shape
    return found
