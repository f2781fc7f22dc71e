"""Pipelines of diffusion transformers of half a million parameters with random weights: a test takes seconds.

Each is built by its family's published classes in a small configuration, with tokenizers made here: no hub is needed.
"""

import copy
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from sdopt.reference import VOCABULARY

SIZE = 64
"""Height and width of the images that they are made for, in pixels."""

_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "projection_dim": 32,
    "vocab_size": 49408,
    "bos_token_id": 49406,
    "eos_token_id": 49407,
}

_DECODER_ONLY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50000,
}

_HEADS = {"attention_head_dim": 16, "num_attention_heads": 4}

CHAT = "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"


def _clip_tokenizer() -> Any:
    return transformers.CLIPTokenizer.from_pretrained(
        VOCABULARY, local_files_only=True, model_max_length=77
    )


def _t5_tokenizer() -> Any:
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    scores += [(character, -3.0) for character in string.printable.strip()]
    return transformers.T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=512)


def _word_tokenizer() -> Any:
    vocabulary = json.loads((VOCABULARY / "vocab.json").read_text(encoding="utf-8"))
    lines = (VOCABULARY / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [
        tuple(line.split())
        for line in lines
        if not line.startswith("#version") and len(line.split()) == 2
    ]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, model_max_length=4096
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def _clip(projected: bool) -> Any:
    config = transformers.CLIPTextConfig(**_CLIP)
    return (
        transformers.CLIPTextModelWithProjection
        if projected
        else transformers.CLIPTextModel
    )(config)


def _t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **sizes)
    )


def _qwen3(cls: Any, layers: int = 4) -> Any:
    return cls(
        transformers.Qwen3Config(
            num_hidden_layers=layers,
            head_dim=8,
            max_position_embeddings=4096,
            **_DECODER_ONLY,
        )
    )


def _gemma() -> Any:
    return transformers.Gemma2Model(
        transformers.Gemma2Config(num_hidden_layers=3, head_dim=8, **_DECODER_ONLY)
    )


def _qwen25() -> Any:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    text = {
        **_DECODER_ONLY,
        "num_hidden_layers": 2,
        "rope_scaling": rope,
        "rope_theta": 1e6,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, hidden_size=32, vocab_size=50000
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 16, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 16,
    "norm_num_groups": 8,
    "sample_size": SIZE,
}


def _vae(**changes: Any) -> Any:
    usual = {
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.1159,
        "scaling_factor": 0.3611,
    }
    return diffusers.AutoencoderKL(**_VAE | usual | changes)


def _flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def sd3(
    qk_norm: str | None = "rms_norm", dual: tuple[int, ...] = (), t5: bool = True
) -> Any:
    """SD 3.5: batched guidance, three text encoders."""
    transformer = diffusers.SD3Transformer2DModel(
        **{
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 3,
            **_HEADS,
        },
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        qk_norm=qk_norm,
        dual_attention_layers=dual,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_flow(shift=3.0),
        vae=_vae(),
        text_encoder=_clip(projected=True),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(projected=True),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5() if t5 else None,
        tokenizer_3=_t5_tokenizer() if t5 else None,
    )


def flux(guidance: bool = True, layers: int = 2, single: int = 4) -> Any:
    """FLUX.1: packed latents; an embedded scale, or none."""
    transformer = diffusers.FluxTransformer2DModel(
        **{
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": layers,
            "num_single_layers": single,
            **_HEADS,
        },
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=_flow(use_dynamic_shifting=True, shift=3.0),
        vae=_vae(),
        text_encoder=_clip(projected=False),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_t5_tokenizer(),
    )


def flux2(distilled: bool = True) -> Any:
    """FLUX.2 klein: patchified latents; three hidden layers of its encoder side by side."""
    transformer = diffusers.Flux2Transformer2DModel(
        **{
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 2,
            "num_single_layers": 4,
            **_HEADS,
        },
        joint_attention_dim=96,
        timestep_guidance_channels=64,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return diffusers.Flux2KleinPipeline(
        transformer=transformer,
        scheduler=_flow(),
        vae=diffusers.AutoencoderKLFlux2(**_VAE),
        text_encoder=_qwen3(transformers.Qwen3ForCausalLM, layers=28),
        tokenizer=_word_tokenizer(),
        is_distilled=distilled,
    )


def z_image() -> Any:
    """Z-Image: lists of tensors, latents that stay in float32, guidance above 0."""
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=64,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=32,
        axes_dims=[8, 4, 4],
        axes_lens=[1536, 64, 64],
    )
    with torch.no_grad():  # they would be uninitialised memory
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    return diffusers.ZImagePipeline(
        transformer=transformer,
        scheduler=_flow(shift=3.0),
        vae=_vae(),
        text_encoder=_qwen3(transformers.Qwen3Model),
        tokenizer=_word_tokenizer(),
    )


