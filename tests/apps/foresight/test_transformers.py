"""Diffusion transformers in `sdopt plan`: weights, tokens, guidance, storage, and published figures of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdopt.apps.foresight import transformer_blueprint
from sdopt.apps.foresight.blueprints import blueprint
from sdopt.apps.foresight.fitting import (
    EXTRAPOLATED,
    half_width,
    is_common,
    labels,
    left_out,
)
from sdopt.apps.foresight.latency import (
    BOTH,
    PARTS,
    Case,
    Coefficients,
    Costs,
    RateTable,
    coefficients,
)
from sdopt.apps.foresight.memory import footprint
from sdopt.apps.foresight.plan import plan_of
from sdopt.apps.foresight.published import Figure, publisher_of
from sdopt.apps.foresight.software import TRANSFORMERS, Software, software_of
from sdopt.apps.foresight.storage import Storage, encoder_stage, weights_in
from sdopt.apps.foresight.trace import filled
from sdopt.apps.foresight.transfers import transfer_s
from sdopt.apps.foresight.transformers import denoiser_costs
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.options.offload import ModelOffload
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED
from sdopt.pipelines.family import family_named
from sdopt.schema import Shape
from tests.apps.foresight.test_published import one

SHEETS = data_sheets()

TINY = PACKAGED / "emoji_dit"

STEP = Costs(0.0, 59.5e12, 14.9e12, 101e9, 72e9, 3800, 11.9e9, filling=2.8e12)
"""A step of FLUX.1 on one image of 1024 pixels."""

DECODER = Costs(9.9e12, 5e12, 5e11, 17e9, 12e9, 139)

EAGER = Software(TRANSFORMERS, "blocks_eager", precision="bf16", torch=(2, 5))

COMPILED = replace(EAGER, name="blocks_compiled", compiled=True)


def seconds(card: str, software: Software, step: Costs = STEP) -> float:
    table = RateTable.of([Case(SHEETS[card], software, step, DECODER, 28, 1)])
    return float(np.exp(table.log_seconds(coefficients().all))[0])


class TestTime:
    @pytest.mark.parametrize(
        ("card", "software", "published"),
        [
            ("h100", EAGER, (6.5, 6.8)),
            ("h100", COMPILED, (4.2, 4.6)),
            ("l20", EAGER, (23, 26.5)),
            ("a100_80", EAGER, (12.9, 14.3)),
            ("a100_80", COMPILED, (9.9, 10.1)),
        ],
    )
    def test_flux_takes_about_what_publishers_say(
        self, card: str, software: Software, published: tuple[float, float]
    ) -> None:
        low, high = published
        assert 0.85 * low < seconds(card, software) < 1.15 * high

    def test_eight_bits_are_faster_compiled_and_unpacked_weights_slower_without_a_compiler(
        self,
    ) -> None:
        assert seconds("h100", replace(COMPILED, precision="fp8")) < 0.9 * seconds(
            "h100", COMPILED
        )
        assert seconds("h100", replace(EAGER, stored=True)) > 1.05 * seconds(
            "h100", EAGER
        )

    def test_no_peak_of_geforce_is_doubled(self) -> None:
        """Products of bfloat16 accumulate in float32: a step takes no less than its operations at that peak."""
        peak = SHEETS["rtx4090"].tensor.bf16
        assert peak is not None
        assert seconds("rtx4090", COMPILED) > 28 * 74.4 / peak

    @pytest.mark.parametrize("card", ["a100_80", "l20", "l40s", "rtx3090", "l4"])
    def test_products_reach_no_more_than_the_peak(self, card: str) -> None:
        sheet = SHEETS[card]
        table = RateTable.of([Case(sheet, COMPILED, STEP, DECODER, 28, 1)])
        [products] = table.parts(coefficients().all)[PARTS.index("products")]
        assert products > STEP.products / (float(sheet.tensor.fp16 or 0.0) * 1e12)

    def test_scaling_outputs_takes_time_by_images(self) -> None:
        scaled = replace(EAGER, stored=True, rescaled=True)
        eight = replace(STEP, moved=STEP.moved * 8, between=STEP.between * 8)
        one, more = (
            seconds("h100", scaled, step)
            - seconds("h100", replace(scaled, rescaled=False), step)
            for step in (STEP, eight)
        )
        assert more > 4 * one > 0

    def test_what_few_publishers_tell_of_is_less_certain(self) -> None:
        found = coefficients()
        assert is_common(found, EAGER, "FLUX.1")
        assert not is_common(found, EAGER, "Z-Image")
        sure, unsure = (
            half_width(found.widths, labels(EXTRAPOLATED, EAGER, "ada", False, common))
            for common in (True, False)
        )
        assert unsure > 1.2 * sure

    def test_heads_are_filled_to_what_kernels_are_compiled_for(self) -> None:
        assert filled(40) == filled(64) < filled(72) == filled(96)
        # The softmax of narrow heads costs as much as that of wide ones.
        assert filled(128) < 2 * filled(64)

    def test_attention_is_quadratic_in_tokens(self) -> None:
        small, large = (
            denoiser_costs(TINY, (side, side), 24, False) for side in (512, 1024)
        )
        tokens = [side * side / 16**2 + 24 for side in (512, 1024)]
        assert large.attention / small.attention == pytest.approx(
            (tokens[1] / tokens[0]) ** 2, rel=0.02
        )
        assert large.products / small.products < 1.1 * tokens[1] / tokens[0]
        assert small.convolutions == 0

    def test_offloading_adds_the_transfer_of_all_weights(self) -> None:
        moved = transfer_s([ModelOffload()], 0.0, 33.7e9, 28, SHEETS["l20"])
        assert 23.0 + moved[0] < 56 < 25.0 + moved[1]


class TestMemory:
    def test_weights_are_those_of_the_published_networks_with_shared_ones_once(
        self,
    ) -> None:
        klein = weights_in(ARCHITECTURES / "flux2_klein_4b", Storage(), torch.bfloat16)
        assert klein["transformer"] == pytest.approx(7.219, abs=0.01)
        pixart = weights_in(ARCHITECTURES / "pixart_sigma", Storage(), torch.bfloat16)
        assert pixart["text_encoder"] == pytest.approx(8.87, abs=0.01)
        # transformers keeps the second layers of T5 in float32 beside float16.
        half = weights_in(ARCHITECTURES / "pixart_sigma", Storage(), torch.float16)
        assert half["text_encoder"] - pixart["text_encoder"] == pytest.approx(
            1.875, abs=0.01
        )
        packed = weights_in(
            ARCHITECTURES / "pixart_sigma", Storage("int8", "int8"), torch.float16
        )
        assert sum(packed.values()) == pytest.approx(5.36, rel=0.02)

    def test_weights_have_the_positions_that_files_hold_beside_them(self) -> None:
        """The file of SD 3.5 medium on the hub has 4.94 GB, of which its positions are 0.45."""
        medium = weights_in(ARCHITECTURES / "sd35_medium", Storage(), torch.bfloat16)
        assert medium["transformer"] * 2**30 == pytest.approx(4.94e9, rel=0.001)

    def test_model_offloading_holds_an_encoder_more_where_both_branches_are_encoded(
        self,
    ) -> None:
        family = family_named("StableDiffusion3Pipeline")
        weights = {
            "text_encoder": 0.23,
            "text_encoder_2": 1.29,
            "text_encoder_3": 10.75,
        }
        assert encoder_stage(family, weights, both=True) == pytest.approx(12.04)
        assert encoder_stage(family, weights, both=False) == pytest.approx(10.75)

    def test_text_encoders_that_wait_in_host_memory_are_not_beside_the_denoiser(
        self,
    ) -> None:
        with composer_of(["model=flux_dev", "model.weights=random"]) as composer:
            alone, waiting = (
                composer.variant(None, choices)
                for choices in ([], ["memory=[text_encoder_offload]"])
            )
            plans = [
                blueprint(variant, variant.shapes[0]) for variant in (alone, waiting)
            ]
        held = [
            footprint(variant, plan).floor
            for variant, plan in zip((alone, waiting), plans, strict=True)
        ]
        clip, t5 = (
            plans[0].weights[name] for name in ("text_encoder", "text_encoder_2")
        )
        plan = plans[0]
        alive = max(plan.denoiser.peak, plan.decoder.peak) / 2**30
        # T5 beside the denoiser's weights, or activations without T5.
        assert held[0] - held[1] == pytest.approx(
            min(clip + t5, clip + alive), rel=0.01
        )
        assert plans[1].call_bytes == pytest.approx((clip + t5) * 2**30)

    def test_quantizing_on_the_card_needs_all_weights_there_first(self) -> None:
        with composer_of(["model=emoji_dit"]) as composer:
            whole, packed = (
                composer.variant(None, choices)
                for choices in ([], ["precision=int8_torchao"])
            )
            plans = [
                blueprint(variant, variant.shapes[0]) for variant in (whole, packed)
            ]
        assert plans[1].weights["transformer"] < plans[0].weights["transformer"]
        assert (
            footprint(packed, plans[1]).floor
            >= plans[1].loading
            > sum(plans[1].weights.values())
        )
        assert footprint(packed, plans[1]).quantizing
        assert not footprint(whole, plans[0]).quantizing

    def test_guidance_of_two_calls_doubles_a_step_and_not_its_memory(self) -> None:
        with composer_of(["model=emoji_dit"]) as composer:
            one_branch, two = (
                composer.variant(None, [f"workload.guidance_scale={scale}"])
                for scale in (1, 4)
            )
            plans = [
                blueprint(variant, Shape(64, 1)).denoiser
                for variant in (one_branch, two)
            ]
        assert plans[1].products == pytest.approx(2 * plans[0].products)
        assert plans[1].peak == plans[0].peak


def test_what_plan_knows_no_figures_of_is_said() -> None:
    with composer_of(["model=emoji_dit"]) as composer:
        for choices, reason in (
            (["precision=int8_torchao"], "choose compiler=inductor"),
            (["precision=uint4_sdnq"], "no figures"),
            (["caching=first_block"], "no figures"),
            (["compiler=tensorrt"], "no figures"),
            (["attention=sage"], "no figures"),
            (["attention=dispatched", "attention.backend=flash"], "no figures"),
        ):
            found = software_of(composer.variant(None, choices), (2, 5))
            assert isinstance(found, str)
            assert reason in found


@pytest.mark.slow
def test_what_fits_a_small_card_is_named_and_fits() -> None:
    _, notes, _ = plan_of(["model=flux2_klein_4b", "hardware=rtx4060"])
    [way] = [note for note in notes if note.startswith("what fits rtx4060: ")]
    choices = way.partition(": ")[2].partition(" (")[0].split()
    [fitting], _, _ = plan_of(["model=flux2_klein_4b", *choices, "hardware=rtx4060"])
    assert fitting.fits == "fits"
    assert np.isfinite(fitting.seconds)


def test_a_way_to_decode_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways to fit into a card differ in what waits in host memory, and decode alike."""
    traced = []

    def trace(function: Any, *_: Any, **__: Any) -> Costs:
        traced.append(function)
        return Costs()

    monkeypatch.setattr(transformer_blueprint, "trace", trace)
    choices = ["model=emoji_dit", "workload.size=128", "memory.vae_tiling.tile_size=72"]
    for waiting in ("model_offload", "text_encoder_offload", "group_offload"):
        with composer_of([*choices, f"memory=[{waiting},vae_tiling]"]) as composer:
            variant = composer.variant(None)
        blueprint(variant, variant.shapes[0])
    assert len(traced) == 1


