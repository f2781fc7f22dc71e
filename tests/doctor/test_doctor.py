"""The doctor: what it says of a machine, of its ceilings, and of every option on a card."""

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir
from rich.console import Console

from sdopt.config.composer import HydraComposer, composer_of
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.config.paths import CONF
from sdopt.doctor.diagnosis import Diagnosis, diagnose
from sdopt.doctor.options import OptionReport, check_options
from sdopt.doctor.tables import sheet_yaml, tables
from sdopt.hardware.cards import planned_device, require_card, sheet_of
from sdopt.hardware.ceilings import SAMPLES, measure_ceilings
from sdopt.hardware.device import Device
from sdopt.hardware.probe import probe_device
from sdopt.worker.machine import Machine
from tests.command import Finished, sdopt
from tests.fixtures import CPU

SHEETS = data_sheets()


@cache
def composer_kept(overrides: tuple[str, ...]) -> HydraComposer:
    """Composing dozens of options takes seconds, and is the same for every device."""
    return HydraComposer(overrides)


def reports(device: Device, *overrides: str, group: str = "") -> dict[str, OptionReport]:
    options = [option for option in optimization_options() if group in ("", option[0])]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        found = check_options(composer_kept(overrides), options, device, SHEETS)
    return {f"{report.group}={report.option}": report for report in found}


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """Of this machine's CPU, with ceilings of matrices that are as small as they come."""
    small = replace(CPU, memory_free_gib=0.01)
    options = list(reports(CPU).values())
    machine = Machine(CPU, CPU.attributes, preloaded=True, bad_fork=False)
    return diagnose(machine, [], False, options, measure_ceilings(small))


class TestOptions:
    @pytest.fixture(scope="class")
    def on_a_cpu(self) -> dict[str, OptionReport]:
        return reports(CPU)

    def test_every_one_is_looked_at(self, on_a_cpu: dict[str, OptionReport]) -> None:
        groups = {path.parent.name for path in CONF.glob("*/*.yaml")}
        apart = {"model", "scheduler", "workload", "protocol", "hardware", "tracking", "study", "experiment"}
        looked_at = {report.group for report in on_a_cpu.values()}
        assert looked_at
        assert looked_at <= groups - apart
        for group in looked_at:
            assert {r.option for r in on_a_cpu.values() if r.group == group} == {
                path.stem for path in (CONF / group).glob("*.yaml")
            }

    def test_what_needs_a_card_says_from_which_on(self, on_a_cpu: dict[str, OptionReport]) -> None:
        found = on_a_cpu["attention=cudnn"]
        assert not found.runs
        assert found.reasons == [f"the cudnn kernel needs a CUDA device; this runs on {CPU.name}"]
        assert found.remedy.startswith("runs on cards of compute capability 8.0 or later (a100_40, ")
        assert on_a_cpu["attention=math"] == OptionReport("attention", "math", True)
        assert on_a_cpu["precision=bf16"].runs

    @pytest.mark.parametrize(("card", "runs"), [("t4", False), ("a10", True)])
    def test_what_a_card_cannot_run(self, card: str, runs: bool) -> None:
        found = reports(planned_device(SHEETS[card]))
        assert found["precision=bf16"].runs == found["precision=tf32"].runs == found["attention=flash"].runs == runs
        assert found["compiler=inductor"].runs
        assert bool(found["precision=bf16"].remedy) != runs

    def test_what_runs_only_beside_another_option_says_so(self) -> None:
        a10 = planned_device(SHEETS["a10"])
        found = reports(a10)["attention=flash"]
        assert found.runs
        assert found.reasons[0].startswith("together with precision=")
        ready = reports(a10, "precision=fp16", group="attention")
        assert ready["attention=flash"] == OptionReport("attention", "flash", True)

    def test_ones_that_combine_are_checked_one_by_one(self, on_a_cpu: dict[str, OptionReport]) -> None:
        found = on_a_cpu["memory=vae_slicing"]
        assert found.runs
        assert found.reasons == ["needs a batch of several images: set workload.batch_size to 2 or more"]
        ready = reports(CPU, "memory=vae_tiling", "workload.size=96", "workload.batch_size=2", group="memory")
        for option in ("vae_slicing", "vae_tiling"):
            assert ready[f"memory={option}"] == OptionReport("memory", option, True)

    def test_ones_of_the_users_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "conf" / "mine").mkdir(parents=True)
        (tmp_path / "own_option.py").write_text(
            "from dataclasses import dataclass\n"
            "from sdopt.options import Optimization\n\n\n"
            "@dataclass(frozen=True)\nclass Own(Optimization):\n    key: int\n\n"
            "    def conflicts(self, ctx):\n        return ['it is Monday']\n"
        )
        (tmp_path / "conf" / "mine" / "own.yaml").write_text("_target_: own_option.Own\nkey: 1\n")
        (tmp_path / "conf" / "mine" / "open.yaml").write_text("_target_: own_option.Own\nkey: ???\n")
        monkeypatch.syspath_prepend(tmp_path)
        with composer_of([], tmp_path / "conf") as composer:
            options = [option for option in optimization_options(tmp_path / "conf") if option[0] == "mine"]
            found = {r.option: r for r in check_options(composer, options, CPU, SHEETS)}
        assert found["own"] == OptionReport("mine", "own", False, ["it is Monday"])
        assert not found["open"].runs
        assert found["open"].reasons == ["mine.key: must be given, as in mine.key=…"]


