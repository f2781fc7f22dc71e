"""Every file in `conf/`, every kind of mistake, and options of the user's own."""

import argparse
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf
from packaging.version import Version

from sdopt.apps.serving.config import serving_config
from sdopt.config.command import CommandLine, run_hydra
from sdopt.config.composed import Command, with_resumed
from sdopt.config.composer import composer_of
from sdopt.config.groups import optimization_options
from sdopt.config.paths import CONF
from sdopt.config.tracking import tracking_of
from sdopt.config.typed import typed
from sdopt.errors import UsageError
from sdopt.options import Optimization
from sdopt.options.compiler import Eager, Inductor
from sdopt.options.memory import VaeTiling
from sdopt.reference import MODEL
from sdopt.schema import Protocol, Workload
from sdopt.study.plan import require_judged, require_same_task
from tests.fixtures import Composers

OPTIONS = sorted((path.parent.name, path.stem) for path in CONF.glob("*/*.yaml"))
FILES = {
    "mlperf_sdxl_server": ["workload.prompts=packaged"],
    "mlperf_sdxl": ["workload.prompts=packaged", "workload.latents=null"],
}
"""In the place of files that a preset takes from the current folder."""
APART = {
    "experiment",
    "hardware",
    "serving",
    *(group for group, _ in optimization_options()),
}


