"""Every kind of option: it is proved, counts what it should, and keeps its promise; undone, it is not proved."""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
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
from tests.options.hosts import evidence, image, proved


def proof(overrides: str, most: float = 255, needs: str = "torch", **facts: Any) -> Any:
    """Overrides, the largest difference that they make to a value of an image (0 to 255), the package, and facts."""
    marks = [pytest.mark.skipif(find_spec(needs) is None, reason=f"{needs} is not installed")]
    return pytest.param(overrides.split(), most, facts, marks=marks, id=overrides)


PAIR = "workload.batch_size=2 workload.prompt_count=2"
LARGE = "workload.size=96"
"""The VAE of the packaged model has tiles of 64 pixels: 96 take two each way."""
FULL_VAE: dict[str, Any] = {"vae_weights": ["float32"], "vae_products": ["float32"], "diffusers_would_upcast": False}
CAST: dict[str, Any] = {
    "stored": {"Conv2d": 39, "Linear": 80},
    "left_alone": {"GroupNorm": 24, "LayerNorm": 21},
}

PROOFS = [
    *(proof(f"grad_mode={option}", 0) for option in ("inference_mode", "enabled")),
    *(proof(f"attention={option}", 2) for option in ("math", "vanilla", "sliced", "sliced_max")),
    proof("attention=fused_qkv", 0.3, products_apart=0),
    proof("layout=channels_last", 2),
    proof("compiler=trace workload.steps=2", 0.03, calls=2, graphs=1),
    proof("precision=bf16"),
    *(proof(f"precision={kind}_{package} precision.activations=false", needs=package, arithmetic=["bfloat16"])
      for kind, package in (("fp8", "torchao"), ("int8", "sdnq"))),
    proof("precision=uint4_sdnq", needs="sdnq", arithmetic=["bfloat16"]),
    proof("precision=fp16_vae_fp32", weights=["float16"], **FULL_VAE),
    proof("precision=fp16_vae_fp32 precision.weights=bfloat16 task=inpaint workload.steps=2", **FULL_VAE),
    proof("lora=hotswap workload.steps=2", recompiles=0, other_images=True),
    proof("lora=lcm_emoji scheduler=lcm workload.steps=4 workload.guidance_scale=1"),
    # peft freezes the weights into which it fuses, and autograd would record nothing.
    proof("lora=fused grad_mode=enabled memory=[precomputed_embeddings] workload.steps=2"),
    proof("caching=deepcache workload.steps=7", whole=3, outer=4, runs_of_the_first_layer=7, runs_of_the_middle=3),
    proof("caching=deepcache scheduler=plms workload.steps=4", whole=2, outer=3),  # it calls the denoiser once more
    proof("caching=spectrum workload.steps=10", whole=7, forecast=3, runs_of_the_first_layer=7, runs_of_the_middle=7),
    # Steps 0 to 2 and 9 lie outside; of those between, the even ones are computed, or 4 and 8. There are 7 layers.
    proof("caching=pyramid_attention workload.steps=10", self_attention=7 * 7, cross_attention=6 * 7),
    proof("caching=guidance_interval workload.steps=10", guided=7, unguided=3, batches=[1, 2]),
    proof("memory=sequential_guidance workload.steps=3", 0.03, samples=1, images=1),
    proof("memory=sequential_guidance workload.steps=3 task=inpaint", 0.03, samples=1, images=1),
    proof(f"memory=sequential_guidance scheduler=euler {PAIR}", 0.03, samples=2, images=2),
    proof(f"memory=vae_slicing {PAIR} {LARGE}", 2, batch=2, at_a_time=1, decoder_calls=2),
    proof(f"memory=vae_tiling {LARGE}", image=96, tile=64, decoder_calls=4),
    proof("memory=tiny_vae", decoder_parameters=78115, calls=1, group_norms=0),
    *(proof(f"memory=tiny_vae {work}") for work in ("precision=bf16", "precision=autocast_fp16")),
    *(proof(f"memory=tiny_vae task={task} workload.steps=2") for task in ("img2img", "inpaint")),
    proof(f"memory=[vae_slicing,vae_tiling,tiny_vae] memory.vae_tiling.tile_size=64 {PAIR} {LARGE}"),
    proof("memory=precomputed_embeddings", 1, text_encoders=0, calls=0),
    *(proof(f"memory=layerwise_casting precision={option}", **CAST) for option in ("fp32", "autocast_fp16")),
    *(proof(f"memory=group_offload memory.group_offload.offload_type={kind}_level", 0) for kind in ("leaf", "block")),
    # Hooks of diffusers would wait for a call of the VAE itself, of which a pipeline calls the decoder alone.
    proof("memory=[group_offload,tiny_vae] memory.group_offload.offload_type=block_level"),
]  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, ...], np.ndarray]:
    """Images of the same work without options."""
    return {}


@pytest.mark.parametrize(("overrides", "most", "facts"), PROOFS)
def test_is_proved_and_keeps_its_promise(
    session: Load, plain: dict[tuple[str, ...], np.ndarray], overrides: list[str], most: float, facts: dict[str, Any]
) -> None:
    host = session(*overrides)
    found: dict[str, Any] = {}
    for item in host.prove().evidence:
        assert item.engaged, item
        if item.axis.partition(".")[0] == overrides[0].partition("=")[0]:
            found |= item.facts
    if overrides[0].startswith("caching"):  # of the whole call, where a proof looks at a part of it
        found = proved(host, "caching").facts
    assert facts.items() <= found.items(), found
    work = tuple(word for word in overrides if word.startswith(("workload", "task", "scheduler")))
    if work not in plain:
        plain[work] = image(session(*work))
    difference = 255 * np.abs(image(host) - plain[work])
    assert difference.max() <= most
    if overrides[0].startswith("precision"):
        assert difference.mean() < 40
    assert (most == 255) == (host._variant.contract is Contract.LOSSY)
    assert most < 255 or difference.mean() > 0


Undo = Callable[[Any], Any]


def case(overrides: str, undo: Undo, needs: str = "torch") -> Any:
    """Overrides of which the first chooses the option, what undoes it in a host, and the package that it needs."""
    marks = [pytest.mark.skipif(find_spec(needs) is None, reason=f"{needs} is not installed")]
    return pytest.param(overrides, undo, marks=marks, id=f"{overrides} {getattr(undo, '__name__', '')}")


def nothing(_host: Any) -> None:
    pass


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
    case(f"memory=vae_slicing {PAIR}", lambda host: host._pipe.vae.disable_slicing()),
    case(f"memory=vae_tiling {LARGE}", lambda host: host._pipe.vae.disable_tiling()),
    # One image is no slice, one tile no tiling; the model has four heads, and without guidance four rows.
    *(case(overrides, nothing) for overrides in ("memory=vae_slicing", "memory=vae_tiling")),
    case("attention=sliced attention.slice_size=4 workload.guidance_scale=1", nothing),
    case("memory=precomputed_embeddings", component("text_encoder", CLIPTextModel)),
    case("memory=group_offload", no_group_hooks),
    *(case(f"precision=int8_{package}", whole_layer, package) for package in ("torchao", "sdnq")),
    *(case(f"precision={option}", float32) for option in ("fp16", "bf16")),
    case("precision=bf16", last_layer_in_float32),
    *(case(f"precision={option}", own_arithmetic) for option in ("autocast_fp16", "fp16_autocast")),
    case("precision=fp32", autocast_on_top),
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
    case("lora=none", lambda host: host._pipe.load_lora_weights(str(LORAS), weight_name="fxemoji.safetensors")),
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
