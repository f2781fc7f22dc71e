"""Which rounds decide: by what others took, and never by the times; and which processes never settled."""

from copy import deepcopy

import numpy as np
import pytest

from sdopt.record.records import IMPORTED, StudyResult
from sdopt.record.samples import Call, GpuState, Interference, Measurement, ShapeSamples
from sdopt.report.notes import caveats_of, notes_of
from sdopt.report.summary import summary_of
from sdopt.statistics.disturbance import (
    count_rounds,
    rounds_left_out,
    unsettled,
    worst_by_round,
)
from sdopt.statistics.figures import first_rows
from sdopt.statistics.pairs import paired_rounds
from sdopt.statistics.ratios import log_speedup
from tests.gate.test_judge import study, variant
from tests.records import disturb as disturb_all
from tests.records import known, reconfigure, retime, samples_of, timed


def measurement(*shared: float, times: list[float] | None = None) -> Measurement:
    calls = [Interference(share, 0.0) for share in shared]
    return Measurement(
        0,
        shapes=[
            ShapeSamples(calls=timed(times or [1.0] * len(shared), interference=calls))
        ],
    )


@pytest.mark.parametrize(
    ("worst", "left_out"),
    [
        ([0.0, 0.0, 0.0], []),
        ([0.5, 0.0, 0.0], []),  # too few yet: the disturbed one decides
        ([0.5, 0.0, 0.0, 0.0], [0]),
        (
            [0.019, 0.02, 0.0, 0.0],
            [3],
        ),  # clean ones are alike, and the first ones decide
        ([0.5, 0.3, 0.4, 0.0, 0.6], [0, 4]),  # the least disturbed ones fill up
    ],
)
def test_the_least_disturbed_rounds_decide(
    worst: list[float], left_out: list[int]
) -> None:
    assert rounds_left_out(worst, 3, 0.02) == left_out


def test_shares_add_up_over_the_causes_and_the_worst_process_counts() -> None:
    call = Call(1.0, interference=Interference(0.01, 0.02), gpu=GpuState(others=0.3))
    assert call.disturbed == pytest.approx(0.33)
    assert worst_by_round(
        [measurement(0.0, 0.1, 0.0).shapes[0], measurement(0.2, 0.0).shapes[0]]
    ) == [0.2, 0.1]


def disturb(result: StudyResult, place: int, share: float, left_out: bool) -> None:
    """As if others had disturbed one call of the baseline's first process in one round."""
    reconfigure(result, "protocol", interference=0.02)
    for samples in samples_of(*result.variants):
        quiet = Interference(0.001, 0.0, cpu_mhz=2000.0)
        retime(samples, interference=quiet, left_out=[place] if left_out else [])
    result.variant("baseline").measurements[0].shapes[0].calls[
        place
    ].interference = Interference(share, 0.0)


class TestStudy:
    def test_rounds_that_were_left_out_decide_nothing(
        self, result: StudyResult
    ) -> None:
        candidate, baseline = result.variant("bfloat16"), result.variant("baseline")
        before = known(log_speedup(candidate, baseline))
        disturb(result, 2, 0.5, left_out=True)
        for samples in samples_of(candidate):
            samples.calls[2].seconds *= 100
        assert paired_rounds(candidate, baseline, 0) == 5
        after = known(log_speedup(candidate, baseline))
        assert abs(after.mean - before.mean) < np.log(100) / 6
        for samples in samples_of(candidate):
            retime(samples, left_out=[])
        assert paired_rounds(candidate, baseline, 0) == 5

    def test_are_counted_and_noted(self, result: StudyResult) -> None:
        disturb(result, 2, 0.5, left_out=True)
        counts = known(count_rounds(result))
        assert (counts.timed, counts.disturbed, counts.left_out, counts.undecided) == (
            6,
            1,
            1,
            0,
        )
        said = "Disturbed by other work: 1 of 6 rounds (waiting for a core up to 50 %, limit 2 %); 1 left out."
        assert said in notes_of(summary_of(result))
        flat = first_rows(result)["baseline"].flat
        assert flat["interference/worst"] == 0.5
        assert flat["interference/mean"] == pytest.approx((0.5 + 17 * 0.001) / 18)
        assert flat["interference/calls_left_out"] == 3
        assert flat["interference/cpu_mhz"] == 2000.0

    def test_an_answer_without_a_clean_round_is_not_confirmed(
        self, result: StudyResult
    ) -> None:
        """A gate's study says so in the reasons of its verdicts."""
        doubt = "other programs disturbed every round (up to 30 % of a call)"
        one_round = deepcopy(result)
        disturb(one_round, 2, 0.3, left_out=False)
        assert doubt not in summary_of(one_round).sentence

        everywhere = disturb_all(result)
        assert summary_of(everywhere).sentence.endswith(f". Not confirmed: {doubt}.")


def test_a_call_at_a_further_shape_disturbs_the_round_of_all() -> None:
    result = study(variant("it"))
    for measurement in (
        measurement for row in result.variants for measurement in row.measurements
    ):
        retime(measurement.shapes[0], interference=Interference(0.0, 0.0))
        measurement.shapes.append(deepcopy(measurement.shapes[0]))
    result.variant("it").measurements[0].shapes[1].calls[2].interference = Interference(
        0.5, 0.0
    )
    counts = known(count_rounds(result))
    assert (counts.timed, counts.disturbed) == (8, 1)


NOISE = 1 + 0.01 * np.random.default_rng(0).standard_normal(12)


@pytest.mark.parametrize(
    ("trend", "way"),
    [
        (np.ones(12), ""),
        (np.linspace(1.5, 1.0, 12), "faster, from 1.4"),
        (np.linspace(1.0, 1.5, 12), "slower, from 1.0"),
        (np.linspace(1.0, 1.0001, 12) / NOISE, ""),  # certain, and too small to count
        ([2.0, *[1.0] * 11], ""),  # one slow call is no trend
    ],
)
def test_a_trend_of_the_calls_of_one_process_is_named(
    trend: np.ndarray, way: str
) -> None:
    candidate = variant("it")
    result = study(candidate)
    for samples in samples_of(*result.variants):
        retime(samples, NOISE)
    retime(candidate.measurements[-1].shapes[0], np.array(trend) * NOISE)
    found = unsettled(result)
    assert bool(found) == bool(way)
    told = [
        note
        for note in caveats_of(summary_of(result))
        if note.startswith("Never settled: ")
    ]
    assert len(told) == len(found)
    if way:
        assert found[0].startswith(
            f"process {len(candidate.measurements)} of it: its calls still became {way}"
        )
        assert "raise protocol.warmup" in told[0]
        result.design = IMPORTED
        assert "protocol.warmup" not in "".join(caveats_of(summary_of(result)))
