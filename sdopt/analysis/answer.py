"""Answers the question of a study: which of its options to turn on, and why not the others.

The terminal, Markdown, trackers and reports all show this answer. If a gate judged the study, its verdicts decide; else
the intervals, the A/A floor and the evidence decide, and the answer says that the images were not judged.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sdopt.analysis.adoption import command_of, lines_of
from sdopt.analysis.changes import changes_of
from sdopt.analysis.figures import Figures, Ratio, figures_of
from sdopt.analysis.measures import RULED, SPEEDUP, measure_named, with_shape
from sdopt.analysis.ratios import MINIMUM_PROCESSES
from sdopt.contract import Contract
from sdopt.results.records import Status, StudyResult, VariantResult
from sdopt.results.verdicts import Judgement, Payoff, Ruling, Verdict


class Worth(StrEnum):
    """The verdict of a study on one option."""

    WORTH_IT = "worth it"
    UNPROVEN = "unproven"
    """Neither a gain nor a harm is shown; or a gain is shown, but the images are not known to be good enough."""
    NO_BENEFIT = "no gain"
    """The interval excludes every gain that it claims: more processes would not show one."""
    HARMFUL = "harmful"
    BROKEN = "broken"
    """It failed, it left no evidence of taking effect, or its images are broken."""
    NOT_MEASURED = "not measured"
    """It cannot run here, or the study was interrupted."""


REPEATS = "it changes nothing: its reference has the same configuration"
"""The reason for a variant that is identical to its reference, such as `precision=fp32` beside the default."""


@dataclass(frozen=True)
class OptionAnswer:
    """The verdict on one option, from one comparison.

    Attributes:
        option: the option, as in `precision=bf16`; the variant's name if no single option is credited.
        variant: the candidate of the comparison.
        reference: the variant that it is compared with.
        worth: the verdict.
        ratios: those that options may claim, by measure (`speedup`, `memory_ratio`), with the shape's name if there are
            several (`speedup/512x512b1`); inverted if the candidate leaves the option out.
        gains: the names of those that show a gain: by the gate, if it names any, else by their intervals.
        images: the state of the images: `images equal`, `images not judged`, …
        because: the reason, in a few words.
        command: the `sdopt run` command that measures the option again, against its baseline.
        lines: code that turns it on in a program that has a pipeline `pipe` of diffusers.
    """

    option: str
    variant: str
    reference: str
    worth: Worth
    ratios: dict[str, Ratio]
    gains: tuple[str, ...]
    images: str
    because: str
    command: str
    lines: tuple[str, ...]

    @property
    def figure(self) -> str:
        """The speed-up with its interval, and the memory ratio where it is a gain; "" where nothing was timed."""
        return ", ".join(
            "".join(
                (
                    "" if ratio.measure is SPEEDUP else f"{ratio.measure.claim} ",
                    ratio.text,
                    f" at {shape}" if (shape := name.partition("/")[2]) else "",
                )
            )
            for name, ratio in self.ratios.items()
            if ratio.measure is SPEEDUP or name in self.gains
        )

    @property
    def speedup(self) -> Ratio | None:
        """The speed-up, at the main shape where there are several."""
        return next((ratio for ratio in self.ratios.values() if ratio.measure is SPEEDUP), None)


@dataclass(frozen=True)
class Answer:
    """The answer of a study: which options to turn on."""

    sentence: str
    options: tuple[OptionAnswer, ...]
    best: OptionAnswer | None
    """Of the options that are worth it, the one whose speed-up has the largest lower bound."""
    notes: tuple[str, ...]

    def on(self, row: Figures) -> OptionAnswer | None:
        """Returns the verdict on the option of a row of `figures_of`; None for the baseline and the A/A control."""
        sides = row.variant.name, row.reference
        return next((option for option in self.options if (option.variant, option.reference) == sides), None)


def answer_of(result: StudyResult) -> Answer:
    """Derives the verdict on each option of a study, and the sentence that sums them up."""
    baseline = result.variant(result.baseline)
    options = [
        _option(result, row, baseline)
        for row in figures_of(result)
        if row.variant.role != "control" and (row.comparison or row.variant.name != result.baseline)
    ]
    worth = sorted((option for option in options if option.worth is Worth.WORTH_IT), key=_lower_gain, reverse=True)
    return Answer(_sentence(options, worth), tuple(options), worth[0] if worth else None, tuple(_notes(result)))


def _option(result: StudyResult, row: Figures, baseline: VariantResult) -> OptionAnswer:
    reference = result.variant(row.reference) if row.comparison else baseline
    left_out = _leaves_out(row.variant, reference, baseline)
    with_it, without_it = (reference, row.variant) if left_out else (row.variant, reference)
    ratios = {
        with_shape(name, at.shape.name if row.further else ""): _inverted(ratio) if left_out else ratio
        for at in row.shapes
        for name, ratio in at.ratios.items()
        if ratio.measure.claim
    }
    judged = None if left_out else row.judgement
    # The gate tests claims together; a gain that an option does not claim shows in its interval alone.
    gains = (judged.gains if judged else []) or [name for name, ratio in ratios.items() if ratio.gain > 0]
    work = row.variant.config.incomparable_work(reference.config)
    worth, because = _worth(result, row.variant, reference, ratios, gains, judged)
    if work and worth in (Worth.WORTH_IT, Worth.NO_BENEFIT, Worth.HARMFUL):
        worth, because = Worth.UNPROVEN, f"not the same work: {', '.join(work)}"
    credit = row.comparison.credit if row.comparison else ""
    return OptionAnswer(
        option=credit if credit not in ("", "nothing") else row.variant.name,
        variant=row.variant.name,
        reference=row.reference,
        worth=worth,
        ratios=ratios if row.variant.status.measured else {},
        gains=tuple(gains),
        images=_images(row, judged),
        because=because,
        command=command_of(with_it, baseline),
        lines=tuple(lines_of(with_it, without_it)),
    )


def _leaves_out(candidate: VariantResult, reference: VariantResult, baseline: VariantResult) -> bool:
    """Returns whether the candidate is the reference without one of its options, as in `study=leave_one_out`."""
    mine, other, plain = candidate.choices, reference.choices, baseline.choices
    axes = [axis for axis in {*mine, *other} if mine.get(axis) != other.get(axis)]
    return bool(axes) and all(mine.get(axis) == plain.get(axis) for axis in axes)


def _inverted(ratio: Ratio) -> Ratio:
    found = ratio.interval
    low, high = (None if bound is None else 1 / bound for bound in (found.high, found.low))
    return replace(ratio, interval=replace(found, estimate=1 / found.estimate, low=low, high=high))


# --------------------------------------------------------------------------------------------------------- verdicts


def _worth(
    result: StudyResult,
    variant: VariantResult,
    reference: VariantResult,
    ratios: dict[str, Ratio],
    gains: Sequence[str],
    judged: Judgement | None,
) -> tuple[Worth, str]:
    """Returns the verdict and its reason."""
    if (failed := _failure(variant)) is not None:
        return failed
    if reference.status is not Status.OK:
        return Worth.UNPROVEN, f"its reference '{reference.name}' has the status {reference.status}"
    if (variant.choices, variant.config) == (reference.choices, reference.config):
        return Worth.UNPROVEN, REPEATS
    if judged is None:
        claims = _claims(variant, reference)
        worth, because = (
            _by_intervals(claims, ratios, gains)
            or _without_benefit(claims, ratios)
            or (Worth.UNPROVEN, _why_unproven(ratios))
        )
        faster = all(measure_named(name) is SPEEDUP for name in gains)
        if worth is Worth.WORTH_IT and claims and faster and not changes_of(result, variant, reference):
            return Worth.UNPROVEN, f"{because}, but sdopt's own trace shows no change that explains it"
        return worth, because
    return _by_gate(judged, ratios, gains)


def _failure(variant: VariantResult) -> tuple[Worth, str] | None:
    """Returns the verdict on a variant whose figures prove nothing; None if it was fully measured and took effect."""
    if variant.status in (Status.SKIPPED, Status.PENDING, Status.INTERRUPTED):
        return Worth.NOT_MEASURED, variant.reason or str(variant.status)
    if variant.status is Status.NOT_ENGAGED:
        return Worth.BROKEN, f"no evidence that it took effect: {variant.reason}"
    if variant.status is not Status.OK:
        return Worth.BROKEN, f"{variant.status}: {variant.reason}"
    if variant.trips:
        wires = ", ".join(dict.fromkeys(trip.wire for trip in variant.trips))
        return Worth.BROKEN, f"{variant.broken_images} of {len(variant.images)} images are broken: {wires}"
    return None


def _claims(variant: VariantResult, reference: VariantResult) -> set[str]:
    """Returns the claims of the options in which two variants differ."""
    promises = [*variant.promises_beside(reference), *reference.promises_beside(variant)]
    return {claim for promise in promises for claim in promise.claims}


def _by_intervals(claims: Collection[str], ratios: dict[str, Ratio], gains: Sequence[str]) -> tuple[Worth, str] | None:
    """Returns the verdict and its reason; None if neither a gain nor a harm is shown."""
    harms = [name for name, ratio in ratios.items() if ratio.gain < 0]
    claimed = [name for name in harms if measure_named(name).claim in claims]
    if claimed or (harms and not gains):
        return Worth.HARMFUL, _in_words(ratios, claimed or harms)
    if gains:
        cost = f", at the cost of {_in_words(ratios, harms)}" if harms else ""
        return Worth.WORTH_IT, _in_words(ratios, gains) + cost
    return None


def _without_benefit(claims: Collection[str], ratios: dict[str, Ratio]) -> tuple[Worth, str] | None:
    """Returns the verdict and its reason if every claimed gain is excluded, or every gain if none is claimed."""
    claimed = [ratio for ratio in ratios.values() if not claims or ratio.measure.claim in claims]
    # A claimed measure that was not measured leaves its gain open.
    if not claimed or not {ratio.measure.claim for ratio in claimed} >= {*claims}:
        return None
    if not all(ratio.excludes_gain for ratio in claimed):
        return None
    keys = dict.fromkeys(ratio.key for ratio in claimed)
    return Worth.NO_BENEFIT, f"the interval excludes a gain that counts ({', '.join(keys)})"


def _why_unproven(ratios: dict[str, Ratio]) -> str:
    """Returns why the speed-up is unproven, and why less memory is where the estimate exceeds the A/A floor."""
    speedup = next((ratio for ratio in ratios.values() if ratio.measure is SPEEDUP), None)
    reasons = {"speed": "it was not timed" if speedup is None else _why_open(speedup)}
    for ratio in ratios.values():
        better = ratio.measure.gain(ratio.interval.estimate) > 1 and not ratio.within_floor
        if ratio.measure is not SPEEDUP and better:
            reasons.setdefault(ratio.measure.claim, _why_open(ratio))
    if len({*reasons.values()}) == 1:
        return reasons["speed"]
    return "; ".join(f"{claim}: {reason}" for claim, reason in reasons.items())


def _in_words(ratios: dict[str, Ratio], names: Sequence[str]) -> str:
    """Returns in which direction measures differ, as in `faster` or `more memory`."""
    parts = []
    for name in names:
        measure, shape = ratios[name].measure, name.partition("/")[2]
        better = measure.gain(ratios[name].interval.estimate) > 1
        parts.append((measure.better if better else measure.worse) + (f" at {shape}" if shape else ""))
    return " and ".join(parts)


def _why_open(ratio: Ratio) -> str:
    low, high = ratio.gain_bounds
    if low is None or high is None:
        return f"no interval, which needs protocol.replicates={MINIMUM_PROCESSES} or more"
    if ratio.floor is None:
        return "the study has no A/A floor to compare it with"
    if ratio.within_floor:
        return f"two identical baselines differed by as much ({100 * (ratio.floor - 1):.1f} %)"
    if 1 / ratio.smallest < low and high < ratio.smallest:
        return f"too small to count ({ratio.key})"
    return "its interval includes changes too small to count; more processes (protocol.replicates) would narrow it"


def _by_gate(judged: Judgement, ratios: dict[str, Ratio], gains: Sequence[str]) -> tuple[Worth, str]:
    because = _reasons([ruling for ruling in judged.rulings if ruling.verdict is judged.verdict])
    if judged.verdict is Verdict.FAIL:
        failed = [ruling for ruling in judged.rulings if ruling.verdict is Verdict.FAIL]
        if all(ruling.payoff is Payoff.NO_BENEFIT for ruling in failed):
            return Worth.NO_BENEFIT, because
        return Worth.HARMFUL, because
    if judged.verdict is not Verdict.PASS:
        return Worth.UNPROVEN, because
    if gains:
        return Worth.WORTH_IT, f"{_in_words(ratios, gains)}; the gate passes it"
    if any(ruling.payoff is Payoff.PAYS for ruling in judged.rulings):
        return Worth.WORTH_IT, "the gate passes it"
    return Worth.UNPROVEN, "the gate passes it, but no gain is shown"


def _reasons(rulings: Sequence[Ruling]) -> str:
    """Returns the reasons of rulings, each once, without a first word that repeats the verdict beside them."""
    return "; ".join(dict.fromkeys(map(_bare, rulings)))


def _bare(ruling: Ruling) -> str:
    if ruling.doubt:
        return ruling.doubt  # whatever the metric, whose figures decide nothing
    return " ".join(filter(None, (ruling.metric, ruling.reason.removeprefix(f"{ruling.payoff}: "))))


def _images(row: Figures, judged: Judgement | None) -> str:
    """Returns what is known of the images; only a gate judges whether a difference matters."""
    error = row.scores.get("mse")
    if error is not None and error.per_prompt and not any(value != 0 for value in error.per_prompt):
        return "images identical"
    rulings = [ruling for ruling in judged.rulings if ruling.metric and not _is_ratio(ruling)] if judged else []
    if not rulings or judged is None:
        return "images not judged"
    if all(ruling.verdict is Verdict.PASS for ruling in rulings):
        return "images within the gate's limits" if judged.contract is Contract.LOSSY else "images equal"
    if any(ruling.verdict is Verdict.FAIL for ruling in rulings):
        return "images worse than the gate allows"
    return "images undecided"


def _is_ratio(ruling: Ruling) -> bool:
    return ruling.metric.partition("/")[0] in RULED


# --------------------------------------------------------------------------------------------------------- sentence


def _lower_gain(option: OptionAnswer) -> float:
    """Returns the lower bound of an option's speed-up; 0 if it is not known."""
    return (option.speedup.interval.low if option.speedup else None) or 0.0


