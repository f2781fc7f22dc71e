"""What fits into which card: models against cards of 6 to 24 GB, as people report it, and a file's own bits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sdopt.apps.foresight.advice import Way
from sdopt.apps.foresight.blueprints import blueprint
from sdopt.apps.foresight.plan import plan_of
from sdopt.apps.foresight.software import software_of
from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from tests.apps.foresight import fits
from tests.fixtures import Tiny
from tests.pipelines.tiny import tiny
from tests.pipelines.web_files import gguf_file, original, save

ROWS = {(row["model"], row["card"]): row for row in fits.read()}

BY_NETWORKS = ("model_offload", "text_encoder_offload")


def choices(model: str, card: str, kind: str) -> str:
    """The choices of a way to fit, in one line; "" if there is none."""
    way = ROWS[model, card][kind]
    return " ".join(way["choices"]) if way else ""


def test_each_model_fits_into_each_card_in_some_way() -> None:
    assert len(ROWS) == len(fits.MODELS) * len(fits.CARDS)
    for place, row in ROWS.items():
        assert row["whole"] or row["packed"], place


@pytest.mark.parametrize(
    ("model", "card", "kind", "words"),
    [
        # https://huggingface.co/blog/flux: all networks in turn on 24 GB; 4 bits on 8 GB
        # (https://github.com/huggingface/diffusers/issues/9149), where T5 must be in fewer bits, too.
        ("flux_dev", "rtx4090", "whole", "memory=[model_offload]"),
        ("flux_dev", "rtx4060", "packed", "precision=nf4_bitsandbytes"),
        ("flux_dev", "rtx4060", "packed", "quantized_text_encoders"),
        ("flux_dev", "rtx3060", "packed", "model_offload"),
        # https://github.com/QwenLM/Qwen-Image/issues/31: 4 bits on 12 GB, and single layers in bfloat16 on less.
        ("qwen_image", "rtx3060", "packed", "precision=nf4_bitsandbytes"),
        ("qwen_image", "rtx4060", "whole", "group_offload"),
        # 8.4 GB in fp8 with its encoder, of 13 GB in bfloat16, as its makers say.
        ("flux2_klein_4b", "rtx3060", "whole", "model_offload"),
        ("flux2_klein_4b", "rtx4060", "packed", "model_offload"),
        # T5 of SD 3.5 is the largest of its networks.
        ("sd35_medium", "rtx4060", "packed", "without_t5"),
        # Their images are black in float16.
        ("z_image_turbo", "rtx2060", "whole", "precision=fp32"),
        ("qwen_image", "rtx2060", "whole", "precision=fp32"),
        ("flux_dev", "rtx2060", "whole", "precision=fp16"),
    ],
)
def test_fits(model: str, card: str, kind: str, words: str) -> None:
    assert words in choices(model, card, kind)


def test_what_takes_nearly_all_of_a_card_is_said_with_another_way() -> None:
    """With a desktop on it, a card of 24 GiB is too small for FLUX.1: https://github.com/huggingface/diffusers/issues/11922."""
    row = ROWS["flux_dev", "rtx4090"]
    assert row["whole"]["close"]
    assert not row["packed"]["close"]
    assert row["packed"]["likely"] < 20
    assert "nothing else" in str(Way(("memory=[model_offload]",), 23.3, 31.4, True))


def test_does_not_fit() -> None:
    """22 GiB of FLUX.1's weights and 38 of Qwen-Image's are on no card of 16 and 24 GB at once."""
    for model, card in (("flux_dev", "rtx4060_ti"), ("qwen_image", "rtx4090")):
        whole = choices(model, card, "whole")
        assert whole
        assert not any(option in whole for option in BY_NETWORKS)
    for model in fits.MODELS:
        for kind in ("whole", "packed"):
            assert "bf16" not in choices(model, "rtx2060", kind), model


def test_offloaded_networks_need_what_was_published() -> None:
    """23.27 GiB are the peak of FLUX.1 in bfloat16 by derekl35/diffusers-quantization-benchmarks, of an H100."""
    way = ROWS["flux_dev", "rtx4090"]["whole"]
    assert way["likely"] - CUDA_CONTEXT_GIB == pytest.approx(23.27, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", fits.MODELS)
def test_what_was_counted_is_current(model: str) -> None:
    for row in fits.counted(model):
        known = ROWS[model, row["card"]]
        for kind in ("whole", "packed"):
            now, before = row[kind], known[kind]
            assert (now is None) == (before is None), (
                "python -m tests.apps.foresight.fits"
            )
            if now is not None:
                assert list(now["choices"]) == before["choices"]
                assert now["likely"] == pytest.approx(before["likely"], abs=0.01)


@pytest.mark.slow
def test_plan_answers_in_one_line() -> None:
    _, notes, _ = plan_of(["model=flux2_klein_4b", "plan.hardware=[rtx4060,rtx3060]"])
    for card in ("rtx4060", "rtx3060"):
        [answer] = [note for note in notes if note.startswith(f"what fits {card}: ")]
        assert choices("flux2_klein_4b", card, "whole") in answer
        assert choices("flux2_klein_4b", card, "packed") in answer


class TestBlocks:
    @pytest.mark.parametrize(
        ("kind", "precision", "share"),
        [
            ("Q8_0", "bf16", 8.5 / 16),
            ("Q4_0", "bf16", 4.5 / 16),
            ("BF16", "fp32", 16 / 32),
            ("F16", "fp32", 1.0),
        ],
    )
    def test_of_a_file_are_counted(
        self,
        variant_of: Tiny,
        tiny_folder: Callable[[str], Path],
        tmp_path: Path,
        kind: str,
        precision: str,
        share: float,
    ) -> None:
        """As diffusers keeps them: numbers of 16 bits in bfloat16 are blocks to it, and those in float16 are not."""
        pytest.importorskip("gguf")
        transformer = tiny("flux").transformer
        packed, whole = tmp_path / "flux.gguf", tmp_path / "flux.safetensors"
        gguf_file(original(transformer), packed, kind)
        save(original(transformer), whole)
        base = f"model.base={tiny_folder('flux')}"
        weights = []
        for file in (packed, whole):
            variant = variant_of(file, base, f"precision={precision}")
            plan = blueprint(variant, variant.shapes[0])
            weights.append(plan.weights["transformer"])
        assert weights[0] / weights[1] == pytest.approx(share, rel=0.05)

    def test_of_four_bits_have_no_time(
        self,
        variant_of: Tiny,
        tiny_folder: Callable[[str], Path],
        tmp_path: Path,
    ) -> None:
        pytest.importorskip("gguf")
        found = {}
        for kind in ("Q8_0", "Q4_0"):
            file = tmp_path / f"{kind}.gguf"
            gguf_file(original(tiny("flux").transformer), file, kind)
            variant = variant_of(
                file, f"model.base={tiny_folder('flux')}", "precision=bf16"
            )
            found[kind] = software_of(variant, (2, 7))
        assert str(found["Q4_0"]).startswith(
            "model=Q4_0.gguf: there are no figures of blocks in Q4_0"
        )
        assert getattr(found["Q8_0"], "stored", None) is True
