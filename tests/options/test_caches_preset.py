"""Each row of the preset that holds caches against each other on the packaged transformer takes effect there."""

from importlib.util import find_spec

import pytest

from tests.fixtures import CPU, Composers, Load
from tests.options.hosts import evidence

PRESET = "experiment=caches_dit"


def rows(composer: Composers) -> dict[str, list[str]]:
    preset = composer([PRESET])
    plan = preset.current.study.plan(preset)
    caches = {}
    for variant in plan.variants:
        chosen = [choice for choice in variant.overrides if "caching" in choice]
        if chosen:
            caches[variant.name] = chosen
    return caches


@pytest.mark.slow
def test_each_cache_takes_effect_on_the_packaged_transformer(
    composer: Composers, session: Load
) -> None:
    caches = rows(composer)
    assert len(caches) == 13
    shown = {}
    for name, chosen in caches.items():
        if name.startswith("DBCache") and find_spec("cache_dit") is None:
            continue
        model = ["model=emoji_dit", "workload.size=64", "workload.steps=25"]
        host = session(*model, *chosen)
        assert not host._variant.conflicts(CPU), name
        found = evidence(host, "caching")
        shown[name] = found.summary
        assert found.engaged, f"{name}: {found.summary}"
    print(*(f"{name}: {summary}" for name, summary in shown.items()), sep="\n")
