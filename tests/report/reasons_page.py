"""Writes `sdopt/gate/SENTENCES.md`: what each rule of the packaged gates says when it fails and when it is undecided.

`python -m tests.report.reasons_page` writes the page again; `test_reasons.py` fails if it is out of date.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sdopt.config.composer import gate_of
from sdopt.config.paths import CONF
from sdopt.gate.judge import judge
from sdopt.gate.rulings import against
from sdopt.gate.rulings import ruled as gate_ruling
from sdopt.record.records import Status, VariantResult
from sdopt.record.samples import Interference, TimedImage
from sdopt.record.scores import BrokenImage, Score
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.report.markdown import markdown
from sdopt.report.sentences.reasons import reasons_of
from sdopt.report.sentences.rulings import PROPERTY_OF, sentence
from sdopt.schema import Gate, Rule
from sdopt.statistics.bounds import Bounds, differences
from sdopt.statistics.measures import FIRST_IMAGE, RULED
from tests.command import ROOT
from tests.gate.test_judge import FIT, study, variant

PAGE = ROOT / "sdopt" / "gate" / "SENTENCES.md"

_HEAD = """# What the gates say

What each rule of the [packaged gates](README.md) says when an option fails it, and when it is undecided; below, what
every gate asks besides. The figures are examples.
<!-- Written by python -m tests.report.reasons_page -->

"""

_LIMITS = {
    "perceptual": 0.002,
    "latents_error": 0.02,
    "clip_score": 0.5,
    "cmmd": 0.011,
    "mse": 1e-5,
}
"""Limits like those of the packaged model, for rules that take a share of a calibration."""

_OF_REFERENCE = {"brightness": 0.5, "contrast": 0.2, "fine_detail": 0.004}
"""What the baseline's images have of a property, of which changes are told as shares."""

_OF_A_SET = ("cmmd", "fid", "kid")
"""Distances between sets of images, for which no prompt is the worst."""

GATES = sorted(
    path.stem for path in (CONF / "gate").glob("*.yaml") if path.stem != "none"
)


def rules() -> list[Rule]:
    """Returns every rule of the packaged gates, each once."""
    found: dict[str, Rule] = {}
    for gate in GATES:
        for of_contract in gate_of([f"gate={gate}"]).gate.rules.values():
            found |= {f"{rule.metric} {rule.test}": rule for rule in of_contract}
    return list(found.values())


def ruled(rule: Rule, verdict: Verdict) -> Ruling:
    """Returns a ruling as the gate makes it, of figures that lead to a verdict."""
    failing = verdict is Verdict.FAIL
    if rule.metric in RULED or rule.metric == FIRST_IMAGE:
        return of_ratio(rule, failing)
    limit = rule.limit or rule.margin or rule.low or _LIMITS.get(rule.metric, 0.01)
    values = limit * (
        (4 if failing else 1.2) + (0.1 if failing else 3.0) * np.sin(np.arange(32))
    )
    score = Score(float(values.mean()), list(map(float, values)))
    if rule.how.figure == "share":
        beyond = 16 if failing else 2
        score = Score(score.estimate, [*[4 * limit] * beyond, *[0.0] * 30])
    if rule.how.side == "least":
        worse = differences(score.per_prompt, [0.0] * 32, -1.0)
        score = Score(-float(values.mean()), worse)
    confidence = rule.confidence or 0.95
    rule = replace(rule, low=0.0, high=limit, confidence=confidence)
    of_value = rule.how.figure == "value" and rule.how.side == "least"
    return gate_ruling(rule, rule.metric, score, -limit if of_value else limit)


def of_ratio(rule: Rule, failing: bool) -> Ruling:
    """Returns a ruling on a speed-up or another ratio, of an interval beyond the limit or on both sides of it."""
    limit, at_least = rule.limit or 1.0, rule.how.side == "least"
    estimate = limit * (0.8 if at_least else 1.25)
    half = 0.01 if failing else 0.3
    bounds = Bounds(estimate, estimate - half, estimate + half, 0.1, 3, "process")
    return against(rule, rule.metric, bounds, limit, at_least)


def said(rule: Rule, verdict: Verdict) -> str:
    """Returns what a rule says, with a worst prompt where it is on images."""
    if verdict is Verdict.INCONCLUSIVE and not rule.how.has_bounds:
        return "–"
    worst = "a red fox" if has_worst_prompt(rule) else ""
    whole = _OF_REFERENCE.get(PROPERTY_OF.get(rule.metric, rule.metric), 0.0)
    return sentence(ruled(rule, verdict), worst=worst, whole=whole)


