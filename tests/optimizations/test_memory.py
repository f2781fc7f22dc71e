"""The options of the group `memory`: what they need, what they prove, and what they change of the images."""

from pathlib import Path

import numpy as np
import pytest
from diffusers import AutoencoderTiny, DiffusionPipeline
from PIL import Image

from sdopt.gate.judge import RuleContext
from sdopt.optimizations import Contract
from sdopt.optimizations.memory import VaeSlicing, VaeTiling
from sdopt.pipelines.catalog import PACKAGED
from sdopt.results.records import Evidence
from sdopt.worker.draws import timed_draw
from sdopt.worker.session import PipelineHost
from tests.command import SMOKE, Finished, sdopt
from tests.conftest import CPU, Compose, Load

BATCH = ("workload.batch_size=2", "workload.prompt_count=2")
LARGE = "workload.size=96"
"""The VAE of the packaged model has tiles of 64 pixels: 96 take two each way."""


def pipeline(session: PipelineHost) -> DiffusionPipeline:
    return session._pipe


def evidence(session: PipelineHost) -> dict[str, Evidence]:
    return {item.axis: item for item in session.prove() if item.axis.startswith("memory")}


class TestConflicts:
    def test_slicing_needs_a_batch(self, variant: Compose) -> None:
        [found] = variant("memory=vae_slicing").conflicts(CPU)
        assert found == "memory=vae_slicing: slices a batch of images: set workload.batch_size to 2 or more"
        assert variant("memory=vae_slicing", *BATCH).conflicts(CPU) == []
        assert variant("memory=vae_slicing", "workload.images_per_prompt=2").conflicts(CPU) == []

    @pytest.mark.parametrize(
        ("overrides", "sizes"),
        [([], (64, 64)), (["workload.size=56"], (64, 56)), (["memory.vae_tiling.tile_size=96", LARGE], (96, 96))],
    )
    def test_tiling_needs_an_image_larger_than_a_tile(
        self, variant: Compose, overrides: list[str], sizes: tuple[int, int]
    ) -> None:
        [found] = variant("memory=vae_tiling", *overrides).conflicts(CPU)
        assert f"a tile of {sizes[0]} pixels holds the whole image of {sizes[1]}" in found
        assert found.startswith("memory=vae_tiling")

    def test_a_larger_image_or_smaller_tiles_do(self, variant: Compose) -> None:
        assert variant("memory=vae_tiling", LARGE).conflicts(CPU) == []
        sdxl = ("model=sdxl", "model.weights=random")
        [found] = variant("memory=vae_tiling", *sdxl).conflicts(CPU)
        assert "a tile of 1024 pixels" in found
        assert variant("memory=vae_tiling", *sdxl, "memory.vae_tiling.tile_size=512").conflicts(CPU) == []

    def test_tiles_are_whole_latents(self, variant: Compose) -> None:
        [found] = variant("memory=vae_tiling", LARGE, "memory.vae_tiling.tile_size=68").conflicts(CPU)
        assert "memory.vae_tiling.tile_size=68: choose a multiple of 8" in found

    def test_both_are_reported(self, variant: Compose) -> None:
        found = variant("memory=[vae_slicing,vae_tiling]").conflicts(CPU)
        assert [reason.partition(":")[0] for reason in found] == ["memory=vae_slicing", "memory=vae_tiling"]

    def test_a_vae_that_has_neither(self, variant: Compose, tmp_path: Path) -> None:
        for path in (PACKAGED / "emoji").rglob("*"):
            if path.is_file():
                copy = tmp_path / path.relative_to(PACKAGED / "emoji")
                copy.parent.mkdir(exist_ok=True)
                copy.symlink_to(path)
        config = tmp_path / "vae" / "config.json"
        text = config.read_text().replace('"AutoencoderKL"', '"AsymmetricAutoencoderKL"')
        config.unlink()
        config.write_text(text)
        for option in ("vae_slicing", "vae_tiling"):
            chosen = variant("model=folder", f"model.path={tmp_path}", f"memory={option}", *BATCH, LARGE)
            assert chosen.conflicts(CPU) == [f"memory={option}: diffusers' AsymmetricAutoencoderKL cannot do it"]


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

    def test_smaller_tiles(self, session: Load) -> None:
        loaded = session("memory=vae_tiling", "memory.vae_tiling.tile_size=64", "workload.size=128")
        assert evidence(loaded)["memory.vae_tiling"].facts["decoder_calls"] == 9

    def test_both(self, session: Load) -> None:
        found = evidence(session("memory=[vae_slicing,vae_tiling]", *BATCH, LARGE))
        assert [item.engaged for item in found.values()] == [True, True]
        assert all(item.facts["decoder_calls"] == 2 * 4 for item in found.values())

    def test_of_the_tiny_autoencoder(self, session: Load) -> None:
        loaded = session("memory=[vae_slicing,vae_tiling]", "memory.vae_tiling.tile_size=64", *BATCH, LARGE)
        pipe = pipeline(loaded)
        pipe.vae = AutoencoderTiny.from_pretrained(PACKAGED / "tiny_autoencoder")
        for option in loaded._variant.optimizations.values():
            if isinstance(option, VaeSlicing | VaeTiling):
                axis = next(a for a, o in loaded._variant.optimizations.items() if o is option)
                loaded._proofs[axis] = option.apply(pipe)
        assert [item.engaged for item in evidence(loaded).values()] == [True, True]

    @pytest.mark.parametrize("part", ["slicing", "tiling"])
    def test_that_was_taken_away(self, session: Load, part: str) -> None:
        loaded = session("memory=[vae_slicing,vae_tiling]", *BATCH, LARGE)
        getattr(pipeline(loaded).vae, f"disable_{part}")()
        found = {axis: item.engaged for axis, item in evidence(loaded).items()}
        assert found == {"memory.vae_slicing": part != "slicing", "memory.vae_tiling": part != "tiling"}

    def test_one_image_is_no_slice_and_one_tile_no_tiling(self, session: Load) -> None:
        found = evidence(session("memory=[vae_slicing,vae_tiling]"))
        assert [item.engaged for item in found.values()] == [False, False]


