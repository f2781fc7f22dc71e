"""Rounds that other work on the machine disturbs: timed again, left out on all sides, and counted."""

from pathlib import Path

import pytest

from sdopt.analysis.disturbance import count_rounds
from sdopt.results.records import StudyResult
from sdopt.results.samples import Interference, Measurement
from sdopt.study.designs import CONTROL
from tests.command import SMOKE, sdopt

# Of a shorter call what the parent process waits for the worker would be more than 2 %.
STUDY = (*SMOKE, "workload.size=64", "protocol.stage_calls=0", "protocol.rounds=2")


class Meter:
    """Counts as the kernel would that took half of the processor from some calls of a study, by their number."""

    disturbed: frozenset[int] = frozenset()
    off = ""
    calls = 0

    def __init__(self, pid: int) -> None:
        assert pid > 1

    def stop(self, seconds: float) -> Interference | None:
        assert seconds > 0
        type(self).calls += 1
        return None if self.off else Interference(0.5 if self.calls in self.disturbed else 0.0, 0.0)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> type[Meter]:
    made = type("MeterOfOneTest", (Meter,), {})
    monkeypatch.setattr("sdopt.study.rounds.InterferenceMeter", made)
    return made


def left_out(measurement: Measurement) -> list[int]:
    return [call.round for call in measurement.shapes[0].calls if call.left_out]


class TestDisturbedRounds:
    def test_are_timed_again_and_left_out_on_all_sides(self, tmp_path: Path, meter: type[Meter]) -> None:
        meter.disturbed = frozenset({2})  # in the first of two rounds of two processes, the baseline and its control
        found = sdopt(tmp_path, "run", *STUDY, "protocol.interference=0.02")
        assert found.code == 0, found.shown
        measured = [measurement for row in found.result.variants for measurement in row.measurements]
        assert [len(m.shapes[0].latency_s) for m in measured] == [3, 3]
        assert [left_out(m) for m in measured] == [[0], [0]]
        assert all(m.shapes[0].deciding_s == m.shapes[0].latency_s[1:] for m in measured)
        assert "Disturbed by other work: 1 of 3 rounds" in found.shown
        assert found.result.comparisons[0].shapes[0].speedup is not None
        assert found.result.comparisons[0].shapes[0].speedup.n == 2

    def test_are_timed_again_no_more_often_than_allowed(self, tmp_path: Path, meter: type[Meter]) -> None:
        meter.disturbed = frozenset(range(100)) - {3, 4}  # only the second round is clean
        found = sdopt(tmp_path, "run", *STUDY, "protocol.interference=0.02", "protocol.extra_rounds=2")
        assert found.code == 0, found.shown
        measured = [measurement for row in found.result.variants for measurement in row.measurements]
        assert [(len(m.shapes[0].calls), left_out(m)) for m in measured] == [(4, [2, 3])] * 2
        counts = count_rounds(found.result)
        assert counts is not None
        assert (counts.timed, counts.disturbed, counts.left_out, counts.undecided) == (4, 3, 2, 1)

    def test_of_a_block_are_its_own(self, tmp_path: Path, meter: type[Meter]) -> None:
        meter.disturbed = frozenset({1})  # of the baseline, before the first block
        found = sdopt(tmp_path, "run", *STUDY, "protocol.interference=0.02", "protocol.schedule=blocks")
        assert found.code == 0, found.shown
        [baseline], [control] = (found.result.variant(name).measurements for name in ("baseline", CONTROL))
        assert left_out(baseline) == [0]
        assert left_out(control) == []
        assert control.shapes[0].latency_before_s == baseline.shapes[0].latency_s[1:3]
        assert len(baseline.shapes[0].latency_s) == 5

    def test_are_not_known_where_the_kernel_does_not_count(self, tmp_path: Path, meter: type[Meter]) -> None:
        meter.off = "interference is not recorded here"
        found = sdopt(tmp_path, "run", *STUDY, "protocol.interference=0.02")
        assert found.code == 0, found.shown
        measured = [measurement for row in found.result.variants for measurement in row.measurements]
        assert [[call.interference for call in m.shapes[0].calls] for m in measured] == [[None] * 2] * 2
        assert found.shown.count("interference is not recorded here") == 1
        assert found.result.environment.warnings == ["interference is not recorded here"]


def test_what_disturbs_each_call_is_recorded(result: StudyResult) -> None:
    measured = [measurement for row in result.variants for measurement in row.measurements]
    assert measured
    for measurement in measured:
        assert [call.round for call in measurement.shapes[0].calls] == [*range(6)]
        for call in measurement.shapes[0].calls:
            assert call.interference is not None
            assert 0 <= call.interference.waited <= 1
            assert 0 <= call.interference.stolen <= 1
