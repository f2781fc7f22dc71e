"""Precision: weights in 8 or 4 bits, and half precision with a VAE of its own type or of its own weights."""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AsymmetricAutoencoderKL,
    AutoencoderKL,
    AutoencoderTiny,
    UNet2DConditionModel,
)

from sdopt.measure.trace import Trace
from sdopt.options import Contract
from sdopt.options.precision import _run_in_own_type
from sdopt.options.quantization import Sdnq, TorchAo
from sdopt.pipelines.parts import bytes_of
from sdopt.reference import MODEL
from sdopt.worker.host import PipelineHost
from tests.fixtures import Compose, Load
from tests.options.hosts import evidence, image
from tests.pipelines.test_models import small_xl  # noqa: F401

# Not by importing them: SDNQ decides then whether it compiles, and the option tells it before.
NEEDS_TORCHAO, NEEDS_SDNQ = (
    pytest.mark.skipif(find_spec(kind) is None, reason=kind)
    for kind in ("torchao", "sdnq")
)
OPTIONS = [
    pytest.param("torchao", marks=NEEDS_TORCHAO),
    pytest.param("sdnq", marks=NEEDS_SDNQ),
]


class TestOptions:
    @NEEDS_TORCHAO
    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    def test_inductor_tunes_no_kernel_for_torchao(self, kind: str) -> None:
        """TorchAO would have it tune each by coordinate descent: many minutes, whose gain is none of 8 bits.

        What Inductor is told holds for one thread, and others may make the calls: it is told in each.
        """
        from torch._inductor import config

        layer, fused = torch.nn.Sequential(torch.nn.Linear(64, 64)), []
        option = TorchAo(
            weights={"int8": "int8", "fp8": "float8_e4m3fn"}[kind],
            activations=kind == "int8",
        )

        def call() -> None:
            with option.context(None):
                fused.append(config.force_fuse_int_mm_with_mul)

        with config.patch(
            coordinate_descent_tuning=False, force_fuse_int_mm_with_mul=False
        ):
            option._quantize(layer)
            thread = Thread(target=call)
            thread.start()
            thread.join()
            assert not config.coordinate_descent_tuning
            assert not config.force_fuse_int_mm_with_mul
        assert fused == [kind == "int8"]

    @pytest.mark.parametrize("package", ["torchao", "sdnq"])
    def test_it_is_for_memory_and_where_products_are_in_8_bits_for_latency(
        self, variant: Compose, package: str
    ) -> None:
        whole = variant(f"precision=int8_{package}").optimizations["precision"]
        stored = variant(
            f"precision=int8_{package}", "precision.activations=false"
        ).optimizations["precision"]
        assert whole.contract is stored.contract is Contract.LOSSY
        assert whole.claims == {"latency", "memory"}
        assert stored.claims == {"memory"}


def test_torch_ao_leaves_layers_alone_that_it_would_multiply_on_the_host() -> None:
    """As those of a LoRA of rank 4: a product of 8-bit numbers on a GPU takes sides of multiples of 8."""
    pytest.importorskip("torchao")
    layers = torch.nn.ModuleDict(
        {
            "to_q": torch.nn.Linear(64, 64),
            "lora_A": torch.nn.Linear(64, 4),
            "lora_B": torch.nn.Linear(4, 64),
        }
    )
    layers["time_emb_proj"] = torch.nn.Linear(64, 64)
    option = TorchAo()
    option._quantize(layers)
    assert [name for name, layer in layers.items() if option._is_quantized(layer)] == [
        "to_q"
    ]


