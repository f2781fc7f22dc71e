"""What a search varies: options of groups, those that combine, keys; and what cannot run is known beforehand."""

from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from sdopt.config.composer import HydraComposer, composer_of
from sdopt.config.paths import CONF
from sdopt.errors import UsageError
from sdopt.hardware.cards import CPU_BFLOAT16
from sdopt.hardware.device import Device
from sdopt.pipelines.catalog import PACKAGED
from sdopt.reference import LORAS
from sdopt.search.config import search_config
from sdopt.search.findings import CandidateFinding
from sdopt.search.space import Combination, Space, Variable
from sdopt.search.trials import Trials
from sdopt.variant import Variant
from tests.options.hosts import card

CPU = Device("cpu")
GIVEN = ("workload.steps=4", "memory=[tiny_vae]", "tracking=none")


def finding(spoiled: bool) -> CandidateFinding:
    """What a study said of a candidate that is as fast as the baseline."""
    row: Any = None  # trials read no figures
    out = "other images" if spoiled else ""
    return CandidateFinding(row, {"latency": 0.0}, (), {}, out, spoiled)


@pytest.fixture(scope="module")
def composer() -> HydraComposer:
    with composer_of(GIVEN) as made:
        return made


def space_of(composer: HydraComposer, *overrides: str, device: Device = CPU) -> Space:
    return Space.of(search_config(overrides), composer, device)


