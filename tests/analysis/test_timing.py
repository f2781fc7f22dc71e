"""Ratios and intervals against hand computation, scipy and simulation."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sdopt.analysis.claims import holm, p_value
from sdopt.analysis.timing import MINIMUM_ROUNDS, compare, floor, latency, memory_ratio, ratio, speedup
from sdopt.results.records import (
    Comparison,
    Environment,
    Interval,
    Measurement,
    Memory,
    RecordedConfig,
    Status,
    StudyResult,
    VariantResult,
)
from tests.records import reconfigure


def variant(*processes: Any, name: str = "variant", role: str = "variant", **measured: Any) -> VariantResult:
    """A measured variant: one sequence of latencies for each process."""
    measurements = [
        Measurement(number, latency_s=[float(s) for s in samples], **measured)
        for number, samples in enumerate(processes)
    ]
    return VariantResult(name, role, {}, [], RecordedConfig(), status=Status.OK, measurements=measurements)


def study(*variants: VariantResult, comparisons: list[Comparison]) -> StudyResult:
    environment = Environment("0", None, None, "3", "here", {}, {"name": "a device"}, {}, "forkserver", [])
    return StudyResult(
        "s", "explicit", "now", environment, RecordedConfig(), list(variants), comparisons, variants[0].name
    )


def log_normal(seed: int, rounds: int, mean: float = 0.1, spread: float = 0.05) -> np.ndarray:
    return mean * np.exp(spread * np.random.default_rng(seed).standard_normal(rounds))


class TestLatency:
    @pytest.mark.parametrize(("estimator", "expected"), [("median", 3.0), ("mean", 4.0), ("last", 10.0), ("min", 1.0)])
    def test_estimators(self, estimator: str, expected: float) -> None:
        found = latency(variant([1, 2, 3, 4, 10]), estimator, 0.95)
        assert found is not None
        assert found.estimate == expected
        assert found.n == 5

    def test_is_nothing_without_samples(self) -> None:
        assert latency(variant([]), "median", 0.95) is None
        assert latency(variant(), "median", 0.95) is None

    def test_of_several_processes_is_the_geometric_mean_of_each_with_a_t_interval_of_logarithms(self) -> None:
        found = latency(variant([1, 1, 9], [4, 4, 4, 4], [2, 2]), "median", 0.9)
        logs = np.log([1, 4, 2])
        low, high = np.exp(stats.t.interval(0.9, 2, loc=logs.mean(), scale=stats.sem(logs)))
        assert found == Interval(pytest.approx(2.0), pytest.approx(low), pytest.approx(high), 0.9, 3, "process")

    def test_of_two_processes_has_no_interval_and_of_three_no_bound_is_negative(self) -> None:
        assert latency(variant([1, 2], [1, 2]), "mean", 0.95) == Interval(pytest.approx(1.5), n=2, unit="process")
        found = latency(variant([0.1], [0.1], [9.0]), "median", 0.95)
        assert found is not None
        assert found.low is not None
        assert 0 < found.low < found.estimate

    def test_interval_of_the_median_is_that_of_order_statistics(self) -> None:
        """With n samples, (x_1, x_n) misses the median with probability 2 · 2⁻ⁿ: 3.1 % at n = 6."""
        found = latency(variant([6, 5, 4, 3, 2, 1]), "median", 0.95)
        assert found == Interval(3.5, 1.0, 6.0, 0.95, 6)

    def test_no_interval_below_six_rounds_or_for_other_estimators(self) -> None:
        few, many = variant(log_normal(0, MINIMUM_ROUNDS - 1)), variant(log_normal(0, 40))
        for found in (latency(few, "median", 0.95), latency(many, "mean", 0.95), latency(many, "last", 0.95)):
            assert found is not None
            assert (found.low, found.high, found.confidence) == (None, None, None)

    def test_no_interval_where_the_rounds_cannot_support_the_confidence(self) -> None:
        found = latency(variant([6, 5, 4, 3, 2, 1]), "median", 0.99)
        assert found is not None
        assert (found.low, found.high) == (None, None)


class TestSpeedup:
    def test_is_a_geometric_mean_with_a_t_interval(self) -> None:
        mine, other = log_normal(1, 8), log_normal(2, 8, mean=0.2)
        found = speedup(variant(mine), variant(other), 0.9)
        expected = stats.ttest_rel(np.log(other), np.log(mine))
        bounds = expected.confidence_interval(0.9)
        assert found is not None
        assert found.estimate == pytest.approx(stats.gmean(other / mine))
        assert (found.low, found.high) == pytest.approx((math.exp(bounds.low), math.exp(bounds.high)))
        assert (found.confidence, found.n, found.unit) == (0.9, 8, "round")

    def test_is_exact_under_drift_that_rounds_share(self) -> None:
        drift = np.exp(np.linspace(0, 3, 10))
        found = speedup(variant(0.1 * drift), variant(0.25 * drift), 0.95)
        assert found is not None
        assert (found.estimate, found.low, found.high) == pytest.approx((2.5, 2.5, 2.5))

    def test_of_identical_samples_is_one_without_width(self) -> None:
        samples = log_normal(3, 10)
        assert speedup(variant(samples), variant(samples), 0.95) == Interval(1.0, 1.0, 1.0, 0.95, 10, "round")

    def test_no_interval_below_six_rounds(self) -> None:
        found = speedup(variant(log_normal(1, 5)), variant(log_normal(2, 5)), 0.95)
        assert found is not None
        assert (found.low, found.high, found.n) == (None, None, 5)

    def test_is_nothing_without_samples(self) -> None:
        assert speedup(variant([]), variant([1, 2]), 0.95) is None
        assert speedup(variant(), variant([1, 2]), 0.95) is None

    def test_pairs_only_rounds_that_both_have(self) -> None:
        found = speedup(variant([1, 1, 1]), variant([2, 2, 2, 50, 50]), 0.95)
        assert found is not None
        assert (found.estimate, found.n) == (2.0, 3)

    def test_more_confidence_is_wider(self) -> None:
        mine, other = variant(log_normal(1, 10)), variant(log_normal(2, 10))
        narrow, wide = speedup(mine, other, 0.8), speedup(mine, other, 0.99)
        assert narrow is not None
        assert wide is not None
        assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high  # type: ignore[operator]

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
    @pytest.mark.parametrize("processes", [1, 3])
    def test_does_not_depend_on_the_unit_and_inverts_with_the_sides(self, scale: float, processes: int) -> None:
        mine = [log_normal(seed, 8) for seed in range(processes)]
        other = [log_normal(100 + seed, 8, mean=0.15) for seed in range(processes)]
        found = speedup(variant(*mine), variant(*other), 0.95)
        scaled = speedup(variant(*(scale * m for m in mine)), variant(*(scale * o for o in other)), 0.95)
        back = speedup(variant(*other), variant(*mine), 0.95)
        assert found is not None
        assert scaled is not None
        assert back is not None
        assert (scaled.estimate, scaled.low, scaled.high) == pytest.approx((found.estimate, found.low, found.high))
        assert (1 / back.estimate, 1 / back.high, 1 / back.low) == pytest.approx(  # type: ignore[operator]
            (found.estimate, found.low, found.high)
        )

    def test_covers_the_truth_about_as_often_as_it_says(self) -> None:
        """Rounds share a random walk, which pairing removes; 400 intervals of 95 % should miss about 20 times."""
        random = np.random.default_rng(0)
        covered = 0
        for _ in range(400):
            walk = np.exp(np.cumsum(0.05 * random.standard_normal(10)))
            mine, other = (np.exp(0.03 * random.standard_normal(10)) * walk for _ in range(2))
            found = speedup(variant(mine), variant(1.3 * other), 0.95)
            assert found is not None
            covered += found.low <= 1.3 <= found.high  # type: ignore[operator]
        assert 0.92 <= covered / 400 <= 0.98


class TestReplicates:
    def test_one_process_is_one_replicate(self) -> None:
        mine, other = ([log_normal(s, 20) for s in seeds] for seeds in ((0, 1, 2), (3, 4, 5)))
        found = speedup(variant(*mine), variant(*other), 0.95)
        means = [[float(np.log(samples).mean()) for samples in side] for side in (mine, other)]
        bounds = stats.ttest_ind(means[1], means[0]).confidence_interval(0.95)
        assert found is not None
        assert (found.low, found.high) == pytest.approx((math.exp(bounds.low), math.exp(bounds.high)))
        assert (found.n, found.unit) == (3, "process")

    def test_more_rounds_do_not_narrow_what_processes_differ_by(self) -> None:
        """Three processes that differ by 5 % each: with a thousand rounds the interval is as wide as with ten."""
        effects = (-0.05, 0.0, 0.05)

        def width(rounds: int) -> float:
            mine = [0.1 * np.exp(e) * np.ones(rounds) for e in effects]
            found = speedup(variant(*mine), variant(*(2 * m for m in mine)), 0.95)
            assert found is not None
            return math.log(found.high / found.low)  # type: ignore[operator]

        assert width(1000) == pytest.approx(width(10))
        assert width(10) > 0.1

    def test_covers_the_truth_where_processes_differ(self) -> None:
        random = np.random.default_rng(1)
        covered = 0
        for _ in range(400):
            sides = [
                [np.exp(0.05 * random.standard_normal() + 0.01 * random.standard_normal(10)) for _ in range(3)]
                for _ in range(2)
            ]
            found = speedup(variant(*sides[0]), variant(*sides[1]), 0.95)
            assert found is not None
            covered += found.low <= 1 <= found.high  # type: ignore[operator]
        assert 0.92 <= covered / 400 <= 0.98

    @pytest.mark.filterwarnings("error")
    def test_of_identical_processes_is_one_without_width(self) -> None:
        samples = variant([1, 2, 3], [1, 2, 3])
        found = speedup(samples, samples, 0.95)
        assert found is not None
        assert (found.estimate, found.low, found.high) == (1.0, 1.0, 1.0)


class TestBlocks:
    """In blocks a process is timed between two sittings of the baseline, which stand in for the reference."""

    @staticmethod
    def block(own: Any, before: Any, after: Any, name: str = "candidate") -> VariantResult:
        return variant(own, name=name, latency_before_s=[*before], latency_after_s=[*after])

    def test_a_drift_of_the_machine_cancels(self) -> None:
        """The machine slows by 30 % from one sitting to the next; the candidate is twice as fast all along."""
        sittings = [1.3**number for number in range(3)]
        before, own, after = (np.full(6, slowness) for slowness in sittings)
        baseline = variant(np.concatenate([before, after]), name="baseline")
        found = speedup(self.block(own / 2, before, after), baseline, 0.95)
        assert found is not None
        assert found.estimate == pytest.approx(2)
        unpaired = speedup(variant(own / 2), variant(before), 0.95)
        assert unpaired is not None
        assert unpaired.estimate == pytest.approx(2 / 1.3)

    def test_two_candidates_are_compared_through_their_baselines(self) -> None:
        one = self.block(np.full(6, 2.0), np.full(6, 4.0), np.full(6, 4.0))
        other = self.block(np.full(6, 3.0), np.full(6, 12.0), np.full(6, 12.0))
        found = speedup(one, other, 0.95)
        assert found is not None
        assert found.estimate == pytest.approx((3 / 12) / (2 / 4))

    def test_rounds_are_paired(self) -> None:
        noise = log_normal(5, 8, spread=0.3)
        found = speedup(self.block(noise / 3, noise, noise), variant(np.tile(noise, 2)), 0.95)
        assert found is not None
        assert (found.estimate, found.low, found.high) == pytest.approx((3, 3, 3))


class TestMemory:
    @staticmethod
    def peaks(*gib: float, cuda: bool = False) -> VariantResult:
        found = variant(*([1.0] for _ in gib))
        for measurement, peak in zip(found.measurements, gib, strict=True):
            measurement.memory = Memory(0.1, 99.0 if cuda else peak, cuda_peak_allocated_gib=peak if cuda else None)
        return found

    def test_ratio_of_peaks_without_an_interval_from_one_process(self) -> None:
        assert memory_ratio(self.peaks(1.0), self.peaks(4.0), 0.95) == Interval(0.25, n=1, unit="process")

    def test_on_cuda_it_is_what_the_allocator_held(self) -> None:
        found = memory_ratio(self.peaks(3.0, cuda=True), self.peaks(4.0, cuda=True), 0.95)
        assert found is not None
        assert found.estimate == pytest.approx(0.75)

    def test_interval_from_several_processes(self) -> None:
        found = memory_ratio(self.peaks(1.0, 1.1), self.peaks(2.0, 2.1), 0.9)
        bounds = stats.ttest_ind(np.log([1.0, 1.1]), np.log([2.0, 2.1])).confidence_interval(0.9)
        assert found is not None
        assert found.estimate == pytest.approx(math.sqrt(1.1 / 4.2))
        assert (found.low, found.high) == pytest.approx((math.exp(bounds.low), math.exp(bounds.high)))

    @pytest.mark.filterwarnings("error")
    def test_identical_peaks_have_no_width(self) -> None:
        found = memory_ratio(self.peaks(2.0, 2.0), self.peaks(4.0, 4.0), 0.95)
        assert found == Interval(0.5, 0.5, 0.5, 0.95, 2, "process")

    def test_is_nothing_where_it_was_not_measured(self) -> None:
        assert memory_ratio(variant([1.0]), self.peaks(1.0), 0.95) is None
        assert memory_ratio(self.peaks(0.0), self.peaks(1.0), 0.95) is None


class TestFloor:
    def test_is_at_least_one_whichever_worker_was_faster(self) -> None:
        assert floor(variant([1.0, 1.0]), variant([1.1, 1.1])) == pytest.approx(1.1)
        assert floor(variant([1.1, 1.1]), variant([1.0, 1.0])) == pytest.approx(1.1)
        assert floor(variant([1.0]), variant([1.0])) == 1.0

    def test_is_that_of_the_worst_pair_of_processes(self) -> None:
        assert floor(variant([1.0], [1.0], [1.0]), variant([1.02], [0.8], [1.1])) == pytest.approx(1.25)

    def test_is_nothing_without_samples(self) -> None:
        assert floor(variant([]), variant([1.0])) is None


class TestCompare:
    def test_fills_in_every_edge_and_the_floor(self) -> None:
        baseline, control = variant([2.0] * 6, name="baseline"), variant([2.1] * 6, name="control", role="control")
        fast, faster = variant([1.0] * 6, name="fast"), variant([0.5] * 6, name="faster")
        edges = [
            Comparison("fast", "baseline", ""),
            Comparison("faster", "fast", ""),
            Comparison("control", "baseline", ""),
        ]
        result = study(baseline, fast, faster, control, comparisons=edges)
        compare(result)
        assert [edge.speedup and round(edge.speedup.estimate, 6) for edge in edges] == [2, 2, round(2.0 / 2.1, 6)]
        assert result.floor == pytest.approx(1.05)
        assert {edge.floor for edge in edges} == {result.floor}

    @staticmethod
    def compared(candidate: VariantResult) -> Comparison:
        baseline, control = variant([2.0] * 6, name="baseline"), variant([2.1] * 6, name="control", role="control")
        edge = Comparison(candidate.name, "baseline", "")
        compare(study(baseline, candidate, control, comparisons=[edge]))
        return edge

    def test_what_was_not_measured_is_not_compared(self) -> None:
        broken = variant([1.0] * 6, name="broken")
        broken.status = Status.KILLED
        edge = self.compared(broken)
        assert edge.speedup is None
        assert edge.note == "broken: killed"

    @pytest.mark.parametrize(
        ("section", "key", "value"),
        [("workload", "steps", 10), ("scheduler", "class_name", "EulerDiscreteScheduler"), ("hardware", "threads", 1)],
    )
    def test_says_that_the_work_differs(self, section: str, key: str, value: object) -> None:
        other = variant([1.0] * 6, name="other")
        reconfigure(other, section, **{key: value})
        edge = self.compared(other)
        assert edge.speedup is not None
        assert edge.note == f"not the same work: {section}.{key}"

    def test_a_control_that_failed_says_nothing_of_the_floor(self) -> None:
        baseline, control = variant([2.0] * 6, name="baseline"), variant([2.1], name="control", role="control")
        control.status = Status.FAILED
        result = study(baseline, control, comparisons=[])
        compare(result)
        assert result.floor is None


def sat(*samples: tuple[int, Any], name: str = "variant", role: str = "variant", replicate: int = 0) -> VariantResult:
    """A variant of one replicate that was measured in several sittings: their numbers and latencies."""
    found = variant(*(times for _, times in samples), name=name, role=role)
    for measurement, (number, _) in zip(found.measurements, samples, strict=True):
        measurement.replicate, measurement.session = replicate, number
    return found


class TestSittings:
    """Processes of different sittings are not comparable: the machine may have changed."""

    def test_rounds_are_paired_within_a_sitting_alone(self) -> None:
        baseline = sat((0, [1, 1, 1, 1]), (1, [10, 10, 10]), name="baseline")
        candidate = sat((0, [0.5, 0.5, 0.5, 0.5]), (1, [5, 5, 5]))
        found = speedup(candidate, baseline, 0.95)
        assert found is not None
        assert (found.estimate, found.n, found.unit) == (pytest.approx(2), 7, "round")
        assert (found.low, found.high) == (pytest.approx(2), pytest.approx(2))

    def test_of_which_they_share_none_nothing_is_said(self) -> None:
        baseline, candidate = sat((0, [1, 1])), sat((1, [0.5, 0.5]))
        assert speedup(candidate, baseline, 0.95) is None
        result = study(baseline, candidate, sat((0, [1, 1]), role="control"), comparisons=[])
        baseline.name, candidate.name = "baseline", "candidate"
        result.baseline = "baseline"
        result.comparisons = [Comparison("candidate", "baseline", "x")]
        compare(result)
        assert result.comparisons[0].speedup is None
        assert result.comparisons[0].note == "no round was timed of both in the same session"

    def test_a_round_that_only_one_side_has_is_left_out(self) -> None:
        found = speedup(sat((0, [1, 1]), (1, [1])), sat((0, [2, 2, 100]), (1, [2, 100])), 0.95)
        assert found is not None
        assert (found.estimate, found.n) == (pytest.approx(2), 3)

    def test_a_block_that_broke_off_is_paired_with_nothing(self) -> None:
        baseline, candidate = sat((0, [1, 1])), sat((0, [0.5, 0.5]))
        candidate.measurements[0].latency_before_s = [1.0, 1.0]
        assert speedup(candidate, baseline, 0.95) is None
        candidate.measurements[0].latency_after_s = [1.0, 1.0]
        assert speedup(candidate, baseline, 0.95) is not None

    def test_interleaved_rounds_and_blocks_go_together(self) -> None:
        baseline, candidate = sat((0, [1, 1]), (1, [3, 3])), sat((0, [0.5, 0.5]), (1, [2, 2]))
        candidate.measurements[1].latency_before_s, candidate.measurements[1].latency_after_s = [2, 2], [8, 8]
        found = speedup(candidate, baseline, 0.95)
        assert found is not None
        assert (found.estimate, found.n) == (pytest.approx(2), 4)

    def test_of_several_replicates_each_is_one_ratio(self) -> None:
        """What the machine was slower by in one sitting is no difference between the processes."""
        mine, other = variant([0.5, 0.5], [0.4, 0.4], [5, 5], [4, 4]), variant([1, 1], [1, 1], [10, 10], [10, 10])
        for side in (mine, other):
            for number, measurement in enumerate(side.measurements):
                measurement.replicate, measurement.session = number % 2, number // 2
        found = speedup(mine, other, 0.95)
        low, high = stats.t.interval(0.95, 1, loc=np.log([2, 2.5]).mean(), scale=stats.sem(np.log([2, 2.5])))
        assert found == Interval(
            pytest.approx(math.sqrt(5)), pytest.approx(math.exp(low)), pytest.approx(math.exp(high)), 0.95, 2, "process"
        )

    def test_the_floor_is_that_of_the_sittings_of_a_comparison(self) -> None:
        baseline = sat((0, [1, 1]), (1, [1, 1]), name="baseline")
        control = sat((0, [1.1, 1.1]), (1, [1.3, 1.3]), name="control", role="control")
        first, second = sat((0, [0.5, 0.5]), name="first"), sat((1, [0.5, 0.5]), name="second")
        edges = [Comparison(name, "baseline", "x") for name in ("first", "second", "control")]
        compare(study(baseline, first, second, control, comparisons=edges))
        assert [edge.floor for edge in edges] == pytest.approx([1.1, 1.3, math.sqrt(1.1 * 1.3)])

    def test_latency_is_of_all_rounds(self) -> None:
        found = latency(sat((0, [1, 2]), (1, [3])), "median", 0.95)
        assert found == Interval(2.0, n=3)


class TestClaims:
    @pytest.mark.parametrize("mean", [-0.03, 0.0, 0.005, 0.03, 3.0])
    @pytest.mark.parametrize("alternative", ["greater", "less"])
    def test_the_p_value_is_that_of_the_t_test_whose_interval_it_is(self, mean: float, alternative: Any) -> None:
        logs = mean + 0.02 * np.random.default_rng(0).standard_normal(10)
        found = p_value(lambda confidence: ratio(logs, confidence, "round"), alternative)
        expected = max(float(stats.ttest_1samp(logs, 0.0, alternative=alternative).pvalue), 1e-12)
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-12)

    def test_few_replicates_have_intervals_wider_than_a_float(self) -> None:
        logs = np.array([0.3, -0.1])
        found = p_value(lambda confidence: ratio(logs, confidence, "process"), "greater")
        assert found == pytest.approx(float(stats.ttest_1samp(logs, 0.0, alternative="greater").pvalue))

    def test_without_an_interval_there_is_none(self) -> None:
        assert p_value(lambda _: None, "greater") is None
        assert p_value(lambda _: Interval(2.0), "greater") is None

    def test_holm_wants_more_of_the_first_of_many(self) -> None:
        assert holm([0.04], 0.05) == [True]
        assert holm([0.04, 0.001], 0.05) == [True, True]
        assert holm([0.03, 0.03], 0.05) == [False, False]
        assert holm([0.04, 0.03, 0.01], 0.05) == [False, False, True]
        assert holm([], 0.05) == []
