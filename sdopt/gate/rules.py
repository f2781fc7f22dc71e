"""Checks a gate's rules before anything runs."""

from sdopt.errors import UsageError
from sdopt.gate.precision import UNIT_ROUNDOFF
from sdopt.optimizations.base import Contract
from sdopt.quality.metrics import family_of
from sdopt.schema import Gate, Rule

PERFORMANCE = {"speedup": "latency", "memory_ratio": "memory"}
"""What gates can judge beside quality: ratios of the two sides, and the claim that each belongs to."""


def require_rules(gate: Gate) -> None:
    """Raises UsageError for rules that could never be applied: a gate that cannot judge must not start."""
    problems = []
    for contract, rules in gate.rules.items():
        if contract not in list(Contract):
            problems.append(f"gate.rules.{contract}: the contracts are {', '.join(Contract)}")
        for number, rule in enumerate(rules):
            where = f"gate.rules.{contract}[{number}]"
            if rule.metric not in PERFORMANCE:
                try:
                    family_of(rule.metric)
                except UsageError as error:
                    problems += [f"{where}.metric={problem}, {', '.join(PERFORMANCE)}" for problem in error.problems]
            needed = {
                "non_inferior": ("margin", "deviations"),
                "equivalent": ("margin", "deviations"),
                "at_least": ("limit", "limits", "of_seeds"),
                "at_most": ("limit", "limits", "of_seeds"),
                "rarely": ("limit", "limits", "of_seeds"),
            }.get(rule.test, ())
            names = ("margin", "deviations", "limit", "limits", "of_seeds")
            given = [name for name in names if getattr(rule, name) not in (None, {})]
            if needed and (len(given) != 1 or given[0] not in needed):
                problems.append(f"{where}: test={rule.test} takes one of {', '.join(needed)}")
            problems += _limit_problems(rule, where)
            if rule.test == "within" and (rule.low is None or rule.high is None):
                problems.append(f"{where}: test=within takes low and high")
            if (rule.test == "rarely") != (rule.share is not None):
                problems.append(f"{where}: test=rarely takes a share, and no other test does")
    if problems:
        raise UsageError(problems)


def _limit_problems(rule: Rule, where: str) -> list[str]:
    if not rule.limits or rule.limits.keys() == UNIT_ROUNDOFF.keys():
        return []
    return [f"{where}.limits: one each for {', '.join(UNIT_ROUNDOFF)}"]
