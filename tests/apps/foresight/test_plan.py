"""Plans: memory by options, states and refusals, ranks, and the command."""

import json
import math
import multiprocessing
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runners.plan import main
from sdopt.apps.foresight import advice, cpu, forecast
from sdopt.apps.foresight import plan as forecasts
from sdopt.apps.foresight.advice import Way, WaysToFit, _numbers_for, what_fits
from sdopt.apps.foresight.blueprints import blueprint
from sdopt.apps.foresight.cpu import ARCHITECTURE as CPU
from sdopt.apps.foresight.cpu import device_of
from sdopt.apps.foresight.forecast import expected
from sdopt.apps.foresight.latency import Case, Costs
from sdopt.apps.foresight.memory import Footprint, decoding_gib, footprint, steps_of
from sdopt.apps.foresight.plan import (
    Prediction,
    learn,
    names_of,
    plan,
    plan_of,
    predict,
    ranks,
    text_of,
)
from sdopt.apps.foresight.software import software_of
from sdopt.apps.foresight.tables import remarks
from sdopt.apps.foresight.unet_blueprint import _stored
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.config.paths import CONF
from sdopt.errors import UsageError
from sdopt.forecast import Expected, foreseen
from sdopt.hardware.cards import CUDA_CONTEXT_GIB
from sdopt.hardware.device import Device
from sdopt.hardware.probe import describe_cpu
from sdopt.options.base import Optimization
from sdopt.options.nf4 import BitsAndBytes
from sdopt.pipelines.catalog import ARCHITECTURES
from sdopt.pipelines.family import family_named
from sdopt.record.files import read_result, write_cached, write_result
from sdopt.record.samples import Interference
from sdopt.reference import MODEL
from sdopt.schema import Shape, Sheet
from sdopt.worker.machine import Machine
from tests.fixtures import Compose, Composers
from tests.test_architecture import ROOT

SHEETS = data_sheets()

UNET, WEIGHTS = (
    2 * millions * 1e6 / 2**30 for millions in (859.52, 859.52 + 83.65 + 123.06)
)
"""GiB of the published networks of SD 1.5 in float16: the denoiser, and all of them."""

USUAL = ("model=emoji", "precision=fp16", "workload.size=512")
"""The packaged model at the size of the figures: it has the parts of SD 1.5, and is traced in a third of the time."""

Planned = Callable[..., Prediction]


class OwnOption(Optimization):
    """An option that is not sdopt's."""


@pytest.fixture(scope="module")
def planned() -> Planned:
    """Predicts one variant on one card, and beside it on some others, since tracing its networks takes longest."""
    cards = {
        card: SHEETS[card] for card in ("t4", "rtx3060", "rtx4090", "rtx5090", "mi300x")
    }
    kept: dict[tuple[str, ...], dict[str, Prediction]] = {}

    def made(card: str, *overrides: str) -> Prediction:
        if overrides not in kept:
            with composer_of(list(overrides)) as composer:
                variant = composer.variant(None)
            kept[overrides] = {found.card: found for found in predict([variant], cards)}
        return kept[overrides][card]

    return made


