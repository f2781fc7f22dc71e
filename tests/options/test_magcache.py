"""MagCache on transformers: the steps that it skips, against diffusers', and what it is refused for."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, MagCacheConfig
from diffusers.hooks import apply_mag_cache

from sdopt.errors import UsageError
from sdopt.options.block_caches import same_weights, weights_sample
from sdopt.options.caching import WholeSteps
from sdopt.options.magcache import (
    FOLDER,
    MagCache,
    Magnitudes,
    magnitudes_as_json,
    read_magnitudes,
)
from sdopt.reference import MODEL
from sdopt.schema import Model
from tests.command import sdopt
from tests.fixtures import CPU, Compose
from tests.options.applied import PROMPTS, STEPS, Applied, context_of, far
from tests.pipelines.tiny import TINY, tiny

FAST = ("flux", "z_image")

EVERY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TINY
]

Measure = Callable[[str], Path]


@pytest.fixture(scope="module")
def ratios(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Measures the ratios of a tiny pipeline, once; returns their file."""
    folder = tmp_path_factory.mktemp("ratios")

    def measured(name: str) -> Path:
        file = folder / f"{name}.json"
        if not file.exists():
            _, finding, _ = Applied(name, {"caching": MagCache(measure=True)}).traced()
            assert finding.engaged, finding.summary
            file.write_bytes(
                magnitudes_as_json(Magnitudes(name, STEPS, **finding.facts))
            )
        return file

    return measured


def test_the_steps_are_those_of_the_algorithm() -> None:
    option = MagCache(threshold=0.12, max_skip_steps=2, retention_ratio=0.2)
    # 1.05 is off by 0.05; 1.05² by another 0.1025, which is too much: so every second step is skipped.
    assert option.runs([1.0, 1.05, 1.05, 1.05, 1.05, 1.05, 1.05]) == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    # Nothing changes: two in a row at most, and none in the first fifth.
    assert option.runs([1.0] * 10) == [
        True,
        True,
        False,
        False,
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert all(option.runs([1.0, *[2.0] * 9]))
    assert all(MagCache(threshold=10, retention_ratio=0.99).runs([1.0] * 10))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.walk(1)
def test_all_blocks_of_each_branch_are_skipped_in_the_same_steps(
    name: str, ratios: Measure
) -> None:
    option = MagCache(path=str(ratios(name)), threshold=10)
    applied = Applied(name, {"caching": option})
    images, finding, trace = applied.traced()
    assert finding.engaged, finding.summary
    branches = read_magnitudes(ratios(name)).ratios
    skipped = [option.runs(branch).count(False) for branch in branches]
    assert finding.facts["outer"] == sum(skipped) > 0
    assert trace.denoiser.calls == STEPS * len(branches)
    plain = Applied(name, {"caching": WholeSteps()}).images()
    assert far(images, plain) > 1e-4
    assert np.isfinite(images).all()
    assert far(applied.images(PROMPTS[:1]), images[:1]) < 1e-3, "as alone"


def test_measuring_and_skipping_are_as_in_diffusers(
    ratios: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = read_magnitudes(ratios("flux"))
    by_hand = Applied("flux", {"caching": WholeSteps()})
    capsys.readouterr()
    config = MagCacheConfig(calibrate=True, num_inference_steps=STEPS)
    apply_mag_cache(by_hand.pipe.transformer, config)
    by_hand.images()
    printed = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("[1.0, ")
    )
    [ours] = measured.ratios
    assert ast.literal_eval(printed) == pytest.approx(ours, rel=1e-4)

    option = MagCache(path=str(ratios("flux")), threshold=0.2, max_skip_steps=2)
    assert 1 < option.runs(ours).count(False) < STEPS - 2
    config = MagCacheConfig(
        threshold=0.2, max_skip_steps=2, num_inference_steps=STEPS, mag_ratios=ours
    )
    theirs = Applied("flux", {"caching": WholeSteps()})
    apply_mag_cache(theirs.pipe.transformer, config)
    assert far(Applied("flux", {"caching": option}).images(), theirs.images()) < 1e-5


def test_without_its_functions_is_told(ratios: Measure) -> None:
    applied = Applied(
        "flux", {"caching": MagCache(path=str(ratios("flux")), threshold=10)}
    )
    for _, block in applied.pipe.transformer.named_modules():
        vars(block).pop("forward", None)
    assert not applied.traced()[1].engaged


def test_ratios_of_other_timesteps_weights_or_branches_are_refused(
    ratios: Measure, tmp_path: Path
) -> None:
    applied = Applied(
        "flux", {"caching": MagCache(path=str(ratios("flux")), threshold=10)}
    )
    with pytest.raises(UsageError, match="its ratios are of the timesteps of 6 steps"):
        applied.images(num_inference_steps=STEPS + 1)
    scheduler = applied.pipe.scheduler
    applied.pipe.scheduler = scheduler.from_config(
        scheduler.config, use_dynamic_shifting=False, shift=2.0
    )
    with pytest.raises(UsageError, match="its ratios are of the timesteps"):
        applied.images()

    trained = tiny("flux")
    with torch.no_grad():
        for weight in trained.transformer.parameters():
            weight.add_(
                torch.randn_like(weight), alpha=0.02 * float(weight.std(correction=0))
            )
    with pytest.raises(UsageError, match="other weights"):
        MagCache(path=str(ratios("flux"))).apply(trained)

    measured = read_magnitudes(ratios("chroma"))
    unguided = tmp_path / "unguided.json"
    unguided.write_bytes(
        magnitudes_as_json(replace(measured, ratios=measured.ratios[:1]))
    )
    with pytest.raises(UsageError, match="without this branch"):
        Applied("chroma", {"caching": MagCache(path=str(unguided))}).images()


def test_weights_are_known_in_any_type() -> None:
    denoiser = tiny("flux").transformer
    sample = weights_sample(denoiser)
    assert same_weights(weights_sample(denoiser.to(torch.bfloat16)), sample)
    assert not same_weights(sample[:-4], sample)


def test_weights_of_few_matrices_are_known_up_to_the_last() -> None:
    last = torch.nn.Linear(4, 4)
    denoiser = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)), last)
    before = weights_sample(denoiser)
    with torch.no_grad():
        last.weight.add_(1.0)
    assert not same_weights(weights_sample(denoiser), before)


