"""Sums up a study once: a row for each variant with its verdicts, best first, and the answer in one sentence.

The terminal, Markdown, plots, the page, trackers, sweeps and CI all show this summary, so that they cannot disagree.
Variants are ranked by their gain over the study's baseline; what one gains on top of another is a row of its own, among
the `Row.steps` of the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sdopt.contract import Contract
from sdopt.record.choices import difference, written_value
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.verdicts import Verdict, worst
from sdopt.report.sentences.answer import answer_of, with_key
from sdopt.report.sentences.notes import notes_of
from sdopt.report.sentences.objections import objections
from sdopt.schema import THRESHOLDS
from sdopt.statistics.figures import first_rows, rows_of
from sdopt.statistics.measures import is_of_images
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import (
    Images,
    Speed,
    speed_over,
    worst_of,
)


@dataclass(
    frozen=True,
    repr=False,
    eq=False,
)
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
        lines = [f"  {row}" for row in self.candidates]
        return "\n".join([self.sentence, *lines])

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
            comparisons = [row for row in compared if row.variant is variant]
            by_name[variant.name] = _judged(result, comparisons)
    rows = [_with_chain(row, by_name) for row in by_name.values()]
    rows.sort(key=rank_of)
    best = next((row for row in rows if row.recommended), None)
    return Summary(
        result=result,
        figures=tuple(compared),
        rows=tuple(rows),
        best=best,
        sentence=answer_of(result, rows, best),
        notes=tuple(notes_of(result, rows)),
    )


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
    steps = [row for row in rows if row.reference not in ("", result.baseline)]
    direct = [row for row in rows if row.reference in ("", result.baseline)]
    # The comparison with the baseline comes first, where there is one.
    first, *_ = [*direct, *steps]
    first = replace(first, command=_command_of(result, first.variant))
    if first.is_baseline:
        return replace(first, option=first.name)
    judgements = [row.judgement for row in rows if row.judgement]
    row = replace(
        first,
        option=_option_of(first, result.baseline),
        decision=worst(one.verdict for one in judgements) if judgements else None,
        steps=tuple(_step(result, step) for step in steps),
    )
    if row.status in (Status.OK, Status.NOT_ENGAGED):
        row = replace(row, images=worst_of(map(images_of, [*direct, *steps])))
    if row.variant.given_up:
        row = replace(row, speed=Speed.SLOWER)
    elif row.status.measured:
        row = replace(row, speed=speed_over(row.speeds))
    because = next(filter(None, objections(result, row)), "")
    return replace(row, because=because, pays=not because)


def _command_of(result: StudyResult, variant: VariantResult) -> str:
    """Returns the command that measures a variant again, and judges it as the study was judged since."""
    if not variant.command:
        return ""
    command = variant.command
    for key, value in _judged_since(result, variant).items():
        command = with_key(command, key, value)
    return command


def _judged_since(result: StudyResult, variant: VariantResult) -> dict[str, str]:
    """Returns by which gate and thresholds a study was judged, where these are not those that it was measured with."""
    keys = {}
    if result.gate not in ("", result.config.gate.name):
        keys["gate"] = result.gate
    for name in THRESHOLDS:
        value = getattr(result.config.protocol, name)
        if value != getattr(variant.config.protocol, name):
            keys[f"protocol.{name}"] = written_value(value)
    return keys


def _option_of(row: Row, baseline: str) -> str:
    """Returns what the difference to the baseline is credited to; the variant's name if that is not one option."""
    if row.comparison is None or row.reference != baseline:
        return row.name
    credit = row.comparison.credit
    return row.name if credit in ("", "nothing") else credit


def _step(result: StudyResult, row: Row) -> Row:
    """Returns a comparison with another variant than the baseline, and whether it leaves an option of that out."""
    reference = result.variant(row.reference)
    plain = result.baseline_variant.choices
    choices = row.variant.choices
    axes = difference(choices, reference.choices)
    as_plain = [choices.get(axis) == plain.get(axis) for axis in axes]
    return replace(row, leaves_out=bool(axes) and all(as_plain))


def _with_chain(row: Row, by_name: Mapping[str, Row]) -> Row:
    """Returns a row that is no better than the steps that it is built on: their images and verdicts are its own too."""
    if not row.is_step:
        return row
    chain = _chain(row, by_name)
    images = [link.images for link in (row, *chain) if link.images]
    row = replace(row, images=worst_of(images))
    failed = [link for link in chain if link.decision is Verdict.FAIL]
    is_open = row.decision is not None and row.decision.is_open
    if not failed or not (is_open or row.pays):
        return row
    because = f"{failed[0].name}, on which it is built, fails the gate"
    return replace(row, pays=False, because=because)


def _chain(row: Row, by_name: Mapping[str, Row]) -> list[Row]:
    """Returns what a row is built on, what that is built on, and so on."""
    chain: list[Row] = []
    names = {row.name}
    while row.is_step and row.steps:
        step = row.steps[0]
        if step.leaves_out or step.reference in names:
            break
        row = by_name[step.reference]
        chain.append(row)
        names.add(row.name)
    return chain


def images_of(row: Row) -> Images:
    """Returns what is known of a comparison's images."""
    if row.variant.trips:
        return Images.WORSE
    error = row.scores.get("mse")
    if (
        error is not None
        and error.per_prompt
        and not any(value != 0 for value in error.per_prompt)
    ):
        return Images.EQUAL
    if row.judgement is None:
        return Images.NOT_JUDGED
    verdicts = {
        ruling.verdict
        for ruling in row.judgement.rulings
        if is_of_images(ruling.metric)
    }
    if Verdict.FAIL in verdicts:
        return Images.WORSE
    if verdicts != {Verdict.PASS}:
        return Images.NOT_JUDGED
    lossy = row.judgement.contract is Contract.LOSSY
    return Images.WITHIN if lossy else Images.EQUAL
