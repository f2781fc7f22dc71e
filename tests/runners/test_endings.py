"""How a command ends: by a signal, without a reader, or by a mistake of its own."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners import end_with_code, interrupts_deferred
from sdopt.errors import ENDINGS
from sdopt.launching import _ended_by_signals
from sdopt.record.files import read_result
from tests.command import SMOKE, Process, fork, sdopt
from tests.fakes import fake_workers


@pytest.fixture(autouse=True)
def signals_by_default() -> Iterator[None]:
    """Under `nohup` a command ignores SIGHUP, as its user asks; these tests would ignore it, too."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGXCPU, 152)])
def test_a_signal_is_a_line_and_a_code(number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def main(_argv: list[str]) -> int:
        os.kill(os.getpid(), number)
        time.sleep(5)
        return 0

    assert end_with_code(main)([]) == code
    assert capsys.readouterr().err == f"sdopt: interrupted by {number.name}\n"
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_waits_until_imports_are_over(number: signal.Signals) -> None:
    imported = []

    def main(_argv: list[str]) -> int:
        with interrupts_deferred():
            signal.raise_signal(number)  # to this thread: a library may have others
            time.sleep(0.1)
            imported.append(True)
        time.sleep(5)
        return 0

    assert end_with_code(main)([]) == 128 + number
    assert imported


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_interrupts_a_job_of_a_launcher(number: signal.Signals) -> None:
    def job() -> None:
        with _ended_by_signals():
            os.kill(os.getpid(), number)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        job()
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_job_of_a_launcher_leaves_ignored_what_nohup_ignores() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def wait_for_a_round(process: Process) -> Path:
    """Waits until a study has timed something; returns its folder."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in process.cwd.rglob("result.json"):
            if any(row.samples for row in read_result(path).variants):
                return path.parent
        assert process.popen.poll() is None, process.finish()
        time.sleep(0.1)
    raise AssertionError("no round was timed")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_a_signal_keeps_what_was_measured_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = fork(tmp_path, "run", *SMOKE, "protocol.rounds=5000")
    try:
        folder = wait_for_a_round(process)
        process.popen.send_signal(number)
        finished = process.finish()
    finally:
        process.popen.kill()
    assert finished.code == code, finished.shown
    assert f"sdopt run resume={folder.relative_to(tmp_path)}" in finished.err
    assert "Traceback" not in finished.err
    result = read_result(folder)
    assert result.status == "interrupted"
    assert all(row.samples for row in result.variants)
    assert process.left_behind() == []


def test_a_reader_that_goes_away_does_not_end_the_measurement(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out, fake_workers():
        finished = sdopt(tmp_path, "run", *SMOKE, out=out)
    assert finished.code == 0, finished.err
    assert "BrokenPipe" not in finished.err
    assert finished.result.status == "finished"
