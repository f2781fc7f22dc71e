"""Every number of the configuration has a range, and what is beyond it is refused with the key and the range."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import walk_packages
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from runners.keys import limits_of
from sdopt import options
from sdopt.apps.training.config import TrainReferenceConfig
from sdopt.config.composer import HydraComposer
from sdopt.config.parse import SECTIONS
from sdopt.config.typed import typed
from sdopt.errors import UsageError
from sdopt.options.base import Optimization
from sdopt.schema import Edge, Rates, Rule, Scheduler, Sheet
from sdopt.study.designs import Design, Explicit
from tests.fixtures import CPU

BEYOND = (2**63, math.inf, -math.inf, math.nan)

Composers = type[HydraComposer]


def classes() -> Iterator[type]:
    """The dataclasses that a configuration is made of: sections, data sheets, rules, designs, options, training."""
    for module in walk_packages(options.__path__, "sdopt.options."):
        import_module(module.name)
    found: list[type] = [
        *SECTIONS.values(),
        Sheet,
        Rates,
        Rule,
        Edge,
        Design,
        Optimization,
    ]
    found.append(TrainReferenceConfig)
    for cls in found:
        kinds: list[type] = [
            kind for kind in get_type_hints(cls).values() if isinstance(kind, type)
        ]
        subclasses: list[type] = type.__subclasses__(cls)
        derived = [k for k in subclasses if k.__module__.startswith("sdopt.")]
        found += [
            kind
            for kind in (*kinds, *derived)
            if is_dataclass(kind) and kind not in found
        ]
    yield from found


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a field that takes one of several; those within a list or a mapping are none of its own."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def test_a_range_is_declared_beside_each_number() -> None:
    numbers = 0
    for cls in classes():
        plain, annotated = get_type_hints(cls), get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            if not {int, float} & {*alternatives(plain[field.name])}:
                continue
            numbers += 1
            limits = limits_of(annotated[field.name])
            name = f"{cls.__name__}.{field.name}"
            assert "choices" in limits or (
                {"ge", "gt"} & limits.keys() and {"le", "lt"} & limits.keys()
            ), name
            for value in BEYOND:
                with pytest.raises(ValidationError):
                    TypeAdapter(annotated[field.name]).validate_python(value)
    assert numbers > 100


def test_numbers_within_lists_and_mappings_are_looked_at() -> None:
    problems: list[str] = []
    assert (
        typed(
            "scheduler",
            {"options": {"betas": [1, {"a": math.inf}]}},
            Scheduler,
            problems,
        )
        is None
    )
    assert problems == ["scheduler.options.betas[1].a=inf: must be a finite number"]


@pytest.mark.parametrize(
    "override",
    [
        "workload.seed=99999999999999999999",
        "workload.guidance_scale=nan",
        "+scheduler.options.beta_start=nan",
    ],
)
def test_is_refused_with_its_key(override: str, composer: Composers) -> None:
    with pytest.raises(UsageError) as caught:
        composer([override])
    [problem] = caught.value.problems
    assert problem.startswith(
        override.lstrip("+").partition("=")[0].removesuffix(".beta_start")
    )
    assert "must be" in problem or "Input should be" in problem


def test_more_threads_than_the_machine_can_run(composer: Composers) -> None:
    [conflict] = composer(["hardware.threads=3000"]).variant(None).conflicts(CPU)
    assert conflict.startswith("hardware.threads=3000: at most ")


@pytest.mark.parametrize(
    ("design", "said"),
    [
        (
            Explicit(variants={"": [], "b": []}),
            "study.variants: '': a variant's name must be one line of text",
        ),
        (Explicit(variants={"a\nb": []}), "must be one line of text"),
        (
            Explicit(variants={"a": [], "b": []}, edges=[Edge("b", "b")]),
            "study.edges: 'b' is compared with",
        ),
    ],
)
def test_names_of_variants(design: Explicit, said: str, composer: Composers) -> None:
    with pytest.raises(UsageError, match=said):
        design.plan(composer([]))
