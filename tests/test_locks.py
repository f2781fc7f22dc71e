"""What processes tell each other by locks, and their temporary folders: one that is killed leaves neither."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.hardware.device import Device
from sdopt.locks import exclusive, lock_folder, reserve, runtime_folder
from sdopt.scratch import cache_folder, own_folder, remove_abandoned, unwritable

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
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


class TestFolder:
    def test_without_one_nothing_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
        with exclusive("anything"), reserve(Device("cpu"), "ours") as holder:
            assert holder == ""

    def test_one_that_is_gone_is_as_if_none_was_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert runtime_folder() == tmp_path / f"sdopt-{os.getuid()}"

    def test_of_another_user_is_not_trusted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "sdopt").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(PermissionError):
            runtime_folder()


class TestLockFolder:
    def test_by_another_process_until_it_is_killed(self, tmp_path: Path) -> None:
        with (
            elsewhere(f"lock_folder(Path({str(tmp_path)!r}))"),
            lock_folder(tmp_path) as ours,
        ):
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
            waiting = subprocess.Popen(
                [sys.executable, "-c", code], stdout=write, text=True
            )
            os.close(write)
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(0.4)
            other.send_signal(signal.SIGKILL)
            assert waiting.wait(60) == 0
            assert os.read(read, 10) == b"mine\n"
            os.close(read)


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
        with elsewhere(
            "(os.sched_setaffinity(0, {0}), reserve(Device('cpu'), 'theirs'))[1]"
        ):
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


_MAKE = """
import multiprocessing, sys, time
from sdopt.scratch import own_folder, scratch_folder
with scratch_folder("test") as folder:
    (folder / "file").write_text("x")
    print(own_folder(), flush=True)
    {then}
"""


def process(temporary: Path, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _MAKE.format(then=then)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )


def said(child: "subprocess.Popen[str]") -> Path:
    assert child.stdout is not None
    return Path(child.stdout.readline().strip())


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("then", ["pass", "raise KeyboardInterrupt"])
def test_goes_at_the_end(then: str, short: Path) -> None:
    with process(short, then) as child:
        assert said(child).parent == short
    assert list(short.iterdir()) == []


def test_goes_with_the_next_one_after_it_was_killed(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short))
    for other in ("sdopt-0", "sdopt-1-unmarked", "pymp-others"):
        (short / other).mkdir()
    with (
        process(short, "time.sleep(600)") as living,
        process(short, "time.sleep(600)") as dying,
    ):
        kept, left = said(living), said(dying)
        remove_abandoned()
        assert kept.is_dir()
        assert (left / "owner").read_text().startswith(f"{dying.pid} ")
        dying.kill()
        dying.wait()
        assert left.is_dir()
        remove_abandoned()
        assert not left.exists()
        assert list(kept.glob("test-*/file"))
        living.kill()
    assert {path.name for path in short.iterdir()} == {
        kept.name,
        "sdopt-0",
        "sdopt-1-unmarked",
        "pymp-others",
    }


def test_what_a_child_holds_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that was forked keeps its parent's lock, because it may use what is there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fork = 'multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start(); time.sleep(600)'
    with process(tmp_path, fork) as parent:
        folder = said(parent)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (child := children.read_text().split()):
            pass
        parent.kill()
        parent.wait()
        remove_abandoned()
        assert folder.is_dir()
        os.kill(int(child[0]), 9)


def test_that_of_another_user_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "sdopt-1-other").mkdir()
    (tmp_path / "sdopt-1-other" / "owner").touch()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    remove_abandoned()
    assert (tmp_path / "sdopt-1-other").is_dir()
    monkeypatch.undo()


def test_without_a_place_for_it_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sdopt.scratch._mine", {})
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    with pytest.raises(
        UsageError, match=r"no temporary folder can be written .*TMPDIR="
    ):
        own_folder()


def test_caches_of_a_user_without_a_home_are_the_process_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/it")
    assert cache_folder() == Path("/home/it/.cache")
    monkeypatch.setattr(Path, "home", unknown)
    assert cache_folder() == own_folder() / "cache"


def test_a_path_that_is_too_long_for_sockets_is_said(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 15)
    long.mkdir()
    code = "from sdopt.scratch import own_folder; print(own_folder()); own_folder()"
    environment = {**os.environ, "TMPDIR": str(long)}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.startswith("/tmp/sdopt-")
    assert ended.stderr.count("too long for sockets") == 1
    assert not list(long.iterdir())


def test_where_nothing_can_be_written_is_said_to_root_too(tmp_path: Path) -> None:
    """The kernel's own folder lets root in, and then makes none."""
    assert "/proc cannot be written" in str(unwritable(Path("/proc/sdopt/cache")))
    file = tmp_path / "file"
    file.touch()
    assert unwritable(file / "cache") == f"{file} is no folder"
    assert unwritable(tmp_path / "new" / "cache") is None
    assert list(tmp_path.iterdir()) == [file], "it leaves nothing behind"
