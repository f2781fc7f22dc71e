"""Decides whether a gate caught a sabotage: a rule failed it, or did not pass it but passes an honest option."""

from collections.abc import Sequence
from dataclasses import dataclass

from sdopt.analysis.measures import RULED
from sdopt.gate.judge import worst
from sdopt.quality.metrics import family_of
from sdopt.results.records import StudyResult, VariantResult
from sdopt.results.verdicts import Payoff, Ruling, Verdict
from tests.trial.registry import title_of


@dataclass(frozen=True)
class Caught:
    """The gate's verdict on one sabotage, or on an honest option.

    Attributes:
        name: the variant's name.
        title: title of its class of harm.
        contract: the contract that it declared.
        verdict: the gate's verdict.
        by: names of the rules that caught it: those that failed it or, if none did, those that did not pass it although
            they passed an honest option of the same contract.
        expected: names of rules of which at least one should be in `by`; empty if any rule will do.
        effect: the estimate over the margin for the first expected rule in `by`, else the first in `by`; None if it has
            none.
        honest: whether the option does no harm, so that no rule may fail it.
    """

    name: str
    title: str
    contract: str
    verdict: Verdict
    by: tuple[str, ...]
    expected: tuple[str, ...]
    effect: float | None
    honest: bool

    @property
    def fits(self) -> bool:
        """Whether an expected rule caught a sabotage, or no rule failed an honest option.

        An honest option may bring no gain on this machine, and *no benefit* is then no false alarm.
        """
        if self.honest:
            return not self.by
        return bool(self.by) and (not self.expected or bool({*self.by} & {*self.expected}))


def caught(
    name: str,
    title: str,
    contract: str,
    rulings: Sequence[Ruling],
    shared: Sequence[Ruling] | None,
    expected: str = "",
) -> Caught:
    """Derives from the rulings on a variant whether it was caught.

    Args:
        name: the variant's name.
        title: the title of its class of harm.
        contract: the contract that it declared.
        rulings: the gate's rulings on it.
        shared: the rulings on an honest option of the contract; None if the variant is an honest option itself.
        expected: rules of which at least one should catch it, separated by bars.
    """
    open_too = {_rule(ruling) for ruling in shared or [] if ruling.verdict is not Verdict.PASS}
    failed = [ruling for ruling in rulings if ruling.verdict is Verdict.FAIL]
    left_open = [r for r in rulings if r.verdict not in (Verdict.PASS, Verdict.FAIL) and _rule(r) not in open_too]
    decisive = failed or left_open
    if shared is None:
        decisive = [ruling for ruling in failed if ruling.payoff is not Payoff.NO_BENEFIT]
    wanted = tuple(filter(None, expected.split("|")))
    fitting = [ruling for ruling in decisive if _rule(ruling) in wanted] or decisive
    return Caught(
        name,
        title,
        contract,
        worst([ruling.verdict for ruling in rulings]),
        tuple(dict.fromkeys(_rule(ruling) for ruling in decisive)),
        wanted,
        _effect(fitting[0]) if fitting else None,
        shared is None,
    )


def timed_variants(result: StudyResult) -> list[Caught]:
    """Returns the gate's verdict on each variant of a judged study; the key `caught_by` names the rules to catch it.

    An option counts as honest if it is not in the group `trial`, or its class is in the module `honest`.
    """
    honest: dict[str, list[Ruling]] = {}
    for judgement in result.judgements:
        if _is_honest(result.variant(judgement.candidate)):
            honest.setdefault(judgement.contract, judgement.rulings)
    found = []
    for judgement in result.judgements:
        variant = result.variant(judgement.candidate)
        option = variant.config.options.get("trial", {})
        own = _is_honest(variant)
        title = "honest" if own else title_of(option["_target_"])
        shared = None if own else honest.get(judgement.contract, [])
        found.append(
            caught(variant.name, title, judgement.contract, judgement.rulings, shared, option.get("caught_by", ""))
        )
    return found


def _is_honest(variant: VariantResult) -> bool:
    option = variant.config.options.get("trial")
    return not option or title_of(option["_target_"]) == "honest"


def _rule(ruling: Ruling) -> str:
    """Returns a rule's name: its metric's family, or its own name."""
    if not ruling.metric:
        return ruling.rule
    name = ruling.metric.partition("/")[0]
    return name if name in RULED else family_of(name).name


def _effect(ruling: Ruling) -> float | None:
    if ruling.estimate is None or not ruling.margin:
        return None
    return abs(ruling.estimate / ruling.margin)