def has_worst_prompt(rule: Rule) -> bool:
    """Returns whether a rule is on figures that each prompt has one of."""
    is_ratio = rule.metric in RULED or rule.metric == FIRST_IMAGE
    return not (is_ratio or rule.metric.startswith(_OF_A_SET))


def broken(**changes: Any) -> VariantResult:
    """Returns a variant of which all is in order, but for some changes: to itself, or to each of its processes."""
    of_variant = {"claims", "denoiser_calls", "seconds", "status", "trips"}
    row = variant(
        "it", **{name: changes[name] for name in of_variant if name in changes}
    )
    for number, measurement in enumerate(row.measurements):
        samples = measurement.main
        samples.timed_images = [TimedImage(0, 4, changes.get("error", 0.0))]
        samples.traced = {"operators": changes.get("operators", 2.0)}
        measurement.pass_s = changes.get("pass_s", [0.1] * 96)
        measurement.pass_held_gib = changes.get("pass_held_gib", [0.5] * 96)
        for call, sample in enumerate(samples.calls):
            sample.held_gib = 1 + changes.get("grows_gib", [0.0] * 3)[number] * call
            sample.repeated = "repeated" in changes
            sample.interference = changes.get("interference")
    threads = replace(row.config.hardware, threads=1)
    row.config = replace(row.config, hardware=threads)
    row.reason = "its hooks ran, and no image differs"
    return row


MIB = 1 / 1024

CHECKED: Sequence[tuple[str, dict[str, Any], dict[str, Any]]] = (
    ("tripwires", {"trips": [BrokenImage("black", "images/a.png", "all pixels are 0")]}, {}),
    ("steps", {"denoiser_calls": 12}, {}),
    ("timed as drawn", {"error": 0.01}, {}),
    ("engaged", {"status": Status.NOT_ENGAGED}, {"operators": 1.0}),
    ("fresh prompts", {}, {"repeated": True, "seconds": 0.05}),
    ("cores", {"interference": Interference(0.0, 0.0, cores=2.0)}, {}),
    ("rarely slow", {"pass_s": [0.1] * 84 + [0.4] * 12}, {"pass_s": [0.1] * 93 + [0.4] * 3}),
    ("memory growth", {"grows_gib": [4 * MIB] * 3}, {"grows_gib": [0.0, 4 * MIB, 4 * MIB]}),
    (
        "growth when drawn",
        {"pass_held_gib": [0.5] * 40 + [0.7] * 56},
        {"pass_held_gib": [0.5] * 40 + [0.56] * 56},
    ),
    ("must pay", {"seconds": 0.1}, {"seconds": 0.0985}),
    ("undisturbed", {}, {"interference": Interference(0.3, 0.0)}),
)  # fmt: skip
"""What every gate asks, by the name of its rulings, with variants that fail it and that leave it undecided."""


def asked(rule: str, changes: dict[str, Any], verdict: Verdict) -> str:
    """Returns what the check of a gate says of a variant with some changes; "–" without any."""
    if not changes:
        return "–"
    candidate = broken(claims=["latency"], **changes)
    baseline = variant("baseline", contract="exact")
    baseline.config = candidate.config
    baseline.measurements[0].pass_s = [0.1] * 96
    baseline.measurements[0].pass_held_gib = [0.5] * 96
    result = study(candidate, baseline, mse=Score(0.0, [0.0]))
    judge(result, Gate("g", {"lossy": []}), FIT)
    [judged] = result.judgements
    [ruling] = [one for one in judged.rulings if one.rule == rule]
    assert ruling.verdict is verdict, (rule, ruling)
    [reason] = reasons_of(
        replace(judged, verdict=verdict, rulings=[ruling], claims={}), result
    )
    return reason


def page() -> str:
    """Returns the page."""
    rows = []
    for rule in rules():
        name = f"`{rule.metric}` {rule.test}"
        rows.append((name, said(rule, Verdict.FAIL), said(rule, Verdict.INCONCLUSIVE)))
    of_all = []
    for name, fails, is_open in CHECKED:
        failed = asked(name, fails, Verdict.FAIL)
        of_all.append((name, failed, asked(name, is_open, Verdict.INCONCLUSIVE)))
    headings = ("rule", "fail", "undecided")
    return f"{_HEAD}{markdown(headings, rows)}\n\n{markdown(headings, of_all)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
