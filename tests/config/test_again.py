"""The command that measures a variant again composes what was measured, key by key, or there is none."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from sdopt.config.again import command_of, differing
from sdopt.config.command import CommandLine
from sdopt.config.composer import HydraComposer
from sdopt.config.groups import optimization_options
from sdopt.config.paths import CONF
from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.record.choices import PLAIN, written_value
from sdopt.reference import LORAS
from sdopt.study.designs import Plan
from tests.command import SMOKE
from tests.fixtures import Composers


def commands(composer: HydraComposer) -> tuple[Plan, list[str]]:
    """The plan of a study, and the command of each variant but the baseline."""
    plan = composer.current.study.plan(composer)
    return plan, [command_of(composer, variant, plan) for variant in plan.variants[1:]]


def require_same(composer: HydraComposer) -> list[str]:
    """Composes each command anew, as a shell gives it, and holds it against what was planned."""
    plan, written = commands(composer)
    for variant, command in zip(plan.variants[1:], written, strict=True):
        compared = [
            edge.reference for edge in plan.edges if edge.candidate == variant.name
        ]
        if not command and not compared:
            continue  # a reference of others alone, of another task than the baseline
        assert command.startswith("sdopt run "), (variant.name, command)
        line = CommandLine.of(shlex.split(command)[2:])
        own = (
            []
            if line.config_dir is None
            else [f"hydra.searchpath=['file://{line.config_dir}']"]
        )
        again = HydraComposer(line.task, [*own, *line.hydra])
        made = again.current.study.plan(again)
        references = [
            other
            for other in plan.variants
            if other is plan.baseline or other.name in compared
        ]
        assert any(
            not differing(other.config, made.variants[0].config) for other in references
        ), command
        assert not differing(variant.config, made.variants[1].config), command
    return written


def test_the_defaults_are_those_of_the_configuration() -> None:
    defaults = OmegaConf.load(CONF / "config.yaml").defaults
    known = {
        group: each[group]
        for each in defaults
        if isinstance(each, DictConfig)
        for group in each
    }
    assert {group: known[group] for group in PLAIN} == PLAIN


STUDIES: dict[str, Sequence[str]] = {
    "an option": ["precision=bf16"],
    "keys of options": [
        "caching=deepcache",
        "caching.interval=5",
        "memory=[vae_tiling,vae_slicing]",
    ],
    "one at a time": [
        "study=one_at_a_time",
        "study.options=[attention:math,memory:vae_slicing]",
        "precision=bf16",
    ],
    "steps, in a list": [
        "study=one_at_a_time",
        "study.options=[workload.steps:2,scheduler:euler]",
    ],
    "cumulative": [
        "study=cumulative",
        "study.options=[precision:bf16,caching:deepcache,workload.steps:2]",
    ],
    "a baseline with options": [
        "study.baseline=[precision:bf16,memory:vae_slicing]",
        "attention=math",
    ],
    "leave one out": [
        "study=leave_one_out",
        "precision=bf16",
        "layout=channels_last",
        "memory=[vae_slicing]",
    ],
    "a text with quotes and commas": [
        "workload.prompts=['it\\'s a \"cat\", red',fish]",
        "attention=math",
    ],
    "a negative prompt": [
        "workload.negative_prompt='blurry, grey: {x}'",
        "workload.guidance_scale=3.5",
    ],
    "a gate and a key of it": ["gate=default", "gate.must_pay=false", "precision=bf16"],
    "options of a scheduler": [
        "scheduler=euler",
        "+scheduler.options.use_karras_sigmas=true",
        "precision=bf16",
    ],
    "other models on the two sides": [
        "study=explicit",
        "study.variants={plain: [], other: ['model=sd15','model.weights=random','layout=channels_last']}",
    ],
    "a list of sizes": [
        "workload.size=[32,64]",
        "workload.batch_size=[1,2]",
        "precision=bf16",
    ],
    "a model in a folder": [
        f"model={PACKAGED / 'emoji'}",
        "workload.size=64",
        "lora=loaded",
        f"lora.path={LORAS}",
    ],
    "another task, compared with one of its own": [
        "study=explicit",
        "study.variants={text: [], picture: ['task=img2img'], faster: ['task=img2img','layout=channels_last']}",
        "study.edges=[{candidate: faster, reference: picture}]",
        "workload.steps=4",
    ],
    "a preset": ["experiment=quickstart"],
    "a preset of a gate": ["experiment=fastest"],
    "a preset of pictures": [
        "task=img2img",
        "task.strength=0.6",
        "workload.steps=4",
        "attention=math",
    ],
}


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.walk(4)
def test_composes_what_was_measured(composer: Composers, study: str) -> None:
    words = STUDIES[study]
    judged = any(word.startswith(("gate", "experiment")) for word in words)
    require_same(
        composer(
            [
                *(
                    word
                    for word in SMOKE
                    if not (judged and word.startswith("quality"))
                ),
                *words,
            ]
        )
    )


def test_whole_numbers_are_written_as_people_write_them(composer: Composers) -> None:
    _, written = commands(composer(["experiment=quickstart"]))
    assert all(line.endswith(" protocol.budget_s=130") for line in written)


def test_keys_that_a_preset_of_ones_own_sets(tmp_path: Path) -> None:
    """Neither of these is on the command line that was given."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /caching: deepcache\n  - override /protocol: smoke\n"
        "caching:\n  interval: 5\nworkload:\n  steps: 10\nquality:\n  prompt_count: 3\nprotocol:\n  rounds: 7\n"
    )
    own = [f"hydra.searchpath=['file://{tmp_path}']"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        [command] = require_same(HydraComposer(["experiment=mine"], own))
    assert {"caching.interval=5", "workload.steps=10", "protocol.rounds=7"} <= set(
        shlex.split(command)
    )
    assert "--config-dir" not in command
    assert "experiment" not in command


def test_a_value_of_the_environment_is_written_out(
    composer: Composers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shell may have another value, and the command would measure that."""
    monkeypatch.setenv("SCALE", "3.5")
    monkeypatch.setenv("KIND", "bf16")
    words = [
        "workload.guidance_scale=${oc.env:SCALE}",
        "precision=${oc.env:KIND}",
    ]
    [command] = require_same(composer([*SMOKE, *words]))
    assert "workload.guidance_scale=3.5" in command
    assert "precision=bf16" in command
    assert "${" not in command


@pytest.mark.slow
def test_an_option_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "meine Gruppen"
    (folder / "caching").mkdir(parents=True)
    (folder / "caching" / "mine.yaml").write_text(
        "_target_: sdopt.options.caching.DeepCaching\ninterval: 7\n"
    )
    own = [f"hydra.searchpath=['file://{folder}']"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        [command] = require_same(HydraComposer([*SMOKE, "caching=mine"], own))
    assert ["--config-dir", str(folder)] == shlex.split(command)[2:4]


def test_none_where_none_composes(
    composer: Composers, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = composer([*SMOKE, "precision=bf16"])

    def fails(*_: object) -> list[str]:
        raise UsageError("no")

    for way in ("_as_pair", "_as_explicit"):
        monkeypatch.setattr(f"sdopt.config.again.{way}", lambda *_: ["precision=fp16"])
    assert commands(job)[1] == [""]
    for way in ("_as_pair", "_as_explicit"):
        monkeypatch.setattr(f"sdopt.config.again.{way}", fails)
    assert commands(job)[1] == [""]


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [f"{group}={name}" for group, name in optimization_options()]
)
def test_every_option(composer: Composers, option: str) -> None:
    job = composer([*SMOKE, option])
    if len(job.current.study.plan(job).variants) > 1:
        require_same(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [path.stem for path in sorted((CONF / "experiment").glob("*.yaml"))]
)
def test_every_preset(composer: Composers, preset: str) -> None:
    try:
        job = composer([f"experiment={preset}"])
    except UsageError as error:
        pytest.skip(str(error))
    require_same(job)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "null",
        "a b",
        "it's",
        'say "x"',
        "a\\b",
        "it ends \\",
        "a \\' b",
        "two\nlines",
        "1.5",
        1.5,
        [1, "two, three"],
        {"a": [1, None]},
        "größe",
    ],
)
def test_any_value_is_read_as_it_was(composer: Composers, value: object) -> None:
    made = composer([])._compositions.of([f"+mine={written_value(value)}"])
    assert made.values["mine"] == value