class TestSpace:
    def test_of_a_group_has_the_options_that_can_run_here(
        self, composer: HydraComposer
    ) -> None:
        space = space_of(composer, "search.groups=[layout,precision]")
        layout, precision = space.variables
        assert layout == Variable(
            "layout", ("channels_last", "contiguous"), "contiguous"
        )
        assert "bf16" in precision.values
        assert "tf32" not in precision.values
        assert sum("precision=tf32" in reasons for reasons in space.left_out) == 1

    @pytest.mark.parametrize(
        ("objective", "tried"), [("latency", False), ("memory", True)]
    )
    def test_leaves_out_what_is_computed_in_software_where_speed_is_sought(
        self, composer: HydraComposer, objective: str, tried: bool
    ) -> None:
        slow = Device("cpu", name="a desktop", attributes={CPU_BFLOAT16: False})
        given = ("search.groups=[layout,precision]", f"search.objectives=[{objective}]")
        space = space_of(composer, *given, device=slow)
        assert ("bf16" in space.variables[1].values) is tried
        assert (
            any(
                "a desktop computes bfloat16 in software" in why
                for why in space.left_out
            )
            is not tried
        )

    @pytest.mark.parametrize(
        ("groups", "tried"), [("[precision]", False), ("[precision,compiler]", True)]
    )
    def test_leaves_out_what_is_slow_without_a_compiler_unless_it_tries_one(
        self, groups: str, tried: bool
    ) -> None:
        pytest.importorskip("torchao")
        options = (
            "search.options={precision: [int8_torchao, bf16], compiler: [inductor]}"
        )
        if not tried:
            options = "search.options={precision: [int8_torchao, bf16]}"
        config = search_config(
            [f"search.groups={groups}", options, "search.objectives=[latency]"]
        )
        with composer_of(["model=emoji_dit", "tracking=none"]) as transformer:
            space = Space.of(config, transformer, card())
            variables = {variable.name: variable for variable in space.variables}
            assert ("int8_torchao" in variables["precision"].values) is tried
            assert (
                any("without a compiler" in why for why in space.left_out) is not tried
            )
            dry = space._variant(["precision=int8_torchao"])
            assert isinstance(dry, Variant)
            assert dry.slow_here(card())
            assert not dry.slow_here(CPU)

    def test_tries_what_compiles_last(self, composer: HydraComposer) -> None:
        given = (
            "search.groups=[compiler,layout]",
            "search.options={compiler: [eager, trace]}",
        )
        assert [point["compiler"] for point in space_of(composer, *given).alone()] == [
            "eager",
            "trace",
        ]

    def test_eager_beside_a_compiled_baseline_is_tried_early(self) -> None:
        config = search_config(
            [
                "search.groups=[compiler,layout]",
                "search.options={compiler: [eager, trace]}",
            ]
        )
        with composer_of([*GIVEN, "compiler=trace"]) as compiled:
            space = Space.of(config, compiled, CPU)
            assert [
                space.compiles({"compiler": option}) for option in ("eager", "trace")
            ] == [False, False]

    def test_two_files_of_one_name_are_two(self, tmp_path: Path) -> None:
        """Trainers save each checkpoint of a LoRA under the same name."""
        name = "pytorch_lora_weights.safetensors"
        files = [tmp_path / folder / name for folder in ("500", "1000")]
        for file, style in zip(files, ("fxemoji", "high_contrast"), strict=True):
            file.parent.mkdir()
            copy(LORAS / f"{style}.safetensors", file)
        first, second = map(str, files)
        config = search_config([f"search.keys={{lora.path: ['{first}','{second}']}}"])
        with composer_of(["lora=fused", f"lora.path='{first}'"]) as given:
            points = list(Space.of(config, given, CPU).points())
            found = [Space.of(config, given, CPU).candidate(point) for point in points]
        assert found[0] is None
        assert isinstance(found[1], Combination)

    def test_of_a_group_has_the_users_own_options(self, tmp_path: Path) -> None:
        (tmp_path / "layout").mkdir()
        (tmp_path / "layout" / "mine.yaml").write_text(
            (CONF / "layout" / "channels_last.yaml").read_text()
        )
        config = search_config(
            ["search.groups=[layout]", "search.options={layout: [mine]}"], tmp_path
        )
        with composer_of(GIVEN, tmp_path) as own:
            assert Space.of(config, own, CPU, tmp_path).variables[0].values == ("mine",)

    def test_of_options_that_combine_turns_each_on_and_off_and_leaves_the_others(
        self, composer: HydraComposer
    ) -> None:
        space = space_of(
            composer,
            "search.groups=[memory]",
            "search.options={memory: [tiny_vae, layerwise_casting]}",
        )
        tiny, casting = space.variables
        assert (tiny.name, tiny.plain, casting.plain) == (
            "memory.tiny_vae",
            "on",
            "off",
        )
        assert space.overrides({tiny.name: "on", casting.name: "on"}) == [
            "memory=[tiny_vae,layerwise_casting]"
        ]
        assert space.overrides({tiny.name: "off", casting.name: "off"}) == ["memory=[]"]
        assert space.overrides({tiny.name: "on", casting.name: "off"}) == []
        space = space_of(
            composer,
            "search.groups=[memory]",
            "search.options={memory: [layerwise_casting]}",
        )
        assert space.overrides({casting.name: "on"}) == [
            "memory=[tiny_vae,layerwise_casting]"
        ]

    def test_a_key_applies_where_its_option_is_chosen(
        self, composer: HydraComposer
    ) -> None:
        space = space_of(
            composer,
            "search.groups=[caching]",
            "search.options={caching: [none, deepcache]}",
            "search.keys={caching.interval: [2, 5], workload.steps: [2]}",
        )
        points = list(space.points())
        assert points == [
            {"caching": "none", "workload.steps": 2},
            {"caching": "deepcache", "caching.interval": 2, "workload.steps": 2},
            {"caching": "deepcache", "caching.interval": 5, "workload.steps": 2},
        ]
        found = space.candidate(points[1])
        assert found == Combination(
            "caching=deepcache, caching.interval=2, workload.steps=2",
            ("caching=deepcache", "caching.interval=2", "workload.steps=2"),
        )

    def test_the_baseline_is_no_candidate(self, composer: HydraComposer) -> None:
        space = space_of(
            composer, "search.groups=[layout]", "search.keys={workload.steps: [4, 2]}"
        )
        assert space.candidate({"layout": "contiguous", "workload.steps": 4}) is None

    def test_a_conflict_is_known_before_anything_is_loaded(
        self, composer: HydraComposer
    ) -> None:
        space = space_of(
            composer,
            "search.groups=[layout,memory]",
            "search.options={memory: [group_offload]}",
        )
        reasons = space.candidate(
            {"layout": "channels_last", "memory.group_offload": "on"}
        )
        assert isinstance(reasons, list)
        assert "choose layout=contiguous" in reasons[0]

    def test_of_options_of_which_none_can_run_is_refused(
        self, composer: HydraComposer
    ) -> None:
        with pytest.raises(
            UsageError, match=r"search\.groups: no option of them can run here"
        ):
            space_of(
                composer,
                "search.groups=[precision]",
                "search.options={precision: [tf32]}",
            )

    def test_what_keeps_the_baseline_from_running_is_said_once(self) -> None:
        [unet] = (PACKAGED / "emoji" / "unet").glob("*.safetensors")
        baseline = ["lora=loaded", f"lora.path={unet}"]
        config = search_config(["search.groups=[precision,layout]"])
        with (
            composer_of(baseline) as composer,
            pytest.raises(UsageError, match="is no matrix of a LoRA") as raised,
        ):
            Space.of(config, composer, CPU)
        assert len(raised.value.problems) == 1

    @pytest.mark.parametrize(
        ("added", "inherits"),
        [
            ([("layout", "channels_last")], True),
            ([], False),
            # What draws another image may mend it.
            ([("lora", "loaded")], False),
            ([("scheduler", "lcm")], False),
            ([("workload.steps", 8)], False),
        ],
    )
    def test_a_combination_inherits_what_spoils_a_part_of_it(
        self, added: list[tuple[str, object]], inherits: bool
    ) -> None:
        spoiled = frozenset({("precision", "int8")})
        assert Space.inherits(spoiled | {*added}, spoiled) is inherits
        assert not Space.inherits(frozenset(added), spoiled)


