"""Processes share the cores of a machine: no more threads at once than there are cores."""

import pytest

from sdopt.study.session import Sharing


@pytest.mark.parametrize(
    ("cores", "threads", "calls", "drawing"),
    [(2, 2, 1, 1), (2, 1, 2, None), (16, 16, 1, 8), (16, 4, 2, 2), (1, 1, 1, None), (2, 4, 1, 2)],
)
def test_on_a_cpu(cores: int, threads: int, calls: int, drawing: int | None) -> None:
    sharing = Sharing(cores, threads, on_gpu=False)
    assert (sharing.processes, sharing.calls, sharing.drawing_threads) == (2, calls, drawing)
    assert sharing.calls * threads <= max(cores, threads)


def test_on_a_gpu_one_process_has_it_for_itself() -> None:
    sharing = Sharing(16, 16, on_gpu=True)
    assert (sharing.processes, sharing.calls, sharing.drawing_threads) == (1, 1, None)
