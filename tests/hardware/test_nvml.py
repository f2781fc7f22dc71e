"""What NVML says of a card: found by UUID, sliced or whole; throttled calls; energy; what it leaves unanswered."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from sdopt.hardware.device import Device
from sdopt.hardware.nvml import GpuMonitor, describe_gpu, process_gib
from sdopt.record.samples import GpuState
from tests.fixtures import CPU
from tests.hardware.stubs import UUID, Nvml, NVMLLibraryMismatchError, install

CARD = Device("cuda", name="a card")
GIB = 2**30


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class TestHandle:
    @pytest.mark.parametrize("prefix", ["", "GPU-", "MIG-"])
    def test_of_a_card_whatever_prefix_pytorch_gives(self, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
        own = process(os.getpid(), 3 * GIB)
        install(monkeypatch, Nvml(ComputeRunningProcesses=[process(1, GIB), own]), prefix + UUID)
        assert process_gib(CARD, [os.getpid()]) == 3.0

    def test_of_a_slice_has_a_prefix_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = Nvml(ComputeRunningProcesses=[process(os.getpid(), 2 * GIB)], TotalEnergyConsumption=5000)
        nvml.known = {f"MIG-{UUID}": "slice"}
        install(monkeypatch, nvml)
        assert process_gib(CARD, [os.getpid()]) == 2.0
        assert describe_gpu(CARD)["mig_slice"] is True

    def test_that_nvml_does_not_know_answers_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = Nvml()
        nvml.known = {}
        install(monkeypatch, nvml)
        assert process_gib(CARD, [os.getpid()]) is None
        assert describe_gpu(CARD) == {}
        assert GpuMonitor(CARD).state({}, 1.0) is None

    def test_a_process_without_a_figure_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, Nvml(ComputeRunningProcesses=[process(os.getpid(), None)]))
        assert process_gib(CARD, [os.getpid()]) is None


class TestSettings:
    def test_are_told_with_the_other_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        others = [process(os.getpid(), GIB), process(7, 4 * GIB), process(8, None)]
        install(
            monkeypatch, Nvml(ComputeMode=3, EnforcedPowerLimit=450000, ComputeRunningProcesses=others, EccMode=(1, 1))
        )
        assert describe_gpu(CARD) == {
            "mig_slice": False,
            "compute_mode": "exclusive process",
            "power_limit_w": 450.0,
            "ecc": True,
            "processes": [{"pid": 7, "gib": 4.0}, {"pid": 8, "gib": None}],
        }


class TestMonitor:
    def state(self, nvml: Nvml, before: dict[str, int], seconds: float = 1.0) -> GpuState:
        found = GpuMonitor(CARD).state(before, seconds)
        assert found is not None
        return found

    def test_reads_clocks_temperature_and_power(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clocks = {"ClockInfo:1": 1980, "ClockInfo:2": 3201, "Temperature:0": 61}
        nvml = Nvml(PowerUsage=612345, EnforcedPowerLimit=700000, CurrentClocksThrottleReasons=0x1)
        nvml.answers |= clocks
        install(monkeypatch, nvml)
        assert self.state(nvml, {}) == GpuState(1980, 3201, 61, 612.345, 700.0, [])

    @pytest.mark.parametrize(
        ("bits", "reasons"),
        [
            (0x0, []),
            (0x1 | 0x2, []),
            (0x4, ["power limit"]),
            (0x40 | 0x8, ["hardware slowdown", "temperature (hardware)"]),
            (0x200, ["board limit"]),
        ],
    )
    def test_idle_and_fixed_clocks_are_no_throttling(
        self, monkeypatch: pytest.MonkeyPatch, bits: int, reasons: list[str]
    ) -> None:
        nvml = Nvml(CurrentClocksThrottleReasons=bits)
        install(monkeypatch, nvml)
        assert self.state(nvml, {}).throttled == reasons

    @pytest.mark.parametrize(("ns", "throttled"), [(0, []), (5_000_000, []), (20_000_000, ["temperature"])])
    def test_counters_show_what_was_over_before_the_call_ended(
        self, monkeypatch: pytest.MonkeyPatch, ns: int, throttled: list[str]
    ) -> None:
        nvml = Nvml(CurrentClocksThrottleReasons=0x1)
        nvml.answers["ViolationStatus:1"] = SimpleNamespace(violationTime=1_000)
        install(monkeypatch, nvml)
        monitor = GpuMonitor(CARD)
        before = monitor.throttled_ns()
        assert before == {"temperature": 1_000}
        nvml.answers["ViolationStatus:1"] = SimpleNamespace(violationTime=1_000 + ns)
        found = monitor.state(before, seconds=1.0)
        assert found is not None
        assert found.throttled == throttled

    @pytest.mark.parametrize(
        ("running", "others"),
        [
            ([os.getpid(), 1], 0.4),
            ([1], None),  # as in a container, where the driver gives other numbers
        ],
    )
    def test_kernels_of_others_are_those_of_no_worker_of_the_study(
        self, monkeypatch: pytest.MonkeyPatch, running: list[int], others: float | None
    ) -> None:
        now = time.time() * 1e6
        used = [(os.getpid(), 99, now), (1, 30, now), (1, 50, now), (1, 80, now - 60e6)]
        samples = [SimpleNamespace(pid=pid, smUtil=share, timeStamp=at) for pid, share, at in used]
        nvml = Nvml(ComputeRunningProcesses=[process(pid, GIB) for pid in running], ProcessUtilization=samples)
        install(monkeypatch, nvml)
        assert self.state(nvml, {}).others == others

    def test_counts_energy_of_a_whole_card_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = Nvml(TotalEnergyConsumption=5250)
        install(monkeypatch, nvml)
        assert GpuMonitor(CARD).energy_j() == 5.25
        nvml.known = {f"MIG-{UUID}": "slice"}
        assert GpuMonitor(CARD).energy_j() is None

    def test_of_a_driver_that_lacks_a_function_reads_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = Nvml(PowerUsage=100_000, ComputeRunningProcesses=NVMLLibraryMismatchError())
        install(monkeypatch, nvml)
        found = self.state(nvml, {})
        assert (found.power_w, found.others) == (100.0, None)
        assert process_gib(CARD, [os.getpid()]) is None

    def test_of_a_card_that_is_lost_fails_when_it_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker is built before it can answer that it failed."""
        install(monkeypatch, Nvml())

        def lost(index: int) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
        monitor = GpuMonitor(CARD)
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            monitor.throttled_ns()

    def test_of_a_cpu_reads_nothing(self) -> None:
        monitor = GpuMonitor(CPU)
        assert (monitor.throttled_ns(), monitor.state({}, 1.0), monitor.energy_j()) == ({}, None, None)