@pytest.mark.parametrize(
    "file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem
)
def test_those_that_come_with_sdopt_are_of_the_packaged_weights(file: Path) -> None:
    measured = read_magnitudes(file)
    denoiser = FluxTransformer2DModel.from_pretrained(
        MODEL.with_name(measured.model), subfolder="transformer"
    )
    assert same_weights(weights_sample(denoiser), measured.weights)
    assert file.stem == f"{measured.model}-{measured.steps}"
    assert {len(ratios) for ratios in measured.ratios} == {measured.steps}


def test_what_was_not_measured_is_refused_before_anything_is_loaded(
    variant: Compose,
) -> None:
    model = ("model=emoji_dit", "caching=magcache")
    assert not variant(*model, "workload.steps=25").conflicts(CPU)
    [reason] = variant(*model, "workload.steps=24").conflicts(CPU)
    assert "sdopt calibrate --magnitudes" in reason
    [reason] = variant("model=emoji", "caching=magcache").conflicts(CPU)
    assert "choose caching=deepcache" in reason
    [reason] = variant(*model, "workload.steps=25", "caching.threshold=1e-9").conflicts(
        CPU
    )
    assert "all of 25 steps" in reason


def test_the_ratios_of_a_program_s_own_pipeline_are_found_by_its_weights(
    ratios: Measure,
) -> None:
    pipe = tiny("flux")
    ctx = context_of(pipe)
    networks: dict[str, Any] = {"networks": {"transformer": pipe.transformer}}
    known = replace(ctx, model=replace(ctx.model, **networks))
    assert MagCache(path=str(ratios("flux"))).lacking(known) == []
    assert MagCache().lacking(known), "none that come with sdopt are of these weights"
    assert isinstance(known.model, Model)


@pytest.mark.slow
def test_the_command_writes_what_the_option_reads(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "ratios.json"
    work = ("model=emoji_dit", "workload.steps=4")
    finished = sdopt(
        tmp_path,
        "calibrate",
        "--magnitudes",
        *work,
        "hardware.exclusive=false",
        "--output",
        str(file),
    )
    assert finished.code == 0, finished.err
    measured = read_magnitudes(file)
    assert [len(ratios) for ratios in measured.ratios] == [4, 4], (
        "for each branch of guidance"
    )
    assert (measured.steps, measured.images, measured.guidance_scale) == (4, 8, 3.0)
    # Only now: the command composes by a Hydra of its own.
    variant: Compose = request.getfixturevalue("variant")
    options = ("caching=magcache", f"caching.path={file}", "caching.threshold=10")
    assert not variant(*work, *options).conflicts(CPU)
    [reason] = variant("model=emoji_dit", "workload.steps=5", *options).conflicts(CPU)
    assert "are of 4" in reason


def test_those_of_an_image_that_is_begun_with_are_of_the_steps_that_run(
    variant: Compose, tmp_path: Path
) -> None:
    """At half its strength, 13 of 25 steps run, and there are ratios of 13."""
    shipped = read_magnitudes(FOLDER / "emoji_dit-25.json")
    short = replace(
        shipped,
        timesteps=shipped.timesteps[-13:],
        ratios=[ratios[-13:] for ratios in shipped.ratios],
    )
    file = tmp_path / "ratios.json"
    file.write_bytes(magnitudes_as_json(short))
    half = ("model=emoji_dit", "workload.steps=25", "task=img2img", "task.strength=0.5")
    chosen = (*half, "caching=magcache")
    assert not variant(*chosen, f"caching.path={file}").conflicts(CPU)
    [reason] = variant(*chosen).conflicts(CPU)
    assert "at 13 steps" in reason
    assert "workload.steps=25" in reason