def qwen_image() -> Any:
    """Qwen-Image: two calls a step, a mask for prompts, a VAE for video."""
    transformer = diffusers.QwenImageTransformer2DModel(
        **{
            "patch_size": 2,
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 3,
            **_HEADS,
        },
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )
    return diffusers.QwenImagePipeline(
        transformer=transformer,
        scheduler=_flow(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=_qwen25(),
        tokenizer=_word_tokenizer(),
    )


def chroma() -> Any:
    """Chroma: two calls a step with masks, and no context of diffusers' caches."""
    transformer = diffusers.ChromaTransformer2DModel(
        **{
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 2,
            "num_single_layers": 4,
            **_HEADS,
        },
        joint_attention_dim=64,
        axes_dims_rope=[4, 6, 6],
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    return diffusers.ChromaPipeline(
        transformer=transformer,
        scheduler=_flow(),
        vae=_vae(),
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(),
    )


def pixart() -> Any:
    """PixArt-Sigma: predicts noise and its variance, by a scheduler with noise levels."""
    transformer = diffusers.PixArtTransformer2DModel(
        **{
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 3,
            **_HEADS,
        },
        caption_channels=64,
        cross_attention_dim=64,
        norm_type="ada_norm_single",
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        vae=_vae(latent_channels=4, shift_factor=None, scaling_factor=0.13025),
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(),
    )


def sana() -> Any:
    """Sana: linear attention, an autoencoder of another kind."""
    transformer = diffusers.SanaTransformer2DModel(
        **{
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 2,
            **_HEADS,
        },
        num_cross_attention_heads=4,
        cross_attention_head_dim=16,
        cross_attention_dim=64,
        caption_channels=32,
    )
    vae = diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=8,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return diffusers.SanaPipeline(
        transformer=transformer,
        scheduler=_flow(shift=3.0),
        vae=vae,
        text_encoder=_gemma(),
        tokenizer=_word_tokenizer(),
    )


def lumina2() -> Any:
    """Lumina 2: two calls a step, with the norm of the guided prediction set back."""
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=16,
        hidden_size=64,
        num_layers=3,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=4,
        multiple_of=16,
        axes_dim_rope=[4, 6, 6],
        axes_lens=[300, 64, 64],
        cap_feat_dim=32,
    )
    return diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=_flow(shift=6.0),
        vae=_vae(),
        text_encoder=_gemma(),
        tokenizer=_word_tokenizer(),
    )


def aura_flow() -> Any:
    """AuraFlow: joint blocks before single ones, and batched guidance."""
    transformer = diffusers.AuraFlowTransformer2DModel(
        **{
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            **_HEADS,
        },
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pos_embed_max_size=64,
    )
    sizes = {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.UMT5Config(
        vocab_size=32128, feed_forward_proj="gated-gelu", **sizes
    )
    return diffusers.AuraFlowPipeline(
        transformer=transformer,
        scheduler=_flow(shift=1.73),
        vae=_vae(latent_channels=4, shift_factor=None, scaling_factor=0.13025),
        text_encoder=transformers.UMT5EncoderModel(config),
        tokenizer=_t5_tokenizer(),
    )


def cogview4() -> Any:
    """CogView4: two calls a step, and prompts that are filled up in front."""
    transformer = diffusers.CogView4Transformer2DModel(
        **{
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 3,
            **_HEADS,
        },
        text_embed_dim=32,
        time_embed_dim=64,
        condition_dim=16,
        sample_size=8,
    )
    config = transformers.GlmConfig(
        num_hidden_layers=3, head_dim=8, pad_token_id=49407, **_DECODER_ONLY
    )
    tokenizer = _clip_tokenizer()
    tokenizer.padding_side = "left"
    return diffusers.CogView4Pipeline(
        transformer=transformer,
        scheduler=_flow(use_dynamic_shifting=True),
        vae=_vae(shift_factor=None),
        text_encoder=transformers.GlmModel(config),
        tokenizer=tokenizer,
    )


def bria() -> Any:
    """Bria 3.2, which sdopt does not run: positions of tokens beside batched guidance, and the text before the image."""
    transformer = diffusers.BriaTransformer2DModel(
        **{"in_channels": 64, "num_layers": 2, "num_single_layers": 2, **_HEADS},
        joint_attention_dim=64,
        axes_dims_rope=[4, 6, 6],
    )
    return diffusers.BriaPipeline(
        transformer=transformer,
        scheduler=_flow(use_dynamic_shifting=True),
        vae=_vae(shift_factor=0.0, scaling_factor=0.13025),
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(),
    )


TINY: dict[str, Callable[..., Any]] = {
    "sd3": sd3,
    "flux": flux,
    "flux2": flux2,
    "z_image": z_image,
    "qwen_image": qwen_image,
    "chroma": chroma,
    "pixart": pixart,
    "sana": sana,
    "lumina2": lumina2,
    "aura_flow": aura_flow,
    "cogview4": cogview4,
}
"""How to build each, by the name that tests give it."""


Built = tuple[Any, torch.Tensor]
"""A pipeline, and the state of the random numbers after it."""

_BUILT: dict[str, Built] = {}


def tiny(name: str, **settings: Any) -> Any:
    """Returns a pipeline of its own; each is built once, and its networks are copied. They share tokenizers.

    Every matrix has variance 1 / fan-in, since zeros as gates would hide what options change.
    """
    key = f"{name} {sorted(settings.items())}"
    if key not in _BUILT:
        _BUILT[key] = _build(name, settings), torch.get_rng_state()
    built, state = _BUILT[key]
    torch.set_rng_state(state)
    shared = {id(part): part for role, part in _parts(built) if "tokenizer" in role}
    return copy.deepcopy(built, shared)


def _parts(pipe: Any) -> list[tuple[str, Any]]:
    return list(pipe.components.items())


def _build(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    pipe = TINY[name](**settings)
    with torch.no_grad():
        for key, weight in pipe.transformer.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight[0].numel() ** -0.5)
            elif key.endswith("bias"):
                weight.zero_()
    for _, part in _parts(pipe):
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def saved(name: str, folder: Path, **settings: Any) -> Path:
    """Saves such a pipeline as a folder."""
    tiny(name, **settings).save_pretrained(folder, safe_serialization=True)
    return folder
