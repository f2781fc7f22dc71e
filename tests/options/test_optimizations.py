"""Every option runs on a CPU or conflicts with a reason; what is set around a call, and what a card shows."""

from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from sdopt.config.paths import CONF
from sdopt.contract import Contract
from sdopt.hardware.ceilings import tf32
from sdopt.measure.stages import observed
from sdopt.measure.trace import Trace
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import evidence

AXES = ("precision", "attention", "compiler", "layout", "grad_mode")
# What has a file of tests of its own because it needs more than a device.
APART = [("attention", "deepspeed")]
OPTIONS = [
    (axis, path.stem)
    for axis in AXES
    for path in sorted((CONF / axis).glob("*.yaml"))
    if (axis, path.stem) not in APART
]
CUDA = "needs a CUDA device; this runs on "
ELSEWHERE = {
    **dict.fromkeys(
        (
            ("attention", option)
            for option in ("mem_efficient", "cudnn", "xformers", "flash_3", "flash_4")
        ),
        CUDA,
    ),
    **dict.fromkeys(
        (
            ("precision", option)
            for option in ("tf32", "fp32_ieee", "fp8_torchao", "fp8_sdnq")
        ),
        CUDA,
    ),
    **dict.fromkeys(
        (
            ("compiler", option)
            for option in ("blade", "cuda_graphs", "deepspeed", "tensorrt")
        ),
        CUDA,
    ),
    ("precision", "fp16_vae_fix"): "this VAE is for SDXL",
    **dict.fromkeys(
        (("attention", option) for option in ("dispatched", "flex", "sage")),
        "runs no attention of UNets",
    ),
}
"""What conflicts with a CPU or the packaged model, with the reason; tests of their own look at these options."""
PACKAGES = {
    name
    for name in ("torchao", "sdnq", "bitsandbytes", "onnxruntime", "openvino")
    if find_spec(name) is None
}
"""Packages of extras that are not installed; without them, their options conflict and say so."""
COMPILED = [
    option for option in OPTIONS if option[0] == "compiler" and option[1] != "eager"
]  # see test_compilers.py
OPTIONS = [
    option
    for option in OPTIONS
    if not any(option[1].endswith(name) for name in PACKAGES)
]


def test_each_runs_on_a_cpu_or_says_what_it_needs(variant: Compose) -> None:
    plain = variant().optimizations
    for axis, option in OPTIONS:
        made = variant(f"{axis}={option}")
        found, chosen, reason = (
            made.conflicts(CPU),
            made.optimizations[axis],
            ELSEWHERE.get((axis, option)),
        )
        assert bool(found) == (reason is not None), found
        assert reason is None or any(
            f"{axis}={option}: " in each and reason in each for each in found
        )
        assert chosen.claims <= {"latency", "memory"}
        if chosen == plain[axis]:
            assert (chosen.contract, chosen.claims) == (Contract.EXACT, frozenset())


def test_the_weakest_promise_is_the_variants(variant: Compose) -> None:
    assert variant().contract is Contract.EXACT
    assert variant("attention=math").contract is Contract.EQUIVALENT
    assert variant("attention=math", "precision=bf16").contract is Contract.LOSSY


class TestContexts:
    def test_autocast_is_that_of_the_device_of_the_run(
        self, session: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With hardware=cpu on a machine that has a GPU."""
        loaded = session("precision=autocast_fp16")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert evidence(loaded, "precision").engaged

    def test_tf32_settings_are_restored(self, session: Load, variant: Compose) -> None:
        def settings() -> tuple[bool, bool, str]:
            backends = torch.backends
            return (
                backends.cuda.matmul.allow_tf32,
                backends.cudnn.allow_tf32,
                torch.get_float32_matmul_precision(),
            )

        before, pipe = settings(), session()._pipe
        for option, inside in (("tf32", True), ("fp32_ieee", False)):
            with (
                variant(f"precision={option}").optimizations["precision"].context(pipe)
            ):
                assert settings()[:2] == (inside, inside)
            assert settings() == before
        with variant("precision=fp32").optimizations["precision"].context(pipe):
            assert settings() == before

    def test_a_back_end_is_that_of_the_denoiser_alone(self, session: Load) -> None:
        loaded, seen = session("attention=math"), {}

        def enter(stage: str) -> None:
            seen[stage] = torch.backends.cuda.flash_sdp_enabled()

        loaded._pipe.unet.conv_in.register_forward_pre_hook(
            lambda *_: enter("inside the denoiser")
        )
        with observed(loaded._pipe, enter, lambda stage, output: None):
            loaded._call()
        assert seen["inside the denoiser"] is False
        assert seen["text_encoder"]
        assert seen["vae_decoder"]
        assert torch.backends.cuda.flash_sdp_enabled()

    def test_math_in_compiled_blocks_leaves_no_operator(self, session: Load) -> None:
        """`compiler=regional` replaces no module; Inductor makes products and a softmax of this back end."""
        proof = session("attention=math")._assembly.proofs["attention"]
        assert not proof(Trace()).engaged
        trace = Trace()
        trace.denoiser.operators["Torch-Compiled Region: 0/0"] = 7
        assert proof(trace).engaged
        trace.denoiser.operators[
            "aten::_scaled_dot_product_flash_attention_for_cpu"
        ] = 1
        assert not proof(trace).engaged


@pytest.mark.gpu
class TestOnCuda:
    """Kernels seen on a GPU; what this one cannot run is skipped."""

    @pytest.mark.parametrize(
        "option", [option for axis, option in OPTIONS if axis == "attention"]
    )
    def test_attention(self, on_cuda: Load, option: str) -> None:
        found = evidence(on_cuda("precision=fp16", f"attention={option}"), "attention")
        assert found.engaged, found

    @pytest.mark.parametrize(
        ("axis", "option"),
        [
            pytest.param(
                axis,
                option,
                marks=[pytest.mark.slow] if option.endswith("sdnq") else [],
            )
            for axis, option in OPTIONS
            if axis != "attention"
            and (axis, option) not in COMPILED
            and option != "fp16_vae_fix"
        ],
    )
    def test_everything_else(self, on_cuda: Load, axis: str, option: str) -> None:
        found = evidence(on_cuda(f"{axis}={option}"), axis)
        assert found.engaged, found

    @pytest.mark.parametrize("option", ["tf32", "fp32_ieee"])
    def test_tf32_that_was_set_otherwise(
        self, on_cuda: Load, option: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded = on_cuda(f"precision={option}")
        monkeypatch.setattr(
            type(loaded._variant.optimizations["precision"]),
            "context",
            lambda *_: nullcontext(),
        )
        with tf32(option == "fp32_ieee"):
            assert not evidence(loaded, "precision").engaged

    def test_memory_is_that_of_the_allocator(self, on_cuda: Load) -> None:
        memory = on_cuda("precision=fp16").time_once(memory=True).memory
        assert memory is not None
        assert memory.headline is not None
        assert memory.headline[0] == "peak_allocated_gib"
        figures = (
            memory.cuda_loaded_gib,
            memory.cuda_peak_allocated_gib,
            memory.cuda_peak_reserved_gib,
        )
        loaded, allocated, reserved = (figure or 0.0 for figure in figures)
        assert 0 < loaded < allocated <= reserved
