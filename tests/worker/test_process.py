"""The parent's handle on a worker: what it answers, and how it ends."""

import gc
import math
import os
import runpy
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

from sdopt.hardware.device import Device
from sdopt.options import Optimization
from sdopt.record.records import Status
from sdopt.scratch import CACHES
from sdopt.worker.child import ChildDiedError
from sdopt.worker.forkserver import start_fork_server
from sdopt.worker.host import (
    PipelineHost,
    changed_settings,
    describe_error,
    process_settings,
    variables,
)
from sdopt.worker.process import Worker, WorkerProcess, answers_of
from sdopt.worker.protocol import TimeUpError, WorkerError
from tests import sabotage
from tests.command import eventually, has_ended, workers
from tests.fixtures import CPU, Compose
from tests.records import known

CARD = Device("cuda", name="a GPU", attributes={"known": True})

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "[Errno 12] Cannot allocate memory",
    "Workspace can't be allocated, not enough memory",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 288230376151711744 bytes",
)
PERHAPS_MEMORY = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "GET was unable to find an engine to execute this computation",
    "CUDA error: all CUDA-capable devices are busy or unavailable",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "aoti_torch_empty_strided(2, size, stride, 5, 1, 0) API call failed at /tmp/cache/model.cpp, line 512",
    "/tmp/cuda_utils.so: failed to map segment from shared object",
)


Start = Callable[..., Worker]


@pytest.fixture
def start(variant: Compose, tmp_path: Path) -> Iterator[Start]:
    """Starts workers, which end with the test."""
    started: list[Worker] = []

    def worker(
        log: str = "log",
        device: Device = CPU,
        timeout_s: float = 60,
        option: Optimization | None = None,
        deadline: float = math.inf,
    ) -> Worker:
        places, of = (
            (tmp_path / log, tmp_path / "scratch"),
            variant("hardware.threads=1"),
        )
        if option is not None:
            options, choices = (
                {**of.optimizations, "own": option},
                {**of.choices, "own": "it"},
            )
            of = replace(of, optimizations=options, choices=choices)
        started.append(
            WorkerProcess(
                start_fork_server(), device, timeout_s, of, *places, deadline=deadline
            )
        )
        return started[-1]

    yield worker
    for each in started:
        each.kill()


@pytest.fixture
def worker(start: Start) -> Worker:
    return start()


class TestWorker:
    def test_is_a_group_of_its_own_and_ends_when_told(self, worker: Worker) -> None:
        worker.ask(PipelineHost.hello)
        assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
        assert os.getsid(worker.pid) != os.getsid(0)
        server = psutil.Process(worker.pid).parent()
        assert server is not None
        assert server.ppid() == os.getpid()
        worker.stop()
        assert has_ended(worker.pid)
        assert not worker.alive
        worker.stop()
        worker.kill()

    def test_answers_one_thing_after_the_other(self, worker: Worker) -> None:
        assert worker.ask(PipelineHost.prepare) > 0
        call = worker.ask(PipelineHost.time_once)
        assert call.seconds > 0
        assert call.gpu is None
        assert (call.compile_s, call.graphs, call.packages) == (0.0, 0, 0)
        assert call.memory is None
        memory = known(worker.ask(PipelineHost.time_once, memory=True).memory)
        assert memory.headline is not None

    def test_works_beside_others(self, start: Start) -> None:
        """Each answers for itself, also where another has ended; and all can be asked again."""
        workers = [start(f"log-{number}") for number in range(3)]
        requests = [partial(worker.begin, PipelineHost.hello) for worker in workers]
        assert answers_of(requests) == [None] * 3
        os.kill(workers[1].pid, signal.SIGKILL)
        for _ in range(2):
            first, killed, last = answers_of(requests)
            assert (first, type(killed), last) == (None, WorkerError, None)

    def test_survives_a_request_that_fails(
        self, worker: Worker, tmp_path: Path
    ) -> None:
        with pytest.raises(WorkerError, match="AttributeError") as caught:
            worker.ask(PipelineHost.time_once)  # before there is a pipeline
        assert caught.value.status is Status.FAILED
        assert caught.value.reason.startswith("AttributeError: ")
        assert "Traceback" in (tmp_path / "log").read_text()
        assert worker.alive
        assert worker.ask(PipelineHost.prepare) > 0

    @pytest.mark.parametrize(("device", "may_be_memory"), [(CPU, False), (CARD, True)])
    def test_says_which_signal_ended_it(
        self, start: Start, device: Device, may_be_memory: bool
    ) -> None:
        """A crash beside others on a card is tried alone; on a CPU it is one."""
        worker = start(device=device)
        worker.ask(PipelineHost.hello)
        os.kill(worker.pid, signal.SIGSEGV)
        with pytest.raises(WorkerError) as caught:
            worker.ask(PipelineHost.time_once)
        assert caught.value.status is Status.KILLED
        assert caught.value.reason == "killed by SIGSEGV during 'time_once'"
        assert caught.value.out_of_memory == may_be_memory

    def test_is_asked_nothing_after_the_end_of_the_study(self, start: Start) -> None:
        worker = start(deadline=time.monotonic() + 0.01)
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(TimeUpError):
                worker.ask(PipelineHost.prepare)
        assert time.monotonic() - began < 5

    def test_has_a_time_limit_for_each_answer(self, start: Start) -> None:
        worker = start(timeout_s=0.01)
        with pytest.raises(WorkerError) as caught:
            worker.ask(PipelineHost.prepare)
        assert caught.value.status is Status.TIMEOUT
        assert (
            caught.value.reason
            == "no answer to 'prepare' within 0.01 s (protocol.timeout_s)"
        )
        assert has_ended(worker.pid)


