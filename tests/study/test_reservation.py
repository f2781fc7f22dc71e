"""A study waits for its device, or takes another that is free."""

from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.experiment import Experiment
from sdopt.hardware.device import Device
from sdopt.locks import reserve
from sdopt.schema import Hardware
from sdopt.study.timeline import Timeline
from sdopt.worker.forkserver import StartContext, start_fork_server
from sdopt.worker.machine import Machine
from tests.command import SMOKE, sdopt
from tests.fakes import fake_workers
from tests.fixtures import Composers
from tests.test_locks import elsewhere


def machine(index: int) -> Machine:
    return Machine(
        Device("cuda", index, f"card {index}", attributes={"uuid": f"GPU-{index}"}),
        {},
        True,
        False,
        cards=2,
    )


def test_takes_a_card_that_is_free(
    composer: Composers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine(0), machine(1)
    monkeypatch.setattr(
        "sdopt.experiment.find_machine", lambda context, *_: (second, context)
    )
    experiment = Experiment(composer([]), tmp_path, start_fork_server(), Timeline())
    with experiment.reserved(first) as found:
        assert found is first
        with experiment.reserved(first) as other:
            assert other is second
    with reserve(first.device, "mine") as holder:
        assert holder == ""


def test_passes_over_a_card_that_cannot_be_used(
    composer: Composers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study can still wait for the first one."""

    def find(
        context: StartContext, hardware: Hardware, _sheets: object
    ) -> tuple[Machine, StartContext]:
        if hardware.device == "cuda:1":
            raise UsageError("hardware.device=cuda:1: CUDA does not start")
        return machine(int(hardware.device.removeprefix("cuda:"))), context

    monkeypatch.setattr("sdopt.experiment.find_machine", find)
    experiment = Experiment(composer([]), tmp_path, start_fork_server(), Timeline())
    assert experiment._other_cards(replace(machine(0), cards=3)) == [machine(2)]


def test_the_command_says_for_whom_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with elsewhere("reserve(Device('cpu'), 'outputs/runs/theirs')") as other:
        say = Experiment._say_waiting

        def waiting(self: Experiment, holder: str, machine: Machine) -> None:
            say(self, holder, machine)
            other.kill()

        monkeypatch.setattr("sdopt.experiment._POLL_S", 0.02)
        monkeypatch.setattr(Experiment, "_say_waiting", waiting)
        with fake_workers():
            waited = sdopt(tmp_path, "run", *SMOKE, "protocol.rounds=1")
    assert waited.code == 0
    assert (
        f"waiting for outputs/runs/theirs (process {other.pid}), which measures on"
        in waited.err
    )
    with elsewhere("reserve(Device('cpu'), 'outputs/runs/theirs')"), fake_workers():
        beside = sdopt(
            tmp_path, "run", *SMOKE, "protocol.rounds=1", "hardware.exclusive=false"
        )
    assert (beside.code, "waiting for" in beside.err) == (0, False)


def test_a_tracker_that_refuses_is_told_before_the_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with elsewhere("reserve(Device('cpu'), 'outputs/runs/theirs')"), fake_workers():
        told = sdopt(
            tmp_path,
            "run",
            *SMOKE,
            "tracking=mlflow",
            "tracking.uri=sqlite:///file/mlflow.db",
        )
    assert (told.code, "waiting for" in told.err) == (2, False)
    assert "cannot be written" in told.err
