"""Memory in sandboxes that keep no high-water mark, of graphs held for replays, and of what a worker started."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from sdopt.hardware.device import Device
from sdopt.measure import memory as memory_module
from sdopt.measure.memory import PeakMemory, StagePeaks, graph_pools_gib
from sdopt.measure.processes import files_in_memory, held_elsewhere, started_by
from sdopt.record.files import parse_result, to_json
from sdopt.record.records import StudyResult
from sdopt.record.samples import Memory
from sdopt.report.summary import summary_of
from sdopt.report.tables import ranking, stage_memory_table
from sdopt.statistics.comparing import compare
from sdopt.statistics.measures import MEMORY_RATIO
from tests.fixtures import CPU

MIB = 2**20
SNAPSHOT = json.loads((Path(__file__).parent / "snapshot.json").read_text())
"""In the form of `torch.cuda.memory_snapshot()`: a common segment, two of a graph, one of a user's pool, one of
another device."""


class TestStages:
    def test_the_peak_of_each_is_its_own(self) -> None:
        peaks = StagePeaks(PeakMemory(CPU))
        for stage in ("text_encoder", "denoiser", "vae_decoder", "denoiser"):
            peaks.enter(stage)
            if stage == "denoiser":
                # Of its own pages: an allocator may hand out memory that the process still holds.
                with mmap(-1, 96 * MIB) as held:
                    held[::4096] = b"x" * len(held[::4096])
            peaks.leave(stage, None)
        if not peaks.gib:
            pytest.skip("the kernel keeps no high-water mark that can be reset here")
        above = peaks.gib["denoiser"] - max(
            peaks.gib["text_encoder"], peaks.gib["vae_decoder"]
        )
        assert 80 / 1024 < above < 200 / 1024

    def test_a_page_has_them(self, result: StudyResult) -> None:
        for variant in result.variants:
            for measurement in variant.measurements:
                measurement.stages_gib = {
                    "text_encoder": 2.5,
                    "denoiser": 0.25 + measurement.replicate,
                }
        table = stage_memory_table(summary_of(parse_result(to_json(result))))
        assert table is not None
        assert table.headings == ("variant", "peak in text encoder", "peak in denoiser")
        most = max(
            measurement.replicate
            for measurement in result.variant(result.baseline).measurements
        )
        assert ("baseline", "2.50 GiB", f"{most + 0.25:.2f} GiB") in table.rows

    @pytest.mark.parametrize("peaks", [{}, {"text_encoder": 2.5, "denoiser": 2.5}])
    def test_without_any_or_of_what_was_held_before_there_is_no_table(
        self, result: StudyResult, peaks: dict[str, float]
    ) -> None:
        for variant in result.variants:
            for measurement in variant.measurements:
                measurement.stages_gib = peaks
        assert stage_memory_table(summary_of(result)) is None


class TestSandbox:
    @pytest.fixture(params=["no clear_refs", "no VmHWM"])
    def sandboxed(
        self,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> PeakMemory:
        if request.param == "no clear_refs":
            monkeypatch.setattr(
                memory_module, "_CLEAR", tmp_path / "none" / "clear_refs"
            )
        else:
            status = tmp_path / "status"
            status.write_text("VmSize:\t 9000 kB\nVmRSS:\t 4000 kB\n")
            monkeypatch.setattr(memory_module, "_STATUS", status)
        return PeakMemory(CPU)

    def test_leaves_the_peak_of_the_host_empty(self, sandboxed: PeakMemory) -> None:
        sandboxed.loaded()
        sandboxed.watch()
        found = sandboxed.read()
        assert found.process_peak_gib is None
        assert found.headline is None

    def test_a_study_without_peaks_has_no_ratios_and_a_table(
        self, result: StudyResult
    ) -> None:
        for row in result.variants:
            for measured in row.measurements:
                measured.shapes[0].memory = measured.memory_after = Memory(0.1, None)
        compare(result)
        result = parse_result(to_json(result))
        assert (
            MEMORY_RATIO.log_ratio(
                result.variant("bfloat16"), result.variant("baseline")
            )
            is None
        )
        assert all(row.memory is None for row in summary_of(result).rows)
        assert "memory" not in ranking(summary_of(result)).headings


def test_a_peak_of_a_card_that_the_program_resets_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the worker's own card: in another thread CUDA's current device is the first one."""
    peaks, looked = {0: 0, 1: 300 * MIB}, threading.Semaphore(0)

    def peak(index: int | None = None) -> int:
        looked.release()
        current = 1 if threading.current_thread() is threading.main_thread() else 0
        return peaks[current if index is None else index]

    for name in ("memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(memory_module, "process_gib", lambda device, pids: None)
    memory = PeakMemory(Device("cuda", 1))
    memory.watch()
    # When it looks for the second time, it has kept what it saw first.
    assert all(looked.acquire(timeout=60) for _ in range(2))
    peaks[1] = 10 * MIB
    assert memory.read().cuda_peak_allocated_gib == 300 * MIB / 2**30


@pytest.mark.parametrize(("counted", "held"), [(64 / 1024, 81), (None, 17)])
def test_what_children_hold_on_a_card_counts_from_call_to_call(
    monkeypatch: pytest.MonkeyPatch, counted: float | None, held: float
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 17 * MIB)
    monkeypatch.setattr(memory_module, "started_by", lambda pid: [7])
    monkeypatch.setattr(
        memory_module,
        "process_gib",
        lambda device, pids: counted if pids == [7] else None,
    )
    assert PeakMemory(Device("cuda")).held_gib() == pytest.approx(held * MIB / 2**30)


class TestGraphs:
    def test_pools_count_beside_what_is_allocated(self) -> None:
        assert graph_pools_gib(SNAPSHOT, 0) == pytest.approx(
            (256 + 1.5 + 128) * MIB / 2**30
        )
        assert graph_pools_gib(SNAPSHOT, 1) == pytest.approx(64 * MIB / 2**30)
        assert (
            graph_pools_gib([s for s in SNAPSHOT if s["segment_pool_id"] == [0, 0]], 0)
            == 0
        )

    @pytest.mark.parametrize(
        ("before", "peak", "pools"),
        [
            pytest.param(SNAPSHOT, 20, 385.5, id="captured before"),
            # The activations of the capture were allocated in its pool, and are counted.
            pytest.param(SNAPSHOT[:1], 450, 0, id="captured meanwhile"),
            pytest.param(SNAPSHOT[:2], 200, 256, id="one more captured meanwhile"),
            pytest.param(
                SNAPSHOT[:1],
                350,
                52.5,
                id="several captured meanwhile, one after the other",
            ),
        ],
    )
    def test_are_part_of_the_figure_that_ratios_are_made_of(
        self, monkeypatch: pytest.MonkeyPatch, before: Any, peak: int, pools: float
    ) -> None:
        for name, amount in (
            ("memory_allocated", 17),
            ("max_memory_allocated", peak),
            ("max_memory_reserved", 420),
        ):
            monkeypatch.setattr(
                torch.cuda, name, lambda _index=0, amount=amount: amount * MIB
            )
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: before)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(memory_module, "process_gib", lambda device, pids: None)
        monkeypatch.setattr(memory_module, "_elsewhere", [4 * MIB, -1 * MIB])
        memory = PeakMemory(Device("cuda"))
        memory.loaded()
        memory.watch()
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SNAPSHOT)
        found = memory.read()
        assert found.cuda_peak_allocated_gib == peak * MIB / 2**30
        assert found.headline is not None
        name, gib = found.headline
        assert name == "peak_allocated_gib"
        assert gib == pytest.approx((peak + pools + 3) * MIB / 2**30)


