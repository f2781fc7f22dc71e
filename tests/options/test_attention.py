"""The kinds of attention that need another package or other weights: wiring, and what shows them."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0

from sdopt.measure import memory
from sdopt.measure.trace import StageTrace, Trace
from sdopt.options import attention, declarations
from sdopt.options.compiler import deepspeed
from sdopt.options.compiler.deepspeed import require_fitting
from sdopt.options.compiler.deepspeed_layers import ByHead, Layer
from tests.fixtures import Compose, Load
from tests.options.hosts import card, latents


def saw(operators: dict[str, int], kernels: dict[str, int] | None = None) -> Trace:
    trace = Trace(kernels=Counter(kernels or {}))
    trace.stages["denoiser"] = StageTrace(calls=2, operators=Counter(operators))
    return trace


class TestXformers:
    def test_is_told_from_pytorchs_own_by_its_operators(self, session: Load) -> None:
        loaded = session()
        proof = attention.Xformers().apply(loaded._pipe)
        both = {
            "aten::_efficient_attention_forward": 14,
            "aten::_scaled_dot_product_efficient_attention": 14,
        }
        for operators, engaged in (
            ({"xformers_flash::flash_fwd": 14}, True),
            ({"xformers_flash3::flash_fwd": 14}, True),
            ({"aten::_efficient_attention_forward": 14}, True),
            (both, False),
            (
                {
                    "aten::_flash_attention_forward": 14,
                    "aten::_scaled_dot_product_flash_attention": 14,
                },
                False,
            ),
            ({"aten::baddbmm": 14}, False),
        ):
            assert proof(saw(operators)).engaged == engaged, operators
        layer = next(
            m for m in loaded._pipe.unet.modules() if hasattr(m, "set_processor")
        )
        layer.set_processor(AttnProcessor2_0())
        assert not proof(saw({"xformers_flash::flash_fwd": 14})).engaged

    def test_is_told_by_its_kernels_within_a_graph(self, session: Load) -> None:
        proof = attention.Xformers().apply(session()._pipe)
        kernel = {
            "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)": 14
        }
        assert not proof(saw({}, kernel)).engaged
        for kernels, engaged in (
            (kernel, True),
            ({"triton_poi_fused_add_0": 14}, False),
        ):
            trace = saw({}, kernels)
            trace.denoiser.graph_launches = 2
            assert proof(trace).engaged == engaged


def test_sliced_is_told_by_its_softmaxes_within_a_graph(session: Load) -> None:
    pipe = session()._pipe
    proof = attention.Sliced().apply(pipe)
    for each, engaged in ((1, False), (2, True)):
        softmaxes = each * 2 * len(pipe.unet.attn_processors)
        trace = saw(
            {},
            {
                "void (anonymous namespace)::softmax_warp_forward<float, float, float, 6>": softmaxes
            },
        )
        assert proof(trace).engaged == engaged


class Config(SimpleNamespace):
    """Stands in for DeepSpeedInferenceConfig."""


class Reference(torch.nn.Module):
    """What DeepSpeedDiffusersAttention computes, in PyTorch: its weights are on the right of their products."""

    layer_id = 7

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.number = config, Reference.layer_id
        Reference.layer_id += 1

    def allocate_workspace(self, size: torch.Size) -> None:
        pass

    def forward(
        self, states: torch.Tensor, context: torch.Tensor | None = None
    ) -> torch.Tensor:
        own: Any = self
        if context is None:
            query, key, value = (states @ own.attn_qkvw).chunk(3, dim=-1)
        else:
            query, key, value = (
                states @ own.attn_qw,
                context @ own.attn_kw,
                context @ own.attn_vw,
            )
        heads = [
            x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)
            for x in (query, key, value)
        ]
        output = (
            torch.nn.functional.scaled_dot_product_attention(*heads)
            .transpose(1, 2)
            .flatten(2)
        )
        projected: torch.Tensor = output @ own.attn_ow + own.attn_ob
        return projected


class TestDeepSpeed:
    """Its kernels need a GPU; what is put around them does not."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepspeed, "_classes", lambda: (Reference, Config))
        monkeypatch.setattr(deepspeed, "_builders", lambda names: [])

    FP16 = ("attention=deepspeed", "precision=fp16")
    SD15 = ("model=sd15", "model.weights=random")

    def test_needs_what_compiles_its_kernels(
        self, variant: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(declarations, "find_spec", lambda name: None)
        # A toolkit that only runs what was compiled.
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        packages, toolkit = variant(*self.FP16, *self.SD15).conflicts(
            card(8, 0, known=True)
        )
        assert (
            "needs deepspeed, triton, ninja: pip install 'sdopt[deepspeed]'" in packages
        )
        assert "install the CUDA toolkit, and set CUDA_HOME" in toolkit
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
        assert variant(*self.FP16, *self.SD15).conflicts(card(8, 0, known=True)) == [
            packages
        ]

    def test_compiles_though_a_process_was_killed_while_it_compiled(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """PyTorch's lock is a file, for whose end every other process would wait."""
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        lock = tmp_path / "transformer_inference" / "lock"
        lock.parent.mkdir()
        lock.touch()
        seen: list[tuple[bool, str]] = []
        load = lambda: seen.append((lock.exists(), os.environ["TORCH_CUDA_ARCH_LIST"]))  # noqa: E731
        builder = SimpleNamespace(name=lock.parent.name, load=load)
        monkeypatch.setattr(deepspeed, "_builders", lambda names: [builder])
        deepspeed.compile_kernels("InferenceBuilder")
        assert seen == [(False, "9.0")]  # of 9.0a DeepSpeed makes no number

    def test_its_workspace_is_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held: list[int] = [0]
        monkeypatch.setattr(memory, "_elsewhere", [])
        monkeypatch.setattr(memory, "_free_bytes", lambda: 100 - max(held))
        allocate = deepspeed._counted(lambda size: held.append(size[0]))
        for batch in (2, 1, 2, 4, 2):
            allocate(torch.Size([batch, 64, 320]))
        assert sum(memory._elsewhere) == 4

    def test_every_layer_computes_what_it_did(self, session: Load) -> None:
        loaded = session("workload.size=64")
        unet = loaded._pipe.unet
        name, own = next(
            (name, layer)
            for name, layer in unet.named_modules()
            if name.endswith("attn2")
        )
        [expected] = loaded._call(output_type="np").images
        proof = deepspeed.Attention().apply(loaded._pipe)
        [found] = loaded._call(output_type="np").images
        assert np.abs(found - expected).max() < 1e-3
        layers = [m for m in loaded._pipe.unet.modules() if isinstance(m, Layer)]
        assert [layer.attention.number for layer in layers] == list(range(len(layers)))
        assert all(
            isinstance(layer.attention.pad_transform_func, ByHead) for layer in layers
        )
        config = layers[0].attention.config
        assert config.max_out_tokens == config.min_out_tokens == 64
        assert proof(
            saw({}, {"_fwd_kernel": 4, "void transform_0213<__half>(...)": 4})
        ).engaged
        assert not proof(saw({}, {"flash_fwd_kernel": 4})).engaged
        unet.set_submodule(name, own)
        assert not proof(saw({}, {"_fwd_kernel": 4})).engaged

    def test_takes_the_last_of_an_odd_number_of_tokens(self) -> None:
        query, key, value = (torch.randn(2, tokens, 24) for tokens in (64, 77, 77))
        found = ByHead()(query, key, value, 3, False)
        assert [tuple(each.shape) for each in found] == [
            (2, 3, 64, 8),
            (2, 3, 77, 8),
            (2, 3, 77, 8),
        ]
        assert torch.equal(found[1][:, 2, 76], key[:, 76, 16:])

    def test_a_layer_that_it_cannot_stand_in_for(self, session: Load) -> None:
        loaded = session()
        layer = next(
            m for name, m in loaded._pipe.unet.named_modules() if name.endswith("attn1")
        )
        layer.residual_connection = True
        with pytest.raises(
            ValueError,
            match=r"needs nothing but projections, which the layer .*attn1 lacks",
        ):
            deepspeed.Attention().apply(loaded._pipe)


def test_a_block_fits_or_says_what_it_lacks(session: Load) -> None:
    blocks: Any = session("precision=fp16")._pipe.unet.down_blocks
    block = (
        next(each for each in blocks if hasattr(each, "attentions"))
        .attentions[0]
        .transformer_blocks[0]
    )
    require_fitting("0", block)
    block.float()
    block.attn1.to_out[0].bias = None
    block.ff.net[0] = torch.nn.Identity()
    with pytest.raises(
        ValueError,
        match="a GEGLU, an output with bias, float16 weights, which the block 0 lacks",
    ):
        require_fitting("0", block)


@pytest.mark.gpu
@pytest.mark.slow  # DeepSpeed compiles its kernels first, which takes minutes
@pytest.mark.parametrize("option", ["attention=deepspeed", "compiler=deepspeed"])
def test_on_a_card_they_are_proved_and_give_the_latents_of_eager(
    on_cuda: Load, tmp_path: Path, option: str
) -> None:
    work = [
        "precision=fp16",
        "workload.steps=4",
        "workload.size=128",
    ]  # its kernels take no layer at 64
    replaced = on_cuda(*work, option)
    for _ in range(2):
        replaced.time_once()
    found = {item.axis: item for item in replaced.prove().evidence}
    assert found[option.partition("=")[0]].engaged, found
    ours, plain = (
        latents(replaced, tmp_path / "replaced"),
        latents(on_cuda(*work), tmp_path / "eager"),
    )
    assert float((ours - plain).abs().mean()) < 0.05 * float(plain.std())
