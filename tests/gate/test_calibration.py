"""Calibrations: of the weights that come with sdopt, and applied to the work that they were measured with."""

import shlex
from dataclasses import replace
from pathlib import Path
from shutil import copy

import pytest

from sdopt.config.composer import composer_of
from sdopt.config.parse import drawn_prompts
from sdopt.contract import Contract
from sdopt.gate.calibration import (
    FOLDER,
    Fit,
    calibration_for,
    fit_of,
    how_to_calibrate,
    read_calibration,
    remarks_on_calibration,
    work_of,
)
from sdopt.gate.judge import judge
from sdopt.quality.features import feature_extractor
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import read_result
from sdopt.record.scores import Score
from sdopt.reference import MODEL
from sdopt.schema import Gate, Model, Quality, Rule, Scheduler, Task, Workload
from sdopt.study.fingerprint import of_model
from tests.gate.test_judge import study, variant
from tests.records import reconfigure
from tests.robustness.damage import RESULT

PACKAGED = {file.stem: read_calibration(file) for file in sorted(FOLDER.glob("*.json"))}


def config(steps: int = 25, **sections: object) -> RecordedConfig:
    return replace(
        RecordedConfig(model=Model(guidance_scale=4.5), workload=Workload(steps=steps)),
        **sections,  # type: ignore[arg-type]
    )


def test_the_packaged_calibrations_are_of_the_packaged_weights() -> None:
    assert {
        "emoji-10",
        "emoji-20",
        "emoji-25",
        "emoji-img2img-25",
        "emoji-inpaint-25",
        "emoji_dit-25",
    } <= PACKAGED.keys()
    features = feature_extractor("emojiclip").digest
    for name, found in PACKAGED.items():
        model = Model(name=name.partition("-")[0])
        assert found.digests == {"model": of_model(model), "emojiclip": features}, name


def test_one_of_the_same_work_is_applied_without_a_word() -> None:
    assert fit_of(PACKAGED["emoji-25"], config(), named=False) == Fit(
        PACKAGED["emoji-25"]
    )


@pytest.mark.parametrize("kind", ["img2img", "inpaint"])
def test_tasks_have_their_own(kind: str) -> None:
    with composer_of([f"task={kind}"]) as composer:
        task = composer.variant(kind).task
    found = PACKAGED[f"emoji-{kind}-25"]
    assert fit_of(found, config(task=task), named=False) == Fit(found)
    # Images that start from another one differ by something else.
    own = config(task=replace(task, image="photo.png"))
    fit = fit_of(found, own, named=False)
    assert fit.calibration is None
    assert "task.image=packaged (here photo.png)" in fit.refusal


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            config(workload=Workload(guidance_scale=1.0)),
            "workload.guidance_scale=4.5 (here 1.0)",
        ),
        (
            config(scheduler=Scheduler("EulerDiscreteScheduler")),
            "scheduler.class_name=DDIMScheduler",
        ),
        (config(task=Task("inpaint")), "task.kind=txt2img (here inpaint)"),
        (config(task=Task("img2img", strength=0.8)), "task.strength=1.0 (here 0.8)"),
    ],
)
def test_one_of_other_work_is_not_applied_unless_it_is_named(
    other: RecordedConfig, said: str
) -> None:
    refused = fit_of(PACKAGED["emoji-25"], other, named=False)
    assert (refused.calibration, refused.note) == (None, "")
    assert said in refused.refusal
    assert "sdopt calibrate model=emoji" in refused.refusal
    applied = fit_of(PACKAGED["emoji-25"], other, named=True)
    assert (applied.calibration, applied.refusal) == (PACKAGED["emoji-25"], "")
    assert said in applied.note


def test_one_without_the_lora_of_a_baseline_is_not_applied_unless_it_is_named() -> None:
    """Images of one style differ less: margins of the plain model would be another model's."""
    plain = PACKAGED["emoji-25"]
    refused = fit_of(plain, config(), named=False, parts="0123456789abcdef")
    assert refused.calibration is None
    assert "files of options=none (here 0123456789ab)" in refused.refusal
    assert "as in lora=loaded" in refused.refusal
    applied = fit_of(plain, config(), named=True, parts="0123456789abcdef")
    assert applied.calibration == plain
    assert "files of options=none" in applied.note
    with_it = replace(plain, digests={**plain.digests, "parts": "0123456789abcdef"})
    assert fit_of(with_it, config(), named=False, parts="0123456789abcdef") == Fit(
        with_it
    )
    # What options read is no part of the weights, of which others never fit.
    result = study(variant("it"))
    result.config = config()
    result.baseline_variant.inputs = {
        "model": of_model(Model()),
        "parts": "0123456789abcdef",
    }
    file = str(FOLDER / "emoji-25.json")
    assert calibration_for(result, file).calibration == plain
    assert calibration_for(result, None).calibration is None


