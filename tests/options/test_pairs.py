"""Every option with every task, and every pair of options: it names its conflict, or runs and shows its evidence."""

import gc
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
from hydra import initialize_config_dir

from sdopt.apps.doctor.options import compose_options
from sdopt.config.composer import HydraComposer
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.config.paths import CONF
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.options.base import Optimization
from sdopt.options.caching import FirstBlockCaching
from sdopt.options.compiler import Aot, WholeStep
from sdopt.options.compiler.inductor import ByInductor
from sdopt.schema import Model
from sdopt.variant import Variant
from sdopt.worker.host import PipelineHost
from sdopt.worker.preload import MODULES, import_all
from tests.command import SMOKE
from tests.fixtures import CPU

TASKS = ("txt2img", "img2img", "inpaint")

WORKLOADS: tuple[tuple[str, ...], ...] = (
    (),
    ("workload.steps=10",),
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
        words = {
            self.group,
            self.option,
            *(type(option).__name__ for option in self.optimizations.values()),
        }
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
            Choice(
                group,
                option,
                {
                    axis: chosen
                    for axis, chosen in variant.optimizations.items()
                    if _in(group, axis)
                },
            )
            for (group, option), variant in compose_options(
                composer, optimization_options()
            ).items()
            if isinstance(variant, Variant)
        ]
        self.pairs = [(a, b) for a, b in combinations(self.choices, 2) if a.combines(b)]
        # What a worker has imported is no garbage here either: every run would look through it several times.
        import_all(MODULES)
        gc.collect()
        gc.freeze()

    def variant(
        self, chosen: Iterable[Choice], task: str = "txt2img", workload: int = 0
    ) -> Variant:
        """Returns the variant with some options on the reference model."""
        base = self._bases[task, workload]
        options, names = dict(base.optimizations), dict(base.choices)
        for choice in chosen:
            # Few steps of small images differ too much for the test of a first-block cache as it is set for users.
            options |= {
                axis: replace(option, threshold=10.0)
                if isinstance(option, FirstBlockCaching)
                else option
                for axis, option in choice.optimizations.items()
            }
            names |= dict.fromkeys(choice.optimizations, choice.option)
        return replace(base, optimizations=options, choices=names)

    def runnable(
        self, chosen: Sequence[Choice], task: str = "txt2img"
    ) -> Variant | None:
        """Returns the variant on the smallest workload on which it has no conflict; None if it has one on all."""
        made = (self.variant(chosen, task, number) for number in range(len(WORKLOADS)))
        return next(
            (variant for variant in made if not variant.conflicts(self.device)), None
        )

    def able(self) -> list[Choice]:
        """Returns the options that run here, without those of the baseline: a pair with one of these is the other."""
        plain = self.variant([]).optimizations
        return [
            choice
            for choice in self.choices
            if not choice.optimizations.items() <= plain.items()
            and self.runnable([choice])
        ]

    def undeclared(self, device: Device, **sections: object) -> list[str]:
        """Returns reasons that a pair has and neither of the two alone, but that do not name one of them as the other.

        Args:
            device: on which the options are to run.
            sections: of the variant, such as another model.
        """

        def reasons(*chosen: Choice) -> set[str]:
            variant = replace(
                self.variant(chosen, "txt2img", len(WORKLOADS) - 1),
                **sections,  # type: ignore[arg-type]
            )
            ctx = variant.context(device)
            return {
                reason
                for option in variant.optimizations.values()
                for reason in option.incompatible(ctx)
            }

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
            if any(
                option.fixed_batch and option.compiles
                for option in variant.optimizations.values()
            ):
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
        return [
            f"{task}: {' with '.join(map(str, chosen))}: {fault}"
            for chosen, task, fault in faults
            if fault
        ]


Missing = set[frozenset[Choice | str]]


def covering_runs(
    walk: Walk, choices: Sequence[Choice], missing: Missing
) -> list[tuple[list[Choice], str]]:
    """Returns combinations of options, with a task, in which each of the missing sets occurs: always the same ones.

    Greedy: a run begins with a set that is missing, and takes on whatever adds most of the others. A set is of one
    option, of two, or of an option and a task; it can run.
    """
    # At random, so that rivals do not meet the same options in each run.
    order, runs = random.Random(0), list[tuple[list[Choice], str]]()
    while missing:
        first = min(missing, key=lambda found: sorted(map(str, found)))
        chosen = [item for item in first if isinstance(item, Choice)]
        able = [task for task in TASKS if walk.runnable(chosen, task)]
        # The set's own task, or each in its turn.
        task = next(
            (item for item in first if isinstance(item, str)),
            able[len(runs) % len(able)],
        )
        shuffled = order.sample(list(choices), len(choices))
        while True:
            gains = {
                choice: _gain(choice, [*chosen, task], missing)
                for choice in shuffled
                if all(choice.combines(other) for other in chosen)
            }
            best = sorted(
                (choice for choice in gains if gains[choice]),
                key=lambda choice: -gains[choice],
            )
            added = next(
                (choice for choice in best if walk.runnable([*chosen, choice], task)),
                None,
            )
            if added is None:
                break
            chosen.append(added)
        runs.append((chosen, task))
        missing -= {
            frozenset(found)
            for size in (1, 2)
            for found in combinations([*chosen, task], size)
        }
    return runs


