"""What NVML says of a card, or leaves unanswered; cards that cannot be used: an old driver, a build without kernels."""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sdopt.errors import UsageError
from sdopt.hardware import probe
from sdopt.hardware.device import Device
from sdopt.hardware.nvml import GpuMonitor, describe_gpu, process_gib
from sdopt.hardware.probe import list_cards, probe_device
from sdopt.record.samples import GpuState
from tests.fixtures import CPU

UUID = "8f1f5ab1-23f7-4b4c-b4a5-7d3a0a6f1c55"


class NVMLError(Exception):
    value = 999


class NVMLLibraryMismatchError(Exception):
    """What pynvml raises where the driver's library lacks the version of a function that it calls."""


class Nvml(ModuleType):
    """NVML of one card.

    Its `answers` go by the end of a function's name, as in `PowerUsage` or `ClockInfo:1`.
    Everything else raises NVMLError; an answer that is an exception is raised.
    """

    NVMLError, NVMLLibraryMismatchError = NVMLError, NVMLLibraryMismatchError
    NVML_ERROR_NOT_FOUND = 6
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **answers: Any) -> None:
        super().__init__("pynvml")
        self.answers = answers
        self.known = {f"GPU-{UUID}": "card"}

    def nvmlInit(self) -> None:  # noqa: N802 - as NVML calls it
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.known:
            raise NVMLError(uuid)
        return self.known[uuid]

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:  # noqa: N802
        return handle == "slice"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        assert handle == "slice"
        return "card"

    def __getattr__(self, name: str) -> Any:
        def answer(_handle: str = "", *arguments: Any) -> Any:
            short = name.removeprefix("nvmlDeviceGet").removeprefix("nvml")
            found = self.answers.get(
                ":".join([short, *map(str, arguments)]), self.answers.get(short)
            )
            if found is None:
                raise NVMLError(name)
            if isinstance(found, Exception):
                raise found
            return found

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return answer


