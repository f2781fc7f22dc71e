"""The doctor: what it says of a machine, of its ceilings, of every option on a card; the matrix of what is proven."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir
from rich.console import Console

from sdopt.apps.doctor.diagnosis import Diagnosis, diagnose, observed_ceilings
from sdopt.apps.doctor.options import OptionReport, check_options
from sdopt.apps.doctor.tables import brief_tables, sheet_yaml, tables
from sdopt.apps.suite.outcomes import OptionOutcome, Standing
from sdopt.config.composer import HydraComposer, composer_of
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.config.paths import CONF
from sdopt.errors import UnavailableError
from sdopt.hardware.cards import planned_device, require_card, sheet_of
from sdopt.hardware.ceilings import COPY, Ceiling, measure_ceilings
from sdopt.hardware.device import Device
from sdopt.hardware.probe import probe_device
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import Interference
from sdopt.worker.machine import Machine
from tests.command import Finished, refused, sdopt
from tests.fixtures import CPU
from tests.matrix import (
    Key,
    Matrix,
    Shown,
    grouped,
    shown_in,
)
from tests.records import known

SHEETS = data_sheets()


@cache
def composer_kept(overrides: tuple[str, ...]) -> HydraComposer:
    """Composing dozens of options takes seconds, and is the same for every device."""
    return HydraComposer(overrides)


def reports(
    device: Device,
    *overrides: str,
    groups: Collection[str] = ("attention", "compiler", "memory", "precision"),
) -> dict[str, OptionReport]:
    options = [option for option in optimization_options() if option[0] in groups]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        found = check_options(composer_kept(overrides), options, device, SHEETS)
    return {f"{report.group}={report.option}": report for report in found}


@pytest.fixture(scope="module")
def on_a_cpu() -> dict[str, OptionReport]:
    return reports(CPU)


@pytest.fixture(scope="module")
def diagnosis(on_a_cpu: dict[str, OptionReport]) -> Diagnosis:
    """Of this machine's CPU, which has multiplied matrices in three samples."""
    machine = Machine(CPU, CPU.attributes, preloaded=True, bad_fork=False)
    ceilings = [
        Ceiling("fp32", 256, 1e12, [3.0, 1.0, 2.0]),
        Ceiling("bf16", 256, 3e12, [1.0]),
        Ceiling(COPY, 64, 8e9, [2.0]),
    ]
    options = list(on_a_cpu.values())
    return diagnose(machine, [], False, options, ceilings, "forkserver")


