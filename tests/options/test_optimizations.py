"""Every option conflicts with a reason or is applied and proves it; and where its change is undone, the proof fails."""

from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from sdopt.config.composer import HydraComposer
from sdopt.config.paths import CONF
from sdopt.contract import Contract
from sdopt.hardware.ceilings import tf32
from sdopt.measure.stages import observed
from sdopt.measure.trace import Trace
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import card, evidence

AXES = ("precision", "attention", "compiler", "layout", "grad_mode")
AXES_APART = {"caching", "lora", "patch"}  # test_caching.py, test_lora.py, test_patch.py
# What has a file of tests of its own because it needs more than a device.
APART = [("attention", "deepspeed")]
OPTIONS = [
    (axis, path.stem)
    for axis in AXES
    for path in sorted((CONF / axis).glob("*.yaml"))
    if (axis, path.stem) not in APART
]
CUDA_ONLY = {
    ("attention", "mem_efficient"),
    ("attention", "cudnn"),
    ("attention", "xformers"),
    ("precision", "tf32"),
    ("precision", "fp32_ieee"),
    *(("compiler", option) for option in ("blade", "cuda_graphs", "deepspeed", "tensorrt")),
}
ELSEWHERE = {
    ("precision", "fp16_vae_fix"): "this VAE is for SDXL",
    ("precision", "fp8_torchao"): "float8 arithmetic needs a CUDA device",
    ("precision", "fp8_sdnq"): "float8 arithmetic needs a CUDA device",
}
"""What conflicts with the packaged model or a CPU, with the reason; tests of their own look at these options."""
PACKAGES = {name for name in ("torchao", "sdnq", "onnxruntime", "openvino") if find_spec(name) is None}
"""Packages of extras that are not installed; without them, their options conflict and say so."""
COMPILED = [option for option in OPTIONS if option[0] == "compiler" and option[1] != "eager"]  # see test_compilers.py
OPTIONS = [option for option in OPTIONS if not any(option[1].endswith(name) for name in PACKAGES)]
HERE = [option for option in OPTIONS if option not in CUDA_ONLY | ELSEWHERE.keys() and option not in COMPILED]


