"""Every option with every task, and every pair of options: it names its conflict, or runs and shows its evidence."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hydra import initialize_config_dir

from sdopt.config.groups import data_sheets
from sdopt.config.paths import CONF
from sdopt.hardware.cards import planned_device
from sdopt.schema import Model
from tests.fixtures import CPU
from tests.options.walk import TASKS, Choice, Walk, covering_runs, few_runs

DEVICES = {"cpu": CPU, **{card: planned_device(data_sheets()[card]) for card in ("h200", "rtx4090", "t4")}}

USUAL = (("emoji", "cpu"), ("sd15", "rtx4090"), ("sd21", "t4"), ("sdxl", "h200"))
"""Models and devices whose pairs are looked at on each commit: each device once, and a model of each kind."""


@pytest.fixture(scope="module")
def walk() -> Walk:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return Walk(CPU)


@pytest.fixture(scope="module")
def quick(walk: Walk) -> list[Choice]:
    """The options that run here and do not compile for long."""
    long = walk.compiles_for_long()
    return [choice for choice in walk.able() if choice not in long]


class TestDeclared:
    @pytest.mark.parametrize(
        ("model", "device"),
        [
            pytest.param(model, device, marks=[] if (model, device) in USUAL else pytest.mark.slow)
            for model in ("emoji", "sd15", "sd21", "sd21_base", "sdxl")
            for device in DEVICES
        ],
    )
    def test_what_a_pair_adds_to_the_conflicts_of_both_names_one_of_them(
        self, walk: Walk, model: str, device: str
    ) -> None:
        section = Model(name=model, weights="packaged" if model == "emoji" else "random")
        found = [
            f"{first} with {second}: {reason}"
            for first, second in walk.pairs
            for reason in walk.undeclared((first, second), DEVICES[device], model=section)
        ]
        assert not found, "\n".join(found)

    @pytest.mark.parametrize("task", sorted({*TASKS} - {"txt2img"}))
    def test_and_so_with_the_tasks_that_start_from_an_image(self, walk: Walk, task: str) -> None:
        section = walk.variant([], task).task
        found = [
            f"{first} with {second}: {reason}"
            for first, second in walk.pairs
            for reason in walk.undeclared((first, second), CPU, task=section)
        ]
        assert not found, "\n".join(found)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("lora=hotswap", "memory=group_offload"),
            ("lora=hotswap", "precision=int8_torchao"),
            ("lora=hotswap", "precision=int8_sdnq"),
            ("lora=loaded", "precision=int8_sdnq"),
        ],
    )
    def test_pairs_that_do_not_work_say_so(self, walk: Walk, first: str, second: str) -> None:
        chosen = [choice for choice in walk.choices if str(choice) in (first, second)]
        found = walk.variant(chosen).conflicts(CPU)
        assert any(reason.startswith(second) and "lora=" in reason for reason in found)

    def test_every_option_is_in_a_pair(self, walk: Walk) -> None:
        paired = {str(choice) for pair in walk.pairs for choice in pair}
        assert paired == {str(choice) for choice in walk.choices}
        assert {choice.group for choice in walk.choices} >= {"attention", "compiler", "memory", "precision"}


class TestRun:
    def test_every_option_takes_effect_beside_others(self, walk: Walk, quick: Sequence[Choice]) -> None:
        found = walk.failures(few_runs(walk, quick))
        assert not found, "\n".join(found)

    @pytest.mark.slow
    def test_runs_that_cover_every_pair_take_effect(self, walk: Walk, quick: Sequence[Choice]) -> None:
        """Minutes on one core: each option with each task, and each pair of options at least once."""
        runs = covering_runs(walk, quick)
        met = {frozenset(pair) for chosen, _ in runs for pair in combinations(chosen, 2)}
        wanted = {frozenset((a, b)) for a, b in combinations(quick, 2) if a.combines(b) and walk.runnable([a, b])}
        assert wanted <= met
        assert len(runs) < len(wanted) / 3
        for choice in quick:
            assert {task for chosen, task in runs if choice in chosen} == set(TASKS)
        found = walk.failures(runs)
        assert not found, "\n".join(found)

    @pytest.mark.slow
    def test_every_pair_takes_effect(self, walk: Walk) -> None:
        """With those that compile for long: an hour or more on one core."""
        found = walk.failures(covering_runs(walk, walk.able()))
        assert not found, "\n".join(found)
