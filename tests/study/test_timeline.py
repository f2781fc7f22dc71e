"""Where a command's time went and what is said of it; the live display of a study, in a terminal of 80 columns."""

import json
import math
import re
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sdopt.apps.doctor.overhead import (
    EXIT,
    TARGETS,
    overhead_blocks,
    read_overhead,
    write_overhead,
)
from sdopt.launching import launch
from sdopt.report.terminal import shown as shown_blocks
from sdopt.study.progress import Progress
from sdopt.study.timeline import Timeline, process_begun, read_timeline, waited_s
from sdopt.terminal import OVERWRITES
from tests.command import SMALL, Finished, refused, sdopt
from tests.fakes import fake_workers


class TestTimeline:
    def test_books_all_time_and_none_of_it_twice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        timeline = Timeline("imports", begun=90.0)
        now = 101.0
        timeline.enter("timing", "a")
        now = 103.0
        with timeline.during("writing"):
            now = 103.5
        timeline.called(1.5)
        now = 104.0
        timeline.enter("timing", "b")
        now = 106.0
        timeline.enter("timing", "a")
        now = 107.0
        found = {(span.phase, span.variant): span for span in timeline.spans}
        assert {key: span.seconds for key, span in found.items()} == {
            ("imports", ""): 11.0,
            ("timing", "a"): 3.5,
            ("writing", ""): 0.5,
            ("timing", "b"): 2.0,
        }
        assert sum(span.seconds for span in found.values()) == 17.0
        assert [span.begun_s for span in found.values()] == [0.0, 11.0, 13.0, 14.0]
        assert (found["timing", "a"].entered, found["timing", "a"].in_calls_s) == (
            2,
            1.5,
        )

    def test_begins_where_the_process_did(self) -> None:
        before = time.monotonic()
        code = "import time; time.sleep(0.3); from sdopt.study.timeline import process_begun; print(process_begun())"
        began = float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
        assert before - 0.05 <= began <= time.monotonic() - 0.3
        assert process_begun() < before

    def test_of_a_study_in_a_search_is_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process has run for long; so much the study has neither taken nor to report."""
        monkeypatch.chdir(tmp_path)
        began = time.monotonic()
        with fake_workers():
            launch([*SMALL, "hydra.run.dir=run"], brief=True)
        spans = read_timeline(tmp_path / "run")
        assert sum(span.seconds for span in spans) <= time.monotonic() - began

    @pytest.mark.parametrize(
        "damaged", ["", "[{", "[1]", '[{"phase": "loading"}]', "{}", "null"]
    )
    def test_a_damaged_one_tells_of_no_waiting(
        self, tmp_path: Path, damaged: str
    ) -> None:
        (tmp_path / "timeline.json").write_text(damaged)
        assert waited_s(tmp_path) == 0

    def test_of_a_study_is_whole(self, finished: Finished) -> None:
        spans = read_timeline(finished.folder)
        by_phase = {
            phase: [span for span in spans if span.phase == phase]
            for phase in {span.phase for span in spans}
        }
        measured = [row for row in finished.result.variants if row.measurements]
        names = {row.name for row in measured}
        for phase in ("starting", "loading", "cold start", "timing", "stages"):
            # Further processes are prepared, and all inspected, side by side: that time is nobody's.
            assert {span.variant for span in by_phase[phase]} - {""} == names
        for phase in ("discarded round", "evidence", "images"):
            assert "" in {span.variant for span in by_phase[phase]} <= names | {""}
        for row in measured:
            [timing] = [span for span in by_phase["timing"] if span.variant == row.name]
            samples = [
                seconds
                for process in row.measurements
                for seconds in process.shapes[0].latency_s
            ]
            assert timing.entered == len(samples)
            assert (
                0.8 * sum(samples) < timing.in_calls_s <= sum(samples) <= timing.seconds
            )
        assert all(span.in_calls_s <= span.seconds for span in spans if span.variant)
        assert all(
            not span.in_calls_s
            for phase in ("starting", "loading")
            for span in by_phase[phase]
        )
        assert by_phase["writing result.json"][0].entered > len(measured)


class TestOverhead:
    def test_adds_up_to_the_wall_time(self, finished: Finished) -> None:
        inside = sum(span.seconds for span in read_timeline(finished.folder))
        found = read_overhead(finished.folder, inside + 2.0, ["sdopt", "run"])
        assert sum(phase.seconds for phase in found.phases) == pytest.approx(
            found.wall_s
        )
        assert found.phases[-1].phase == EXIT
        assert found.phases[-1].seconds == pytest.approx(2.0)
        assert sum(phase.in_calls_s for phase in found.phases) == pytest.approx(
            found.calls_s
        )
        assert found.wall_over_calls == pytest.approx(found.wall_s / found.calls_s)
        assert found.wall_over_calls > 1
        workers = [row for row in finished.result.variants if row.measurements]
        assert len(found.worker_start_s) == len(workers) - 1
        assert 0 < found.first_timed_call_s < found.wall_s

    def test_is_shown_with_its_targets(
        self, finished: Finished, tmp_path: Path
    ) -> None:
        inside = sum(span.seconds for span in read_timeline(finished.folder))
        found = read_overhead(finished.folder, inside, [])
        out = StringIO()
        Console(file=out, width=80).print(shown_blocks(overhead_blocks(found), 80))
        assert max(map(len, out.getvalue().splitlines())) <= 80
        for phase in (
            "loading",
            "timing",
            "writing result.json",
            "wall time",
            "≤ 1.2",
            "≤ 0.1 s",
            "≤ 20 s",
        ):
            assert phase in out.getvalue()
        kept = json.loads(write_overhead(found, tmp_path).read_text())
        assert kept["targets"] == TARGETS
        assert kept["phases"][0]["seconds"] == found.phases[0].seconds

    def test_of_a_command_that_fails_is_its_exit_code(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # MLflow's own process is none of this test's concern.
        script = f'case "$*" in *sdopt.cli*) exit 2;; esac; exec {sys.executable} "$@"'
        (failing := tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        failing.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(failing))
        assert (
            "the run ended with exit code 2"
            in refused(tmp_path, "benchmark-overhead").err
        )

    @pytest.mark.slow
    def test_of_the_command_that_a_user_gives(self, tmp_path: Path) -> None:
        small = (
            "hardware=cpu",
            "workload.steps=1",
            "workload.prompt_count=1",
            "protocol.rounds=2",
        )
        finished = sdopt(tmp_path, "benchmark-overhead", *small, "--folder", "here")
        assert finished.code == 0, finished.err
        kept = json.loads((tmp_path / "here" / "overhead.json").read_text())
        assert sum(phase["seconds"] for phase in kept["phases"]) == pytest.approx(
            kept["wall_s"]
        )
        assert len(kept["worker_start_s"]) == 8
        assert [path.name for path in tmp_path.iterdir()] == ["here"]


def shown(left_s: float | None = None) -> str:
    """The last state of a bar, without colours."""
    stream = StringIO()
    with Progress(
        Console(file=stream, force_terminal=True, width=80), Timeline()
    ) as progress:
        progress.start(rounds=4)
        if left_s is not None:
            progress.expect(left_s)
        progress.phase(
            "a variant with a name that no terminal holds, " * 3, "timing", 2
        )
        progress.advance()
        progress._bar.refresh()
    lines = (
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
        .replace("\r", "\n")
        .splitlines()
    )
    assert max(map(len, lines)) <= 80
    return [line for line in lines if "timing" in line][-1]


def test_a_long_name_does_not_cut_the_time_that_is_left() -> None:
    line = shown(left_s=30.0)
    assert "timing, round 2 of 4" in line
    assert re.search(r"\d+ s left$", line.rstrip())
    assert "left" not in shown(), "it is not known yet"


def test_the_bar_shows_the_share_of_the_time_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls that a budget leaves out, or that repeat a disturbed round, are no part of it."""
    clock = [0.0]
    monkeypatch.setattr("sdopt.study.progress.time.monotonic", lambda: clock[0])
    with Progress(Console(file=StringIO(), width=80), Timeline()) as progress:
        clock[0] = 30.0
        progress.expect(90.0)
        [bar] = progress._bar.tasks
        assert bar.percentage == 25
        clock[0] = 60.0
        progress.advance()
        assert bar.percentage == 50
        clock[0] = 130.0
        progress.advance()
        assert bar.total is None, "the forecast has run out"


