"""Data sheets, which card is meant, what it can do, what was reached of its peak; ceilings; TF32 is seen in sums."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdopt.apps.doctor import tables
from sdopt.config.composer import HydraComposer
from sdopt.config.groups import data_sheets
from sdopt.config.paths import cards
from sdopt.config.typed import typed
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware import ceilings
from sdopt.hardware.cards import (
    BFLOAT16,
    CUDA_CONTEXT_GIB,
    FP8,
    TRITON,
    arithmetic,
    emulated,
    has,
    peak_of,
    planned_device,
    require_card,
    sheet_of,
)
from sdopt.hardware.ceilings import (
    COPY,
    Ceiling,
    convolutions_are_rounded,
    measure_ceilings,
    products_are_rounded,
    tf32,
)
from sdopt.hardware.device import Device
from sdopt.hardware.probe import (
    busy_with_other_work,
    computes_bfloat16,
    runs_on,
    usable_cores,
)
from sdopt.measure.memory import cap_memory
from sdopt.record.records import Status, StudyResult
from sdopt.report.notes import notes_of
from sdopt.report.summary import summary_of
from sdopt.schema import Hardware, Rates, Sheet
from sdopt.statistics.figures import flat_figures
from sdopt.statistics.row_figures import peak_rate
from tests.command import SMALL, refused, sdopt
from tests.fixtures import CPU, Compose
from tests.records import reconfigure

SHEETS = data_sheets()
H200 = Device(
    "cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    memory_total_gib=139.8,
    memory_free_gib=139.0,
)


def test_a_card_that_people_have_composes_and_asks_for_a_cuda_device(
    composer: type[HydraComposer],
) -> None:
    assert len(SHEETS) >= 60
    usual = {
        "p100",
        "t4",
        "rtx2060",
        "rtx3060",
        "rtx4090",
        "rtx5090",
        "a10",
        "h100",
        "b200",
        "rx6600",
        "mi300x",
    }
    assert usual <= SHEETS.keys()
    for card in ("t4", "mi300x"):
        hardware = composer([f"hardware={card}"]).current.hardware
        assert hardware.sheet == SHEETS[card]
        assert hardware.device == "cuda"


def test_sheets_hold_nothing_that_a_sheet_of_ones_own_could_not() -> None:
    problems: list[str] = []
    made = {
        card: typed(card, sheet, Sheet, problems) for card, sheet in cards().items()
    }
    assert not problems
    assert made == SHEETS


def test_sheets_have_sources_and_what_a_plan_needs() -> None:
    for card, sheet in SHEETS.items():
        text = " ".join(sheet.sources)
        assert "NVIDIA" in text or "AMD" in text, card
        assert "memory_gib" in text, card
        assert all((sheet.architecture, sheet.chip, sheet.pcie_gb_s, sheet.power_w)), (
            card
        )
        # GeForce cards with tensor cores accumulate in float16 at twice the rate; other cards at one rate.
        halves = sheet.name.startswith("NVIDIA GeForce RTX")
        assert (sheet.half_accumulation is not None) == halves, card
        assert not halves or sheet.half_accumulation == pytest.approx(
            2 * (sheet.tensor.fp16 or 0), rel=0.02
        ), card
        for name in sheet.device_names:
            assert (
                sheet_of(f"NVIDIA {name}", SHEETS.values(), sheet.memory_gib) is sheet
            ), "and no other card's"


def test_rates_double_with_each_half_of_the_type_and_types_are_those_of_the_generation() -> (
    None
):
    """Dense tensor rates follow the width of the type; a rate with sparsity among dense ones would not."""
    for card, sheet in SHEETS.items():
        for wide, narrow in (("tf32", "fp16"), ("fp16", "fp8"), ("bf16", "fp8")):
            low, high = getattr(sheet.tensor, wide), getattr(sheet.tensor, narrow)
            if low is not None and high is not None and sheet.capability:
                assert high == pytest.approx(2 * low, rel=0.05), card
        # The first matrix cores of AMD multiply bfloat16 at half of the rate.
        assert (
            sheet.tensor.bf16 in (None, sheet.tensor.fp16)
            or sheet.architecture == "cdna"
        ), card
        assert sheet.vector.fp32 is not None, card
        if sheet.capability is None or sheet.chip in (
            "TU116",
            "TU117",
        ):  # of Turing, GTX cards have no tensor cores
            continue
        device = planned_device(sheet)
        assert (
            (sheet.tensor.tf32 is not None)
            == (sheet.tensor.bf16 is not None)
            == has(device, BFLOAT16)
        ), card
        assert (sheet.tensor.fp8 is not None) == has(device, FP8), card
        assert (sheet.tensor.fp16 is not None) == has(device, TRITON), card


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100 80GB PCIe", "a100_80_pcie"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090_d"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090_laptop"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("Tesla V100-SXM2-32GB", "v100_32"),
        ("NVIDIA GeForce RTX 3060 Lite", None),
        ("AMD EPYC", None),
    ],
)
def test_a_name_that_is_nearly_the_same_is_another_card(
    name: str, card: str | None
) -> None:
    assert sheet_of(name, SHEETS.values()) is (None if card is None else SHEETS[card])


class TestChoice:
    def test_of_another_card_is_refused_before_its_times_are_taken_for_this_ones(
        self,
    ) -> None:
        with pytest.raises(
            ConflictError,
            match=r"sheet is for NVIDIA A10, but this runs on NVIDIA H200",
        ):
            require_card(Hardware(sheet=SHEETS["a10"]), H200)
        require_card(Hardware(sheet=SHEETS["h200"]), H200)
        require_card(Hardware(), H200)

    def test_of_a_smaller_cards_memory_is_possible_on_a_larger_one_only(self) -> None:
        require_card(Hardware(sheet=SHEETS["a10"], emulate_memory=True), H200)
        with pytest.raises(
            ConflictError,
            match=r"NVIDIA B200 has 178\.35 GiB, and NVIDIA H200 only 139\.8",
        ):
            require_card(Hardware(sheet=SHEETS["b200"], emulate_memory=True), H200)
        with pytest.raises(ConflictError, match="needs a CUDA device, whose allocator"):
            require_card(Hardware(sheet=SHEETS["a10"], emulate_memory=True), CPU)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            ("hardware=a10", "dry_run=true shows what would run on an NVIDIA A10"),
            (
                "hardware=cpu hardware.emulate_memory=true",
                "hardware.emulate_memory=true: choose the card whose memory",
            ),
        ],
    )
    def test_that_cannot_be_ends_before_anything_starts(
        self, tmp_path: Path, overrides: str, said: str
    ) -> None:
        finished = refused(
            tmp_path,
            "run",
            "tracking=none",
            "precision=bf16",
            *overrides.split(),
            says=said,
        )
        assert len(finished.err.splitlines()) == 1

    def test_belongs_to_the_whole_study(self, composer: type[HydraComposer]) -> None:
        with pytest.raises(
            UsageError, match=r"hardware\.sheet applies to the whole study"
        ):
            composer(["hardware=cpu"]).variant("other", ["hardware=a10"])

    def test_mistakes_in_a_sheet_name_their_key(
        self, composer: type[HydraComposer]
    ) -> None:
        wrong = [
            "memory_gib=much",
            "bandwidth_gb_s=???",
            "vector.fp12=1",
            "tensor.fp16=-1",
        ]
        with pytest.raises(UsageError) as caught:
            composer(["hardware=a10", *(f"++hardware.sheet.{each}" for each in wrong)])
        starts = [
            problem.partition(":")[0].removeprefix("hardware.sheet.")
            for problem in caught.value.problems
        ]
        assert sorted(starts) == [
            "bandwidth_gb_s",
            "memory_gib=much",
            "tensor.fp16=-1",
            "vector.fp12",
        ]


class TestPlanning:
    @pytest.mark.slow
    def test_a_dry_run_plans_for_a_card_that_is_not_there(self, tmp_path: Path) -> None:
        options = "[precision:bf16,precision:fp16,compiler:inductor]"
        study = ("study=one_at_a_time", f"study.options={options}")
        finished = sdopt(
            tmp_path, "run", "hardware=t4", "tracking=none", *study, "dry_run=true"
        )
        assert finished.code == 0, finished.err
        assert (
            "what would be measured on NVIDIA T4, by its data sheet" in finished.shown
        )
        assert (
            "bfloat16 arithmetic needs compute capability 8.0; NVIDIA T4 has 7.5"
            in finished.shown
        )
        assert "precision=fp16: no" not in finished.shown
        assert "compiler=inductor: no" not in finished.shown

    def test_an_emulated_card_can_do_no_more_than_the_real_one_and_the_sheet(
        self, variant: Compose
    ) -> None:
        assert not variant("precision=bf16").conflicts(H200)
        small = replace(
            variant("precision=bf16"),
            hardware=Hardware(sheet=SHEETS["t4"], emulate_memory=True),
        )
        found = small.conflicts(H200)
        assert found == [
            "precision=bf16: bfloat16 arithmetic needs compute capability 8.0; NVIDIA T4 has 7.5"
        ]
        old = Device("cuda", name="an old one", capability=(7, 0), memory_total_gib=200)
        hardware = Hardware(sheet=SHEETS["a10"], emulate_memory=True)
        assert emulated(old, hardware).capability == (7, 0)
        assert emulated(H200, Hardware(sheet=SHEETS["h200"])) is H200

    def test_cudnn_on_an_emulated_card_takes_no_wider_heads_than_there(
        self, variant: Compose
    ) -> None:
        hardware = Hardware(sheet=SHEETS["a10"], emulate_memory=True)
        options = (
            "model=sd15",
            "model.weights=random",
            "precision=fp16",
            "attention=cudnn",
        )
        probed = replace(H200, attributes={"cudnn_head_dimension": 256})
        assert variant(*options).conflicts(probed) == []
        [found] = replace(variant(*options), hardware=hardware).conflicts(probed)
        assert "the cudnn kernel supports heads of up to 128 channels, in " in found
        assert (
            emulated(replace(probed, capability=(8, 6)), hardware).attributes
            == probed.attributes
        )


CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (CUDA_13, (7, 0), False),
        (CUDA_13, (6, 1), False),
        (CUDA_13, (7, 5), True),
        (CUDA_13, (8, 9), True),
        (CUDA_13, (12, 1), True),  # compiled there
        (("sm_50", "compute_50"), (9, 0), True),
        (("sm_90a",), (9, 1), False),
        (("sm_90a",), (9, 0), True),
        (("sm_80",), (7, 5), False),
    ],
)
def test_builds_run_on_later_minor_versions_and_compile_for_later_ones(
    built: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(built, capability) == runs


class TestMemory:
    def test_the_allocator_is_left_what_the_card_would_leave_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[float, int]] = []
        monkeypatch.setattr(
            torch.cuda,
            "set_per_process_memory_fraction",
            lambda fraction, device: asked.append((fraction, device)),
        )
        cap_memory(Device("cuda", index=1, memory_total_gib=100.0), 22.0)
        [(fraction, index)] = asked
        assert fraction == pytest.approx((22.0 - CUDA_CONTEXT_GIB) / 100)
        assert index == 1

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("card", "code", "status"),
        [
            # A card of 0.63 GiB leaves the allocator 30 MiB: too little for the model, and for nothing but the model.
            ("hardware=a10 hardware.sheet.memory_gib=0.63", 3, Status.OUT_OF_MEMORY),
            ("hardware=rtx3060", 0, Status.OK),
        ],
    )
    def test_out_of_memory_on_a_smaller_card_is_a_result(
        self, tmp_path: Path, card: str, code: int, status: Status
    ) -> None:
        others = [
            override for override in SMALL if not override.startswith("hardware=")
        ]
        work = (
            "protocol=smoke",
            "workload.size=64",
            "hardware.emulate_memory=true",
            "precision=fp16",
        )
        finished = sdopt(tmp_path, "run", *others, *work, *card.split())
        assert finished.code == code, finished.err
        assert finished.result.variants[0].status is status
        assert finished.result.schedule.kind == "interleaved"
        assert "emulated" in finished.shown


class TestPeak:
    SHEET = Sheet(
        "a card",
        ["a card"],
        1.0,
        1.0,
        vector=Rates(fp32=1.0, fp16=2.0),
        tensor=Rates(tf32=4.0, fp16=8.0),
    )

    @pytest.mark.parametrize(
        ("types", "peak"),
        [
            (["float32"], ("fp32", 1.0)),
            (["float32", "tf32"], ("tf32", 4.0)),
            (["float16", "float32"], ("fp16", 8.0)),
            (["bfloat16"], None),
            (["bfloat16", "float16"], None),
            (["complex64"], None),
            ([], None),
        ],
    )
    def test_is_of_the_fastest_unit_for_the_types_that_ran(
        self, types: list[str], peak: tuple[str, float] | None
    ) -> None:
        assert peak_of(self.SHEET, types) == peak

    def test_of_what_ran(self) -> None:
        assert arithmetic({"float16": 3, "float32": 1}, "float16", tf32=False) == [
            "float16",
            "float32",
        ]
        assert arithmetic({"float32": 3}, "float32", tf32=True) == ["float32", "tf32"]
        assert arithmetic({"float16": 3}, "float16", tf32=True) == ["float16"]
        assert arithmetic({}, "bfloat16", tf32=True) == ["bfloat16"]

    def test_is_compared_with_what_was_achieved(self, result: StudyResult) -> None:
        baseline, half = result.variant("baseline"), result.variant("bfloat16")
        assert "compute/of_peak" not in flat_figures(result, baseline)
        result.environment.sheet = Sheet(
            "this CPU", [], 1.0, 1.0, vector=Rates(fp32=2.0, bf16=4.0)
        )
        assert peak_rate(result, baseline) == ("fp32", 2.0)
        assert peak_rate(result, half) == ("bf16", 4.0)
        found = flat_figures(result, half)
        assert found["compute/of_peak"] == pytest.approx(
            found["compute/achieved_tflops"] / 4.0
        )
        [note] = [note for note in notes_of(summary_of(result)) if "dense peak" in note]
        assert "of fp32's 2 TFLOP/s baseline " in note
        assert "of bf16's 4 TFLOP/s bfloat16 " in note

    def test_an_emulated_card_is_named_beside_the_table(
        self, result: StudyResult
    ) -> None:
        reconfigure(
            result,
            "hardware",
            emulate_memory=True,
            sheet=Sheet("NVIDIA A10", [], 22.06, 600.0),
        )
        notes = notes_of(summary_of(result))
        assert any(
            note.startswith("Memory of an NVIDIA A10 (22.06 GiB) emulated")
            for note in notes
        )


@pytest.mark.parametrize(
    ("limit", "cores"), [(float("inf"), 64), (2.0, 2), (0.4, 1), (100.0, 64)]
)
def test_cores_are_those_of_the_container(
    monkeypatch: pytest.MonkeyPatch, limit: float, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("sdopt.hardware.probe.core_limit", lambda: limit)
    assert usable_cores() == cores


LITTLE = replace(CPU, memory_free_gib=0.001)
"""So little memory that every matrix stays small."""


def test_a_product_that_fails_is_reported_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasLtMatmul"
        )

    monkeypatch.setattr(torch, "_int_mm", refuse)
    monkeypatch.setattr(ceilings, "SAMPLES", 1)
    found = {ceiling.kind: ceiling for ceiling in measure_ceilings(LITTLE)}
    assert list(found) == ["fp32", "fp16", "bf16", "int8", COPY]
    assert (
        found["int8"].failure
        == "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"
    )
    assert [kind for kind, ceiling in found.items() if ceiling.samples_s] == [
        "fp32",
        "fp16",
        "bf16",
        COPY,
    ]


def test_the_second_matrix_of_eight_bits_is_read_column_by_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuBLAS multiplies no two row-major matrices of int8."""
    seen = []
    monkeypatch.setattr(
        torch,
        "_int_mm",
        lambda left, right: seen.append((left.stride(), right.stride())),
    )
    ceilings._multiply(CPU, "int8", 64)()
    assert seen == [((64, 1), (1, 64))]


