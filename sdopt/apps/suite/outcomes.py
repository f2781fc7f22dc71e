"""Derives the outcome of each option of a study on its device: it works, has no effect or gain, or cannot run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sdopt.record.choices import as_choice, difference, option_name
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import Evidence
from sdopt.schema import WORK
from sdopt.statistics.figures import rows_of
from sdopt.statistics.measures import SPEEDUP, Ratio
from sdopt.statistics.row_figures import LAUNCH_BOUND, busy_share
from sdopt.statistics.rows import Row


class Standing(StrEnum):
    """What is shown of an option with a model and a task on a device."""

    TOOK_EFFECT = "took effect"
    """As its trace shows; if it was measured alone, the figures do not rule out its claimed gain."""
    NO_GAIN = "no gain"
    """It ran without benefit: its trace shows no effect, or the intervals rule out every gain that it claims."""
    CANNOT_RUN = "cannot run"
    """It conflicts with the device or the model, or it failed there. To take longer than a limit is no such failure."""
    NOT_MEASURED = "not measured"
    """Nothing shows it, and no conflict is known."""
    IMPOSSIBLE = "impossible"
    """It conflicts with the device, the model or the task, whatever is measured."""


ORDER = tuple(Standing)
"""If studies disagree on an option, the first of these counts."""


@dataclass(frozen=True)
class OptionOutcome:
    """What is shown or known of one option with one model and one task."""

    group: str
    option: str
    """Its name in conf/, without changed keys."""
    model: str
    task: str
    standing: Standing
    why: str
    """The reason; for an option that was measured alone, with its ratios; for one that was not, what it needs besides."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Group, option, model and task."""
        return self.group, self.option, self.model, self.task


def outcomes_of(result: StudyResult) -> list[OptionOutcome]:
    """Returns what a study shows, one outcome for each option that it says something of."""
    outcomes: dict[tuple[str, str, str, str], OptionOutcome] = {}
    for row in rows_of(result):
        for outcome in _outcomes(result, row):
            earlier = outcomes.get(outcome.key, outcome)
            outcomes[outcome.key] = min(earlier, outcome, key=_rank)
    return list(outcomes.values())


def _rank(outcome: OptionOutcome) -> int:
    return ORDER.index(outcome.standing)


def _outcomes(result: StudyResult, row: Row) -> Iterator[OptionOutcome]:
    variant = row.variant
    if variant.status in (Status.TIMEOUT, Status.INTERRUPTED):
        return  # a limit of time was reached, which says nothing of the option
    alone = _alone(result, row)
    skipped = variant.status is Status.SKIPPED
    if skipped or variant.status.failure:
        # With several options chosen together, it is not known which one is at fault.
        if alone is not None:
            why = variant.reason if skipped else f"{variant.status}: {variant.reason}"
            yield _outcome(
                variant, alone, variant.choices[alone], Standing.CANNOT_RUN, why
            )
        return
    for (axis, option), evidence in _evidence_by_option(variant).items():
        promise = variant.promises.get(axis)
        if promise and promise.by_image and variant.config.random_weights:
            continue  # untrained weights make images that skip other steps
        judged = _judged(row, axis, evidence, axis == alone)
        if judged is not None:
            yield _outcome(variant, axis, option, *judged)


def _evidence_by_option(
    variant: VariantResult,
) -> dict[tuple[str, str], list[Evidence]]:
    """Returns the evidence of each option, by its axis and its name, from all processes at all shapes."""
    by_option: dict[tuple[str, str], list[Evidence]] = {}
    for measurement in variant.measurements:
        for samples in measurement.shapes:
            for evidence in samples.evidence:
                option = (evidence.axis, evidence.option)
                by_option.setdefault(option, []).append(evidence)
    return by_option


def _judged(
    row: Row,
    axis: str,
    evidence: Sequence[Evidence],
    is_alone: bool,
) -> tuple[Standing, str] | None:
    """Returns what the evidence of an option shows, and why; None where it shows nothing."""
    for item in evidence:
        if row.variant.shows_no_effect(item):
            return (
                Standing.NO_GAIN,
                f"no evidence that it took effect: {item.summary}",
            )
    if not all(item.engaged for item in evidence):
        return None  # a function of one's own has changed what this option names
    if row.variant.status is not Status.OK:
        return None
    summary = evidence[0].summary
    if not is_alone:
        return Standing.TOOK_EFFECT, summary
    if _rules_out_gain(row, axis):
        return (
            Standing.NO_GAIN,
            f"took effect, but brought no gain{_figures_text(row)}{_idle_text(row.variant)}",
        )
    return Standing.TOOK_EFFECT, f"{summary}{_figures_text(row)}"


def _outcome(
    variant: VariantResult,
    axis: str,
    option: str,
    standing: Standing,
    why: str,
) -> OptionOutcome:
    return OptionOutcome(
        group=axis.partition(".")[0],
        option=option_name(option),
        model=variant.config.model.name,
        task=variant.config.task.kind,
        standing=standing,
        why=why,
    )


def _alone(result: StudyResult, row: Row) -> str | None:
    """Returns the axis of the one option by which a variant differs from its reference; None if there are others."""
    variant = row.variant
    if row.comparison is None or variant.role == "control":
        return None
    reference = result.variant(row.comparison.reference)
    # Not even in what a variant may choose: fewer steps beside the option would be credited to it.
    if variant.config.differing(reference.config, (*WORK, "hardware")):
        return None
    axes = list(difference(variant.choices, reference.choices))
    if len(axes) != 1:
        return None
    [axis] = axes
    return axis if axis in variant.choices and axis in variant.promises else None


def _rules_out_gain(row: Row, axis: str) -> bool:
    """Returns whether the figures rule out each gain that an option claims."""
    claims = row.variant.promises[axis].claims
    ratios = [ratio for ratio in _claimed(row) if ratio.measure.claim in claims]
    return bool(ratios) and all(ratio.excludes_gain for ratio in ratios)


def _claimed(row: Row) -> list[Ratio]:
    return [ratio for ratio in row.beside_reference.values() if ratio.measure.claim]


def _figures_text(row: Row) -> str:
    figures = []
    for ratio in _claimed(row):
        name = "speed-up" if ratio.measure is SPEEDUP else ratio.measure.claim
        figures.append(f"{name} {ratio.text}")
    return f" ({', '.join(figures)})" if figures else ""


def _idle_text(variant: VariantResult) -> str:
    share = busy_share(variant)
    if not share or share >= LAUNCH_BOUND:
        return ""
    return f"; the device was busy for {100 * share:.0f} % of a step"


def option_of(outcome: OptionOutcome) -> str:
    """Returns the option as a command line chooses it."""
    return as_choice(outcome.group, outcome.option)
