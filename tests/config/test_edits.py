"""A variant is an edit of the job's configuration: what it may say, what it sees, and what Hydra makes of the same."""

from pathlib import Path

import pytest
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from sdopt.config.edits import with_value
from sdopt.errors import UsageError
from sdopt.options.caching import DeepCaching
from tests.fixtures import Composers

CHOSEN = [
    "caching:deepcache",
    "caching.interval:2",
    "precision:bf16",
    "workload.steps:7",
    "scheduler:euler",
]


def test_a_variant_needs_no_second_composition(
    composer: Composers, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = composer(["layout=channels_last"])

    def refuse(*_arguments: object, **_named: object) -> None:
        raise AssertionError("Hydra was asked")

    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoader)
    monkeypatch.setattr(loader, "load_configuration", refuse)
    variant = job.variant("it", CHOSEN)
    assert variant.optimizations["caching"] == DeepCaching(interval=2)
    assert (variant.workload.steps, variant.scheduler.class_name) == (
        7,
        "EulerDiscreteScheduler",
    )
    assert job.current.workload.steps != 7, "the job stays as it is"
    assert "caching" not in [
        axis for axis in job.current.choices if job.current.choices[axis] == "deepcache"
    ]


def test_what_refers_to_another_key_follows_it(composer: Composers) -> None:
    """`workload.steps` is the model's number unless somebody gives another."""
    job = composer(["model=sd15", "model.weights=random"])
    assert job.current.workload.steps == job.current.model.steps == 25
    assert (
        job.variant("it", ["model:sd_turbo", "model.weights:random"]).workload.steps
        == 4
    )
    assert job.variant("it", ["model.steps:9"]).workload.steps == 9


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["~precision"], "~precision: a variant gives a key one value"),
        (["~workload.steps"], "~workload.steps: a variant gives a key one value"),
        (["precision@layout=bf16"], "an option has its own place"),
        (["workload.steps=${model.steps}"], "a variant gives a key one value"),
        ([":"], "names no key"),
        (
            ["+scheduler.options.timestep_spacing=leading", "scheduler.options={}"],
            "this changes nothing",
        ),
        (["workload.steps=2,3"], "a variant gives a key one value"),
        (
            ["workload.stepz=3"],
            "workload.stepz: there is no such key here; a new one takes a +",
        ),
        (["~nope"], "~nope: no such group is chosen here"),
        (["nope=3"], "nope: there is no such key here"),
        (["nope.key=3"], "nope.key: there is no such key here"),
        (["caching.interval=2"], "caching.interval: there is no such key here"),
        (
            ["scheduler.options={eta: 1.0}"],
            "scheduler.options: there is no such key here",
        ),
        (
            ["caching=deepcache", "caching.interval=1"],
            "caching.interval=1: Input should be greater than or equal to 2",
        ),
        (["caching=nope"], "caching=nope: "),
        (["memory=[vae_tiling,nope]"], "memory=nope: "),
    ],
)
def test_what_a_variant_cannot_say(
    overrides: list[str], said: str, composer: Composers
) -> None:
    with pytest.raises(UsageError) as caught:
        composer([]).variant("it", overrides)
    [problem] = caught.value.problems
    assert problem.startswith("variant 'it': ")
    assert said in problem


def test_a_preset_within_a_variant_is_composed_by_hydra(
    composer: Composers, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n- override /precision: bf16\nworkload:\n  steps: 3\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    variant = composer([], [f"hydra.searchpath=[file://{tmp_path}]"]).variant(
        "it", ["experiment:mine", "layout:channels_last"]
    )
    assert (
        variant.choices["precision"],
        variant.choices["layout"],
        variant.workload.steps,
    ) == (
        "bf16",
        "channels_last",
        3,
    )


def test_values_are_copied_where_they_change() -> None:
    values = {"a": {"b": {"c": 1}, "d": 2}, "e": {"f": 3}}
    changed = with_value(values, "a.b", {"c": 4, "x.y": 5})
    assert changed == {"a": {"b": {"c": 4, "x.y": 5}, "d": 2}, "e": {"f": 3}}
    assert values == {"a": {"b": {"c": 1}, "d": 2}, "e": {"f": 3}}
    assert changed["e"] is values["e"]
