"""What options assume of a pipeline that a program has built, and that may have more parts than those of a study.

Each function returns a line for whatever of a pipeline breaks the assumption; [] if it holds. An option lists in
`assumes` what it replaces, computes itself, or keeps, so that `sdopt.optimize` refuses it before anything is changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from sdopt.pipelines.family import family_of_class
from sdopt.pipelines.loras import lora_layers, networks_of_a_lora
from sdopt.pipelines.parts import (
    Pipeline,
    denoiser_name,
    denoiser_of,
    moves_weights,
    networks_of,
    quantized_layer,
    unwrapped,
)

if TYPE_CHECKING:
    import torch

COMMON_PROCESSORS = (
    *(
        "AttnProcessor",
        "AttnProcessor2_0",
        "XFormersAttnProcessor",
        "SlicedAttnProcessor",
        "FusedAttnProcessor2_0",
    ),
    *("AttnAddedKVProcessor", "AttnAddedKVProcessor2_0", "SlicedAttnAddedKVProcessor"),
)
"""diffusers' processors that all compute the same attention."""


def common_attention(pipe: Pipeline) -> list[str]:
    """For options that replace attention processors: they compute nothing but attention."""
    denoiser = unwrapped(denoiser_of(pipe))
    if denoiser_name(pipe) != "unet":
        return []  # whose processors are of their own kinds, and which options leave in place
    kinds = {
        type(processor)
        for processor in getattr(denoiser, "attn_processors", {}).values()
    }
    others = sorted(
        k.__name__
        for k in kinds
        if k.__name__ not in COMMON_PROCESSORS
        or not k.__module__.startswith("diffusers.")
    )
    return _replaced(others)


def _replaced(processors: list[str]) -> list[str]:
    """Returns that processors would be replaced by others, which do not compute what they do; [] of none."""
    if not processors:
        return []
    what = (
        "the IP-Adapter"
        if any("IPAdapter" in name for name in processors)
        else "what they compute"
    )
    return [
        f"would replace the processors {', '.join(processors)}, and leave out {what}: choose attention=math, or none"
    ]


def fused_processors(pipe: Pipeline) -> list[str]:
    """For an option that joins projections: the transformers that get one processor for all layers have their own."""
    denoiser = unwrapped(denoiser_of(pipe))
    code: Any = getattr(type(denoiser), "fuse_qkv_projections", None)
    if denoiser_name(pipe) == "unet" or code is None:
        return []
    names = code.__code__.co_names
    if "set_attn_processor" not in names:
        return []  # it leaves them in place
    fused = [name.removeprefix("Fused") for name in names if name.startswith("Fused")]
    alike = (*fused, *COMMON_PROCESSORS)
    others = set()
    for processor in denoiser.attn_processors.values():
        kind = type(processor)
        if kind.__name__ not in alike or not kind.__module__.startswith("diffusers."):
            others.add(kind.__name__)
    return _replaced(sorted(others))


def own_blocks(pipe: Pipeline) -> list[str]:
    """For options that run the blocks of a denoiser themselves: nothing else takes part in them."""
    if denoiser_name(pipe) != "unet":
        return _own_transformer_blocks(pipe)
    from diffusers import UNet2DConditionModel

    unet = denoiser_of(pipe)
    adding = {
        "a ControlNet": hasattr(pipe, "controlnet"),
        "a T2I-Adapter": hasattr(pipe, "adapter"),
    }
    adding["GLIGEN"] = getattr(unet, "position_net", None) is not None
    blocks = [
        f"runs the UNet's blocks itself, without {what}"
        for what, there in adding.items()
        if there
    ]
    if (
        "forward" in vars(unet)
        or getattr(type(unet), "forward", None) is not UNet2DConditionModel.forward
    ):
        blocks.append(
            "would replace the UNet's forward, which is not that of diffusers"
        )
    if unet.class_embedding is not None:
        blocks.append("runs the UNet's blocks itself, without its class embedding")
    named = dict(unet.named_modules())
    for name in filter(_BLOCK.fullmatch, named):
        block: Any = named[name]
        if all(
            getattr(block, factor, None) is not None
            for factor in ("s1", "s2", "b1", "b2")
        ):
            return [
                *blocks,
                "runs the UNet's blocks itself, without FreeU: call pipe.disable_freeu() first",
            ]
        if (
            "forward" in vars(block)
            or _hooks(block)
            or not type(block).__module__.startswith("diffusers.")
        ):
            return [
                *blocks,
                f"runs the UNet's blocks itself, without the forward or the hooks of {name}",
            ]
    return blocks


