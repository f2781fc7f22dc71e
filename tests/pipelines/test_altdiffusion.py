"""AltDiffusion, which diffusers has deprecated: loaded from a folder, drawn, measured, and refused where it is gone."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sdopt.config.composer import HydraComposer
from sdopt.library import optimize, prove, undo
from sdopt.pipelines.catalog import PACKAGED, missing_alt_diffusion
from sdopt.pipelines.components import count_weights, require_parts
from sdopt.pipelines.parts import networks_of
from sdopt.pipelines.weights import SENTENCEPIECE, lacking_vocabulary
from sdopt.schema import Model
from tests.fixtures import CPU, Compose, Load, operations_of
from tests.pipelines.loaded import latents, load, problem
from tests.pipelines.single_file import edit
from tests.pipelines.test_tasks import calls_of

Composers = type[HydraComposer]
EMOJI = PACKAGED / "emoji"
ENCODER = "RobertaSeriesModelWithTransformation"
PUBLISHED = {
    "_class_name": "AltDiffusionPipeline",
    "text_encoder": ["alt_diffusion", ENCODER],
}
LENGTH = 16


@pytest.fixture(scope="module")
def alt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An AltDiffusion as published: the packaged denoiser and VAE with a tiny XLM-RoBERTa, untrained."""
    from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import (
        RobertaSeriesConfig,
        RobertaSeriesModelWithTransformation,
    )
    from transformers import XLMRobertaTokenizer

    folder = tmp_path_factory.mktemp("alt") / "model"
    shutil.copytree(
        EMOJI, folder, ignore=shutil.ignore_patterns("tokenizer", "text_encoder")
    )
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    words = [(piece, -1.0) for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz", "狐")]
    tokenizer: Any = XLMRobertaTokenizer(
        vocab=[*special, *words, ("<mask>", 0.0)], model_max_length=LENGTH
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = RobertaSeriesConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH + 2,
        type_vocab_size=1,
        project_dim=144,
    )
    RobertaSeriesModelWithTransformation(config).save_pretrained(
        folder / "text_encoder"
    )
    # Keys of the published configuration that transformers no longer has.
    edit(
        folder / "text_encoder" / "config.json",
        model_type="roberta",
        output_past=True,
        torch_dtype="float32",
    )
    edit(
        folder / "model_index.json",
        tokenizer=["transformers", "XLMRobertaTokenizer"],
        **PUBLISHED,
    )
    return folder


@pytest.fixture
def chosen(alt: Path) -> list[str]:
    return [
        "model=altdiffusion",
        "model.weights=path",
        f"model.path={alt}",
        "model.size=64",
    ]


@pytest.fixture
def copied(alt: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(alt, tmp_path / "model"))


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed diffusers without AltDiffusion."""
    monkeypatch.setitem(
        sys.modules,
        "diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series",
        None,
    )


def model_in(folder: Path) -> Model:
    return Model("altdiffusion", "path", str(folder))


@pytest.fixture(scope="module")
def pipe(alt: Path) -> Any:
    """A test that changes it changes it back."""
    return load(model_in(alt))


class TestFolder:
    def test_has_the_weights_that_were_saved(self, alt: Path, pipe: Any) -> None:
        encoder = pipe.text_encoder
        saved = load_file(alt / "text_encoder" / "model.safetensors")
        assert saved.keys() == encoder.state_dict().keys()
        assert all(
            torch.equal(tensor, saved[name])
            for name, tensor in encoder.state_dict().items()
        )
        assert not encoder.training
        # Buffers are not saved: what is computed wrongly for them spoils the states without a message.
        assert encoder.roberta.embeddings.token_type_ids.eq(0).all()
        assert (
            load(model_in(alt), dtype=torch.bfloat16).text_encoder.dtype
            == torch.bfloat16
        )

    def test_draws_what_the_prompt_says(self, pipe: Any) -> None:
        fox, boat, chinese = (
            latents(pipe, prompt) for prompt in ("a fox", "a boat", "狐")
        )
        assert torch.equal(fox, latents(pipe, "a fox"))
        assert fox.isfinite().all()
        assert not torch.equal(fox, boat)
        assert not torch.equal(fox, chinese)

    def test_that_diffusers_has_saved_anew_is_the_same(
        self, pipe: Any, tmp_path: Path
    ) -> None:
        """The index then names another library, in which diffusers does not find the text encoder either."""
        pipe.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "model_index.json").read_text())
        assert saved["text_encoder"] == ["diffusers", ENCODER]
        assert torch.equal(
            latents(load(model_in(tmp_path)), "a fox"), latents(pipe, "a fox")
        )

    def test_is_checked_before_anything_is_loaded(
        self, composer: Composers, alt: Path, pipe: Any
    ) -> None:
        networks = networks_of(pipe).values()
        weights = sum(
            weight.numel() for network in networks for weight in network.parameters()
        )
        for name in ("altdiffusion", "folder"):
            model = composer(
                [f"model={name}", "model.weights=path", f"model.path={alt}"]
            ).current.model
            require_parts(model)
            assert count_weights(model) == weights

    def test_of_another_kind(self, composer: Composers) -> None:
        found = problem(
            composer, "model=altdiffusion", "model.weights=path", f"model.path={EMOJI}"
        )
        assert found.endswith(
            "architecture model=altdiffusion: a StableDiffusionPipeline, not an AltDiffusionPipeline"
        )

    def test_with_code_of_its_own_or_pickled_weights(
        self, composer: Composers, copied: Path
    ) -> None:
        file = copied / "text_encoder" / "model.safetensors"
        file.rename(file.with_name("pytorch_model.bin"))
        said = problem(
            composer, "model=altdiffusion", "model.weights=path", f"model.path={copied}"
        )
        assert "text_encoder/ holds no model.safetensors" in said
        for value in (
            ["my_code", ENCODER],
            ["alt_diffusion", "Mine"],
            ["os", "system"],
        ):
            edit(copied / "model_index.json", text_encoder=value)
            said = problem(composer, "model=folder", f"model.path={copied}")
            assert f"names {json.dumps(value)} as its text_encoder" in said

    def test_with_a_vocabulary_of_sentencepiece(
        self, copied: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = copied / "tokenizer"
        (folder / "tokenizer.json").rename(folder / SENTENCEPIECE)
        monkeypatch.setattr("sdopt.pipelines.weights.find_spec", lambda _: None)
        assert "pip install sentencepiece" in str(lacking_vocabulary(folder))
        monkeypatch.setattr("sdopt.pipelines.weights.find_spec", lambda name: name)
        assert lacking_vocabulary(folder) is None


class TestCalls:
    def test_count_their_operations(
        self, session: Load, chosen: list[str], variant: Compose
    ) -> None:
        counted = operations_of(session(*chosen)._pipe, variant(*chosen))
        # Per token a layer has 4·32² products of attention and 2·32·64 others.
        assert (
            counted["text_encoder"]
            > 2 * LENGTH * 2 * 2 * (4 * 32**2 + 2 * 32 * 64) / 1e12
        )
        assert min(counted["denoiser"], counted["vae_decoder"]) > 0

    def test_run_their_stages(
        self, session: Load, chosen: list[str], inputs: dict[str, list[str]]
    ) -> None:
        calls = {"text_encoder": 2, "denoiser": 2, "vae_decoder": 1}
        assert calls_of(session(*chosen, "workload.steps=2")) == calls
        half = session(
            *chosen, *inputs["img2img"], "workload.steps=4", "task.strength=0.5"
        )
        assert calls_of(half) == calls | {"vae_encoder": 1}

    def test_cannot_inpaint(
        self, variant: Compose, chosen: list[str], inputs: dict[str, list[str]]
    ) -> None:
        [found] = variant(*chosen, *inputs["inpaint"]).conflicts(CPU)
        assert found.startswith(
            "task=inpaint: diffusers has no such pipeline of AltDiffusion"
        )

    def test_prove_their_options(self, session: Load, chosen: list[str]) -> None:
        options = [
            "precision=bf16",
            "attention=vanilla",
            "caching=deepcache",
            "memory=precomputed_embeddings",
        ]
        found = session(*chosen, *options, "workload.steps=4").prove().evidence
        assert (
            len([evidence for evidence in found if evidence.engaged])
            == len(found)
            >= len(options)
        ), found

    def test_of_a_programs_own_pipeline(self, pipe: Any) -> None:
        before = latents(pipe, "a fox")
        assert prove(
            optimize(pipe, attention="vanilla"), "a fox", height=32, width=32
        ).engaged
        assert torch.equal(latents(undo(pipe), "a fox"), before)


class TestRefusal:
    def test_comes_only_where_it_cannot_be_imported(self, variant: Compose) -> None:
        assert missing_alt_diffusion() == []
        assert variant("model=altdiffusion").conflicts(CPU) == []

    @pytest.mark.usefixtures("gone")
    def test_is_a_conflict_before_anything_is_fetched(
        self, variant: Compose, composer: Composers, alt: Path
    ) -> None:
        said = "is an AltDiffusionPipeline, which the installed diffusers no "
        [found] = variant("model=altdiffusion").conflicts(CPU)
        assert found.startswith(f"model=altdiffusion: {said}")
        assert found.endswith("; choose model=sd15")
        assert not variant("model=sd15").conflicts(CPU)
        of_folder = problem(composer, "model=folder", f"model.path={alt}")
        assert of_folder.startswith(f"model.path={alt}: {said}")

    def test_of_random_weights(self, composer: Composers) -> None:
        found = problem(composer, "model=altdiffusion", "model.weights=random")
        assert found.startswith(
            "model.weights=random: the architecture of 'altdiffusion' does not come with sdopt"
        )
