"""Results that are truncated, emptied, edited, of a later schema: a line says which file and what; exit code 2."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sdopt as library
from sdopt.config.composed import with_resumed
from sdopt.errors import UsageError
from sdopt.record.files import parse_result, read_error
from sdopt.record.records import StudyResult
from sdopt.report.sweep import exit_code, read_sweep
from sdopt.schema import Tracking
from sdopt.tracking.client import Logged
from tests.command import sdopt
from tests.robustness.damage import RESULT, Path_, document, replaced

DOCUMENT = document()


def answer_to(damaged: Any) -> str:
    """What is said of a damaged result."""
    with pytest.raises(UsageError) as caught:
        parse_result(json.dumps(damaged).encode())
    [problem] = caught.value.problems
    assert "\n" not in problem
    return problem


FIRST_CALL = ("variants", 0, "measurements", 0, "shapes", 0, "calls", 0)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("variants",), [], "no variant has this name"),
        (("baseline",), "nobody", "nobody: no variant has this name"),
        (("comparisons", 0, "reference"), "nobody", "nobody: no variant has this name"),
        (("environment",), {}, "environment"),
        (("comparisons", 0, "shapes", 0, "speedup", "estimate"), -1, "estimate: Input should be greater than 0"),
        (("config", "protocol", "confidence"), 7, "config.protocol.confidence: Input should be less than 1"),
        (("variants", 0, "contract"), "x", "variants.0.contract: Input should be 'exact', 'equivalent' or 'lossy'"),
        ((*FIRST_CALL, "seconds"), 0.0, "calls.0.seconds: Input should be greater than 0"),
        ((*FIRST_CALL, "held_gib"), math.inf, "calls.0.held_gib: Input should be a finite number"),
        (("schema_version",), 99, "has schema version 99, and this sdopt reads"),
    ],
)
def test_what_cannot_be_true_is_named(path: Path_, value: Any, said: str) -> None:
    assert said in answer_to(replaced(DOCUMENT, path, value))


def test_a_later_schema_with_fields_of_its_own_is_read_where_its_version_is_ours() -> None:
    assert parse_result(json.dumps(DOCUMENT | {"of_the_future": {"a": 1}}).encode()).variants


TRUNCATED = RESULT.read_bytes()[:5000]


@pytest.mark.parametrize("content", [TRUNCATED, b"", b"[" * 100_000], ids=range(3))
def test_each_command_says_which_file(content: bytes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / "result.json").write_bytes(content)
    (run / ".hydra" / "hydra.yaml").write_text(
        "hydra: {overrides: {task: [], hydra: []}, runtime: {config_sources: []}}"
    )
    readers: list[Callable[[], Any]] = [
        lambda: library.load_result(run),
        lambda: library.load(run),
        lambda: exit_code(run),
        lambda: with_resumed([f"resume={run}"]),
    ]
    for read in readers:
        with pytest.raises(UsageError, match=r"run/result\.json: ") as caught:
            read()
        assert len(caught.value.problems) == 1


def test_a_sweep_goes_on_with_its_other_jobs(tmp_path: Path) -> None:
    for job in "0123":
        (tmp_path / "sweep" / job).mkdir(parents=True)
        shutil.copy(RESULT, tmp_path / "sweep" / job)
    (tmp_path / "sweep" / "1" / "result.json").write_bytes(TRUNCATED)
    (tmp_path / "sweep" / "2" / "result.json").unlink()
    (tmp_path / "sweep" / "2" / "error.json").write_text('{"exit_code": "x"}')
    (tmp_path / "sweep" / "4" / ".hydra").mkdir(parents=True)
    sweep = read_sweep(tmp_path / "sweep")
    assert list(sweep.studies) == ["0", "3"]
    assert [line.partition("sweep/")[2].partition(":")[0] for line in sweep.damaged] == [
        "1/result.json",
        "2/error.json",
    ]
    assert sweep.exit_code == 1  # the regression of the jobs that can be read
    assert {job.number for job in sweep.jobs} == {"0", "1", "2", "3", "4"}
    assert "the job has begun and has written no result" in next(job.because for job in sweep.jobs if job.number == "4")
    finished = sdopt(tmp_path, "gate", "sweep")
    assert finished.code  # the worst of all that there is to say
    assert all(line.removeprefix(f"{tmp_path}/") in finished.err for line in sweep.damaged)
    assert finished.out.count("verdicts: ") == 2


def test_sync_goes_on_after_an_error_of_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in "ab":
        (tmp_path / job).mkdir()
        shutil.copy(RESULT, tmp_path / job)

    def log(_result: StudyResult, folder: Path, _tracking: Tracking) -> Logged:
        if folder.name == "a":
            raise KeyError("what nobody foresaw")
        return Logged("run", "1", new=True)

    monkeypatch.setattr("sdopt.tracking.runs.log_study", log)
    finished = sdopt(tmp_path, "sync", ".", f"tracking.uri=sqlite:///{tmp_path}/never.db")
    assert finished.code == 3
    assert finished.err == "sdopt: a: could not be logged (KeyError: 'what nobody foresaw')\n"
    assert finished.out == "b: logged as run\n"


@pytest.mark.parametrize("content", ["", "{}", '{"exit_code": 2, "problems": "x"}'])
def test_an_error_that_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(content)
    with pytest.raises(UsageError, match=r"error\.json: not a valid error\.json"):
        read_error(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "\x00", "hydra: {overrides: {task: [], hydra: [3]}}", "{" * 5000], ids=range(5)
)
def test_a_command_line_that_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "hydra.yaml").write_text(content)
    with pytest.raises(UsageError, match=r"hydra\.yaml, which records what was run there, is damaged") as caught:
        with_resumed([f"resume={tmp_path}"])
    assert len(caught.value.problems) == 1