class TestOptions:
    def test_every_one_is_looked_at(self) -> None:
        apart = "model task scheduler workload protocol quality gate hardware tracking study experiment patch serving"
        files = [
            path
            for path in CONF.glob("*/*.yaml")
            if path.parent.name not in apart.split()
        ]
        assert {*optimization_options()} == {
            (path.parent.name, path.stem) for path in files
        }

    def test_what_needs_a_card_says_from_which_on(
        self, on_a_cpu: dict[str, OptionReport]
    ) -> None:
        found = on_a_cpu["attention=cudnn"]
        assert not found.runs
        assert found.reasons == [
            f"the cudnn kernel needs a CUDA device; this runs on {CPU.name}"
        ]
        assert found.remedy.startswith(
            "runs on cards of compute capability 8.0 or later (a100_40, "
        )
        assert on_a_cpu["attention=math"] == OptionReport("attention", "math", True)
        assert on_a_cpu["precision=bf16"].runs

    @pytest.mark.parametrize(("card", "runs"), [("t4", False), ("a10", True)])
    def test_what_a_card_cannot_run(self, card: str, runs: bool) -> None:
        found = reports(
            planned_device(SHEETS[card]), groups=["precision", "attention", "compiler"]
        )
        assert (
            found["precision=bf16"].runs
            == found["precision=tf32"].runs
            == found["attention=flash"].runs
            == runs
        )
        assert found["compiler=inductor"].runs
        assert bool(found["precision=bf16"].remedy) != runs

    def test_what_runs_only_beside_another_option_says_so(self) -> None:
        a10 = planned_device(SHEETS["a10"])
        found = reports(a10, groups=["attention", "precision"])["attention=flash"]
        assert found.runs
        assert found.reasons[0].startswith("together with precision=")
        ready = reports(a10, "precision=fp16", groups=["attention"])
        assert ready["attention=flash"] == OptionReport("attention", "flash", True)

    def test_ones_that_combine_are_checked_one_by_one(
        self, on_a_cpu: dict[str, OptionReport]
    ) -> None:
        found = on_a_cpu["memory=vae_slicing"]
        assert found.runs
        assert found.reasons == [
            "needs a batch of several images: set workload.batch_size to 2 or more"
        ]
        ready = reports(
            CPU,
            "memory=vae_tiling",
            "workload.size=96",
            "workload.batch_size=2",
            groups=["memory"],
        )
        for option in ("vae_slicing", "vae_tiling"):
            assert ready[f"memory={option}"] == OptionReport("memory", option, True)

    def test_ones_of_the_users_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "conf" / "mine").mkdir(parents=True)
        (tmp_path / "own_option.py").write_text(
            "from dataclasses import dataclass\n"
            "from sdopt.options import Optimization\n\n\n"
            "@dataclass(frozen=True)\nclass Own(Optimization):\n    key: int\n\n"
            "    def conflicts(self, ctx):\n        return ['it is Monday']\n"
        )
        (tmp_path / "conf" / "mine" / "own.yaml").write_text(
            "_target_: own_option.Own\nkey: 1\n"
        )
        (tmp_path / "conf" / "mine" / "open.yaml").write_text(
            "_target_: own_option.Own\nkey: ???\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        with composer_of([], tmp_path / "conf") as composer:
            options = [
                option
                for option in optimization_options(tmp_path / "conf")
                if option[0] == "mine"
            ]
            found = {r.option: r for r in check_options(composer, options, CPU, SHEETS)}
        assert found["own"] == OptionReport("mine", "own", False, ["it is Monday"])
        assert not found["open"].runs
        assert found["open"].reasons == ["mine.key: must be given, as in mine.key=…"]


class TestCeilings:
    def test_make_a_data_sheet_that_a_run_is_held_against(
        self, diagnosis: Diagnosis, tmp_path: Path
    ) -> None:
        (tmp_path / "conf" / "hardware").mkdir(parents=True)
        (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(sheet_yaml(diagnosis))
        with composer_of(["hardware=mine"], tmp_path / "conf") as composer:
            hardware = composer.current.hardware
        require_card(hardware, CPU)
        assert hardware.sheet is not None
        assert (hardware.sheet.vector.fp32, hardware.sheet.vector.bf16) == (0.5, 3.0), (
            "of the medians"
        )
        assert hardware.sheet.bandwidth_gb_s == 4.0

    @pytest.mark.parametrize("waited", [0.01, 0.6])
    def test_that_other_work_lowered_are_marked_and_not_saved(
        self, diagnosis: Diagnosis, waited: float
    ) -> None:
        found = replace(diagnosis, interference=Interference(waited, 0.0))
        out = StringIO()
        Console(file=out, width=120).print(brief_tables(found))
        said = "other work took 60 % of the processor"
        assert (said in out.getvalue()) == (waited > 0.02)
        if waited > 0.02:
            with pytest.raises(UnavailableError, match=said):
                sheet_yaml(found)
        else:
            assert sheet_yaml(found)

    def test_are_measured_beside_what_others_took(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = "sdopt.apps.doctor.diagnosis"
        monkeypatch.setattr(f"{module}.measure_ceilings", lambda _device: [])
        ceilings, interference = observed_ceilings(CPU)
        assert ceilings == []
        assert interference is not None

    @pytest.mark.gpu
    def test_of_a_card_are_below_its_data_sheet(self) -> None:
        device = probe_device("cuda")
        sheet = sheet_of(device.name, SHEETS.values())
        for ceiling in measure_ceilings(device):
            if sheet and ceiling.kind != "copy":
                peak = sheet.peak(ceiling.kind)
                assert peak is None or 0.2 * peak < ceiling.rate < 1.1 * peak


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_name_every_option(diagnosis: Diagnosis, width: int) -> None:
    out = StringIO()
    Console(file=out, width=width).print(tables(diagnosis))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for heading in (
        "this machine",
        "ceilings of",
        "options on",
        "fp32 product",
        "copy of",
        "workers",
        "disk",
    ):
        assert heading in text
    for report in diagnosis.options:
        assert report.option in text
    assert "needs a CUDA device" in " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_the_brief_answer_is_short_and_names_every_option(
    diagnosis: Diagnosis, width: int
) -> None:
    out = StringIO()
    Console(file=out, width=width).print(brief_tables(diagnosis))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= {80: 75, 120: 50}[width], out.getvalue()
    plain = 3  # attention=default, compiler=eager, precision=fp32
    able = [report for report in diagnosis.options if report.runs]
    ready = sum(not report.reasons for report in able)
    assert (
        f"{ready - plain} of {len(diagnosis.options) - plain} optimizations run here"
        in lines[0]
    )
    assert ready < len(able), "some run beside another option alone"
    words = set(re.split(r"[\s,]+", out.getvalue()))
    assert {report.group for report in diagnosis.options} <= words
    assert {
        report.option for report in diagnosis.options if len(report.option) < 12
    } <= words


OPTIONS = [
    ("attention", "math"),
    ("attention", "cudnn"),
    ("precision", "bf16"),
    ("precision", "fp16_vae_fix"),
]


@pytest.fixture
def few_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sdopt.config.groups.optimization_options", lambda _own: OPTIONS
    )


class TestCommand:
    @pytest.mark.usefixtures("few_options")
    def test_says_it_as_json(self, tmp_path: Path) -> None:
        quick = sdopt(tmp_path, "doctor", "--quick", "--json", "hardware=cpu")
        assert quick.code == 0, quick.err
        found: dict[str, Any] = json.loads(quick.out)
        assert found["device"]["name"] == CPU.name
        assert torch.__version__.startswith(found["packages"]["torch"])
        assert {
            "group": "attention",
            "option": "math",
            "runs": True,
            "reasons": [],
            "remedy": "",
        } in found["options"]
        assert found["ceilings"] == []
        assert found["start_method"] == "forkserver"
        assert all(free > 0 for free in found["disk_free_gib"].values())

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["precision=nope"], "precision=nope: "),
            (
                ["--quick", "--save", "hardware/mine.yaml"],
                "--save: needs measured ceilings",
            ),
            (["--save", "mine.yaml"], "must be in a folder called hardware"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, arguments: list[str], said: str) -> None:
        refused(tmp_path, "doctor", "hardware=cpu", *arguments, says=said)
        assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    with composer_of([]) as composer:
        return Matrix(
            composer, OPTIONS, ["emoji", "folder", "sdxl"], ["txt2img", "img2img"]
        )


