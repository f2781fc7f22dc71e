"""Reads from a study the figures of each candidate of a search, and why a candidate is ruled out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sdopt.gate.calibration import calibration_for
from sdopt.gate.judge import judge
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import Verdict
from sdopt.report.sentences.changes import percent_text
from sdopt.report.sentences.objections import broken_because
from sdopt.report.sentences.reasons import reasons_of
from sdopt.schema import Gate
from sdopt.statistics.figures import rows_of
from sdopt.statistics.giving_up import at_least_slower, bound_text
from sdopt.statistics.measures import (
    MEMORY_RATIO,
    SPEEDUP,
    is_of_images,
    smallest_change,
    spared_growth,
)
from sdopt.statistics.rows import Row

if TYPE_CHECKING:
    from sdopt.search.config import SearchConfig

RATIOS = {"latency": SPEEDUP.name, "memory": MEMORY_RATIO.name}
"""The ratio from which each objective is computed."""


@dataclass(frozen=True)
class CandidateFinding:
    """What one study says of one candidate, besides the figures of its row.

    Attributes:
        row: its row in the study.
        losses: the value to minimise, by objective; for latency and memory, the log ratio to the baseline.
        distances: the distance for each prompt; empty if the metric has none, or one is not finite.
        excess: by limit, the share by which the candidate exceeds it; negative if it keeps the limit.
        out: why the candidate cannot win; "" if it may.
        spoiled: whether it is ruled out because its images break a rule of the gate.
        baseline: the row of the study's baseline.
    """

    row: Row
    losses: dict[str, float]
    distances: tuple[float, ...]
    excess: dict[str, float]
    out: str
    spoiled: bool
    baseline: Row | None = None

    @property
    def processes(self) -> int:
        """The number of processes that timed it."""
        return len(self.row.variant.measurements)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the baseline it is."""
        return math.exp(-self.losses["latency"]) if "latency" in self.losses else None


def findings_of(
    result: StudyResult, config: SearchConfig, gate: Gate
) -> dict[str, CandidateFinding]:
    """Returns the finding on each candidate of a study, by name.

    The study ran with `gate=none`, because few images decide little. It is judged here by `gate`: the rules that so few
    images can decide. A candidate that fails one is ruled out.
    """
    broken = {
        row.name: why for row in result.candidates if (why := broken_because(row))
    }
    if gate.judges and any(row.quality for row in result.variants):
        judge(result, gate, calibration_for(result, gate.calibration))
    failed = {
        judged.candidate: judged
        for judged in result.judgements
        if judged.verdict is Verdict.FAIL
    }
    findings = {}
    rows = rows_of(result)
    baseline = next(row for row in rows if row.name == result.baseline)
    for row in rows:
        if row.comparison is None or row.variant.is_control:
            continue
        refusal = failed.get(row.name)
        because = broken.get(row.name, "")
        spoiled = False
        if not because and refusal is not None:
            because = "; ".join(reasons_of(refusal, result))
            spoiled = any(
                ruling.verdict is Verdict.FAIL and is_of_images(ruling.metric)
                for ruling in refusal.rulings
            )
        because = because or _memory_beyond(row, gate, result)
        finding = _finding(row, config, because, spoiled)
        # A study that ended early says nothing of a candidate that it had not come to.
        is_complete = set(config.objectives) <= finding.losses.keys()
        if is_complete or row.status is not Status.INTERRUPTED:
            findings[row.name] = replace(finding, baseline=baseline)
    return findings


