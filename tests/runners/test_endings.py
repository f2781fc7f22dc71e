"""How a command ends: by a signal, without a reader, or by a mistake of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners import end_with_code, interrupts_deferred
from runners.ui import _end
from sdopt.errors import ENDINGS
from sdopt.launching import _ended_by_signals
from sdopt.record.files import read_result
from sdopt.record.records import Status
from tests.command import SMOKE, Process, eventually, fork, sdopt
from tests.fakes import fake_workers
from tests.records import known


@pytest.fixture(autouse=True)
def signals_by_default() -> Iterator[None]:
    """Under `nohup` a command ignores SIGHUP, as its user asks; these tests would ignore it, too."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGXCPU, 152)],
)
def test_a_signal_is_a_line_and_a_code(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
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


def wait_for_rounds(process: Process) -> Path:
    """Waits until a study has timed two rounds; returns its folder."""

    def timed() -> bool:
        assert process.popen.poll() is None, process.finish()
        found = [read_result(path) for path in process.cwd.rglob("result.json")]
        calls = [
            len(m.shapes[0].calls)
            for result in found
            for row in result.variants
            for m in row.measurements
        ]
        return min(calls, default=0) > 1

    assert eventually(timed, 120)
    return next(process.cwd.rglob("result.json")).parent


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_keeps_and_compares_what_was_measured_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = fork(
        tmp_path, "run", *SMOKE, "layout=channels_last", "protocol.rounds=5000"
    )
    try:
        folder = wait_for_rounds(process)
        if number == signal.SIGINT:
            process.interrupt()  # as Ctrl-C does, all processes of its group
        else:
            process.popen.send_signal(number)
        finished = process.finish()
    finally:
        process.popen.kill()
    assert finished.code == code, finished.shown
    assert process.left_behind() == []
    assert finished.err.startswith("sdopt: interrupted")
    assert f"sdopt run resume={folder.relative_to(tmp_path)}" in finished.err
    assert "Traceback" not in finished.err
    assert "×" in finished.out
    result = read_result(folder)
    assert result.status == "interrupted"
    for row in result.variants:
        assert row.status is Status.INTERRUPTED
        assert row.reason.startswith("interrupted after ")
        assert row.reason.endswith(" of 5000 rounds")
    assert all(known(edge.shapes[0].speedup).n > 1 for edge in result.comparisons)
    assert not list(folder.glob("*.tmp"))


def test_a_reader_that_goes_away_does_not_end_the_measurement(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out, fake_workers():
        finished = sdopt(tmp_path, "run", *SMOKE, out=out)
    assert finished.code == 0, finished.err
    assert "BrokenPipe" not in finished.err
    assert finished.result.status == "finished"


def test_a_server_that_does_not_listen_is_ended_all_the_same() -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", deaf]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        began = time.monotonic()
        _end(server)
        assert server.returncode == -signal.SIGKILL
        assert time.monotonic() - began < 5
        _end(server)