class TestConfig:
    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["search.groups=[precison]"], "search.groups: unknown group 'precison'"),
            ([], "search.groups: name the groups to search"),
            (
                ["search.groups=[layout]", "search.options={layout: [diagonal]}"],
                "layout has no option 'diagonal'",
            ),
            (
                ["search.groups=[layout]", "search.options={precision: [bf16]}"],
                "'precision' is not among",
            ),
            (
                ["search.groups=[layout]", "search.keys={layout: [1]}"],
                "search.keys: 'layout' is not a key",
            ),
            (
                ["search.groups=[layout]", "search.objectives=[]"],
                "search.objectives: List should have at least 1 item",
            ),
            (
                ["search.groups=[layout]", "search.objectives=[speed]"],
                "speed: Input should be 'latency', 'memory'",
            ),
            (
                ["search.groups=[layout]", "search.distance=psnr_db"],
                "search.distance=psnr_db: Input should be 'mse'",
            ),
            (
                ["search.groups=[layout]", "search.finalists=0"],
                "search.finalists=0: Input should be greater",
            ),
            (
                ["search.groups=[layout]", "search.title=../x"],
                "search.title=../x: must be a name",
            ),
            (["search.groups=[layout]", "search.budget=3"], "search.budget: "),
            (
                ["search.groups=[layout]", "experiment=quickstart"],
                "not possible in a search",
            ),
        ],
    )
    def test_names_what_is_wrong(self, overrides: list[str], said: str) -> None:
        with pytest.raises(UsageError) as caught:
            search_config(overrides)
        assert said in str(caught.value)


class TestTrials:
    @pytest.fixture
    def trials(self, composer: HydraComposer, tmp_path: Path) -> Trials:
        config = search_config([
            "search.groups=[layout,caching]",
            "search.options={caching: [none, deepcache]}",
            "search.keys={caching.interval: [2, 3]}",
            f"search.storage=sqlite:///{tmp_path}/optuna.db",
        ])  # fmt: skip
        return Trials.open("some", Space.of(config, composer, CPU), config)

    def test_propose_each_combination_once_and_then_none(self, trials: Trials) -> None:
        found = [*trials.propose(20, "screen-00"), *trials.propose(20, "screen-01")]
        names = [candidate.name for candidate in found]
        # Two layouts with no cache or one of two, less the baseline.
        assert len(names) == len(set(names)) == 5
        assert trials.propose(3, "screen-02") == []

    def test_propose_the_first_compiler_by_itself_and_last(
        self, composer: HydraComposer, tmp_path: Path
    ) -> None:
        config = search_config([
            "search.groups=[compiler,layout]",
            "search.options={compiler: [eager, inductor, regional, trace]}",
            f"search.storage=sqlite:///{tmp_path}/optuna.db",
        ])  # fmt: skip
        trials = Trials.open("some", Space.of(config, composer, CPU), config)
        studies = [
            [each.name for each in trials.propose(6, f"screen-0{number}")]
            for number in range(3)
        ]
        assert studies == [
            ["layout=channels_last"],
            ["compiler=inductor"],
            ["compiler=regional", "compiler=trace"],
        ]

    def test_propose_each_option_alone_first_and_nothing_that_holds_what_spoils_images(
        self, trials: Trials
    ) -> None:
        first = trials.propose(2, "screen-00")
        assert [candidate.overrides[0] for candidate in first] == [
            "layout=channels_last",
            "caching=deepcache",
        ]
        deepcache = first[1].name
        trials.tell(
            {each.name: finding(spoiled=each.name == deepcache) for each in first}
        )
        names = [candidate.name for candidate in trials.propose(20, "screen-01")]
        [interval] = {"2", "3"} - {deepcache[-1]}
        assert sorted(names) == [
            f"caching=deepcache, caching.interval={interval}",
            f"layout=channels_last, caching=deepcache, caching.interval={interval}",
        ]
        assert list(trials.spoiled) == [deepcache]

    def test_propose_it_all_the_same_if_asked_to(self, trials: Trials) -> None:
        whole = replace(trials, config=replace(trials.config, skip_spoiled=False))
        whole.tell(
            {each.name: finding(spoiled=True) for each in whole.propose(2, "screen-00")}
        )
        assert len(whole.propose(20, "screen-01")) == 3

    def test_know_after_a_crash_what_was_not_measured_and_which_options_were_not_tried_alone(
        self, trials: Trials
    ) -> None:
        proposed = trials.propose(1, "screen-00")
        trials.ended = "enough"
        again = Trials.open("some", trials.space, trials.config)
        assert again.unfinished() == {"screen-00": proposed}
        assert again.ended == "enough"
        [left] = again.untried
        assert (proposed[0].overrides[0], left.partition(",")[0]) == (
            "layout=channels_last",
            "caching=deepcache",
        )

    def test_a_storage_that_cannot_be_opened_is_named(
        self,
        composer: HydraComposer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "file").write_text(
            "no database, but text that is long enough to be read as one" * 100
        )
        config = search_config(
            ["search.groups=[layout]", "search.storage='sqlite:///~/file'"]
        )
        with pytest.raises(UsageError, match=r"search\.storage=sqlite"):
            Trials.open("some", Space.of(config, composer, CPU), config)
