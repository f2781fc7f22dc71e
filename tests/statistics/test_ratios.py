"""Ratios and intervals against hand computation, scipy and simulation."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sdopt.gate.paying import holm
from sdopt.record.comparisons import Comparison, Interval
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Status, VariantResult
from sdopt.record.samples import Measurement, Memory, ShapeSamples
from sdopt.statistics.comparing import compare
from sdopt.statistics.ratios import (
    LogRatio,
    floor,
    latency,
    log_memory_ratio,
    log_speedup,
    log_tail,
    speedup_drift,
)
from tests.records import known, reconfigure, recorded, timed


def variant(
    *processes: Any, name: str = "variant", role: str = "variant", **measured: Any
) -> VariantResult:
    """A measured variant: one sequence of latencies for each process."""
    measurements = [
        Measurement(
            number,
            shapes=[ShapeSamples(calls=timed([float(s) for s in samples]), **measured)],
        )
        for number, samples in enumerate(processes)
    ]
    return VariantResult(
        name,
        role,
        {},
        [],
        RecordedConfig(),
        status=Status.OK,
        measurements=measurements,
    )


def log_normal(
    seed: int, rounds: int, mean: float = 0.1, spread: float = 0.05
) -> np.ndarray:
    return mean * np.exp(spread * np.random.default_rng(seed).standard_normal(rounds))


class TestLatency:
    @pytest.mark.parametrize(
        ("estimator", "expected"),
        [("median", 3.0), ("mean", 4.0), ("last", 10.0), ("min", 1.0)],
    )
    def test_estimators(self, estimator: str, expected: float) -> None:
        found = known(latency(variant([1, 2, 3, 4, 10]), estimator, 0.95))
        assert found.estimate == expected
        assert found.n == 5

    def test_of_several_processes_is_the_geometric_mean_of_each_with_a_t_interval(
        self,
    ) -> None:
        found = known(latency(variant([1, 1, 9], [3, 3, 3, 3], [2, 2]), "median", 0.9))
        logs = np.log([1, 3, 2])
        low, high = np.exp(
            stats.t.interval(0.9, 2, loc=logs.mean(), scale=stats.sem(logs))
        )
        assert (found.estimate, found.low, found.high) == pytest.approx(
            (6 ** (1 / 3), low, high)
        )
        assert (found.confidence, found.n, found.unit) == (0.9, 3, "process")


def speedup(
    candidate: VariantResult, reference: VariantResult, confidence: float
) -> Interval:
    return known(log_speedup(candidate, reference)).interval(confidence)


class TestSpeedup:
    def test_is_a_geometric_mean_of_paired_rounds(self) -> None:
        mine, other = log_normal(1, 8), log_normal(2, 8, mean=0.2)
        found = speedup(variant(mine), variant(other), 0.9)
        assert found.estimate == pytest.approx(stats.gmean(other / mine))
        assert (found.n, found.unit) == (8, "round")

    def test_rounds_of_one_number_belong_together(self) -> None:
        """The machine slows from round to round; a call of the candidate that is lacking shifts no pair."""
        machine = np.array([1.0, 2.0, 4.0, 8.0])
        candidate, reference = variant(machine / 2), variant(machine)
        del candidate.measurements[0].shapes[0].calls[1]
        found = speedup(candidate, reference, 0.95)
        assert found.estimate == pytest.approx(2.0)
        assert found.n == 3
        tail = known(log_tail(candidate, reference)).interval(0.95)
        assert tail.estimate == pytest.approx(0.5)

    @pytest.mark.parametrize("processes", [1, 2])
    def test_rounds_of_too_few_processes_give_no_interval(self, processes: int) -> None:
        """However many rounds: what the next process would show is not among them."""
        mine, other = (
            [log_normal(s + seed, 1000) for s in range(processes)] for seed in (0, 10)
        )
        found = speedup(variant(*mine), variant(*other), 0.95)
        assert (found.low, found.high, found.confidence) == (None, None, None)

    def test_one_process_is_one_replicate(self) -> None:
        mine, other = (
            [log_normal(s, 20) for s in seeds] for seeds in ((0, 1, 2), (3, 4, 5))
        )
        found = speedup(variant(*mine), variant(*other), 0.95)
        means = [
            [float(np.log(samples).mean()) for samples in side]
            for side in (mine, other)
        ]
        bounds = stats.ttest_ind(means[1], means[0]).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx(
            (math.exp(bounds.low), math.exp(bounds.high))
        )
        assert (found.n, found.unit) == (3, "process")


class TestBlocks:
    """In blocks a process is timed between two sessions of the baseline, which stand in for the reference."""

    def test_its_error_is_that_of_one_ratio_per_replicate(self) -> None:
        """The baseline around each process is no second sample: three blocks leave two degrees of freedom."""
        before = [np.full(4, 4.0) for _ in range(3)]
        own = [np.full(4, 4.0 / factor) for factor in (1.9, 2.0, 2.1)]
        candidate = variant(*own)
        for measurement, beside in zip(candidate.measurements, before, strict=True):
            measurement.shapes[0].latency_before_s = measurement.shapes[
                0
            ].latency_after_s = beside.tolist()
        found = speedup(candidate, variant(*before, name="baseline"), 0.95)
        logs = np.log([1.9, 2.0, 2.1])
        low, high = np.exp(
            stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
        )
        assert (found.low, found.high) == pytest.approx((low, high))

    def test_a_drift_of_the_machine_cancels(self) -> None:
        """The machine slows by 30 % from one session to the next; the candidate is twice as fast all along."""
        sessions = [1.3**number for number in range(3)]
        before, own, after = (np.full(6, slowness) for slowness in sessions)
        baseline = variant(np.concatenate([before, after]), name="baseline")
        candidate = variant(
            own / 2, latency_before_s=[*before], latency_after_s=[*after]
        )
        found = speedup(candidate, baseline, 0.95)
        assert found.estimate == pytest.approx(2)


def test_a_ratio_of_peaks_has_no_interval_from_one_process() -> None:
    mine, other = (variant([1.0], memory=Memory(0.1, peak)) for peak in (1.0, 4.0))
    assert known(log_memory_ratio(mine, other)).interval(0.95) == Interval(
        0.25, n=1, unit="process"
    )


def test_a_floor_is_at_least_one_whichever_worker_was_faster() -> None:
    assert floor(variant([1.0, 1.0]), variant([1.1, 1.1])) == pytest.approx(1.1)
    assert floor(variant([1.1, 1.1]), variant([1.0, 1.0])) == pytest.approx(1.1)
    assert floor(variant([1.0]), variant([1.0])) == 1.0
    several = floor(variant([1.0], [1.0], [1.0]), variant([1.02], [0.8], [1.1]))
    assert several == pytest.approx((1.02 * 0.8 * 1.1) ** (-1 / 3))


class TestCompare:
    def test_fills_in_every_edge_and_the_floor(self) -> None:
        baseline, control = (
            variant([2.0] * 6, name="baseline"),
            variant([2.1] * 6, name="control", role="control"),
        )
        fast, faster = (
            variant([1.0] * 6, name="fast"),
            variant([0.5] * 6, name="faster"),
        )
        edges = [
            Comparison("fast", "baseline", ""),
            Comparison("faster", "fast", ""),
            Comparison("control", "baseline", ""),
        ]
        result = recorded([baseline, fast, faster, control], edges)
        compare(result)
        assert [
            known(edge.shapes[0].speedup).estimate for edge in edges
        ] == pytest.approx([2, 2, 2.0 / 2.1])
        assert result.floor == pytest.approx(1.05)
        assert {edge.shapes[0].floor for edge in edges} == {result.floor}

    @staticmethod
    def compared(candidate: VariantResult) -> Comparison:
        baseline, control = (
            variant([2.0] * 6, name="baseline"),
            variant([2.1] * 6, name="control", role="control"),
        )
        edge = Comparison(candidate.name, "baseline", "")
        compare(recorded([baseline, candidate, control], [edge]))
        return edge

    def test_what_was_not_measured_is_not_compared(self) -> None:
        broken = variant([1.0] * 6, name="broken")
        broken.status = Status.KILLED
        edge = self.compared(broken)
        assert edge.shapes[0].speedup is None
        assert edge.note == "broken: killed"

    @pytest.mark.parametrize(
        ("changed", "value", "differs"),
        [
            ("workload.size", 128, "128 against 64"),
            ("task.strength", 0.5, "0.5 against 1.0"),
            ("model.name", "sd15", "sd15 against emoji"),
            ("hardware.device", "cuda", "cuda against auto"),
            # How many images a call makes is compared per image, and what a candidate may choose is the same work.
            ("workload.size", 64, ""),  # which is the model's
            ("workload.batch_size", 4, ""),
            ("workload.images_per_prompt", 2, ""),
            ("scheduler.class_name", "EulerDiscreteScheduler", ""),
            ("hardware.threads", 1, ""),
        ],
    )
    def test_says_that_the_work_differs(
        self, changed: str, value: object, differs: str
    ) -> None:
        other = variant([1.0] * 6, name="other")
        section, _, key = changed.partition(".")
        reconfigure(other, section, **{key: value})
        edge = self.compared(other)
        assert edge.shapes[0].speedup is not None
        assert edge.note == (
            f"not the same work: {changed} ({differs})" if differs else ""
        )

    def test_a_control_that_failed_says_nothing_of_the_floor(self) -> None:
        baseline, control = (
            variant([2.0] * 6, name="baseline"),
            variant([2.1], name="control", role="control"),
        )
        control.status = Status.FAILED
        result = recorded([baseline, control], [])
        compare(result)
        assert result.floor is None


def sat(
    *samples: tuple[int, Any],
    name: str = "variant",
    role: str = "variant",
    replicate: int = 0,
) -> VariantResult:
    """A variant of one replicate that was measured in several sessions: their numbers and latencies."""
    found = variant(*(times for _, times in samples), name=name, role=role)
    for measurement, (number, _) in zip(found.measurements, samples, strict=True):
        measurement.replicate, measurement.session = replicate, number
    return found


class TestSittings:
    """Processes of different sessions are not comparable: the machine may have changed."""

    def test_rounds_are_paired_within_a_session_alone(self) -> None:
        baseline = sat((0, [1, 1, 1, 1]), (1, [10, 10, 10]), name="baseline")
        candidate = sat((0, [0.5, 0.5, 0.5, 0.5]), (1, [5, 5, 5]))
        found = speedup(candidate, baseline, 0.95)
        assert found.estimate == pytest.approx(2)
        assert (found.n, found.unit) == (7, "round")

    def test_of_which_they_share_none_nothing_is_said(self) -> None:
        baseline, candidate = sat((0, [1, 1])), sat((1, [0.5, 0.5]))
        assert log_speedup(candidate, baseline) is None
        result = recorded([baseline, candidate, sat((0, [1, 1]), role="control")], [])
        baseline.name, candidate.name = "baseline", "candidate"
        result.baseline = "baseline"
        result.comparisons = [Comparison("candidate", "baseline", "x")]
        compare(result)
        assert result.comparisons[0].shapes[0].speedup is None
        assert result.comparisons[0].note == "no session timed a round of both variants"

    def test_a_block_that_broke_off_is_paired_with_nothing(self) -> None:
        baseline, candidate = sat((0, [1, 1])), sat((0, [0.5, 0.5]))
        candidate.measurements[0].shapes[0].latency_before_s = [1.0, 1.0]
        assert log_speedup(candidate, baseline) is None
        candidate.measurements[0].shapes[0].latency_after_s = [1.0, 1.0]
        assert log_speedup(candidate, baseline) is not None

    def test_of_several_replicates_each_is_one_ratio(self) -> None:
        """What the machine was slower by in one session is no difference between the processes."""
        mine = variant(
            *([factor * speed] * 2 for factor in (1, 10) for speed in (0.5, 0.4, 0.45))
        )
        other = variant(*([factor] * 2 for factor in (1, 10) for _ in range(3)))
        for side in (mine, other):
            for number, measurement in enumerate(side.measurements):
                measurement.replicate, measurement.session = number % 3, number // 3
        found = speedup(mine, other, 0.95)
        logs = -np.log([0.5, 0.4, 0.45])
        low, high = np.exp(
            stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
        )
        assert (found.low, found.estimate, found.high) == pytest.approx(
            (low, math.exp(logs.mean()), high)
        )
        assert (found.n, found.unit) == (3, "process")

    def test_the_floor_is_that_of_the_sessions_of_a_comparison(self) -> None:
        baseline = sat((0, [1, 1]), (1, [1, 1]), name="baseline")
        control = sat((0, [1.1, 1.1]), (1, [1.3, 1.3]), name="control", role="control")
        first, second = (
            sat((0, [0.5, 0.5]), name="first"),
            sat((1, [0.5, 0.5]), name="second"),
        )
        edges = [
            Comparison(name, "baseline", "x") for name in ("first", "second", "control")
        ]
        compare(recorded([baseline, first, second, control], edges))
        assert [edge.shapes[0].floor for edge in edges] == pytest.approx(
            [1.1, 1.3, math.sqrt(1.1 * 1.3)]
        )


class TestDrift:
    @staticmethod
    def run(*seconds: float) -> tuple[VariantResult, VariantResult]:
        """A variant and its baseline, a process for each of its times."""
        return variant(*([s] * 3 for s in seconds)), variant(
            *([1.0] * 3 for _ in seconds), name="baseline"
        )

    def test_is_welchs_interval_over_processes(self) -> None:
        found = known(
            speedup_drift(self.run(0.5, 0.52, 0.55), self.run(0.4, 0.44, 0.41))
        ).interval(0.9)
        logs = [-np.log(times) for times in ([0.5, 0.52, 0.55], [0.4, 0.44, 0.41])]
        bounds = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.9)
        assert (found.low, found.high) == pytest.approx(
            (math.exp(bounds.low), math.exp(bounds.high))
        )

    def test_pairs_processes_by_replicate_and_session(self) -> None:
        """In a later session, ten times as slow, the variant completed one replicate and its baseline two."""
        earlier, (mine, baseline) = self.run(0.5, 0.5, 0.5), self.run(0.5, 0.5, 0.5)
        mine.measurements += sat((1, [5.0] * 3), replicate=3).measurements
        baseline.measurements += sat((1, [70.0] * 3), replicate=2).measurements
        baseline.measurements += sat((1, [10.0] * 3), replicate=3).measurements
        found = known(speedup_drift((mine, baseline), earlier)).interval(0.9)
        assert (found.low, found.estimate, found.high) == pytest.approx((1.0, 1.0, 1.0))
        assert found.n == 3


class TestClaims:
    @pytest.mark.parametrize(
        ("mean", "limit"), [(-0.03, 1.0), (0.005, 1.01), (3.0, 1.0)]
    )
    def test_the_p_value_is_that_of_the_t_test_whose_interval_it_is(
        self, mean: float, limit: float
    ) -> None:
        logs = mean + 0.02 * np.random.default_rng(0).standard_normal(10)
        found = LogRatio(float(logs.mean()), float(stats.sem(logs)), 9, 10)
        tested = stats.ttest_1samp(logs, math.log(limit), alternative="greater")
        bounds = stats.ttest_1samp(logs, 0).confidence_interval(0.9)
        assert found.p_value(limit) == pytest.approx(float(tested.pvalue))
        assert found.interval(0.9).low == pytest.approx(math.exp(bounds.low))
        assert found.inverted().interval(0.9).low == pytest.approx(
            math.exp(-bounds.high)
        )

    @pytest.mark.parametrize(
        ("exact", "expected"), [(1.02, 0.0), (1.01, 1.0), (1.0, 1.0)]
    )
    def test_what_never_deviates_is_the_truth(
        self, exact: float, expected: float
    ) -> None:
        assert LogRatio(math.log(exact), 0.0, 4).p_value(1.01) == expected

    def test_holm_wants_more_of_the_first_of_many(self) -> None:
        assert holm([0.04], 0.05) == [True]
        assert holm([0.04, 0.001], 0.05) == [True, True]
        assert holm([0.03, 0.03], 0.05) == [False, False]
        assert holm([0.04, 0.03, 0.01], 0.05) == [False, False, True]
        assert holm([], 0.05) == []
