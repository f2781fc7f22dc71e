"""Two results of one study: what is comparable, what is refused by name, and what got worse."""

from collections.abc import Callable
from copy import deepcopy

import pytest

from sdopt.errors import UsageError
from sdopt.gate.drift import differences, judge_drift
from sdopt.results.records import StudyResult, Verdict
from sdopt.schema import Gate, Rule
from tests.gate.test_judge import CALIBRATION, NON_INFERIOR, clip
from tests.records import reconfigure

GATE = Gate(
    "g",
    {
        "equivalent": [NON_INFERIOR, Rule("mse", "at_most", limit=1e-5), Rule("speedup", "at_least", limit=0.9)],
        "lossy": [NON_INFERIOR, Rule("speedup", "at_least", limit=0.9)],
    },
)


@pytest.fixture
def results() -> tuple[StudyResult, StudyResult]:
    """A later and an earlier result that are the same."""
    later = clip(0.0)
    return later, deepcopy(later)


def test_the_same_passes(results: tuple[StudyResult, StudyResult]) -> None:
    later, earlier = results
    assert differences(later, earlier) == []
    found = judge_drift(later, earlier, GATE, CALIBRATION)
    assert {judgement.candidate: judgement.verdict for judgement in found} == {
        "baseline": Verdict.PASS,
        "it": Verdict.PASS,
    }
    assert "images were not compared" in found[0].note


def test_a_score_that_fell_fails(results: tuple[StudyResult, StudyResult]) -> None:
    later, earlier = results
    score = later.variant("it").quality["clip_score_x"]
    score.per_prompt = [value - 2 for value in score.per_prompt if value is not None]
    assert score.estimate is not None
    score.estimate -= 2
    verdicts = {judgement.candidate: judgement.verdict for judgement in judge_drift(later, earlier, GATE, CALIBRATION)}
    assert verdicts == {"baseline": Verdict.PASS, "it": Verdict.FAIL}


def test_a_speedup_that_was_lost_fails(results: tuple[StudyResult, StudyResult]) -> None:
    later, earlier = results
    for measurement in later.variant("it").measurements:
        measurement.latency_s = [2 * seconds for seconds in measurement.latency_s]
    found = judge_drift(later, earlier, GATE, CALIBRATION)
    (ruling,) = [r for judgement in found for r in judgement.rulings if r.verdict is Verdict.FAIL]
    assert ruling.metric == "speedup"
    assert ruling.estimate == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r.environment.device.update(name="another"), "device: another against a device"),
        (lambda r: reconfigure(r, "workload", seed=3), "workload.seed: 3 against 0"),
        (lambda r: reconfigure(r, "model", name="sd15"), "model.name: sd15 against emoji"),
        (lambda r: reconfigure(r, "scheduler", class_name="Euler"), "scheduler.class_name: Euler against"),
    ],
)
def test_other_work_is_refused_and_named(
    results: tuple[StudyResult, StudyResult], change: Callable[[StudyResult], None], named: str
) -> None:
    later, earlier = results
    change(later)
    with pytest.raises(UsageError, match=named):
        judge_drift(later, earlier, GATE, CALIBRATION, waived=("versions", "sdopt"))


def test_other_versions_need_a_waiver_and_are_then_judged_as_lossy(results: tuple[StudyResult, StudyResult]) -> None:
    later, earlier = results
    later.environment.packages["torch"] = "9"
    with pytest.raises(UsageError, match=r"torch: 9 against None.*--waive versions"):
        judge_drift(later, earlier, GATE, CALIBRATION)
    found = judge_drift(later, earlier, GATE, CALIBRATION, waived=("versions",))
    assert {judgement.contract for judgement in found} == {"lossy"}
    assert "torch: 9 against None" in found[0].note
    assert {judgement.verdict for judgement in found} == {Verdict.PASS}