def each_once(choices: Iterable[Choice]) -> Missing:
    return {frozenset((choice,)) for choice in choices}


def each_pair(walk: Walk, choices: Sequence[Choice]) -> Missing:
    """Returns each pair of options that can run, and each option with each task."""
    found: Missing = {
        frozenset((a, b))
        for a, b in combinations(choices, 2)
        if a.combines(b) and walk.runnable([a, b])
    }
    return found | {
        frozenset((each, task))
        for each in choices
        for task in TASKS
        if walk.runnable([each], task)
    }


def _gain(choice: Choice, chosen: Sequence[Choice | str], missing: Missing) -> int:
    """Returns how many of the missing sets an option would add to what is chosen."""
    return sum(
        found in missing
        for found in (
            frozenset((choice,)),
            *(frozenset((choice, each)) for each in chosen),
        )
    )


def _in(group: str, axis: str) -> bool:
    return axis.partition(".")[0] == group


DEVICES = {
    "cpu": CPU,
    **{card: planned_device(data_sheets()[card]) for card in ("h200", "rtx4090", "t4")},
}

USUAL = (("emoji", "cpu"), ("sd21", "t4"), ("sdxl", "h200"))
"""Models and devices whose pairs are looked at by default: a CPU, the oldest and the newest card."""


@pytest.fixture(scope="module")
def walk() -> Walk:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return Walk(CPU)


@pytest.fixture(scope="module")
def quick(walk: Walk) -> list[Choice]:
    """The options that run here, without those that compile for more than ten seconds."""
    long = ByInductor | WholeStep | Aot
    return [
        each
        for each in walk.able()
        if not any(isinstance(one, long) for one in each.optimizations.values())
    ]


class TestDeclared:
    @pytest.mark.parametrize(
        ("model", "device"),
        [
            pytest.param(
                model,
                device,
                marks=[] if (model, device) in USUAL else pytest.mark.slow,
            )
            for model in ("emoji", "sd15", "sd21", "sd21_base", "sdxl")
            for device in DEVICES
        ],
    )
    def test_what_a_pair_adds_to_the_conflicts_of_both_names_one_of_them(
        self, walk: Walk, model: str, device: str
    ) -> None:
        section = Model(
            name=model, weights="packaged" if model == "emoji" else "random"
        )
        found = walk.undeclared(DEVICES[device], model=section)
        assert not found, "\n".join(found)

    @pytest.mark.parametrize("task", ["img2img", "inpaint"])
    @pytest.mark.walk(1)
    def test_and_so_with_the_tasks_that_start_from_an_image(
        self, walk: Walk, task: str
    ) -> None:
        found = walk.undeclared(CPU, task=walk.variant([], task).task)
        assert not found, "\n".join(found)

    def test_every_option_is_in_a_pair(self, walk: Walk) -> None:
        paired = {str(choice) for pair in walk.pairs for choice in pair}
        assert paired == {str(choice) for choice in walk.choices}
        assert {choice.group for choice in walk.choices} >= {
            "attention",
            "compiler",
            "memory",
            "precision",
        }


class TestRun:
    @pytest.mark.slow
    def test_every_option_takes_effect_beside_others(
        self, walk: Walk, quick: Sequence[Choice]
    ) -> None:
        found = walk.failures(covering_runs(walk, quick, each_once(quick)))
        assert not found, "\n".join(found)

    @pytest.mark.slow
    @pytest.mark.filterwarnings(
        "ignore::UserWarning"
    )  # TorchDynamo warns of what it traces in diffusers
    @pytest.mark.parametrize("which", ["quick", "all"])
    def test_runs_that_cover_every_pair_take_effect(
        self, walk: Walk, quick: Sequence[Choice], which: str
    ) -> None:
        """Minutes on one core, and an hour or more with those that compile for long."""
        choices = quick if which == "quick" else walk.able()
        found = walk.failures(covering_runs(walk, choices, each_pair(walk, choices)))
        assert not found, "\n".join(found)
