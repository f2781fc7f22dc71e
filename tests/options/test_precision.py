"""Precision: weights in 8 or 4 bits, and half precision with a VAE of its own type or of its own weights."""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sdopt.measure.trace import Trace
from sdopt.options import Contract
from sdopt.options.quantization import Sdnq, TorchAo
from sdopt.worker.host import PipelineHost
from tests.fixtures import Compose, Load
from tests.options.hosts import evidence
from tests.pipelines.test_models import small_xl  # noqa: F401

PACKAGES = ("torchao", "sdnq")
OPTIONS = [pytest.param(kind, marks=pytest.mark.skipif(find_spec(kind) is None, reason=kind)) for kind in PACKAGES]


class TestOptions:
    @pytest.mark.skipif(find_spec("torchao") is None, reason="torchao")
    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    def test_inductor_tunes_no_kernel_for_torchao(self, kind: str) -> None:
        """TorchAO would have it tune each by coordinate descent: many minutes, whose gain is none of 8 bits."""
        from torch._inductor import config

        layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
        with config.patch(coordinate_descent_tuning=False, force_fuse_int_mm_with_mul=False):
            TorchAo(weights={"int8": "int8", "fp8": "float8_e4m3fn"}[kind], activations=kind == "int8")._quantize(layer)
            assert not config.coordinate_descent_tuning
            assert config.force_fuse_int_mm_with_mul is (kind == "int8")

    @pytest.mark.parametrize("package", PACKAGES)
    def test_it_is_for_memory_and_where_products_are_in_8_bits_for_latency(
        self, variant: Compose, package: str
    ) -> None:
        whole = variant(f"precision=int8_{package}").optimizations["precision"]
        stored = variant(f"precision=int8_{package}", "precision.activations=false").optimizations["precision"]
        assert whole.contract is stored.contract is Contract.LOSSY
        assert whole.claims == {"latency", "memory"}
        assert stored.claims == {"memory"}


def test_torch_ao_leaves_layers_alone_that_it_would_multiply_on_the_host() -> None:
    """As those of a LoRA of rank 4: a product of 8-bit numbers on a GPU takes sides of multiples of 8."""
    pytest.importorskip("torchao")
    layers = torch.nn.ModuleDict(
        {"to_q": torch.nn.Linear(64, 64), "lora_A": torch.nn.Linear(64, 4), "lora_B": torch.nn.Linear(4, 64)}
    )
    layers["time_emb_proj"] = torch.nn.Linear(64, 64)
    option = TorchAo()
    option._quantize(layers)
    assert [name for name, layer in layers.items() if option._is_quantized(layer)] == ["to_q"]


