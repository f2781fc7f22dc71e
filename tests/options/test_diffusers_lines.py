"""The code that adopts an option by hand does to a pipeline of diffusers what the option does."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor

from sdopt.assembly import Assembly
from sdopt.measure.trace import trace_call
from sdopt.options.attention import Xformers
from sdopt.options.base import Optimization
from sdopt.options.compiler import Inductor, Regional
from sdopt.options.lora import Fused
from sdopt.options.offload import ModelOffload, SequentialOffload
from sdopt.options.precision import Precision
from sdopt.reference import LORAS, MODEL
from sdopt.statistics.adoption import lines_of
from sdopt.variant import Variant
from tests.fixtures import Compose
from tests.options.hosts import row_of

TOGETHER = (
    ("precision=bf16", "attention=vanilla", "layout=channels_last", "grad_mode=inference_mode")
    + ("memory=[vae_slicing,vae_tiling]", "memory.vae_tiling.tile_size=64"),
    ("attention=sliced", "memory=[layerwise_casting]")
    + ("lora=loaded", f"lora.path={LORAS}", "lora.weight_name=fxemoji.safetensors"),
    ("attention=fused_qkv",),
)
"""Options that a trace on a CPU shows, as many at once as go together."""

OTHERS = (
    Inductor(targets=["denoiser", "decoder"], fullgraph=True),
    Regional(),
    Precision("float16", "float16"),
    Precision(tf32="on"),
    Xformers(),
    Fused("owner/name", "style.safetensors"),
    ModelOffload(),
    SequentialOffload(),
)
"""Options that have code and that no test of minutes on a CPU shows."""


@pytest.fixture(scope="module")
def untouched() -> StableDiffusionPipeline:
    torch.manual_seed(0)
    pipe = StableDiffusionPipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lines(chosen: Variant, plain: Variant) -> list[str]:
    return lines_of(row_of(chosen), row_of(plain))


def seen(pipe: StableDiffusionPipeline, call: Any) -> dict[str, Any]:
    """What a trace shows of a call."""
    trace = trace_call(pipe, call, False)
    step = trace.denoiser
    return {
        "operators": dict(step.operators),
        "products": dict(step.product_dtypes),
        "channels-last": step.channels_last,
        "inference mode": step.inference_mode,
        "decoded": trace.decoder_inputs,
        "stored": sorted({str(weight.dtype) for weight in pipe.unet.parameters()}),
    }


@pytest.mark.parametrize("overrides", TOGETHER, ids=lambda overrides: overrides[0])
def test_code_and_options_do_the_same(
    overrides: tuple[str, ...], variant: Compose, untouched: StableDiffusionPipeline
) -> None:
    chosen, plain = variant(*overrides), variant()
    code = lines(chosen, plain)
    assert "import sdopt" not in code, code
    call = {"prompt": ["a red apple", "a green tree"], "num_inference_steps": 1, "height": 72, "width": 72}

    by_hand = deepcopy(untouched)
    # Code without anything around the call ends before it.
    code = code if code[-1].startswith("    image") else [*code, "image = pipe(prompt).images[0]"]
    program = "\n".join(code).replace("pipe(prompt)", "pipe(**call)")
    shown = seen(by_hand, lambda: exec(program, {"pipe": by_hand, "call": call}))

    by_option = deepcopy(untouched).to(dtype=chosen.optimizations["precision"].load_kwargs()["dtype"])
    assembly = Assembly.of(by_option, dict(chosen.applied))

    def called() -> None:
        with assembly.entered():
            by_option(**call)

    assert shown == seen(by_option, called)


def test_code_for_the_default_attention_does_not_turn_on_another(
    variant: Compose, untouched: StableDiffusionPipeline
) -> None:
    code = lines(variant("attention=default"), variant("attention=vanilla"))
    pipe = deepcopy(untouched)
    pipe.unet.set_attn_processor(AttnProcessor())
    exec("\n".join(line for line in code if "image" not in line), {"pipe": pipe})
    assert {type(processor).__name__ for processor in pipe.unet.attn_processors.values()} == {"AttnProcessor2_0"}


@pytest.mark.parametrize("option", OTHERS, ids=repr)
def test_all_other_code_is_python(option: Optimization) -> None:
    *before, last = option.diffusers_lines
    compile("\n".join([*before, f"{last} pass" if last.startswith("with ") else last]), repr(option), "exec")
