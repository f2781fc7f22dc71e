"""Options on a program's own pipeline with a transformer: applied, proved, taken back, refused."""

from copy import deepcopy
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0

import sdopt
from sdopt.errors import ConflictError
from sdopt.pipelines.family import class_of, family_named
from tests.pipelines.tiny import TINY, bria, tiny

CALL: dict[str, Any] = {"height": 64, "width": 64, "max_sequence_length": 64}


def images(pipe: Any, **call: Any) -> np.ndarray:
    """Draws two images of one seed, in six steps."""
    prompts, noise = ["a red circle", "a blue house"], torch.Generator().manual_seed(0)
    drawn: np.ndarray = pipe(
        prompts,
        num_inference_steps=6,
        generator=noise,
        output_type="np",
        **CALL,
        **call,
    ).images
    return drawn


@pytest.fixture
def pipe() -> Any:
    return tiny("flux")


def test_options_are_proved_and_taken_back(pipe: Any) -> None:
    before = images(pipe)
    sdopt.optimize(
        pipe, "caching.threshold=10", caching="first_block", attention="math"
    )
    changed = images(pipe)
    assert np.abs(changed - before).max() > 1e-3
    report = sdopt.prove(pipe, **CALL)
    assert report.engaged, str(report)
    assert {found.axis for found in report.evidence} == {"caching", "attention"}
    sdopt.undo(pipe)
    assert np.array_equal(images(pipe), before)


def test_what_is_not_for_transformers_is_refused_before_anything_changes(
    pipe: Any,
) -> None:
    with pytest.raises(ConflictError, match=r"caching=deepcache: not for FLUX\.1"):
        sdopt.optimize(pipe, caching="deepcache")
    with pytest.raises(ConflictError, match="choose scheduler=flow_euler"):
        sdopt.optimize(pipe, scheduler="ddim")


def test_processors_that_joined_projections_would_replace_are_kept() -> None:
    """Those of SD 3: an IP-Adapter, or a program's own, would be left out of all images."""
    pipe = tiny("sd3", qk_norm=None)

    class Halved(JointAttnProcessor2_0):  # type: ignore[misc]
        pass

    pipe.transformer.set_attn_processor(Halved())
    with pytest.raises(ConflictError, match="would replace the processors Halved"):
        sdopt.optimize(pipe, attention="fused_qkv")
    pipe.transformer.set_attn_processor(JointAttnProcessor2_0())
    sdopt.optimize(pipe, attention="fused_qkv")


def test_a_class_that_a_program_derives_is_of_its_family(pipe: Any) -> None:
    before = images(pipe)
    pipe.__class__ = type("Own", (type(pipe),), {})
    prompts = ["a red circle", "a blue house"]
    length = "memory.precomputed_embeddings.max_sequence_length=64"
    sdopt.optimize(pipe, length, memory=["precomputed_embeddings"], prompts=prompts)
    assert np.abs(images(pipe) - before).max() < 1e-3
    assert class_of(pipe) == "FluxPipeline"


def test_a_pipeline_of_the_community_with_two_encoders_and_a_unet_is_an_sdxl() -> None:
    """By its class alone it would decode with the tiny autoencoder of another family."""
    cls: Any = type("LongPromptsPipeline", (DiffusionPipeline,), {})
    pipe = object.__new__(cls)
    vars(pipe).update(unet=1, text_encoder_2=1)
    assert family_named(class_of(pipe)).pipeline == "StableDiffusionXLPipeline"
    vars(pipe).update(text_encoder_2=None)
    assert class_of(pipe) == "LongPromptsPipeline"


def test_half_precision_keeps_what_a_text_encoder_keeps(pipe: Any) -> None:
    sdopt.optimize(pipe, precision="fp16")
    types = {weight.dtype for weight in pipe.text_encoder_2.parameters()}
    assert types == {torch.float16, torch.float32}
    assert {weight.dtype for weight in pipe.transformer.parameters()} == {torch.float16}


@pytest.mark.parametrize(
    "caching", ["first_block", "pyramid_attention", "spectrum", "taylorseer"]
)
@pytest.mark.walk(2)
def test_a_plain_pipeline_may_have_the_same_transformer_in_another_thread(
    pipe: Any, caching: str
) -> None:
    plain = type(pipe)(**pipe.components | {"scheduler": deepcopy(pipe.scheduler)})
    plain.set_progress_bar_config(disable=True)
    before = images(plain)
    keys = ["caching.threshold=10"] if caching == "first_block" else []
    sdopt.optimize(pipe, *keys, caching=caching)
    alone, beside = images(pipe), []

    def draw_beside(
        _pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        if step == 3:
            thread = Thread(target=lambda: beside.append(images(plain)))
            thread.start()
            thread.join()
        return tensors

    assert np.array_equal(images(pipe, callback_on_step_end=draw_beside), alone)
    assert np.array_equal(beside[0], before)
    assert not np.array_equal(alone, before)


@pytest.mark.parametrize("name", ["lumina2", "sana"])
def test_negative_prompts_that_are_encoded_before_are_not_encoded_as_prompts(
    name: str,
) -> None:
    """Both families write an instruction before a prompt, and none before a negative one."""
    pipe = tiny(name)
    call = {
        "negative_prompt": ["ugly", "a red circle"],
        **family_named(type(pipe).__name__).call,
    }
    before = images(pipe, **call)
    keys = ["memory.precomputed_embeddings.max_sequence_length=64"]
    prompts = ["a red circle", "a blue house", "ugly"]
    sdopt.optimize(pipe, *keys, memory="precomputed_embeddings", prompts=prompts)
    assert np.abs(images(pipe, **call) - before).max() < 1e-4


def test_a_list_of_prompts_stays_the_callers_in_each_call() -> None:
    """Z-Image writes each prompt's chat into it, and a second call would encode the chat of a chat."""
    pipe = tiny("z_image")
    sdopt.optimize(pipe, attention="math")
    prompts, negatives = ["a red circle"], ["ugly"]
    call = {"height": 64, "width": 64, "num_inference_steps": 1}
    pipe(prompts, negative_prompt=negatives, **call)
    assert (prompts, negatives) == (["a red circle"], ["ugly"])


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"attention": "fused_qkv"}, "cannot fuse the projections of a Bria"),
        ({"attention": "vanilla"}, "not for Bria, whose denoiser is a transformer"),
        ({"caching": "tome"}, "not for Bria, whose denoiser is a transformer"),
        ({"memory": "precomputed_embeddings"}, "how Bria encodes prompts is not known"),
        ({"memory": "without_t5"}, "Bria runs with all of its text encoders"),
        ({"lora": "hyper_flux"}, "this model is Bria"),
    ],
)
def test_a_transformer_of_an_unknown_kind_is_not_taken_for_a_unet(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], why: str
) -> None:
    """Its first call would fail after the text encoders are gone, or run layers of a UNet."""
    monkeypatch.setitem(TINY, "bria", bria)
    with pytest.raises(ConflictError, match=why):
        sdopt.optimize(tiny("bria"), prompts=["a red circle"], **chosen)
