"""Negative prompts, of a file's column and of all prompts: images, records, embeddings, and what users are told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

import sdopt
from sdopt.config.composer import HydraComposer
from sdopt.errors import UsageError
from sdopt.record.files import write_result
from sdopt.record.records import StudyResult
from sdopt.reference import MODEL
from sdopt.statistics.adoption import lines_of
from sdopt.study.fingerprint import of_prompts
from sdopt.worker.draws import timed_draw
from tests.fixtures import Load
from tests.pipelines.test_models import small_xl  # noqa: F401
from tests.pipelines.test_tasks import model  # noqa: F401

PROMPTS, NEGATIVES = ["a red apple", "a blue fish"], ["green", ""]
KEY = "workload.negative_prompt"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "prompts.csv").write_text("prompt,negative_prompt\na red apple,green\na blue fish,\n")
    return f"workload.prompts={tmp_path / 'prompts.csv'}"


def calls_of(pipe: object) -> list[torch.Tensor]:
    """Keeps the text's states of each denoiser call."""
    seen: list[torch.Tensor] = []
    pipe.unet.register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda _module, _args, given: seen.append(given["encoder_hidden_states"]), with_kwargs=True
    )
    return seen


def test_images_are_those_of_plain_diffusers(session: Load, model: list[str], file: str, tmp_path: Path) -> None:  # noqa: F811
    work = ["workload.prompt_count=2", "workload.batch_size=2", "workload.guidance_scale=4"]
    loaded = session(*model, *work, file)
    inputs = loaded._inputs[0]
    assert (inputs["prompt"], inputs["negative_prompt"]) == (PROMPTS, NEGATIVES)
    pipe = loaded._pipe
    size = {"height": 32, "width": 32}
    given = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "latents": inputs["latents"], "output_type": "np", **size}
    wanted = pipe(**given, num_inference_steps=1, guidance_scale=4.0).images
    assert np.array_equal(np.asarray(loaded._call().images), wanted)
    without = pipe(**given | {"negative_prompt": None}, num_inference_steps=1, guidance_scale=4.0).images
    assert not np.array_equal(without, wanted)
    draw = replace(timed_draw(loaded._variant), batch_size=1)
    records = [record for batch in range(2) for record in loaded.generate(batch, draw, tmp_path / "images").records]
    assert [record.negative for record in records] == NEGATIVES
    embedded = session(*model, *work, file, "memory=precomputed_embeddings")
    seen, plain = calls_of(embedded._pipe), calls_of(pipe)
    embedded._call(), loaded._call()
    assert torch.allclose(seen[0], plain[0], atol=1e-4)


def test_one_for_all_prompts(composer: type[HydraComposer], file: str) -> None:
    job = composer([f"{KEY}='blurry, grey'", "workload.prompts=[a,b]", "quality.prompt_count=1"])
    found = job.variant("it")
    assert found.negatives == ("blurry, grey",) * 2
    assert timed_draw(found).negatives == found.negatives
    assert found.texts == ("a", "b", "blurry, grey")
    assert found.other_work(composer(["workload.prompts=[a,b]"]).variant("plain"))
    with pytest.raises(UsageError, match=r"workload\.negative_prompt: has no effect without guidance"):
        job.variant("turbo", ["workload.guidance_scale=1"])
    assert composer([file]).variant("it").negatives == tuple(NEGATIVES)
    assert composer([]).variant("it").negatives == ()
    assert of_prompts(["a"]) != of_prompts(["a", "b"])


def test_of_a_measured_variant(result: StudyResult, tmp_path: Path) -> None:
    baseline, other = result.variant("baseline"), result.variant("bfloat16")
    workload = replace(other.config.workload, negative_prompt='grey, "dull"')
    other.config = replace(other.config, workload=workload)
    assert any("negative_prompt='grey, \"dull\"'" in line for line in lines_of(other, baseline))
    baseline.overrides += [f"{KEY}='grey'", "memory=[precomputed_embeddings]", "workload.guidance_scale=3"]
    write_result(result, tmp_path)
    pipe = sdopt.load(tmp_path, "baseline", prompts=PROMPTS)
    seen = calls_of(pipe)
    call = {"output_type": "latent", "num_inference_steps": 1}
    pipe(PROMPTS[0], **call)
    pipe(PROMPTS, **call)
    for states, count in zip(seen, (1, 2), strict=True):
        assert len(states) == 2 * count
        assert torch.equal(states[0], states[count - 1])
    with pytest.raises(UsageError, match="the prompt 'dull' was not encoded"):
        pipe(PROMPTS[0], negative_prompt="dull", **call)
    with pytest.raises(UsageError, match="a negative prompt for each prompt, or one"):
        pipe(PROMPTS, negative_prompt=["grey"], **call)
    plain = StableDiffusionPipeline.from_pretrained(MODEL, safety_checker=None, requires_safety_checker=False)
    own = calls_of(plain)
    plain(PROMPTS[0], negative_prompt="grey", guidance_scale=3.0, height=32, width=32, **call)
    assert torch.allclose(own[0], seen[0], atol=1e-4)
