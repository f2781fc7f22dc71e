"""Sums up a study once: a row for each variant with its verdicts, best first, and the answer in one sentence.

The terminal, Markdown, plots, the page, trackers, sweeps and CI all show this summary, so that they cannot disagree.
Variants are ranked by their gain over the study's baseline; what one gains on top of another is a row of its own, among
the `Row.steps` of the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sdopt.contract import Contract
from sdopt.record.choices import difference
from sdopt.record.records import Status, StudyResult
from sdopt.record.verdicts import Verdict
from sdopt.statistics.figures import first_rows, rows_of
from sdopt.statistics.measures import RULED
from sdopt.statistics.objections import objections
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Decision, Images, Speed, decision_of, speed_of, speed_over, worst_of
from sdopt.statistics.sentences import answer_of, notes_of


@dataclass(frozen=True, repr=False, eq=False)
class Summary:
    """A study, summed up.

    Attributes:
        result: the study.
        figures: a row for the baseline, one for each comparison, and one for each variant without a comparison.
        rows: a row for each variant but the repeated baseline, best first; those without a figure come last.
        best: the row that is recommended; None if none is.
        sentence: the answer.
        notes: what the verdicts follow from, and how to have the images judged.
    """

    result: StudyResult
    figures: tuple[Row, ...]
    rows: tuple[Row, ...]
    best: Row | None
    sentence: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        """Returns the answer and a line for each variant, as a program prints them."""
        return "\n".join([self.sentence, *(f"  {row}" for row in self.candidates)])

    @property
    def candidates(self) -> list[Row]:
        """The rows but the baseline's."""
        return [row for row in self.rows if not row.is_baseline]

    @property
    def baseline(self) -> Row:
        """The baseline's row."""
        return next(row for row in self.rows if row.is_baseline)

    @property
    def first(self) -> dict[str, Row]:
        """The first row of each variant, by its name, in the order of the variants."""
        return first_rows(self.result, self.figures)

    def row(self, variant: str) -> Row | None:
        """Returns the row of a variant; None for the repeated baseline."""
        return next((row for row in self.rows if row.name == variant), None)


def summary_of(result: StudyResult) -> Summary:
    """Sums up a study."""
    compared = rows_of(result)
    by_name: dict[str, Row] = {}
    for variant in result.variants:
        if not variant.is_control:
            by_name[variant.name] = _judged(result, [row for row in compared if row.variant is variant])
    rows = sorted((_with_chain(row, by_name) for row in by_name.values()), key=rank_of)
    best = next((row for row in rows if row.recommended), None)
    notes = notes_of(result, rows)
    return Summary(result, tuple(compared), tuple(rows), best, answer_of(result, rows, best), tuple(notes))


def rank_of(row: Row) -> tuple[bool, float]:
    """Returns the order of rows: the largest speed-up over the baseline first, and what has none last."""
    if row.is_baseline:
        return row.latency is None, -1.0
    if row.at_least_slower is not None:
        return False, -1 / row.at_least_slower
    if row.speedup is None:
        return True, 0.0
    return False, -row.speedup.interval.estimate


def _judged(result: StudyResult, rows: Sequence[Row]) -> Row:
    """Returns the row of a variant with its verdicts, from one for each of its comparisons."""
    # The comparison with the baseline comes first, where there is one.
    rows = sorted(rows, key=lambda row: row.reference not in ("", result.baseline))
    first, name = rows[0], rows[0].name
    if first.is_baseline:
        return replace(first, option=name)
    direct = first.comparison if first.reference == result.baseline else None
    credit = direct.credit if direct else ""
    ran = first.status in (Status.OK, Status.NOT_ENGAGED)
    row = replace(
        first,
        option=name if credit in ("", "nothing") else credit,
        images=worst_of(map(images_of, rows)) if ran else None,
        decision=worst_of(decision_of(row.judgement.verdict) for row in rows if row.judgement),
        steps=tuple(_step(result, row) for row in rows if row.reference not in ("", result.baseline)),
    )
    if row.variant.given_up:
        row = replace(row, speed=Speed.SLOWER)
    elif row.status.measured:
        row = replace(row, speed=speed_over(row.speeds))
    because = next(filter(None, objections(result, row)), "")
    return replace(row, because=because, pays=not because)


def _step(result: StudyResult, row: Row) -> Row:
    """Returns what a variant gains on top of another one than the baseline, with what that speed-up shows."""
    reference, plain = result.variant(row.reference), result.variant(result.baseline).choices
    choices = row.variant.choices
    axes = difference(choices, reference.choices)
    speeds = [speed_of(at.speedup_beside) for at in row.shapes if at.speedup_beside]
    return replace(
        row,
        speed=speed_over(speeds) if row.status.measured else None,
        leaves_out=bool(axes) and all(choices.get(axis) == plain.get(axis) for axis in axes),
    )


def _with_chain(row: Row, by_name: Mapping[str, Row]) -> Row:
    """Returns a row that is no better than the steps that it is built on: their images and verdicts are its own too."""
    if not row.is_step:
        return row
    images = [row.images] if row.images else []
    seen, step = {row.name}, next(iter(row.steps), None)
    while step is not None and step.reference not in seen and not step.leaves_out:
        seen.add(step.reference)
        below = by_name[step.reference]
        images += [below.images] if below.images else []
        if below.decision is Decision.FAIL and row.pays:
            row = replace(row, pays=False, because=f"{below.name}, on which it is built, fails the gate")
        step = next(iter(below.steps), None) if below.is_step else None
    return replace(row, images=worst_of(images))


def images_of(row: Row) -> Images:
    """Returns what is known of a comparison's images."""
    error, judgement = row.scores.get("mse"), row.judgement
    if row.variant.trips:
        return Images.WORSE
    if error is not None and error.per_prompt and not any(value != 0 for value in error.per_prompt):
        return Images.EQUAL
    if judgement is None:
        return Images.NOT_JUDGED
    verdicts = {
        ruling.verdict for ruling in judgement.rulings if ruling.metric and ruling.metric.partition("/")[0] not in RULED
    }
    if Verdict.FAIL in verdicts:
        return Images.WORSE
    if verdicts != {Verdict.PASS}:
        return Images.NOT_JUDGED
    return Images.WITHIN if judgement.contract is Contract.LOSSY else Images.EQUAL
