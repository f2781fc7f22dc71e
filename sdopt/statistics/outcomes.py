"""Derives the outcome of each option of a study on its device: it works, has no effect or gain, or cannot run."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from sdopt.record.choices import as_choice, difference, option_name
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.samples import Evidence
from sdopt.schema import WORK
from sdopt.statistics.figures import rows_of
from sdopt.statistics.measures import SPEEDUP
from sdopt.statistics.rows import Row

LAUNCH_BOUND = 0.8
"""If the device is busy for less than this share of a denoiser step, Python and kernel launches limit it."""


class Standing(StrEnum):
    """What is shown of an option with a model and a task on a device."""

    PROVEN = "pass"
    """It took effect, as its trace shows; if it was measured alone, the figures do not rule out its claimed gain."""
    REFUTED = "fail"
    """It ran without benefit: its trace shows no effect, or the intervals rule out every gain that it claims."""
    CANNOT_RUN = "cannot run"
    """It conflicts with the device or the model, or it failed there. To take longer than a limit is no such failure."""


ORDER = tuple(Standing)
"""If studies disagree on an option, the first of these counts."""


@dataclass(frozen=True)
class OptionOutcome:
    """What one study shows of one option."""

    group: str
    option: str
    """Its name in conf/, without changed keys."""
    model: str
    task: str
    standing: Standing
    why: str
    """The reason; for an option that was measured alone, with its ratios."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Group, option, model and task."""
        return self.group, self.option, self.model, self.task


def outcomes_of(result: StudyResult) -> list[OptionOutcome]:
    """Returns what a study shows, one outcome for each option that it says something of."""
    found: dict[tuple[str, str, str, str], OptionOutcome] = {}
    for row in rows_of(result):
        for outcome in _outcomes(result, row):
            other = found.get(outcome.key)
            if other is None or ORDER.index(outcome.standing) < ORDER.index(other.standing):
                found[outcome.key] = outcome
    return list(found.values())


def _outcomes(result: StudyResult, row: Row) -> Iterator[OptionOutcome]:
    variant = row.variant
    if variant.status in (Status.TIMEOUT, Status.INTERRUPTED):
        return  # a limit of time was reached, which says nothing of the option
    alone = _alone(result, row)
    if variant.status.failure or variant.status is Status.SKIPPED:
        # With several options chosen together, it is not known which one is at fault.
        if alone is not None:
            reason = variant.reason if variant.status is Status.SKIPPED else f"{variant.status}: {variant.reason}"
            yield _outcome(variant, alone, variant.choices[alone], Standing.CANNOT_RUN, reason)
        return
    taken: dict[tuple[str, str], list[Evidence]] = {}
    for item in (item for measured in variant.measurements for shape in measured.shapes for item in shape.evidence):
        taken.setdefault((item.axis, item.option), []).append(item)
    for (axis, option), items in taken.items():
        lacking = next((item.summary for item in items if variant.shows_no_effect(item)), None)
        if lacking is not None:
            yield _outcome(variant, axis, option, Standing.REFUTED, f"no evidence that it took effect: {lacking}")
        elif not all(item.engaged for item in items):
            continue  # a function of one's own has changed what this option names
        elif variant.status is Status.OK and axis == alone:
            nothing = _nothing_gained(row, axis)
            shown = f"{items[0].summary}{_figures_text(row)}"
            yield _outcome(variant, axis, option, Standing.REFUTED if nothing else Standing.PROVEN, nothing or shown)
        elif variant.status is Status.OK:
            yield _outcome(variant, axis, option, Standing.PROVEN, items[0].summary)


def _outcome(variant: VariantResult, axis: str, option: str, standing: Standing, why: str) -> OptionOutcome:
    group, name = axis.partition(".")[0], option_name(option)
    return OptionOutcome(group, name, variant.config.model.name, variant.config.task.kind, standing, why)


def _alone(result: StudyResult, row: Row) -> str | None:
    """Returns the axis of the one option by which a variant differs from its reference; None if there are others."""
    if row.comparison is None or row.variant.role == "control":
        return None
    reference = result.variant(row.comparison.reference)
    # Not even in what a variant may choose: fewer steps beside the option would be credited to it.
    if row.variant.config.differing(reference.config, (*WORK, "hardware")):
        return None
    axes = list(difference(row.variant.choices, reference.choices))
    return axes[0] if len(axes) == 1 and axes[0] in row.variant.choices and axes[0] in row.variant.promises else None


def _nothing_gained(row: Row, axis: str) -> str:
    """Returns why an option counts as refuted: the figures rule out each gain that it claims; "" if they do not."""
    claims = row.variant.promises[axis].claims
    ratios = [ratio for ratio in row.beside_reference.values() if ratio.measure.claim in claims]
    if not ratios or not all(ratio.excludes_gain for ratio in ratios):
        return ""
    shares = busy_share(row.variant)
    idle = f"; the device was busy for {100 * shares:.0f} % of a step" if shares and shares < LAUNCH_BOUND else ""
    return f"took effect, but brought no gain{_figures_text(row)}{idle}"


def _figures_text(row: Row) -> str:
    figures = [
        f"{'speed-up' if ratio.measure is SPEEDUP else ratio.measure.claim} {ratio.text}"
        for ratio in row.beside_reference.values()
        if ratio.measure.claim
    ]
    return f" ({', '.join(figures)})" if figures else ""


def option_of(outcome: OptionOutcome) -> str:
    """Returns the option as a command line chooses it."""
    return as_choice(outcome.group, outcome.option)


def busy_share(variant: VariantResult) -> float | None:
    """Returns the share of a denoiser step for which the device worked; None where either is not known.

    The work comes from a trace. The step's time comes from calls that were not traced, because tracing slows Python.
    """
    found = [(m.shapes[0].denoiser_busy_s, m.stages_s.get("denoiser_step")) for m in variant.measurements]
    shares = [min(1.0, busy_s / float(np.mean(steps))) for busy_s, steps in found if busy_s is not None and steps]
    return float(np.median(shares)) if shares else None
