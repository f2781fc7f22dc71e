"""Each timed call knows its round, whatever its process has measured before."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sdopt.record.samples import Measurement
from sdopt.study.rounds import Rounds
from sdopt.worker.protocol import TimedCall


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """Rounds of a session that does nothing."""
    meter = SimpleNamespace(stop=lambda _seconds: None, off="")
    monkeypatch.setattr("sdopt.study.rounds.InterferenceMeter", lambda _pid: meter)
    timing = object.__new__(Rounds)

    def nothing(*_: object) -> None:
        pass

    progress = SimpleNamespace(phase=nothing)
    session: Any = SimpleNamespace(
        rounds=5, progress=progress, next_batch=nothing, note_call=nothing
    )
    images: Any = SimpleNamespace(wanted=False, keep=lambda *_: False)
    timing._session, timing._study = session, SimpleNamespace(warmup=0)  # type: ignore[assignment]
    timing._timed_images = images
    return timing


def test_a_process_that_joins_late_times_the_round_of_the_others(
    rounds: Rounds,
) -> None:
    answer = TimedCall(0.5, None, 1.0)
    worker = SimpleNamespace(pid=os.getpid(), ask=lambda *_, **_named: answer)
    process: Any = SimpleNamespace(
        row=SimpleNamespace(name="late"),
        measurement=Measurement(0),
        given=[],
        worker=worker,
        images=[],
    )
    for number in (3, 4):
        rounds._time(process, 0, number)
    assert [call.round for call in process.measurement.shapes[0].calls] == [2, 3]
