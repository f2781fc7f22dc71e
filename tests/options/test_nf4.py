"""Weights in 4 bits by bitsandbytes: the layers that have them, and the images that they draw."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import evidence, image

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed"
)

DIT = ("model=emoji_dit", "workload.size=64", "workload.steps=2")


@pytest.mark.parametrize("weights", ["nf4", "fp4"])
@pytest.mark.walk(1)
def test_linear_layers_are_quantized_and_images_stay(
    session: Load, weights: str
) -> None:
    host = session(*DIT, "precision=nf4_bitsandbytes", f"precision.weights={weights}")
    found = evidence(host, "precision")
    assert found.engaged, found.summary
    assert found.facts["quantized"]["Linear"] > 40
    before, after = found.facts["weights_mib"]
    assert 0.25 < after / before < 0.5, (
        "4 of 16 bits, with the scales, and small layers"
    )
    plain = image(session(*DIT, "precision=bf16"))
    assert 0 < np.abs(image(host) - plain).mean() < 0.1


def test_a_layer_is_the_product_with_its_dequantized_weight(session: Load) -> None:
    denoiser = session(*DIT, "precision=nf4_bitsandbytes")._pipe.transformer
    layer = denoiser.transformer_blocks[0].attn.to_q
    original: Any = (
        session(*DIT, "precision=bf16")
        ._pipe.transformer.transformer_blocks[0]
        .attn.to_q
    )
    given = torch.randn(3, layer.in_features, dtype=torch.bfloat16)
    # By the eight nearest of sixteen levels: half a step of the coarsest is 0.14 of the largest of 64 weights.
    off = (layer(given) - original(given)).abs().mean() / original(given).abs().mean()
    assert 0.005 < off < 0.2


def test_a_layer_that_was_put_back_is_told(session: Load) -> None:
    host = session(*DIT, "precision=nf4_bitsandbytes")
    attention = host._pipe.transformer.transformer_blocks[0].attn
    attention.to_q = torch.nn.Linear(
        attention.to_q.in_features, attention.to_q.out_features
    ).bfloat16()
    assert not evidence(host, "precision").engaged


def test_what_would_leave_the_scales_behind_is_refused(variant: Compose) -> None:
    assert not variant(*DIT, "precision=nf4_bitsandbytes").conflicts(CPU)
    [reason] = variant(
        *DIT, "precision=nf4_bitsandbytes", "memory=group_offload"
    ).conflicts(CPU)
    assert "without the scales" in reason
    [reason] = variant(
        *DIT, "precision=nf4_bitsandbytes", "precision.activations=true"
    ).conflicts(CPU)
    assert "precision.activations=false" in reason
