"""The library door: options on a pipeline that a program already has, and the pipeline of a measured variant."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

import sdopt
from sdopt.errors import ConflictError, UsageError
from sdopt.reference import MODEL
from tests.command import SMOKE, Finished
from tests.command import sdopt as run


@pytest.fixture
def pipe() -> StableDiffusionPipeline:
    pipe = StableDiffusionPipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe: StableDiffusionPipeline, prompt: str | list[str] = "a red apple", **call: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    call = {"num_inference_steps": 2, "output_type": "np", **call}
    images: np.ndarray = pipe(prompt, generator=generator, **call).images
    return images


class TestOptimize:
    def test_applies_options_and_proves_them(self, pipe: StableDiffusionPipeline) -> None:
        before = drawn(pipe)
        assert sdopt.optimize(pipe, attention="vanilla", layout="channels_last", memory=["vae_slicing"]) is pipe
        assert np.abs(drawn(pipe) - before).max() < 1e-3
        report = sdopt.prove(pipe, ["a red apple", "a green tree"])
        assert report.engaged, str(report)
        assert list(report.table()["axis"]) == ["memory.vae_slicing", "attention", "layout"]
        assert report.table()["engaged"].all()

    def test_what_is_undone_by_hand_is_seen(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, layout="channels_last", memory=["vae_slicing"])
        pipe.vae.disable_slicing()
        report = sdopt.prove(pipe, ["a red apple", "a green tree"])
        assert not report.engaged
        assert "memory=vae_slicing: NO EFFECT: " in str(report)

    def test_the_context_of_an_option_is_around_each_call(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, grad_mode="inference_mode")
        assert sdopt.prove(pipe).engaged

    def test_keys_are_those_of_the_command_line(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, "memory.vae_tiling.tile_size=64", memory=["vae_tiling"])
        assert pipe.vae.use_tiling
        assert pipe.vae.tile_sample_min_size == 64

    def test_the_type_of_the_weights_is_changed(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, precision="bf16")
        assert pipe.unet.dtype is torch.bfloat16
        assert sdopt.prove(pipe).engaged

    def test_prompts_are_encoded_beforehand(self, pipe: StableDiffusionPipeline) -> None:
        before = drawn(pipe)
        sdopt.optimize(pipe, memory=["precomputed_embeddings"], prompts=["a red apple", "a green tree"])
        assert pipe.text_encoder is None
        assert np.abs(drawn(pipe) - before).max() < 1e-3
        assert sdopt.prove(pipe, "a green tree").engaged
        with pytest.raises(UsageError, match="the prompt 'a blue car' was not encoded"):
            pipe("a blue car")

    def test_what_compiles_in_its_first_calls_is_proved_by_a_later_one(self, pipe: StableDiffusionPipeline) -> None:
        """Inductor compiles when a module runs first, records a CUDA graph when it runs next, and then replays it."""
        sdopt.optimize(pipe, compiler="trace")
        [found] = sdopt.prove(pipe).evidence
        assert found.facts["graphs"] == 1
        assert found.facts["graphs_run"] == found.facts["calls"]
        assert pipe.unet.runs == 3 * found.facts["calls"]

    def test_as_many_steps_are_traced_as_an_option_needs(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, caching="pyramid_attention")
        assert sdopt.prove(pipe).engaged

    def test_a_pipeline_is_saved_as_what_it_is(self, pipe: StableDiffusionPipeline, tmp_path: Path) -> None:
        sdopt.optimize(pipe, grad_mode="inference_mode").save_pretrained(tmp_path)
        assert type(StableDiffusionPipeline.from_pretrained(tmp_path)) is StableDiffusionPipeline

    @pytest.mark.parametrize(
        ("overrides", "groups", "error", "words"),
        [
            ((), {}, UsageError, "name an option"),
            ((), {"attention": "nothing"}, UsageError, "nothing"),
            (("attention.wrong=1",), {"attention": "sliced"}, UsageError, "attention.wrong"),
            ((), {"attention": "cudnn"}, ConflictError, "attention=cudnn: "),
            ((), {"memory": ["precomputed_embeddings"]}, ConflictError, r"prompts=\[…\]"),
        ],
    )
    def test_what_cannot_be_is_said_before_anything_changes(
        self,
        pipe: StableDiffusionPipeline,
        overrides: tuple[str, ...],
        groups: dict[str, Any],
        error: type[Exception],
        words: str,
    ) -> None:
        with pytest.raises(error, match=words):
            sdopt.optimize(pipe, *overrides, **groups)
        with pytest.raises(UsageError, match="no options were applied"):
            sdopt.prove(pipe)

    def test_twice_is_refused(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, attention="vanilla")
        with pytest.raises(UsageError, match="undo"):
            sdopt.optimize(pipe, attention="math")


class TestUndo:
    def test_restores_what_it_was(self, pipe: StableDiffusionPipeline) -> None:
        before, processors = drawn(pipe), {type(p) for p in pipe.unet.attn_processors.values()}
        sdopt.optimize(pipe, attention="vanilla", layout="channels_last", memory=["vae_slicing"], grad_mode="enabled")
        assert {type(p) for p in pipe.unet.attn_processors.values()} != processors
        assert sdopt.undo(pipe) is pipe
        assert {type(p) for p in pipe.unet.attn_processors.values()} == processors
        assert not pipe.vae.use_slicing
        assert type(pipe) is StableDiffusionPipeline
        assert np.array_equal(drawn(pipe), before)
        with pytest.raises(UsageError, match="no options were applied"):
            sdopt.undo(pipe)

    def test_takes_hooks_off_the_layers(self, pipe: StableDiffusionPipeline) -> None:
        before = drawn(pipe, num_inference_steps=5)
        sdopt.optimize(pipe, "caching.start=0.0", caching="pyramid_attention")
        assert not np.array_equal(drawn(pipe, num_inference_steps=5), before)
        assert any("_diffusers_hook" in vars(layer) for layer in pipe.unet.modules())
        sdopt.undo(pipe)
        assert not any("_diffusers_hook" in vars(layer) for layer in pipe.unet.modules())
        assert np.array_equal(drawn(pipe, num_inference_steps=5), before)

    def test_weights_that_wait_elsewhere_stay_there(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, memory=["group_offload"])
        with pytest.raises(
            UsageError, match="memory=group_offload has moved the weights of the pipeline; load the pipeline"
        ):
            sdopt.undo(pipe)
        drawn(pipe)
        assert sdopt.prove(pipe).engaged

    def test_says_what_is_lost(self, pipe: StableDiffusionPipeline) -> None:
        sdopt.optimize(pipe, precision="bf16", attention="vanilla")
        with pytest.raises(UsageError, match="the weights of unet were changed; load the pipeline again"):
            sdopt.undo(pipe)
        assert sdopt.prove(pipe).engaged, "nothing is taken back where not all can be"


class TestLoad:
    def test_a_measured_variant(self, finished: Finished) -> None:
        pipe = sdopt.load(finished.folder, "bfloat16")
        assert pipe.unet.dtype is torch.bfloat16
        assert sdopt.prove(pipe).engaged
        calls = []
        pipe.unet.register_forward_hook(lambda *_: calls.append(1))
        assert pipe("a red apple", output_type="np").images.shape == (1, 64, 64, 3)
        assert len(calls) == finished.result.config.workload.steps

    def test_one_that_encodes_prompts_beforehand_is_told_them(self, tmp_path: Path) -> None:
        found = run(tmp_path, "run", *SMOKE, "memory=[precomputed_embeddings]")
        with pytest.raises(ConflictError, match=r"memory=precomputed_embeddings: name the prompts .* prompts=\[…\]"):
            sdopt.load(found.folder, found.result.variants[1].name)
        pipe = sdopt.load(found.folder, found.result.variants[1].name, prompts=["a red apple"])
        assert pipe("a red apple", output_type="np").images.shape == (1, 32, 32, 3)

    def test_which_one_must_be_said_where_there_are_several(self, finished: Finished) -> None:
        with pytest.raises(UsageError, match="variant: name one of baseline, bfloat16"):
            sdopt.load(finished.folder)

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no such folder"):
            sdopt.load(tmp_path / "nothing")