def _own_transformer_blocks(pipe: Pipeline) -> list[str]:
    """Checks that nothing but a transformer itself takes part in its blocks."""
    denoiser = denoiser_of(pipe)
    if hasattr(pipe, "controlnet"):
        return ["runs the transformer's blocks itself, without a ControlNet"]
    for name, module in denoiser.named_modules():
        if type(module).__name__.endswith("Block") and (
            _hooks(module) or "forward" in vars(module)
        ):
            return [
                f"runs the transformer's blocks itself, without the forward or the hooks of {name}"
            ]
    return []


_BLOCK = re.compile(r"mid_block|(down|up)_blocks\.\d+")


def ungated_blocks(pipe: Pipeline) -> list[str]:
    """For options that replace the forward of transformer blocks: these have no further layers (GLIGEN)."""
    blocks = [
        block
        for block in denoiser_of(pipe).modules()
        if type(block).__name__ == "BasicTransformerBlock"
    ]
    if all(getattr(block, "fuser", None) is None for block in blocks):
        return []
    return ["replaces the forward of transformer blocks, and would leave out GLIGEN"]


def unchanged_layers(pipe: Pipeline) -> list[str]:
    """For options that replace or join layers: a program has neither hooked them nor changed how they compute."""
    for name, module in unwrapped(denoiser_of(pipe)).named_modules():
        if name and (
            _hooks(module) or {"forward", "_conv_forward"} & vars(module).keys()
        ):
            return [
                f"replaces layers, and would leave out the hooks or the own forward of {name}: remove them first"
            ]
    return []


def two_halves(pipe: Pipeline) -> list[str]:
    """For options that know the batch of a denoiser: each sample without, and then with the prompt."""
    return _calls_of(pipe, ("", "ControlNet"), "the two halves of the batch")


def one_call_a_step(pipe: Pipeline) -> list[str]:
    """For options that use a step's results in the next call of the denoiser: that is the next step, of all samples.

    Self-attention guidance calls the denoiser twice in a step, and a panorama once for each view.
    """
    return _calls_of(pipe, _ONE_CALL, "the calls of the denoiser in a step")


_ONE_CALL = (
    *(
        "",
        "ControlNet",
        "ControlNetUnion",
        "ControlNetXS",
        "PAG",
        "ControlNetPAG",
        "Adapter",
        "GLIGEN",
    ),
    *("InstructPix2Pix", "Depth2Img", "LDM3D", "Model"),
)
"""The kinds of pipelines that call the denoiser once in a step, by the middle of their class names."""


def counted_steps(pipe: Pipeline) -> list[str]:
    """For options that ask at each step how many there are."""
    if hasattr(type(pipe), "num_timesteps"):
        return []
    return [f"needs the number of steps, which a {type(pipe).__name__} does not say"]


def usual_guidance(pipe: Pipeline) -> list[str]:
    """For options that compute guidance and the scheduler's step: no other network sees the latents in between."""
    return _calls_of(pipe, ("",), "guidance and the scheduler's step")