def install(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, uuid: str = UUID) -> None:
    """Puts NVML in place, and a card with a UUID as PyTorch gives it."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid)
    )


CARD = Device("cuda", name="a card")
GIB = 2**30


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class TestHandle:
    @pytest.mark.parametrize("prefix", ["", "GPU-", "MIG-"])
    def test_of_a_card_whatever_prefix_pytorch_gives(
        self, monkeypatch: pytest.MonkeyPatch, prefix: str
    ) -> None:
        own = process(os.getpid(), 3 * GIB)
        install(
            monkeypatch,
            Nvml(ComputeRunningProcesses=[process(1, GIB), own]),
            prefix + UUID,
        )
        assert process_gib(CARD, [os.getpid()]) == 3.0

    def test_of_a_slice_has_a_prefix_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml = Nvml(
            ComputeRunningProcesses=[process(os.getpid(), 2 * GIB)],
            TotalEnergyConsumption=5000,
        )
        nvml.known = {f"MIG-{UUID}": "slice"}
        install(monkeypatch, nvml)
        assert process_gib(CARD, [os.getpid()]) == 2.0
        assert describe_gpu(CARD)["mig_slice"] is True

    def test_that_nvml_does_not_know_answers_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml = Nvml(ComputeRunningProcesses=[process(os.getpid(), None)])
        install(monkeypatch, nvml)
        assert process_gib(CARD, [os.getpid()]) is None
        nvml.known = {}
        assert process_gib(CARD, [os.getpid()]) is None
        assert describe_gpu(CARD) == {}
        assert GpuMonitor(CARD).state({}, 1.0) is None


def test_settings_are_told_with_the_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [process(os.getpid(), GIB), process(7, 4 * GIB), process(8, None)]
    install(
        monkeypatch,
        Nvml(
            ComputeMode=3,
            EnforcedPowerLimit=450000,
            ComputeRunningProcesses=others,
            EccMode=(1, 1),
        ),
    )
    assert describe_gpu(CARD) == {
        "mig_slice": False,
        "compute_mode": "exclusive process",
        "power_limit_w": 450.0,
        "ecc": True,
        "processes": [{"pid": 7, "gib": 4.0}, {"pid": 8, "gib": None}],
    }


class TestMonitor:
    def state(
        self, nvml: Nvml, before: dict[str, int], seconds: float = 1.0
    ) -> GpuState:
        found = GpuMonitor(CARD).state(before, seconds)
        assert found is not None
        return found

    def test_reads_clocks_temperature_and_power(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clocks = {"ClockInfo:1": 1980, "ClockInfo:2": 3201, "Temperature:0": 61}
        nvml = Nvml(
            PowerUsage=612345,
            EnforcedPowerLimit=700000,
            CurrentClocksThrottleReasons=0x1,
        )
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

    @pytest.mark.parametrize(
        ("ns", "throttled"), [(0, []), (5_000_000, []), (20_000_000, ["temperature"])]
    )
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
        samples = [
            SimpleNamespace(pid=pid, smUtil=share, timeStamp=at)
            for pid, share, at in used
        ]
        nvml = Nvml(
            ComputeRunningProcesses=[process(pid, GIB) for pid in running],
            ProcessUtilization=samples,
        )
        install(monkeypatch, nvml)
        assert self.state(nvml, {}).others == others

    def test_counts_energy_of_a_whole_card_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml = Nvml(TotalEnergyConsumption=5250)
        install(monkeypatch, nvml)
        assert GpuMonitor(CARD).energy_j() == 5.25
        nvml.known = {f"MIG-{UUID}": "slice"}
        assert GpuMonitor(CARD).energy_j() is None

    def test_of_a_driver_that_lacks_a_function_reads_the_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml = Nvml(
            PowerUsage=100_000, ComputeRunningProcesses=NVMLLibraryMismatchError()
        )
        install(monkeypatch, nvml)
        found = self.state(nvml, {})
        assert (found.power_w, found.others) == (100.0, None)
        assert process_gib(CARD, [os.getpid()]) is None

    def test_of_a_card_that_is_lost_fails_when_it_is_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        assert (monitor.throttled_ns(), monitor.state({}, 1.0), monitor.energy_j()) == (
            {},
            None,
            None,
        )


TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


def one_card(monkeypatch: pytest.MonkeyPatch, properties: object) -> None:
    """A card that NVML counts, as with PYTORCH_NVML_BASED_CUDA_CHECK; its properties, or the error on asking."""

    def asked(index: int) -> object:
        if isinstance(properties, Exception):
            raise properties
        return properties

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)


@pytest.mark.parametrize(
    "error", [RuntimeError(TOO_OLD), AssertionError("libcudart functions unavailable")]
)
def test_cuda_that_does_not_start_says_why_and_leaves_auto_the_cpu(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    one_card(monkeypatch, error)
    with pytest.raises(UsageError) as caught:
        probe_device("cuda:0")
    [problem] = caught.value.problems
    assert problem.startswith(
        f"hardware.device=cuda:0: CUDA does not start: {str(error)[:40]}"
    )
    found = probe_device("auto")
    assert (found.type, found.name) == ("cpu", CPU.name)
    assert found.warning.startswith("hardware.device=auto: CUDA does not start: ")
    assert found.warning.endswith("this runs on the CPU instead")
    [card] = list_cards()
    assert card.name.startswith("a card that cannot be used: CUDA does not start: ")
    assert card.capability is None


def test_a_card_without_kernels_leaves_auto_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_card(monkeypatch, SimpleNamespace(name="Tesla P100", major=6, minor=0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    assert (
        "has kernels for sm_75, sm_90, and Tesla P100 has compute capability 6.0"
        in probe_device("auto").warning
    )
    with pytest.raises(
        UsageError, match=r"hardware\.device=cuda: this PyTorch .* a newer CUDA"
    ):
        probe_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("hidden", "cards", "warned"),
    [(False, 1, True), (True, 1, False), (False, 0, False)],
)
def test_a_card_that_pytorch_has_no_cuda_for_is_named(
    monkeypatch: pytest.MonkeyPatch, hidden: bool, cards: int, warned: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(DeviceGetCount=cards, Count=cards))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ("install PyTorch for CUDA" in probe_device("auto").warning) == warned


def test_what_cudnn_takes_is_asked_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest head differs by card, cuDNN and PyTorch."""
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(
        torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype)
    )
    for largest, found in ((256, 256), (192, 160), (128, 128), (64, 0)):
        monkeypatch.setattr(
            torch.backends.cuda,
            "can_use_cudnn_attention",
            lambda params, largest=largest: params.query.shape[-1] <= largest,
        )
        assert probe._largest_cudnn_head(0) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [("_built_with_cuda = False", False), ("_built_with_cuda = True", True)],
)
def test_an_xformers_for_another_cuda_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, found: bool
) -> None:
    """It can be imported, and refuses every call."""
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "xformers" / "ops" / "fmha"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent, folder.parent.parent):
        (each / "__init__.py").touch()
    (folder / "common.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert probe._xformers_has_kernels() is found
    (folder / "common.py").write_text("raise OSError('no such symbol')")
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    assert probe._xformers_has_kernels() is False
