"""Prepares sessions: whether processes fit side by side in memory and on the cores, and how many calls warm them up."""

from typing import Literal

import pytest

from sdopt.hardware.device import Device
from sdopt.record.samples import Memory
from sdopt.schema import Protocol
from sdopt.study.plan import warmup_calls
from sdopt.study.run import first_schedule
from sdopt.study.session import footprint_gib
from sdopt.study.warmup import excess, memory_budget_gib
from sdopt.study.work import Sharing
from sdopt.worker.machine import Machine
from tests.fixtures import Compose

GPU = Device("cuda", name="a GPU", memory_total_gib=80.0, memory_free_gib=79.0)


def test_a_budget_of_a_gpu_has_the_hosts_memory_too() -> None:
    budget = memory_budget_gib(GPU, 0.5)
    assert budget["device"] == 39.5
    assert 0 < budget["host"] < 10_000
    # As with gate=default on a large card: 21 workers, each of them 1.5 GiB on the host.
    worker = footprint_gib(
        Memory(
            0.5,
            1.5,
            cuda_peak_allocated_gib=0.5,
            cuda_peak_reserved_gib=0.6,
            nvml_process_gib=1.1,
        )
    )
    assert worker == {"host": 1.5, "device": 1.1}
    budget = {"host": 16.0, "device": 67.0}
    assert excess([worker] * 9, budget) is None
    assert (
        excess([worker] * 10, budget)
        == "11 processes of 1.50 GiB exceed 16.00 GiB of host memory"
    )
    worker = footprint_gib(
        Memory(
            0.5,
            1.0,
            cuda_peak_allocated_gib=9.0,
            cuda_peak_reserved_gib=8.4,
            cuda_elsewhere_gib=1.0,
        )
    )
    assert worker["device"] == pytest.approx(10.0)
    assert "of device memory" in (
        excess([worker] * 7, {"host": 100.0, "device": 67.0}) or ""
    )


@pytest.mark.parametrize(
    ("schedule", "mode", "kind"),
    [
        ("auto", None, "interleaved"),
        ("auto", "default", "interleaved"),
        ("auto", "exclusive process", "blocks"),
        ("auto", "exclusive thread", "blocks"),
        ("interleaved", "exclusive process", "interleaved"),
        ("blocks", None, "blocks"),
    ],
)
def test_a_device_that_takes_one_process_at_a_time_is_measured_in_blocks(
    schedule: Literal["auto", "interleaved", "blocks"], mode: str | None, kind: str
) -> None:
    gpu = {} if mode is None else {"compute_mode": mode}
    machine = Machine(GPU, cpu={}, preloaded=True, bad_fork=False, gpu=gpu)
    found = first_schedule(Protocol(schedule=schedule), machine)
    assert found.kind == kind
    assert bool(found.reason) == (kind == "blocks")
    if schedule == "auto" and mode:
        assert (mode in found.reason) == (kind == "blocks")


@pytest.mark.parametrize(
    ("given", "warmup", "calls"),
    [
        ([], 0, 0),
        ([], 3, 3),
        (["compiler=inductor"], 1, 1),
        (["compiler=inductor", "compiler.mode=reduce-overhead"], 0, 2),
        (["compiler=inductor", "compiler.mode=max-autotune"], 1, 2),
        (["compiler=inductor", "compiler.mode=max-autotune-no-cudagraphs"], 1, 1),
        (["compiler=inductor", "compiler.mode=reduce-overhead"], 5, 5),
    ],
)
def test_a_call_that_still_records_graphs_is_not_the_one_in_which_memory_is_measured(
    variant: Compose, given: list[str], warmup: int, calls: int
) -> None:
    assert warmup_calls([variant(), variant(*given)], Protocol(warmup=warmup)) == calls


@pytest.mark.parametrize(
    ("cores", "threads", "calls", "drawing"),
    [
        (2, 2, 1, 1),
        (2, 1, 2, None),
        (16, 16, 1, 8),
        (16, 4, 2, 2),
        (1, 1, 1, None),
        (2, 4, 1, 2),
    ],
)
def test_a_cpu_is_shared_and_a_gpu_is_not(
    cores: int, threads: int, calls: int, drawing: int | None
) -> None:
    sharing = Sharing(cores, threads, on_gpu=False)
    assert (sharing.processes, sharing.calls, sharing.drawing_threads) == (
        2,
        calls,
        drawing,
    )
    assert sharing.calls * threads <= max(cores, threads)
    alone = Sharing(cores, threads, on_gpu=True)
    assert (alone.processes, alone.calls, alone.drawing_threads) == (1, 1, None)
