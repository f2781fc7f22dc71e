"""The matrix of options, models and tasks: what records show, what is impossible, and how it is told."""

import json
import re
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.doctor.matrix import Cell, Key, Matrix, Shown, State, grouped, shown_in
from sdopt.doctor.tables import matrix_table
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.record.comparisons import Interval
from sdopt.record.records import Status, StudyResult
from sdopt.statistics.outcomes import Outcome, Standing
from tests.command import Finished, sdopt
from tests.fixtures import CPU

SHEETS = data_sheets()
OPTIONS = [("attention", "math"), ("attention", "cudnn"), ("precision", "bf16"), ("precision", "fp16_vae_fix")]


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    with composer_of([]) as composer:
        return Matrix(composer, OPTIONS, ["emoji", "folder", "sdxl"], ["txt2img", "img2img"])


def cells(matrix: Matrix, device: Device, shown: Shown | None = None) -> dict[Key, Cell]:
    return {(c.group, c.option, c.model, c.task): c for c in matrix.cells(device, shown or {}, SHEETS)}


def outcomes(key: Key, standing: Standing, *devices: str) -> Shown:
    return {key: {device: Outcome(*key, standing, "it brought nothing") for device in devices}}


BF16 = ("precision", "bf16", "emoji", "txt2img")


def test_a_key_that_is_missing_makes_no_option_impossible() -> None:
    """LoRAs run with every model; those that come with sdopt fit one of them."""
    with composer_of([]) as composer:
        lora = Matrix(composer, [("lora", "fused"), ("memory", "vae_slicing")], ["emoji", "sd15"], ["txt2img"])
        found = cells(lora, CPU)
    sd15 = found["lora", "fused", "sd15", "txt2img"]
    assert sd15.state is State.UNPROVEN
    assert sd15.reasons == ["the LoRAs that come with sdopt are for model=emoji: set lora.path"]
    assert found["lora", "fused", "emoji", "txt2img"].reasons == []


class TestRecords:
    def test_prove_what_their_traces_show(self, result: StudyResult) -> None:
        found = shown_in([result], SHEETS)
        assert found[BF16]["CPU"].standing in (Standing.PROVEN, Standing.REFUTED), "by how fast it was here"
        assert found["precision", "fp32", "emoji", "txt2img"]["CPU"].standing is Standing.PROVEN
        assert ("precision", "tf32", "emoji", "txt2img") not in found, "it was skipped"
        assert {model for _, _, model, _ in found} == {"emoji"}

    def test_name_the_card_by_its_data_sheet(self, result: StudyResult) -> None:
        result.environment.device |= {"type": "cuda", "name": SHEETS["h200"].device_names[0]}
        assert list(shown_in([result], SHEETS)[BF16]) == [SHEETS["h200"].name]

    def test_say_what_failed_and_what_left_no_evidence(self, result: StudyResult) -> None:
        bf16 = result.variant("bfloat16")
        bf16.status, bf16.reason = Status.FAILED, "RuntimeError: no kernel"
        found = shown_in([result], SHEETS)[BF16]["CPU"]
        assert (found.standing, found.why) == (Standing.CANNOT_RUN, "failed: RuntimeError: no kernel")
        bf16.status = Status.NOT_ENGAGED
        for measured in bf16.measurements:
            measured.shapes[0].evidence = [replace(item, engaged=False) for item in measured.shapes[0].evidence]
        found = shown_in([result], SHEETS)[BF16]["CPU"]
        assert found.standing is Standing.REFUTED
        assert "no evidence that it took effect: weights bfloat16" in found.why

    @pytest.mark.parametrize(
        ("speedup", "memory", "standing"),
        [
            ((1.2, 1.1, 1.3), (1.0, 1.0, 1.0), Standing.PROVEN),
            ((1.0, 0.9, 1.1), (1.0, 1.0, 1.0), Standing.PROVEN),  # what is wide refutes nothing
            ((0.9, 0.85, 0.95), (0.8, 0.75, 0.85), Standing.PROVEN),
            ((0.9, 0.85, 0.95), (1.1, 1.05, 1.15), Standing.REFUTED),
            ((0.9, None, None), (1.1, None, None), Standing.PROVEN),  # nor does what one process says
        ],
    )
    def test_refute_what_brings_none_of_its_gains(
        self,
        result: StudyResult,
        speedup: tuple[float, float | None, float | None],
        memory: tuple[float, float | None, float | None],
        standing: Standing,
    ) -> None:
        edge = result.first_comparison("bfloat16")
        assert edge is not None
        edge.shapes[0].speedup, edge.shapes[0].memory_ratio, edge.shapes[0].floor = (
            Interval(*speedup),
            Interval(*memory),
            1.05,
        )
        found = shown_in([result], SHEETS)[BF16]["CPU"]
        assert found.standing is standing, found
        assert re.search(rf"speed-up ≈?{speedup[0]:.2f}×", found.why)
        assert "memory" in found.why

    def test_the_best_of_several_counts(self, result: StudyResult, finished: Finished) -> None:
        result.variant("bfloat16").status = Status.FAILED
        edge = (other := finished.result).first_comparison("bfloat16")
        assert edge is not None
        edge.shapes[0].speedup = Interval(2.0)
        for records in ([result, other], [other, result]):
            assert shown_in(records, SHEETS)[BF16]["CPU"].standing is Standing.PROVEN