def test_the_command_that_measures_another_one_names_the_weights_and_the_features() -> (
    None
):
    own = Model(name="folder", weights="path", path="/my models/sd", guidance_scale=4.5)
    other = config(steps=4, model=own, quality=Quality(features=["clip:/clip"]))
    why = fit_of(PACKAGED["emoji-25"], other, named=False).refusal
    work = "workload.steps=4 workload.guidance_scale=4.5 workload.size=64"
    words = f"model='/my models/sd' {work} quality.features='[clip:/clip]'"
    assert f"`sdopt calibrate {words} --output own.json`" in why


@pytest.mark.parametrize(
    "words",
    [
        ["scheduler=dpmpp_2m_karras"],
        ["scheduler=ays", "workload.steps=10"],
        ["scheduler=euler", "+scheduler.options.timestep_spacing=trailing"],
        ["model=emoji_dit", "scheduler=flow_heun"],
        ["task=img2img", "task.strength=0.5"],
        ["task=img2img", "task.image='{}'"],
    ],
)
def test_that_command_measures_the_work_of_the_study(
    words: list[str], tmp_path: Path
) -> None:
    picture = tmp_path / "a photo, (mine).png"
    copy(MODEL.parent / "inputs" / "image.webp", picture)
    with composer_of([word.format(picture) for word in words]) as composer:
        asked = composer.current.recorded
    command = how_to_calibrate(asked).split("`")[1]
    with composer_of(shlex.split(command)[2:-2]) as composer:
        again = composer.current.recorded
    assert work_of(again) == work_of(asked)
    assert again.scheduler.timesteps == asked.scheduler.timesteps


@pytest.mark.parametrize("name", ["/x", "../calibrations/emoji", "emo*"])
def test_the_name_of_a_model_is_neither_a_path_nor_a_pattern(name: str) -> None:
    result = read_result(RESULT)
    assert "of other weights" in calibration_for(result, None).refusal
    reconfigure(result, "model", name=name)
    assert calibration_for(result, None) == Fit()


def test_one_of_other_weights_says_which() -> None:
    result = read_result(RESULT)
    reconfigure(result, "workload", steps=10)
    baseline = result.variant("baseline")
    baseline.inputs["model"], result.feature_digests = (
        of_model(Model()),
        {"emojiclip": "0123456789abcdef"},
    )
    here = feature_extractor("emojiclip").digest[:12]
    for path, named in (
        (None, "the calibration that comes with sdopt"),
        (str(FOLDER / "emoji-10.json"), f"gate.calibration={FOLDER / 'emoji-10.json'}"),
    ):
        found = calibration_for(result, path)
        assert found.calibration is None
        said = f"{named} is of other weights, emojiclip {here} (here 0123456789ab): run `sdopt calibrate"
        assert said in found.refusal
        judge(
            result,
            Gate(
                "g", {"lossy": [Rule("clip_score", deviations=0.1)]}, calibration=path
            ),
            found,
        )
        assert named in str(result.judgements)
    result.feature_digests = {"emojiclip": feature_extractor("emojiclip").digest}
    assert calibration_for(result, None) == Fit(PACKAGED["emoji-10"])


def test_a_comparison_takes_that_of_its_references_work() -> None:
    """What is held against four steps is not allowed a share of what other noise changes in 25."""
    result = study(variant("it"), variant("few"))
    result.variants.append(variant("baseline", contract="exact"))
    result.baseline = "baseline"
    for row in result.variants:
        row.config = config(4 if row.name == "few" else 25)
        row.inputs = {"model": of_model(Model())}
    result.config = config()
    by_default = calibration_for(result, None)
    assert by_default.of("baseline").calibration == PACKAGED["emoji-25"]
    assert "workload.steps=10 (here 4)" in by_default.of("few").refusal
    clip = Rule("clip_score", deviations=0.1)
    for row in result.variants:
        row.quality = {"clip_score_emojiclip": Score(80.0, [80.0] * 48)}
    judge(result, Gate("g", {"lossy": [clip]}), by_default)
    [judged] = result.judgements
    assert judged.reference == "few"
    assert "workload.steps=10 (here 4)" in str(judged.rulings)


class TestForeseen:
    """What is known of a gate's margins and prompts is said before anything is measured."""

    def said(self, *overrides: str) -> list[str]:
        with composer_of(["gate=default", "caching=deepcache", *overrides]) as composer:
            run = composer.current
            drawn = len(drawn_prompts(run))
        contracts = [Contract.LOSSY]
        return list(remarks_on_calibration(run.gate, contracts, run.recorded, drawn))

    def test_settings_that_a_shipped_calibration_fits(self) -> None:
        assert not self.said()

    def test_other_settings_name_the_command(self) -> None:
        [said] = self.said("workload.steps=7")
        assert (
            "images of approximations will not be judged: run `sdopt calibrate" in said
        )
        assert "workload.steps=7" in said
        assert "two images of each of 240 prompts" in said, "it takes long"

    def test_too_few_prompts(self) -> None:
        [said] = self.said("quality.prompt_count=8")
        assert "drawn of 8 prompts" in said

    def test_a_file_that_holds_fewer_than_are_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("a cat\na dog\n")
        [said] = self.said(f"workload.prompts='{tmp_path / 'mine.txt'}'")
        assert "drawn of 2 prompts" in said
