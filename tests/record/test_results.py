"""`result.json`: written whole or not at all, read back the same, and refused by name where it is something else."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdopt.errors import UsageError
from sdopt.record import files
from sdopt.record.files import (
    parse_result,
    read_result,
    to_json,
    write_atomically,
    write_result,
)
from sdopt.record.records import SCHEMA_VERSION, StudyResult
from sdopt.study.designs import Plan
from sdopt.study.resume import merge_resumed


def test_round_trip(result: StudyResult, tmp_path: Path) -> None:
    write_result(result, tmp_path)
    assert read_result(tmp_path) == result
    assert read_result(tmp_path / "result.json") == result


def test_figures_that_are_no_numbers_do_not_make_it_unreadable(
    result: StudyResult, tmp_path: Path
) -> None:
    result.comparisons[0].shapes[0].speedup.low = float("nan")  # type: ignore[union-attr]
    result.variants[0].measurements[0].shapes[0].evidence[0].facts["ratio"] = float(
        "inf"
    )
    write_result(result, tmp_path)
    assert (
        read_result(tmp_path).comparisons[0].candidate
        == result.comparisons[0].candidate
    )


def test_a_reader_never_sees_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_readable_by_others(result: StudyResult, tmp_path: Path) -> None:
    """A temporary file's mode is 600: what replaces a result must not lock out whoever shares the folder."""
    before = os.umask(0o022)
    try:
        write_result(result, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("content", [None, '{"loss": 0.1}', "\x00\xff"])
def test_something_else_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError) as caught:
        read_result(path)
    [problem] = caught.value.problems
    assert str(path) in problem
    assert (
        "cannot be read (No such file" if content is None else "not a result"
    ) in problem


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, "x"])
def test_a_result_of_another_schema_is_refused_in_one_line(
    result: StudyResult, version: Any
) -> None:
    content = json.loads(to_json(result)) | {"schema_version": version}
    with pytest.raises(UsageError) as caught:
        parse_result(json.dumps(content).encode())
    [problem] = caught.value.problems
    environment = result.environment
    commit = environment.sdopt_commit
    assert (
        f"has schema version {version}, and this sdopt reads {SCHEMA_VERSION}: sdopt {environment.sdopt_version}"
        in problem
    )
    assert not commit or f"(commit {commit[:12]}) wrote it and reads it" in problem
    with pytest.raises(UsageError, match="the sdopt that wrote it reads it"):
        parse_result(json.dumps({"schema_version": version}).encode())
    assert "\n" not in problem


def test_sessions_and_shapes_that_are_not_there_are_refused(
    result: StudyResult,
) -> None:
    first, *_ = result.variants[0].measurements
    first.session = len(result.sessions)
    with pytest.raises(
        UsageError,
        match=f"processes are of session {first.session}, which is not there",
    ):
        parse_result(to_json(result))
    first.session, first.shapes = 0, []
    with pytest.raises(
        UsageError, match="the study has 1, and a process or a comparison only 0"
    ):
        parse_result(to_json(result))


OTHER = Path(__file__).parents[1] / "robustness" / "result.json"
"""The result of another study, measured by another sdopt."""


def test_samples_of_another_sdopt_are_not_continued(
    result: StudyResult, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        merge_resumed(
            read_result(OTHER), result, Plan((), ()), tmp_path, retry_failed=False
        )
    [said] = [
        problem for problem in caught.value.problems if "another sdopt" in problem
    ]
    assert "start a new study" in said
    assert not [
        problem
        for problem in caught.value.problems
        if "workload" in problem or "sdopt_commit" in problem
    ]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: what runs in the background may ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_waits_until_a_result_is_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pydantic takes what a handler raises within it for an error of its own, and the command would not end by it."""
    ended = []

    def dump(*_: object, **__: object) -> bytes:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(True)
        return b"{}"

    result = read_result(OTHER)
    monkeypatch.setattr(files, "_ADAPTER", SimpleNamespace(dump_json=dump))
    with pytest.raises(KeyboardInterrupt):
        to_json(result)
    assert ended


@pytest.mark.usefixtures("interruptible")
def test_a_signal_leaves_no_half_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = tempfile.mkstemp

    def interrupted(**where: Any) -> tuple[int, str]:
        made = make(**where)
        os.kill(os.getpid(), signal.SIGINT)
        return made

    monkeypatch.setattr(tempfile, "mkstemp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "result.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
