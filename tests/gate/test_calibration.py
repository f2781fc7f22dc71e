"""Calibrations: of the weights that come with sdopt, and applied to the work that they were measured with."""

from dataclasses import replace

import pytest

from sdopt.gate.calibration import FOLDER, fitting_calibration, read_calibration
from sdopt.quality.features import feature_extractor
from sdopt.results.records import RecordedConfig
from sdopt.schema import Model, Scheduler, Workload
from sdopt.study.fingerprint import of_model

PACKAGED = {file.stem: read_calibration(file) for file in sorted(FOLDER.glob("*.json"))}


def config(steps: int = 25, **sections: object) -> RecordedConfig:
    return replace(RecordedConfig(model=Model(guidance_scale=4.5), workload=Workload(steps=steps)), **sections)  # type: ignore[arg-type]


def test_the_packaged_calibrations_are_of_the_packaged_weights() -> None:
    assert {"emoji-10", "emoji-20", "emoji-25"} <= PACKAGED.keys()
    for found in PACKAGED.values():
        assert found.digests == {"model": of_model(Model()), "emojiclip": feature_extractor("emojiclip").digest}


def test_one_of_the_same_work_is_applied_without_a_word() -> None:
    assert fitting_calibration(PACKAGED["emoji-25"], config(), named=False) == (PACKAGED["emoji-25"], "")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (config(steps=4), "workload.steps=25 (here 4)"),
        (config(workload=Workload(guidance_scale=1.0)), "workload.guidance_scale=4.5 (here 1.0)"),
        (config(scheduler=Scheduler("EulerDiscreteScheduler")), "scheduler.class_name=DDIMScheduler"),
    ],
)
def test_one_of_other_work_is_not_applied_unless_it_is_named(other: RecordedConfig, said: str) -> None:
    refused, why = fitting_calibration(PACKAGED["emoji-25"], other, named=False)
    assert refused is None
    assert said in why
    assert "sdopt calibrate model=emoji" in why
    applied, why = fitting_calibration(PACKAGED["emoji-25"], other, named=True)
    assert applied is PACKAGED["emoji-25"]
    assert said in why