@pytest.mark.parametrize("cuda", [True, False])
def test_sdnq_lets_triton_allocate_memory_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    """A kernel of SDNQ that describes its matrices on the card raises an error without it."""
    allocators: list[Any] = []
    sdnq, triton = ModuleType("sdnq"), ModuleType("triton")
    monkeypatch.setattr(
        sdnq, "sdnq_post_load_quant", lambda *_, **__: None, raising=False
    )
    monkeypatch.setattr(triton, "set_allocator", allocators.append, raising=False)
    monkeypatch.setitem(sys.modules, "sdnq", sdnq)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr("sdopt.options.quantization.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Sdnq()._quantize(torch.nn.Linear(64, 64))
    assert len(allocators) == cuda


class TestProof:
    @pytest.mark.parametrize("package", OPTIONS)
    def test_counts_layers_and_products(self, session: Load, package: str) -> None:
        # Layers of few rows are computed in float32: on a smaller image there are more of them.
        loaded = session(f"precision=int8_{package}", "workload.size=64")
        found = evidence(loaded, "precision")
        assert found.engaged, found
        quantized, left = found.facts["quantized"], found.facts["left_alone"]
        assert quantized["Linear"] + left["Linear"] == 80
        assert quantized.get("Conv2d", 0) + left["Conv2d"] == 39
        assert (quantized.get("Conv2d", 0) > 20) == (package == "sdnq")
        assert found.facts["kernels"]["aten::_int_mm"] >= quantized["Linear"]
        assert "int8" in found.facts["arithmetic"]
        assert f"{quantized['Linear']} of 80 Linear" in found.summary
        before, after = found.facts["weights_mib"]
        assert 0.4 * before < after < before
        other = Trace()
        other.denoiser.product_dtypes["bfloat16"] = 100
        assert not loaded._assembly.proofs["precision"](other).engaged
        attention: Any = (
            loaded._pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
        )
        before = attention.to_q
        attention.to_q = torch.nn.Linear(
            before.in_features, before.out_features, bias=False, dtype=torch.bfloat16
        )
        assert not evidence(loaded, "precision").engaged

    @pytest.mark.parametrize(
        "option",
        [
            pytest.param("fp8_torchao", marks=NEEDS_TORCHAO),
            pytest.param("int8_sdnq", marks=[pytest.mark.slow, NEEDS_SDNQ]),
            pytest.param("uint4_sdnq", marks=NEEDS_SDNQ),
        ],
    )
    def test_of_weights_alone_that_are_stored_in_few_bits(
        self, session: Load, option: str
    ) -> None:
        loaded = session(f"precision={option}", "precision.activations=false")
        found = evidence(loaded, "precision")
        assert found.engaged, found
        assert found.facts["arithmetic"] == ["bfloat16"]
        assert 0 < np.abs(image(loaded) - image(session())).mean() < 0.15
        other = Trace()
        other.denoiser.operators["aten::_int_mm"] = other.denoiser.operators[
            "aten::_scaled_mm"
        ] = 2
        # No product has inputs of 4 bits.
        assert loaded._assembly.proofs["precision"](other).engaged == (
            option == "uint4_sdnq"
        )

    @NEEDS_SDNQ
    def test_a_part_of_low_rank_brings_4_bits_nearer_to_the_weights(
        self, variant: Compose
    ) -> None:
        """It starts from random numbers, which are the same each time."""
        option: Any = variant("precision=uint4_sdnq").optimizations["precision"]
        sample = torch.randn(
            2, 8, 4, 4, generator=torch.Generator().manual_seed(0)
        ).bfloat16()

        def predicted(chosen: Sdnq | None) -> torch.Tensor:
            unet = UNet2DConditionModel.from_pretrained(
                MODEL, subfolder="unet", dtype=torch.bfloat16
            )
            if chosen is not None:
                chosen._quantize(unet)
            with torch.no_grad():
                found: torch.Tensor = unet(
                    sample, 500, torch.ones(2, 24, 144, dtype=torch.bfloat16)
                ).sample
            return found.float()

        plain, state = predicted(None), torch.get_rng_state()
        ranked = predicted(option)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(1)
        assert torch.equal(predicted(option), ranked)
        unranked = predicted(replace(option, svd_rank=None))
        assert 0 < (ranked - plain).norm() < (unranked - plain).norm()

    @NEEDS_SDNQ
    def test_of_convolutions_that_were_left_alone(
        self, session: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        quantize = Sdnq._quantize
        monkeypatch.setattr(
            Sdnq,
            "_quantize",
            lambda own, unet: quantize(replace(own, convolutions=False), unet),
        )
        found = evidence(session("precision=int8_sdnq"), "precision")
        assert not found.engaged
        assert "0 of 39 Conv2d" in found.summary

    @NEEDS_SDNQ
    @pytest.mark.parametrize("caching", ["none", "deepcache"])
    def test_of_replayed_graphs_is_what_is_stored(
        self, session: Load, caching: str
    ) -> None:
        """Those of DeepCache's two kinds of steps, too, in which no operator is seen."""
        captured = (
            "compiler=cuda_graphs",
            "compiler.targets=[denoiser]",
            f"caching={caching}",
        )
        assert (
            session("precision=int8_sdnq", *captured)
            ._assembly.proofs["precision"](Trace())
            .engaged
        )


@NEEDS_SDNQ
def test_text_encoders_hold_fewer_bytes_and_show_it(session: Load) -> None:
    option = [
        "memory=[quantized_text_encoders]",
        "memory.quantized_text_encoders.weights=uint4",
    ]
    quantized, plain = session(*option), session()

    def size(host: PipelineHost) -> int:
        network = host._pipe.text_encoder
        layers = getattr(network, "text_model", network).encoder.parameters()
        return sum(weight.numel() * weight.element_size() for weight in layers)

    found = evidence(quantized, "memory")
    assert found.engaged, found
    counts = {"quantized": 18, "left_alone": 0, "by_encoder": {"text_encoder": 18}}
    before, after = found.facts["weights_mib"]["text_encoder"]
    sizes = {"calls": found.facts["calls"], "weights_mib": found.facts["weights_mib"]}
    assert found.facts == counts | sizes
    assert before == pytest.approx(bytes_of(plain._pipe.text_encoder) / 2**20, 1e-3)
    assert after < before
    assert f"text_encoder {before:.1f} → {after:.1f} MiB" in found.summary
    assert size(quantized) < 0.25 * size(plain)
    encoder = quantized._pipe.text_encoder
    name, layer = next(
        (n, m) for n, m in encoder.named_modules() if hasattr(m, "sdnq_dequantizer")
    )
    encoder.set_submodule(name, torch.nn.Linear(layer.in_features, layer.out_features))
    assert not evidence(quantized, "memory").engaged


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    "package",
    # SDNQ tries out kernels for a minute, and needs a part of its own in `gpu-suite`.
    [
        pytest.param("torchao", marks=NEEDS_TORCHAO),
        pytest.param("sdnq", marks=[pytest.mark.slow, NEEDS_SDNQ]),
    ],
)
def test_on_cuda_products_run_in_8_bits(on_cuda: Load, package: str, kind: str) -> None:
    found = evidence(on_cuda(f"precision={kind}_{package}"), "precision")
    assert found.engaged, found


@pytest.fixture
def xl(small_xl: Path) -> list[str]:  # noqa: F811
    return ["model=folder", f"model.path={small_xl}", "model.size=64"]


class TestFullVae:
    def test_of_sdxl_is_not_cast_by_diffusers(
        self, session: Load, xl: list[str], inputs: dict[str, list[str]]
    ) -> None:
        loaded = session(
            *xl, "precision=fp16_vae_fp32", *inputs["img2img"], "workload.steps=2"
        )
        found = evidence(loaded, "precision")
        assert found.engaged, found
        assert found.facts["diffusers_would_upcast"] is True

    def test_keeps_what_half_precision_rounds(self, session: Load) -> None:
        whole: Any = AutoencoderKL.from_pretrained(
            MODEL, subfolder="vae"
        ).decoder.conv_in.weight
        assert not torch.equal(whole.bfloat16().float(), whole)
        loaded = session("precision=fp16_vae_fp32", "precision.weights=bfloat16")
        assert torch.equal(loaded._pipe.vae.decoder.conv_in.weight, whole)

    def test_of_another_kind_gets_all_inputs_in_its_type_and_encodes_in_that_of_the_image(
        self,
    ) -> None:
        picture, mask = torch.rand(1, 3, 16, 16).half(), torch.ones(1, 1, 16, 16).half()
        masked = AsymmetricAutoencoderKL(norm_num_groups=8)
        tiny = AutoencoderTiny(
            decoder_block_out_channels=(8, 8, 8, 8),
            encoder_block_out_channels=(8, 8, 8, 8),
        )
        for vae, others in ((masked, {"image": picture, "mask": mask}), (tiny, {})):
            _run_in_own_type(vae)
            with torch.no_grad():
                assert (
                    vae.decode(torch.rand(1, 4, 16, 16).half(), **others).sample.dtype
                    == torch.float32
                )
                found = vae.encode(picture)
            latents = found.latents if vae is tiny else found.latent_dist.mode()
            assert latents.dtype == torch.float16

    def test_of_random_weights(self, variant: Compose) -> None:
        chosen = variant(
            "precision=fp16_vae_fp32", "model=emoji", "model.weights=random"
        )
        [vae] = (
            chosen.optimizations["precision"]
            .parts(chosen.model, torch.float16)
            .values()
        )
        assert vae.dtype == torch.float32


def test_a_fixed_vae_decodes_in_half_precision_and_without_it_diffusers_in_float32(
    session: Load, xl: list[str]
) -> None:
    """The small model's own VAE stands for the one that fits into half precision."""
    loaded = session(
        *xl, "precision=fp16_vae_fix", f"precision.path={xl[1].partition('=')[2]}/vae"
    )
    found = evidence(loaded, "precision")
    assert found.engaged, found
    assert found.facts["vae_weights"] == found.facts["vae_products"] == ["float16"]
    loaded._pipe.vae.register_to_config(force_upcast=True)
    with pytest.warns(FutureWarning, match="upcast_vae"):
        found = evidence(loaded, "precision")
    assert not found.engaged
    assert found.facts["vae_products"] == ["float32"]
