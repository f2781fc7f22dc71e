"""What options declare: each option that a rule excludes is refused in its words, and each need where it is absent."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sdopt.apps.doctor.options import compose_options
from sdopt.config.composer import composer_of
from sdopt.config.groups import optimization_options
from sdopt.hardware.cards import Feature
from sdopt.options.base import Optimization
from sdopt.options.declarations import Extra
from sdopt.variant import Variant
from tests.command import SMOKE
from tests.fixtures import CPU
from tests.reference import options_excluded


@pytest.fixture(scope="module")
def composed() -> dict[str, Variant]:
    """Every option of the packaged groups, on the reference model."""
    with composer_of(SMOKE) as composer:
        variants = compose_options(composer, optimization_options())
    return {
        f"{group}={name}": made
        for (group, name), made in variants.items()
        if isinstance(made, Variant)
    }


def declaring(
    composed: dict[str, Variant],
) -> Iterator[tuple[str, str, Optimization, Variant]]:
    """Yields name, axis, option and variant of the options that a variant chooses beyond its neighbours'."""
    for name, variant in composed.items():
        group, _, option = name.partition("=")
        axis = group if group in variant.optimizations else f"{group}.{option}"
        if axis in variant.optimizations:
            yield name, axis, variant.optimizations[axis], variant


def test_each_excluded_option_is_refused_in_the_words_of_its_rule(
    composed: dict[str, Variant],
) -> None:
    tried = 0
    for name, axis, option, variant in declaring(composed):
        for rule in option.all_excludes():
            group, _, member = rule.axis.partition(".")
            forbidden, possible = (
                ([member], list[str]()) if member else options_excluded(rule)
            )
            assert forbidden, (
                f"{name}: no option of {rule.axis} is excluded by its rule"
            )
            for other in (*forbidden, *possible):
                partner = composed.get(f"{group}={other}")
                if partner is None or rule.axis not in partner.optimizations:
                    continue
                chosen = {
                    **variant.optimizations,
                    rule.axis: partner.optimizations[rule.axis],
                    axis: option,
                }
                reasons = replace(variant, optimizations=chosen).conflicts(CPU)
                is_refused = any(rule.reason in reason for reason in reasons)
                assert is_refused == (other in forbidden), (
                    f"{name} with {group}={other}: {reasons}"
                )
                tried += is_refused
    assert tried >= 40


def test_each_need_is_refused_where_it_is_absent(
    composed: dict[str, Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdopt.options.declarations.find_spec", lambda module: None)
    tried = 0
    for name, _, option, variant in declaring(composed):
        needs = option.all_needs()
        if not needs:
            continue
        reasons = " ".join(variant.conflicts(CPU))
        features = [need.what for need in needs if isinstance(need, Feature)]
        extras = [f"sdopt[{need.extra}]" for need in needs if isinstance(need, Extra)]
        for word in features or extras:
            assert word in reasons, f"{name}: {reasons}"
            tried += 1
    assert tried >= 10
