"""What a comparison with an earlier result claims is what its rules compared, and nothing of the study itself."""

import json
from copy import deepcopy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sdopt.contract import Contract
from sdopt.gate.drift import judge_drift
from sdopt.record.records import Status, StudyResult
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.report.summary import summary_of
from sdopt.report.verdicts import (
    against_sentence,
    junit,
    summary_markdown,
    verdict_json,
    verdict_markdown,
)
from sdopt.schema import Gate, Rule
from sdopt.statistics.comparing import compare
from tests.gate.test_drift import GATE
from tests.gate.test_judge import FIT, clip
from tests.records import retime, samples_of

OF_SPEED = [Rule("speedup", "at_least", limit=0.9)]
OF_IMAGES = [rule for rule in GATE.rules["equivalent"] if rule.metric == "clip_score"]


def compared(
    later: StudyResult, earlier: StudyResult, rules: list[Rule]
) -> StudyResult:
    """The later result with the verdicts of a comparison with an earlier one."""
    compare(later)
    later.judgements = judge_drift(
        later, earlier, Gate("g", {"equivalent": rules}), FIT
    )
    later.gate = "g"
    return later


def slower_by(result: StudyResult, name: str, factor: float) -> None:
    for samples in samples_of(result.variant(name)):
        retime(samples, [factor * seconds for seconds in samples.latency_s])


@pytest.mark.parametrize(
    ("rules", "said", "unsaid"),
    [
        (
            [*OF_IMAGES, *OF_SPEED],
            "No speed-up is smaller and no score of the images is worse than in",
            "no rule compared",
        ),
        (
            OF_SPEED,
            "No speed-up is smaller than in the earlier result; no rule compared images",
            "is worse",
        ),
        (
            OF_IMAGES,
            "No score of the images is worse than in the earlier result; no rule compared speed",
            "speed-up is smaller",
        ),
    ],
    ids=["both", "speed alone", "images alone"],
)
def test_says_what_was_compared_alone(
    rules: list[Rule], said: str, unsaid: str
) -> None:
    later = clip(0.0)
    sentence = against_sentence(compared(later, deepcopy(later), rules))
    assert sentence.startswith(said)
    assert unsaid not in sentence


def test_names_are_told_apart_though_they_hold_commas() -> None:
    later = clip(0.0)
    result = compared(later, deepcopy(later), OF_SPEED)
    for judgement, name in zip(result.judgements, ["a", "a, b"], strict=True):
        judgement.candidate = name
        judgement.verdict = Verdict.INCONCLUSIVE
    assert "2 variants undecided: a; a, b." in against_sentence(result)


def test_a_machine_that_became_slower_is_not_called_as_fast_as_before() -> None:
    """All times are twice as long: speed-ups are the same, and of times nothing was asked."""
    later = clip(0.0)
    earlier = deepcopy(later)
    for row in later.variants:
        slower_by(later, row.name, 2.0)
    sentence = against_sentence(compared(later, earlier, OF_SPEED))
    assert "slower" not in sentence
    assert "times of the two runs are not compared" in sentence


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (Status.FAILED, "it worked in the earlier result and fails now: no 'x'. No "),
        (Status.SKIPPED, "No speed-up is "),
    ],
)
def test_what_worked_and_fails_now_comes_first(status: Status, said: str) -> None:
    later = clip(0.0)
    earlier = deepcopy(later)
    row = later.variant("it")
    row.status, row.reason = status, "no 'x'.\nmore"
    result = compared(later, earlier, OF_SPEED)
    assert against_sentence(result).startswith(said)
    assert result.judgements[1].verdict is Verdict.NOT_COMPARABLE
    earlier.variant("it").status = status
    assert "worked" not in against_sentence(compared(later, earlier, OF_SPEED))


def test_a_gain_that_shrank_is_no_time_that_grew() -> None:
    """The variant takes as long as before, and its baseline half as long."""
    later = clip(0.0)
    earlier = deepcopy(later)
    for row in later.variants:
        if row.name != "it":
            slower_by(later, row.name, 0.5)
    result = compared(later, earlier, OF_SPEED)
    summary = summary_of(result)
    texts = [
        against_sentence(result),
        verdict_markdown(summary),
        junit(summary).decode(),
    ]
    for text in texts:
        assert "over its own baseline is 50 % smaller (10 % allowed)" in text
        assert "% slower" not in text


def test_data_holds_the_comparison_and_not_the_study() -> None:
    """It gains much over its baseline, and less than it did: a reader of the data must find that alone."""
    earlier = clip(0.0)
    slower_by(earlier, "it", 0.2)
    later = deepcopy(earlier)
    slower_by(later, "it", 2.0)
    result = compared(later, earlier, OF_SPEED)
    sentence, summary = against_sentence(result), summary_of(result)
    data = json.loads(verdict_json(summary, sentence))
    assert data["answer"] == sentence
    assert "faster" in summary.sentence
    assert data["variants"] == [
        {"variant": "baseline", "gate": "pass"},
        {"variant": "it", "gate": "fail"},
    ]
    for suite in ElementTree.fromstring(junit(summary)):
        assert [found.get("name") for found in suite.iter("property")] == ["gate"]
    alone = deepcopy(later)
    ruling = Ruling("at_most", "mse", Verdict.FAIL, "large")
    judged = Judgement("it", "baseline", "", Contract.LOSSY, Verdict.FAIL, [ruling])
    alone.judgements = [judged]
    text = summary_markdown(summary, sentence, summary_of(alone))
    assert text.startswith(f"**{sentence}**".replace("+", r"\+")[:20])
    drift, _, by_itself = text.partition("The judged result by itself")
    assert "of the earlier result" in drift
    assert "| worse | fail |" not in drift
    assert "| worse | fail |" in by_itself
    assert "(not judged)" not in text


def test_images_are_held_against_the_earlier_ones(tmp_path: Path) -> None:
    later = clip(0.0)
    earlier = deepcopy(later)
    score = later.variant("it").quality["clip_score_x"]
    score.per_prompt = [value - 2 for value in score.per_prompt if value is not None]
    result = compared(later, earlier, OF_IMAGES)
    assert "than those of the earlier result" in against_sentence(result)
    assert "baseline's" not in against_sentence(result)


def test_a_reason_is_said_once() -> None:
    earlier = clip(0.0)
    slower_by(earlier, "it", 0.2)
    later = deepcopy(earlier)
    slower_by(later, "it", 2.0)
    result = compared(later, earlier, OF_SPEED)
    text = verdict_markdown(summary_of(result), against_sentence(result))
    told, _, _ = text.partition("All ")
    assert told.count("over its own baseline is") == 1
