"""What a worker started is counted with it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdopt.measure.processes import files_in_memory, held_elsewhere, started_by

HOLDING = "import time; held = b'x' * (64 << 20); print(flush=True); time.sleep(60)"


@contextmanager
def running(program: str) -> Iterator[int]:
    """A child in a session of its own, once it has printed a line."""
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


def test_a_child_counts_that_left_the_group() -> None:
    before = held_elsewhere(os.getpid())
    with running(HOLDING) as pid:
        assert pid in started_by(os.getpid())
        assert held_elsewhere(os.getpid()) - before == pytest.approx(64 / 1024, abs=0.02)


def test_files_below_a_folder_in_memory_count() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "there").write_bytes(b"x" * (1 << 20))
        assert files_in_memory(Path(folder)) == pytest.approx(1 / 1024)
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        (Path(folder) / "there").write_bytes(b"x" * (1 << 20))
        assert files_in_memory(Path(folder)) == 0


def test_a_name_that_the_kernel_cut_in_the_middle_of_a_character_stops_nothing(tmp_path: Path) -> None:
    for pid, name in ((7, b"\xc3\xbcberwachungsd\xc3"), (8, b"plain")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_bytes(b"%d (%s) S %d 7 7" % (pid, name, pid - 1))
    assert started_by(7, tmp_path) == [8]
    assert started_by(7, tmp_path / "none") == []