class TestPublished:
    @pytest.fixture
    def figure(self, tmp_path: Path) -> Callable[..., Figure]:
        def made(**row: object) -> Figure:
            usual = {
                "model": "FLUX.1 dev",
                "gpu": "L20",
                "width": 1024,
                "height": 1024,
                "precision": "bf16",
            }
            return one(tmp_path, **(usual | {"backend": "diffusers eager"} | row))

        return made

    def test_guidance_goes_by_the_family(self, figure: Callable[..., Figure]) -> None:
        assert (figure().work.calls, figure().work.samples) == (1, 1)
        assert figure(model="Qwen-Image").work.calls == 2
        assert figure(model="SD 3 medium").work.samples == 2
        assert figure(model="Z-Image-Turbo").work.samples == 1

    def test_precision_and_storage_are_read(
        self, figure: Callable[..., Figure]
    ) -> None:
        fast = figure(
            precision="bf16, fp8 dynamic per row",
            backend="torch 2.6, compile max-autotune",
        ).software
        assert (fast.precision, fast.compiled, fast.graphs, fast.stored) == (
            "fp8",
            True,
            True,
            False,
        )
        alone = figure(precision="bf16, int8 weight-only")
        assert (
            alone.software.precision,
            alone.software.stored,
            alone.work.storage.denoiser,
        ) == ("bf16", True, "int8")

    @pytest.mark.parametrize(
        "row",
        [
            {"backend": "first block cache 0.08"},
            {"precision": "bf16, int8 dynamic"},
            {"model": "FLUX.1 dev + LoRA"},
            {"model": "HunyuanDiT"},
            {"backend": "eager", "note": "model offload"},
            {"backend": "TensorRT 10"},
            {"precision": "int3"},
        ],
    )
    def test_what_cannot_be_told_is_refused(
        self, figure: Callable[..., Figure], row: dict[str, object]
    ) -> None:
        with pytest.raises(ValueError, match="not enough values"):
            figure(**row)

    def test_memory_of_a_figure_is_near_its_weights_and_activations(
        self, figure: Callable[..., Figure]
    ) -> None:
        assert (
            figure(metric="gpu_memory_gb", unit="GB", value=33.8).memory == "allocated"
        )


def test_repositories_of_one_owner_are_one_publisher() -> None:
    assert publisher_of("me/a:README.md@1") == publisher_of("me/b:x") == "me"
    assert publisher_of("https://hub.example/you/model") == "hub.example/you"


def test_chip_and_publisher_are_left_out_together_and_the_chip_of_an_unknown_publisher() -> (
    None
):
    alone, pair, all_of_them = (np.full(3, value) for value in (1.0, 2.0, 3.0))
    found = Coefficients(
        all_of_them, {"chip": {"AD102": alone}, "both": {f"AD102{BOTH}me": pair}}
    )
    assert found.left_out("both", f"AD102{BOTH}me") is pair
    assert found.left_out("both", f"AD102{BOTH}new") is alone
    assert found.left_out("both", f"new{BOTH}new") is all_of_them
    assert left_out("both", f"AD102{BOTH}me") == "AD102"


def test_a_file_of_figures_of_transformers_is_read(tmp_path: Path) -> None:
    figure = one(
        tmp_path,
        gpu="A800",
        model="FLUX.1 dev",
        width=1024,
        height=1024,
        precision="bf16",
        backend="eager",
    )
    assert figure.card == "a800"
