"""The code that adopts an option by hand does to a pipeline of diffusers what the option does."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline

from sdopt.assembly import Assembly
from sdopt.measure.trace import trace_call
from sdopt.options.attention import Xformers
from sdopt.options.base import Optimization
from sdopt.options.compiler import Inductor, Regional
from sdopt.options.lora import Fused
from sdopt.options.offload import ModelOffload, SequentialOffload
from sdopt.options.precision import Precision
from sdopt.programs.writer import written
from sdopt.reference import LORAS, MODEL
from tests.fixtures import CPU, Compose

TOGETHER = (
    (
        "precision=bf16",
        "attention=vanilla",
        "layout=channels_last",
        "grad_mode=inference_mode",
    )
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
@pytest.mark.walk(1)
def test_code_and_options_do_the_same(
    overrides: tuple[str, ...], variant: Compose, untouched: StableDiffusionPipeline
) -> None:
    chosen = variant(*overrides)
    program = written(chosen, CPU)
    setup = program.casting + program.setup
    assert "import sdopt" not in setup.imports, setup
    call = {
        "prompt": ["a red apple", "a green tree"],
        "num_inference_steps": 1,
        "height": 72,
        "width": 72,
    }

    by_hand = deepcopy(untouched)
    called_by = (
        [f"with {', '.join(setup.around)}:", "    pipe(**call)"]
        if setup.around
        else ["pipe(**call)"]
    )
    code = "\n".join([*setup.imports, *setup.lines, *called_by])
    shown = seen(by_hand, lambda: exec(code, {"pipe": by_hand, "call": call}))

    by_option = deepcopy(untouched).to(
        dtype=chosen.optimizations["precision"].load_kwargs()["dtype"]
    )
    assembly = Assembly.of(by_option, dict(chosen.applied))

    def called() -> None:
        with assembly.entered():
            by_option(**call)

    assert shown == seen(by_option, called)


@pytest.mark.parametrize("option", OTHERS, ids=repr)
def test_all_other_code_is_python(option: Optimization) -> None:
    *before, last = option.diffusers_lines
    compile(
        "\n".join([*before, f"{last} pass" if last.startswith("with ") else last]),
        repr(option),
        "exec",
    )
