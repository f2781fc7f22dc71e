"""Options on a program's own pipeline with a transformer: applied, proved, taken back, refused."""

from typing import Any

import numpy as np
import pytest
import torch

import sdopt
from sdopt.errors import ConflictError
from tests.pipelines.tiny import tiny

CALL: dict[str, Any] = {"height": 64, "width": 64, "max_sequence_length": 64}


def images(pipe: Any) -> np.ndarray:
    """Draws two images of one seed, in six steps."""
    prompts, noise = ["a red circle", "a blue house"], torch.Generator().manual_seed(0)
    drawn: np.ndarray = pipe(prompts, num_inference_steps=6, generator=noise, output_type="np", **CALL).images
    return drawn


@pytest.fixture
def pipe() -> Any:
    return tiny("flux")


def test_options_are_proved_and_taken_back(pipe: Any) -> None:
    before = images(pipe)
    sdopt.optimize(pipe, "caching.threshold=10", caching="first_block", attention="math")
    changed = images(pipe)
    assert np.abs(changed - before).max() > 1e-3
    report = sdopt.prove(pipe, **CALL)
    assert report.engaged, str(report)
    assert {found.axis for found in report.evidence} == {"caching", "attention"}
    sdopt.undo(pipe)
    assert np.array_equal(images(pipe), before)


def test_what_is_not_for_transformers_is_refused_before_anything_changes(pipe: Any) -> None:
    with pytest.raises(ConflictError, match=r"caching=deepcache: not for FLUX\.1"):
        sdopt.optimize(pipe, caching="deepcache")
    with pytest.raises(ConflictError, match="choose scheduler=flow_euler"):
        sdopt.optimize(pipe, scheduler="ddim")


def test_half_precision_keeps_what_a_text_encoder_keeps(pipe: Any) -> None:
    sdopt.optimize(pipe, precision="fp16")
    types = {weight.dtype for weight in pipe.text_encoder_2.parameters()}
    assert types == {torch.float16, torch.float32}
    assert {weight.dtype for weight in pipe.transformer.parameters()} == {torch.float16}
