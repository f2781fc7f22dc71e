"""DeepSpeed's blocks: which of a model's they can take the place of, and on a card that they draw what those do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sdopt.options.compiler.deepspeed import require_fitting
from tests.fixtures import Load
from tests.options.hosts import latents


@pytest.fixture
def half(session: Load) -> Any:
    """The packaged pipeline in float16."""
    return session("precision=fp16")._pipe


def first_block(unet: Any) -> Any:
    """The transformer block that runs first."""
    return next(block for block in unet.down_blocks if hasattr(block, "attentions")).attentions[0].transformer_blocks[0]


class TestRequireFitting:
    def test_blocks_of_the_packaged_model_fit(self, half: Any) -> None:
        require_fitting("0", first_block(half.unet))

    def test_others_say_what_they_lack(self, half: Any) -> None:
        block = first_block(half.unet).float()
        block.attn1.to_out[0].bias = None
        block.ff.net[0] = torch.nn.Identity()
        with pytest.raises(
            ValueError, match="needs a GEGLU, an output with bias, float16 weights, which the block 0 lacks"
        ):
            require_fitting("0", block)


@pytest.mark.gpu
@pytest.mark.slow  # DeepSpeed compiles its kernels first, which takes minutes
@pytest.mark.parametrize("option", ["attention=deepspeed", "compiler=deepspeed"])
def test_on_a_card_they_are_proved_and_give_the_latents_of_eager(on_cuda: Load, tmp_path: Path, option: str) -> None:
    work = ["precision=fp16", "workload.steps=4", "workload.size=128"]  # its kernels take no layer at 64
    replaced = on_cuda(*work, option)
    for _ in range(2):
        replaced.time_once()
    found = {item.axis: item for item in replaced.prove().evidence}
    assert found[option.partition("=")[0]].engaged, found
    ours, plain = latents(replaced, tmp_path / "replaced"), latents(on_cuda(*work), tmp_path / "eager")
    assert float((ours - plain).abs().mean()) < 0.05 * float(plain.std())
