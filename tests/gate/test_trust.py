"""Whether time and memory can be trusted: rules on records; `test_commands` measures options that go wrong."""

import math
from dataclasses import replace
from typing import Any

import pytest

from sdopt.gate.judge import judge
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.samples import Interference, TimedImage
from sdopt.record.scores import Spread
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.schema import Gate, Rule
from tests.gate.test_judge import FIT, study, variant
from tests.records import known, reconfigure, retime, samples_of

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
        setattr(candidate.measurements[-1].shapes[0], key, value)
    return study(candidate)


class TestTimedAsDrawn:
    @pytest.mark.parametrize("error", [2e-6, 0.1, math.nan])
    def test_fails_for_one_image_of_one_process(self, error: float) -> None:
        images = [TimedImage(0, 0, 0.0), TimedImage(7, 0, error)]
        found = ruling(
            of_candidate(variant("it"), timed_images=images), "timed as drawn"
        )
        assert found.verdict is Verdict.FAIL
        assert "1 of 4 images of timed calls, in process 3," in found.reason
        assert "prompt 8" in found.reason

    def test_allows_what_the_measured_floor_makes_or_the_candidates_type_rounds(
        self,
    ) -> None:
        result = of_candidate(variant("it"), timed_images=[TimedImage(0, 0, 2e-6)])
        result.floors["numerical"] = {"mse": Spread(1e-6, 0.0, 12)}
        assert ruling(result, "timed as drawn").verdict is Verdict.PASS
        candidate = variant("it")
        options = {"precision": {"weights": "bfloat16", "autocast": None}}
        candidate.config = replace(candidate.config, options=options)
        result = of_candidate(candidate, timed_images=[TimedImage(0, 0, 2e-5)])
        assert ruling(result, "timed as drawn").verdict is Verdict.PASS

    @pytest.mark.parametrize("images", [[], [TimedImage(0, 0, None)]])
    def test_fails_closed(self, images: list[TimedImage]) -> None:
        found = ruling(
            of_candidate(variant("it"), timed_images=images), "timed as drawn"
        )
        assert found.verdict is Verdict.NOT_COMPARABLE
        assert "in process 3" in found.reason


class TestDisturbed:
    @pytest.mark.parametrize(
        ("calls", "verdict"), [(2, Verdict.PASS), (7, Verdict.INCONCLUSIVE)]
    )
    def test_where_most_calls_that_decide_were(
        self, calls: int, verdict: Verdict
    ) -> None:
        result = study(variant("it"))
        reconfigure(result, "protocol", interference=0.02)
        for samples in samples_of(*result.variants):
            retime(
                samples,
                interference=[
                    Interference(0.3 if call < calls else 0.0, 0.0) for call in range(8)
                ],
            )
        assert judged(result).verdict is verdict

    @pytest.mark.parametrize(
        ("limit", "counted", "said"),
        [(0.02, False, True), (0.02, True, False), (None, False, False)],
    )
    def test_a_verdict_says_where_nothing_was_counted(
        self, limit: float | None, counted: bool, said: bool
    ) -> None:
        result = study(variant("it"))
        reconfigure(result, "protocol", interference=limit)
        for samples in samples_of(result.variant("it")):
            retime(samples, interference=Interference(0.0, 0.0) if counted else None)
        assert (
            "nothing counted what other programs took" in judged(result).note
        ) is said