def _finding(
    row: Row, config: SearchConfig, because: str, spoiled: bool
) -> CandidateFinding:
    """Returns the finding on one candidate; `because` is why the gate or its evidence rules it out, "" if neither."""
    losses = {}
    for objective, name in RATIOS.items():
        ratio = row.beside_reference.get(name)
        if ratio is not None:
            losses[objective] = -math.log(ratio.measure.gain(ratio.interval.estimate))
    score = _score(row, config.distance)
    distance = score.estimate if score else None
    distances: list[float] = []
    if score and distance is not None:
        losses["distance"] = distance
        by_prompt = [value for value in score.per_prompt if value is not None]
        distances = by_prompt if len(by_prompt) == len(score.per_prompt) else []
    latency_s = row.latency.estimate if row.latency else None
    limits = {
        "memory_gib": (row.largest_memory_gib, config.memory_gib),
        "latency_s": (latency_s, config.latency_s),
        "distance_limit": (distance, config.distance_limit),
    }
    excess = {}
    unknown = []
    for name, (value, limit) in limits.items():
        if limit is None:
            continue
        if value is None:
            unknown.append(_QUANTITIES[name])
        else:
            excess[name] = value / limit - 1 if limit else value
    for objective in config.objectives:
        if objective not in losses:
            unknown.append(_QUANTITIES[objective])
    out = because or _why_out(row.variant, unknown, excess, config)
    return CandidateFinding(row, losses, tuple(distances), excess, out, spoiled)


def _score(row: Row, metric: str) -> Score | None:
    """Returns the score of a metric, the first one where it is over several features; None if none was measured."""
    for name, score in row.scores.items():
        if f"{name}_".startswith(f"{metric}_") and score.estimate is not None:
            return score
    return None


_QUANTITIES = {
    "latency": "time of a call",
    "latency_s": "time of a call",
    "memory": "peak memory",
    "memory_gib": "peak memory",
    "distance": "distance of images",
    "distance_limit": "distance of images",
}
"""What objectives and limits are about."""

_PEAKS_VARY = 1.1
"""Largest factor by which peaks of two processes of a variant may differ; of repeated baselines they are within 3 %."""


def _memory_beyond(row: Row, gate: Gate, result: StudyResult) -> str:
    """Returns how far the peak exceeds the gate's limit; "" unless even one process, without an interval, shows it."""
    ratio = row.beside_reference.get(MEMORY_RATIO.name)
    rules = [
        rule
        for rule in gate.rules.get(row.variant.contract, [])
        if rule.metric == MEMORY_RATIO.name
    ]
    limits = [
        rule.limit
        for rule in rules
        if rule.test == "at_most" and rule.limit is not None
    ]
    if ratio is None or not limits:
        return ""
    baseline, growth = result.baseline_variant, ratio.interval.estimate
    least, _ = smallest_change(MEMORY_RATIO, result.config.protocol, baseline)
    limit = max(min(limits), least, spared_growth(gate, baseline, result))
    if growth <= limit * _PEAKS_VARY:
        return ""
    return f"It takes {percent_text(growth - 1)} more memory ({percent_text(limit - 1)} allowed)"


def _why_out(
    variant: VariantResult,
    unknown: Sequence[str],
    excess: dict[str, float],
    config: SearchConfig,
) -> str:
    if (
        times := at_least_slower(variant)
    ) is not None and "latency" in config.objectives:
        return f"slower, at least {bound_text(times)}"
    if not variant.status.timed:
        return (
            f"{variant.status}: {variant.reason}"
            if variant.reason
            else str(variant.status)
        )
    if unknown:
        return f"not measured: {', '.join(dict.fromkeys(unknown))}"
    beyond = [
        f"{_QUANTITIES[name]} beyond search.{name}={getattr(config, name):g}"
        for name, share in excess.items()
        if share > 0
    ]
    return ", ".join(beyond)


def control_of(result: StudyResult, objective: str) -> tuple[float, int] | None:
    """Returns the log ratio of the repeated baseline to the baseline in time or memory, and its number of processes."""
    for row in rows_of(result):
        if (
            row.variant.is_control
            and (ratio := row.beside_reference.get(RATIOS.get(objective, "")))
            is not None
        ):
            return math.log(ratio.interval.estimate), len(row.variant.measurements)
    return None
