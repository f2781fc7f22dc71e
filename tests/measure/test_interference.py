"""Interference by cause: a neighbour on the same core, stolen time, pages from disk; off where the kernel is silent."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.measure.interference import InterferenceMeter
from sdopt.record.samples import Interference
from tests.records import known


def test_a_burning_neighbour_raises_the_wait_for_a_core() -> None:
    """Two processes on one core: each waits for half of the time, or for more on a machine that others use too."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    # A shell starts the neighbour and ends, so that it is nobody's child.
    command = f"{sys.executable} -S -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    pid = int(
        subprocess.run(
            ["sh", "-c", command], check=True, capture_output=True, text=True
        ).stdout
    )
    try:
        meter, end = InterferenceMeter(os.getpid()), time.perf_counter() + 0.3
        assert meter.off == ""
        while time.perf_counter() < end:
            pass
        found = known(meter.stop(0.3))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.sched_setaffinity(0, cores)
    assert found.waited > 0.3
    assert found.switched_out > 5


class Kernel:
    """A /proc and a /sys of its own, of a machine with two cores, of which the process may use the second."""

    def __init__(self, root: Path) -> None:
        self.root, self.cpus = root / "proc", root / "sys"
        self.root.mkdir()
        self.ticks(busy=0, stolen=0)
        self.thread(1)
        (self.root / "7" / "status").write_text("Name:\tit\nCpus_allowed_list:\t1\n")
        (self.root / "cpuinfo").write_text(
            "processor\t: 0\ncpu MHz\t\t: 1000.0\n\nprocessor\t: 1\ncpu MHz\t\t: 2400.5\n"
        )

    def meter(self) -> InterferenceMeter:
        return InterferenceMeter(7, self.root, self.cpus)

    def ticks(self, busy: int, stolen: int, idle: int = 0) -> None:
        (self.root / "stat").write_text(
            f"cpu  {busy + 999} 0 0 0 0 0 0 999 0 0\ncpu0 999 0 0 0 0 0 0 999 0 0\n"
            f"cpu1 {busy} 0 0 {idle} 0 0 0 {stolen} 0 0\nintr 5\n"
        )

    def thread(
        self,
        tid: int,
        ran_ns: int = 0,
        waited_ns: int = 0,
        faults: int = 0,
        switches: int = 0,
        pid: int = 7,
    ) -> None:
        task = self.root / str(pid) / "task" / str(tid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran_ns} {waited_ns} 9\n")
        (task / "stat").write_bytes(
            b"%d (a (nam\xc3) ) R 1 1 1 0 -1 0 55 0 %d 0 1 1\n" % (tid, faults)
        )
        said = b"Name:\ta (nam\xc3) \nvoluntary_ctxt_switches:\t80\nnonvoluntary_ctxt_switches:\t%d\n"
        (task / "status").write_bytes(said % switches)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


SECOND = 10**9


def test_counts_are_those_of_the_stretch_over_all_threads(kernel: Kernel) -> None:
    kernel.thread(1, waited_ns=SECOND, faults=3, switches=4)
    meter = kernel.meter()
    kernel.ticks(busy=400, stolen=100, idle=0)
    kernel.thread(1, ran_ns=SECOND, waited_ns=3 * SECOND // 2, faults=5, switches=10)
    kernel.thread(2, ran_ns=SECOND // 2, waited_ns=SECOND // 4, faults=1, switches=1)
    found = known(meter.stop(seconds=1.0))
    # They ran for 1.5 s and waited for 0.75 s, of the 2.5 s for which others ran on the core.
    assert replace(found, cores=None) == Interference(
        round(0.75 / 2.25, 5), 0.2, 3, 7, 2400.5
    )
    assert found.cores is not None
    assert found.cores > 0


def test_what_a_process_started_counts_too(kernel: Kernel) -> None:
    kernel.thread(8, pid=8)
    (kernel.root / "8" / "stat").write_text("8 (compiler) S 7 8 8")
    meter = kernel.meter()
    kernel.ticks(busy=200, stolen=0)
    kernel.thread(8, ran_ns=SECOND, waited_ns=SECOND, pid=8)
    assert known(meter.stop(seconds=2.0)).waited == 0.5


def test_of_a_call_that_mostly_sleeps_it_is_a_share_of_the_calls_time(
    kernel: Kernel,
) -> None:
    meter = kernel.meter()
    kernel.ticks(busy=100, stolen=0, idle=900)
    kernel.thread(1, ran_ns=SECOND // 10, waited_ns=SECOND // 10)
    found = known(meter.stop(seconds=10.0))
    assert found.waited == 0.01


@pytest.mark.parametrize(
    ("others_ticks", "waited"), [(0, 0.0), (20, 0.2 / 2.2), (500, 0.5)]
)
def test_waiting_counts_as_far_as_others_ran(
    kernel: Kernel, others_ticks: int, waited: float
) -> None:
    meter = kernel.meter()
    kernel.ticks(busy=200 + others_ticks, stolen=0)
    kernel.thread(1, ran_ns=2 * SECOND, waited_ns=2 * SECOND)
    found = known(meter.stop(seconds=1.0))
    assert found.waited == pytest.approx(waited, abs=1e-5)


def test_of_a_window_in_which_it_did_nothing_there_is_no_share(kernel: Kernel) -> None:
    assert known(kernel.meter().stop(seconds=0.0)).waited == 0.0


def test_own_helpers_are_no_others(kernel: Kernel) -> None:
    meter = kernel.meter()
    kernel.ticks(busy=700, stolen=0)
    kernel.thread(1, ran_ns=2 * SECOND, waited_ns=2 * SECOND)
    found = known(meter.stop(1.0, own_s=4.0))
    assert found.waited == pytest.approx(1 / 3, abs=1e-5), (
        "of the 5 s in which others ran, 4 were its own"
    )


def test_the_frequency_is_the_governors_where_there_is_one(kernel: Kernel) -> None:
    folder = kernel.cpus / "cpu1" / "cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_cur_freq").write_text("3100000\n")
    found = known(kernel.meter().stop(1.0))
    assert found.cpu_mhz == 3100.0


@pytest.mark.parametrize("absent", ["stat", "7/status", "7/task/1/schedstat"])
def test_is_off_where_the_kernel_does_not_count(kernel: Kernel, absent: str) -> None:
    (kernel.root / absent).unlink()
    meter = kernel.meter()
    assert meter.stop(1.0) is None
    assert meter.off.startswith("interference is not recorded")


def test_of_a_process_that_has_ended_there_is_none(kernel: Kernel) -> None:
    meter = kernel.meter()
    (kernel.root / "7" / "task" / "1").rename(kernel.root / "gone")
    assert meter.stop(1.0) is None
