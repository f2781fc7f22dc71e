"""What processes tell each other by locks, and that a process that is killed leaves none."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdopt.hardware.device import Device
from sdopt.locks import exclusive, lock_folder, reserve, runtime_folder

_HERE = """
import os, sys, time
from contextlib import ExitStack
from pathlib import Path
from sdopt.locks import exclusive, lock_folder, reserve
from sdopt.hardware.device import Device
with {what}:
    print("there", flush=True)
    time.sleep(600)
"""


@contextmanager
def elsewhere(what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds something until it is killed."""
    code = _HERE.format(what=what)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


class TestFolder:
    def test_without_one_nothing_is_locked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
        with exclusive("anything"), reserve(Device("cpu"), "ours") as holder:
            assert holder == ""

    def test_of_another_user_is_not_trusted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "sdopt").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(PermissionError):
            runtime_folder()


class TestLockFolder:
    def test_by_another_process_until_it_is_killed(self, tmp_path: Path) -> None:
        with elsewhere(f"lock_folder(Path({str(tmp_path)!r}))"), lock_folder(tmp_path) as ours:
            assert not ours
        with lock_folder(tmp_path) as ours:
            assert ours
            with lock_folder(tmp_path) as again:
                assert not again


class TestExclusive:
    def test_waits_for_another_process(self) -> None:
        with elsewhere("exclusive('something')") as other:
            read, write = os.pipe()
            code = "from sdopt.locks import exclusive\nwith exclusive('something'): print('mine')"
            waiting = subprocess.Popen([sys.executable, "-c", code], stdout=write, text=True)
            os.close(write)
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(2)
            other.send_signal(signal.SIGKILL)
            assert waiting.wait(60) == 0
            assert os.read(read, 10) == b"mine\n"
            os.close(read)

    def test_an_error_within_goes_through(self) -> None:
        with pytest.raises(OSError, match="within"), exclusive("something"):
            raise OSError("within")
        with exclusive("something"):
            pass


class TestReserve:
    def test_one_study_at_a_time_has_a_device(self) -> None:
        with elsewhere("reserve(Device('cpu'), 'theirs')") as other:
            with reserve(Device("cpu"), "ours") as holder:
                assert holder == f"theirs (process {other.pid})"
            with reserve(Device("cuda", 0), "ours") as holder:
                assert holder == ""
        with reserve(Device("cpu"), "ours") as holder:
            assert holder == ""
            with reserve(Device("cpu"), "mine") as second:
                assert second == f"ours (process {os.getpid()})"

    def test_studies_with_cores_of_their_own_run_beside_each_other(self) -> None:
        with elsewhere("(os.sched_setaffinity(0, {0}), reserve(Device('cpu'), 'theirs'))[1]"):
            both = os.sched_getaffinity(0)
            try:
                os.sched_setaffinity(0, both - {0})
                with reserve(Device("cpu"), "ours") as holder:
                    assert holder == ""
            finally:
                os.sched_setaffinity(0, both)
            with reserve(Device("cpu"), "ours") as holder:
                assert holder.startswith("theirs")

    def test_cards_are_known_by_their_number_anywhere(self) -> None:
        visible = {"uuid": "GPU-1"}
        with (
            reserve(Device("cuda", 0, attributes=visible), "ours"),
            reserve(Device("cuda", 5, attributes=visible), "mine") as holder,
        ):
            assert holder.startswith("ours")
