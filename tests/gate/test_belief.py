"""Whether time and memory can be believed: rules on records, and options that cheat where they are measured."""

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sdopt.analysis.doubts import disturbances, doubts_of
from sdopt.analysis.drawn import log_drawn_speedup
from sdopt.gate.belief import gain_when_drawn
from sdopt.gate.judge import judge
from sdopt.results.files import parse_result, to_json
from sdopt.results.records import MeasurementSession, Schedule, Status, StudyResult, VariantResult
from sdopt.results.samples import Interference, Measurement, TimedImage
from sdopt.results.scores import Spread
from sdopt.results.verdicts import Judgement, Ruling, Verdict
from sdopt.schema import Gate, Rule
from sdopt.study.rounds import clocks_differ
from sdopt.worker.protocol import Compiled, TimedCall
from tests.command import SMALL, Finished, sdopt
from tests.gate.test_judge import FIT, study, variant
from tests.records import reconfigure
from tests.trial import CONF

FAST = Rule("speedup", "at_least", limit=0.95)


def judged(result: StudyResult) -> Judgement:
    judge(result, Gate("g", {"lossy": [FAST]}), FIT)
    [found] = result.judgements
    return found


def ruling(result: StudyResult, name: str) -> Ruling:
    [found] = [each for each in judged(result).rulings if each.rule == name]
    return found


def of_candidate(candidate: VariantResult, **changes: Any) -> StudyResult:
    """A study whose candidate's last process is as `changes` say."""
    for key, value in changes.items():
        setattr(candidate.measurements[-1], key, value)
    return study(candidate)


class TestTimedAsDrawn:
    def test_passes_where_every_process_drew_the_same(self) -> None:
        assert judged(study(variant("it"))).verdict is Verdict.PASS

    @pytest.mark.parametrize("error", [2e-6, 0.1, math.nan])
    def test_fails_for_one_image_of_one_process(self, error: float) -> None:
        images = [TimedImage(0, 0, 0.0), TimedImage(7, 0, error)]
        found = ruling(of_candidate(variant("it"), timed_images=images), "timed as drawn")
        assert found.verdict is Verdict.FAIL
        assert "in process 3, 1 of 2 images" in found.reason
        assert "prompt 8" in found.reason

    def test_allows_what_the_measured_floor_makes(self) -> None:
        result = of_candidate(variant("it"), timed_images=[TimedImage(0, 0, 2e-6)])
        result.floors["numerical"] = {"mse": Spread(1e-6, 0.0, 12)}
        assert ruling(result, "timed as drawn").verdict is Verdict.PASS

    def test_allows_what_the_candidates_type_rounds(self) -> None:
        candidate = variant("it")
        options = {"precision": {"weights": "bfloat16", "autocast": None}}
        candidate.config = replace(candidate.config, options=options)
        result = of_candidate(candidate, timed_images=[TimedImage(0, 0, 2e-5)])
        assert ruling(result, "timed as drawn").verdict is Verdict.PASS

    @pytest.mark.parametrize("images", [[], [TimedImage(0, 0, None)]])
    def test_fails_closed(self, images: list[TimedImage]) -> None:
        found = ruling(of_candidate(variant("it"), timed_images=images), "timed as drawn")
        assert found.verdict is Verdict.NOT_COMPARABLE
        assert "in process 3" in found.reason

    def test_says_nothing_of_a_candidate_whose_reference_cheats(self) -> None:
        result = study(variant("it"))
        result.variant("baseline").measurements[0].timed_images = [TimedImage(0, 0, 0.1)]
        assert ruling(result, "timed as drawn").verdict is Verdict.NOT_COMPARABLE


