"""The contrapositive of every proof: a change that is undone is not proved."""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.hooks import HookRegistry
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from transformers import CLIPTextModel

from sdopt.pipelines.parts import hook_of, unwrapped
from sdopt.reference import MODEL
from tests.fixtures import Load
from tests.options.hosts import evidence

Undo = Callable[[Any], Any]


def case(overrides: str, undo: Undo, needs: str = "torch") -> Any:
    """Overrides of which the first chooses the option, what undoes it in a host, and the package that it needs."""
    marks = [pytest.mark.skipif(find_spec(needs) is None, reason=f"{needs} is not installed")]
    return pytest.param(overrides, undo, marks=marks, id=f"{overrides} {getattr(undo, '__name__', '')}")


def forward_is_its_own(host: Any) -> None:
    del host._pipe.unet.forward


def processors(kind: type) -> Undo:
    return lambda host: host._pipe.unet.set_attn_processor(kind())


def one_processor(host: Any) -> None:
    next(m for m in host._pipe.unet.modules() if hasattr(m, "set_processor")).set_processor(AttnProcessor2_0())


def no_broadcast(host: Any) -> None:
    for layer in host._pipe.unet.modules():
        if hasattr(layer, "_diffusers_hook"):
            layer._diffusers_hook.remove_hook("pyramid_attention_broadcast")


def no_merging(host: Any) -> None:
    import tomesd

    tomesd.remove_patch(host._pipe)


def no_layerwise_hook(host: Any) -> None:
    layer = host._pipe.unet.conv_in
    layer._diffusers_hook.hooks.clear()
    layer.float()


def no_group_hooks(host: Any) -> None:
    vae = host._pipe.vae
    for layer in vae.modules():
        if (hook := hook_of(layer, "group_offloading")) is not None:
            hook.group.onload_()
    HookRegistry.check_if_exists_or_initialize(vae).remove_hook("group_offloading", recurse=True)


def whole_layer(host: Any) -> None:
    attention = host._pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
    before = attention.to_q
    attention.to_q = torch.nn.Linear(before.in_features, before.out_features, bias=False, dtype=torch.bfloat16)


def float32(host: Any) -> None:
    host._pipe.to(torch.float32)
    host._inputs[0]["latents"] = host._inputs[0]["latents"].float()


def last_layer_in_float32(host: Any) -> None:
    layer = host._pipe.unet.conv_out.float()
    layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(),))
    layer.register_forward_hook(lambda _module, _inputs, output: output.bfloat16())


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


def own_weights(host: Any) -> None:
    host._pipe.unet.load_state_dict(UNet2DConditionModel.from_pretrained(MODEL, subfolder="unet").state_dict())


def one_weight(host: Any) -> None:
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    own = UNet2DConditionModel.from_pretrained(MODEL, subfolder="unet").get_submodule(name)
    host._pipe.unet.get_submodule(name).load_state_dict(own.state_dict())


def component(name: str, cls: Any) -> Undo:
    return lambda host: setattr(host._pipe, name, cls.from_pretrained(MODEL, subfolder=name))


CASES = [
    *(
        case(f"caching={option} workload.steps=10", forward_is_its_own)
        for option in ("deepcache", "first_block", "guidance_interval", "spectrum")
    ),
    case("caching=pyramid_attention workload.steps=10", no_broadcast),
    case("caching=tome workload.steps=10", no_merging, "tomesd"),
    case(
        "caching=guidance_interval workload.steps=10",
        lambda host: setattr(host._pipe.unet.forward, "_chosen", SimpleNamespace(guides=lambda *_: True)),
    ),
    case("memory=sequential_guidance", forward_is_its_own),
    case("memory=layerwise_casting", no_layerwise_hook),
    case("memory=tiny_vae", component("vae", AutoencoderKL)),
    case("memory=precomputed_embeddings", component("text_encoder", CLIPTextModel)),
    case("memory=group_offload", no_group_hooks),
    *(case(f"precision=int8_{package}", whole_layer, package) for package in ("torchao", "sdnq")),
    *(case(f"precision={option}", float32) for option in ("fp16", "bf16")),
    case("precision=bf16", last_layer_in_float32),
    case("precision=fp16_vae_fp32", lambda host: host._pipe.vae.half()),
    *(case(f"attention={option}", processors(AttnProcessor2_0)) for option in ("vanilla", "sliced")),
    *(case(f"attention={option}", one_processor) for option in ("vanilla", "fused_qkv")),
    *(case(f"attention={option}", processors(AttnProcessor)) for option in ("default", "math", "flash")),
    case("attention=math", forward_is_its_own),
    case("attention=fused_qkv", lambda host: host._pipe.unet.unfuse_qkv_projections()),
    case("layout=channels_last", lambda host: host._pipe.unet.to(memory_format=torch.contiguous_format)),
    case("layout=contiguous", lambda host: host._pipe.unet.to(memory_format=torch.channels_last)),
    *(case(f"grad_mode={option}", without_gradients) for option in ("enabled", "inference_mode")),
    case("grad_mode=enabled", no_parameter_asks_for_a_gradient),
    *(case(f"lora={option}", lambda host: host._pipe.disable_lora()) for option in ("loaded", "hotswap")),
    case("lora=loaded", lambda host: host._pipe.unload_lora_weights()),
    *(case("lora=fused", undo) for undo in (own_weights, one_weight)),
    case("compiler=trace workload.steps=2", lambda host: setattr(host._pipe, "unet", unwrapped(host._pipe.unet))),
]


@pytest.mark.parametrize(("overrides", "undo"), CASES)
def test_is_not_proved(session: Load, overrides: str, undo: Undo) -> None:
    host = session(*overrides.split())
    undo(host)
    assert not evidence(host, overrides.partition("=")[0]).engaged
