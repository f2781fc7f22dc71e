"""`sdopt report`: where it writes, what it takes, and what it says of what it cannot find."""

import shutil
from pathlib import Path

import pytest

from tests.command import Finished, sdopt


@pytest.fixture
def run(finished: Finished, tmp_path: Path) -> Path:
    """The finished study in a folder of its own, without its report."""
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    for name in ("report.html", "report.md"):
        (folder / name).unlink()
    return folder


def test_writes_what_the_run_wrote_itself(run: Path, finished: Finished) -> None:
    done = sdopt(run.parent, "report", "run")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["report: run/report.html", "not logged: the result was not tracked"]
    assert (run / "report.html").read_bytes() == (finished.folder / "report.html").read_bytes()
    assert (run / "report.md").read_text().startswith("# shared\n")


def test_takes_a_result_and_another_folder(run: Path) -> None:
    done = sdopt(run.parent, "report", "run/result.json", "--output", "elsewhere")
    assert done.code == 0
    assert sorted(path.name for path in (run.parent / "elsewhere").iterdir()) == ["report.html", "report.md"]
    assert not (run / "report.html").exists()


def test_of_a_sweep_is_one_of_all_its_jobs(sweep_folder: Path, tmp_path: Path) -> None:
    done = sdopt(tmp_path, "report", str(sweep_folder), "--output", "here", "tracking=none")
    assert done.code == 0
    written = (tmp_path / "here" / "report.md").read_text()
    assert written.count("\n## job ") == 3
    assert written.index("## Answer") < written.index("## job 0: pair")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/at/all"], "nowhere/at/all: neither a run's folder, nor a result.json, nor an MLflow run id"),
        (["."], ".: has no result.json, nor does a folder of a sweep's job in it"),
        (["tracking=none"], "RESULT: name a run's folder, a sweep's folder or an MLflow run id"),
        (["a", "b", "--output", "c"], "--output c: takes one RESULT, because each has a report.html of its own"),
        (["run", "tracking.kind=paper"], "tracking.kind=paper"),
    ],
)
def test_a_mistake_is_a_line(run: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    done = sdopt(tmp_path / "empty" if arguments == ["."] else tmp_path, "report", *arguments)
    assert done.code == 2
    assert done.err.startswith(f"sdopt: {said}")
    assert len(done.err.splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_no_traceback(run: Path) -> None:
    (run.parent / "file").touch()
    done = sdopt(run.parent, "report", "run", "--output", "file/below")
    assert done.code == 3
    assert "choose another folder with --output" in done.err