class TestConflicts:
    @pytest.mark.parametrize(("axis", "option"), OPTIONS)
    def test_on_a_cpu_only_what_needs_cuda(self, variant: Compose, axis: str, option: str) -> None:
        found = variant(f"{axis}={option}").conflicts(CPU)
        if (axis, option) in CUDA_ONLY:
            reason = next(
                reason for reason in found if reason.endswith(f"needs a CUDA device; this runs on {CPU.name}")
            )
            assert reason.startswith(f"{axis}={option}: ")
        elif (axis, option) in ELSEWHERE:
            [reason] = found
            assert reason.startswith(f"{axis}={option}: {ELSEWHERE[axis, option]}")
        else:
            assert found == []

    def test_inductor_needs_a_compiler(self, variant: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CXX", raising=False)
        [found] = variant("compiler=inductor").conflicts(CPU)
        assert "needs a C++ compiler" in found
        assert variant("compiler=inductor").conflicts(card(9, 0)) == []


class TestEveryOption:
    @pytest.mark.parametrize(("axis", "option"), OPTIONS)
    def test_has_a_contract_that_its_default_alone_keeps_exactly(
        self, variant: Compose, axis: str, option: str
    ) -> None:
        chosen = variant(f"{axis}={option}").optimizations[axis]
        assert chosen.contract in Contract
        assert chosen.claims <= {"latency", "memory"}
        if chosen == variant().optimizations[axis]:
            assert chosen.contract is Contract.EXACT
            assert not chosen.claims

    def test_every_axis_of_the_defaults_is_walked(self, composer: type[HydraComposer]) -> None:
        assert set(composer([]).current.optimizations) == {*AXES, *AXES_APART}

    def test_the_weakest_promise_is_the_variants(self, variant: Compose) -> None:
        assert variant().contract is Contract.EXACT
        assert variant("attention=math").contract is Contract.EQUIVALENT
        assert variant("attention=math", "precision=bf16").contract is Contract.LOSSY


class TestUndone:
    """The contrapositive: a change that is not in force is not proved."""

    @pytest.mark.parametrize("option", ["autocast_fp16", "fp16_autocast"])
    def test_autocast_taken_away(self, session: Load, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded = session(f"precision={option}")
        monkeypatch.setattr(type(loaded._variant.optimizations["precision"]), "context", lambda *_: nullcontext())
        assert not evidence(loaded, "precision").engaged

    def test_autocast_on_top(self, session: Load) -> None:
        loaded = session("precision=fp32")
        with torch.autocast("cpu", dtype=torch.float16):
            assert not evidence(loaded, "precision").engaged


class TestGradMode:
    def test_enabled_really_records_a_graph(self, session: Load) -> None:
        loaded, outputs = session("grad_mode=enabled"), []
        with observed(loaded._pipe, lambda stage: None, lambda stage, output: outputs.append((stage, output))):
            images = loaded._call().images
        predictions = [output[0] for stage, output in outputs if stage == "denoiser"]
        assert all(prediction.grad_fn is not None for prediction in predictions)
        predictions[-1].sum().backward()
        assert loaded._pipe.unet.conv_in.weight.grad.abs().sum() > 0
        assert len(images) == 1

    def test_leaves_the_process_as_it_was(self, session: Load) -> None:
        for option in ("enabled", "no_grad", "inference_mode"):
            session(f"grad_mode={option}")._call()
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()


class TestContexts:
    def test_autocast_is_that_of_the_device_of_the_run(self, session: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        """With hardware=cpu on a machine that has a GPU."""
        loaded = session("precision=autocast_fp16")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert evidence(loaded, "precision").engaged

    def test_tf32_settings_are_restored(self, session: Load, variant: Compose) -> None:
        def settings() -> tuple[bool, bool, str]:
            backends = torch.backends
            return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

        before, pipe = settings(), session()._pipe
        for option, inside in (("tf32", True), ("fp32_ieee", False)):
            with variant(f"precision={option}").optimizations["precision"].context(pipe):
                assert settings()[:2] == (inside, inside)
            assert settings() == before
        with variant("precision=fp32").optimizations["precision"].context(pipe):
            assert settings() == before

    def test_a_back_end_is_that_of_the_denoiser_alone(self, session: Load) -> None:
        loaded, seen = session("attention=math"), {}

        def enter(stage: str) -> None:
            seen[stage] = torch.backends.cuda.flash_sdp_enabled()

        loaded._pipe.unet.conv_in.register_forward_pre_hook(lambda *_: enter("inside the denoiser"))
        with observed(loaded._pipe, enter, lambda stage, output: None):
            loaded._call()
        assert seen["inside the denoiser"] is False
        assert seen["text_encoder"]
        assert seen["vae_decoder"]
        assert torch.backends.cuda.flash_sdp_enabled()

    @pytest.mark.parametrize("compiled", [False, True])
    def test_math_in_compiled_blocks_leaves_no_operator(self, session: Load, compiled: bool) -> None:
        """`compiler=regional` replaces no module; Inductor makes products and a softmax of this back end."""
        proof, trace = session("attention=math")._assembly.proofs["attention"], Trace()
        trace.denoiser.operators["Torch-Compiled Region: 0/0"] = 7 * compiled
        assert proof(trace).engaged is compiled
        trace.denoiser.operators["aten::_scaled_dot_product_flash_attention_for_cpu"] = 1
        assert not proof(trace).engaged


@pytest.mark.gpu
class TestOnCuda:
    """Kernels seen on a GPU; what this one cannot run is skipped."""

    @pytest.mark.parametrize("option", [option for axis, option in OPTIONS if axis == "attention"])
    def test_attention(self, on_cuda: Load, option: str) -> None:
        found = evidence(on_cuda("precision=fp16", f"attention={option}"), "attention")
        assert found.engaged, found

    def test_attention_kernels_differ(self, on_cuda: Load) -> None:
        kernels = [
            evidence(on_cuda("precision=fp16", f"attention={option}"), "attention").facts["kernels"]
            for option in ("flash", "cudnn", "mem_efficient", "math")
        ]
        names = [frozenset(found) for found in kernels]
        assert len(set(names)) == 4

    @pytest.mark.parametrize(
        ("axis", "option"),
        [
            pytest.param(axis, option, marks=[pytest.mark.slow] if option.endswith("sdnq") else [])
            for axis, option in OPTIONS
            if axis != "attention" and (axis, option) not in COMPILED and option != "fp16_vae_fix"
        ],
    )
    def test_everything_else(self, on_cuda: Load, axis: str, option: str) -> None:
        found = evidence(on_cuda(f"{axis}={option}"), axis)
        assert found.engaged, found

    @pytest.mark.parametrize("option", ["tf32", "fp32_ieee"])
    def test_tf32_that_was_set_otherwise(self, on_cuda: Load, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded = on_cuda(f"precision={option}")
        monkeypatch.setattr(type(loaded._variant.optimizations["precision"]), "context", lambda *_: nullcontext())
        with tf32(option == "fp32_ieee"):
            assert not evidence(loaded, "precision").engaged

    def test_memory_is_that_of_the_allocator(self, on_cuda: Load) -> None:
        memory = on_cuda("precision=fp16").time_once(memory=True).memory
        assert memory is not None
        assert memory.headline is not None
        assert memory.headline[0] == "peak_allocated_gib"
        figures = (memory.cuda_loaded_gib, memory.cuda_peak_allocated_gib, memory.cuda_peak_reserved_gib)
        loaded, allocated, reserved = (figure or 0.0 for figure in figures)
        assert 0 < loaded < allocated <= reserved
