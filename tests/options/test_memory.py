"""The options of the group `memory`: what they need, what they prove, and what they change of the images."""

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from PIL import Image

from sdopt.errors import UsageError
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import RuleContext
from sdopt.options import Contract
from sdopt.options.memory import VaeSlicing, VaeTiling
from sdopt.pipelines.catalog import PACKAGED
from sdopt.record.samples import Evidence
from sdopt.worker.draws import draw_of, timed_draw
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE, Finished, sdopt
from tests.fakes import fake_workers
from tests.fixtures import CPU, Compose, Load
from tests.pipelines.test_models import small_xl  # noqa: F401

BATCH = ("workload.batch_size=2", "workload.prompt_count=2")
LARGE = "workload.size=96"
"""The VAE of the packaged model has tiles of 64 pixels: 96 take two each way."""


def pixels(session: PipelineHost, folder: Path, batch: int = 0) -> np.ndarray:
    records = session.generate(batch, timed_draw(session._variant), folder).records
    return np.stack([np.asarray(Image.open(folder / record.path), dtype=float) for record in records])


def evidence(session: PipelineHost) -> dict[str, Evidence]:
    return {item.axis: item for item in session.prove().evidence if item.axis.startswith("memory")}


class TestSequentialGuidance:
    OPTION = "memory=[sequential_guidance]"

    def test_draws_the_same_image_on_half_of_the_samples(self, session: Load, inputs: dict[str, list[str]]) -> None:
        for work in (["workload.steps=3"], ["workload.steps=3", *inputs["inpaint"]], ["scheduler=euler", *BATCH]):
            halved, plain = session(self.OPTION, *work), session(*work)
            ours, theirs = (host._call(output_type="np").images for host in (halved, plain))
            assert np.abs(ours - theirs).max() < 1e-4
            [found] = evidence(halved).values()
            assert found.engaged, found
            assert found.facts["samples"] == found.facts["images"] == halved._variant.workload.batch_size

    def test_beside_a_forecast(self, session: Load) -> None:
        loaded = session(self.OPTION, "caching=spectrum", "workload.steps=10")
        assert all(item.engaged for item in loaded.prove().evidence), loaded.prove().evidence


class TestProof:
    def test_slices(self, session: Load) -> None:
        found = evidence(session("memory=vae_slicing", *BATCH))
        assert found["memory.vae_slicing"].engaged
        assert found["memory.vae_slicing"].option == "vae_slicing"
        assert found["memory.vae_slicing"].facts == {"batch": 2, "at_a_time": 1, "decoder_calls": 2}

    def test_tiles(self, session: Load) -> None:
        found = evidence(session("memory=vae_tiling", LARGE))
        assert found["memory.vae_tiling"].engaged
        assert found["memory.vae_tiling"].facts == {"image": 96, "tile": 64, "decoder_calls": 4}

    def test_of_the_tiny_autoencoder(self, session: Load) -> None:
        loaded = session("memory=[vae_slicing,vae_tiling]", "memory.vae_tiling.tile_size=64", *BATCH, LARGE)
        pipe = loaded._pipe
        pipe.vae = AutoencoderTiny.from_pretrained(PACKAGED / "tiny_autoencoder")
        for option in loaded._variant.optimizations.values():
            if isinstance(option, VaeSlicing | VaeTiling):
                axis = next(a for a, o in loaded._variant.optimizations.items() if o is option)
                loaded._assembly.proofs[axis] = option.apply(pipe)
        assert [item.engaged for item in evidence(loaded).values()] == [True, True]

    @pytest.mark.parametrize("part", ["slicing", "tiling"])
    def test_that_was_taken_away(self, session: Load, part: str) -> None:
        loaded = session("memory=[vae_slicing,vae_tiling]", *BATCH, LARGE)
        getattr(loaded._pipe.vae, f"disable_{part}")()
        found = {axis: item.engaged for axis, item in evidence(loaded).items()}
        assert found == {"memory.vae_slicing": part != "slicing", "memory.vae_tiling": part != "tiling"}

    def test_one_image_is_no_slice_and_one_tile_no_tiling(self, session: Load) -> None:
        found = evidence(session("memory=[vae_slicing,vae_tiling]"))
        assert [item.engaged for item in found.values()] == [False, False]


