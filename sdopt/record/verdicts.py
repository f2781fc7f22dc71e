"""Records the verdicts of a gate, ruling by ruling, and its looks at the data."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from sdopt.contract import Contract


class Verdict(StrEnum):
    """A gate's verdict on a rule, a variant or a study; of several, the worst counts, in this order."""

    PASS = "pass"
    INCONCLUSIVE = "undecided"
    """The interval includes the margin: more prompts, rounds or processes would decide."""
    NOT_COMPARABLE = "not judged"
    """Something is missing, not finite, or belongs to other work."""
    FAIL = "fail"

    @property
    def is_open(self) -> bool:
        """Whether it neither passes nor fails."""
        return self in (Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE)

    @classmethod
    def _missing_(cls, value: object) -> "Verdict | None":
        """Returns the verdict that an earlier version recorded in another word."""
        earlier = {
            "inconclusive": cls.INCONCLUSIVE,
            "not comparable": cls.NOT_COMPARABLE,
        }
        return earlier.get(str(value))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the worst of several verdicts; without any, nothing was judged."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.NOT_COMPARABLE)


Payoff = Literal["it pays", "harm", "no benefit"]
"""What a gate found of an option's claims of a gain; its reason begins with the same word.

It pays if a gain holds together with all other claims of the study; it has no benefit if it does no harm, and every
gain that counts is excluded.
"""


@dataclass
class Ruling:
    """One rule applied to one comparison. `low` and `high` are one-sided bounds, each at the rule's confidence."""

    rule: str
    metric: str
    verdict: Verdict
    reason: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    payoff: Payoff | None = None
    """Of the rule that an option must pay; None for other rules, and where its claims are open."""
    doubt: str = ""
    """What keeps an undecided ruling open whatever its bounds say; rulings of one comparison may share it."""
    prompts: int | None = None
    """About how many prompts would settle an open ruling; None if that is not known."""

    @property
    def because(self) -> str:
        """What decided the ruling: the doubt if there is one, else the reason."""
        return self.doubt or self.reason

    @property
    def text(self) -> str:
        """The reason, and the doubt if there is one."""
        return f"{self.reason}; but {self.doubt}" if self.doubt else self.reason


UNDISTURBED = "undisturbed"
"""The rule that other programs broke; every ruling on a time has the same doubt."""

BROKEN = "works"
"""The rule that a variant broke that worked in an earlier result and fails now."""

SINCE = "everything since"
"""What is judged of a variant that is compared with itself in an earlier result."""


@dataclass
class Judgement:
    """A gate's verdict on one comparison: the worst of its rulings."""

    candidate: str
    reference: str
    credit: str
    contract: Contract
    verdict: Verdict
    rulings: list[Ruling]
    note: str = ""
    claims: dict[str, float] = field(default_factory=dict)
    """For each measure in which the candidate claims a gain, the one-sided p value that there is none that counts."""
    gains: list[str] = field(default_factory=list)
    """Measures in which a gain holds together with all other claims of the study."""

    @property
    def is_drift(self) -> bool:
        """Whether the reference is an earlier result, of which speed-ups are compared, and no times."""
        return self.credit == SINCE

    @property
    def disturbance(self) -> str:
        """What disturbed the timing, so that no rule on a time fails; "" if nothing did."""
        found = [one.reason for one in self.rulings if one.rule == UNDISTURBED]
        return "; ".join(found)


@dataclass
class Look:
    """One judging of one comparison, with a digest of its data."""

    candidate: str
    reference: str
    gate: str
    judged: str
    data: str
    """Digest of the judged data: judging the same data again is the same look."""
    number: int
    """1 for the first look, which alone can pass."""
    processes: int
    rounds: int
    prompts: int
    verdict: Verdict
