"""DeepSpeed's blocks, of the package itself, with its CUDA kernels written out in PyTorch: the wiring is right.

The kernels follow csrc/transformer/inference/csrc/pt_binding.cpp and triton_ops.py of DeepSpeed 0.19.8.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdopt.measure.trace import Trace
from sdopt.optimizations import deepspeed as options
from sdopt.optimizations.compiler.deepspeed import DeepSpeed, replace_blocks, require_fitting
from tests.fixtures import Load
from tests.optimizations.compilers import latents


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


class Kernels:
    """What DeepSpeed's compiled modules offer, as far as its blocks call it."""

    def linear_layer_fp16(
        self, given: torch.Tensor, weight: Any, bias: Any, add_bias: bool, flash: bool, heads: int, *_: Any
    ) -> torch.Tensor:
        product: torch.Tensor = given @ weight + (bias if add_bias else 0)
        if not flash:
            return product
        size = given.shape[-1] // heads
        padded = 32 if size < 32 else 64 if size <= 64 else 128
        parts = product.unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.pad(parts, (0, padded - size))

    def __init__(self) -> None:
        self.allocated: list[tuple[Any, ...]] = []

    def allocate_workspace_fp16(self, *given: Any) -> None:
        self.allocated.append(given)

    def pad_transform_fp16(self, query: Any, key: Any, value: Any, heads: int, _flash: bool) -> list[torch.Tensor]:
        """It copies tokens in pairs: the last of an odd number is what was there before."""
        parts = [each.unflatten(-1, (heads, -1)).transpose(1, 2).clone() for each in (query, key, value)]
        for part in parts:
            part[:, :, part.shape[2] // 2 * 2 :] = torch.nan
        return parts

    def gated_activation(self, given: torch.Tensor, bias: torch.Tensor, _kind: Any) -> torch.Tensor:
        hidden, gate = (given + bias).chunk(2, dim=-1)
        return hidden * torch.nn.functional.gelu(gate.float()).half()

    def layer_norm(self, given: torch.Tensor, gain: Any, bias: Any, epsilon: float) -> torch.Tensor:
        """It reads the memory of a tensor from its start on, whatever its strides are."""
        given = given.as_strided(given.shape, (given.shape[1] * given.shape[2], given.shape[2], 1))
        return torch.nn.functional.layer_norm(given, gain.shape, gain, bias, epsilon)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_fp16") or name in ("release_workspace", "retake_workspace", "reset_cache"):
            return lambda *_: None
        raise AttributeError(name)


class Flash(torch.nn.Module):
    """The Triton kernel: it reads 64 tokens at a time, and computes attention over padded heads."""

    def forward(self, query: Any, key: Any, value: Any, scale: float, _block: bool) -> torch.Tensor:
        assert query.shape[2] % 64 == 0, "reads beyond the last token"
        scores: torch.Tensor = (query @ key.transpose(-1, -2) * scale).softmax(dim=-1)
        attended: torch.Tensor = scores @ value
        return attended


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The installed package with its kernels replaced by those that it returns."""
    pytest.importorskip("deepspeed")
    from deepspeed.ops.transformer.inference import bias_add, diffusers_attention
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    spatial = SimpleNamespace(nhwc_bias_add_add=lambda given, bias, other: given + bias + other)
    kernels = Kernels()
    monkeypatch.setattr(options, "_builders", lambda names: [])
    monkeypatch.setattr(BaseOp, "inference_module", kernels)
    monkeypatch.setattr(diffusers_attention, "triton_flash_attn", Flash)
    monkeypatch.setattr(bias_add, "spatial_cuda_module", spatial)
    return kernels


@pytest.mark.usefixtures("deepspeed")
class TestBlocks:
    def test_compute_what_those_of_diffusers_do(self, half: Any, deepspeed: Kernels) -> None:
        unet = half.unet
        width = first_block(unet).norm1.weight.shape[0]
        draw = torch.Generator().manual_seed(0)
        # As it comes out of a convolution.
        hidden = torch.randn(2, width, 8, 8, generator=draw).half().permute(0, 2, 3, 1).reshape(2, 64, width)
        assert not hidden.is_contiguous()
        states = torch.randn(2, 17, unet.config.cross_attention_dim, generator=draw).half()
        with torch.no_grad():
            expected = first_block(unet)(hidden, encoder_hidden_states=states)
            replace_blocks(unet)
            found = first_block(unet)(hidden, encoder_hidden_states=states)
        assert type(first_block(unet)).__name__ == "DeepSpeedDiffusersTransformerBlock"
        assert torch.allclose(found, expected, atol=2e-2)
        assert not torch.equal(found, hidden)
        [allocated] = deepspeed.allocated
        assert allocated[-2:] == (4096, 4096), "it may cut the workspace to what is free"

    def test_the_first_layer_that_runs_allocates_for_all(self, half: Any) -> None:
        for _ in range(2):
            unet = half.unet
            replace_blocks(unet)
            numbers = [m.config.layer_id for m in unet.modules() if type(m).__name__ == "DeepSpeedDiffusersAttention"]
            assert sorted(numbers) == list(range(len(numbers)))
            assert first_block(unet).attn_1.config.layer_id == 0
            half = SimpleNamespace(unet=type(unet).from_config(unet.config).half())

    @pytest.mark.parametrize("undone", [False, True])
    def test_are_proved_by_what_is_left_and_by_their_kernels(self, half: Any, undone: bool) -> None:
        kept = first_block(half.unet)
        proof = DeepSpeed().apply(half)
        trace = Trace()
        assert not proof(trace).engaged
        trace.kernels.update(
            {"void fused_gate_activation<__half>": 2, "void fused_ln<__half>": 2, "opt_bias_add_add": 2}
        )
        if undone:
            half.unet.down_blocks[-1].attentions[0].transformer_blocks[0] = kept
        assert proof(trace).engaged is not undone


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