class TestGrowth:
    @pytest.mark.parametrize(
        ("held_gib", "verdict"),
        [
            ([1.0] * 8, Verdict.PASS),
            ([1 + 4 / 1024 * call for call in range(8)], Verdict.FAIL),
            ([], Verdict.NOT_COMPARABLE),
        ],
    )
    def test_from_call_to_call(self, held_gib: list[float], verdict: Verdict) -> None:
        candidate = variant("it")
        for samples in samples_of(candidate):
            retime(samples, held_gib=held_gib)
        found = ruling(study(candidate), "memory growth")
        assert found.verdict is verdict
        first, *_ = found.reason.split("; ")  # all that an answer says of it
        assert ("two rounds or more" in first) is (not held_gib)

    def test_the_peak_after_the_last_round_counts(self) -> None:
        candidate = variant("it")
        for measurement in candidate.measurements:
            assert measurement.shapes[0].memory
            measurement.memory_after = replace(
                measurement.shapes[0].memory, children_peak_gib=1.0
            )
        found = known(study(candidate).comparisons[0].shapes[0].memory_ratio)
        assert found.estimate == pytest.approx(2, abs=0.01)


class TestRepeatedPrompts:
    def test_leave_a_gain_unproven(self) -> None:
        candidate = variant("it", seconds=0.05, claims=["latency"])
        candidate.measurements[-1].shapes[0].calls[0].repeated = True
        result = study(candidate)
        assert ruling(result, "must pay").verdict is Verdict.PASS
        assert ruling(result, "fresh prompts").verdict is Verdict.INCONCLUSIVE


class TestQualityPass:
    @pytest.mark.parametrize(
        ("slow", "reference", "verdict"),
        [(0, 0, Verdict.PASS), (1, 0, Verdict.PASS), (3, 0, Verdict.INCONCLUSIVE), (6, 0, Verdict.FAIL),
         (6, 6, Verdict.INCONCLUSIVE)],
    )  # fmt: skip
    def test_calls_that_are_rarely_slow(
        self, slow: int, reference: int, verdict: Verdict
    ) -> None:
        candidate, baseline = variant("it"), variant("baseline", contract="exact")
        for side, count in ((candidate, slow), (baseline, reference)):
            side.measurements[0].pass_s = [0.5] * count + [0.1] * (96 - count)
            side.measurements[0].pass_held_gib = [0.5] * 96
        assert ruling(study(candidate, baseline), "rarely slow").verdict is verdict

    @pytest.mark.parametrize(
        ("held_gib", "verdict"),
        [
            ([0.5] * 96, Verdict.PASS),
            ([0.5] * 40 + [0.5 + 60 / 1024] * 56, Verdict.INCONCLUSIVE),
            ([0.5] * 40 + [0.5 + 200 / 1024] * 56, Verdict.FAIL),
            ([0.5 + 0.04 * number / 1024 for number in range(96)], Verdict.PASS),
            # 24 MiB over the pass are within the limit of what may be kept, but grow with every prompt.
            ([0.5 + 0.25 * number / 1024 for number in range(96)], Verdict.FAIL),
            (
                [0.5] * 30 + [0.508] * 20 + [0.52] * 46,
                Verdict.PASS,
            ),  # an allocator's steps
        ],
    )
    def test_memory_that_grows(self, held_gib: list[float], verdict: Verdict) -> None:
        candidate = variant("it")
        candidate.measurements[0].pass_s, candidate.measurements[0].pass_held_gib = (
            [0.1] * 96,
            held_gib,
        )
        assert ruling(study(candidate), "growth when drawn").verdict is verdict


class TestCores:
    @pytest.mark.parametrize(
        ("cores", "threads", "fails"),
        [(1.05, 1, False), (1.9, 1, True), (1.9, None, False)],
    )
    def test_more_cores_than_threads(
        self, cores: float, threads: int | None, fails: bool
    ) -> None:
        candidate = variant("it")
        candidate.config = replace(
            candidate.config,
            hardware=replace(candidate.config.hardware, threads=threads),
        )
        for samples in samples_of(candidate):
            retime(samples, interference=Interference(0.0, 0.0, cores=cores))
        result = study(candidate)
        baseline = result.variant("baseline")
        baseline.config = replace(baseline.config, hardware=candidate.config.hardware)
        found = [
            each.verdict for each in judged(result).rulings if each.rule == "cores"
        ]
        assert found == ([Verdict.FAIL] if fails else [])
