"""Options on pipelines with more parts than a study's: they draw what diffusers draws, or are refused at once."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionPipeline,
    T2IAdapter,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from PIL import Image

import sdopt
from sdopt.errors import ConflictError, UsageError
from sdopt.reference import LORAS
from tests.fixtures import packaged_pipe

STEPS, SIZE = 2, 32
PICTURE = Image.fromarray(
    np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
)
OFF = "caching.start=0.0", "caching.stop=1.0"
"""A guidance interval that leaves nothing out."""

Pipe = Any
Part = tuple[Callable[[Pipe], Pipe], dict[str, Any]]


def drawn(pipe: Pipe, **call: Any) -> np.ndarray:
    usual = {
        "prompt": ["a red apple", "a blue fish"],
        "num_inference_steps": STEPS,
        "height": SIZE,
        "width": SIZE,
    }
    generator = [torch.Generator().manual_seed(number) for number in range(2)]
    images: np.ndarray = pipe(
        **usual | call, generator=generator, output_type="np"
    ).images
    return images


def like(name: str, pipe: Pipe, **parts: Any) -> Pipe:
    """A pipeline of another class with the same parts."""
    cls = getattr(diffusers, name)
    taken = {
        key: part
        for key, part in pipe.components.items()
        if key in signature(cls.__init__).parameters
    }
    made = cls(**taken | parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def noisy(network: torch.nn.Module, seed: int) -> Any:
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn(weight.shape, generator=made) * 0.05)
    return network.eval()


def with_ip_adapter(pipe: Pipe) -> Pipe:
    made, width = torch.Generator().manual_seed(0), 144
    state: dict[str, Any] = {"ip_adapter": {}, "image_proj": {
        "proj.weight": torch.randn(4 * width, 32, generator=made) * 0.2,
        "proj.bias": torch.zeros(4 * width), "norm.weight": torch.ones(width), "norm.bias": torch.zeros(width),
    }}  # fmt: skip
    layers = [
        name.removesuffix(".processor")
        for name in pipe.unet.attn_processors
        if "attn2" in name
    ]
    for number, name in enumerate(layers):
        for which in ("k", "v"):
            shape = pipe.unet.get_submodule(f"{name}.to_{which}").weight.shape
            key = f"{2 * number + 1}.to_{which}_ip.weight"
            state["ip_adapter"][key] = torch.randn(shape, generator=made) * 0.3
    pipe.load_ip_adapter(
        state, subfolder=None, weight_name=None, image_encoder_folder=None
    )
    return pipe


def with_controlnet(pipe: Pipe, count: int = 1) -> Pipe:
    networks = [
        noisy(ControlNetModel.from_unet(pipe.unet), seed) for seed in range(count)
    ]
    return like(
        "StableDiffusionControlNetPipeline",
        pipe,
        controlnet=networks if count > 1 else networks[0],
    )


def with_t2i_adapter(pipe: Pipe) -> Pipe:
    torch.manual_seed(0)
    channels = list(pipe.unet.config.block_out_channels)
    adapter = T2IAdapter(
        channels=channels,
        num_res_blocks=1,
        downscale_factor=8,
        adapter_type="full_adapter",
    )
    return like("StableDiffusionAdapterPipeline", pipe, adapter=noisy(adapter, 0))


def with_freeu(pipe: Pipe) -> Pipe:
    pipe.enable_freeu(s1=0.2, s2=0.2, b1=1.8, b2=1.9)
    return pipe


def with_lora(pipe: Pipe) -> Pipe:
    pipe.load_lora_weights(str(LORAS), weight_name="fxemoji.safetensors")
    return pipe


class Doubled(AttnProcessor2_0):  # type: ignore[misc]  # diffusers is not typed here
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)


def with_processor(pipe: Pipe) -> Pipe:
    pipe.unet.set_attn_processor(Doubled())
    return pipe


def with_forward(pipe: Pipe) -> Pipe:
    forward = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: (0.9 * forward(*args, **kwargs)[0],)
    return pipe


def with_hook(pipe: Pipe) -> Pipe:
    pipe.unet.up_blocks[0].register_forward_hook(
        lambda _module, _inputs, output: 1.2 * output
    )
    return pipe


def with_gligen(pipe: Pipe) -> Pipe:
    return like(
        "StableDiffusionGLIGENPipeline",
        pipe,
        unet=other_unet(pipe, attention_type="gated"),
    )


def with_distillation(pipe: Pipe) -> Pipe:
    return like(
        "StableDiffusionPipeline", pipe, unet=other_unet(pipe, time_cond_proj_dim=16)
    )


def other_unet(pipe: Pipe, **config: Any) -> Any:
    torch.manual_seed(0)
    return UNet2DConditionModel.from_config(pipe.unet.config, **config).eval()


def with_word(pipe: Pipe) -> Pipe:
    pipe.load_textual_inversion(
        torch.randn(2, 144, generator=torch.Generator().manual_seed(0)), token="<cat>"
    )
    return pipe


def dimmed(
    _pipe: Pipe, _step: int, _timestep: Any, tensors: dict[str, Any]
) -> dict[str, Any]:
    return {"latents": 0.8 * tensors["latents"]}


GIVEN = {
    "prompt": None,
    "prompt_embeds": torch.randn(
        2, 24, 144, generator=torch.Generator().manual_seed(0)
    ),
}

PARTS: dict[str, Part] = {
    "nothing": (lambda pipe: pipe, {}),
    "ip_adapter": (
        with_ip_adapter,
        {"ip_adapter_image_embeds": [torch.ones(4, 1, 32)]},
    ),
    "controlnet": (with_controlnet, {"image": [PICTURE] * 2}),
    "two_controlnets": (
        lambda pipe: with_controlnet(pipe, 2),
        {"image": [[PICTURE] * 2] * 2},
    ),
    "t2i_adapter": (with_t2i_adapter, {"image": [PICTURE] * 2}),
    "pag": (
        lambda pipe: like("StableDiffusionPAGPipeline", pipe, pag_applied_layers="mid"),
        {"pag_scale": 3.0},
    ),
    "freeu": (with_freeu, {}),
    "lora": (with_lora, {"cross_attention_kwargs": {"scale": 0.5}}),
    "processor": (with_processor, {}),
    "forward": (with_forward, {}),
    "hook": (with_hook, {}),
    "distillation": (with_distillation, {}),
    "word": (with_word, {"prompt": ["a <cat>", "a red <cat> on a box"]}),
    "callback": (lambda pipe: pipe, {"callback_on_step_end": dimmed}),
    "embeddings": (lambda pipe: pipe, GIVEN),
}

OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "default": ((), {"attention": "default"}),
    "vanilla": ((), {"attention": "vanilla"}),
    "sliced": ((), {"attention": "sliced"}),
    "fused_qkv": ((), {"attention": "fused_qkv"}),
    "math": ((), {"attention": "math"}),
    "deepcache": (("caching.interval=1000",), {"caching": "deepcache"}),
    "first_block": ((), {"caching": "first_block"}),
    "spectrum": ((), {"caching": "spectrum"}),
    "guidance_interval": (OFF, {"caching": "guidance_interval"}),
    "pyramid": ((), {"caching": "pyramid_attention"}),
    "trace": ((), {"compiler": "trace"}),
    "inference_mode": ((), {"grad_mode": "inference_mode"}),
    "channels_last": ((), {"layout": "channels_last"}),
    "vae_slicing": ((), {"memory": ["vae_slicing"]}),
    "vae_tiling": ((), {"memory": ["vae_tiling"]}),
    "precomputed": ((), {"memory": ["precomputed_embeddings"]}),
}

REFUSED = {
    **dict.fromkeys((f"{part} {option}" for part in ("ip_adapter", "processor")
                     for option in ("default", "vanilla", "sliced", "fused_qkv")), "would replace the processors"),
    **dict.fromkeys((f"{part} {option}" for part in ("controlnet", "two_controlnets")
                     for option in ("deepcache", "first_block")), "without a ControlNet"),
    "t2i_adapter guidance_interval": "StableDiffusionAdapterPipeline has its own",
    "t2i_adapter pyramid": "needs the number of steps",
    "t2i_adapter spectrum": "needs the number of steps",
    **{f"{part} {option}": reason for option in ("deepcache", "first_block")
       for part, reason in (("t2i_adapter", "without a T2I-Adapter"), ("freeu", "without FreeU"),
                            ("forward", "would replace the UNet's forward"), ("hook", "hooks of up_blocks.0"),
                            ("lora", "cannot pass cross_attention_kwargs on"))},
    **{f"pag {option}": "StableDiffusionPAGPipeline has its own" for option in ("first_block", "guidance_interval")},
    "distillation guidance_interval": "takes the guidance scale as an input",
    "pag trace": "exchanges attention layers while it draws",
    "processor trace": "would not run the Python code of Doubled",
    "hook trace": "would not run the hooks or the own forward of up_blocks.0",
    "hook fused_qkv": "would leave out the hooks or the own forward of up_blocks.0",
    "forward trace": "own forward of the denoiser",
    "lora fused_qkv": "would ignore the LoRA",
    "lora precomputed": "scales a LoRA in the text encoders too",
}  # fmt: skip
"""What is refused, with the reason: when options are applied, or by the call whose arguments they cannot honour."""


def walk(part: str, options: list[str]) -> dict[str, str]:
    """Applies each option to a pipeline with a part; returns by option how far images differ, or the reason."""
    build, call = PARTS[part]
    pipe, found = build(packaged_pipe()), {}
    before = drawn(pipe, **call)
    assert part == "nothing" or np.abs(before - drawn(packaged_pipe())).max() > 0.01, (
        "the part changes the images"
    )
    for option in options:
        words, groups = OPTIONS[option]
        more = (
            {"num_inference_steps": 1}
            if option in ("deepcache", "first_block", "spectrum", "pyramid")
            else {}
        )
        wanted = drawn(pipe, **call | more) if more else before
        prompts = call.get("prompt") or ["a red apple", "a blue fish"]
        state = (type(pipe), {name: id(each) for name, each in pipe.components.items()})
        try:
            sdopt.optimize(
                pipe,
                *words,
                **groups,
                prompts=prompts if option == "precomputed" else (),
            )
        except ConflictError as error:
            assert state == (
                type(pipe),
                {name: id(each) for name, each in pipe.components.items()},
            )
            found[option] = str(error)
            continue
        try:
            found[option] = (
                f"{float(np.abs(drawn(pipe, **call | more) - wanted).max()):.4f}"
            )
        except UsageError as error:
            found[option] = str(error)
        sdopt.undo(pipe)
    assert np.array_equal(drawn(pipe, **call), before), "undone"
    return found


def require(part: str, options: list[str]) -> None:
    for option, seen in walk(part, options).items():
        reason = REFUSED.get(f"{part} {option}")
        if reason is None:
            assert float(seen) < 2e-3, (part, option, seen)
        else:
            assert reason in seen, (part, option, seen)


@pytest.mark.parametrize("part", ["ip_adapter", "controlnet"])
@pytest.mark.walk(1)
def test_the_commonest_parts(part: str) -> None:
    require(
        part, ["vanilla", "deepcache", "spectrum", "guidance_interval", "precomputed"]
    )


@pytest.fixture
def pipe() -> StableDiffusionPipeline:
    return packaged_pipe()


def test_what_changes_later_than_an_option_that_keeps_it_is_refused(pipe: Pipe) -> None:
    with_ip_adapter(pipe)
    embeds = PARTS["ip_adapter"][1]
    sdopt.optimize(pipe, caching="deepcache")
    drawn(pipe, **embeds)
    changes: list[tuple[Callable[[], Any], str]] = [
        (lambda: with_freeu(pipe), "at up_blocks.0"),
        (lambda: pipe.set_ip_adapter_scale(0.3), "processor"),
        (lambda: with_lora(pipe), "caching=deepcache: keeps the denoiser as it was"),
    ]
    for change, words in changes:
        change()
        with pytest.raises(UsageError, match=words):
            drawn(pipe, **embeds)
        sdopt.undo(pipe)
        if not hasattr(pipe.unet.up_blocks[0], "s1"):
            sdopt.optimize(pipe, caching="deepcache")
            drawn(pipe, **embeds)


def test_embeddings_of_ones_own_beside_encoded_prompts(pipe: Pipe) -> None:
    before = drawn(pipe, **GIVEN)
    sdopt.optimize(
        pipe, memory=["precomputed_embeddings"], prompts=["a red apple", "a blue fish"]
    )
    assert np.abs(drawn(pipe, **GIVEN) - before).max() < 1e-3
    with pytest.raises(UsageError, match="give prompt or prompt_embeds"):
        drawn(pipe, prompt_embeds=GIVEN["prompt_embeds"])
    with pytest.raises(UsageError, match="clip_skip was not encoded"):
        drawn(pipe, clip_skip=1)


@pytest.mark.parametrize("name", ["text_encoder", "tokenizer"])
def test_prompts_were_encoded_with_the_parts_from_before(pipe: Pipe, name: str) -> None:
    prompts = ["a red apple", "a blue fish"]
    sdopt.optimize(pipe, memory=["precomputed_embeddings"], prompts=prompts)
    pipe.register_modules(**{name: deepcopy(getattr(packaged_pipe(), name))})
    with pytest.raises(UsageError, match=rf"encoded before pipe\.{name} was exchanged"):
        drawn(pipe)


def test_a_fused_lora_cannot_be_scaled_by_a_call(pipe: Pipe) -> None:
    sdopt.optimize(
        pipe, f"lora.path={LORAS}", "lora.weight_name=fxemoji.safetensors", lora="fused"
    )
    with pytest.raises(UsageError, match="the LoRA is in the weights"):
        drawn(pipe, cross_attention_kwargs={"scale": 0.5})


def test_weights_that_were_joined_follow_a_later_change(pipe: Pipe) -> None:
    def changed(pipe: Pipe) -> Pipe:
        with torch.no_grad():
            for name, weight in pipe.unet.named_parameters():
                if "to_v" in name:
                    weight.mul_(0.2)
        return pipe

    wanted = drawn(changed(packaged_pipe()))
    assert (
        np.abs(
            drawn(changed(sdopt.optimize(pipe, attention="fused_qkv"))) - wanted
        ).max()
        < 1e-3
    )
    pipe = sdopt.undo(sdopt.optimize(packaged_pipe(), attention="fused_qkv"))
    assert np.abs(drawn(pipe) - drawn(packaged_pipe())).max() < 1e-4


@pytest.mark.slow
def test_another_pipeline_with_the_same_parts_reuses_nothing(pipe: Pipe) -> None:
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    other = like("StableDiffusionImg2ImgPipeline", pipe)

    def drawn_by_the_other() -> np.ndarray:
        call: dict[str, Any] = {
            "image": [PICTURE] * 2,
            "strength": 1.0,
            "num_inference_steps": 3,
            "guidance_scale": 3,
        }
        images: np.ndarray = other(
            ["a", "b"],
            generator=torch.Generator().manual_seed(0),
            output_type="np",
            **call,
        ).images
        return images

    wanted = drawn_by_the_other()
    caches: list[dict[str, Any]] = [
        {"caching": option}
        for option in ("deepcache", "first_block", "guidance_interval", "spectrum")
    ]
    for groups in (
        *caches,
        {"memory": "sequential_guidance"},
        {"compiler": "whole_step"},
    ):
        sdopt.optimize(pipe, **groups)
        if "caching" in groups:
            drawn(pipe)
        assert np.abs(drawn_by_the_other() - wanted).max() < 1e-4, groups
        sdopt.undo(pipe)


def test_a_step_is_compiled_where_nothing_else_sees_the_latents_nor_exchanges_the_scheduler(
    pipe: Pipe,
) -> None:
    sdopt.optimize(pipe, compiler="whole_step")
    with pytest.raises(UsageError, match="guidance_rescale="):
        drawn(pipe, guidance_rescale=0.7)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(UsageError, match="the program has exchanged it since"):
        drawn(pipe)


def test_a_hook_that_would_not_run_is_refused(pipe: Pipe) -> None:
    sdopt.optimize(pipe, caching="deepcache")
    sdopt.prove(
        pipe, height=SIZE, width=SIZE
    )  # its own hooks are none of the program's
    pipe.unet.register_forward_hook(lambda _module, _inputs, output: output)
    drawn(pipe)
    hook = pipe.unet.down_blocks[0].register_forward_hook(
        lambda _module, _inputs, output: output
    )
    with pytest.raises(UsageError, match=r"has changed it since \(at down_blocks\.0\)"):
        drawn(pipe)
    hook.remove()
    drawn(pipe)


def test_a_graph_runs_neither_later_hooks_nor_weights_in_the_places_of_others(
    pipe: Pipe,
) -> None:
    sdopt.optimize(pipe, compiler="trace")
    drawn(pipe)
    hook = pipe.unet.down_blocks[0].register_forward_hook(
        lambda _module, _inputs, output: output
    )
    with pytest.raises(UsageError, match=r"at down_blocks\.0\)"):
        drawn(pipe)
    hook.remove()
    layer = pipe.unet.mid_block.attentions[0].proj_out
    layer.weight = torch.nn.Parameter(0.5 * layer.weight.detach())
    with pytest.raises(UsageError, match=r"at mid_block\.attentions\.0\.proj_out"):
        drawn(pipe)


def test_a_callback_cannot_change_what_a_graph_keeps(pipe: Pipe) -> None:
    embeds = PARTS["ip_adapter"][1]
    sdopt.optimize(with_ip_adapter(pipe), compiler="trace")

    def weaker(
        pipe: Pipe, _step: int, _timestep: Any, _tensors: dict[str, Any]
    ) -> dict[str, Any]:
        pipe.set_ip_adapter_scale(0.3)
        return {}

    with pytest.raises(
        UsageError, match="compiler=trace: keeps the denoiser as it was"
    ):
        drawn(pipe, callback_on_step_end=weaker, **embeds)
    pipe.set_ip_adapter_scale(1.0)
    drawn(pipe, callback_on_step_end=dimmed, **embeds)


@pytest.mark.slow
def test_a_lora_of_text_encoders_that_are_gone_stays_as_it_is(pipe: Pipe) -> None:
    layer = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora"
    shapes = {"A": (2, 144), "B": (144, 2)}
    pipe.load_lora_weights(
        {f"{layer}_{which}.weight": torch.ones(each) for which, each in shapes.items()},
        "own",
    )
    sdopt.optimize(
        pipe, memory="precomputed_embeddings", prompts=["a red apple", "a blue fish"]
    )
    for change in (
        lambda: pipe.set_adapters("own", 0.5),
        pipe.disable_lora,
        pipe.unload_lora_weights,
    ):
        with pytest.raises(
            UsageError, match=r"had a part of the LoRA: call sdopt\.undo"
        ):
            change()


def test_diffusers_would_pass_over_a_lora_in_a_compiled_network(pipe: Pipe) -> None:
    before = drawn(with_lora(pipe))
    encoder = "compiler.targets=[text_encoder]"
    for words, compiler in ((), "trace"), ((), "inductor"), ((encoder,), "inductor"):
        sdopt.optimize(pipe, *words, compiler=compiler)
        for change in (
            lambda: pipe.set_adapters(pipe.get_active_adapters(), 0.5),
            pipe.disable_lora,
            pipe.fuse_lora,
        ):
            with pytest.raises(
                UsageError, match="would change the LoRA in the other networks alone"
            ):
                change()
        sdopt.undo(pipe)
    assert np.array_equal(drawn(pipe), before)


@pytest.mark.slow
def test_a_callback_may_end_guidance(pipe: Pipe) -> None:
    """As diffusers documents it; the outputs that were kept are of two samples, and would become those of one."""

    def unguided(
        pipe: Pipe, step: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        if step != 2:
            return {}
        pipe._guidance_scale = 0.0
        return {"prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]}

    call = {
        "callback_on_step_end": unguided,
        "callback_on_step_end_tensor_inputs": ["prompt_embeds"],
    }
    for option in (
        "deepcache",
        "first_block",
        "guidance_interval",
        "pyramid_attention",
        "spectrum",
    ):
        sdopt.optimize(pipe, caching=option)
        assert len(drawn(pipe, num_inference_steps=6, **call)) == 2, option
        sdopt.undo(pipe)


def test_pictures_of_an_adapter_may_have_several_rows(pipe: Pipe) -> None:
    embeds = {
        "ip_adapter_image_embeds": [
            torch.randn(4, 1, 32, generator=torch.Generator().manual_seed(1))
        ]
    }
    wanted = drawn(with_ip_adapter(pipe), **embeds)
    sdopt.optimize(pipe, memory="sequential_guidance")
    assert np.abs(drawn(pipe, **embeds) - wanted).max() < 1e-4


def test_a_pipeline_without_its_text_encoder_is_proved(pipe: Pipe) -> None:
    pipe.text_encoder = None
    embeddings = dict.fromkeys(
        ("prompt_embeds", "negative_prompt_embeds"), GIVEN["prompt_embeds"]
    )
    assert sdopt.prove(
        sdopt.optimize(pipe, attention="vanilla"), **embeddings, height=SIZE, width=SIZE
    ).engaged


def without_vae(pipe: Pipe) -> Pipe:
    pipe.vae, pipe.tokenizer = None, None
    return pipe


def with_own_layer(pipe: Pipe) -> Pipe:
    layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_v
    layer.forward = lambda states: torch.nn.Linear.forward(layer, states) * 0.2
    return pipe


def with_own_encoding(pipe: Pipe) -> Pipe:
    encode = pipe.encode_prompt
    pipe.encode_prompt = lambda *given, **named: tuple(
        found * 0.4 for found in encode(*given, **named)
    )
    return pipe


def with_large_weights(pipe: Pipe) -> Pipe:
    with torch.no_grad():
        pipe.vae.decoder.conv_in.weight[0] = 70_000
    return pipe


def with_unknown_layers(pipe: Pipe) -> Pipe:
    kinds = ["AttnDownBlock2D", *pipe.unet.config.down_block_types[1:]]
    return like(
        "StableDiffusionPipeline", pipe, unet=other_unet(pipe, down_block_types=kinds)
    )


def with_transformer(pipe: Pipe) -> Pipe:
    small = {
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "cross_attention_dim": 24,
    }
    network = diffusers.PixArtTransformer2DModel(
        sample_size=8, caption_channels=32, **small
    )
    parts = {
        "vae": pipe.vae,
        "scheduler": pipe.scheduler,
        "tokenizer": None,
        "text_encoder": None,
    }
    return diffusers.PixArtSigmaPipeline(transformer=network, **parts)


def compiled(pipe: Pipe, part: str) -> Pipe:
    if part == "unet":
        pipe.unet = torch.compile(pipe.unet)
    else:
        pipe.vae.decoder.compile()
    return pipe


def offloaded(pipe: Pipe) -> Pipe:
    pipe.unet.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    return pipe


def quantized(pipe: Pipe) -> Pipe:
    pipe.unet.to(torch.float8_e4m3fn)
    return pipe


WHOLE_STEP = {"compiler=whole_step": "guidance and the scheduler's step"}
NO_VAE, OWN_LAYER = (
    "changes the VAE, and this pipeline has none",
    r"own forward of mid_block.*attn1\.to_v",
)
UNKNOWN_LAYERS, SEVERAL_CALLS = (
    "runs layers of AttnDownBlock2D blocks one by one",
    "calls of the denoiser in a step",
)


@pytest.mark.parametrize(
    ("build", "refused"),
    [
        (
            with_gligen,
            {
                "caching=deepcache": "GLIGEN",
                "caching=tome": "GLIGEN",
                "compiler=trace": "exchanges attention layers",
            },
        ),
        *(
            (
                partial(like, f"StableDiffusion{kind}Pipeline"),
                dict.fromkeys(
                    (
                        "caching=deepcache",
                        "caching=pyramid_attention",
                        "caching=spectrum",
                    ),
                    SEVERAL_CALLS,
                ),
            )
            for kind in ("SAG", "Panorama")
        ),
        (
            with_unknown_layers,
            dict.fromkeys(("caching=deepcache", "caching=first_block"), UNKNOWN_LAYERS),
        ),
        (
            with_own_layer,
            dict.fromkeys(
                ("attention=fused_qkv", "precision=int8_sdnq", "caching=tome"),
                OWN_LAYER,
            ),
        ),
        (with_own_encoding, {"memory=precomputed_embeddings": "own encode_prompt"}),
        (
            with_ip_adapter,
            {
                "memory=layerwise_casting": "cast the pictures of the IP-Adapter to 8 bits"
            },
        ),
        (
            without_vae,
            dict.fromkeys(
                (
                    "layout=channels_last",
                    "memory=vae_slicing",
                    "precision=fp16_vae_fp32",
                ),
                NO_VAE,
            )
            | {"memory=precomputed_embeddings": "has no tokenizer"},
        ),
        (with_controlnet, WHOLE_STEP),
        (PARTS["pag"][0], WHOLE_STEP),
        (
            with_transformer,
            {
                "caching=tome": "not for PixArt-Sigma, whose denoiser is a transformer",
                "attention=sliced": "the attention of a PixArtTransformer2DModel in slices",
            },
        ),
        (
            partial(compiled, part="unet"),
            {"attention=vanilla": "pipe.unet is compiled already"},
        ),
        (
            partial(compiled, part="vae"),
            {"attention=vanilla": "pipe.vae is compiled already"},
        ),
        (offloaded, {"attention=vanilla": "hooks move the weights of pipe.unet"}),
        (quantized, {"layout=channels_last": "are quantized already"}),
    ],
)
def test_what_an_option_cannot_do_on_a_pipeline_is_refused(
    pipe: Pipe, build: Callable[..., Pipe], refused: dict[str, str]
) -> None:
    built = build(pipe=pipe)
    for chosen, words in refused.items():
        group, _, option = chosen.partition("=")
        prompts = ["a red apple"] if option == "precomputed_embeddings" else []
        with pytest.raises(ConflictError, match=words):
            sdopt.optimize(built, **{group: option}, prompts=prompts)


def test_frames_of_a_video_are_looked_at(pipe: Pipe) -> None:
    motion = diffusers.MotionAdapter(
        tuple(pipe.unet.config.block_out_channels), 1, motion_norm_num_groups=2
    )
    parts = {
        name: pipe.components[name]
        for name in ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
    }
    video = sdopt.optimize(
        diffusers.AnimateDiffPipeline(**parts, motion_adapter=motion), attention="math"
    )
    found = sdopt.prove(video, num_frames=2, height=SIZE, width=SIZE)
    assert (found.engaged, found.broken) == (True, "")


def test_a_pipeline_without_a_vae_is_proved_by_its_latents(pipe: Pipe) -> None:
    pipe.vae = None
    assert sdopt.prove(
        sdopt.optimize(pipe, attention="math"),
        output_type="latent",
        height=SIZE,
        width=SIZE,
    ).engaged


def test_weights_that_float16_cannot_hold_may_stay_in_float32(pipe: Pipe) -> None:
    large = with_large_weights(pipe)
    with pytest.raises(
        ConflictError, match=r"vae\.decoder\.conv_in\.weight are too large for float16"
    ):
        sdopt.optimize(large, precision="fp16")
    sdopt.optimize(large, precision="fp16_vae_fp32")


def test_steps_without_guidance_run_half_of_all_that_has_a_row_per_sample(
    pipe: Pipe,
) -> None:
    """As diffusers draws with a guidance scale of just above 1, which leaves the prediction with the prompt."""
    control, call = with_controlnet(pipe), PARTS["controlnet"][1]

    def guided(
        pipe: Pipe, _step: int, _timestep: Any, _tensors: dict[str, Any]
    ) -> dict[str, Any]:
        pipe._guidance_scale = 4.5
        return {}

    wanted = drawn(
        control, guidance_scale=1 + 1e-6, callback_on_step_end=guided, **call
    )
    sdopt.optimize(
        control, "caching.start=0.5", "caching.stop=1.0", caching="guidance_interval"
    )
    assert np.abs(drawn(control, guidance_scale=4.5, **call) - wanted).max() < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_each_part_with_each_option(part: str) -> None:
    require(part, list(OPTIONS))