HOLDING = """
import time
open("/proc/self/comm", "wb").write(b"\\xc3\\xbcberwachungsd\\xc3\\xbc")  # cut within the last letter
held = b"x" * (64 << 20)
print(flush=True)
time.sleep(60)
"""


@contextmanager
def running(program: str) -> Iterator[int]:
    """A child in a session of its own, once it has printed a line."""
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout
            child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


def test_a_child_counts_that_left_the_group() -> None:
    before = held_elsewhere()
    with running(HOLDING) as pid:
        assert pid in started_by(os.getpid())
        assert held_elsewhere() - before == pytest.approx(64 / 1024, abs=0.02)


def test_files_below_a_folder_in_memory_count() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "there").write_bytes(b"x" * (1 << 20))
        assert files_in_memory(Path(folder)) == pytest.approx(1 / 1024)
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        (Path(folder) / "there").write_bytes(b"x" * (1 << 20))
        assert files_in_memory(Path(folder)) == 0


def test_a_name_that_the_kernel_cut_in_the_middle_of_a_character_stops_nothing(
    tmp_path: Path,
) -> None:
    for pid, name in ((7, b"\xc3\xbcberwachungsd\xc3"), (8, b"plain")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_bytes(
            b"%d (%s) S %d 7 7" % (pid, name, pid - 1)
        )
    assert started_by(7, tmp_path) == [8]
    assert started_by(7, tmp_path / "none") == []