class TestMemory:
    def test_of_known_pipelines(self, planned: Planned) -> None:
        """Weights by the parameters of the published networks; activations as a run on a card has them."""
        denoiser, decoder, scores = 0.13, 0.38, 1.05
        sd15 = ("model=sd15", "precision=fp16")
        usual = planned("rtx4090", *sd15).memory
        assert usual.floor == pytest.approx(
            WEIGHTS + decoder + CUDA_CONTEXT_GIB, abs=0.02
        )
        # As much as PyTorch allocated on an H200: outputs/records/nvidia-h200/sd15_options.
        assert usual.likely - CUDA_CONTEXT_GIB == pytest.approx(2.637, rel=0.03)
        full = planned("rtx4090", "model=sd15").memory
        assert full.floor - CUDA_CONTEXT_GIB == pytest.approx(
            2 * (usual.floor - CUDA_CONTEXT_GIB), rel=0.01
        )
        alone = planned("rtx4090", *sd15, "memory=[model_offload]").memory
        assert alone.floor == pytest.approx(
            UNET + denoiser + CUDA_CONTEXT_GIB, abs=0.02
        )
        split = planned("rtx4090", *sd15, "attention=math").memory
        assert split.floor == pytest.approx(
            WEIGHTS + scores + CUDA_CONTEXT_GIB, abs=0.05
        )

    def test_grows_with_batch_and_size(self, planned: Planned) -> None:
        usual = planned("rtx4090", *USUAL).memory.floor
        assert usual < planned("rtx4090", *USUAL, "workload.batch_size=2").memory.floor
        assert (
            usual
            < planned(
                "rtx4090", "model=emoji", "precision=fp16", "workload.size=768"
            ).memory.floor
        )

    @pytest.mark.slow
    def test_options_that_save_memory_do(self, planned: Planned) -> None:
        def floor(*overrides: str) -> float:
            return planned(
                "rtx4090", "model=emoji", "precision=fp16", *overrides
            ).memory.floor

        for option in (
            "tiny_vae",
            "model_offload",
            "sequential_offload",
            "group_offload",
            "layerwise_casting",
        ):
            assert floor(f"memory=[{option}]") < floor(), option
        for option, work in (
            ("vae_tiling", "workload.size=128"),
            ("vae_slicing", "workload.batch_size=4"),
        ):
            assert floor(f"memory=[{option}]", work) < floor(work), option

    def test_says_whether_it_fits(self) -> None:
        need = Footprint(10.0, 11.0)
        assert [need.verdict(gib) for gib in (12.0, 10.5, 9.0)] == [
            "fits",
            "tight",
            "does not fit",
        ]


class TestStates:
    def test_what_stands_below_names_every_cause(self, planned: Planned) -> None:
        cached = planned("t4", *USUAL, "caching=deepcache")
        assert cached.state == "extrapolated"
        [said] = [line for line in remarks([cached], "") if "extrapolated" in line]
        assert "cache" in said, "it is a T4 at a size of the figures"
        priced = [replace(cached, price=1.0), replace(cached, card="l4", price=2.0)]
        assert any("same hardware.price_per_hour" in one for one in remarks(priced, ""))
        one_card = "\n".join(remarks(priced[:1], ""))
        assert "price_per_hour" not in one_card

    def test_known_extrapolated_and_refused(self, planned: Planned) -> None:
        assert planned("rtx4090", *USUAL).state == "known"
        assert planned("rtx5090", *USUAL).state == "extrapolated"
        card = planned("mi300x", *USUAL)
        assert card.state == "refused"
        assert math.isnan(card.seconds)
        assert "CDNA3" in card.reason

    def test_what_there_are_no_figures_of_is_refused(self) -> None:
        with composer_of([]) as composer:
            for option in (
                "precision=int8_torchao",
                "caching=first_block",
                "grad_mode=enabled",
                "compiler=openvino",
            ):
                reason = software_of(composer.variant(None, [option]), (2, 1))
                assert isinstance(reason, str)
                assert reason.startswith(f"{option}: there are no figures")

    def test_what_the_user_wrote_is_not_planned_as_if_it_were_absent(
        self, tmp_path: Path
    ) -> None:
        function = tmp_path / "mine.py"
        function.write_text("def change(pipe):\n    pass\n")
        with composer_of([]) as composer:
            plain = composer.variant(None, [])
            patched = composer.variant(None, [f"patch={function}:change"])
        assert not isinstance(software_of(plain, (2, 1)), str)
        reason = software_of(patched, (2, 1))
        assert isinstance(reason, str)
        assert reason.startswith("patch=")
        own = replace(plain, optimizations={**plain.optimizations, "mine": OwnOption()})
        assert str(software_of(own, (2, 1))).startswith(
            "mine=mine: there are no figures"
        )

    @pytest.mark.parametrize(
        ("overrides", "reason"),
        [
            (
                ("workload.batch_size=64", "attention=vanilla"),
                "it would spill or run out of memory",
            ),
            (("compiler=openvino",), "an OpenVINO model runs on a CPU"),
        ],
    )
    def test_what_cannot_run_is_refused(
        self, planned: Planned, overrides: tuple[str, ...], reason: str
    ) -> None:
        found = planned("rtx3060", *USUAL, *overrides)
        assert found.state == "refused"
        assert reason in found.reason
        assert "no time" in text_of(found)

    def test_more_steps_take_longer_and_offloading_longer_yet(
        self, planned: Planned
    ) -> None:
        usual, longer = (
            planned("rtx3060", *USUAL),
            planned("rtx3060", *USUAL, "workload.steps=50"),
        )
        assert usual.seconds < longer.seconds
        moved = planned("rtx3060", *USUAL, "memory=[sequential_offload]")
        assert moved.high > usual.high
        assert moved.high / moved.low > usual.high / usual.low

    @pytest.mark.parametrize(
        ("caching", "least", "most"),
        # Of 30 steps deep cache runs 10 whole, Spectrum 13, and guidance halves the batch of 9.
        [
            ("deepcache", 0.3, 0.6),
            ("spectrum", 0.4, 0.65),
            ("guidance_interval", 0.75, 0.97),
        ],
    )
    def test_what_steps_leave_out_is_counted_and_extrapolated(
        self, planned: Planned, caching: str, least: float, most: float
    ) -> None:
        model = (*USUAL, "workload.steps=30")
        usual, cached = (
            planned("t4", *model),
            planned("t4", *model, f"caching={caching}"),
        )
        assert least < cached.seconds / usual.seconds < most
        assert cached.state == "extrapolated"
        assert cached.high / cached.low > usual.high / usual.low

    def test_half_the_batch_twice_is_no_less_work(self, planned: Planned) -> None:
        # With its scores written to memory, the denoiser needs more of it than the decoder.
        model = (*USUAL, "attention=vanilla")
        usual, halved = (
            planned("t4", *model),
            planned("t4", *model, "memory=[sequential_guidance]"),
        )
        assert halved.seconds > 0.95 * usual.seconds
        assert halved.memory.floor < usual.memory.floor - 0.2

    def test_ranks_have_chances(self, planned: Planned) -> None:
        found = [planned(card, *USUAL) for card in ("t4", "rtx4090", "mi300x")]
        ordered = list(ranks(found))
        assert [each.card for each, _ in ordered] == ["rtx4090", "t4"]
        assert ordered[0][1] > 0.5
        assert names_of(found) == ["t4", "rtx4090", "mi300x"]
        other = replace(found[0], shape=Shape(1024, 1))
        assert names_of([found[0], other]) == [
            "t4 512×512, batch 1",
            "t4 1024×1024, batch 1",
        ]