class TestIdle:
    @pytest.mark.parametrize("alone", [False, True])
    def test_one_that_works_is_not_comparable_and_disturbs_all_others_unless_it_was_stopped(self, alone: bool) -> None:
        result = of_candidate(variant("it"), idle_cpu=0.4)
        result.sessions = [MeasurementSession("", alone=alone)]
        assert ruling(result, "idle").verdict is Verdict.NOT_COMPARABLE
        again = study(variant("it"))
        again.sessions = [MeasurementSession("", alone=alone)]
        again.variant("control").measurements[1].idle_cpu = 0.4
        assert ruling(again, "idle").verdict is Verdict.PASS
        for found in (result, again):
            disturbed = [each for each in judged(found).rulings if each.rule == "undisturbed"]
            assert [each.verdict for each in disturbed] == [] if alone else [Verdict.INCONCLUSIVE]

    @pytest.mark.parametrize(
        ("schedule", "complete", "verdict"),
        [
            ("interleaved", True, Verdict.NOT_COMPARABLE),
            ("blocks", True, Verdict.PASS),
            ("interleaved", False, Verdict.PASS),
        ],
        ids=["not counted", "in blocks", "broke off"],
    )
    def test_fails_closed_where_the_kernel_does_not_count(
        self, schedule: str, complete: bool, verdict: Verdict
    ) -> None:
        result = of_candidate(variant("it"), complete=complete)
        result.sessions = [MeasurementSession("", schedule)]
        found = ruling(result, "idle")
        assert found.verdict is verdict
        assert ("protocol.schedule=blocks" in found.reason) is (verdict is not Verdict.PASS)

    def test_threads_may_spin_for_a_while(self) -> None:
        assert judged(of_candidate(variant("it"), idle_cpu=0.03)).verdict is Verdict.PASS


class TestDisturbed:
    @pytest.mark.parametrize(("calls", "verdict"), [(2, Verdict.PASS), (7, Verdict.INCONCLUSIVE)])
    def test_where_most_calls_that_decide_were(self, calls: int, verdict: Verdict) -> None:
        result = study(variant("it"))
        reconfigure(result, "protocol", interference=0.02)
        for row in result.variants:
            for measurement in row.measurements:
                measurement.interference = [Interference(0.3 if call < calls else 0.0, 0.0) for call in range(8)]
        assert judged(result).verdict is verdict

    @pytest.mark.parametrize(
        ("limit", "counted", "said"), [(0.02, False, True), (0.02, True, False), (None, False, False)]
    )
    def test_a_verdict_says_where_nothing_was_counted(self, limit: float | None, counted: bool, said: bool) -> None:
        result = study(variant("it"))
        reconfigure(result, "protocol", interference=limit)
        for measurement in result.variant("it").measurements:
            measurement.interference = [Interference(0.0, 0.0) if counted else None for _ in measurement.latency_s]
        assert ("nothing counted what other programs took" in judged(result).note) is said

    @pytest.mark.parametrize("how", ["idle", "others"])
    @pytest.mark.parametrize(("session", "disturbed"), [(0, False), (1, True)])
    def test_by_what_went_on_in_their_own_sessions(self, how: str, session: int, disturbed: bool) -> None:
        """The reference and the control were measured in both sessions, the candidate in the second one."""
        candidate, reference = variant("it"), variant("baseline", contract="exact")
        result = study(candidate, reference)
        reconfigure(result, "protocol", interference=0.02)
        result.sessions = [MeasurementSession(""), MeasurementSession("")]
        control = result.variant("control")
        for side in (reference, control):
            side.measurements += deepcopy(side.measurements)
        for side in (candidate, reference, control):
            for measurement in side.measurements[-3:]:
                measurement.session = 1
        if how == "idle":
            next(m for m in control.measurements if m.session == session).idle_cpu = 0.4
            quiet = next(m for m in control.measurements if m.session != session)
            quiet.idle_cpu = 0.0
        else:
            for measurement in (m for side in (candidate, reference) for m in side.measurements):
                share = 0.3 if measurement.session == session else 0.0
                # Of the earlier session there are more rounds than of the one that decides.
                measurement.latency_s *= 1 if measurement.session else 4
                measurement.interference = [Interference(share, 0.0) for _ in measurement.latency_s]
        assert bool(disturbances(result, candidate, reference)) is disturbed


