"""Tells why a variant does not pay: what speaks against it, or what is not shown yet."""

from collections.abc import Iterator, Sequence

from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.report.sentences.reasons import reasons_of
from sdopt.statistics.changes import changes_of
from sdopt.statistics.giving_up import bound_text
from sdopt.statistics.measures import SPEEDUP, Ratio, measure_named
from sdopt.statistics.ratios import needed_processes
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Speed

REPEATS = "it changes nothing: its reference has the same configuration"
"""The reason for a variant that is identical to its reference, such as `precision=fp32` beside the default."""

_DID_NOT_RUN = (Status.SKIPPED, Status.PENDING, Status.INTERRUPTED)


def objections(result: StudyResult, row: Row) -> Iterator[str]:
    """Yields why a variant does not pay, each "" if that does not speak against it; the first one that does counts."""
    variant, baseline = row.variant, result.baseline_variant
    reference = result.variant(row.reference or result.baseline)
    judgements = _judgements(result, row)
    if variant.status in _DID_NOT_RUN:
        yield variant.reason or _so_far(result, variant)
    yield broken_because(variant)
    if baseline.status is not Status.OK:
        yield f"the baseline has the status {baseline.status}"
    if baseline.trips:
        yield f"images of the baseline are broken ({baseline.tripped})"
    if (variant.choices, variant.config) == (
        reference.choices,
        reference.config,
    ):
        yield REPEATS
    yield variant.other_work(baseline)
    # What a gate says of leaving an option out says nothing of the variant as a whole.
    if not any(step.leaves_out for step in row.steps):
        yield _refused_because(result, judgements)
    yield _other_steps(variant, baseline)
    if not row.gains:
        yield from _why_no_gain(result, row)
    claims = any(promise.claims for promise in variant.promises_beside(reference))
    only_faster = all(measure_named(name) is SPEEDUP for name in row.gains)
    if not judgements and claims and only_faster:
        yield _unexplained(result, variant, reference)


def _other_steps(variant: VariantResult, baseline: VariantResult) -> str:
    """Returns that a variant was to take as many steps as the baseline, and took others; "" if it did not."""
    calls, usual = variant.denoiser_calls, baseline.denoiser_calls
    chosen = not variant.config.runs_as_often(baseline.config)
    if chosen or None in (calls, usual) or calls == usual:
        return ""
    return f"not the same work: the denoiser ran {calls} times per call, and {usual} times in the baseline"


def _so_far(result: StudyResult, variant: VariantResult) -> str:
    """Returns what a study that has not ended has recorded of a variant."""
    if variant.status is not Status.PENDING:
        return str(variant.status)
    if not variant.measurements:
        return "nothing of it was measured yet"
    rounds = result.config.protocol.rounds
    done = min((len(times) for times in variant.samples.values()), default=0)
    return f"{min(done, rounds)} of {rounds} rounds were measured"


def _unexplained(
    result: StudyResult, variant: VariantResult, reference: VariantResult
) -> str:
    """Returns why nothing explains a gain; "" if a trace does."""
    changes = changes_of(result, variant, reference)
    if changes:
        return ""
    if changes is None and not reference.status.measured:
        return f"{reference.name}, which it is compared with, has the status {reference.status}"
    if changes is None:
        return "no trace of a call was taken, which could explain it"
    return "sdopt's own trace shows no change that explains it"


def _judgements(result: StudyResult, row: Row) -> list[Judgement]:
    """Returns what a gate said of the comparison with the baseline, and of each step."""
    compared = (
        [row, *row.steps] if row.reference == result.baseline else list(row.steps)
    )
    return [one.judgement for one in compared if one.judgement]


def _refused_because(result: StudyResult, judgements: Sequence[Judgement]) -> str:
    reasons: list[str] = []
    for judgement in judgements:
        if judgement.verdict is not Verdict.PASS:
            reasons += reasons_of(judgement, result)
    return "; ".join(dict.fromkeys(reasons))


def broken_because(variant: VariantResult) -> str:
    """Returns why a variant that ran is broken: it failed, had no effect, or its images are broken; "" if it is not."""
    if variant.status in _DID_NOT_RUN:
        return ""
    if variant.status is Status.NOT_ENGAGED:
        return f"no evidence that it took effect: {variant.reason}"
    if variant.status not in (Status.OK, Status.SLOWER):
        return f"{variant.status}: {variant.reason}"
    return broken_text(variant)


def broken_text(variant: VariantResult) -> str:
    """Returns how many of a variant's images are broken, and how; "" if none is."""
    if not variant.trips:
        return ""
    share = "images"
    if variant.broken_images:
        share = f"{variant.broken_images} of {len(variant.images)} images"
    return f"{share} are broken: {variant.tripped}"


def _why_no_gain(result: StudyResult, row: Row) -> Iterator[str]:
    if row.at_least_slower is not None:
        yield f"slower, at least {bound_text(row.at_least_slower)}"
    if (
        row.speed is Speed.FEW
        and result.budget is not None
        and row.name in result.budget.processes
    ):
        yield "no interval: protocol.budget_s left no time for more processes"
    if row.speed is Speed.SLOWER:
        yield "slower"
    else:
        yield _why_open(row.speedup, result.is_imported)


def _why_open(ratio: Ratio | None, imported: bool) -> str:
    """Returns why a speed-up shows no gain; of `imported` times, in the words of their table."""
    if ratio is None:
        return "it was not timed"
    low, high = ratio.gain_bounds
    if low is None or high is None:
        return f"no interval, which needs {needed_processes(imported)} or more"
    if ratio.floor is None:
        return "no repeated baseline to compare it with"
    if ratio.within_floor:
        return f"two identical baselines differed by as much ({100 * (ratio.floor - 1):.1f} %)"
    if 1 / ratio.smallest < low and high < ratio.smallest:
        return f"too small to count ({ratio.key})"
    more = "replicates" if imported else "processes (protocol.replicates)"
    return (
        f"its interval includes changes too small to count; more {more} would narrow it"
    )
