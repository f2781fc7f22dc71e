"""A LoRA for few steps of a user's own on a transformer: steps, its scale and guidance, each against all steps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sdopt.config.models import with_own_options
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.options.lora import Fused, NoLora
from sdopt.variant import Variant
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE
from tests.fixtures import CPU, Composers
from tests.options.hosts import proved
from tests.pipelines.tiny import tiny

HYPER = (
    *("transformer_blocks.0.norm1.linear", "transformer_blocks.1.attn.add_k_proj"),
    *("transformer_blocks.1.ff_context.net.0.proj", "context_embedder", "proj_out"),
    *("single_transformer_blocks.3.attn.to_q", "single_transformer_blocks.2.proj_mlp"),
)
"""Layers as Hyper-SD's LoRA for FLUX.1 [dev] updates them, by diffusers' names; Turbo-Alpha's has fewer."""


@pytest.fixture
def few_steps(tmp_path: Path) -> Path:
    network = tiny("flux").transformer
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in HYPER:
        rows, columns = network.get_submodule(name).weight.shape
        down = torch.randn(4, columns, generator=generator) / columns**0.5
        tensors[f"transformer.{name}.lora_A.weight"] = down
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(
            rows, 4, generator=generator
        )
    file = tmp_path / "Hyper-FLUX.1-dev-8steps-lora.safetensors"
    save_file(tensors, file)
    return file


def planned(composer: Composers, model: Path, lora: Path) -> dict[str, Variant]:
    words = [
        *SMOKE,
        "experiment=few_steps_lora",
        f"model={model}",
        f"lora.path={lora}",
        "workload.size=64",
        "workload.steps=28",
        "precision=fp32",
    ]
    composed = composer(with_own_options(words, options_of("model")))
    variants = composed.current.study.plan(composed).variants
    return {variant.name: variant for variant in variants}


def images_of(variant: Variant) -> tuple[np.ndarray, PipelineHost]:
    host = PipelineHost(variant, CPU)
    host.prepare()
    return host._read_inputs(host._inputs[0], 64)[0], host


def test_steps_are_the_fewest_and_the_most(composer: Composers) -> None:
    with pytest.raises(UsageError, match=r"^lora\.steps: List should have at least 2"):
        composer([*SMOKE, "lora=lcm_emoji", "lora.steps=[4]"])


def test_the_frontier_is_of_steps_scale_and_guidance(
    composer: Composers, tiny_folder: Callable[[str], Path], few_steps: Path
) -> None:
    variants = planned(composer, tiny_folder("flux"), few_steps)
    seen = set()
    for name, variant in variants.items():
        assert variant.conflicts(CPU) == [], name
        lora = variant.optimizations["lora"]
        if isinstance(lora, NoLora):
            assert "without it" in name or name.startswith("baseline")
            continue
        assert isinstance(lora, Fused)
        assert lora.path == str(few_steps)
        seen.add((variant.workload.steps, lora.scale, variant.guidance_scale))
        assert variant.overdone() == []
    assert len(seen) == 8
    assert {steps for steps, _, _ in seen} == {4, 8}
    assert {scale for _, scale, _ in seen} == {0.125, 1.0}
    assert {guidance for _, _, guidance in seen} == {1.0, 3.5}
    assert variants["baseline"].workload.steps == 28


def test_each_draws_what_the_fused_update_does(
    composer: Composers, tiny_folder: Callable[[str], Path], few_steps: Path
) -> None:
    variants = planned(composer, tiny_folder("flux"), few_steps)
    plain, host = images_of(variants["4 steps without it"])
    whole, fused = images_of(variants["4 steps"])
    assert proved(fused, "lora").engaged
    eighth, _ = images_of(variants["4 steps at an eighth"])
    unguided, _ = images_of(variants["4 steps, guidance 1"])
    assert np.abs(whole - plain).max() > 1e-2
    assert np.abs(unguided - whole).max() > 1e-3
    assert np.abs(eighth - plain).mean() < 0.5 * np.abs(whole - plain).mean()
    tensors = load_file(few_steps)
    with torch.no_grad():
        for name in HYPER:
            down, up = (
                tensors[f"transformer.{name}.lora_{one}.weight"] for one in "AB"
            )
            host._pipe.transformer.get_submodule(name).weight.add_(up @ down)
    by_hand = host._read_inputs(host._inputs[0], 64)[0]
    assert np.abs(by_hand - whole).max() < 1e-4
