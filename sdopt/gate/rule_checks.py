"""Checks a gate's rules before anything runs: a gate that cannot judge must not start.

`judge` applies the rules, with the tests in `rulings`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.gate.calibration import read_calibration
from sdopt.gate.rulings import UNIT_ROUNDOFF
from sdopt.quality.metrics import (
    FAMILIES,
    MetricFamily,
    QualityMetric,
    family_of,
    is_imported,
    measured_metrics,
)
from sdopt.schema import TESTS, Gate, Model, Quality, Rule
from sdopt.statistics.measures import FIRST_IMAGE, RULED, is_of_images

if TYPE_CHECKING:
    from sdopt.study.designs import Plan

_KEYS = (
    "margin",
    "deviations",
    "limit",
    "limits",
    "of_seeds",
    "of_floor",
    "share",
    "low",
    "high",
    "least",
)
"""The keys of a rule that tests read."""

_EXAMPLES = {"clip": "clip:openai/clip-vit-base-patch32"}
"""An example of `quality.features` for each kind whose own name does not suffice."""


def require_rules(gate: Gate) -> None:
    """Raises UsageError if any rule could never be applied; the error names all such rules."""
    problems = []
    for contract, rules in gate.rules.items():
        if contract not in list(Contract):
            problems.append(
                f"gate.rules.{contract}: unknown contract; choose one of {', '.join(Contract)}"
            )
        for number, rule in enumerate(rules):
            problems_of = (
                _problems_of_metric if is_of_images(rule.metric) else _problems_of_ratio
            )
            for problem in problems_of(rule):
                problems.append(f"gate.rules.{contract}[{number}]{problem}")
    if problems:
        raise UsageError(problems)


def _problems_of_ratio(rule: Rule) -> Iterator[str]:
    """Yields why a rule on a measure of speed or memory cannot be judged; it is compared with `limit` alone."""
    unit = "a ratio to the reference"
    tests = [name for name, test in TESTS.items() if test.of_ratios]
    if rule.metric == FIRST_IMAGE:
        unit = "in seconds"
        tests = ["at_most"]
    advice = f"{rule.metric} is {unit}; test it with {' or '.join(tests)}, and give the rule a limit"
    unused = [key for key in _set_keys(rule) if key != "limit"]
    if rule.test not in tests:
        yield f".metric={rule.metric}: test={rule.test}: {advice}"
    elif unused:
        yield f".metric={rule.metric}: {advice}, and no {', '.join(unused)}"
    elif rule.limit is None:
        yield f".metric={rule.metric}: {advice}"
    elif rule.limit <= 0:
        yield f".limit={rule.limit:g}: {rule.metric} is {unit}, and above 0 in any case"


def _problems_of_metric(rule: Rule) -> Iterator[str]:
    try:
        unfit = _unfit(rule, family_of(rule.metric))
        if unfit:
            yield f".metric={rule.metric}: test={rule.test}: {unfit}"
    except UsageError as error:
        for problem in error.problems:
            yield f".metric={problem}, {', '.join((*RULED, FIRST_IMAGE))}"
    yield from _problems_of_keys(rule)
    if rule.limits and rule.limits.keys() != UNIT_ROUNDOFF.keys():
        yield f".limits: must have one limit for each of {', '.join(UNIT_ROUNDOFF)}"
    if rule.low is not None and rule.high is not None and rule.low >= rule.high:
        yield f".low={rule.low:g}: must be below high={rule.high:g}"


def _problems_of_keys(rule: Rule) -> Iterator[str]:
    """Yields which keys a rule lacks for its test, and which ones that would not read."""
    test = rule.how
    keys = _set_keys(rule)
    if test.takes and len(set(test.takes).intersection(keys)) != 1:
        yield f": test={rule.test} takes one of {', '.join(test.takes)}"
    lacking = [key for key in test.needs if key not in keys]
    if lacking:
        yield f": test={rule.test} needs {' and '.join(lacking)}"
    unread = set(keys).difference(test.takes, test.needs, test.reads)
    if unread:
        yield f": test={rule.test} takes no {' and no '.join(sorted(unread))}"
    elif rule.least and not {"of_seeds", "deviations", "of_floor"}.intersection(keys):
        yield ": least can only be used with of_seeds, deviations or of_floor"


def _set_keys(rule: Rule) -> list[str]:
    """Returns the keys that a rule sets for its test."""
    return [key for key in _KEYS if getattr(rule, key) != getattr(Rule(), key)]


def _unfit(rule: Rule, family: MetricFamily) -> str:
    """Returns why a rule's test cannot judge its metric, and what can; "" if it can."""
    test = rule.how
    if test.figure == "change" and family.needs_pair:
        fitting = "at_least" if family.higher_is_better else "at_most"
        return f"the metric compares pairs of images itself; test it with {fitting}"
    one_way = test.figure == "change" and test.side == "least"
    if one_way and family.higher_is_better is None:
        return "neither more nor less of the metric is better; test it with equivalent"
    if test.figure in ("share", "worst") and family.higher_is_better:
        return "the test counts prompts that exceed a limit, and more of this metric is better; test it with at_least"
    if test.by_prompt and family.least > 1:
        return "the metric of all images has no value per prompt; test it with at_least, at_most or within"
    return _without_interval(rule, family)


