"""The pipeline of a variant that was measured."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import sdopt
from sdopt.errors import UsageError
from sdopt.library.loading import measured
from sdopt.record.files import write_result
from sdopt.record.records import StudyResult
from tests.command import Finished
from tests.tracking.test_tracking import Store, logged, needs_mlflow, store  # noqa: F401

RECOMPOSED = pytest.mark.filterwarnings("ignore:.*not the settings that were measured")
"""Of results whose words are changed here, and not the settings that they are recorded with."""


def test_a_measured_variant(finished: Finished) -> None:
    pipe = sdopt.load(
        sdopt.load_result(finished.folder), "bfloat16", device=torch.device("cpu")
    )
    assert pipe.unet.dtype is torch.bfloat16
    calls = []
    pipe.unet.register_forward_hook(lambda *_: calls.append(1))
    assert pipe("a red apple", output_type="np").images.shape == (1, 32, 32, 3)
    assert len(calls) == finished.result.config.workload.steps
    with pytest.raises(UsageError, match="variant: name one of baseline, bfloat16"):
        sdopt.load(finished.folder)
    with pytest.raises(
        UsageError,
        match=r"sdopt\.load applied the options at loading; load the baseline instead",
    ):
        sdopt.undo(pipe)
    assert sdopt.prove(pipe).engaged


@RECOMPOSED
def test_calls_are_those_that_were_measured(
    result: StudyResult, tmp_path: Path
) -> None:
    row = result.variant("baseline")
    work = ("task.strength=0.5", "workload.images_per_prompt=2", "workload.steps=4")
    row.overrides += [
        "task=inpaint",
        "task.image=packaged",
        "task.mask=packaged",
        *work,
    ]
    write_result(result, tmp_path)
    pipe = sdopt.load(tmp_path, "baseline")
    steps: list[int] = []
    pipe.unet.register_forward_hook(lambda *_: steps.append(1))
    picture, white = Image.new("RGB", (64, 64), "red"), Image.new("L", (64, 64), 255)
    assert pipe(
        "a red apple", image=picture, mask_image=white, output_type="np"
    ).images.shape == (2, 32, 32, 3)
    assert len(steps) == 2
    pipe(
        "a red apple",
        image=picture,
        mask_image=white,
        strength=1.0,
        num_images_per_prompt=1,
    )
    assert len(steps) == 6
    assert sdopt.prove(pipe, image=picture, mask_image=white).engaged


@RECOMPOSED
def test_a_transformer_is_guided_as_it_was_measured(
    result: StudyResult, tmp_path: Path
) -> None:
    """Its pipeline has another argument for the scale, and is guided only beside a negative prompt."""
    row = result.variant("baseline")
    row.inputs.clear()
    row.overrides += [
        "model=emoji_dit",
        "workload.guidance_scale=3",
        "workload.steps=2",
    ]
    write_result(result, tmp_path)
    pipe = sdopt.load(tmp_path, "baseline")
    seen: list[Any] = []
    pipe.transformer.register_forward_pre_hook(
        lambda *call: seen.append(call[2]), with_kwargs=True
    )
    pipe("a red apple")
    assert len(seen) == 4, "both branches of two steps"
    assert {len(call["encoder_hidden_states"][0]) for call in seen} == {24}, (
        "the tokens that its encoder reads"
    )
    pipe("a red apple", true_cfg_scale=1.0)
    assert len(seen) == 6


def test_other_files_than_those_measured_are_said(
    result: StudyResult, tmp_path: Path
) -> None:
    """A model may have been trained again under its old name."""
    result.variant("bfloat16").inputs["model"] = "0123456789abcdef"
    write_result(result, tmp_path)
    said = "variant=bfloat16: not the model's files that were measured"
    with pytest.warns(UserWarning, match=said):
        sdopt.load(tmp_path, "bfloat16")
    with pytest.warns(UserWarning, match=said):
        measured(tmp_path, "bfloat16", ["layout=channels_last"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdopt.load(tmp_path, "baseline")


def test_other_settings_than_those_measured_are_said(
    result: StudyResult, tmp_path: Path
) -> None:
    """A file of one's own options, or of sdopt's, may say something else since."""
    row = result.variant("bfloat16")
    steps = row.config.workload.steps
    more = replace(row.config.workload, steps=steps + 3)
    row.config = replace(row.config, workload=more)
    write_result(result, tmp_path)
    said = f"not the settings that were measured: workload.steps was {steps + 3} and is {steps}"
    for changes in ([], ["layout=channels_last"]):
        with pytest.warns(UserWarning, match=said):
            measured(tmp_path, "bfloat16", changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured(tmp_path, "bfloat16", ["workload.batch_size=2"])
        measured(tmp_path, "baseline")


@needs_mlflow
def test_by_the_id_of_a_run(logged: Store, finished: Finished) -> None:  # noqa: F811
    parent, runs = logged.of_study(finished.result)
    for named, dtype in (("baseline", torch.float32), ("bfloat16", torch.bfloat16)):
        # Its name can be changed in the UI.
        logged.client.update_run(runs[named].info.run_id, name=f"my {named}")
        pipe = sdopt.load(runs[named].info.run_id, tracking_uri=logged.tracking.uri)
        assert pipe.unet.dtype is dtype
    pipe = sdopt.load(
        runs["baseline"].info.run_id, "bfloat16", tracking_uri=logged.tracking.uri
    )
    assert pipe.unet.dtype is torch.bfloat16
    with pytest.raises(UsageError, match="variant: name one of baseline, bfloat16"):
        sdopt.load(parent.info.run_id, tracking_uri=logged.tracking.uri)
