"""Interference by cause: a neighbour on the same core, stolen time, pages from disk; off where the kernel is silent."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdopt.measure.interference import InterferenceMeter


def burn(seconds: float = 60.0) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def neighbour() -> Iterator[None]:
    """Another process that burns the same core."""
    process = multiprocessing.get_context("fork").Process(target=burn, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def test_a_burning_neighbour_raises_the_wait_for_a_core() -> None:
    """Two processes on one core: each waits for half of the time, or for more on a machine that others use too."""
    meter = InterferenceMeter(os.getpid())
    assert meter.off == ""
    with one_core(), neighbour():
        meter.start()
        burn(0.5)
        found = meter.stop()
    assert found is not None
    assert found.seconds >= 0.5
    assert found.waited > 0.3
    assert found.switched_out > 5


def test_sleeping_waits_for_no_core() -> None:
    meter = InterferenceMeter(os.getpid())
    with one_core(), neighbour():
        meter.start()
        time.sleep(0.5)
        found = meter.stop()
    assert found is not None
    assert found.waited < 0.3
    assert found.switched_out <= 2


class Kernel:
    """A /proc of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ticks(stolen=0, others=0)
        self.thread(1)

    def ticks(self, stolen: int, others: int) -> None:
        (self.root / "stat").write_text(f"cpu  {others} 0 0 0 0 0 0 {stolen} 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")

    def thread(self, tid: int, waited_ns: int = 0, faults: int = 0, switches: int = 0) -> None:
        task = self.root / "7" / "task" / str(tid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"123 {waited_ns} 9\n")
        (task / "stat").write_text(f"{tid} (a (name) ) R 1 1 1 0 -1 0 55 0 {faults} 0 1 1\n")
        (task / "status").write_text(f"voluntary_ctxt_switches:\t80\nnonvoluntary_ctxt_switches:\t{switches}\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_counts_are_those_of_the_stretch_over_all_threads(kernel: Kernel) -> None:
    kernel.thread(1, waited_ns=10**9, faults=3, switches=4)
    meter = InterferenceMeter(7, kernel.root)
    meter.start()
    kernel.ticks(stolen=30, others=70)
    kernel.thread(1, waited_ns=3 * 10**9, faults=5, switches=10)
    kernel.thread(2, waited_ns=10**9, faults=1, switches=1)
    found = meter.stop()
    assert found is not None
    assert found.waited * found.seconds == pytest.approx(3.0)
    assert found.stolen == pytest.approx(0.3)
    assert (found.major_faults, found.switched_out) == (3, 7)


@pytest.mark.parametrize("absent", ["stat", "7/task/1/schedstat"])
def test_is_off_where_the_kernel_does_not_count(kernel: Kernel, absent: str) -> None:
    (kernel.root / absent).unlink()
    meter = InterferenceMeter(7, kernel.root)
    meter.start()
    assert meter.stop() is None
    assert meter.off.startswith("interference is not recorded: there is no ")


def test_of_a_process_that_has_ended_there_is_none(kernel: Kernel) -> None:
    meter = InterferenceMeter(7, kernel.root)
    meter.start()
    (kernel.root / "7" / "task" / "1").rename(kernel.root / "gone")
    assert meter.stop() is None