class TestCells:
    def test_each_option_model_and_task_has_one(self, matrix: Matrix) -> None:
        found = cells(matrix, CPU)
        assert len(found) == len(OPTIONS) * 2 * 2, "a folder of the user's own is not given"

    def test_states(self, matrix: Matrix) -> None:
        found = cells(matrix, CPU, outcomes(BF16, Standing.PROVEN, "CPU", "a GPU"))
        assert found[BF16].state is State.PROVEN
        assert found[BF16].text == "proven on CPU, proven on a GPU"
        assert found["precision", "bf16", "emoji", "img2img"].text == "unproven"
        impossible = found["attention", "cudnn", "sdxl", "txt2img"]
        assert impossible.state is State.IMPOSSIBLE
        assert impossible.text == f"impossible: the cudnn kernel needs a CUDA device; this runs on {CPU.name}"
        assert found["precision", "fp16_vae_fix", "sdxl", "txt2img"].state is State.UNPROVEN
        assert "this VAE is for SDXL" in found["precision", "fp16_vae_fix", "emoji", "txt2img"].text

    def test_proven_elsewhere_is_not_proven_here(self, matrix: Matrix) -> None:
        key = ("attention", "cudnn", "sdxl", "txt2img")
        shown = outcomes(key, Standing.PROVEN, SHEETS["h200"].name)
        assert cells(matrix, CPU, shown)[key].text.endswith(f"(proven on {SHEETS['h200'].name})")
        assert cells(matrix, planned_device(SHEETS["h200"]), shown)[key].state is State.PROVEN
        elsewhere = cells(matrix, planned_device(SHEETS["h100"]), shown)[key]
        assert elsewhere.text == f"unproven: together with precision=bf16 (proven on {SHEETS['h200'].name})"

    @pytest.mark.parametrize(
        ("standing", "state"), [(Standing.REFUTED, State.REFUTED), (Standing.CANNOT_RUN, State.FAILED)]
    )
    def test_what_records_speak_against(self, matrix: Matrix, standing: Standing, state: State) -> None:
        found = cells(matrix, CPU, outcomes(BF16, standing, "CPU"))[BF16]
        assert found.state is state
        assert found.text == f"{standing}: it brought nothing"


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
        assert "16 cells: 0 proven, 0 refuted, 0 cannot run, 10 unproven, 6 impossible" in said


class TestCommand:
    def test_reads_records_and_says_it_as_json(self, result: StudyResult, finished: object, tmp_path: Path) -> None:
        (tmp_path / "records").mkdir()
        shutil.copy(finished.folder / "result.json", tmp_path / "records")  # type: ignore[attr-defined]
        done = sdopt(tmp_path, "doctor", "--matrix", "--json", "--records", "records", "hardware=cpu")
        assert done.code == 0, done.err
        found = json.loads(done.out)["cells"]
        [cell] = [c for c in found if (c["option"], c["model"], c["task"]) == ("bf16", "emoji", "txt2img")]
        assert cell["state"] in ("proven", "refuted")
        assert {c["model"] for c in found} >= {"emoji", "sd15", "sdxl"}

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--matrix", "--save", "hardware/mine.yaml"], "--save: cannot be combined with --matrix"),
            (["--matrix", "--records", "nowhere"], "--records nowhere: no such folder"),
            (["--records", "."], "--records: only applies to --matrix"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, arguments: list[str], said: str) -> None:
        finished = sdopt(tmp_path, "doctor", "hardware=cpu", "--quick", *arguments)
        assert finished.code == 2
        assert said in finished.err
