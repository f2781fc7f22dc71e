"""Options on a pipeline that a program already has: applied, proved, taken back; what they leave of the process."""

import gc
import os
import random
import re
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, cast

import huggingface_hub
import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from diffusers.modular_pipelines import FluxModularPipeline
from PIL import Image

import sdopt
from sdopt.config.groups import optimization_options
from sdopt.config.paths import options_of
from sdopt.errors import ConflictError, UnavailableError, UsageError
from sdopt.library.applying import _broken
from sdopt.library.process import _SWITCHES, ProcessChanges
from sdopt.measure import compilation
from sdopt.options.attention_backends import set_default_backend
from sdopt.options.base import Finding, Optimization, Proof, Stage
from sdopt.reference import LORAS, MODEL, TINY_AUTOENCODER
from sdopt.scratch import CACHES
from tests.fixtures import packaged_pipe
from tests.pipelines.test_hub import cache, offline  # noqa: F401

HUB_ID = "somebody/small-emoji"
"""The reference model in `cache`, laid out as the hub does."""

LOSSY = {
    "precision": {
        "bf16",
        "fp16",
        "fp16_autocast",
        "fp16_vae_fp32",
        "int8_sdnq",
        "int8_torchao",
        "nf4_bitsandbytes",
        "uint4_sdnq",
    },
    "lora": {"fused"},
    "memory": {"layerwise_casting", "group_offload", "quantized_text_encoders"},
}
"""Options on a CPU that change or move weights: `undo` refuses them."""

MATH = {"attention": "math"}


def by_hand(pipe: StableDiffusionPipeline) -> StableDiffusionPipeline:
    """A pipeline of the same parts that does not say where they are from, as one from a single file."""
    made = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture
def pipe() -> StableDiffusionPipeline:
    return packaged_pipe()


def drawn(
    pipe: StableDiffusionPipeline, prompt: str | list[str] = "a red apple", **call: Any
) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    call = {
        "num_inference_steps": 2,
        "height": 32,
        "width": 32,
        "output_type": "np",
        **call,
    }
    images: np.ndarray = pipe(prompt, generator=generator, **call).images
    return images