@pytest.mark.parametrize("cuda", [True, False])
def test_sdnq_lets_triton_allocate_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    """A kernel of SDNQ that describes its matrices on the card raises an error without it."""
    allocators: list[Any] = []
    sdnq, triton = ModuleType("sdnq"), ModuleType("triton")
    monkeypatch.setattr(sdnq, "sdnq_post_load_quant", lambda *_, **__: None, raising=False)
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
        found = evidence(session(f"precision=int8_{package}", "workload.size=64"), "precision")
        assert found.engaged, found
        quantized, left = found.facts["quantized"], found.facts["left_alone"]
        assert quantized["Linear"] + left["Linear"] == 80
        assert quantized.get("Conv2d", 0) + left["Conv2d"] == 39
        assert (quantized.get("Conv2d", 0) > 20) == (package == "sdnq")
        assert found.facts["kernels"]["aten::_int_mm"] >= quantized["Linear"]
        assert "int8" in found.facts["arithmetic"]
        assert f"{quantized['Linear']} of 80 Linear" in found.summary

    def test_a_part_of_low_rank_brings_4_bits_nearer_to_the_weights(self, session: Load) -> None:
        """It starts from random numbers, which are the same each time."""
        pytest.importorskip("sdnq")
        inputs = (torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0)), 500, torch.ones(2, 24, 144))

        def predicted(*overrides: str) -> torch.Tensor:
            unet = session(*overrides)._pipe.unet
            with torch.no_grad():
                found: torch.Tensor = unet(inputs[0].to(unet.dtype), 500, inputs[2].to(unet.dtype)).sample
            return found.float()

        plain, state = predicted("precision=bf16"), torch.get_rng_state()
        ranked = predicted("precision=uint4_sdnq")
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(1)
        assert torch.equal(predicted("precision=uint4_sdnq"), ranked)
        unranked = predicted("precision=uint4_sdnq", "precision.svd_rank=null")
        assert 0 < (ranked - plain).norm() < (unranked - plain).norm()

    @pytest.mark.skipif(find_spec("sdnq") is None, reason="sdnq")
    def test_of_convolutions_that_were_left_alone(self, session: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        quantize = Sdnq._quantize
        monkeypatch.setattr(Sdnq, "_quantize", lambda own, unet: quantize(replace(own, convolutions=False), unet))
        found = evidence(session("precision=int8_sdnq"), "precision")
        assert not found.engaged
        assert "0 of 39 Conv2d" in found.summary

    @pytest.mark.parametrize("package", OPTIONS)
    @pytest.mark.parametrize("activations", [True, False])
    def test_of_products_in_another_type_than_they_should_be(
        self, session: Load, package: str, activations: bool
    ) -> None:
        loaded = session(f"precision=int8_{package}", f"precision.activations={activations}")
        trace = Trace()
        trace.denoiser.product_dtypes["bfloat16"] = 100 * activations
        trace.denoiser.operators["aten::_int_mm"] = 2 * (not activations)
        assert not loaded._assembly.proofs["precision"](trace).engaged

    @pytest.mark.parametrize("package", OPTIONS)
    def test_of_replayed_graphs_is_what_is_stored(self, session: Load, package: str) -> None:
        """Those of DeepCache's two kinds of steps, too, in which no operator is seen."""
        chosen = [f"precision=int8_{package}", "compiler=cuda_graphs", "compiler.targets=[denoiser]"]
        for caching in ("none", "deepcache"):
            proofs = session(*chosen, f"caching={caching}")._assembly.proofs
            assert proofs["precision"](Trace()).engaged


@pytest.mark.parametrize("weights", ["int8", "uint4"])
def test_text_encoders_hold_fewer_bytes_and_show_it(session: Load, weights: str) -> None:
    pytest.importorskip("sdnq")
    option = ["memory=[quantized_text_encoders]", f"memory.quantized_text_encoders.weights={weights}"]
    quantized, plain = session(*option), session()

    def size(host: PipelineHost) -> int:
        network = host._pipe.text_encoder
        layers = getattr(network, "text_model", network).encoder.parameters()
        return sum(weight.numel() * weight.element_size() for weight in layers)

    found = evidence(quantized, "memory")
    assert found.engaged, found
    assert found.facts == {"quantized": 18, "left_alone": 0, "calls": found.facts["calls"]}
    assert size(quantized) < size(plain) * (0.3 if weights == "int8" else 0.25)
    encoder = quantized._pipe.text_encoder
    name, layer = next((n, m) for n, m in encoder.named_modules() if hasattr(m, "sdnq_dequantizer"))
    encoder.set_submodule(name, torch.nn.Linear(layer.in_features, layer.out_features))
    assert not evidence(quantized, "memory").engaged


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    "package",
    # SDNQ tries out kernels for a minute, and needs a part of its own in `gpu-suite`.
    [pytest.param("torchao"), pytest.param("sdnq", marks=pytest.mark.slow)],
)
def test_on_cuda_products_run_in_8_bits(on_cuda: Load, package: str, kind: str) -> None:
    pytest.importorskip(package)
    found = evidence(on_cuda(f"precision={kind}_{package}"), "precision")
    assert found.engaged, found


@pytest.fixture
def xl(small_xl: Path) -> list[str]:  # noqa: F811
    return ["model=folder", f"model.path={small_xl}", "model.size=64"]


class TestFullVae:
    @pytest.mark.parametrize("task", ["txt2img", "img2img"])
    def test_of_sdxl_is_not_cast_by_diffusers(
        self, session: Load, xl: list[str], inputs: dict[str, list[str]], task: str
    ) -> None:
        loaded = session(*xl, "precision=fp16_vae_fp32", *inputs[task], "workload.steps=2")
        found = evidence(loaded, "precision")
        assert found.engaged, found
        assert found.facts["diffusers_would_upcast"] is True

    def test_keeps_what_half_precision_rounds(self, session: Load) -> None:
        own = session("precision=fp16_vae_fp32")._pipe.vae.decoder.conv_in.weight
        assert torch.equal(own, session("precision=fp32")._pipe.vae.decoder.conv_in.weight)
        rounded = session("precision=fp16")._pipe.vae.decoder.conv_in.weight
        assert torch.equal(own.half(), rounded)

    def test_of_random_weights(self, variant: Compose) -> None:
        chosen = variant("precision=fp16_vae_fp32", "model=emoji", "model.weights=random")
        [vae] = chosen.optimizations["precision"].parts(chosen.model, torch.float16).values()
        assert vae.dtype == torch.float32


def test_a_fixed_vae_decodes_in_half_precision_and_without_it_diffusers_in_float32(
    session: Load, xl: list[str]
) -> None:
    """The small model's own VAE stands for the one that fits into half precision."""
    loaded = session(*xl, "precision=fp16_vae_fix", f"precision.path={xl[1].partition('=')[2]}/vae")
    found = evidence(loaded, "precision")
    assert found.engaged, found
    assert found.facts["vae_weights"] == found.facts["vae_products"] == ["float16"]
    loaded._pipe.vae.register_to_config(force_upcast=True)
    with pytest.warns(FutureWarning, match="upcast_vae"):
        found = evidence(loaded, "precision")
    assert not found.engaged
    assert found.facts["vae_products"] == ["float32"]
