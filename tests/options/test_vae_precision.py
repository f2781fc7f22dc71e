"""Half precision with a VAE of its own type or of its own weights."""

from pathlib import Path

import pytest
import torch

from tests.fixtures import Compose, Load
from tests.options.hosts import evidence
from tests.pipelines.test_models import small_xl  # noqa: F401


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
        found = evidence(loaded, "precision")
        assert found.engaged, found
        assert found.facts["weights"] == [weights]
        assert found.facts["vae_weights"] == found.facts["vae_products"] == ["float32"]
        assert found.facts["diffusers_would_upcast"] is False

    @pytest.mark.parametrize("task", ["txt2img", "img2img"])
    def test_of_sdxl_is_not_cast_by_diffusers(
        self, session: Load, xl: list[str], inputs: dict[str, list[str]], task: str
    ) -> None:
        loaded = session(*xl, "precision=fp16_vae_fp32", *inputs[task], "workload.steps=2")
        found = evidence(loaded, "precision")
        assert found.engaged, found
        assert found.facts["diffusers_would_upcast"] is True

    def test_keeps_what_half_precision_rounds(self, session: Load) -> None:
        own = session("precision=fp16_vae_fp32")._pipe.vae.decoder.conv_in.weight
        assert torch.equal(own, session("precision=fp32")._pipe.vae.decoder.conv_in.weight)
        rounded = session("precision=fp16")._pipe.vae.decoder.conv_in.weight
        assert torch.equal(own.half(), rounded)

    def test_of_random_weights(self, variant: Compose) -> None:
        chosen = variant("precision=fp16_vae_fp32", "model=emoji", "model.weights=random")
        [vae] = chosen.optimizations["precision"].parts(chosen.model, torch.float16).values()
        assert vae.dtype == torch.float32


class TestFixedVae:
    def test_decodes_in_half_precision(self, session: Load, xl: list[str]) -> None:
        found = evidence(session(*fix(xl)), "precision")
        assert found.engaged, found
        assert found.facts["vae_weights"] == found.facts["vae_products"] == ["float16"]

    def test_without_it_diffusers_decodes_in_float32(self, session: Load, xl: list[str]) -> None:
        loaded = session(*fix(xl))
        loaded._pipe.vae.register_to_config(force_upcast=True)
        with pytest.warns(FutureWarning, match="upcast_vae"):
            found = evidence(loaded, "precision")
        assert not found.engaged
        assert found.facts["vae_products"] == ["float32"]