class TestOptimize:
    def test_applies_options_proves_them_and_takes_them_back(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        before, processors = (
            drawn(pipe),
            {type(p) for p in pipe.unet.attn_processors.values()},
        )
        options: dict[str, Any] = {
            "attention": "vanilla",
            "layout": "channels_last",
            "memory": ["vae_slicing"],
        }
        assert sdopt.optimize(pipe, **options) is pipe
        assert np.abs(drawn(pipe) - before).max() < 1e-3
        report = sdopt.prove(pipe)
        assert report.engaged, str(report)
        assert list(report.table()["axis"]) == [
            "memory.vae_slicing",
            "attention",
            "layout",
        ]
        assert report.table()["engaged"].all()
        with pytest.raises(UsageError, match="undo"):
            sdopt.optimize(pipe, attention="math")
        assert {type(p) for p in pipe.unet.attn_processors.values()} != processors
        assert sdopt.undo(pipe) is pipe
        assert {type(p) for p in pipe.unet.attn_processors.values()} == processors
        assert not pipe.vae.use_slicing
        assert type(pipe) is StableDiffusionPipeline
        assert np.array_equal(drawn(pipe), before)
        with pytest.raises(UsageError, match="no options were applied"):
            sdopt.undo(pipe)

    def test_what_is_undone_by_hand_is_seen(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        sdopt.optimize(pipe, layout="channels_last", memory=["vae_slicing"])
        pipe.vae.disable_slicing()
        report = sdopt.prove(pipe, ["a red apple", "a green tree"])
        assert not report.engaged
        assert "memory=vae_slicing: NO EFFECT: " in str(report)

    @pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
    @pytest.mark.slow
    def test_broken_images_are_said_though_options_took_effect(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        small: dict[str, Any] = {"height": 32, "width": 32}
        sdopt.optimize(pipe, layout="channels_last")
        for kind in ("pil", "np", "latent"):
            assert not sdopt.prove(pipe, output_type=kind, **small).broken
        for alone in (
            Image.new("RGB", (8, 8), "red"),
            [Image.new("RGB", (8, 8), "red")],
        ):
            assert not _broken(alone)
        for network, kind, said in (
            (pipe.vae.decoder, "pil", "they are black"),
            (pipe.vae.decoder, "np", "they hold"),
            (pipe.unet, "latent", "they hold"),
        ):
            network.conv_out.bias.data[:] = float("nan")
            report = sdopt.prove(pipe, output_type=kind, **small)
            assert report.engaged
            assert str(report).startswith(f"IMAGES BROKEN: {said}")

    def test_prompts_are_encoded_beforehand(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        before = drawn(pipe)
        sdopt.optimize(
            pipe,
            memory=["precomputed_embeddings"],
            prompts=["a red apple", "a green tree"],
        )
        assert pipe.text_encoder is None
        assert np.abs(drawn(pipe) - before).max() < 1e-3
        assert sdopt.prove(pipe).engaged
        with pytest.raises(UsageError, match="the prompt 'a blue car' was not encoded"):
            pipe("a blue car")
        with pytest.raises(UsageError, match="the prompt 'grey' was not encoded"):
            pipe("a green tree", negative_prompt="grey")

    @pytest.mark.parametrize(
        "prompts", ["a red apple", np.array(["a red apple"]), iter(["a red apple"])]
    )
    def test_prompts_are_one_text_or_any_collection(
        self, pipe: StableDiffusionPipeline, prompts: Any
    ) -> None:
        wrong: list[Any] = [
            Path("prompts.txt"),
            ["a red apple", None],
            [["a red apple"]],
        ]
        for each in wrong:
            with pytest.raises(
                UsageError, match="is no text; give a text, or a list of texts"
            ):
                sdopt.optimize(pipe, memory=["precomputed_embeddings"], prompts=each)
        sdopt.optimize(pipe, memory=["precomputed_embeddings"], prompts=prompts)
        assert drawn(pipe, "a red apple").any()
        assert sdopt.prove(pipe).engaged

    def test_calls_of_several_threads_wait_for_each_other(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        sdopt.optimize(pipe, caching="deepcache")
        others: list[Thread] = []
        alone = drawn(pipe, num_inference_steps=3)

        def meanwhile(
            _pipe: Any, _step: int, _time: Any, kwargs: dict[str, Any]
        ) -> dict[str, Any]:
            if not others:
                others.append(Thread(target=drawn, args=(pipe, "a green tree")))
                others[0].start()
                others[0].join(0.5)
            return kwargs

        assert np.array_equal(
            drawn(pipe, num_inference_steps=3, callback_on_step_end=meanwhile), alone
        )
        others[0].join()

    def test_calls_of_two_pipelines_share_no_setting_of_the_process(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        """Of two that are in attention at once, the one that leaves last would put back what the other had set."""
        before, other = settings(), packaged_pipe()
        sdopt.optimize(pipe, attention="math")
        sdopt.optimize(other, attention="math")
        begun, left = Event(), Event()
        beside = Thread(target=drawn, args=(other,), kwargs={"num_inference_steps": 1})

        def meanwhile(*_: Any) -> None:
            beside.start()
            begun.wait(0.3)

        def until_left(*_: Any) -> None:
            begun.set()
            left.wait(5)

        pipe.unet.conv_in.register_forward_pre_hook(meanwhile)
        other.unet.conv_in.register_forward_pre_hook(until_left)
        drawn(pipe, num_inference_steps=1)
        left.set()
        beside.join()
        assert begun.is_set(), "it was called, too"
        assert differences(before) == set()

    @pytest.mark.parametrize(
        "caching",
        ["deepcache", "first_block", "guidance_interval", "spectrum", "taylorseer"],
    )
    @pytest.mark.walk(2)
    def test_a_plain_pipeline_may_have_the_same_unet_in_another_thread(
        self, pipe: StableDiffusionPipeline, caching: str
    ) -> None:
        parts = pipe.components | {"scheduler": deepcopy(pipe.scheduler)}
        plain = StableDiffusionPipeline(**parts, requires_safety_checker=False)
        before = drawn(plain)
        sdopt.optimize(pipe, caching=caching)
        alone = drawn(pipe, num_inference_steps=8)
        beside: list[np.ndarray] = []

        def draw_beside(
            _pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]
        ) -> dict[str, Any]:
            if step == 4:
                thread = Thread(target=lambda: beside.append(drawn(plain)))
                thread.start()
                thread.join()
            return tensors

        assert np.array_equal(
            drawn(pipe, num_inference_steps=8, callback_on_step_end=draw_beside), alone
        )
        assert np.array_equal(beside[0], before)

    def test_a_pipeline_that_was_loaded_in_inference_mode(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        with torch.inference_mode():
            copied = deepcopy(pipe)
        before = drawn(copied)
        sdopt.optimize(copied, attention="vanilla", layout="channels_last")
        assert sdopt.prove(copied).engaged
        assert np.array_equal(drawn(sdopt.undo(copied)), before)

    def test_a_file_and_a_part_are_no_pipeline(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        given: list[Any] = ["dreamshaper.safetensors", pipe.unet]
        for each in given:
            with pytest.raises(UsageError, match="takes a pipeline"):
                sdopt.optimize(each, precision="bf16")
        pipe.register_modules(mine=torch.nn.Linear(1, 1))
        with pytest.raises(ValueError, match=r"Expected .* but .*mine"):
            sdopt.optimize(pipe, precision="bf16")

    def test_calls_take_a_negative_prompt(self, pipe: StableDiffusionPipeline) -> None:
        prompts: list[Any] = ["a red apple", ["a red apple", "a green tree"]]
        calls = list(zip(prompts, ["grey", ["grey", "dark"]], strict=True))
        before = [
            drawn(pipe, prompt, negative_prompt=negative) for prompt, negative in calls
        ]
        assert not np.array_equal(drawn(pipe, prompts[0]), before[0])
        sdopt.optimize(pipe, grad_mode="no_grad")
        for (prompt, negative), images in zip(calls, before, strict=True):
            assert np.array_equal(drawn(pipe, prompt, negative_prompt=negative), images)
        for prompt in (None, "a red apple", [], ["a red apple", "a green tree"]):
            assert sdopt.prove(pipe, prompt, negative_prompt="grey").engaged

    def test_a_call_without_guidance_has_no_half_to_leave_out(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        prompts = ["a red apple", "a green tree"]
        before = drawn(pipe, prompts, guidance_scale=1, num_inference_steps=4)
        sdopt.optimize(pipe, caching="guidance_interval")
        assert np.array_equal(
            drawn(pipe, prompts, guidance_scale=1, num_inference_steps=4), before
        )

    def test_the_default_attention_takes_the_place_of_another(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        before = drawn(pipe)
        pipe.enable_attention_slicing(1)
        sdopt.optimize(pipe, attention="default")
        assert sdopt.prove(pipe).engaged
        assert np.array_equal(drawn(pipe), before)
        pipe.unet.set_default_attn_processor()  # AttnProcessor, whose name says otherwise
        assert not sdopt.prove(pipe).engaged

    def test_what_compiles_in_its_first_calls_is_proved_by_a_later_one(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        """Inductor compiles when a module runs first, records a CUDA graph when it runs next, and then replays it."""
        runs: list[None] = []
        sdopt.optimize(pipe, compiler="trace").unet.register_forward_hook(
            lambda *_: runs.append(None)
        )
        [found] = sdopt.prove(pipe, height=32, width=32).evidence
        assert found.facts["graphs"] == 1
        assert found.facts["graphs_run"] == found.facts["calls"]
        assert len(runs) == 3 * found.facts["calls"]

    def test_a_pipeline_is_saved_as_what_it_is(
        self, pipe: StableDiffusionPipeline, tmp_path: Path
    ) -> None:
        sdopt.optimize(pipe, grad_mode="inference_mode").save_pretrained(tmp_path)
        assert (
            type(StableDiffusionPipeline.from_pretrained(tmp_path))
            is StableDiffusionPipeline
        )

    def test_a_modular_pipeline_is_refused_by_name(self) -> None:
        modular = cast(Any, FluxModularPipeline())
        with pytest.raises(UsageError, match="FluxModularPipeline: a modular pipe"):
            sdopt.optimize(modular, attention="math")

    def test_what_cannot_be_is_said_before_anything_changes(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
            ((), {}, UsageError, "name an option"),
            ((), {"attention": "nothing"}, UsageError, "nothing"),
            (
                (),
                {"precision": torch.bfloat16},
                UsageError,
                "precision=torch.bfloat16: ",
            ),
            ((), {"precision": None}, UsageError, "precision=None: "),
            (
                (),
                {"caching": "deepcache", "foo": 1},
                UsageError,
                "foo=1: no key of an option; sdopt.optimize takes attention, ",
            ),
            (
                ("attention.wrong=1",),
                {"attention": "sliced"},
                UsageError,
                "attention.wrong",
            ),
            ((), {"attention": "cudnn"}, ConflictError, "attention=cudnn: "),
            (
                (),
                {"memory": ["precomputed_embeddings"]},
                ConflictError,
                r"prompts=\[…\]",
            ),
            (
                (),
                {"task": "img2img"},
                UsageError,
                "task=img2img: a pipeline takes only options and a scheduler; give",
            ),
            (
                ("workload.steps=3",),
                MATH,
                UsageError,
                "workload.steps=3: a pipeline takes only options",
            ),
            (
                ("precision=bf16",),
                MATH,
                UsageError,
                'no option of precision is named: add precision="b',
            ),
            (
                ("lora.scale=2",),
                MATH,
                UsageError,
                'lora.scale=2: no option of lora is named: add lora="…',
            ),
            (("resume=x",), MATH, UsageError, "resume=x"),
            (
                ({"lora.scale": 2},),
                MATH,
                UsageError,
                r"{'lora.scale': 2}: each override is an argument of its own",
            ),
            (
                (),
                {**MATH, "lora.scale": "2"},
                UsageError,
                'lora.scale=2: no option of lora is named: add lora="…',
            ),
            (
                (),
                {**MATH, "config_dir": "/nowhere"},
                UsageError,
                "config_dir=/nowhere: there is no such folder",
            ),
            (
                (),
                {"memory": ["slicing"]},
                UsageError,
                "memory=slicing: .*; the options are .*vae_slicing",
            ),
            (
                (),
                {"scheduler": "lcm"},
                ConflictError,
                "scheduler=lcm: needs a model distilled to a few steps",
            ),
            (
                (),
                {"scheduler": "plms", "compiler": "whole_step"},
                ConflictError,
                "PNDMScheduler uses earlier",
            ),
        ]
        for overrides, groups, error, words in cases:
            with pytest.raises(error, match=words):
                sdopt.optimize(pipe, *overrides, **groups)
            with pytest.raises(UsageError, match="no options were applied"):
                sdopt.prove(pipe)
            assert type(pipe.scheduler) is DDIMScheduler
        file: Any = "mine.safetensors"
        with pytest.raises(UsageError, match=f"{file}: .*`sdopt optimize FILE` finds"):
            sdopt.optimize(file, **MATH)

    def test_a_scheduler_is_that_of_a_measured_variant(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        sdopt.optimize(
            pipe, "+scheduler.options.timestep_spacing=trailing", scheduler="euler"
        )
        assert type(pipe.scheduler) is EulerDiscreteScheduler
        assert pipe.scheduler.config.timestep_spacing == "trailing"
        assert (
            pipe.scheduler.config.beta_schedule
            == DDIMScheduler.load_config(MODEL / "scheduler")["beta_schedule"]
        )
        said = "scheduler: EulerDiscreteScheduler; no other option was applied"
        assert str(sdopt.prove(pipe)) == said
        assert type(sdopt.undo(pipe).scheduler) is DDIMScheduler

    def test_conflicts_are_those_of_its_scheduler_and_its_task(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        pipe.scheduler = PNDMScheduler.from_config(
            pipe.scheduler.config, skip_prk_steps=True
        )
        with pytest.raises(
            ConflictError, match="PNDMScheduler uses earlier predictions"
        ):
            sdopt.optimize(pipe, compiler="whole_step")
        tiled = "with memory.tiny_vae, diffusers encodes tiles of a start image to 4 channels"
        with pytest.raises(ConflictError, match=tiled):
            sdopt.optimize(
                StableDiffusionImg2ImgPipeline.from_pretrained(MODEL),
                memory=["vae_tiling", "tiny_vae"],
            )

    def test_a_scheduler_is_asked_for_what_it_uses_itself(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        """Schedulers keep the keys of the one that they were made from; only DDIM clips."""
        clipping = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=True)
        pipe.scheduler = EulerDiscreteScheduler.from_config(clipping.config)
        assert pipe.scheduler.config["clip_sample"] is True
        sdopt.undo(sdopt.optimize(pipe, compiler="whole_step"))
        pipe.scheduler = clipping
        out = "scheduler=ddim with +scheduler.options.clip_sample=false"
        with pytest.raises(ConflictError, match=re.escape(out)):
            sdopt.optimize(pipe, compiler="whole_step")
        sdopt.optimize(
            pipe,
            "+scheduler.options.clip_sample=false",
            scheduler="ddim",
            compiler="whole_step",
        )
        assert not pipe.scheduler.config.clip_sample

    def test_conflicts_are_those_with_what_its_program_did(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        """An option that is not named is no option that the pipeline lacks."""
        pipe.load_lora_weights(str(LORAS), weight_name="fxemoji.safetensors")
        with pytest.raises(
            ConflictError,
            match=r"attention=fused_qkv: .* would ignore the LoRA: choose lora=fused",
        ):
            sdopt.optimize(pipe, attention="fused_qkv")
        pipe.unload_lora_weights()
        pipe.unet.to(memory_format=torch.channels_last)
        with pytest.raises(
            ConflictError, match=r"memory=group_offload: .* choose layout=contiguous"
        ):
            sdopt.optimize(pipe, memory=["group_offload"])
        pipe.to(torch.bfloat16)
        with pytest.raises(
            ConflictError, match="which has no bfloat16: choose precision=fp32"
        ):
            sdopt.optimize(pipe, compiler="onnxruntime")

    def test_the_own_vae_is_kept_in_float32(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        with torch.no_grad():
            pipe.vae.decoder.conv_out.bias += 0.1
        own = deepcopy(pipe.vae.state_dict())
        for each in (by_hand(deepcopy(pipe)), pipe):
            sdopt.optimize(
                each, "precision.weights=bfloat16", precision="fp16_vae_fp32"
            )
            assert all(
                torch.equal(tensor, own[name])
                for name, tensor in each.vae.state_dict().items()
            )
            assert {tensor.dtype for tensor in each.unet.state_dict().values()} == {
                torch.bfloat16
            }
            assert np.isfinite(drawn(each)).all()

    def test_a_vae_is_named_for_a_model_that_nobody_knows(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        own = by_hand(pipe)
        words = r'memory=tiny_vae: this pipeline does not say .* "memory\.tiny_vae\.hub_id=owner/name"'
        with pytest.raises(ConflictError, match=words):
            sdopt.optimize(own, memory=["tiny_vae"])
        sdopt.optimize(
            own, f"memory.tiny_vae.path={TINY_AUTOENCODER}", memory=["tiny_vae"]
        )
        assert sdopt.prove(own).engaged

    def test_a_file_is_fetched_before_anything_changes(
        self,
        pipe: StableDiffusionPipeline,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        offline(monkeypatch, tmp_path)
        asked: list[bool] = []
        real = huggingface_hub.hf_hub_download

        def download(*args: Any, local_files_only: bool, **kwargs: Any) -> str:
            asked.append(not local_files_only)
            return str(real(*args, local_files_only=local_files_only, **kwargs))

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        pipe.register_to_config(_name_or_path="somebody/small")
        with pytest.raises(
            UsageError,
            match=r"memory\.tiny_vae\.hub_id=madebyollin/taesd: not complete in the local",
        ):
            sdopt.optimize(pipe, precision="bf16", memory=["tiny_vae"])
        assert asked[-1], "the hub is asked last"
        assert pipe.unet.dtype is torch.float32

    def test_a_pipeline_from_the_hub(self, cache: Path) -> None:  # noqa: F811
        """Its configurations are its own: nothing is looked up in the usual cache, where it is not."""
        pipe = StableDiffusionPipeline.from_pretrained(
            HUB_ID, cache_dir=cache, local_files_only=True
        )
        assert pipe.name_or_path == HUB_ID
        before = drawn(pipe)
        heads = pipe.unet.config.attention_head_dim
        with pytest.raises(
            ConflictError, match=f"a layer of this model has only {heads} heads"
        ):
            sdopt.optimize(
                pipe, f"attention.slice_size={heads + 1}", attention="sliced"
            )
        sdopt.optimize(pipe, attention="sliced", caching="deepcache")
        assert sdopt.prove(pipe).engaged
        assert np.array_equal(drawn(sdopt.undo(pipe)), before)

    def test_nothing_keeps_a_pipeline_that_its_program_drops(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        own = by_hand(pipe)
        left = weakref.ref(sdopt.optimize(own, attention="vanilla"))
        del own
        gc.collect()
        assert left() is None

    def test_what_fails_leaves_the_pipeline_as_it_was(
        self,
        pipe: StableDiffusionPipeline,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The folder of compiled packages must be its owner's alone."""
        (tmp_path / "sdopt" / "aot").mkdir(parents=True)
        (tmp_path / "sdopt" / "aot").chmod(0o777)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        before = pipe.unet.conv_in.weight.stride(), type(pipe)
        with pytest.raises(UnavailableError, match="aot") as refused:
            sdopt.optimize(pipe, layout="channels_last", compiler="aot")
        assert not hasattr(refused.value, "__notes__")
        assert (pipe.unet.conv_in.weight.stride(), type(pipe)) == before
        with pytest.raises(UnavailableError, match="aot") as refused:
            sdopt.optimize(pipe, precision="bf16", compiler="aot")
        assert "load it again" in refused.value.__notes__[0]

    def test_what_has_to_come_before_an_option_is_refused_after_it(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        sdopt.optimize(pipe, memory=["precomputed_embeddings"], prompts=["a red apple"])
        for method in (pipe.load_lora_weights, pipe.load_textual_inversion):
            with pytest.raises(UsageError, match="before"):
                method("anything.safetensors")
        sdopt.optimize(sdopt.undo(pipe), precision="int8_sdnq")
        with pytest.raises(UsageError, match="before"):
            pipe.load_lora_weights("anything.safetensors")
        with pytest.raises(UsageError, match="the weights of unet were changed"):
            sdopt.undo(pipe)
        with pytest.raises(UsageError, match="cannot be undone: load it again"):
            sdopt.optimize(pipe, precision="bf16")


class TestUndo:
    def test_takes_hooks_off_the_layers(self, pipe: StableDiffusionPipeline) -> None:
        before = drawn(pipe, num_inference_steps=5)
        sdopt.optimize(pipe, "caching.start=0.0", caching="pyramid_attention")
        assert not np.array_equal(drawn(pipe, num_inference_steps=5), before)
        assert any("_diffusers_hook" in vars(layer) for layer in pipe.unet.modules())
        sdopt.undo(pipe)
        assert not any(
            "_diffusers_hook" in vars(layer) for layer in pipe.unet.modules()
        )
        assert np.array_equal(drawn(pipe, num_inference_steps=5), before)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "group",
        sorted({group for group, _ in optimization_options()} - {"environment"}),
    )
    def test_restores_each_bit_or_says_what_is_lost(
        self, pipe: StableDiffusionPipeline, group: str
    ) -> None:
        small: dict[str, Any] = {"height": 32, "width": 32}
        before, undone, lost = drawn(pipe, **small), list[str](), set[str]()
        for option in options_of(group):
            chosen: dict[str, Any] = {group: [option] if group == "memory" else option}
            if option == "precomputed_embeddings":
                chosen["prompts"] = ["a red apple"]
            try:
                sdopt.optimize(pipe, **chosen)
            except ConflictError:
                continue  # it cannot run on a CPU, or lacks a package
            if group != "compiler" or option == "trace":  # the others compile for long
                drawn(pipe, **small)
            try:
                sdopt.undo(pipe)
            except UsageError:
                lost.add(option)
                pipe = packaged_pipe()
            else:
                undone.append(option)
                assert np.array_equal(drawn(pipe, **small), before), option
        assert undone
        assert lost <= LOSSY.get(group, set())

    def test_takes_a_compiled_decoder_out_of_the_vae(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        decoder = pipe.vae.decoder
        sdopt.optimize(
            pipe,
            "compiler.targets=[text_encoder,denoiser,decoder]",
            compiler="inductor",
        )
        assert pipe.vae.decoder is not decoder
        sdopt.undo(pipe)
        assert pipe.vae.decoder is decoder

    def test_keeps_the_layout_that_was_there(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        pipe.unet.to(memory_format=torch.channels_last)
        strides = [weight.stride() for weight in pipe.unet.parameters()]
        sdopt.undo(sdopt.optimize(pipe, layout="channels_last", attention="vanilla"))
        assert [weight.stride() for weight in pipe.unet.parameters()] == strides
        assert pipe.vae.decoder.conv_in.weight.is_contiguous()

    def test_a_hook_of_the_program_stays_and_can_be_removed(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        calls: list[int] = []
        handle = pipe.unet.register_forward_hook(lambda *_: calls.append(1))
        sdopt.undo(sdopt.optimize(pipe, caching="tome"))
        drawn(pipe)
        assert len(calls) == 2
        handle.remove()
        drawn(pipe)
        assert len(calls) == 2

    @pytest.mark.parametrize(
        ("words", "groups", "lost"),
        [
            (
                (),
                {"precision": "bf16", "attention": "vanilla"},
                "the weights of unet were changed",
            ),
            (
                (f"lora.path={LORAS}", "lora.weight_name=fxemoji.safetensors"),
                {"lora": "fused"},
                "the weights of unet were changed",
            ),
            (
                (),
                {"memory": ["group_offload"]},
                "memory=group_offload has moved the weights of the pipeline",
            ),
        ],
    )
    @pytest.mark.walk(2)
    def test_takes_nothing_back_where_not_all_can_be_and_says_what_is_lost(
        self,
        pipe: StableDiffusionPipeline,
        words: tuple[str, ...],
        groups: dict[str, Any],
        lost: str,
    ) -> None:
        sdopt.optimize(pipe, *words, **groups)
        with pytest.raises(UsageError, match=f"{lost}; load the pipeline again"):
            sdopt.undo(pipe)
        drawn(pipe)
        assert sdopt.prove(pipe).engaged

    def test_options_of_two_pipelines_of_the_same_parts_are_taken_back_in_turn(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        before, other = (
            drawn(pipe),
            StableDiffusionImg2ImgPipeline(
                **pipe.components, requires_safety_checker=False
            ),
        )
        sdopt.optimize(pipe, caching="deepcache")
        sdopt.optimize(other, attention="vanilla")
        with pytest.raises(
            UsageError,
            match="another pipeline of the same parts has options applied since",
        ):
            sdopt.undo(pipe)
        sdopt.undo(other)
        sdopt.optimize(other, attention="vanilla")
        del other
        assert np.array_equal(drawn(sdopt.undo(pipe)), before)
        assert "forward" not in vars(pipe.unet)

    def test_two_pipelines_of_one_denoiser_have_one_attention(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        """PyTorch ran the kernel of the first one in calls of both."""
        other = by_hand(pipe)
        sdopt.optimize(pipe, attention="math")
        with pytest.raises(ConflictError, match="same denoiser has attention=math"):
            sdopt.optimize(other, attention="flash")
        sdopt.optimize(other, attention="math", layout="channels_last")
        sdopt.undo(other)
        sdopt.undo(pipe)
        sdopt.optimize(other, attention="flash")
        del other
        sdopt.optimize(pipe, attention="math")

    def test_a_copy_of_the_pipeline_is_refused(
        self, pipe: StableDiffusionPipeline
    ) -> None:
        """Its hooks read the original's steps: from its second image on, it would draw others."""
        own, before = pipe.unet, drawn(pipe)
        copied = deepcopy(sdopt.optimize(pipe, caching="pyramid_attention"))
        uses: list[Callable[[], Any]] = [
            lambda: drawn(copied),
            lambda: sdopt.undo(copied),
            lambda: sdopt.prove(copied),
            lambda: sdopt.optimize(copied, layout="channels_last"),
        ]
        for use in uses:
            with pytest.raises(
                UsageError, match="copy of one that options were applied to"
            ):
                use()
        assert np.array_equal(drawn(sdopt.undo(pipe)), before)
        assert pipe.unet is own
        assert np.array_equal(drawn(deepcopy(pipe)), before)

    def test_a_shallow_copy_is_refused(self, pipe: StableDiffusionPipeline) -> None:
        """Its options would ask the original whether the copy's call is guided, and draw one image for two prompts."""
        before = drawn(pipe)
        drawn(sdopt.optimize(pipe, caching="guidance_interval"))
        for use in (
            sdopt.undo,
            sdopt.prove,
            lambda copied: drawn(copied, ["an apple", "a fish"], guidance_scale=1.0),
        ):
            with pytest.raises(
                UsageError, match="copy of one that options were applied to"
            ):
                use(copy(pipe))
        assert np.array_equal(drawn(sdopt.undo(pipe)), before)


def settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def differences(before: dict[str, Any]) -> set[str]:
    return {name for name, now in settings().items() if now != before[name]}


def states() -> list[str]:
    """Of the global generators."""
    return [
        str(torch.get_rng_state().tolist()),
        str(np.random.get_state()),
        str(random.getstate()),
    ]


@dataclass(frozen=True)
class Careless(Optimization):
    """Sets what other parts of a program rely on."""

    stage: ClassVar[Stage] = Stage.ATTENTION

    def apply(self, pipe: Any) -> Proof:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.float64)
        for name in ("benchmark", "deterministic", "allow_tf32"):
            setattr(torch.backends.cudnn, name, not getattr(torch.backends.cudnn, name))
        torch.backends.cuda.enable_flash_sdp(False)
        set_default_backend("_native_math")
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(7)
        return lambda _: Finding(True, "careless")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "careless.yaml").write_text(
        f"_target_: {__name__}.Careless\n"
    )
    return tmp_path


def test_what_an_option_sets_is_named_and_put_back(
    pipe: StableDiffusionPipeline, folder: Path
) -> None:
    before, drawn_so_far = settings(), states()
    sdopt.optimize(pipe, attention="careless", config_dir=folder)
    assert states() == drawn_so_far, "it seeds them"
    try:
        changed = differences(before)
        assert len(changed) >= 9
        torch.set_default_dtype(torch.float32)  # the program itself
        report = sdopt.prove(pipe, num_inference_steps=1, height=16, width=16)
        assert {line.partition(":")[0] for line in report.process} == changed
        assert "deterministic algorithms: 0 before, 1 now" in str(report)
    finally:
        sdopt.undo(pipe)
    assert differences(before) == set()


def test_what_fails_leaves_nothing_behind(
    pipe: StableDiffusionPipeline, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr("sdopt.options.layout.Layout.apply", fail)
    before = settings()
    with pytest.raises(RuntimeError, match="no such layout"):
        sdopt.optimize(
            pipe, attention="careless", layout="channels_last", config_dir=folder
        )
    assert differences(before) == set()


def test_options_of_sdopt_leave_the_process_as_it_was(
    pipe: StableDiffusionPipeline,
) -> None:
    before, drawn_so_far, images = settings(), states(), drawn(pipe)
    chosen: dict[str, Any] = {
        "lora": "loaded",
        "attention": "math",
        "layout": "channels_last",
        "caching": "tome",
    }
    sdopt.optimize(
        pipe, f"lora.path={LORAS}", "lora.weight_name=fxemoji.safetensors", **chosen
    )
    assert differences(before) == set()
    assert states() == drawn_so_far, "peft draws numbers, and then replaces them"
    assert sdopt.prove(pipe, height=16, width=16).process == ()
    assert np.array_equal(drawn(sdopt.undo(pipe)), images)


def test_a_traced_call_that_draws_leaves_the_generators_as_they_were(
    pipe: StableDiffusionPipeline,
) -> None:
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    noise, drawn_so_far = torch.zeros(1, pipe.unet.config.in_channels, 2, 2), states()
    sdopt.optimize(pipe, **MATH)
    sdopt.prove(pipe, latents=noise, num_inference_steps=2, height=16, width=16)
    sdopt.undo(pipe)
    assert states() == drawn_so_far


def test_a_folder_of_kept_kernels_is_the_option_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compiler.keep=true` names it for the whole process, whose other modules would be compiled into it, too."""
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    changes = ProcessChanges()
    with changes.noted():
        compilation.keep_in(tmp_path)
    compilation.reset()
    assert changes.lines()[0] == f"{CACHES[0]}: None before, {tmp_path} now"
    changes.put_back()
    assert not {*CACHES} & os.environ.keys()


def test_what_the_program_changes_stays() -> None:
    changes, threads = ProcessChanges(), torch.get_num_threads()
    with changes.noted():
        torch.set_num_threads(threads + 1)
    try:
        torch.set_num_threads(threads + 2)
        changes.put_back()
        assert torch.get_num_threads() == threads + 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_two_pipelines_change_is_put_back_in_any_order(
    order: tuple[int, int],
) -> None:
    threads, changes = torch.get_num_threads(), [ProcessChanges(), ProcessChanges()]
    for more, each in enumerate(changes, 1):
        with each.noted():
            torch.set_num_threads(threads + more)
    try:
        for number in order:
            changes[number].put_back(changes)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
