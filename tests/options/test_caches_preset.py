"""Each row of the preset that holds caches against each other on the packaged transformer takes effect there."""

import pytest

from sdopt.config.composer import composer_of
from tests.fixtures import CPU, Load
from tests.options.hosts import evidence

PRESET = "experiment=caches_dit"


def rows() -> dict[str, list[str]]:
    with composer_of([PRESET]) as composer:
        plan = composer.current.study.plan(composer)
    caches = {}
    for variant in plan.variants:
        chosen = [choice for choice in variant.overrides if "caching" in choice]
        if chosen:
            caches[variant.name] = chosen
    return caches


@pytest.mark.slow
def test_each_cache_takes_effect_on_the_packaged_transformer(session: Load) -> None:
    caches = rows()
    assert len(caches) == 13
    shown = {}
    for name, chosen in caches.items():
        model = ["model=emoji_dit", "workload.size=64", "workload.steps=25"]
        host = session(*model, *chosen)
        assert not host._variant.conflicts(CPU), name
        found = evidence(host, "caching")
        shown[name] = found.summary
        assert found.engaged, f"{name}: {found.summary}"
    print(*(f"{name}: {summary}" for name, summary in shown.items()), sep="\n")
