"""The answer of a study as data, for programs and agents (`--json`): what the terminal says, with every figure.

The fields of `Answer` are the schema; `SCHEMA` is its version, which grows with every change that breaks a reader.
"""

import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sdopt.record.comparisons import Effect
from sdopt.record.files import short_digest
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import Verdict
from sdopt.report.columns import values_of
from sdopt.report.notes import caveats_of
from sdopt.report.program import program_of, said_of_whole
from sdopt.report.summary import Summary
from sdopt.report.tables import WorstPrompt, worst_prompts
from sdopt.schema import WORK
from sdopt.statistics.measures import Ratio
from sdopt.statistics.rows import Row

SCHEMA = 2


@dataclass(frozen=True)
class Estimate:
    """A ratio to the baseline; bounds are None where there were too few processes for an interval.

    Ratios of times are per image, whatever number of images a call makes; memory is that of a process.
    `floor` is the ratio by which two equal baselines differed: a ratio below it is chance.
    """

    estimate: float
    low: float | None
    high: float | None
    confidence: float | None
    floor: float | None


@dataclass(frozen=True)
class Reason:
    """A rule of the gate that did not pass, and why.

    A change is turned so that more is better; where neither way is, it is the reference's figure less the candidate's.
    """

    rule: str
    metric: str
    verdict: str
    reason: str
    estimate: float | None
    low: float | None
    high: float | None
    limit: float | None


@dataclass(frozen=True)
class Candidate:
    """One variant, compared with the baseline.

    `speed` is `faster`, `slower`, `too close to call` or `not enough runs`; `images` is `equal`, `within tolerance`,
    `worse` or `not judged`; `gate` is `pass`, `fail`, `undecided`, `not judged` or null. `recommended` is what to act
    on. Distances of images in `scores`, such as `psnr_db`, and `worst` are to the images of the variant `against`,
    which is another one than the baseline where it was compared with that; "" without a comparison.
    `worst` has, by metric, the prompts that lost most. `latency_s` is the time of a call, which makes
    `images_per_call` images. `command` measures it again; "" if none is known to. `program` uses it; null unless it was
    run and drew the measured image, of which `program_run` says more. `at_least_slower` is how many times as long as
    the baseline's its calls take at least, where that was clear so early that they were not timed further. `columns`
    has what tables show, by the names of their columns in `table.csv`. `speedups` has the speed-up at each shape where
    there are several: then all other figures are of the first one, and `speed` is of all together.
    """

    name: str
    option: str
    status: str
    recommended: bool
    speed: str | None
    images: str | None
    gate: str | None
    because: str
    speedup: Estimate | None
    memory_ratio: Estimate | None
    latency_s: float | None
    images_per_call: int
    scores: dict[str, float | None]
    worst: list[WorstPrompt]
    reasons: list[Reason]
    command: str
    program: str | None
    program_run: str
    at_least_slower: float | None = None
    columns: dict[str, float | str] = field(default_factory=dict)
    speedups: dict[str, Estimate] = field(default_factory=dict)
    against: str = ""


@dataclass(frozen=True)
class Baseline:
    """What all candidates were compared with; `digest` changes with its weights, prompts, code and settings."""

    name: str
    digest: str
    latency_s: float | None
    images_per_call: int


@dataclass(frozen=True)
class Answer:
    """The answer of one study. `best` is the recommended candidate; null if none is.

    `notes` says what the verdicts rest on, and what speaks against them.
    """

    schema: int
    answer: str
    best: str | None
    study: str
    folder: str
    status: str
    baseline: Baseline
    candidates: list[Candidate]
    notes: list[str]
    effects: list[Effect] = field(default_factory=list)
    """Of a factorial study: main effects, and interactions as what two options gain beyond the product of both."""


def answer_of(summary: Summary, folder: Path) -> Answer:
    """Returns the answer of a study that is in a folder."""
    result, baseline = summary.result, summary.baseline
    return Answer(
        SCHEMA,
        summary.sentence,
        summary.best.name if summary.best else None,
        result.name,
        str(folder),
        result.status,
        Baseline(
            baseline.name,
            baseline_digest(result),
            _latency(baseline),
            baseline.images_per_call,
        ),
        [_candidate(row, result) for row in summary.candidates],
        [*caveats_of(summary), *summary.notes],
        result.effects,
    )


def to_json(answer: Any) -> dict[str, Any]:
    """Returns an answer, or another dataclass, as plain values: a number that is not finite is null."""
    document: dict[str, Any] = json.loads(TypeAdapter(type(answer)).dump_json(answer))
    return document


def baseline_digest(result: StudyResult) -> str:
    """Returns a digest of what decides the baseline's images and calls: two equal ones may be compared."""
    row = result.baseline_variant
    work = {
        key: value
        for key, value in row.config.flat().items()
        if key.partition(".")[0] in (*WORK, "hardware")
    }
    content = [
        row.inputs,
        work,
        row.choices,
        result.environment.packages,
        result.environment.device.get("name"),
    ]
    return short_digest(json.dumps(content, sort_keys=True, default=str).encode())


def _candidate(row: Row, result: StudyResult) -> Candidate:
    comparison = result.first_comparison(row.name)
    scores = {**row.variant.quality, **(comparison.quality if comparison else {})}
    return Candidate(
        row.name,
        row.option,
        row.status,
        row.recommended,
        row.speed,
        row.images,
        row.decision,
        row.because,
        _estimate(row.speedup),
        _estimate(row.memory),
        _latency(row),
        row.images_per_call,
        {name: score.estimate for name, score in scores.items()},
        worst_prompts(result, row.name),
        _reasons(row.name, result),
        row.command,
        program_of(row.variant) or None,
        said_of_whole(row.variant.program),
        row.at_least_slower,
        values_of(row),
        _at_shapes(row),
        comparison.reference if comparison else "",
    )


def _reasons(name: str, result: StudyResult) -> list[Reason]:
    """Returns the rulings on a variant that do not pass."""
    judgements = [one for one in result.judgements if one.candidate == name]
    reasons = []
    for r in chain.from_iterable(judgement.rulings for judgement in judgements):
        if r.verdict is not Verdict.PASS:
            found = (r.text, r.estimate, r.low, r.high, r.margin)
            reasons.append(Reason(r.rule, r.metric, r.verdict, *found))
    return reasons


def _at_shapes(row: Row) -> dict[str, Estimate]:
    """Returns the speed-up at each shape, by its name; {} where there is one shape."""
    if not row.further:
        return {}
    speedups = {at.shape.name: _estimate(at.speedup) for at in row.shapes}
    return {name: speedup for name, speedup in speedups.items() if speedup}


def _latency(row: Row) -> float | None:
    return row.latency.estimate if row.latency else None


def _estimate(ratio: Ratio | None) -> Estimate | None:
    if ratio is None:
        return None
    found = ratio.interval
    return Estimate(
        found.estimate, found.low, found.high, found.confidence, ratio.floor
    )