class TestContracts:
    def test_are_what_they_promise(self, variant: Compose) -> None:
        both = variant("memory=[vae_slicing,vae_tiling]")
        assert both.optimizations["memory.vae_slicing"].contract is Contract.EQUIVALENT
        assert both.optimizations["memory.vae_tiling"].contract is both.contract is Contract.LOSSY
        assert all(both.optimizations[f"memory.{name}"].claims == {"memory"} for name in ("vae_slicing", "vae_tiling"))

    def test_slices_differ_by_rounding_and_tiles_by_more(self, session: Load, tmp_path: Path) -> None:
        def images(option: str) -> np.ndarray:
            loaded = session(f"memory=[{option}]", *BATCH, LARGE)
            folder = tmp_path / (option or "plain")
            records = loaded.generate(0, timed_draw(loaded._variant), folder)
            return np.stack([np.asarray(Image.open(folder / record.path), dtype=float) for record in records])

        plain = images("")
        assert np.abs(images("vae_slicing") - plain).max() <= 2
        assert 0.1 < np.abs(images("vae_tiling") - plain).mean() < 32


class TestStudy:
    """A factorial study over both, from the command line to the judgement."""

    @pytest.fixture(scope="class")
    def studied(self, tmp_path_factory: pytest.TempPathFactory) -> Finished:
        return sdopt(
            tmp_path_factory.mktemp("memory"),
            *("run", *SMOKE, "study=factorial", "study.options=[memory:vae_slicing,memory:vae_tiling]"),
            *(*BATCH, LARGE),
        )

    def test_measures_every_combination(self, studied: Finished) -> None:
        assert studied.code == 0, studied.err
        rows = {row.name: row for row in studied.result.variants if row.role == "variant"}
        assert list(rows) == [
            "baseline",
            "memory=vae_tiling",
            "memory=vae_slicing",
            "memory=vae_slicing, memory=vae_tiling",
        ]
        assert {str(row.status) for row in rows.values()} == {"ok"}
        assert set(rows["memory=vae_slicing, memory=vae_tiling"].promises) >= {
            "memory.vae_slicing",
            "memory.vae_tiling",
        }

    def test_estimates_both_effects_and_their_interaction(self, studied: Finished) -> None:
        effects = {effect.options: effect for effect in studied.result.effects}
        assert set(effects) == {
            ("memory=vae_slicing",),
            ("memory=vae_tiling",),
            ("memory=vae_slicing", "memory=vae_tiling"),
        }
        assert all(effect.speedup and effect.memory_ratio and not effect.aliased_with for effect in effects.values())

    def test_is_judged_by_the_promise_in_which_two_variants_differ(self, studied: Finished) -> None:
        def sides(candidate: str, reference: str) -> RuleContext:
            mine, other = studied.result.variant(candidate), studied.result.variant(reference)
            return RuleContext(mine, other, {}, None, lambda *_: None, lambda _: None)

        both, tiling = "memory=vae_slicing, memory=vae_tiling", "memory=vae_tiling"
        assert sides("memory=vae_slicing", "baseline").contract is Contract.EQUIVALENT
        assert sides(tiling, "baseline").contract is Contract.LOSSY
        # Both sides are lossy: what is added promises more.
        assert sides(both, tiling).contract is Contract.EQUIVALENT
        assert sides(both, tiling).claimed == ["memory_ratio"]

    def test_one_that_cannot_run_is_skipped_by_name(self, tmp_path: Path) -> None:
        finished = sdopt(
            tmp_path,
            *("run", *SMOKE, "study=one_at_a_time", "study.options=[memory:vae_slicing,memory:vae_tiling]"),
            *("dry_run=true", *BATCH),
        )
        assert "memory=vae_tiling: no: memory=vae_tiling: a tile of 64 pixels holds the whole image" in finished.shown
        assert "memory=vae_slicing: no" not in finished.shown