class TestGrowth:
    @pytest.mark.parametrize(("mib", "verdict"), [(0.0, Verdict.PASS), (4.0, Verdict.FAIL)])
    def test_from_call_to_call(self, mib: float, verdict: Verdict) -> None:
        candidate = variant("it")
        for measurement in candidate.measurements:
            measurement.held_gib = [1 + mib / 1024 * call for call in range(8)]
        assert ruling(study(candidate), "memory growth").verdict is verdict

    @pytest.mark.parametrize(("mib", "verdict"), [(0.0, Verdict.PASS), (4.0, Verdict.FAIL)])
    def test_beside_a_reference_that_shrinks(self, mib: float, verdict: Verdict) -> None:
        candidate, baseline = variant("it"), variant("baseline", contract="exact")
        for side, step in ((candidate, mib), (baseline, -3.0)):
            for measurement in side.measurements:
                measurement.held_gib = [1 + step / 1024 * call for call in range(8)]
        assert ruling(study(candidate, baseline), "memory growth").verdict is verdict

    def test_a_single_step_is_none(self) -> None:
        candidate = variant("it")
        for measurement in candidate.measurements:
            measurement.held_gib = [1.0] * 3 + [1.5] * 5
        assert ruling(study(candidate), "memory growth").verdict is Verdict.PASS

    def test_fails_closed(self) -> None:
        candidate = variant("it")
        for measurement in candidate.measurements:
            measurement.held_gib = []
        found = ruling(study(candidate), "memory growth")
        assert found.verdict is Verdict.NOT_COMPARABLE
        assert "set protocol.rounds to at least 2" in found.reason

    def test_the_peak_after_the_last_round_counts(self) -> None:
        candidate = variant("it")
        for measurement in candidate.measurements:
            assert measurement.memory
            measurement.memory_after = replace(measurement.memory, children_peak_gib=1.0)
        found = study(candidate).comparisons[0].memory_ratio
        assert found is not None
        assert found.estimate == pytest.approx(2, abs=0.01)


