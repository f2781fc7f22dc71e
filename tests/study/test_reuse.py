"""Images of timed calls count: the quality pass generates the other ones, and a sample of them again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import sdopt
from sdopt.contract import Contract
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.record.scores import ImageRecord
from sdopt.schema import Rule
from sdopt.study.resume import merge_resumed
from sdopt.worker.draws import LATENTS
from tests.fakes import Fakes, FakeStudy, fake_study, run_fake

PROMPTS = tuple(f"prompt {number}" for number in range(24))


def measured(
    folder: Path,
    of: dict[str, Any] | None = None,
    fakes: Fakes | None = None,
    **protocol: Any,
) -> StudyResult:
    result, _ = run_fake(folder, study_of(of, **protocol), fakes)
    return result


def study_of(of: dict[str, Any] | None = None, **protocol: Any) -> FakeStudy:
    """A study of 24 prompts."""
    settings: dict[str, Any] = {
        "rounds": 3,
        "replicates": 3,
        "interference": None,
        "give_up": None,
    }
    settings |= {"schedule": "interleaved", **protocol}
    study = fake_study(
        ["a", "b"],
        {"quality": {"metrics": True, "batch_size": 1}, **(of or {})},
        **settings,
    )
    for variant in study[0].variants:
        object.__setattr__(variant, "pictured", PROMPTS)
    return study


def timed(result: StudyResult, name: str) -> dict[int, int]:
    """The prompts whose images are of timed calls, each with the process."""
    images: list[ImageRecord] = result.variant(name).images
    return {
        image.prompt_index: image.process
        for image in images
        if image.process is not None
    }


def test_each_prompt_has_one_image_and_those_of_timed_calls_name_their_process(
    tmp_path: Path,
) -> None:
    result = measured(tmp_path)
    sources = [timed(result, name) for name in ("baseline", "a", "b")]
    assert sources[0] == sources[1] == sources[2], (
        "pairs are of images that were made alike"
    )
    assert set(sources[0].values()) == {0, 1, 2}
    assert len(sources[0]) == 9 - 3, (
        "nine calls are timed, and one of each process is generated again"
    )
    for name in ("baseline", "a", "b"):
        row = result.variant(name)
        assert [image.prompt_index for image in row.images] == list(range(24))
        assert all((tmp_path / image.path).is_file() for image in row.images)
        assert [image.seed for image in row.images] == [
            row.images[0].seed + index for index in range(24)
        ]
        assert len(row.measurements[0].pass_s) == 24 - 6


def test_every_process_has_images_that_were_generated_again(tmp_path: Path) -> None:
    result = measured(tmp_path)
    for row in result.variants:
        compared = {
            m.replicate
            for m in row.measurements
            for i in m.shapes[0].timed_images
            if i.error == 0.0
        }
        assert compared == {0, 1, 2}, row.name


def test_latents_are_in_the_order_of_the_images(tmp_path: Path) -> None:
    assert_whole(tmp_path, measured(tmp_path))


def assert_whole(folder: Path, result: StudyResult) -> None:
    for name in ("baseline", "a", "b"):
        row = result.variant(name)
        assert not row.kept_images
        assert [image.prompt_index for image in row.images] == [*range(24)]
        latents = load_file((folder / row.images[0].path).with_name(LATENTS))["latents"]
        assert latents[:, 0, 0, 0].tolist() == [*range(24)]


def test_an_image_of_a_timed_call_that_differs_from_the_one_generated_again_is_seen(
    tmp_path: Path,
) -> None:
    fakes = Fakes()

    def darkens(worker: Any, name: str) -> None:
        if name == "generate":
            worker.fakes.black = {"a"}

    fakes.faults = {"a": darkens}
    result = measured(tmp_path, fakes=fakes)
    errors = [
        i.error
        for m in result.variant("a").measurements
        for i in m.shapes[0].timed_images
    ]
    assert any(error for error in errors if error is not None)


@pytest.mark.parametrize(
    ("of", "protocol"),
    [
        ({"gate": {"rules": {Contract.EXACT: [Rule("mse", "exact")]}}}, {}),
        ({"quality": {"metrics": True, "batch_size": 4}}, {}),
        ({}, {"schedule": "blocks"}),
    ],
    ids=["judged calls", "larger batches", "one variant at a time"],
)
@pytest.mark.walk(2)
def test_all_are_generated_where_the_pass_says_more(
    tmp_path: Path, of: dict[str, Any], protocol: Any
) -> None:
    result = measured(tmp_path, of, **protocol)
    assert not timed(result, "a")
    assert len(result.variant("a").images) == 24


JUDGED: dict[str, Any] = {"gate": {"rules": {Contract.EXACT: [Rule("mse", "exact")]}}}


@pytest.mark.parametrize(
    ("of", "end", "timed_ones", "again"),
    [({}, 7, 6, 12), (JUDGED, 7, 0, 18), (JUDGED, 22, 0, 8)],
)
def test_what_was_interrupted_goes_on_with_the_images_that_are_there(
    tmp_path: Path, of: dict[str, Any], end: int, timed_ones: int, again: int
) -> None:
    """As long as enough calls of one process are left for the rules on them."""
    drawn: list[str] = []

    def ends(worker: Any, name: str) -> None:
        drawn.extend([name] * (name == "generate"))
        if len(drawn) == end:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, of, Fakes({"b": ends}))
    broken_off = read_result(tmp_path).variant("b")
    assert not broken_off.images
    assert len(broken_off.kept_images) == timed_ones + end - 1
    drawn.clear()
    plan, fresh, machine = study_of(of)
    previous = read_result(tmp_path)
    for row in [*previous.variants, *fresh.variants]:
        row.inputs.pop("prompts", None)  # the fakes' own, and not these
    merged = merge_resumed(previous, fresh, plan, tmp_path, retry_failed=False)
    drawn = ["before"] * 30  # so that it does not end again
    result, _ = run_fake(tmp_path, (plan, merged, machine), Fakes({"b": ends}))
    assert len(drawn) == 30 + again
    assert timed(result, "b") == timed(result, "baseline")
    assert_whole(tmp_path, result)


def test_what_is_killed_has_kept_its_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdopt.study.evidence.KEEPING_S", 0.0)
    kept: list[int] = []

    def looks(worker: Any, name: str) -> None:
        if name == "generate":
            kept.append(len(read_result(tmp_path).variant("b").kept_images))

    measured(tmp_path, JUDGED, Fakes({"b": looks}))
    assert kept == [*range(24)]


@pytest.mark.slow
def test_of_a_real_study_are_what_the_pass_generates(tmp_path: Path) -> None:
    settings = [
        "workload.steps=2",
        "quality.batch_size=1",
        "quality.prompt_count=12",
        "protocol.rounds=3",
    ]
    common = [
        "tracking=none",
        "hardware.exclusive=false",
        "hardware.threads=1",
        "protocol.replicates=1",
    ]
    extra = [
        "protocol.interference=null",
        "protocol.programs_s=0",
        "attention=math",
        "protocol.stage_calls=0",
    ]
    results = []
    for name, schedule in (("used", "interleaved"), ("whole", "blocks")):
        folder = tmp_path / name
        sdopt.run(
            *settings,
            *common,
            *extra,
            f"protocol.schedule={schedule}",
            f"hydra.run.dir={folder}",
        )
        results.append(read_result(folder / "result.json"))
    used, whole = results
    assert timed(used, "baseline")
    assert not timed(whole, "baseline")
    for mine, other in zip(used.variants, whole.variants, strict=True):
        for image, again in zip(mine.images, other.images, strict=True):
            first, second = (
                tmp_path / "used" / image.path,
                tmp_path / "whole" / again.path,
            )
            assert first.read_bytes() == second.read_bytes(), (
                mine.name,
                image.prompt_index,
            )
    rows = (("used", used.variants[0]), ("whole", whole.variants[0]))
    latents = [
        load_file((tmp_path / run / row.images[0].path).parent / LATENTS)["latents"]
        for run, row in rows
    ]
    assert np.array_equal(*latents)