def _calls_of(pipe: Pipeline, kinds: tuple[str, ...], what: str) -> list[str]:
    """Checks that a pipeline's call is one of those whose steps are known."""
    import diffusers

    families = ("StableDiffusion", "StableDiffusionXL", "LatentConsistency")
    words = product(families, kinds, ("", "Img2Img", "Inpaint"), ("Pipeline",))
    names = map("".join, words)
    calls = [
        getattr(diffusers, name).__call__ for name in names if hasattr(diffusers, name)
    ]
    if family_of_class(type(pipe).__name__) is not None and type(
        pipe
    ).__module__.startswith("diffusers."):
        return []
    if type(pipe).__call__ in calls or type(pipe).__name__.startswith("AltDiffusion"):
        return []
    return [f"changes {what}, of which the call of a {type(pipe).__name__} has its own"]


def nothing_but_tensors(pipe: Pipeline) -> list[str]:
    """For options that keep a graph of the denoiser: no Python code takes part in later runs."""
    denoiser = unwrapped(denoiser_of(pipe))
    call: Any = inspect.unwrap(type(pipe).__call__)
    if _EXCHANGES & {*call.__code__.co_names}:
        return [
            f"keeps a graph, and the call of a {type(pipe).__name__} exchanges attention layers while it draws"
        ]
    processors = {
        type(processor)
        for processor in getattr(denoiser, "attn_processors", {}).values()
    }
    if others_of_a_kind := sorted(
        kind.__name__
        for kind in processors
        if not kind.__module__.startswith("diffusers.")
    ):
        return [
            f"keeps a graph, which would not run the Python code of {', '.join(others_of_a_kind)} again"
        ]
    changed = [
        name
        for name, module in denoiser.named_modules()
        if _hooks(module) or "forward" in vars(module)
    ]
    if not changed:
        return []
    place = changed[0] or "the denoiser"
    return [
        f"keeps a graph, which would not run the hooks or the own forward of {place} again: remove them first"
    ]


_EXCHANGES = {
    *("attn_processors", "set_attn_processor", "processor"),
    *("enable_fuser", "register_attention_control", "prepare_unet"),
}
"""Names in the code of a call that exchanges attention layers or their processors: PAG, self-attention guidance, and
GLIGEN, which grounds only the first steps."""


def _hooks(module: torch.nn.Module) -> bool:
    registry = vars(module).get(
        "_diffusers_hook"
    )  # empty after a call that named a branch to diffusers' caches
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or (registry is not None and registry.hooks)
    )


def plain_weights(pipe: Pipeline) -> list[str]:
    """For options that cast, move, join or convert weights: these are numbers of the type that they stand for."""
    layer = quantized_layer(unwrapped(denoiser_of(pipe)))
    if layer is None:
        return []
    return [
        f"the weights of the denoiser are quantized already (such as {layer}): load it without that"
    ]


def within_float16(pipe: Pipeline, kept: Collection[str]) -> list[str]:
    """For options that compute all networks but `kept` in float16, in which numbers above 65,504 become infinite."""
    for name, network in networks_of(pipe).items():
        for key, weight in network.named_parameters() if name not in kept else ():
            if (
                weight.is_floating_point()
                and weight.element_size() > 1
                and weight.detach().half().isinf().any()
            ):
                return [
                    f"weights in {name}.{key} are too large for float16, and images would be black: choose bf16"
                ]
    return []


def usual_encoding(pipe: Pipeline) -> list[str]:
    """For options that encode prompts beforehand: what a pipeline does with embeddings that are given is known."""
    encode: Any = getattr(type(pipe), "encode_prompt", None)
    lacking = [
        name
        for name in ("text_encoder", "tokenizer")
        if getattr(pipe, name, None) is None
    ]
    if encode is None or lacking:
        has = ", ".join(lacking) or "encode_prompt"
        return [
            f"encodes prompts beforehand, and this {type(pipe).__name__} has no {has}"
        ]
    if "encode_prompt" not in vars(pipe) and encode.__module__.startswith("diffusers."):
        return []
    return [
        "encodes prompts beforehand, and this pipeline's own encode_prompt would change them once more: remove it"
    ]