class TestGainWhenDrawn:
    @pytest.mark.parametrize(
        ("drawn_s", "batch", "verdict"),
        [
            (0.08, 1, Verdict.PASS),
            (0.1, 1, Verdict.FAIL),
            (0.1, 12, Verdict.INCONCLUSIVE),
            (None, 1, Verdict.NOT_COMPARABLE),
        ],
    )
    def test_must_show(self, drawn_s: float | None, batch: int, verdict: Verdict) -> None:
        candidate = variant("it", seconds=0.075, claims=["latency"])
        for measurement in candidate.measurements:
            measurement.drawn_s = [] if drawn_s is None else [drawn_s]
            measurement.drawn_batch = batch
        result = study(candidate)
        assert ruling(result, "must pay").verdict is Verdict.PASS
        assert ruling(result, "gain when drawn").verdict is verdict

    @pytest.mark.parametrize(
        ("drawn", "deviation", "verdict"),
        [
            (1.08, 0.01, Verdict.PASS),  # an honest gain, where calls are steady
            (1.0, 0.01, Verdict.INCONCLUSIVE),  # none when drawn, which is within what a few calls may fall short
            (1.005, 0.01, Verdict.INCONCLUSIVE),
            (1.07, 0.04, Verdict.INCONCLUSIVE),  # five calls of one moment share the machine's drift
            (1.08, 0.08, Verdict.INCONCLUSIVE),  # calls differ by so much that none would look the same
        ],
    )
    def test_of_a_small_gain_must_be_told_from_none(self, drawn: float, deviation: float, verdict: Verdict) -> None:
        candidate, baseline = variant("it", seconds=0.1 / 1.08, claims=["latency"]), variant("baseline")
        for number, side in enumerate((candidate, baseline)):
            for measurement in side.measurements:
                random = np.random.default_rng([number, measurement.replicate])
                noise = np.exp(deviation * random.standard_normal(8))
                measurement.latency_s = (np.median(measurement.latency_s) * noise).tolist()
                measurement.drawn_s = []
        candidate.measurements[0].drawn_s, baseline.measurements[0].drawn_s = [0.1 / drawn] * 5, [0.1] * 5
        assert gain_when_drawn(study(candidate, baseline), candidate, baseline).verdict is verdict

    @staticmethod
    def beside(name: str, faster: float, drawn: float, drift: float = 1.3) -> VariantResult:
        """A variant whose calls differ by 3 %; when it draws, the machine is slower than in the timed rounds."""
        made = variant(name, seconds=0.1 / faster, claims=["latency"])
        noise = np.exp(0.03 * np.random.default_rng([7, len(name)]).standard_normal(5))
        made.measurements[0].drawn_s = (0.1 * drift * noise / drawn).tolist()
        made.measurements[0].drawn_beside_s = [0.1 * drift] * 5
        for measurement in made.measurements[1:]:
            measurement.drawn_s = []
        return made

    @pytest.mark.parametrize(
        ("faster", "drawn", "verdict"),
        [
            (1.08, 1.08, Verdict.PASS),
            (1.08, 1.0, Verdict.INCONCLUSIVE),
            (1.3, 1.3, Verdict.PASS),
            (1.3, 1.0, Verdict.FAIL),
        ],
    )
    def test_beside_the_baseline_is_free_of_drift(self, faster: float, drawn: float, verdict: Verdict) -> None:
        candidate, baseline = self.beside("it", faster, drawn), variant("baseline")
        assert gain_when_drawn(study(candidate, baseline), candidate, baseline).verdict is verdict

    @pytest.mark.parametrize(("drawn", "verdict"), [(1.3, Verdict.PASS), (1.0, Verdict.FAIL)])
    def test_over_a_reference_that_was_drawn_beside_the_baseline_too(self, drawn: float, verdict: Verdict) -> None:
        candidate, reference = self.beside("it", 1.3 * 0.8, drawn * 0.8, drift=1.5), self.beside("reference", 0.8, 0.8)
        result = study(candidate, variant("baseline"))
        result.variants.append(reference)
        assert gain_when_drawn(result, candidate, reference).verdict is verdict

    def test_of_one_process_has_no_bound(self) -> None:
        candidate, baseline = self.beside("it", 1.3, 1.3), variant("baseline")
        result = study(candidate, baseline)
        for row in result.variants:
            row.measurements = row.measurements[:1]
        found = log_drawn_speedup(result, candidate, baseline)
        assert found is not None
        assert found.ratio == pytest.approx(1.3, rel=0.05)
        assert found.error is None

    def test_of_calls_in_two_sessions_is_unknown(self) -> None:
        """The machine may have changed between the two; in blocks there are no calls of one moment anyway."""
        candidate, baseline = variant("it", seconds=0.05, claims=["latency"]), variant("baseline")
        result = study(candidate, baseline)
        assert log_drawn_speedup(result, candidate, baseline) is not None
        for measurement in candidate.measurements:
            measurement.session = 1
        assert log_drawn_speedup(result, candidate, baseline) is None
        result.schedule = Schedule("blocks")
        assert log_drawn_speedup(result, candidate, baseline) is not None

    def test_a_slower_session_is_no_deviation_of_processes(self) -> None:
        candidate, baseline = self.beside("it", 1.3, 1.3), variant("baseline")
        result = study(candidate, baseline)
        before = log_drawn_speedup(result, candidate, baseline)
        for row in result.variants:
            for measurement in list(row.measurements):
                slower = [1.3 * seconds for seconds in measurement.latency_s]
                row.measurements.append(
                    replace(measurement, latency_s=slower, session=1, drawn_s=[], drawn_beside_s=[])
                )
        after = log_drawn_speedup(result, candidate, baseline)
        assert before is not None
        assert before.error is not None
        assert after is not None
        assert after.error is not None
        assert after.error < 1.1 * before.error

    @pytest.mark.parametrize("faster", [1.1, 1.2])
    def test_that_does_not_show_fails_where_it_is_no_small_one(self, faster: float) -> None:
        candidate, baseline = variant("it", seconds=0.1 / faster, claims=["latency"]), variant("baseline")
        for side in (candidate, baseline):
            for measurement in side.measurements:
                measurement.drawn_s = [0.1]
        assert gain_when_drawn(study(candidate, baseline), candidate, baseline).verdict is (
            Verdict.INCONCLUSIVE if math.sqrt(faster) <= 1.05 else Verdict.FAIL
        )

    def test_is_open_where_single_calls_differ_by_as_much(self) -> None:
        candidate, baseline = variant("it", seconds=0.075, claims=["latency"]), variant("baseline")
        for measurement in (*candidate.measurements, *baseline.measurements):
            noisy = [1.2, 0.85] * len(measurement.latency_s)
            measurement.latency_s = [t * n for t, n in zip(measurement.latency_s, noisy, strict=False)]
        for measurement in candidate.measurements:
            measurement.drawn_s, measurement.drawn_batch = [0.1], 1
        for measurement in baseline.measurements:
            measurement.drawn_s, measurement.drawn_batch = [0.1], 1
        result = study(candidate, baseline)
        found = log_drawn_speedup(result, candidate, baseline)
        assert found is not None
        assert found.error is not None
        assert found.error > 0.2
        assert gain_when_drawn(result, candidate, baseline).verdict is Verdict.INCONCLUSIVE

    def test_is_unproven_where_prompts_were_repeated(self) -> None:
        result = of_candidate(variant("it", seconds=0.05, claims=["latency"]), repeated=2)
        assert ruling(result, "gain when drawn").verdict is Verdict.INCONCLUSIVE