@pytest.mark.parametrize(
    ("seconds", "within", "told"),
    [(2040.0, None, 1), (60.0, None, 0), (2040.0, (0.0, math.inf), 0)],
)
def test_a_long_study_says_once_how_long_and_what_shortens_it(
    seconds: float, within: tuple[float, float] | None, told: int
) -> None:
    stream = StringIO()
    with Progress(Console(file=stream, width=80), Timeline(), within) as progress:
        progress.tell_if_long(seconds)
        progress.tell_if_long(seconds)
    assert (
        stream.getvalue().count("About 34 min are left. protocol.budget_s=600") == told
    )


def test_a_forecast_that_has_run_out_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("sdopt.study.progress.time.monotonic", lambda: clock[0])
    with Progress(Console(file=StringIO(), width=80), Timeline()) as progress:
        assert progress._left_s() is None
        progress.expect(30.0)
        clock[0] = 20.0
        assert progress._left_s() == 10.0
        clock[0] = 100.0
        assert progress._left_s() is None


@pytest.mark.parametrize(("ends", "left"), [(1800.0, "25 min"), (-math.inf, "40 s")])
def test_the_studies_of_a_search_have_one_progress(
    ends: float, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time goes on from study to study, and it ends with the search, or with the last study."""
    monkeypatch.setattr("sdopt.study.progress.time.monotonic", lambda: 300.0)
    stream = StringIO()
    with Progress(Console(file=stream, width=80), Timeline(), (0.0, ends)) as progress:
        progress.start(3)
        progress.expect(40.0)
        progress.phase("baseline", "timing", 1)
    assert stream.getvalue() == f"[ 300.0 s] timing, round 1 of 3 (about {left} left)\n"


def test_a_notebook_has_one_line_that_is_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OVERWRITES, "1")
    monkeypatch.setattr("sdopt.study.progress._REFRESH_S", -1.0)
    with Progress(Console(force_terminal=False), Timeline()) as progress:
        progress.start(2)
        progress.expect(60.0)
        progress.phase("baseline", "timed calls", 1)
        progress.advance()
    shown = capsys.readouterr().out
    assert "\n" not in shown
    assert "░" * 12 + " timed calls, round 1 of 2 (about 60 s left)" in shown
    assert not shown.rsplit("\r", 2)[1].strip()  # nothing of it is left below the table