def test_the_kernel_ends_a_worker_before_the_process_that_starts_workers(
    start: Start,
) -> None:
    worker = start()
    worker.ask(PipelineHost.hello)
    assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip() == "500"


def test_a_worker_whose_server_was_killed_may_have_lacked_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()

    def receive(*_: object) -> None:
        raise ChildDiedError(
            255
        )  # what multiprocessing says where it can ask nobody how a process ended

    monkeypatch.setattr(worker, "receive", receive)
    with pytest.raises(WorkerError) as caught:
        worker.ask(PipelineHost.hello)
    assert caught.value.status is Status.KILLED
    assert caught.value.may_be_memory


class TestOptionThatGoesWrong:
    @pytest.mark.parametrize(
        ("option", "status", "reason"),
        [
            (
                sabotage.RaisesInApply(),
                Status.FAILED,
                "RuntimeError: a part is missing",
            ),
            (
                sabotage.KillsItself(),
                Status.KILLED,
                "killed by SIGKILL during 'prepare'; the kernel does so when memory runs out",
            ),
            (
                sabotage.Exits(),
                Status.FAILED,
                "ended with exit code 7 during 'prepare': no licence found",
            ),
            (sabotage.WantsTooMuch(), Status.OUT_OF_MEMORY, "RuntimeError: "),
        ],
    )
    def test_is_the_reason_in_a_line(
        self, start: Start, option: Optimization, status: Status, reason: str
    ) -> None:
        with pytest.raises(WorkerError) as caught:
            start(option=option).ask(PipelineHost.prepare)
        assert caught.value.status is status
        assert caught.value.reason.startswith(reason)
        assert "\n" not in caught.value.reason

    def test_what_it_says_in_any_way_is_in_the_log_and_what_it_started_ends(
        self, start: Start, tmp_path: Path
    ) -> None:
        others = workers()
        worker = start(option=sabotage.Talks())
        worker.ask(PipelineHost.prepare)
        worker.stop()
        log = (tmp_path / "log").read_text()
        for said in ("print", "stderr", "write", "a child", "a child to stderr"):
            assert f"said by {said}\n" in log or f"said to {said}\n" in log
        assert eventually(lambda: set(workers()) <= set(others))

    def test_finds_what_an_earlier_worker_of_its_log_compiled_and_no_other(
        self, start: Start, tmp_path: Path
    ) -> None:
        for log in ("a", "a", "b"):
            worker = start(log, option=sabotage.UsesTheCache())
            worker.ask(PipelineHost.prepare)
            worker.stop()
        for log, states in (("a", ["cold", "warm"]), ("b", ["cold"])):
            said = [
                line.split()
                for line in (tmp_path / log).read_text().splitlines()
                if "_CACHE_DIR: " in line
            ]
            for name in CACHES:
                found = [
                    (state, Path(file))
                    for variable, state, file in said
                    if variable == f"{name}:"
                ]
                assert [state for state, _ in found] == states
                assert all(
                    file.is_relative_to(tmp_path / "scratch" / log) for _, file in found
                )

    def test_evidence_that_is_no_json_becomes_text(self, start: Start) -> None:
        worker = start(option=sabotage.OddEvidence())
        worker.ask(PipelineHost.prepare)
        [found] = [
            evidence
            for evidence in worker.ask(PipelineHost.prove).evidence
            if evidence.axis == "own"
        ]
        assert found.engaged
        assert "lambda" in found.facts["fact"]


