"""Every option with every task, and every pair of options: it names its conflict, or runs and shows its evidence."""

import gc
import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
from hydra import initialize_config_dir

from sdopt.config.composer import HydraComposer
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.config.paths import CONF
from sdopt.doctor.options import compose_options
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.options.base import Optimization
from sdopt.options.caching import FirstBlockCaching
from sdopt.schema import Model
from sdopt.variant import Variant
from sdopt.worker.host import PipelineHost
from sdopt.worker.preload import MODULES, import_all
from tests.command import SMOKE
from tests.fixtures import CPU

TASKS = ("txt2img", "img2img", "inpaint")

WORKLOADS: tuple[tuple[str, ...], ...] = (
    (),
    ("workload.batch_size=2",),
    ("workload.size=80",),
    ("workload.batch_size=2", "workload.size=80"),
    ("workload.batch_size=2", "workload.size=96", "workload.steps=20"),
)
"""From small to large: an option that cannot take effect on the first is tried on the next."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One option of a group, as it was composed."""

    group: str
    option: str
    optimizations: Mapping[str, Optimization]

    def __str__(self) -> str:
        return f"{self.group}={self.option}"

    def combines(self, other: "Choice") -> bool:
        """Whether the two are chosen on different axes: of different groups, or of one whose options combine."""
        return not self.optimizations.keys() & other.optimizations.keys()

    def is_named(self, reason: str) -> bool:
        """Whether a reason says its name, that of its group or that of its class."""
        words = {self.group, self.option, *(type(option).__name__ for option in self.optimizations.values())}
        return any(word.lower() in reason.lower() for word in words)


class Walk:
    """The options of the packaged groups, the variants made of them, and what these say on a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        composer = HydraComposer([*SMOKE, "workload.steps=3"])
        self._bases = {
            (task, number): composer.variant(None, [f"task={task}", *workload])
            for task in TASKS
            for number, workload in enumerate(WORKLOADS)
        }
        self.choices = [
            Choice(group, option, {axis: chosen for axis, chosen in variant.optimizations.items() if _in(group, axis)})
            for (group, option), variant in compose_options(composer, optimization_options()).items()
            if isinstance(variant, Variant)
        ]
        self.pairs = [(a, b) for a, b in combinations(self.choices, 2) if a.combines(b)]
        # What a worker has imported is no garbage here either: every run would look through it several times.
        import_all(MODULES)
        gc.collect()
        gc.freeze()

    def variant(self, chosen: Iterable[Choice], task: str = "txt2img", workload: int = 0) -> Variant:
        """Returns the variant with some options on the reference model."""
        base = self._bases[task, workload]
        options, names = dict(base.optimizations), dict(base.choices)
        for choice in chosen:
            # Few steps of small images differ too much for the test of a first-block cache as it is set for users.
            options |= {
                axis: replace(option, threshold=10.0) if isinstance(option, FirstBlockCaching) else option
                for axis, option in choice.optimizations.items()
            }
            names |= dict.fromkeys(choice.optimizations, choice.option)
        return replace(base, optimizations=options, choices=names)

    def runnable(self, chosen: Sequence[Choice], task: str = "txt2img") -> Variant | None:
        """Returns the variant on the smallest workload on which it has no conflict; None if it has one on all."""
        made = (self.variant(chosen, task, number) for number in range(len(WORKLOADS)))
        return next((variant for variant in made if not variant.conflicts(self.device)), None)

    def able(self) -> list[Choice]:
        """Returns the options that run here, without those of the baseline: a pair with one of these is the other."""
        plain = self.variant([]).optimizations
        return [
            choice
            for choice in self.choices
            if not choice.optimizations.items() <= plain.items() and self.runnable([choice])
        ]

    def undeclared(self, device: Device, **sections: object) -> list[str]:
        """Returns reasons that a pair has and neither of the two alone, but that do not name one of them as the other.

        Args:
            device: on which the options are to run.
            sections: of the variant, such as another model.
        """

        def reasons(*chosen: Choice) -> set[str]:
            variant = replace(self.variant(chosen, "txt2img", len(WORKLOADS) - 1), **sections)  # type: ignore[arg-type]
            ctx = variant.context(device)
            return {reason for option in variant.optimizations.values() for reason in option.conflicts(ctx)}

        alone = {choice: reasons(choice) for choice in self.choices}
        return [
            f"{first} with {second}: {reason}"
            for first, second in self.pairs
            for reason in reasons(first, second) - alone[first] - alone[second]
            if not (first.is_named(reason) or second.is_named(reason))
        ]

    def fault(self, chosen: Sequence[Choice], task: str = "txt2img") -> str:
        """Runs options together and traces a call; returns what went wrong, "" if each shows that it took effect."""
        variant = self.runnable(chosen, task)
        assert variant is not None
        with pytest.MonkeyPatch.context() as patch:
            # Its pipeline is garbage when the next one is loaded; a worker has but one, and nothing compiled before it.
            patch.setattr(gc, "freeze", lambda: None)
            patch.setattr(gc, "collect", lambda *_: 0)
            torch._dynamo.reset()
            return self._run(variant)

    def _run(self, variant: Variant) -> str:
        try:
            host = PipelineHost(variant, self.device)
            host.prepare()
            if any(option.fixed_batch and option.compiles for option in variant.optimizations.values()):
                host.time_once()  # what is compiled in the first call would be in the trace
            idle = [
                f"{item.axis}={item.option} left no evidence: {item.summary}"
                for item in host.prove().evidence
                if not item.engaged
            ]
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return "; ".join(idle)

    def failures(self, runs: Iterable[tuple[Sequence[Choice], str]]) -> list[str]:
        """Runs what can run; returns a line for each failure."""
        faults = ((chosen, task, self.fault(chosen, task)) for chosen, task in runs)
        return [f"{task}: {' with '.join(map(str, chosen))}: {fault}" for chosen, task, fault in faults if fault]

    def compiles_for_long(self) -> set[Choice]:
        """Returns the options that need a C++ compiler: they compile for more than ten seconds."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", "/nowhere")
            patch.delenv("CXX", raising=False)
            return {
                choice
                for choice in self.choices
                if any("needs a C++ compiler" in reason for reason in self.variant([choice]).conflicts(self.device))
            }