class TestFreshNoise:
    @pytest.mark.parametrize(
        ("fresh", "drawn", "fails"),
        [
            ([0.0] * 5, [0.0] * 48, False),
            ([2e-6] * 5, [0.5e-6] * 48, False),  # rounding
            ([0.0] * 4 + [0.01], [0.0] * 48, True),
            ([0.01] * 5, [0.002 * (1 + number / 24) for number in range(48)], True),
            ([0.004, 0.001, 0.003, 0.002, 0.0035], [0.0001 * number for number in range(48)], False),
            ([0.02] * 3, [0.01, 0.02], False),  # too few to tell
        ],
    )
    def test_makes_images_as_far_from_the_baselines(self, fresh: list[float], drawn: list[float], fails: bool) -> None:
        candidate = variant("it")
        candidate.measurements[0].fresh_errors, candidate.measurements[0].drawn_errors = fresh, drawn
        found = [each for each in judged(study(candidate)).rulings if each.rule == "fresh noise"]
        assert [each.verdict for each in found] == [Verdict.FAIL] * fails

    def test_may_not_be_known_where_there_was_no_baseline_beside(self) -> None:
        assert not [each for each in judged(study(variant("it"))).rulings if each.rule == "fresh noise"]


class TestTwoClocks:
    """A gain has to show by the clock of the study's own process, too."""

    @staticmethod
    def clocked(rate: float, seconds: float = 0.1) -> StudyResult:
        """A candidate that takes as long as the others; its own clock has a rate of `rate`."""
        candidate, baseline = variant("it", seconds=seconds * rate, claims=["latency"]), variant("baseline")
        for side, told in ((candidate, rate), (baseline, 1.0)):
            for measurement in side.measurements:
                measurement.observed_s = [call / told + 0.001 for call in measurement.latency_s]
                measurement.drawn_s = [seconds if side is candidate else 0.1]
        return study(candidate, baseline)

    @pytest.mark.parametrize("rate", [0.92, 0.96])
    def test_a_clock_that_is_slow_within_what_is_tolerated_proves_nothing(self, rate: float) -> None:
        result = self.clocked(rate)
        found = judged(result)
        claimed = ruling(result, "must pay")
        assert result.comparisons[0].speedup is not None
        assert result.comparisons[0].speedup.low is not None
        assert result.comparisons[0].speedup.low > 1.01
        assert claimed.verdict is Verdict.INCONCLUSIVE
        assert "does not hold by the study's own clock, which says " in claimed.reason
        assert found.gains == []
        assert found.claims["speedup"] > 0.05
        assert found.verdict is Verdict.INCONCLUSIVE

    def test_work_before_and_after_a_call_counts_in_its_gain(self) -> None:
        """Within what `beside the call` allows."""
        result = self.clocked(1.0, seconds=0.1 / 1.3)
        for row in result.variants:
            for measurement in row.measurements:
                more_s = 0.1 - 0.1 / 1.3 if row.name == "it" else 0.0
                measurement.around_s = [0.01 + more_s] * len(measurement.latency_s)
        assert ruling(result, "must pay").verdict is Verdict.INCONCLUSIVE
        assert "does not hold by the study's own clock, which says 0.998×" in ruling(result, "must pay").reason

    def test_an_honest_gain_of_8_percent_passes(self) -> None:
        result = self.clocked(1.0, seconds=0.1 / 1.08)
        assert ruling(result, "must pay").verdict is Verdict.PASS
        assert judged(result).verdict is Verdict.PASS

    def test_a_result_without_the_second_clock_is_judged_by_the_first(self) -> None:
        result = self.clocked(0.96)
        for row in result.variants:
            for measurement in row.measurements:
                measurement.observed_s = []
        assert judged(result).gains == ["speedup"]


