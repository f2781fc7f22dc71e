"""A diffusers pipeline written as one file in the original layout (Rombach et al. 2022), as sdopt reads it."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def original_layout(pipe: Any, path: Path) -> None:
    """Writes a `StableDiffusionPipeline` with a text encoder of CLIP's, as SD 1.x has it, of any depth and width."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in pipe.unet.state_dict().items():
        tensors["model.diffusion_model." + _denoiser_name(name, pipe.unet.config)] = tensor
    levels = len(pipe.vae.config.block_out_channels)
    for name, tensor in pipe.vae.state_dict().items():
        renamed = _autoencoder_name(name, levels)
        # Attention of the VAE was written as convolutions of one pixel.
        tensors["first_stage_model." + renamed] = (
            tensor[:, :, None, None] if ".attn_1." in renamed and tensor.ndim == 2 else tensor
        )
    for name, tensor in pipe.text_encoder.state_dict().items():
        tensors["cond_stage_model.transformer.text_model." + name.removeprefix("text_model.")] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _denoiser_name(name: str, config: Any) -> str:
    outside = {
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }
    for theirs, ours in outside.items():
        if name.startswith(theirs + "."):
            return ours + name.removeprefix(theirs)
    layers = config.layers_per_block
    if match := re.match(r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", name):
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
    return f"output_blocks.{int(match[1]) * (layers + 1) + layers}.{place}.conv.{match[2]}"


def _part(kind: str, rest: str) -> str:
    if kind == "attentions":
        return f"1.{rest}"
    layer, _, leaf = rest.partition(".")
    return f"0.{_RESNET[layer]}.{leaf}"


def _autoencoder_name(name: str, levels: int) -> str:
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d)\.resnets", lambda match: f"up.{levels - 1 - int(match[1])}.block", name)
    name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda match: f"up.{levels - 1 - int(match[1])}.upsample", name)
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