def few_runs(walk: Walk, choices: Sequence[Choice]) -> list[tuple[list[Choice], str]]:
    """Returns few combinations in which each option occurs once, with each task in turn: always the same ones."""
    runs: list[tuple[list[Choice], str]] = []
    left = list(choices)
    while left:
        # At random, so that rivals do not meet the same options in each run.
        order = random.Random(len(left)).sample(left, len(left))
        task, chosen = TASKS[len(runs) % len(TASKS)], list[Choice]()
        for choice in order:
            if all(choice.combines(other) for other in chosen) and walk.runnable([*chosen, choice], task):
                chosen.append(choice)
        assert chosen, f"none of {', '.join(map(str, left))} runs with task={task}"
        left = [choice for choice in left if choice not in chosen]
        runs.append((chosen, task))
    return runs


def covering_runs(walk: Walk, choices: Sequence[Choice], seed: int = 0) -> list[tuple[list[Choice], str]]:
    """Returns combinations in which each pair of options that can run occurs, and each option with each task.

    Greedy: a run begins with a pair that is missing, and takes on whatever adds most of the missing pairs.
    """
    order = random.Random(seed)
    missing: set[frozenset[Choice | str]] = {
        frozenset((a, b)) for a, b in combinations(choices, 2) if a.combines(b) and walk.runnable([a, b])
    }
    missing |= {frozenset((choice, task)) for choice in choices for task in TASKS if walk.runnable([choice], task)}
    runs = []
    while missing:
        first = min(missing, key=lambda pair: sorted(map(str, pair)))
        chosen = [item for item in first if isinstance(item, Choice)]
        named = [item for item in first if isinstance(item, str)]
        task = named[0] if named else max(TASKS, key=lambda task: _gain(task, chosen, missing))
        shuffled = order.sample(list(choices), len(choices))
        while True:
            able = [choice for choice in shuffled if all(choice.combines(other) for other in chosen)]
            gains = {choice: _gain(choice, [*chosen, task], missing) for choice in able}
            best = sorted((choice for choice in able if gains[choice]), key=lambda choice: -gains[choice])
            added = next((choice for choice in best if walk.runnable([*chosen, choice], task)), None)
            if added is None:
                break
            chosen.append(added)
        runs.append((chosen, task))
        missing -= {frozenset(pair) for pair in combinations([*chosen, task], 2)}
    return runs


def _gain(item: Choice | str, chosen: Sequence[Choice | str], missing: Set[frozenset[Choice | str]]) -> int:
    """Returns how many of the missing pairs an option or a task would add to what is chosen."""
    return sum(frozenset((item, other)) in missing for other in chosen)


def _in(group: str, axis: str) -> bool:
    return axis.partition(".")[0] == group


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
        found = walk.undeclared(DEVICES[device], model=section)
        assert not found, "\n".join(found)

    @pytest.mark.parametrize("task", ["img2img", "inpaint"])
    def test_and_so_with_the_tasks_that_start_from_an_image(self, walk: Walk, task: str) -> None:
        found = walk.undeclared(CPU, task=walk.variant([], task).task)
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
    @pytest.mark.filterwarnings("ignore::UserWarning")  # TorchDynamo warns of what it traces in diffusers
    @pytest.mark.parametrize("which", ["quick", "all"])
    def test_runs_that_cover_every_pair_take_effect(self, walk: Walk, quick: Sequence[Choice], which: str) -> None:
        """Minutes on one core, and an hour or more with those that compile for long."""
        found = walk.failures(covering_runs(walk, quick if which == "quick" else walk.able()))
        assert not found, "\n".join(found)
