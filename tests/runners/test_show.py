"""`sdopt show`, `report` and `compare`: a finished result again, and two with ratios only where they mean something."""

import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from runners import Arguments
from sdopt.record.files import read_result, write_result
from sdopt.record.records import StudyResult
from sdopt.report.comparing import changed_keys, incomparable
from sdopt.report.summary import summary_of
from sdopt.report.sweep import read_sweep
from tests.command import Finished, refused, sdopt
from tests.records import reconfigure


@pytest.fixture
def other(
    finished: Finished, result: StudyResult, tmp_path: Path
) -> tuple[StudyResult, Path]:
    """The finished study once more, as another run of it."""
    result.id = uuid.uuid4().hex
    folder = tmp_path / "other"
    folder.mkdir()
    write_result(result, folder)
    return result, folder


class TestShow:
    def test_prints_what_the_run_did(self, finished: Finished, tmp_path: Path) -> None:
        shown = sdopt(tmp_path, "show", str(finished.folder))
        assert shown.code == 0
        assert shown.out.startswith(summary_of(finished.result).sentence[:60])
        first = finished.out[finished.out.index(shown.out[:60]) :]
        assert shown.out in first
        everything = sdopt(tmp_path, "show", "--all", str(finished.folder))
        assert everything.code == 0
        assert "Method and reproduction" in everything.out
        assert list(tmp_path.iterdir()) == []

    def test_of_a_sweep_begins_with_its_answer_and_shows_its_studies_on_request(
        self, sweep_folder: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "sweep"
        shutil.copytree(sweep_folder, folder)
        for job, host in enumerate(("zeta", "alpha", "zeta")):
            result = read_result(folder / str(job))
            result.environment.host = host
            write_result(result, folder / str(job))
        sweep = read_sweep(folder)
        assert sorted(job.label for job in sweep.jobs) == [
            "0 on zeta",
            "1 on alpha",
            "2 on zeta",
        ]
        shown = sdopt(tmp_path, "show", "sweep")
        assert shown.code == 0
        assert " ".join(shown.out.split()).startswith(sweep.sentence)
        assert "1 on alpha" in shown.out
        assert (
            sdopt(tmp_path, "show", "--all", "sweep").out.count(
                "Method and reproduction"
            )
            == 3
        )
        assert (
            sdopt(tmp_path, "report", "sweep", "--output", "here", "tracking=none").code
            == 0
        )
        written = (tmp_path / "here" / "report.md").read_text()
        assert written.count("\n## job ") == 3
        assert written.index("## Answer") < written.index("## job 0")


class TestCompare:
    def test_of_the_same_work_there_are_ratios_of_speedups(
        self, finished: Finished, other: tuple[StudyResult, Path], tmp_path: Path
    ) -> None:
        shown = sdopt(tmp_path, "compare", str(finished.folder), str(other[1]))
        assert shown.code == 0
        assert "B/A 1.00×" in shown.shown
        options = [row for row in finished.result.candidates if row.status.measured]
        assert shown.shown.count("B/A 1.00×") == len(options), "baselines have none"
        assert "Configuration and environment agree." in shown.out

    def test_of_another_machine_there_is_no_ratio_and_a_warning(
        self, finished: Finished, other: tuple[StudyResult, Path], tmp_path: Path
    ) -> None:
        result, folder = other
        result.environment.device["name"] = "NVIDIA H200"
        result.environment.packages["torch"] = "9.9"
        write_result(result, folder)
        shown = sdopt(tmp_path, "compare", str(finished.folder), str(folder))
        assert shown.code == 0
        assert (
            "Not comparable, so no ratio of A and B is shown (B against A):"
            in shown.out
        )
        assert "B/A" not in shown.out
        assert "device: " in shown.out
        assert "torch: " in shown.out

    def test_other_threads_are_other_times_and_other_notes_are_nothing(
        self, finished: Finished, result: StudyResult
    ) -> None:
        reconfigure(result, "tracking", note="mine")
        assert incomparable(finished.result, result) == []
        reconfigure(result, "hardware", threads=7)
        assert incomparable(finished.result, result) == [
            "hardware.threads: 7 against 1"
        ]
        result.environment = replace(result.environment, sdopt_commit="f" * 40)
        found = changed_keys(finished.result, result)
        assert found.keys() == {"sdopt", "hardware.threads"}
        assert found["hardware.threads"] == ("1", "7")

    def test_a_sweep_is_none(
        self, sweep_folder: Path, finished: Finished, tmp_path: Path
    ) -> None:
        shown = refused(tmp_path, "compare", str(sweep_folder), str(finished.folder))
        assert "name the folder of one of its jobs" in shown.err


class TestReport:
    """Where it writes, what it takes, and what it says of what it cannot find."""

    @pytest.fixture
    def run(self, finished: Finished, tmp_path: Path) -> Path:
        """The finished study in a folder of its own, without its report."""
        folder = tmp_path / "run"
        shutil.copytree(finished.folder, folder)
        for name in ("report.html", "report.md"):
            (folder / name).unlink()
        return folder

    def test_writes_what_the_run_wrote_itself(
        self, run: Path, finished: Finished
    ) -> None:
        done = sdopt(run.parent, "report", "run")
        assert (done.code, done.err) == (0, "")
        assert done.out.splitlines() == [
            "report: run/report.html",
            "not logged: the result was not tracked",
        ]
        assert (run / "report.html").read_bytes() == (
            finished.folder / "report.html"
        ).read_bytes()
        assert (run / "report.md").read_text().startswith("# shared\n")

    def test_takes_a_result_and_another_folder(self, run: Path) -> None:
        done = sdopt(run.parent, "report", "run/result.json", "--output", "elsewhere")
        assert done.code == 0
        assert sorted(path.name for path in (run.parent / "elsewhere").iterdir()) == [
            "report.html",
            "report.md",
        ]
        assert not (run / "report.html").exists()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                ["nowhere/at/all"],
                "nowhere/at/all: neither a run's folder, nor a result.json, nor an MLflow run id",
            ),
            (["."], ".: has no result.json, nor does a folder of a sweep's job in it"),
            (
                ["tracking=none"],
                "RESULT: name a run's folder, a sweep's folder or an MLflow run id",
            ),
            (
                ["a", "b", "--output", "c"],
                "--output c: takes one RESULT, because each has a report.html of its own",
            ),
            (["run", "tracking.kind=paper"], "tracking.kind=paper"),
        ],
    )
    def test_a_mistake_is_a_line(
        self, run: Path, tmp_path: Path, arguments: list[str], said: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        done = refused(
            tmp_path / "empty" if arguments == ["."] else tmp_path, "report", *arguments
        )
        assert done.err.startswith(f"sdopt: {said}")
        assert len(done.err.splitlines()) == 1

    def test_a_folder_that_cannot_be_written_is_no_traceback(self, run: Path) -> None:
        (run.parent / "file").touch()
        done = sdopt(run.parent, "report", "run", "--output", "file/below")
        assert done.code == 3
        assert "Not a directory" in done.err


def test_what_may_be_left_out_is_not_called_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Arguments(prog="it")
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*")
    with pytest.raises(SystemExit):
        parser.parsed([])
    assert capsys.readouterr().err.endswith("are required: run\n")
    assert parser.parsed(["a"]).overrides == []


def test_a_path_may_begin_in_the_home_of_its_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shells leave the ~ within a word as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = Arguments(prog="it")
    parser.add_argument("--output", type=Path)
    assert parser.parsed(["--output=~/mine"]).output == tmp_path / "mine"