def _without_interval(rule: Rule, family: MetricFamily) -> str:
    """Returns why a metric without bounds cannot be held against the rule's limit, and what can; "" if it can."""
    if family.name == "psnr_db":
        same = (
            ""
            if rule.limit is None
            else f"; {rule.limit:g} dB is limit={10 ** (-rule.limit / 10):.3g}"
        )
        return f"identical images have none; test mse, from which it is computed, with at_most{same}"
    if family.name == "fid" and rule.confidence is not None:
        return "the metric has no interval; compare the figure itself: give the rule confidence: null"
    return ""


def applicable(gate: Gate, quality: Quality, model: Model) -> Gate:
    """Returns a gate without those of its optional rules whose metric none of the chosen features can measure."""
    left_out = _left_out(gate, quality, model)
    return _with_rules(
        gate, lambda rule: not (rule.optional and rule.metric in left_out)
    )


def remarks_on_rules(gate: Gate, quality: Quality, model: Model) -> list[str]:
    """Returns which optional rules of a gate are left out, and what would measure them; [] if none is."""
    left_out = _left_out(gate, quality, model)
    return [
        f"gate={gate.name}: {metric} is not judged: {why}"
        for metric, why in left_out.items()
    ]


def _left_out(gate: Gate, quality: Quality, model: Model) -> dict[str, str]:
    """Returns the metrics of optional rules that are not measured, each with what would measure it."""
    if not gate.judges or not quality.metrics:
        return {}
    if model.weights == "random":  # which no features help
        return {}
    measured = {metric.family for metric in measured_metrics(quality, model)}
    optional: set[str] = set()
    for rules in gate.rules.values():
        optional.update(rule.metric for rule in rules if rule.optional)
    left_out = {}
    for metric in optional:
        if family_of(metric) not in measured:
            left_out[metric] = _unmeasured(metric, (), 0, model)
    return left_out


def require_measured(plan: "Plan", gate: Gate, quality: Quality, model: Model) -> None:
    """Checks, before anything is loaded, that the gate will have what it judges by.

    That is every metric of its rules, and the calibration that it names. Does not check rules for contracts that no
    variant of the plan has.

    Raises:
        UsageError: a rule names a metric that will not be measured, that is ambiguous, or that decides nothing with so
            few images; or the calibration cannot be read. The error has a line per reason, with the key or the metrics
            and their rules, and the way out.
    """
    if not gate.judges:
        return
    problems = _unmeasured_rules(plan, gate, quality, model)
    if gate.calibration is not None:
        try:
            read_calibration(Path(gate.calibration))
        except UsageError as error:
            problems += [f"gate.calibration={problem}" for problem in error.problems]
    if problems:
        raise UsageError(problems)


