"""Half precision with a VAE of its own type or of its own weights."""

from pathlib import Path

import pytest
import torch

from sdopt.record.samples import Evidence
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Compose, Load
from tests.pipelines.test_models import small_xl  # noqa: F401


def evidence(session: PipelineHost) -> Evidence:
    [found] = [item for item in session.prove().evidence if item.axis == "precision"]
    return found


@pytest.fixture
def xl(small_xl: Path) -> list[str]:  # noqa: F811
    return ["model=folder", f"model.path={small_xl}", "model.size=64"]


def fix(xl: list[str]) -> list[str]:
    """The small model's own VAE stands for the one that fits into half precision."""
    return [*xl, "precision=fp16_vae_fix", f"precision.path={xl[1].partition('=')[2]}/vae"]


class TestFullVae:
    @pytest.mark.parametrize(("task", "weights"), [("txt2img", "float16"), ("inpaint", "bfloat16")])
    def test_is_stored_and_computed_in_float32(
        self, session: Load, inputs: dict[str, list[str]], task: str, weights: str
    ) -> None:
        loaded = session("precision=fp16_vae_fp32", f"precision.weights={weights}", *inputs[task], "workload.steps=2")
        found = evidence(loaded)
        assert found.engaged, found
        assert found.facts["weights"] == [weights]
        assert found.facts["vae_weights"] == found.facts["vae_products"] == ["float32"]
        assert found.facts["diffusers_would_upcast"] is False

    @pytest.mark.parametrize("task", ["txt2img", "img2img"])
    def test_of_sdxl_is_not_cast_by_diffusers(
        self, session: Load, xl: list[str], inputs: dict[str, list[str]], task: str
    ) -> None:
        loaded = session(*xl, "precision=fp16_vae_fp32", *inputs[task], "workload.steps=2")
        found = evidence(loaded)
        assert found.engaged, found
        assert found.facts["diffusers_would_upcast"] is True

    def test_keeps_what_half_precision_rounds(self, session: Load) -> None:
        own = session("precision=fp16_vae_fp32")._pipe.vae.decoder.conv_in.weight
        assert torch.equal(own, session("precision=fp32")._pipe.vae.decoder.conv_in.weight)
        rounded = session("precision=fp16")._pipe.vae.decoder.conv_in.weight
        assert torch.equal(own.half(), rounded)

    def test_cast_to_half_is_not_proved(self, session: Load) -> None:
        loaded = session("precision=fp16_vae_fp32")
        loaded._pipe.vae.half()
        assert not evidence(loaded).engaged

    def test_conflicts(self, variant: Compose) -> None:
        def conflict(*more: str) -> str:
            [found] = variant("precision=fp16_vae_fp32", *more).conflicts(CPU)
            return found

        assert variant("precision=fp16_vae_fp32").conflicts(CPU) == []
        assert "memory=tiny_vae replaces this VAE" in conflict("memory=tiny_vae")
        assert "choose precision=fp32" in conflict("precision.weights=float32")
        assert "choose precision.autocast=null" in conflict("precision.autocast=float16")

    def test_of_random_weights(self, variant: Compose) -> None:
        chosen = variant("precision=fp16_vae_fp32", "model=emoji", "model.weights=random")
        [vae] = chosen.optimizations["precision"].parts(chosen.model, torch.float16).values()
        assert vae.dtype == torch.float32


class TestFixedVae:
    def test_decodes_in_half_precision(self, session: Load, xl: list[str]) -> None:
        found = evidence(session(*fix(xl)))
        assert found.engaged, found
        assert found.facts["vae_weights"] == found.facts["vae_products"] == ["float16"]

    def test_without_it_diffusers_decodes_in_float32(self, session: Load, xl: list[str]) -> None:
        loaded = session(*fix(xl))
        loaded._pipe.vae.register_to_config(force_upcast=True)
        with pytest.warns(FutureWarning, match="upcast_vae"):
            found = evidence(loaded)
        assert not found.engaged
        assert found.facts["vae_products"] == ["float32"]

    def test_conflicts(self, variant: Compose, tmp_path: Path) -> None:
        sdxl = ("precision=fp16_vae_fix", "model=sdxl", "model.weights=random")
        assert variant(*sdxl).conflicts(CPU) == []
        assert "and the model is not SDXL" in variant("precision=fp16_vae_fix").conflicts(CPU)[0]
        assert "memory=tiny_vae replaces this VAE" in variant(*sdxl, "memory=tiny_vae").conflicts(CPU)[0]
        assert "has no config.json" in variant(*sdxl, f"precision.path={tmp_path}").conflicts(CPU)[0]