def problems(composer: Composers, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        composer(list(overrides))
    return caught.value.problems


class TestEveryFile:
    def test_composes_and_parses_or_names_what_must_be_given(
        self, composer: Composers, inputs: dict[str, list[str]]
    ) -> None:
        """One option of each group at a time; those of optimizations, presets and cards have walks of their own."""
        whole: dict[str, list[str]] = {}
        for group, option in [each for each in OPTIONS if each[0] not in APART]:
            content = OmegaConf.load(CONF / group / f"{option}.yaml")
            if missing := [
                f"{group}.{key!s}"
                for key in content
                if OmegaConf.is_missing(content, key)
            ]:
                found = problems(composer, f"{group}={option}")
                assert [problem.partition(":")[0] for problem in found] == missing
            elif group == "quality":  # gates that judge images want its metrics
                composer([f"quality={option}"])
            else:
                whole.setdefault(group, []).append(option)
        for options in zip_longest(*whole.values()):
            chosen = {
                group: option
                for group, option in zip(whole, options, strict=True)
                if option is not None
            }
            task = inputs[chosen.pop("task", "txt2img")]
            run = composer(
                [*task, *(f"{group}={option}" for group, option in chosen.items())]
            ).current
            assert run.choices["scheduler"] == chosen.get(
                "scheduler", run.choices["scheduler"]
            )

    def test_a_policy_of_a_server_is_what_it_says(self) -> None:
        for name in [option for group, option in OPTIONS if group == "serving"]:
            serving, others = serving_config([f"serving={name}", "precision=bf16"])
            assert serving.policy.startswith(name)
            assert others == ["precision=bf16"]

    def test_are_all_looked_at(self) -> None:
        """A group within a group would need a walk that goes deeper; data sheets are no options by themselves."""
        assert {path.parent.name for path in CONF.glob("*/*/**/*.yaml")} == {"sheets"}
        assert len(OPTIONS) > 30

    def test_a_preset_makes_a_plan_and_begins_with_the_command_that_runs_it(
        self, composer: Composers
    ) -> None:
        for name in [option for group, option in OPTIONS if group == "experiment"]:
            file = CONF / "experiment" / f"{name}.yaml"
            of_load = "load" in OmegaConf.load(file)
            chosen = [f"experiment={name}", *FILES.get(name, [])]
            command = "# sdopt load-test" if of_load else "# sdopt run"
            lines = [
                line
                for line in file.read_text().splitlines()[:2]
                if line.startswith(command)
            ]
            assert [f"experiment={name}" in line for line in lines] == [True]
            if of_load:
                assert problems(composer, *chosen)[0].startswith("load.")
                chosen.append("~load")
            job = composer(chosen)
            plan = job.current.study.plan(job)
            require_same_task(plan)
            assert len({variant.name for variant in plan.variants}) == len(
                plan.variants
            )
            for edge in plan.edges:
                # In these, variants are all the same, or differ in their steps alone.
                unlike = name not in ("noise", "few_steps_lora", "few_steps_qwen")
                assert edge.credit != "nothing" or not unlike

    def test_every_key_of_the_schema_is_in_its_default_file(self) -> None:
        """A reader finds each key, with its default, in `conf/`."""
        for group, kind in (("workload", Workload), ("protocol", Protocol)):
            assert list(OmegaConf.load(CONF / group / "default.yaml")) == [
                field.name for field in fields(kind)
            ]


class TestMistakes:
    def test_all_are_reported_at_once_and_each_names_its_key(
        self, composer: Composers
    ) -> None:
        found = problems(
            composer,
            "+precision.wieghts=float16",
            "workload.steps=many",
            "workload.batch_size=0",
            "protocol.confidence=1",
            "protocol.estimator=mode",
            "protocol.rounds=null",
            "attention._target_=sdopt.options.attention.Nope",
            "grad_mode._target_=sdopt.schema.Model",
            "layout.memory_format=[]",
            "+nonsense=1",
            "dry_run=perhaps",
            "objective=3",
        )
        expected = [
            "precision.wieghts: Unexpected keyword argument",
            "workload.steps=many: Input should be a valid integer",
            "workload.batch_size=0: Input should be greater than or equal to 1",
            "protocol.confidence=1: Input should be less than 1",
            "protocol.estimator=mode: Input should be 'median', 'mean', 'last' or 'min'",
            "protocol.rounds: ",
            "attention._target_=sdopt.options.attention.Nope: cannot be imported",
            "grad_mode._target_=sdopt.schema.Model: must be a dataclass derived from Optimization",
            "layout.memory_format: Input should be 'contiguous' or 'channels_last'",
            "nonsense: unknown key; the sections are model, ",
            "dry_run=perhaps: Input should be a valid boolean",
            "objective=3: Input should be a valid list",
        ]
        for start in expected:
            assert [problem for problem in found if problem.startswith(start)], (
                f"{start} is not in {found}"
            )
        assert len(found) == len(expected)

    @pytest.mark.parametrize(
        "expected",
        [
            {
                "workload.size=65": "workload.size=65: Input should be a multiple of 8",
                "workload.batch_size=null": "workload.batch_size: ",
                "study.name=true": "study.name=True: Input should be a valid string",
                "model.name=sd99": "model.name=sd99: packaged models are emoji",
                "scheduler.class_name=DDIM": "scheduler.class_name=DDIM: unknown scheduler; diffusers has: ",
                "+extra=???": "extra: ",
            },
            {
                "workload.size=[64,65]": "workload.size[1]=65: Input should be a multiple of 8",
                "workload.batch_size=[1,0]": "workload.batch_size[1]=0: Input should be greater than or equal to 1",
                "model.name=/x": "model.name=/x: must be a name, not a path",
                "scheduler.class_name=StableDiffusionPipeline": "scheduler.class_name=StableDiffusionPipeline: unknown",
                "+extra.deep=???": "extra.deep: ",
            },
            {
                "workload.size=[]": "workload.size: List should have at least 1 item",
                "workload.batch_size=[2,2]": "workload.batch_size: names one twice",
                "model.weights=path": "model.path: ",
                "+gate.rules.exact=null": "gate.rules.exact: Input should be a valid list",
                "+scheduler.options.etaa=1": "scheduler.options.etaa",
                "+memory.vae_tiling.tile_size=64": "memory.vae_tiling._target_: must name a class",
            },
            {
                "workload.size=[64,null]": "workload.size[1]: Input should be a valid integer",
                "workload.batch_size=[1,two]": "workload.batch_size[1]=two: Input should be a valid integer",
            },
            {
                "workload.steps=[3]": "workload.steps: Input should be a valid integer",
                "model.variant=[fp16]": "model.variant: Input should be a valid string",
                "tracking.tags=[team]": "tracking.tags: Input should be a valid dictionary",
            },
            {
                "objective=${nope}": "objective: ",
                "workload.seed=${nope}": "workload.seed: ",
            },
            {
                "workload.negative_prompt=1.50": "workload.negative_prompt=1.5: must be text; write it in quotes"
            },
            {
                "workload.prompts=['a ${b}']": "workload.prompts[0]: Interpolation key 'b' not found"
            },
            {
                "workload.prompts=[it's a cat]": "workload.prompts=[it's a cat]: not an override: token recognition "
                "error at: ''s a cat]'"
            },
            {
                "workload.size=64px": "workload.size=64px: Input should be a valid integer"
            },
            {"workload.steps=true": "workload.steps=True: must be a number"},
            {
                "workload.prompts=nowhere.txt": "workload.prompts=nowhere.txt: cannot be read"
            },
            {"workload.prompts=[]": "workload.prompts=[]: holds no prompt"},
            # A group is chosen in one way.
            {
                "precision=[bf16,fp16]": "precision=[bf16,fp16]: of this group one option is chosen",
                "model=[emoji,sd15]": "model=[emoji,sd15]: of this group one option is chosen",
            },
            {"precision=[]": "precision: nothing is chosen"},
            {
                "memory=null": "memory=null: names no option of memory",
                "workload=null": "workload=null: names no option of workload",
                "hardware=4090": "hardware=4090: names no option of hardware",
                "+precision@x=bf16": "+precision@x=bf16: an option has its own place",
                "precision@x=bf16": "precision@x=bf16: an option has its own place",
            },
            {
                "precision=": "precision=: In 'config': Could not find 'precision/'; the options are "
            },
            {
                "++precision=bf16": "force-add of config groups is not supported: '++precision=bf16'"
            },
            {"+precision=bf16": "Multiple values for precision."},
            {
                "~precision": "precision: nothing is chosen; precision=fp32 is the default"
            },
            {
                "hardware=gpu": "hardware=gpu: In 'config': Could not find 'hardware/gpu'"
            },
            {
                "memory=[nope]": "memory=nope: In 'config': Could not load 'memory/nope'; the options are "
            },
        ],
        ids=lambda expected: next(iter(expected)),
    )
    def test_beyond_types(self, composer: Composers, expected: dict[str, str]) -> None:
        found = problems(composer, *expected)
        for start in expected.values():
            assert [problem for problem in found if problem.startswith(start)], (
                f"{start} is not in {found}"
            )
        assert len(found) == len(expected)

    def test_a_folder_of_something_else(
        self, composer: Composers, tmp_path: Path
    ) -> None:
        [found] = problems(composer, "model=folder", f"model.path={tmp_path}")
        assert found.startswith(f"model.path={tmp_path}: holds no model_index.json")
        shutil.copyfile(MODEL / "model_index.json", tmp_path / "model_index.json")
        [found] = problems(composer, "model=folder", f"model.path={tmp_path}")
        assert "holds no diffusion_pytorch_model.safetensors" in found


class TestThreads:
    @pytest.mark.parametrize(
        ("overrides", "threads"),
        [
            (["model=emoji"], 1),
            (["model=emoji", "hardware.threads=2"], 2),
            (["model=sd15", "model.weights=random"], None),
        ],
    )
    def test_are_as_many_as_the_model_has_use_for(
        self, composer: Composers, overrides: list[str], threads: int | None
    ) -> None:
        variant = composer(overrides).variant(None)
        assert variant.hardware.threads == threads
        assert variant.config.hardware.threads == threads


class TestReplacedGroups:
    """A choice of a group drops what was said of its keys before; a key alone replaces nothing."""

    @pytest.mark.parametrize(
        ("job", "overrides", "compiler"),
        [
            (
                "compiler=inductor compiler.mode=max-autotune",
                "",
                Inductor("max-autotune"),
            ),
            (
                "compiler='inductor' ++compiler.mode='max-autotune'",
                "compiler=eager",
                Eager(),
            ),
            (
                "compiler=inductor compiler.mode=max-autotune",
                "compiler=inductor compiler.fullgraph=true",
                Inductor("default", fullgraph=True),
            ),
            (
                "compiler=inductor compiler.mode=max-autotune",
                "compiler.fullgraph=true",
                Inductor("max-autotune", fullgraph=True),
            ),
        ],
    )
    def test_drop_what_was_said_of_their_keys(
        self, composer: Composers, job: str, overrides: str, compiler: Optimization
    ) -> None:
        made = composer([*job.split(), "workload.steps=3"])
        variant = made.variant("it", overrides.split())
        assert variant.optimizations["compiler"] == compiler
        assert variant.workload.steps == 3
        assert made.variant("plain", plain=True).optimizations["compiler"] == Eager()


class TestOptionsThatCombine:
    @pytest.mark.parametrize(
        ("chosen", "axes"),
        [
            (["memory=[]"], []),
            (["memory=vae_slicing"], ["memory.vae_slicing"]),
            (
                ["memory=[vae_slicing,vae_tiling]"],
                ["memory.vae_slicing", "memory.vae_tiling"],
            ),
            (["memory=[vae_tiling]", "memory=[vae_slicing]"], ["memory.vae_slicing"]),
        ],
    )
    def test_are_chosen_by_one_name_or_a_list(
        self, composer: Composers, chosen: list[str], axes: list[str]
    ) -> None:
        run = composer(chosen).current
        assert [axis for axis in run.optimizations if axis.startswith("memory")] == axes
        assert {
            axis: option
            for axis, option in run.choices.items()
            if axis.startswith("memory")
        } == {axis: axis.rpartition(".")[2] for axis in axes}

    def test_keep_their_keys_while_they_are_chosen(self, composer: Composers) -> None:
        job = composer(
            ["memory=[vae_slicing,vae_tiling]", "memory.vae_tiling.tile_size=64"]
        )
        for overrides, size in (
            (["memory=[vae_tiling]"], 64),
            (["memory=vae_tiling", "memory=vae_slicing"], 64),
        ):
            assert job.variant("some", overrides).optimizations[
                "memory.vae_tiling"
            ] == VaeTiling(size)
        assert (
            "memory.vae_tiling"
            not in job.variant("none", ["memory=vae_slicing"]).optimizations
        )
        changed = job.variant(
            "other", ["memory=vae_tiling", "memory.vae_tiling.tile_size=128"]
        )
        assert changed.optimizations["memory.vae_tiling"] == VaeTiling(128)


class TestPresets:
    """A preset of the user's own, found through the search path."""

    TEXT = """\
defaults:
- override /memory: [vae_slicing, vae_tiling]
- override /compiler: inductor
- override /precision: bf16
memory:
  vae_tiling:
    tile_size: 64
compiler:
  mode: max-autotune
workload:
  steps: 4
"""

    @staticmethod
    def preset(folder: Path, text: str) -> list[str]:
        (folder / "experiment").mkdir(exist_ok=True)
        (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
        return [f"hydra.searchpath=[file://{folder}]"]

    def test_that_chooses_options_and_keys_of_them_has_a_plain_baseline(
        self, composer: Composers, tmp_path: Path
    ) -> None:
        path = self.preset(tmp_path, self.TEXT)
        job = composer(["experiment=mine"], path)
        plan = job.current.study.plan(job)
        assert plan.baseline.optimizations == composer([]).current.optimizations
        assert plan.baseline.workload.steps == 4
        assert plan.variants[1].optimizations["compiler"] == Inductor("max-autotune")
        assert plan.edges[0].credit.startswith(
            "precision=bf16, compiler=inductor(mode=max-autotune)"
        )
        given = composer(
            ["experiment=mine", "precision=fp16", "workload.steps=2"], path
        ).current
        assert (given.choices["precision"], given.workload.steps) == ("fp16", 2)

    def test_that_changes_keys_of_options_can_be_left_out_one_by_one(
        self, composer: Composers, tmp_path: Path
    ) -> None:
        job = composer(
            ["experiment=mine", "study=leave_one_out"], self.preset(tmp_path, self.TEXT)
        )
        baseline, full, *others = job.current.study.plan(job).variants
        assert full.optimizations["memory.vae_tiling"] == VaeTiling(64)
        assert not any(axis.startswith("memory") for axis in baseline.optimizations)
        left = {variant.name: variant.optimizations for variant in others}
        both = ["memory.vae_slicing", "memory.vae_tiling"]
        assert {
            name: [axis for axis in options if axis.startswith("memory")]
            for name, options in left.items()
        } == {
            "without precision=bf16": both,
            "without compiler=inductor": both,
            "without memory=vae_slicing": ["memory.vae_tiling"],
            "without memory=vae_tiling": ["memory.vae_slicing"],
        }
        assert left["without memory=vae_slicing"]["memory.vae_tiling"] == VaeTiling(64)
        assert left["without compiler=inductor"]["compiler"] == Eager()
        assert left["without precision=bf16"]["compiler"] == Inductor("max-autotune")

    def test_may_refer_to_its_own_name(
        self, composer: Composers, tmp_path: Path
    ) -> None:
        path = self.preset(tmp_path, "defaults:\n- /steps_of: ${experiment}\n")
        (tmp_path / "steps_of").mkdir()
        (tmp_path / "steps_of" / "mine.yaml").write_text(
            "# @package _global_\nworkload:\n  steps: 7\n"
        )
        assert composer(["experiment=mine"], path).current.workload.steps == 7


def test_names_say_what_is_chosen_beyond_the_defaults(composer: Composers) -> None:
    made = composer([])
    for overrides, name in (
        ("", "without options"),
        ("workload.steps=3", "without options"),
        ("attention=math precision=bf16", "precision=bf16, attention=math"),
        (
            "compiler=inductor compiler.mode=max-autotune",
            "compiler=inductor(mode=max-autotune)",
        ),
        (
            "layout.memory_format=channels_last",
            "layout=contiguous(memory_format=channels_last)",
        ),
        ("attention=sliced attention.slice_size=1", "attention=sliced(slice_size=1)"),
        ("attention=sliced attention.slice_size=null", "attention=sliced"),
    ):
        assert made.variant(None, overrides.split()).name == name


SHADING = """
from dataclasses import dataclass
from typing import Annotated
from pydantic import Field
from sdopt.options import Optimization


@dataclass(frozen=True)
class Shading(Optimization):
    factor: Annotated[float, Field(gt=0)] = 2.0
"""


class TestOwnOptions:
    @pytest.fixture
    def shading(
        self,
        tmp_path: Path,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Path:
        """A folder with an option of a user's own module, which is on the path; its name is the test's own."""
        module = request.node.name.partition("[")[0]
        (tmp_path / f"{module}.py").write_text(SHADING)
        (tmp_path / "conf" / "shading").mkdir(parents=True)
        (tmp_path / "conf" / "shading" / "mine.yaml").write_text(
            f"_target_: {module}.Shading\nfactor: 2.0\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path / "conf"

    def test_are_part_of_the_name_and_not_of_the_baseline(self, shading: Path) -> None:
        with composer_of(
            ["+shading=mine", "shading.factor=3", "precision=bf16"], shading
        ) as job:
            plan = job.current.study.plan(job)
        assert plan.variants[1].name == "precision=bf16, shading=mine(factor=3.0)"
        assert "shading" not in plan.baseline.optimizations
        assert plan.edges[0].credit == "precision=bf16, shading=mine(factor=3.0)"

    def test_that_refer_to_another_key_are_named_by_what_a_command_changed(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "caching").mkdir()
        (tmp_path / "caching" / "mine.yaml").write_text(
            "defaults: [deepcache]\ninterval: ${workload.steps}\n"
        )
        with composer_of(["caching=mine", "workload.steps=4"], tmp_path) as job:
            assert job.variant("it").choices["caching"] == "mine"
            changed = job.variant("it", ["caching.interval=7"])
        assert changed.choices["caching"] == "mine(interval=7)"
        assert changed.changed == {"caching.interval": 7}

    def test_are_chosen_with_a_plus_or_without_and_lie_in_a_folder_of_any_name(
        self, shading: Path
    ) -> None:
        with composer_of(
            [], shading.rename(shading.parent / "mine, [2024] (v1)")
        ) as composer:
            for chosen in ("shading=mine", "+shading=mine"):
                assert composer.variant("it", [chosen]).overrides == (
                    "+shading=mine",
                ), "as Hydra takes it"

    def test_are_checked_against_their_own_fields(self, shading: Path) -> None:
        wrong = ["shading.factor=0", "+shading.faktor=2"]
        with (
            pytest.raises(UsageError) as caught,
            composer_of(["+shading=mine", *wrong], shading),
        ):
            pass
        assert caught.value.problems == [
            "shading.factor=0: Input should be greater than 0",
            "shading.faktor: Unexpected keyword argument",
        ]

    @pytest.mark.parametrize(
        ("module", "reason"),
        [
            (
                "class Shading:\n    pass\n",
                "must be a dataclass derived from Optimization",
            ),
            ("Shading = 3\n", "must be a dataclass derived from Optimization"),
            (
                "import nowhere_to_be_found\n",
                "cannot be imported .*nowhere_to_be_found",
            ),
            ("def Shading(:\n", "cannot be imported .*invalid syntax"),
            ("raise RuntimeError('no licence')\n", "cannot be imported .*no licence"),
            ("", "cannot be imported .*Shading"),
            ("assert False\n", "cannot be imported .*AssertionError"),
            (
                "import torch\n"
                + SHADING.replace("factor:", "dtype: torch.dtype\n    factor:"),
                "dtype",
            ),
            (SHADING.replace("] = 2.0", "]\n    other: int"), "other"),
        ],
    )
    def test_a_module_that_is_wrong_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, reason: str
    ) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        name = f"wrong_{abs(hash(module))}"
        (tmp_path / f"{name}.py").write_text(module)
        found: list[str] = []
        typed(
            "shading",
            {"_target_": f"{name}.Shading", "factor": 2.0},
            Optimization,
            found,
        )
        assert re.match(rf"shading.*{reason}", found[0])

    @pytest.mark.parametrize(
        ("way", "name"),
        [("--config-dir", "config"), ("hydra.searchpath", "precision/bf16")],
    )
    def test_of_a_packaged_name_would_be_passed_over(
        self, tmp_path: Path, way: str, name: str
    ) -> None:
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        packaged = (CONF / f"{name}.yaml").read_text()
        path = (
            [way, str(tmp_path)]
            if way == "--config-dir"
            else [f"{way}=[file://{tmp_path}]"]
        )

        def composed() -> Command:
            return Command.of(CommandLine.of([*path, "precision=bf16"]))

        file.write_text(packaged)
        assert not composed().sweep
        for content in (
            packaged.encode() + b"\nmine: 3\n",
            b"mine: [\n",
            b"mine: caf\xe9\n",
        ):
            file.write_bytes(content)
            with pytest.raises(
                UsageError,
                match=re.escape(f"{name}.yaml: Hydra would read sdopt's own file"),
            ):
                composed()


def test_tracking_alone_can_be_composed() -> None:
    assert tracking_of(["tracking.uri=http://localhost:1"]).uri == "http://localhost:1"
    with pytest.raises(
        UsageError, match=r"tracking\.kind=other: Input should be 'mlflow' or 'none'"
    ):
        tracking_of(["tracking.kind=other"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--config-dir /tmp --config-dir /",
            r"only one folder can be given; add it with hydra\.searchpath=",
        ),
        (
            "memory=vae_slicing memory=vae_tiling",
            r"memory=\[vae_slicing,vae_tiling\] combines them",
        ),
        (
            "memory=[] memory=vae_slicing memory=[vae_tiling]",
            r"memory=\[vae_slicing,vae_tiling\] combines them",
        ),
        ("-m precision=glob(nope*)", "names nothing, so that there is no job"),
        ("-m workload.steps=range(4,2)", "names nothing, so that there is no job"),
        (
            "-m hydra.sweep.subdir=same precision=bf16,fp16",
            r"subdir=same: each job needs a folder of its own",
        ),
        (
            "-m hydra.sweeper.params={precision:bf16}",
            "an override sets a key within null",
        ),
        ("scheduler.options={rho:1}", r"scheduler\.options\.rho: Could not override"),
        ("tracking.tags.team=x", r"tracking\.tags\.team: Could not override"),
        ("tracking.tags={'team':x}", "tracking.tags={'team':x}: not an override"),
        ("study.name=null", "study.name=: must not be empty"),
        ("resume=", r"resume=\.: has no \.hydra/hydra\.yaml"),
        ("resume=/nowhere", "a sweep, which is there"),
        ("--precision=bf16", "unrecognized arguments: --precision=bf16"),
        (
            "gate.must_pay=false",
            "no gate is chosen, so that nothing would be judged; add gate=default",
        ),
        ("~memory", "Could not delete 'memory'"),
        ("hydra.run.dir=null", r"hydra\.run\.dir: .*is not Optional"),
        ("hydra.mode=multirun", r"hydra\.mode: .*hydra\.mode=multirun.*RUN, MULTIRUN"),
        (
            "workload.negative_prompt=a,b",
            "Ambiguous value for argument 'workload.negative_prompt=a,b'",
        ),
    ],
)
def test_what_hydra_would_take_otherwise_is_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Command.of(CommandLine.of(with_resumed(words.split()))).require_gate()


def test_a_gate_of_ones_own_has_rules(composer: Composers, tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate/mine.yaml").touch()
    with pytest.raises(
        UsageError, match="gate=mine: has no rules, so that nothing would be judged"
    ):
        composer(["gate=mine"], [f"hydra.searchpath=[file://{tmp_path}]"])


def test_a_number_names_a_study() -> None:
    assert Command.of(CommandLine.of(["study.name=17"])).folder.parent.name == "17"


def test_a_preset_names_its_study(tmp_path: Path) -> None:
    """Else all presets of a user that give no name would share the experiment, and the folder, of their design."""
    (tmp_path / "experiment").mkdir()
    preset = "# @package _global_\ndefaults:\n  - override /study: one_at_a_time\nstudy: {options: [layout]}\n"
    (tmp_path / "experiment/mine.yaml").write_text(preset)
    flags = ["--config-dir", str(tmp_path), "experiment=mine"]
    for words, name in ([], "mine"), (["study.name=other"], "other"):
        command = Command.of(CommandLine.of([*flags, *words]))
        assert command.folder.parent.name == name
        assert command.composer is not None
        assert command.composer.current.study.name == name
    command = Command.of(CommandLine.of(["precision=bf16"]))
    assert command.folder.parent.name == "pair"


def test_several_overrides_in_one_word_are_told_apart() -> None:
    for word in ("precision=bf16 layout=channels_last", " precision=bf16"):
        with pytest.raises(UsageError, match="not an override"):
            Command.of(CommandLine.of([word]))


class TestSwappedNodes:
    """A variant of options is put together from nodes; Hydra would compose the same of all overrides."""

    @pytest.mark.parametrize(
        ("job", "overrides", "plain"),
        [
            ([], ["compiler=inductor", "compiler.mode=max-autotune"], False),
            (
                ["compiler=inductor", "compiler.mode=max-autotune"],
                ["precision=bf16"],
                True,
            ),
            (
                ["memory=vae_tiling", "memory.vae_tiling.tile_size=64"],
                ["memory=vae_tiling", "memory=vae_slicing"],
                False,
            ),
            (
                ["precision=bf16", "memory=[vae_slicing]"],
                ["memory=[]", "workload.steps=3"],
                False,
            ),
            (
                ["precision=bf16", "memory=[vae_slicing]"],
                ["memory=[]", "workload.steps=3"],
                True,
            ),
            (["experiment=quickstart"], ["attention=math"], False),
        ],
    )
    def test_are_what_hydra_composes(
        self, composer: Composers, job: list[str], overrides: list[str], plain: bool
    ) -> None:
        made = composer(job).variant("x", overrides, plain)
        composed = composer(list(made.overrides)).variant("x")
        assert composed == made


def test_a_program_s_own_use_of_hydra_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later jobs would run in other folders, and log to a file of another name."""
    monkeypatch.setattr(VersionBase.instance(), "version_base", Version("1.1"))
    JobRuntime().set("name", "mine")
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(
                lambda port: tracking_of([f"tracking.uri=http://localhost:{port}"]).uri,
                range(1, 5),
            )
        )
    assert found == [f"http://localhost:{port}" for port in range(1, 5)]
    assert VersionBase.instance().version_base == Version("1.1")
    assert JobRuntime().get("name") == "mine"


def test_a_program_may_have_initialized_hydra_as_its_main_function_does() -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        of_program = GlobalHydra.instance().hydra
        assert tracking_of(["tracking.uri=http://localhost:1"]).uri
        assert GlobalHydra.instance().hydra is of_program


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "protocol: {rounds: 7}",
            "experiment.protocol._target_: must name a class",
        ),
        (
            "defaults: [override /precision: bf16]",
            "In 'experiment/mine': Could not override 'precision",
        ),
        (
            "# @package _global_\ndefaults: [/precision: bf16]",
            "To override a value use 'override precision: bf16'",
        ),
        (
            "# @package _global_\ndefaults: [override precision: bf16]",
            "Could not override 'experiment/precision",
        ),
        (
            "# @package _global_\ndefaults: [precision: bf16]",
            "Could not find 'experiment/precision/bf16'",
        ),
        ("# @package _global_\nprecision: bf16", "precision: unknown key"),
        ("# @package _global_\nattention: null", "attention: unknown key"),
        (
            "# @package _global_\ndefaults: [mine]",
            "maximum recursion depth exceeded",
        ),
        (
            "# @package _global_\nworkload: {negative_prompt: café}",
            "experiment/mine.yaml: is not UTF-8",
        ),
        (
            "# @package _global_\nhydra: {sweeper: {params: {precision: 'bf16,fp16'}}}",
            "hydra.sweeper.params: is set by a file",
        ),
        (
            "# @package _global_\ndefaults:\n  - override /precision: bf16\n  - override /precision: fp16",
            "experiment/mine.yaml: 'override /precision: fp16' would have no effect",
        ),
    ],
)
def test_a_preset_that_is_written_otherwise_says_how(
    content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match=re.escape(said)):
        Command.of(CommandLine.of(["--config-dir", str(tmp_path), "experiment=mine"]))


@pytest.mark.parametrize(
    "words", [["-m", "precision=fp32,bf16", "hydra.run.dir=x"], ["hydra.sweep.dir=x"]]
)
def test_a_folder_that_would_stay_empty_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"hydra\.(run|sweep)\.dir=x: has no effect"):
        Command.of(CommandLine.of(words))


def test_hydra_runs_where_argparse_checks_help_strings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does from Python 3.14 on: Hydra 1.3's help of one flag is no string."""
    parser: Any = argparse.ArgumentParser

    def check(_self: argparse.ArgumentParser, action: argparse.Action) -> None:
        assert action.help is None or isinstance(action.help, str)

    def add_argument(
        self: argparse.ArgumentParser, *flags: str, **settings: Any
    ) -> argparse.Action:
        action: argparse.Action = add(self, *flags, **settings)
        self._check_help(action)  # type: ignore[attr-defined]
        return action

    add = parser.add_argument
    monkeypatch.setattr(parser, "_check_help", check, raising=False)
    monkeypatch.setattr(parser, "add_argument", add_argument)

    run_hydra(["--version"])

    assert "Hydra" in capsys.readouterr().out


def test_a_gate_needs_something_to_judge(composer: Composers) -> None:
    """A scheduler is that of both sides: a gate would pass with no verdict."""
    alone = composer(["scheduler=euler", "gate=default"])
    plan = alone.current.study.plan(alone)
    with pytest.raises(UsageError, match=r"study\.baseline=\[scheduler:ddim\]"):
        require_judged(plan, alone.current.gate)

    for overrides in (
        ["gate=default", "study.baseline=[scheduler:ddim]", "scheduler=euler"],
        ["gate=report_only", "scheduler=euler"],
        ["scheduler=euler"],
    ):
        there = composer(overrides)
        require_judged(there.current.study.plan(there), there.current.gate)