class TestQualityPass:
    @pytest.mark.parametrize(
        ("slow", "reference", "verdict"),
        [(0, 0, Verdict.PASS), (1, 0, Verdict.PASS), (3, 0, Verdict.INCONCLUSIVE), (6, 0, Verdict.FAIL),
         (6, 6, Verdict.INCONCLUSIVE)],
    )  # fmt: skip
    def test_calls_that_are_rarely_slow(self, slow: int, reference: int, verdict: Verdict) -> None:
        candidate, baseline = variant("it"), variant("baseline", contract="exact")
        for side, count in ((candidate, slow), (baseline, reference)):
            side.measurements[0].pass_s = [0.5] * count + [0.1] * (96 - count)
        assert ruling(study(candidate, baseline), "rarely slow").verdict is verdict

    @pytest.mark.parametrize(("mib", "verdict"), [(0, Verdict.PASS), (60, Verdict.INCONCLUSIVE), (200, Verdict.FAIL)])
    def test_memory_that_grows_now_and_then(self, mib: float, verdict: Verdict) -> None:
        candidate = variant("it")
        candidate.measurements[0].pass_held_gib = [0.5] * 40 + [0.5 + mib / 1024] * 56
        assert ruling(study(candidate), "growth when drawn").verdict is verdict

    @pytest.mark.parametrize("rule", ["rarely slow", "growth when drawn"])
    @pytest.mark.parametrize("last_is_bad", [True, False])
    def test_of_several_passes_the_last_one_counts(self, rule: str, last_is_bad: bool) -> None:
        """As prompts are added later, another process draws all images."""
        candidate = variant("it")
        for measurement, bad in zip(candidate.measurements, (not last_is_bad, last_is_bad), strict=False):
            measurement.pass_s = [0.5 if bad else 0.1] * 6 + [0.1] * 90
            measurement.pass_held_gib = [0.5] * 40 + [0.7 if bad else 0.5] * 56
        assert (ruling(study(candidate), rule).verdict is Verdict.PASS) is not last_is_bad

    def test_nothing_is_said_of_short_passes_and_images_from_the_cache(self) -> None:
        candidate = variant("short")
        candidate.measurements[0].pass_s, candidate.measurements[0].pass_held_gib = [0.1] * 6 + [0.9], [0.5] * 6 + [0.9]
        rules = {each.rule for each in judged(study(candidate)).rulings}
        assert not rules & {"rarely slow", "growth when drawn"}
        rules = {each.rule for each in judged(study(variant("it"))).rulings}
        assert not rules & {"rarely slow", "growth when drawn", "other noise"}

    def test_another_noise_draws_another_image(self) -> None:
        candidate = variant("it")
        candidate.measurements[0].other_noise = [0.01, 0.0]
        assert ruling(study(candidate), "other noise").verdict is Verdict.FAIL