def test_a_gpu_works_for_a_second_before_samples_of_a_tenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clock: the first products take ten times as long as the later ones."""
    now, calls = 0.0, 0

    def multiply() -> None:
        nonlocal now, calls
        calls += 1
        now += 0.002 if now < 0.5 else 0.0002

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("sdopt.hardware.ceilings.time.perf_counter", lambda: now)
    found = ceilings._sample(
        replace(CPU, type="cuda"), Ceiling("fp16", 1, 1.0), multiply
    )
    assert found.samples_s == pytest.approx([0.0002] * ceilings.SAMPLES)
    assert now >= 1.0 + ceilings.SAMPLES * 0.1


def test_what_failed_stands_below_the_table_and_in_no_data_sheet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rich.console import Console

    from sdopt.apps.doctor.diagnosis import Diagnosis

    measured = [
        Ceiling("fp32", 64, 1e9, [0.001]),
        Ceiling(COPY, 2**20, 2.0**21, [0.001]),
    ]
    failed = Ceiling("int8", 0, 0.0, failure="RuntimeError: no such product")
    diagnosis = Diagnosis(
        CPU, CPU, [], False, "spawn", {}, {}, {}, {}, None, [], [*measured, failed]
    )
    console = Console(width=100, record=True)
    console.print(tables._ceilings_table(diagnosis))
    assert "int8: not measured: RuntimeError: no such product" in console.export_text()
    assert "int8" not in tables.sheet_yaml(diagnosis)


def to_tf32(value: torch.Tensor) -> torch.Tensor:
    """Keeps 10 of 23 bits of mantissa, as tensor cores do."""
    return (value.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_convolutions_that_are_rounded_where_the_settings_allow_it_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an A100's are; this CPU's are not."""
    conv2d: Callable[..., Any] = torch.conv2d
    cpu = torch.device("cpu")
    with tf32(allowed=True):
        assert not convolutions_are_rounded(cpu)
        assert not products_are_rounded(cpu)

    def rounded(images: torch.Tensor, weights: torch.Tensor, *more: Any) -> Any:
        return conv2d(
            to_tf32(images) if torch.backends.cudnn.allow_tf32 else images,
            weights,
            *more,
        )

    monkeypatch.setattr(torch, "conv2d", rounded)
    for allowed in (True, False):
        with tf32(allowed=allowed):
            assert convolutions_are_rounded(cpu) is allowed


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("avx2 fma f16c", {}, False),
        ("avx2 avx512f avx512bw avx512dq avx512vl", {}, True),
        (
            "avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_bf16",
            {"ONEDNN_MAX_CPU_ISA": "avx2"},
            False,
        ),
        (
            "avx2 avx512f avx512bw avx512dq avx512vl",
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
            True,
        ),
        ("avx2 avx_vnni avx_ne_convert", {}, True),
    ],
)
def test_which_processors_compute_bfloat16(
    flags: str, variables: dict[str, str], expected: bool
) -> None:
    assert computes_bfloat16(flags.split(), variables) is expected


@pytest.mark.parametrize(("load", "busy"), [(2.9, False), (3.1, True)])
def test_a_machine_is_busy_by_its_load(
    load: float, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("sdopt.hardware.probe.usable_cores", lambda: 2)
    assert bool(busy_with_other_work()) == busy
