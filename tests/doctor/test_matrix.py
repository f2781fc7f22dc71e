"""The matrix of options, models and tasks: what records prove, what is impossible, and how it is shown."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sdopt.config.compatibility import compatibility
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.doctor.matrix import Cell, Key, Matrix, State, grouped, proofs_in
from sdopt.doctor.tables import matrix_table
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.results.records import Status, StudyResult
from tests.command import sdopt
from tests.conftest import CPU

SHEETS = data_sheets()
OPTIONS = [("attention", "math"), ("attention", "cudnn"), ("precision", "bf16"), ("precision", "fp16_vae_fix")]


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    with composer_of([]) as composer:
        return Matrix(composer, OPTIONS, ["emoji", "folder", "sdxl"], ["txt2img", "img2img"])


def cells(matrix: Matrix, device: Device, proofs: Mapping[Key, list[str]] | None = None) -> dict[Key, Cell]:
    return {(c.group, c.option, c.model, c.task): c for c in matrix.cells(device, proofs or {}, SHEETS)}


class TestProofs:
    def test_are_what_a_record_shows(self, result: StudyResult) -> None:
        found = proofs_in([result], SHEETS)
        assert found["precision", "bf16", "emoji", "txt2img"] == ["CPU"]
        assert found["precision", "fp32", "emoji", "txt2img"] == ["CPU"]
        assert ("precision", "tf32", "emoji", "txt2img") not in found
        assert {model for _, _, model, _ in found} == {"emoji"}

    def test_name_the_card_by_its_data_sheet(self, result: StudyResult) -> None:
        result.environment.device |= {"type": "cuda", "name": SHEETS["h200"].device_names[0]}
        assert proofs_in([result], SHEETS)["precision", "bf16", "emoji", "txt2img"] == [SHEETS["h200"].name]

    def test_need_evidence_and_a_good_end(self, result: StudyResult) -> None:
        [bf16] = [variant for variant in result.variants if variant.name == "bfloat16"]
        bf16.status = Status.FAILED
        assert ("precision", "bf16", "emoji", "txt2img") not in proofs_in([result], SHEETS)
        bf16.status = Status.OK
        for measured in bf16.measurements:
            measured.evidence = [replace(item, engaged=False) for item in measured.evidence]
        assert ("precision", "bf16", "emoji", "txt2img") not in proofs_in([result], SHEETS)


class TestCells:
    def test_each_option_model_and_task_has_one(self, matrix: Matrix) -> None:
        found = cells(matrix, CPU)
        assert len(found) == len(OPTIONS) * 2 * 2, "a folder of the user's own is not given"

    def test_states(self, matrix: Matrix) -> None:
        here = ("precision", "bf16", "emoji", "txt2img")
        found = cells(matrix, CPU, {here: ["CPU", "a GPU"]})
        assert found[here].state is State.PROVEN
        assert found[here].said == "proven on CPU, a GPU"
        assert found["precision", "bf16", "emoji", "img2img"].said == "unproven"
        impossible = found["attention", "cudnn", "sdxl", "txt2img"]
        assert impossible.state is State.IMPOSSIBLE
        assert impossible.said == f"impossible: the cudnn kernel needs a CUDA device; this runs on {CPU.name}"
        assert found["precision", "fp16_vae_fix", "sdxl", "txt2img"].state is State.UNPROVEN
        assert "weights of SDXL's VAE" in found["precision", "fp16_vae_fix", "emoji", "txt2img"].said

    def test_proven_elsewhere_is_not_proven_here(self, matrix: Matrix) -> None:
        key = ("attention", "cudnn", "sdxl", "txt2img")
        proofs = {key: [SHEETS["h200"].name]}
        assert cells(matrix, CPU, proofs)[key].said.endswith(f"(proven on {SHEETS['h200'].name})")
        assert cells(matrix, planned_device(SHEETS["h200"]), proofs)[key].state is State.PROVEN
        elsewhere = cells(matrix, planned_device(SHEETS["h100"]), proofs)[key]
        assert elsewhere.said == f"unproven: together with precision=bf16; proven on {SHEETS['h200'].name}"


class TestShown:
    def test_what_is_alike_stands_once(self) -> None:
        keys = [(model, task) for model in "ab" for task in ("x", "y")]
        assert list(grouped(dict.fromkeys(keys, "s"))) == [("all", "all", "s")]
        assert list(grouped(dict.fromkeys(keys, "s") | {("a", "x"): "t"})) == [
            ("a", "x", "t"),
            ("a", "y", "s"),
            ("b", "all", "s"),
        ]

    @pytest.mark.parametrize("width", [80, 120])
    def test_fits_the_terminal(self, matrix: Matrix, width: int) -> None:
        out = StringIO()
        Console(file=out, width=width).print(matrix_table(list(cells(matrix, CPU).values()), CPU))
        assert max(map(len, out.getvalue().splitlines())) <= width
        said = " ".join(out.getvalue().split())
        assert "16 cells: 0 proven, 10 unproven, 6 impossible" in said


class TestCommand:
    def test_reads_records_and_says_it_as_json(self, result: StudyResult, finished: object, tmp_path: Path) -> None:
        (tmp_path / "records").mkdir()
        shutil.copy(finished.folder / "result.json", tmp_path / "records")  # type: ignore[attr-defined]
        done = sdopt(tmp_path, "doctor", "--matrix", "--json", "--records", "records", "hardware=cpu")
        assert done.code == 0, done.err
        found = json.loads(done.out)["cells"]
        [cell] = [c for c in found if (c["option"], c["model"], c["task"]) == ("bf16", "emoji", "txt2img")]
        assert cell["state"] == "proven"
        assert {c["model"] for c in found} >= {"emoji", "sd15", "sdxl"}

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--matrix", "--save", "hardware/mine.yaml"], "--save: --matrix measures no ceilings"),
            (["--matrix", "--records", "nowhere"], "--records nowhere: no such folder"),
            (["--records", "."], "--records: is for --matrix"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, arguments: list[str], said: str) -> None:
        finished = sdopt(tmp_path, "doctor", "hardware=cpu", "--quick", *arguments)
        assert finished.code == 2
        assert said in finished.err


def test_the_page_depends_on_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    page = compatibility()
    for module in ("conflicts", "compiler.toolchain", "compiler.blade"):
        monkeypatch.setattr(f"sdopt.optimizations.{module}.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert compatibility.__wrapped__() == page