def _unmeasured_rules(
    plan: "Plan",
    gate: Gate,
    quality: Quality,
    model: Model,
) -> list[str]:
    """Returns a line for each reason why rules cannot be judged, with their metrics."""
    measured = measured_metrics(quality, model)
    left_out = _left_out(gate, quality, model)
    baseline = plan.baseline
    images = len(baseline.pictured) * baseline.workload.images_per_prompt
    rules: dict[str, list[str]] = {}
    for contract in _contracts(plan):
        for number, rule in enumerate(gate.rules.get(contract, [])):
            is_left_out = rule.optional and rule.metric in left_out
            if is_of_images(rule.metric) and not is_left_out:
                rules.setdefault(rule.metric, []).append(f"{contract}[{number}]")
    metrics: dict[str, list[str]] = {}
    for metric, places in rules.items():
        reason = _unmeasured(metric, measured, images, model)
        if reason:
            metrics.setdefault(reason, []).append(
                f"{metric} (gate.rules.{', '.join(places)})"
            )
    return [
        f"gate={gate.name}: {', '.join(names)}: {reason}"
        for reason, names in metrics.items()
    ]


def decidable(gate: Gate, quality: Quality, model: Model, images: int) -> Gate:
    """Returns a gate with only those rules whose metrics will be measured and decide something with so few images."""
    measured = measured_metrics(quality, model)

    def decides(rule: Rule) -> bool:
        return not is_of_images(rule.metric) or not _unmeasured(
            rule.metric, measured, images, model
        )

    return _with_rules(gate, decides)


def _with_rules(gate: Gate, fits: Callable[[Rule], bool]) -> Gate:
    rules = {}
    for contract, of_contract in gate.rules.items():
        rules[contract] = list(filter(fits, of_contract))
    return replace(gate, rules=rules)


def _contracts(plan: "Plan") -> list[Contract]:
    """Returns the contracts by which a gate may judge the variants of a plan."""
    candidates = [variant for variant in plan.variants if variant is not plan.baseline]
    if not candidates:
        return []
    contracts = {variant.contract for variant in candidates}
    contracts |= {plan.baseline.contract} - {Contract.EXACT}
    if any(variant.other_work(plan.baseline) for variant in candidates):
        contracts.add(Contract.LOSSY)
    return [contract for contract in Contract if contract in contracts]


def _unmeasured(
    metric: str,
    measured: Sequence[QualityMetric],
    images: int,
    model: Model,
) -> str:
    """Returns why a rule on a metric cannot be judged, and the way out; "" if it can."""
    family = family_of(metric)
    meant = [one.name for one in measured if metric in (one.name, one.family.name)]
    if len(meant) > 1:
        return f"ambiguous: name one of {', '.join(meant)}"
    if not meant:
        return _way_to_measure(metric, family, model)
    least = max(family.least, family.decides_from)
    if images >= least:
        return ""
    return (
        f"at least {least:,} images are needed, and {images:,} are drawn: "
        "raise quality.prompt_count, with as many prompts"
    )


def _way_to_measure(metric: str, family: MetricFamily, model: Model) -> str:
    """Returns why a metric is not measured, and what would measure it."""
    if model.weights == "random" and not family.on_random_weights:
        on_random = [family.name for family in FAMILIES if family.on_random_weights]
        fitting = ", ".join([*RULED, FIRST_IMAGE, *on_random])
        return f"meaningless for random weights: choose a gate whose rules judge only {fitting}"
    if is_imported(metric):
        return "computed by another program: run without this rule, then `sdopt score` and `sdopt gate`"
    if family.on_request:
        return f"measured only on request: set quality.{family.on_request}=true"
    return (
        "measured only with features, and these are not chosen: "
        f"for example quality.features=[{_example_features(metric, family)}]"
    )


def _example_features(metric: str, family: MetricFamily) -> str:
    for kind in family.over:
        if metric in (family.name, f"{family.name}_{kind}"):
            return _EXAMPLES.get(kind, kind)
    return "…"
