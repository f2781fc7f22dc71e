"""The live display of a study, in a terminal of 80 columns."""

import re
from io import StringIO

import pytest
from rich.console import Console

from sdopt.study.progress import Progress
from sdopt.study.timeline import Timeline
from sdopt.terminal import OVERWRITES


def shown(calls: int, made: int) -> str:
    """The last state of a bar, without colours."""
    stream = StringIO()
    with Progress(Console(file=stream, force_terminal=True, width=80), Timeline()) as progress:
        progress.start(calls, rounds=4)
        progress.phase("a variant with a name that no terminal holds, " * 3, "timing", 2)
        for _ in range(made):
            progress.advance()
        progress._bar.refresh()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80
    return [line for line in lines if "calls" in line][-1]


def test_a_long_name_cuts_neither_the_calls_nor_the_time_that_is_left() -> None:
    line = shown(10, 4)
    assert "timing, round 2 of 4" in line
    assert re.search(r"4/10 calls \d+:\d\d:\d\d left", line)


def test_there_are_never_more_calls_than_all() -> None:
    assert "12/12 calls" in shown(10, 12)


def test_nothing_is_said_to_be_left_before_it_is_known() -> None:
    assert "left" not in shown(10, 0)


def test_a_notebook_has_one_line_that_is_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OVERWRITES, "1")
    monkeypatch.setattr("sdopt.study.progress._REFRESH_S", -1.0)
    with Progress(Console(force_terminal=False), Timeline()) as progress:
        progress.start(4, 2)
        progress.phase("baseline", "timed calls", 1)
        progress.advance(2)
    shown = capsys.readouterr().out
    assert "\n" not in shown
    assert "█" * 6 + "░" * 6 + " timed calls, round 1 of 2 (2 of 4 calls" in shown
    assert not shown.rsplit("\r", 2)[1].strip()  # nothing of it is left below the table