class TestCeilings:
    def test_keep_their_samples(self, diagnosis: Diagnosis) -> None:
        kinds = [ceiling.kind for ceiling in diagnosis.ceilings]
        assert kinds == ["fp32", "fp16", "bf16", "int8", "copy"]
        for ceiling in diagnosis.ceilings:
            assert len(ceiling.samples_s) == SAMPLES
            assert min(ceiling.samples_s) > 0
            scale = 1e9 if ceiling.kind == "copy" else 1e12
            assert ceiling.rate == pytest.approx(ceiling.work / sorted(ceiling.samples_s)[SAMPLES // 2] / scale)

    def test_make_a_data_sheet_that_a_run_is_held_against(self, diagnosis: Diagnosis, tmp_path: Path) -> None:
        (tmp_path / "conf" / "hardware").mkdir(parents=True)
        (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(sheet_yaml(diagnosis))
        with composer_of(["hardware=mine"], tmp_path / "conf") as composer:
            hardware = composer.current.hardware
        require_card(hardware, CPU)
        assert hardware.sheet is not None
        rates = {ceiling.kind: ceiling.rate for ceiling in diagnosis.ceilings}
        assert hardware.sheet.vector.bf16 == pytest.approx(rates["bf16"], rel=1e-3)
        assert hardware.sheet.bandwidth_gb_s == pytest.approx(rates["copy"], rel=1e-3)

    @pytest.mark.gpu
    def test_of_a_card_are_below_its_data_sheet(self) -> None:
        device = probe_device("cuda")
        sheet = sheet_of(device.name, SHEETS.values())
        for ceiling in measure_ceilings(device):
            if sheet and ceiling.kind != "copy":
                peak = sheet.peak(ceiling.kind)
                assert peak is None or 0.2 * peak < ceiling.rate < 1.1 * peak


class TestTables:
    @pytest.mark.parametrize("width", [80, 120])
    def test_fit_and_name_every_option(self, diagnosis: Diagnosis, width: int) -> None:
        out = StringIO()
        Console(file=out, width=width).print(tables(diagnosis, width))
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= width
        for heading in ("this machine", "ceilings of", "options on", "fp32 product", "copy of", "workers", "disk"):
            assert heading in text
        for report in diagnosis.options:
            assert report.option in text
        assert "needs a CUDA device" in " ".join(text.split())


class TestCommand:
    @pytest.fixture(scope="class")
    def quick(self, tmp_path_factory: pytest.TempPathFactory) -> Finished:
        return sdopt(tmp_path_factory.mktemp("doctor"), "doctor", "--quick", "--json", "hardware=cpu")

    def test_says_it_as_json(self, quick: Finished) -> None:
        assert quick.code == 0, quick.err
        found: dict[str, Any] = json.loads(quick.out)
        assert found["device"]["name"] == CPU.name
        assert found["packages"]["torch"] == torch.__version__ or torch.__version__.startswith(
            found["packages"]["torch"]
        )
        assert {"group": "attention", "option": "math", "runs": True, "reasons": [], "remedy": ""} in found["options"]
        assert found["ceilings"] == []
        assert all(free > 0 for free in found["disk_free_gib"].values())

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["precision=nope"], "precision=nope: unknown option; "),
            (["--quick", "--save", "hardware/mine.yaml"], "--save: needs measured ceilings"),
            (["--save", "mine.yaml"], "must be in a folder called hardware"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, arguments: list[str], said: str) -> None:
        finished = sdopt(tmp_path, "doctor", "hardware=cpu", *arguments)
        assert finished.code == 2
        assert said in finished.err
        assert not list(tmp_path.iterdir())