class TestVariables:
    @pytest.mark.parametrize("name", CACHES)
    def test_a_users_folder_of_kernels_is_left(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(name, raising=False)
        assert Path(variables(CARD, tmp_path)[name]).is_relative_to(tmp_path)
        monkeypatch.setenv(name, "/mine")
        assert variables(CARD, tmp_path)[name] == "/mine"
        monkeypatch.setenv(name, "/tmp/torchinductor_me/triton")  # PyTorch's own
        assert Path(variables(CARD, tmp_path)[name]).is_relative_to(tmp_path)

    @pytest.mark.parametrize(("device", "starts"), [(CPU, False), (CARD, True)])
    def test_sdnq_on_a_cpu_leaves_cards_alone(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        device: Device,
        starts: bool,
    ) -> None:
        """Its module that asks for the card is executed as beside one."""
        found = find_spec("sdnq")
        if found is None or found.origin is None:
            pytest.skip("sdnq")
        asked: list[torch.device] = []

        def capability(card: torch.device) -> tuple[int, int]:
            asked.append(card)
            return 9, 0

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.delenv("SDNQ_DEVICE", raising=False)
        for name, value in (
            {"SDNQ_USE_TORCH_COMPILE": "0"} | variables(device, tmp_path)
        ).items():
            monkeypatch.setenv(name, value)
        common = runpy.run_path(str(Path(found.origin).with_name("common.py")))
        assert (common["torch_backend"], bool(asked)) == (
            ("cuda", True) if starts else ("cpu", False)
        )


@pytest.mark.parametrize(
    ("error", "status", "memory"),
    [
        *((RuntimeError(text), Status.OUT_OF_MEMORY, True) for text in OUT_OF_MEMORY),
        *((RuntimeError(text), Status.FAILED, True) for text in PERHAPS_MEMORY),
        (ValueError("a\n  part is missing"), Status.FAILED, False),
    ],
)
def test_an_error_means_memory_or_may_mean_it(
    error: Exception, status: Status, memory: bool
) -> None:
    """Alone a variant that may mean memory has failed; beside others it is tried alone."""
    found = describe_error(error)
    assert (found.status, found.out_of_memory) == (status, memory)
    assert found.reason == f"{type(error).__name__}: {' '.join(str(error).split())}"
    around = RuntimeError("the compiler gave up")
    around.__cause__ = MemoryError()
    assert describe_error(around).status is Status.OUT_OF_MEMORY


def test_a_log_that_cannot_be_opened_is_the_reason(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start("gone/log")
    with pytest.raises(WorkerError, match="gone/log: No such file or directory"):
        worker.ask(PipelineHost.hello)
    worker.stop()
    assert "Traceback" not in capfd.readouterr().err


def test_what_changed_is_named_with_both_values() -> None:
    before, cores = process_settings(), os.sched_getaffinity(0)
    gc.disable()
    torch.set_default_dtype(torch.float64)
    os.sched_setaffinity(0, {min(cores)})
    try:
        garbage, dtype, *fewer = changed_settings(before)
    finally:
        gc.enable()
        torch.set_default_dtype(torch.float32)
        os.sched_setaffinity(0, cores)
    assert garbage == "Python's garbage collection (True before, False now)"
    assert dtype == "PyTorch's default type (torch.float32 before, torch.float64 now)"
    named = [said.startswith("the cores that the process may use") for said in fewer]
    assert named == [True] * (len(cores) > 1)