def no_lora(pipe: Pipeline) -> list[str]:
    """For options that load a LoRA: diffusers would switch another one off, or fuse it too."""
    if not lora_layers(*networks_of_a_lora(pipe)):
        return []
    return [
        "this pipeline has a LoRA already, which would no longer count: unload it, or fuse it into the weights"
    ]


def own_weights(pipe: Pipeline) -> list[str]:
    """For options that read or join weights of the denoiser: no LoRA lies beside them."""
    return [LEAVES_A_LORA_OUT] if lora_layers(denoiser_of(pipe)) else []


LEAVES_A_LORA_OUT = (
    "uses the model's own weights, and would ignore the LoRA: choose lora=fused"
)


def no_projected_pictures(pipe: Pipeline) -> list[str]:
    """For options that store weights in 8 bits: diffusers casts an IP-Adapter's pictures to the type of its weights."""
    if getattr(unwrapped(denoiser_of(pipe)), "encoder_hid_proj", None) is None:
        return []
    return [
        "diffusers would cast the pictures of the IP-Adapter to 8 bits, too, and fail: choose precision=bf16"
    ]


def a_vae(pipe: Pipeline) -> list[str]:
    """For options that change the VAE: a pipeline that returns latents may have none."""
    return (
        []
        if getattr(pipe, "vae", None) is not None
        else ["changes the VAE, and this pipeline has none"]
    )


def call_without_gradients(pipe: Pipeline) -> list[str]:
    """For options that take the decorator off a pipeline's call, which switches gradients off."""
    if hasattr(type(pipe).__call__, "__wrapped__"):
        return []
    return [
        f"the call of a {type(pipe).__name__} is not decorated with torch.no_grad(), as diffusers' are"
    ]


def as_loaded(pipe: Pipeline, networks: dict[str, torch.nn.Module]) -> Iterator[str]:
    """Yields what was done to networks that all options assume not to be: they are compiled, or hooks move them."""
    import torch

    for name, network in networks.items():
        modules = list(network.modules())
        class_of_it = (
            isinstance(module, torch.jit.ScriptModule)
            or unwrapped(module) is not module
            or getattr(module, "_compiled_call_impl", None) is not None
            for module in modules
        )
        if any(class_of_it):
            yield f"pipe.{name} is compiled already: apply the options to the pipeline as loaded, with compiler=…"
        elif moves_weights(network):
            yield f"hooks move the weights of pipe.{name}: remove them (pipe.remove_all_hooks()), and choose memory=…"
    if getattr(pipe, "hf_device_map", None):
        yield "the pipeline is spread over devices: call pipe.reset_device_map() first"


def structure_of(network: Any, graph: bool) -> dict[str, Any]:
    """Returns by layer the settings and hooks that a graph of a network, or layers joined from it, no longer follow.

    Leaves out the values of tensors, which both follow, and the hooks by which sdopt observes.
    With `graph`, a graph runs in the network's place, without its own hooks, and with the parameters that it had.
    """
    structure = {}
    for name, module in network.named_modules():
        hooks = _own_hooks(module) if name or graph else []
        weights = list(map(id, module._parameters.values())) if graph else []
        structure[name] = type(module), _settings(vars(module)), hooks, weights
    return structure


def _own_hooks(module: torch.nn.Module) -> list[Any]:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [
        hook
        for hook in hooks
        if not str(getattr(hook, "__module__", "")).startswith("sdopt.")
    ]


def _settings(attributes: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in attributes.items():
        # Tracing puts modules into `eval` mode, in which a pipeline runs them anyway.
        left_out = name.startswith("_") or name == "training"
        if left_out and name not in _SWITCHES:
            continue
        if name == "processor":
            settings[name] = type(value), _settings(vars(value))
        else:
            settings[name] = _plain(value)
    return settings


_SWITCHES = ("_disable_adapters", "_active_adapter")
"""peft's attributes of a layer that say whether and which LoRA is active."""


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)  # diffusers scales a LoRA for a call, and back
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | str | None) else type(value)