@pytest.mark.parametrize(
    ("alive", "taken"), [(0.375, 0.63), (0.84, 1.36), (1.5, 2.42), (24.0, 31.6)]
)
def test_decoding_takes_the_workspaces_of_its_convolutions(
    alive: float, taken: float
) -> None:
    """SD 1.5 on an H200, SD 2.1 of 768 pixels on an RTX 3090, SDXL on an H200, and 16 images of FLUX.1 on an H100."""
    assert decoding_gib(alive) == pytest.approx(taken, rel=0.05)


def test_a_measured_run_changes_components_and_not_the_card() -> None:
    from sdopt.apps.foresight.latency import NAMES, coefficients
    from tests.apps.foresight.test_model import case

    known, all_parts = case("t4"), coefficients().all
    changed_to, _ = learn(
        known, {"denoiser_step": 0.5, "vae_decoder": 0.6}, 14.0, all_parts, "a run"
    )
    changed = {NAMES[i] for i in range(len(NAMES)) if changed_to[i] != all_parts[i]}
    assert changed == {"class_eager", "decoder", "fixed_library_2"}


class TestCommand:
    def test_prints_a_table_and_the_command(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*USUAL, "plan.hardware=[t4,rtx4090,mi300x]"]) == 0
        shown = capsys.readouterr().out
        assert f"sdopt run {' '.join(USUAL)}" in shown
        assert "rtx4090" in shown
        assert "CDNA3" in shown

    def test_prices_per_1000_images(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            main([*USUAL, "hardware=t4", "hardware.price_per_hour=0.5", "--json"]) == 0
        )
        [row] = json.loads(capsys.readouterr().out)
        assert row["price_per_1000_images"] == pytest.approx(
            row["seconds"] * 1000 / 3600 * 0.5
        )

    def test_the_object_says_what_fits_and_the_chances(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["model=sdxl", "precision=fp16", "plan.hardware=[rtx3050,rtx4090,t4]"]
        assert main([*words, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        by_card = {row["card"]: row for row in rows}
        assert by_card["rtx4090"]["beats_next"] > 0.9
        for card, row in by_card.items():
            fits = [note for note in row["notes"] if note.startswith("what fits ")]
            ways = [note.startswith(f"what fits {card}: ") for note in fits]
            assert ways == [True] * (row["fits"] == "does not fit")
            # With the time of a call: one way may take longer than another that needs less.
            assert all(re.search(r" \(about [\d.]+ s \[", note) for note in fits)
        assert any(row["fits"] == "does not fit" for row in rows)

    @pytest.mark.parametrize(
        "wrong",
        [
            ["model=sd15"],
            ["model=sd15", "plan.hardware=[banana]"],
            ["model=sd15", "hardware=banana"],
            ["model=sd15", "hardware=t4", "plan.hardware=[l4]"],
            ["model=sd15", "hardware=t4", "plan.speed=1"],
            ["model=sd15", "hardware=t4", "plan.measured=/nowhere"],
            ["model=sd15", "hardware=t4", "plan.torch=new"],
            [
                "model=sd15",
                "hardware=t4",
                "plan.torch=2.1",
                "plan.measured=outputs/records/nvidia-h200/sd15_processes",
            ],
        ],
    )
    def test_bad_input_is_one_line_and_exit_code_2(
        self, wrong: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(wrong) == UsageError.exit_code
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "my models (v2), x=1"
    folder.symlink_to(MODEL)
    [found], _, _ = plan_of([f"model={folder}", "hardware=t4"])
    assert found.card == "t4"


def test_the_command_has_the_groups_that_the_plan_was_composed_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "predict", lambda *_: [])
    (tmp_path / "own groups" / "layout").mkdir(parents=True)
    file = tmp_path / "own groups" / "layout" / "mine.yaml"
    file.write_text((CONF / "layout" / "contiguous.yaml").read_text())
    words = ["model=emoji", "layout=mine", "hardware=t4"]
    _, _, command = plan_of(words, file.parents[1])
    folder = shlex.quote(str(file.parents[1]))
    assert command.startswith(f"sdopt run --config-dir {folder} model=emoji ")


def test_what_no_variant_of_a_study_has_is_said() -> None:
    """The seconds of float32 and an interval of 3 would be read as those of what was asked for."""
    chosen = ["precision=fp16", "caching=deepcache", "caching.interval=5"]
    options = ["study=one_at_a_time", "study.options=[caching:deepcache]"]
    _, notes, _ = plan_of(["model=emoji", "hardware=t4", *chosen, *options])
    assert [note.partition(": no variant has it")[0] for note in notes[:2]] == [
        "precision=fp16",
        "caching.interval=5",
    ]


def test_the_command_begins_with_a_baseline_that_fits() -> None:
    words = ["model=sd15", "precision=fp16", "hardware=t4"]
    _, _, command = plan_of(words)
    assert command.startswith(f"sdopt run {' '.join(words)}")
    small = "hardware.sheet.memory_gib=3.8"
    [made], notes, command = plan_of([*words, small])
    assert made.fits != "does not fit"
    assert "a baseline that does not fit" in notes[-1]
    assert command == f"sdopt optimize sd15 precision=fp16 hardware=t4 {small}"


@pytest.mark.parametrize(
    "written",
    [
        "plan.hardware=t4,l4",
        "plan.hardware=['t4', l4]",
        "hardware=t4,l4",
        "hardware=[t4,l4]",
    ],
)
def test_several_cards_are_a_list_however_it_is_written(written: str) -> None:
    assert list(plan(written)["card"]) == ["t4", "l4"]
    with pytest.raises(UsageError, match="each override is an argument of its own"):
        plan([written])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("RTX 4090", ["rtx4090"]),
        ("NVIDIA GeForce RTX 3060", ["rtx3060", "rtx3060_8gb"]),
        ("A100 80GB", ["a100_80", "a100_80_pcie"]),
    ],
)
@pytest.mark.parametrize("key", ["hardware='{}'", "plan.hardware=['{}']"])
def test_a_card_is_meant_however_it_is_written(
    written: str, meant: list[str], key: str
) -> None:
    predictions, notes, _ = plan_of([*USUAL, key.format(written)])
    assert [made.card for made in predictions] == meant
    assert any(f"{written} is the name of several cards" in note for note in notes) == (
        len(meant) > 1
    )


@pytest.mark.slow
def test_a_card_of_two_memories_is_told_for_both_and_what_would_fit() -> None:
    predictions, notes, _ = plan_of(
        ["model=sdxl", "model.weights=random", "precision=bf16", "hardware=rtx4060_ti"]
    )
    assert {made.card: made.fits for made in predictions} == {
        "rtx4060_ti": "fits",
        "rtx4060_ti_8gb": "does not fit",
    }
    [way_out] = [
        note for note in notes if note.startswith("what fits rtx4060_ti_8gb: ")
    ]
    choices = way_out.partition(": ")[2].partition(" (")[0].split()
    [fitting], _, _ = plan_of(
        ["model=sdxl", "model.weights=random", *choices, "hardware=rtx4060_ti_8gb"]
    )
    assert fitting.fits == "fits"


@pytest.mark.parametrize("sizes", ["[512,256]", "[256,512]"])
def test_what_would_fit_is_told_of_the_largest_shape(
    monkeypatch: pytest.MonkeyPatch, sizes: str
) -> None:
    asked: list[int] = []

    def fitting(composer: Any, sheet: Any, shape: Shape, known: Any) -> WaysToFit:
        asked.append(shape.size)
        return WaysToFit()

    monkeypatch.setattr("sdopt.apps.foresight.plan.what_fits", fitting)
    card = ("hardware=t4", "hardware.sheet.memory_gib=0.6")
    plan_of(["model=emoji", "precision=fp16", f"workload.size={sizes}", *card])
    assert asked == [512]


def test_an_unknown_card_leaves_the_others_and_names_the_nearest() -> None:
    predictions, notes, _ = plan_of([*USUAL, "plan.hardware=[t4,rx580,cpu]"])
    assert [made.card for made in predictions] == ["t4", "cpu"]
    [left_out] = [note for note in notes if note.startswith("left out")]
    assert "rx6" in left_out
    assert len(left_out) < 400
    with pytest.raises(UsageError, match="Apple's GPUs are out of scope"):
        plan_of([*USUAL, "hardware=m2"])


def test_the_memory_that_a_driver_prints_after_a_comma_is_that_of_the_card() -> None:
    cards = "plan.hardware=[t4,'RTX 3060, 12288 MiB',RTX 3060, 8192 MiB]"
    predictions, notes, _ = plan_of([*USUAL, cards])
    assert [made.card for made in predictions] == ["t4", "rtx3060", "rtx3060_8gb"]
    assert not any(note.startswith("left out") for note in notes)


def test_a_known_fault_of_a_card_is_said_in_the_types_that_have_it() -> None:
    half, full = (
        plan(*USUAL, f"precision={kind}", "hardware=gtx1660_super").iloc[0]
        for kind in ("fp16", "fp32")
    )
    assert "black" in half["warning"]
    assert full["warning"] == ""


@pytest.mark.parametrize(
    ("scheduler", "runs"),
    [
        ("scheduler=ddim", 20),
        ("scheduler.class_name=HeunDiscreteScheduler", 39),
        ("scheduler.class_name=LCMScheduler", 20),
        ("scheduler=plms", 21),
    ],
)
def test_a_scheduler_decides_how_often_the_denoiser_runs(
    variant: Compose, scheduler: str, runs: int
) -> None:
    chosen = variant("workload.steps=20", scheduler)
    assert steps_of(chosen) == runs


def test_guidance_in_two_calls_moves_the_weights_twice(variant: Compose) -> None:
    once, twice = (
        blueprint(variant("precision=fp16", f"memory=[{options}]"), Shape(64, 1))
        for options in ("group_offload", "group_offload,sequential_guidance")
    )
    assert twice.host_bytes == 2 * once.host_bytes > 0
    assert twice.call_bytes == once.call_bytes


def test_weights_in_nf4_take_half_a_byte() -> None:
    unet = torch.nn.Linear(2**10, 2**10, bias=False, dtype=torch.float16)
    stored = _stored({"unet": unet}, [BitsAndBytes(weights="nf4")])
    assert stored == {"unet": 2**19 / 2**30}


def test_a_folder_of_sdxl_decodes_in_float32_whatever_its_name(
    tmp_path: Path, variant: Compose
) -> None:
    """The class of the pipeline decides it in diffusers: a folder's model has no name of its own."""
    folder = Path(shutil.copytree(ARCHITECTURES / "sdxl", tmp_path / "mine"))
    smaller = {
        "unet": {"layers_per_block": 1, "transformer_layers_per_block": [1, 1, 1]},
        "vae": {"block_out_channels": [32, 32, 32, 32]},
        "text_encoder": {"num_hidden_layers": 1},
        "text_encoder_2": {"num_hidden_layers": 1},
    }
    for part, settings in smaller.items():
        config = folder / part / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    chosen = variant("precision=fp16")
    own = replace(chosen.model, name="folder", weights="path", path=str(folder))
    assert blueprint(replace(chosen, model=own), Shape(64, 1)).decodes_in_float32


@pytest.mark.parametrize(
    ("card", "numbers"),
    [("gtx1080", "fp16"), ("gtx1660", "fp32"), ("rx6600", "fp16"), ("rtx3060", "bf16")],
)
def test_what_fits_is_told_in_the_smallest_type_whose_images_are_right(
    card: str, numbers: str
) -> None:
    """Of GTX 10, float16 is slow and saves memory; of GTX 16, images are black."""
    family = family_named("StableDiffusionXLPipeline")
    assert _numbers_for(SHEETS[card], family, wants_half=False) == numbers


@pytest.mark.parametrize(
    "option", ["model_offload", "group_offload", "text_encoder_offload"]
)
def test_what_waits_in_the_host_takes_room_where_its_memory_is_the_card_s(
    variant: Compose, option: str
) -> None:
    """As on a DGX Spark or a Jetson, where offloading was told to make a model fit."""
    chosen, apart = variant(f"memory=[{option}]"), SHEETS["rtx3060"]
    plan = blueprint(chosen, Shape(64, 1))
    shared = replace(apart, shares_host_memory=True)
    plain = footprint(variant(), plan, apart)
    assert footprint(chosen, plan, apart).floor < plain.floor
    assert footprint(chosen, plan, shared) == plain
    known = {(option,): (chosen, plan)}
    way = advice._way(None, shared, Shape(64, 1), (option,), known)  # type: ignore[arg-type]
    assert way is not None
    assert way.host == 0.0


def test_what_fits_a_cpu_moves_nothing_to_a_card(variant: Compose) -> None:
    this_cpu = Sheet(
        "this CPU", [], memory_gib=8.0, bandwidth_gb_s=10.0, architecture=CPU
    )
    assert not device_of(this_cpu).is_cuda
    for option, there in (("model_offload", False), ("group_offload", True)):
        chosen = variant(f"memory=[{option}]")
        plan = blueprint(chosen, Shape(64, 1))
        choices = (option,)
        way = advice._way(
            None,  # type: ignore[arg-type]  # what is known already is not composed
            this_cpu,
            Shape(64, 1),
            choices,
            {choices: (chosen, plan)},
        )
        assert (way is not None) == there
    flux, xl = map(family_named, ("FluxPipeline", "StableDiffusionXLPipeline"))
    assert [_numbers_for(this_cpu, each, False) for each in (flux, xl)] == [
        "bf16",
        "fp32",
    ]


@pytest.mark.parametrize(
    ("fitting", "told"),
    [
        (("model_offload", "group_offload"), ["model", "group"]),
        (("vae_tiling", "group_offload"), ["tiling"]),
        (("model_offload",), ["model"]),
    ],
)
def test_what_fills_a_card_is_told_with_a_way_that_leaves_room(
    monkeypatch: pytest.MonkeyPatch,
    composer: Composers,
    fitting: Sequence[str],
    told: list[str],
) -> None:
    """Moving single layers is slow, and the only way of a UNet beside a desktop."""

    def way(*given: Any) -> Way | None:
        choices = given[3]
        named = [name for name in fitting if f"[{name}]" in choices[-1]]
        return Way(choices, 5.0, 0.0, "model_offload" in named) if named else None

    monkeypatch.setattr(advice, "_way", way)
    found = what_fits(composer(["model=sdxl"]), SHEETS["rtx3050_6gb"], Shape(64, 1), {})
    ways = [str(each) for each in (found.whole, found.roomy) if each]
    assert [name in text for name, text in zip(told, ways, strict=True)] == [
        True for _ in told
    ]
    assert ("beside a desktop" in str(found)) == (found.roomy is not None)


def test_what_leaves_no_room_for_a_desktop_fills_a_card() -> None:
    """Windows shows its desktop on the card, and moves what is then too much to the host without a word."""
    rooms = (7.6, 7.0), (7.6, 7.3), (7.6, 7.7), (94.0, 92.0)
    filled = [Footprint(2.0, likely).fills(gib) for gib, likely in rooms]
    assert filled == [False, True, False, True]
    half = ("model=sd15", "precision=fp16", "hardware=rtx4060")
    for memory_gib, told in ((3.2, True), (7.6, False)):
        _, notes, _ = plan_of([*half, f"hardware.sheet.memory_gib={memory_gib}"])
        assert any("such as a desktop, is on it" in note for note in notes) == told


def test_a_version_of_pytorch_is_read_as_it_is_written() -> None:
    old, new = (
        plan(*USUAL, "hardware=rtx4090", f"plan.torch={torch}").iloc[0]
        for torch in ("2.1", "2.10")
    )
    assert new["high"] / new["low"] > old["high"] / old["low"]
    assert "since 2.4" in new["evidence"]
    assert "since 2.4" not in old["evidence"]


class TestAMeasurementOfOnesOwn:
    H200 = "outputs/records/nvidia-h200/sd15_processes"
    WORK = (
        "model=sd15",
        "model.weights=random",
        "scheduler=euler",
        "workload.steps=25",
        "hardware=h200",
    )

    def test_is_of_the_card_with_the_memory_that_was_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The driver gives one name to the RTX 3060 of 8 GB and of 12."""
        measured = read_result(ROOT / self.H200)
        measured.environment.device |= {
            "name": "NVIDIA GeForce RTX 3060",
            "memory_total_gib": 7.7,
        }
        write_result(measured, tmp_path)
        cards: list[Sheet] = []

        def noted(*of: Any) -> Case:
            cards.append(of[3])
            raise UsageError("seen")

        monkeypatch.setattr(forecasts, "blueprint", lambda *_: None)
        monkeypatch.setattr(forecasts, "case_of_variant", noted)
        with pytest.raises(UsageError, match="seen"):
            plan(*self.WORK, f"plan.measured={tmp_path}")
        assert cards == [SHEETS["rtx3060_8gb"]]

    @pytest.mark.parametrize(
        ("options", "seconds"),
        [
            (("precision=fp16", "compiler=cuda_graphs"), 0.319),
            pytest.param(("precision=fp16",), 0.682, marks=pytest.mark.slow),
            pytest.param(("precision=fp32",), 1.01, marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.slow
    def test_narrows_predictions_and_holds_what_was_measured(
        self, options: tuple[str, ...], seconds: float
    ) -> None:
        blind = plan(*self.WORK, *options).iloc[0]
        told = plan(*self.WORK, *options, f"plan.measured={ROOT / self.H200}").iloc[0]
        assert told["high"] / told["low"] < blind["high"] / blind["low"]
        assert blind["low"] < seconds < blind["high"]
        assert told["low"] < seconds < told["high"]


@pytest.mark.slow
def test_this_machine_more_work_takes_longer_and_compilers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = plan(
        "hardware=cpu",
        "hardware.threads=1",
        "study=one_at_a_time",
        "study.options=[compiler:inductor]",
    )
    told = found.set_index("variant")
    assert 0.01 < told.loc["baseline", "seconds"] < 100
    assert (
        told.loc["baseline", "low"]
        < told.loc["baseline", "seconds"]
        < told.loc["baseline", "high"]
    )
    more = plan(
        "hardware=cpu",
        "hardware.threads=1",
        "workload.steps=40",
        "workload.batch_size=2",
    )
    assert more["seconds"].iloc[0] > 2 * told.loc["baseline", "seconds"]
    assert "compiler" in told.loc["compiler=inductor", "reason"]
    [half] = plan("hardware=cpu", "precision=bf16")["reason"]
    assert "half types" in half


def test_what_was_foretold_is_kept_until_something_that_it_depends_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    def ask(_context: object, predict: Any, variants: Any, what: str) -> Any:
        asked.append(what)
        return predict(variants)

    monkeypatch.setattr(forecast, "in_process", ask)
    machine = Machine(Device("cpu"), {"threads": 1, **describe_cpu()}, False, False)
    context = multiprocessing.get_context("spawn")

    def foretell(*overrides: str) -> Expected:
        with composer_of(["tracking=none", *overrides]) as composer:
            [found] = expected([composer.variant(None)], machine, context)
        return found

    def measure_rates(rates: cpu.CpuRates) -> None:
        kept = json.dumps(asdict(rates)).encode()
        write_cached(cpu._rates_file(1, describe_cpu()), kept)

    measure_rates(cpu.CpuRates(1e10, 1e10, 1e10, 1e10, 1e9, 1e5))
    first = foretell()
    assert foretell() == first
    assert len(asked) == 1
    assert foretell("workload.steps=50").seconds > 1.5 * first.seconds
    measure_rates(cpu.CpuRates(2e10, 2e10, 2e10, 2e10, 2e9, 2e5))
    assert foretell().seconds < 0.75 * first.seconds
    assert len(asked) == 3


def test_what_a_processor_has_no_memory_for_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_large = Expected("baseline", Shape(64, 1), math.nan, "", fits=False)
    monkeypatch.setattr("sdopt.forecast.expected", lambda *_: [too_large])
    machine = Machine(Device("cpu"), describe_cpu(), False, False)
    told = foreseen([], machine, multiprocessing.get_context("spawn"))
    assert told == (None, [], {"baseline"})


def test_rates_of_this_machine_are_kept_and_the_highest_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = iter([cpu.CpuRates(1, 2, 3, 4, 5, 6), cpu.CpuRates(2, 1, 3, 5, 4, 7)])
    monkeypatch.setattr(cpu, "_measure", lambda: next(rates))
    monkeypatch.setattr(cpu, "disturbance_of", lambda _: "")
    measure = cpu.measure_machine.__wrapped__
    with composer_of(["tracking=none", "hardware.threads=1"]) as composer:
        here = composer.variant(None)
    assert cpu.known_machine(1) is None
    described = {"threads": 1, **describe_cpu()}
    machine = Machine(Device("cpu"), described, False, False)
    with pytest.raises(UsageError, match="rates are not known yet"):
        expected([here], machine, multiprocessing.get_context("spawn"))
    measure(1)
    measured = measure(1).rates
    assert measured == cpu.known_machine(1) == cpu.CpuRates(2, 2, 3, 5, 5, 7)
    # A rate that is higher makes each part of a call shorter, that of its operators too.
    costs, slower = Costs(*[1.0] * 6), cpu.CpuRates(1, 2, 3, 4, 5, 6)
    parts, before = (each.parts(costs, costs, 1.0) for each in (measured, slower))
    assert (parts <= before).all()
    # With other instructions the machine is another one.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu.known_machine(1) is None


def test_rates_measured_beside_other_work_are_said_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "_measure", lambda: cpu.CpuRates(*[1e10] * 6))
    took = iter([0.91, 0.0, 0.91])
    meter = {"stop": lambda *_: Interference(next(took), 0.0)}
    monkeypatch.setattr(cpu, "InterferenceMeter", lambda _: SimpleNamespace(**meter))
    study = ("study=one_at_a_time", "study.options=[attention:math]")
    asked = ["hardware=cpu", "hardware.threads=1", *study]
    predictions, notes, _ = plan_of(asked)
    assert "other work took 91 % of the processor" in predictions[0].warning
    [said] = [note for note in notes if "other work" in note]
    assert said == f"cpu: {predictions[0].warning}", "once for all variants"
    assert cpu.known_machine(1) is None
    assert not plan_of(asked)[1], "measured again"
    assert cpu.known_machine(1)
    cpu.measure_machine.cache_clear()
    assert not plan_of(asked)[1], "the kept rates count"