def cells(
    matrix: Matrix, device: Device, shown: Shown | None = None
) -> dict[Key, OptionOutcome]:
    return {
        (c.group, c.option, c.model, c.task): c
        for c in matrix.cells(device, shown or {}, SHEETS)
    }


def outcomes(key: Key, standing: Standing, *devices: str) -> Shown:
    return {
        key: {
            device: OptionOutcome(*key, standing, "it brought nothing")
            for device in devices
        }
    }


BF16 = ("precision", "bf16", "emoji", "txt2img")


def test_a_key_that_is_missing_makes_no_option_impossible() -> None:
    """LoRAs run with every model; those that come with sdopt fit one of them."""
    with composer_of([]) as composer:
        lora = Matrix(
            composer,
            [("lora", "fused"), ("memory", "vae_slicing")],
            ["emoji", "sd15"],
            ["txt2img"],
        )
        found = cells(lora, CPU)
    sd15 = found["lora", "fused", "sd15", "txt2img"]
    assert sd15.standing is Standing.NOT_MEASURED
    assert (
        sd15.why == "the LoRAs that come with sdopt are for model=emoji: set lora.path"
    )
    assert found["lora", "fused", "emoji", "txt2img"].why == ""


class TestRecords:
    def test_prove_what_their_traces_show(self, result: StudyResult) -> None:
        found = shown_in([result], SHEETS)
        assert found[BF16]["CPU"].standing in (
            Standing.TOOK_EFFECT,
            Standing.NO_GAIN,
        ), "by how fast it was here"
        assert (
            found["precision", "fp32", "emoji", "txt2img"]["CPU"].standing
            is Standing.TOOK_EFFECT
        )
        assert ("precision", "tf32", "emoji", "txt2img") not in found, "it was skipped"
        assert {model for _, _, model, _ in found} == {"emoji"}

    def test_name_the_card_by_its_data_sheet(self, result: StudyResult) -> None:
        result.environment.device |= {
            "type": "cuda",
            "name": SHEETS["h200"].device_names[0],
        }
        assert list(shown_in([result], SHEETS)[BF16]) == [SHEETS["h200"].name]

    def test_say_what_failed_and_what_left_no_evidence(
        self, result: StudyResult
    ) -> None:
        bf16 = result.variant("bfloat16")
        bf16.status, bf16.reason = Status.FAILED, "RuntimeError: no kernel"
        found = shown_in([result], SHEETS)[BF16]["CPU"]
        assert (found.standing, found.why) == (
            Standing.CANNOT_RUN,
            "failed: RuntimeError: no kernel",
        )
        bf16.status = Status.NOT_ENGAGED
        for measured in bf16.measurements:
            measured.shapes[0].evidence = [
                replace(item, engaged=False) for item in measured.shapes[0].evidence
            ]
        found = shown_in([result], SHEETS)[BF16]["CPU"]
        assert found.standing is Standing.NO_GAIN
        assert "no evidence that it took effect: weights bfloat16" in found.why

    @pytest.mark.parametrize(
        ("speedup", "memory", "standing"),
        [
            ((1.2, 1.1, 1.3), (1.0, 1.0, 1.0), Standing.TOOK_EFFECT),
            (
                (1.0, 0.9, 1.1),
                (1.0, 1.0, 1.0),
                Standing.TOOK_EFFECT,
            ),  # what is wide refutes nothing
            ((0.9, 0.85, 0.95), (0.8, 0.75, 0.85), Standing.TOOK_EFFECT),
            ((0.9, 0.85, 0.95), (1.1, 1.05, 1.15), Standing.NO_GAIN),
            (
                (0.9, None, None),
                (1.1, None, None),
                Standing.TOOK_EFFECT,
            ),  # nor does what one process says
        ],
    )
    def test_refute_what_brings_none_of_its_gains(
        self,
        result: StudyResult,
        speedup: tuple[float, float | None, float | None],
        memory: tuple[float, float | None, float | None],
        standing: Standing,
    ) -> None:
        shape = known(result.first_comparison("bfloat16")).shapes[0]
        shape.speedup, shape.memory_ratio, shape.floor = (
            Interval(*speedup),
            Interval(*memory),
            1.05,
        )
        found = shown_in([result], SHEETS)[BF16]["CPU"]
        assert found.standing is standing, found
        assert re.search(rf"speed-up ≈?{speedup[0]:.2f}×", found.why)
        assert "memory" in found.why

    def test_the_best_of_several_counts(
        self, result: StudyResult, finished: Finished
    ) -> None:
        result.variant("bfloat16").status = Status.FAILED
        other = finished.result
        known(other.first_comparison("bfloat16")).shapes[0].speedup = Interval(2.0)
        for records in ([result, other], [other, result]):
            assert (
                shown_in(records, SHEETS)[BF16]["CPU"].standing is Standing.TOOK_EFFECT
            )