class TestAround:
    @pytest.mark.parametrize(("seconds", "verdict"), [(0.02, None), (0.3, Verdict.INCONCLUSIVE)])
    def test_work_that_no_time_holds(self, seconds: float, verdict: Verdict | None) -> None:
        candidate, baseline = variant("it"), variant("baseline", contract="exact")
        for side, around_s in ((candidate, 0.01 + seconds), (baseline, 0.01)):
            for measurement in side.measurements:
                measurement.around_s = [around_s] * len(measurement.latency_s)
        found = [each.verdict for each in judged(study(candidate, baseline)).rulings if each.rule == "beside the call"]
        assert found == ([] if verdict is None else [verdict])

    @pytest.mark.parametrize(("cores", "threads", "fails"), [(1.05, 1, False), (1.9, 1, True), (1.9, None, False)])
    def test_more_cores_than_threads(self, cores: float, threads: int | None, fails: bool) -> None:
        candidate = variant("it")
        candidate.config = replace(candidate.config, hardware=replace(candidate.config.hardware, threads=threads))
        for measurement in candidate.measurements:
            measurement.interference = [Interference(0.0, 0.0, cores=cores) for _ in measurement.latency_s]
        result = study(candidate)
        baseline = result.variant("baseline")
        baseline.config = replace(baseline.config, hardware=candidate.config.hardware)
        found = [each.verdict for each in judged(result).rulings if each.rule == "cores"]
        assert found == ([Verdict.FAIL] if fails else [])


class TestStages:
    """The reference's calls take 0.1 s; the candidate's as long, unless told otherwise."""

    @staticmethod
    def said_of(candidate: VariantResult, step_s: float, host: float = 1.0) -> list[str]:
        """What is said of a candidate whose steps take so long; the reference and the control on a host so slow."""
        reference = variant("baseline", contract="exact")
        result = study(candidate, reference)
        for side in (reference, result.variant("control")):
            side.measurements[0].stages_s = {"text_encoder": [0.01 * host], "denoiser_step": [0.04 * host] * 2}
        candidate.measurements[0].stages_s = {"text_encoder": [0.005], "denoiser_step": [step_s, step_s]}
        found = [each for each in judged(result).rulings if each.rule == "stages"]
        assert {each.verdict for each in found} <= {Verdict.INCONCLUSIVE}
        assert [f"it: {each.reason}" for each in found] == [doubt for doubt in doubts_of(result) if "stages" in doubt]
        return [each.reason for each in found]

    @pytest.mark.parametrize(
        ("step_s", "said"), [(0.045, []), (0.1, ["changes what it does"]), (0.01, ["no stage explains"])]
    )
    def test_that_contradict_other_calls(self, step_s: float, said: list[str]) -> None:
        found = self.said_of(variant("it"), step_s)
        assert [words in reason for words, reason in zip(said, found, strict=True)] == [True] * len(said)

    @pytest.mark.parametrize(("seconds", "doubted"), [(0.012, False), (0.02, True)])
    def test_beside_which_a_call_takes_as_long_as_the_reference(self, seconds: float, doubted: bool) -> None:
        """A GPU waits for launches: a graph shortens the stages, and the scheduler's steps take what they took."""
        assert bool(self.said_of(variant("it", seconds=seconds), 0.0001)) is doubted

    def test_on_a_host_that_became_slower(self) -> None:
        assert self.said_of(variant("it"), 0.08, host=1.6) == []
        assert self.said_of(variant("it"), 0.16, host=1.6)

    def test_on_a_host_that_is_slow_at_times(self) -> None:
        candidate = variant("it")
        candidate.measurements[2].latency_s[3] = 0.17
        assert self.said_of(candidate, 0.08) == []
        assert self.said_of(candidate, 0.16)

    @pytest.mark.parametrize(("batch", "doubted"), [(1, False), (12, True)])
    def test_beside_drawn_calls_of_the_same_batch(self, batch: int, doubted: bool) -> None:
        candidate = variant("it")
        candidate.measurements[0].drawn_s, candidate.measurements[0].drawn_batch = [0.17], batch
        assert bool(self.said_of(candidate, 0.08)) is doubted


CHEATS = {
    "few": '"+trial=fewer_steps_at_first", "trial.calls=4"',
    "child": '"+trial=memory_in_child"',
}


@pytest.fixture(scope="module")
def cheated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    variants = ", ".join(f"{name}: [{option}]" for name, option in CHEATS.items())
    return sdopt(
        tmp_path_factory.mktemp("cheated"),
        *("run", "--config-dir", str(CONF), "study=explicit", f"study.variants={{baseline: [], {variants}}}", *SMALL),
        *("protocol.rounds=2", "protocol.stage_calls=0", "workload.steps=6", "workload.size=64"),
        *("quality.prompt_count=5", "quality.batch_size=1"),
    )


