"""Checks a gate's rules before anything runs."""

from sdopt.errors import UsageError
from sdopt.optimizations.base import Contract
from sdopt.quality.metrics import family_of
from sdopt.schema import Gate

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
                "at_least": ("limit", "of_seeds"),
                "at_most": ("limit", "of_seeds"),
                "rarely": ("limit", "of_seeds"),
            }.get(rule.test, ())
            given = [name for name in ("margin", "deviations", "limit", "of_seeds") if getattr(rule, name) is not None]
            if needed and (len(given) != 1 or given[0] not in needed):
                problems.append(f"{where}: test={rule.test} takes one of {' and '.join(needed)}")
            if rule.test == "within" and (rule.low is None or rule.high is None):
                problems.append(f"{where}: test=within takes low and high")
            if (rule.test == "rarely") != (rule.share is not None):
                problems.append(f"{where}: test=rarely takes a share, and no other test does")
    if problems:
        raise UsageError(problems)