class TestCells:
    def test_each_option_model_and_task_has_one(self, matrix: Matrix) -> None:
        found = cells(matrix, CPU)
        assert len(found) == len(OPTIONS) * 2 * 2, (
            "a folder of the user's own is not given"
        )

    def test_states(self, matrix: Matrix) -> None:
        found = cells(matrix, CPU, outcomes(BF16, Standing.TOOK_EFFECT, "CPU", "a GPU"))
        assert found[BF16].standing is Standing.TOOK_EFFECT
        assert (
            found["precision", "bf16", "emoji", "img2img"].standing
            is Standing.NOT_MEASURED
        )
        impossible = found["attention", "cudnn", "sdxl", "txt2img"]
        assert impossible.standing is Standing.IMPOSSIBLE
        assert (
            impossible.why
            == f"the cudnn kernel needs a CUDA device; this runs on {CPU.name}"
        )
        fixed_vae = ("precision", "fp16_vae_fix")
        assert found[*fixed_vae, "sdxl", "txt2img"].standing is Standing.NOT_MEASURED
        assert "this VAE is for SDXL" in found[*fixed_vae, "emoji", "txt2img"].why

    def test_proven_elsewhere_is_not_proven_here(self, matrix: Matrix) -> None:
        key = ("attention", "cudnn", "sdxl", "txt2img")
        shown = outcomes(key, Standing.TOOK_EFFECT, SHEETS["h200"].name)
        assert cells(matrix, CPU, shown)[key].standing is Standing.IMPOSSIBLE
        proven, elsewhere = (
            cells(matrix, planned_device(SHEETS[card]), shown)[key]
            for card in ("h200", "h100")
        )
        assert proven.standing is Standing.TOOK_EFFECT
        assert elsewhere.standing is Standing.NOT_MEASURED
        assert elsewhere.why == "together with precision=bf16"

    @pytest.mark.parametrize("standing", [Standing.NO_GAIN, Standing.CANNOT_RUN])
    def test_what_records_speak_against(
        self, matrix: Matrix, standing: Standing
    ) -> None:
        found = cells(matrix, CPU, outcomes(BF16, standing, "CPU"))[BF16]
        assert found.standing is standing
        assert found.why == "it brought nothing"


class TestShown:
    def test_what_is_alike_stands_once(self) -> None:
        keys = [(model, task) for model in "ab" for task in ("x", "y")]
        assert list(grouped(dict.fromkeys(keys, "s"))) == [("all", "all", "s")]
        found = grouped(dict.fromkeys(keys, "s") | {("a", "x"): "t"})
        assert list(found) == [("a", "x", "t"), ("a", "y", "s"), ("b", "all", "s")]