def _sentence(options: Sequence[OptionAnswer], worth: Sequence[OptionAnswer]) -> str:
    if not options:
        return "Nothing was compared with the baseline."
    if worth:
        first, *others = worth
        also = f" Also worth it, each on its own: {'; '.join(map(_summary, others))}." if others else ""
        return f"Turn on {_summary(first)}.{also}"
    if len(options) == 1:
        [only] = options
        figure = f": {only.figure}" if only.figure else ""
        advice = {
            Worth.UNPROVEN: f"Do not count on {only.option}{figure}, unproven",
            Worth.NO_BENEFIT: f"Leave {only.option} off{figure}, no gain",
            Worth.HARMFUL: f"Leave {only.option} off{figure}, harmful",
            Worth.BROKEN: f"Leave {only.option} off: it is broken",
            Worth.NOT_MEASURED: f"{only.option} was not measured",
        }[only.worth]
        return f"{advice} ({only.because})."
    counts = {kind: sum(option.worth is kind for option in options) for kind in Worth}
    return f"Turn on none of the {len(options)}: {', '.join(f'{n} {kind}' for kind, n in counts.items() if n)}."


def _summary(option: OptionAnswer) -> str:
    return f"{option.option}: {option.figure}, {option.images}"


def _notes(result: StudyResult) -> list[str]:
    if result.judgements:
        return [f"The verdicts follow gate={result.gate} and the evidence in the traces."]
    from sdopt.analysis.bounds import prompts_to_exclude  # imports scipy, which takes a second

    verdicts = "The verdicts follow the two-sided intervals and the evidence in the traces."
    advice = "add gate=default, or run `sdopt gate <folder>` on this result"
    # gate=default tolerates that 5 % of all prompts exceed a limit; with fewer prompts, no lossy option can pass.
    if (result.config.quality.prompt_count or 0) < prompts_to_exclude(share=0.05, confidence=0.95):
        advice = "measure again with gate=default, which draws more of them"
    return [f"{verdicts} The images were not judged: {advice}."]