class TestTinyVae:
    def test_decodes(self, session: Load) -> None:
        found = evidence(session("memory=tiny_vae"))["memory.tiny_vae"]
        assert found.engaged
        assert found.facts == {"class": "AutoencoderTiny", "decoder_parameters": 78115, "calls": 1, "group_norms": 0}

    def test_draws_nearly_the_same(self, session: Load, tmp_path: Path) -> None:
        own = ("workload.steps=10", "workload.size=64")
        difference = pixels(session("memory=tiny_vae", *own), tmp_path) - pixels(session(*own), tmp_path)
        assert 0.5 < np.abs(difference).mean() < 16

    @pytest.mark.parametrize("precision", ["bf16", "autocast_fp16"])
    def test_takes_the_type_of_the_others(self, session: Load, precision: str) -> None:
        loaded = session("memory=tiny_vae", f"precision={precision}")
        assert loaded._pipe.vae.dtype == loaded._pipe.unet.dtype
        assert evidence(loaded)["memory.tiny_vae"].engaged

    def test_encodes_too(self, session: Load, inputs: dict[str, list[str]]) -> None:
        for task in ("img2img", "inpaint"):
            assert evidence(session("memory=tiny_vae", *inputs[task], "workload.steps=2"))["memory.tiny_vae"].engaged

    def test_of_an_untrained_model_is_untrained(self, variant: Compose) -> None:
        sd15 = variant("memory=tiny_vae", "model=sd15", "model.weights=random")
        assert sd15.conflicts(CPU) == []
        [vae] = sd15.optimizations["memory.tiny_vae"].parts(sd15.model, torch.float16).values()
        assert isinstance(vae, AutoencoderTiny)
        assert vae.dtype == torch.float16
        assert sum(parameter.numel() for parameter in vae.decoder.parameters()) == 1_222_531
        assert [path.name for path in sd15.files(fetch=False)] == ["config.json"]

    @pytest.mark.parametrize(("model", "repository"), [("sd15", "taesd"), ("sd21", "taesd"), ("sdxl", "taesdxl")])
    def test_of_a_published_model_comes_from_the_hub(
        self, variant: Compose, model: str, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        chosen = variant("memory=tiny_vae", f"model={model}", "model.weights=hub")
        assert chosen.conflicts(CPU) == []
        with pytest.raises(UsageError, match=f"memory.tiny_vae.hub_id=madebyollin/{repository}: not complete in the"):
            chosen.files(fetch=True)

    def test_from_the_hub_is_read_from_its_cache(
        self, variant: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit = "0123456789abcdef0123456789abcdef01234567"
        repository = tmp_path / "models--somebody--tiny"
        snapshot = repository / "snapshots" / commit
        shutil.copytree(PACKAGED / "tiny_autoencoder", snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        chosen = variant("memory=tiny_vae", "memory.tiny_vae.hub_id=somebody/tiny")
        assert chosen.conflicts(CPU) == []
        assert {path.parent for path in chosen.files(fetch=False)} == {snapshot}
        [vae] = chosen.optimizations["memory.tiny_vae"].parts(chosen.model, torch.float32).values()
        assert isinstance(vae, AutoencoderTiny)


class TestPrecomputedEmbeddings:
    def test_leave_no_text_encoder_to_run(self, session: Load) -> None:
        loaded = session("memory=precomputed_embeddings")
        found = evidence(loaded)["memory.precomputed_embeddings"]
        assert found.engaged
        assert found.facts == {"text_encoders": 0, "calls": 0}
        assert "prompt" not in loaded._assembly.changed(loaded._inputs[0])

    def test_are_freed(self, session: Load) -> None:
        def alive() -> int:
            gc.collect()
            return sum(type(thing).__name__ == "CLIPTextModel" for thing in gc.get_objects())

        session()  # the tests keep a pipeline to copy from
        before = alive()
        freed = session("memory=precomputed_embeddings")
        assert alive() == before
        assert freed is not None

    def test_draw_what_prompts_would(self, session: Load, tmp_path: Path) -> None:
        """Of each prompt its own, in batches that wrap around, with and without guidance."""
        batch = ("workload.batch_size=2", "workload.images_per_prompt=2")
        for guidance in ("1", "4"):
            given = ("workload.prompt_count=3", f"workload.guidance_scale={guidance}", *batch)
            plain, embedded = session(*given), session(*given, "memory=precomputed_embeddings")
            for number in range(timed_draw(plain._variant).calls):
                assert np.abs(pixels(plain, tmp_path, number) - pixels(embedded, tmp_path, number)).max() <= 1

    def test_of_the_quality_pass_are_there_too(self, variant: Compose, tmp_path: Path) -> None:
        chosen = replace(variant("memory=precomputed_embeddings"), pictured=("a fox", "a boat"))
        loaded = PipelineHost(chosen, CPU)
        loaded.prepare()
        [record] = loaded.generate(1, draw_of(chosen), tmp_path).records
        assert record.prompt == "a boat" not in chosen.prompts

    def test_of_two_text_encoders(self, session: Load, small_xl: Path, tmp_path: Path) -> None:  # noqa: F811
        model = ("model=folder", f"model.path={small_xl}", "model.size=64", "workload.steps=2")
        plain, embedded = session(*model), session(*model, "memory=precomputed_embeddings")
        assert evidence(embedded)["memory.precomputed_embeddings"].engaged
        assert np.abs(pixels(plain, tmp_path) - pixels(embedded, tmp_path)).max() <= 1
        assert 0 < embedded.count_operations() < plain.count_operations()


class TestLayerwiseCasting:
    @pytest.mark.parametrize("precision", ["fp32", "autocast_fp16"])
    def test_stores_in_8_bits_and_computes_in_more(self, session: Load, precision: str) -> None:
        loaded = session("memory=layerwise_casting", f"precision={precision}")
        for item in loaded.prove().evidence:
            assert item.engaged, item
        facts = evidence(loaded)["memory.layerwise_casting"].facts
        assert facts["stored"] == {"Conv2d": 39, "Linear": 80}
        assert facts["left_alone"] == {"GroupNorm": 24, "LayerNorm": 21}
        assert "float8_e4m3fn" not in facts["products"]


class TestContracts:
    def test_slices_differ_by_rounding_and_tiles_by_more(self, session: Load, tmp_path: Path) -> None:
        def images(option: str) -> np.ndarray:
            return pixels(session(f"memory=[{option}]", *BATCH, LARGE), tmp_path)

        plain = images("")
        assert np.abs(images("vae_slicing") - plain).max() <= 2
        assert 0.1 < np.abs(images("vae_tiling") - plain).mean() < 32


class TestStudy:
    """A factorial study over both, from the command line to the judgement."""

    @pytest.fixture(scope="class")
    def studied(self, tmp_path_factory: pytest.TempPathFactory) -> Finished:
        options = "study.options=[memory:vae_slicing,memory:vae_tiling]"
        with fake_workers():
            return sdopt(tmp_path_factory.mktemp("memory"), "run", *SMOKE, "study=factorial", options, *BATCH, LARGE)

    def test_is_judged_by_the_promise_in_which_two_variants_differ(self, studied: Finished) -> None:
        def sides(candidate: str, reference: str) -> RuleContext:
            mine, other = studied.result.variant(candidate), studied.result.variant(reference)
            return RuleContext(mine, other, {}, Fit(), lambda *_: None, lambda _: None)

        both, tiling = "memory=vae_slicing, memory=vae_tiling", "memory=vae_tiling"
        assert sides("memory=vae_slicing", "baseline").contract is Contract.EQUIVALENT
        assert sides(tiling, "baseline").contract is Contract.LOSSY
        # Both sides are lossy: what is added promises more.
        assert sides(both, tiling).contract is Contract.EQUIVALENT
        assert sides(both, tiling).claimed == ["memory_ratio"]
