"""Limits of the shell that are too low to measure with: a line each, before anything heavy is imported."""

import os
import resource

import pytest

from sdopt.errors import UnavailableError
from sdopt.limits import require_limits
from sdopt.report.charts.spec import picture
from sdopt.worker.forkserver import start_fork_server


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The limits of this process, by number: those that a test puts there, and else none."""
    found: dict[int, int] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (found.get(limit, resource.RLIM_INFINITY),) * 2)
    return found


def test_none_and_high_ones_are_enough(limits: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    require_limits()
    limits |= {resource.RLIMIT_AS: 2**36, resource.RLIMIT_FSIZE: 2**30, resource.RLIMIT_NPROC: 2**16}
    require_limits()


def test_each_that_is_too_low_is_a_line(limits: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31)  # whose processes are none
    limits |= {resource.RLIMIT_AS: 2**30, resource.RLIMIT_FSIZE: 2**20, resource.RLIMIT_NPROC: 20}
    with pytest.raises(UnavailableError) as caught:
        start_fork_server()
    memory, file, tasks = caught.value.problems
    assert memory.startswith("address space is limited to 1024 MiB, but at least 8192 MiB is required; ")
    assert memory.endswith("allow more (ulimit -v unlimited)")
    assert file.startswith("the size of a file is limited to 1 MiB, but")
    assert tasks.startswith("processes and threads are limited to 20, and 0 run already")


def test_processes_that_run_count(limits: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    limits[resource.RLIMIT_NPROC] = 66 + (os.cpu_count() or 1)
    monkeypatch.setattr("sdopt.limits._running_tasks", lambda: 3)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    require_limits()  # the kernel holds root to none
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="3 run already"):
        require_limits()


def test_plots_need_more_than_measuring(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_AS] = 2**34
    require_limits()
    with pytest.raises(
        UnavailableError, match="address space is limited to 16384 MiB, but at least 81920 MiB is required for plots"
    ):
        picture({})
