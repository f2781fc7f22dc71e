"""Options of every kind: they are proved, count what they should, and keep their promise; undone, they are not proved.

Those of the group `caching` are in test_caching.py, and those that store weights in few bits in test_precision.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.hooks import HookRegistry
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from transformers import CLIPTextModel

from sdopt.contract import Contract
from sdopt.options.lora import NoLora
from sdopt.options.precision import Precision
from sdopt.pipelines.parts import hook_of, unwrapped
from sdopt.reference import LORAS, MODEL
from tests.fixtures import Load
from tests.options.hosts import forward_is_its_own, image

Undo = Callable[[Any], Any]


def processors(kind: type) -> Undo:
    return lambda host: host._pipe.unet.set_attn_processor(kind())


def one_processor(host: Any) -> None:
    next(
        m for m in host._pipe.unet.modules() if hasattr(m, "set_processor")
    ).set_processor(AttnProcessor2_0())


def no_layerwise_hook(host: Any) -> None:
    layer = host._pipe.unet.conv_in
    layer._diffusers_hook.hooks.clear()
    layer.float()


def no_group_hooks(host: Any) -> None:
    vae = host._pipe.vae
    for layer in vae.modules():
        if (hook := hook_of(layer, "group_offloading")) is not None:
            hook.group.onload_()
    HookRegistry.check_if_exists_or_initialize(vae).remove_hook(
        "group_offloading", recurse=True
    )


def last_layer_in_float32(host: Any) -> None:
    layer = host._pipe.unet.conv_out.float()
    layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(),))
    layer.register_forward_hook(lambda _module, _inputs, output: output.bfloat16())


def own_arithmetic(host: Any) -> None:
    """Its calls are made in the context of another option."""
    host._assembly.options["precision"] = NoLora()


def autocast_on_top(host: Any) -> None:
    host._assembly.options["precision"] = Precision(autocast="float16")


def without_gradients(host: Any) -> None:
    pipe = host._pipe
    call = type(pipe).__call__

    class Quiet(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with torch.inference_mode(False), torch.no_grad():
                return call(self, *args, **kwargs)

    pipe.__class__ = Quiet


def no_parameter_asks_for_a_gradient(host: Any) -> None:
    """Autograd is on, but there is no graph."""
    for module in (host._pipe.unet, host._pipe.text_encoder):
        module.requires_grad_(False)


def one_weight(host: Any) -> None:
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    own = UNet2DConditionModel.from_pretrained(MODEL, subfolder="unet").get_submodule(
        name
    )
    host._pipe.unet.get_submodule(name).load_state_dict(own.state_dict())


def component(name: str, cls: Any) -> Undo:
    return lambda host: setattr(
        host._pipe, name, cls.from_pretrained(MODEL, subfolder=name)
    )


def layout(memory_format: torch.memory_format) -> Undo:
    return lambda host: host._pipe.unet.to(memory_format=memory_format)


def style(host: Any) -> None:
    host._pipe.load_lora_weights(str(LORAS), weight_name="fxemoji.safetensors")


def switched_off(host: Any) -> None:
    host._pipe.disable_lora()


def unloaded(host: Any) -> None:
    host._pipe.unload_lora_weights()


def apart(host: Any) -> None:
    host._pipe.unet.unfuse_qkv_projections()


def no_compiler(host: Any) -> None:
    host._pipe.unet = unwrapped(host._pipe.unet)


def proof(
    overrides: str,
    most: float,
    undone: dict[str, list[Undo]] | None = None,
    **facts: Any,
) -> Any:
    """Options, the largest difference that they make to a value of an image (0 to 255), what undoes them, and facts."""
    return pytest.param(overrides.split(), most, undone or {}, facts, id=overrides)


PAIR = "workload.batch_size=2 workload.prompt_count=2"
LARGE = "workload.size=72"
"""The VAE of the packaged model has tiles of 64 pixels: 72 take two each way."""
BLOCKS = "memory.group_offload.offload_type=block_level"
FULL_VAE: dict[str, Any] = {
    "vae_weights": ["float32"],
    "vae_products": ["float32"],
    "diffusers_would_upcast": False,
}
CAST: dict[str, Any] = {
    "stored": {"Conv2d": 39, "Linear": 80},
    "left_alone": {"GroupNorm": 24, "LayerNorm": 21},
}

PROOFS = [
    proof(
        "",
        0,
        {
            "attention": [processors(AttnProcessor)],
            "layout": [layout(torch.channels_last)],
            "lora": [style],
            "precision": [autocast_on_top],
        },
    ),
    proof(
        "attention=vanilla layout=channels_last grad_mode=inference_mode",
        2,
        {
            "attention": [one_processor],
            "layout": [layout(torch.contiguous_format)],
            "grad_mode": [without_gradients],
        },
    ),
    proof(
        "attention=math grad_mode=enabled",
        2,
        {
            "attention": [forward_is_its_own, processors(AttnProcessor)],
            "grad_mode": [no_parameter_asks_for_a_gradient, without_gradients],
        },
    ),
    proof("attention=flash", 2, {"attention": [processors(AttnProcessor)]}),
    proof("attention=sliced", 2, {"attention": [processors(AttnProcessor2_0)]}),
    proof("attention=sliced_max", 2),
    proof(
        "attention=fused_qkv",
        0.3,
        {"attention": [one_processor, apart]},
        products_apart=0,
    ),
    proof(
        "compiler=trace workload.steps=2",
        0.03,
        {"compiler": [no_compiler]},
        calls=2,
        graphs=1,
    ),
    proof("precision=bf16", 255, {"precision": [last_layer_in_float32]}),
    proof("precision=autocast_fp16", 255, {"precision": [own_arithmetic]}),
    proof(
        "precision=fp16_vae_fp32 task=inpaint workload.steps=2",
        255,
        {"precision": [lambda host: host._pipe.vae.half()]},
        weights=["float16"],
        **FULL_VAE,
    ),
    proof("lora=loaded workload.steps=2", 255, {"lora": [switched_off, unloaded]}),
    proof(
        "lora=hotswap workload.steps=2",
        255,
        {"lora": [switched_off]},
        recompiles=0,
        other_images=True,
    ),
    # peft freezes the weights into which it fuses, and autograd would record nothing.
    proof(
        "lora=fused grad_mode=enabled memory=[precomputed_embeddings] workload.steps=2",
        255,
        {
            "lora": [one_weight],
            "memory.precomputed_embeddings": [component("text_encoder", CLIPTextModel)],
        },
    ),
    proof(
        "memory=sequential_guidance workload.steps=3 task=inpaint",
        0.03,
        {"memory.sequential_guidance": [forward_is_its_own]},
        samples=1,
        images=1,
    ),
    proof(
        f"memory=sequential_guidance scheduler=euler {PAIR}", 0.03, samples=2, images=2
    ),
    proof(
        f"memory=vae_slicing {PAIR} {LARGE}",
        2,
        {"memory.vae_slicing": [lambda host: host._pipe.vae.disable_slicing()]},
        batch=2,
        at_a_time=1,
        decoder_calls=2,
    ),
    proof(
        f"memory=vae_tiling {LARGE}",
        255,
        {"memory.vae_tiling": [lambda host: host._pipe.vae.disable_tiling()]},
        image=72,
        tile=64,
        decoder_calls=4,
    ),
    proof("memory=tiny_vae precision=bf16 task=img2img workload.steps=2", 255),
    proof(
        "memory=tiny_vae precision=autocast_fp16 task=inpaint workload.steps=2",
        255,
        {"memory.tiny_vae": [component("vae", AutoencoderKL)]},
        decoder_parameters=78115,
        calls=1,
        group_norms=0,
    ),
    proof(
        f"memory=[vae_slicing,vae_tiling,tiny_vae] memory.vae_tiling.tile_size=64 {PAIR} {LARGE}",
        255,
    ),
    proof(
        "memory=layerwise_casting precision=autocast_fp16",
        255,
        {"memory.layerwise_casting": [no_layerwise_hook]},
        **CAST,
    ),
    proof("memory=group_offload", 0, {"memory.group_offload": [no_group_hooks]}),
    proof(f"memory=group_offload {BLOCKS}", 0),
    # Hooks of diffusers would wait for a call of the VAE itself, of which a pipeline calls the decoder alone.
    proof(f"memory=[group_offload,tiny_vae] {BLOCKS}", 255),
]


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, ...], np.ndarray]:
    """Images of the same work without options."""
    return {}


@pytest.mark.parametrize(("overrides", "most", "undone", "facts"), PROOFS)
@pytest.mark.walk(6)
def test_is_proved_keeps_its_promise_and_undone_is_not_proved(
    session: Load,
    plain: dict[tuple[str, ...], np.ndarray],
    overrides: list[str],
    most: float,
    undone: dict[str, list[Undo]],
    facts: dict[str, Any],
) -> None:
    host = session(*overrides)
    traced = host.prove()
    assert not traced.left_set
    found: dict[str, Any] = {}
    for item in traced.evidence:
        assert item.engaged, item
        if overrides and item.axis.partition(".")[0] == overrides[0].partition("=")[0]:
            found |= item.facts
    assert facts.items() <= found.items(), found
    work = tuple(
        word for word in overrides if word.startswith(("workload", "task", "scheduler"))
    )
    if work not in plain:
        plain[work] = image(session(*work))
    difference = 255 * np.abs(image(host) - plain[work])
    assert difference.max() <= most
    assert (most == 255) == (host._variant.contract is Contract.LOSSY)
    assert most < 255 or difference.mean() > 0
    if host._variant.choices["precision"] != "fp32":
        assert difference.mean() < 60
    refuted = set()
    for axis, changes in undone.items():
        refuted.add(axis)
        for undo in changes:
            undo(host)
            assert {
                item.axis for item in host.prove().evidence if not item.engaged
            } == refuted


def test_a_single_slice_or_tile_is_not_proved(session: Load) -> None:
    """The model has four heads, and without guidance four rows."""
    sliced = ("attention=sliced", "attention.slice_size=4", "workload.guidance_scale=1")
    evidence = session("memory=[vae_slicing,vae_tiling]", *sliced).prove().evidence
    idle = {item.axis for item in evidence if not item.engaged}
    assert idle == {"attention", "memory.vae_slicing", "memory.vae_tiling"}
