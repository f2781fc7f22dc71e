"""Decides whether options pay: tests their claims of speed and memory together with all other claims of the study.

Four answers are possible, each for a claim by itself:

- Gain: a gain that counts (`protocol.smallest_speedup`, …) is shown at `gate.confidence` together with all claims of
  the study (Holm 1979), and the estimate exceeds the A/A floor.
- Harm: shown in the same way.
- No gain: the claim's one-sided bound excludes a gain that counts.
- Open: anything in between; also if there is no interval or no floor, or another study disturbed the measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sdopt.gate.rulings import level_of, percent
from sdopt.record.verdicts import Payoff, Ruling, Verdict
from sdopt.statistics.measures import SPEEDUP, Measure, with_shape
from sdopt.statistics.ratios import MINIMUM_PROCESSES, LogRatio, exceeds


@dataclass(eq=False)
class Claim:
    """One measure in which an option claims a gain, and the answer to it, which `answer_claims` finds.

    Attributes:
        measure: the measure that the option claims to improve.
        ratio: the measured ratio; None if it was not measured.
        smallest: the smallest factor, at least 1, that counts.
        spared: the factor, at least 1, by which the measure may grow worse without harm (`gate.spare_memory`).
        floor: the factor by which two identical baselines differed; None if it is not known.
        disturbed: what disturbed the times; "" if nothing did.
        shape: the name of the shape if the study has several; "" if it has one.
        answer: None if it is open.
        reason: of the answer, in words.
        doubt: what disturbed its times, if that left it open.
    """

    measure: Measure
    ratio: LogRatio | None
    smallest: float
    floor: float | None
    disturbed: str = ""
    shape: str = ""
    spared: float = 1.0
    answer: Payoff | None = None
    reason: str = ""
    doubt: str = ""

    @property
    def name(self) -> str:
        """The claim's name in records: the measure, with the shape if the study has several."""
        return with_shape(self.measure.name, self.shape)

    @property
    def gain(self) -> LogRatio | None:
        """The factor by which the candidate is better."""
        if self.ratio is None or self.measure.higher_is_better:
            return self.ratio
        return self.ratio.inverted()

    @property
    def p_gain(self) -> float | None:
        """The one-sided p value of a gain that counts."""
        return self.gain.p_value(self.smallest) if self.gain else None

    @property
    def p_harm(self) -> float | None:
        """The one-sided p value of a harm that counts."""
        limit = max(self.smallest, self.spared)
        return self.gain.inverted().p_value(limit) if self.gain else None


def answer_claims(claims: Sequence[Claim], confidence: float) -> None:
    """Answers all claims of a study, so that the chance of any false gain, or any false harm, is at most 1 − confidence.

    A claim that cannot be tested still counts among them.
    """
    level = 1 - confidence
    gains = holm([_tested(claim.p_gain, claim) for claim in claims], level)
    harms = holm([_tested(claim.p_harm, claim) for claim in claims], level)
    for claim, gain, harm in zip(claims, gains, harms, strict=True):
        claim.answer, claim.reason = _answer(claim, gain, harm, len(claims), level)


def _tested(p_value: float | None, claim: Claim) -> float:
    if p_value is None or claim.disturbed:
        return 1.0
    return p_value


def _answer(
    claim: Claim,
    gains: bool,
    harms: bool,
    claims: int,
    level: float,
) -> tuple[Payoff | None, str]:
    """Returns the answer to a claim, and the reason; notes what disturbed it where that leaves it open."""
    gain = claim.gain
    if gain is None:
        return None, f"{with_shape(claim.measure.claim, claim.shape)}: not measured"
    most = gain.interval(1 - 2 * level).high
    ratio = _ratio_text(claim, level)
    if most is None or claim.floor is None:
        lacks = f" {_NO_INTERVAL}" if most is None else f", but {_NO_FLOOR}"
        return None, f"{ratio}{lacks}"
    if claim.disturbed:
        claim.doubt = claim.disturbed
        return None, ratio
    shown = gains or harms
    if shown and exceeds(gain.ratio, claim.floor):
        return "it pays" if gains else "harm", ratio
    counts = percent(claim.smallest)
    if most < claim.smallest:
        return "no benefit", f"{ratio} excludes a gain of {counts}"
    by_chance = claim.p_gain
    why = f"straddles a gain of {counts}: {_MORE_RUNS}"
    if shown:
        why = f"is no more than the {percent(claim.floor)} by which two identical baselines differ"
    elif by_chance is not None and by_chance <= level:
        why = f"could be chance: of {claims} gains that were looked for, one is often as large by chance alone"
    return None, f"{ratio} {why}"


_NO_INTERVAL = f"has no interval: that takes {MINIMUM_PROCESSES} processes per variant (protocol.replicates)"

_NO_FLOOR = "by how much two identical baselines differ is not known"

_MORE_RUNS = "a study with more runs (protocol.replicates) would settle it"


def _ratio_text(claim: Claim, level: float) -> str:
    assert claim.ratio is not None
    interval = claim.ratio.interval(1 - 2 * level)
    text = f"{claim.name} {interval.estimate:.3g}×"
    if interval.low is None or interval.high is None:
        return text
    # Tables show two-sided intervals, whose bounds lie farther out.
    bounds = f"[{interval.low:.3g}, {interval.high:.3g}]"
    return f"{text} {bounds} (one-sided {level_of(1 - level)} bounds)"


_NO_TRACE = "sdopt has no trace of its own that shows what changed: measure it again"

_SAME_TRACE = (
    "sdopt's own trace shows the same operators, kernels, types, calls, graphs and weights "
    "as in the reference"
)


def must_pay(claims: Sequence[Claim], changes: Sequence[str] | None) -> Ruling:
    """Rules on all claims of one option, which are answered: it must gain in one of them, and harm none.

    The option fails for a harm, or if every claim excludes a gain that counts. An open claim makes the ruling
    inconclusive unless another claim gains. A speed-up is unproven if the traces of option and reference do not differ;
    lower memory needs no trace, because sdopt itself measures it. `changes` are None if they are not known.
    """
    reason = "; ".join(claim.reason for claim in claims)
    doubts = [claim.doubt for claim in claims if claim.doubt]
    doubt = "; ".join(dict.fromkeys(doubts))
    doubted = f"{reason}; but {doubt}" if doubt else reason
    answers = {claim.answer for claim in claims}
    if "harm" in answers:
        return _ruling(Verdict.FAIL, "harm", doubted)
    gains = {claim.measure for claim in claims if claim.answer == "it pays"}
    if gains == {SPEEDUP} and not changes:
        unproven = _SAME_TRACE if changes is not None else _NO_TRACE
        return Ruling("must pay", "", Verdict.INCONCLUSIVE, doubted, doubt=unproven)
    if gains:
        return _ruling(Verdict.PASS, "it pays", doubted)
    if None in answers:
        return Ruling("must pay", "", Verdict.INCONCLUSIVE, reason, doubt=doubt)
    return _ruling(Verdict.FAIL, "no benefit", reason)


def _ruling(verdict: Verdict, payoff: Payoff, reason: str) -> Ruling:
    reason = f"{payoff}: {reason}"
    return Ruling("must pay", "", verdict, reason, payoff=payoff)


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Returns which claims hold together, so that the chance of any false one is at most `level` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    held = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        held[index] = True
    return held
