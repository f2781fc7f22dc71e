"""The table of options and transformers says what is so: `python -m tests.options.walk` wrote it."""

import json
from dataclasses import replace

import pytest

from tests.fixtures import CPU
from tests.options import walk
from tests.pipelines.tiny import TINY, tiny

FAST = ("flux", "z_image")

EVERY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TINY
]


def test_page_is_what_the_data_gives() -> None:
    kept = json.loads((walk.FOLDER / "options.json").read_text(encoding="utf-8"))
    written = (walk.FOLDER / "README.md").read_text(encoding="utf-8")
    assert written == walk.page(walk.read(), kept["versions"])


@pytest.mark.parametrize("name", list(TINY))
def test_every_option_was_tried(name: str) -> None:
    tried = {option for option, row in walk.read().items() if name in row}
    assert tried == {f"{group}={option}" for group, option in walk.chosen_options()}


def test_what_fails_is_known() -> None:
    failed = {}
    for option, row in walk.read().items():
        failed[option] = {n for n, cell in row.items() if cell.outcome == "failed"}
    assert {option: names for option, names in failed.items() if names} == walk.LOUD


@pytest.mark.parametrize("name", EVERY)
def test_what_is_refused_still_is(name: str) -> None:
    pipe = tiny(name)
    kept = walk.read()
    for chosen, (axis, option) in walk.every_option().items():
        outcome = kept.get(chosen, {}).get(name)
        if outcome is None or not walk.is_installed(chosen):
            continue
        context = walk.context_on_card(pipe, {axis: option}, walk.batch_of(chosen))
        reasons = [*option.obstacles(context), *option.broken(pipe)]
        if outcome.outcome == "needs a card":
            assert option.obstacles(replace(context, device=CPU)), chosen
        if outcome.outcome == "took effect":
            assert not option.obstacles(replace(context, device=CPU)), chosen
        if outcome.outcome in ("refused", "needs a card"):
            assert bool(reasons) == (outcome.outcome == "refused"), chosen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # as the walk itself
@pytest.mark.parametrize("name", list(TINY))
def test_every_option_does_what_the_table_says(name: str) -> None:
    kept = walk.read()
    for _, option, cell in walk.walked([name]):
        if not walk.is_installed(option):
            continue
        assert cell.outcome == kept[option][name].outcome, (option, cell.why)