class TestCheats:
    def test_an_honest_variant_raises_no_doubt(self, cheated: Finished) -> None:
        result = cheated.result
        assert {row.status for row in (result.variant("baseline"), result.control) if row} == {Status.OK}
        assert not [doubt for doubt in doubts_of(result) if "baseline" in doubt]
        for measurement in result.variant("baseline").measurements:
            assert {image.error for image in measurement.timed_images} == {0.0}
            assert len(measurement.timed_images) == 2
            assert min(measurement.other_noise) > 0
            assert len(measurement.pass_s) == len(measurement.pass_held_gib) == 5
            assert measurement.repeated == 0

    def test_prompts_are_others_in_each_round_and_the_same_for_all(self, cheated: Finished) -> None:
        prompts = {
            tuple(image.prompt_index for image in measurement.timed_images)
            for row in cheated.result.variants
            for measurement in row.measurements
            if row.status is Status.OK
        }
        # The first call had prompt 1 and the discarded round 3.
        assert prompts == {(3, 4)}

    def test_calls_that_draw_are_timed_beside_the_baseline(self, cheated: Finished) -> None:
        result = cheated.result
        for row in (result.variant("baseline"), result.variant("few"), result.variant("child")):
            for measurement in row.measurements:
                pairs = 0 if row.name == "baseline" or measurement.replicate else 2
                assert len(measurement.drawn_beside_s) == pairs
                assert len(measurement.drawn_s) == (0 if measurement.replicate else 2)

    def test_steps_that_only_drawn_calls_take(self, cheated: Finished) -> None:
        [doubt] = [doubt for doubt in doubts_of(cheated.result) if doubt.startswith("few: ")]
        assert "in process 1, 2 of 2 images of timed calls differ from those of the quality pass" in doubt
        assert f"Doubtful: {doubt}" in cheated.shown

    def test_memory_of_a_child_is_the_variants(self, cheated: Finished) -> None:
        peaks = [m.peak[1] for m in cheated.result.variant("child").measurements if m.peak]
        plain = [m.peak[1] for m in cheated.result.variant("baseline").measurements if m.peak]
        assert min(peaks) > max(plain) + 0.2

    def test_is_all_in_the_record(self, cheated: Finished) -> None:
        result = cheated.result
        assert parse_result(to_json(result)) == result
        for row in result.variants:
            for measurement in row.measurements:
                if row.status is Status.OK:
                    assert len(measurement.observed_s) == len(measurement.latency_s) == len(measurement.held_gib)
                    assert measurement.memory_after


@pytest.mark.parametrize(
    ("told", "waited", "problem"),
    [
        (1.0, 0.0, ""),
        (0.98, 0.0, ""),
        (0.8, 0.0, "took 0.8 s, but the study's own clock says 1 s"),
        (1.2, 0.0, ""),
        (0.8, 0.3, ""),
        (0.5, 0.3, "took 0.5 s, but the study's own clock says 1 s"),
    ],
)
def test_a_clock_that_mostly_differs_is_told(told: float, waited: float, problem: str) -> None:
    calls = [Interference(waited, 0.0) for _ in range(5)]
    measurement = Measurement(0, latency_s=[told] * 3 + [1.0] * 2, observed_s=[1.0] * 5, interference=[*calls])
    assert problem in clocks_differ(measurement)
    assert bool(clocks_differ(measurement)) == bool(problem)
    few = Measurement(0, latency_s=[told] * 3, observed_s=[1.0] * 3, interference=[*calls[:3]])
    assert clocks_differ(few) == ""


@pytest.mark.parametrize(
    ("seconds", "over_after_s", "said"),
    [(0.1, 0.2, ""), (-0.1, 0.2, "-0.1 s"), (math.nan, 0.2, "nan s"), (0.3, 0.2, "but the call was over after 0.2 s")],
)
def test_a_time_that_cannot_be_is_told(seconds: float, over_after_s: float, said: str) -> None:
    call = TimedCall(seconds, None, Compiled(0, 0), over_after_s=over_after_s)
    assert said in call.absurd
    assert bool(call.absurd) == bool(said)
