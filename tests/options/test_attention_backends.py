"""Attention by kernels of others, on transformers: what shows each, and where it is refused.

No such kernel runs on a CPU but PyTorch's flex_attention: the others are told from traces that name kernels as profiles
of them do.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch.nn.functional import scaled_dot_product_attention

from sdopt.measure.trace import StageTrace, Trace
from sdopt.options.attention_backends import (
    Dispatched,
    HubKernel,
    chosen_backends,
    default_backend,
)
from sdopt.options.caching import WholeSteps
from tests.options.applied import Applied, context_of, far
from tests.pipelines.tiny import tiny

LAYERS = 6
"""Attention layers of the tiny FLUX.1."""

OF_PYTORCH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_traits>"

KERNELS = {
    "flash": "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>",
    "flash_hub": "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>",
    "_flash_3": "void cutlass::device_kernel<flash::FlashAttnFwdSm90<…>>",
    "_flash_3_hub": "void cutlass::device_kernel<flash::FlashAttnFwdSm80<…>>",
    "flash_4_hub": "kernel_cutlass_kernel_flash_fwd_sm100FlashAttentionForwardSm100_0",
    "sage": "void qk_int8_sv_f8_attn_kernel<64u, 128u, 128u, 128u>",
    "_sage_qk_int8_pv_fp16_cuda": "void qk_int_sv_f16_attn_kernel<128u, 64u>",
    "_sage_qk_int8_pv_fp16_triton": "_attn_fwd",
    "sage_blackwell_hub": "void flash::compute_attn_ws<Flash_fwd_kernel_traits>",
    "flex": "triton_tem_fused_flex_attention_0",
}


@pytest.fixture
def same_default() -> Iterator[None]:
    """Puts the backend of the whole process back, which diffusers changes too."""
    before = _AttentionBackendRegistry.get_active_backend()[0]
    yield
    _AttentionBackendRegistry.set_active_backend(before)


def of_card(kernels: dict[str, int], operators: dict[str, int] | None = None) -> Trace:
    trace = Trace(kernels=Counter(kernels))
    trace.stages["denoiser"] = StageTrace(calls=1, operators=Counter(operators or {}))
    return trace


@pytest.mark.parametrize("backend", KERNELS)
def test_a_kernel_is_told_by_its_name(
    backend: str, monkeypatch: pytest.MonkeyPatch, same_default: None
) -> None:
    for check in ("_check_attention_backend_requirements", "_maybe_download_kernel_for_backend"):  # fmt: skip
        monkeypatch.setattr(attention_dispatch, check, lambda backend: None)
    option = HubKernel(backend) if backend.endswith("_hub") else Dispatched(backend)
    pipe, kernel = tiny("flux"), KERNELS[backend]
    proof = option.apply(pipe)
    operator = "aten::_scaled_dot_product_flash_attention"
    assert proof(of_card({kernel: LAYERS})).engaged
    assert not proof(of_card({"ampere_bf16_s16816gemm": LAYERS})).engaged
    assert not proof(of_card({kernel: LAYERS - 1, OF_PYTORCH: 1})).engaged
    assert not proof(of_card({kernel: LAYERS}, {operator: 1})).engaged
    pipe.transformer.set_attention_backend("native")
    assert not proof(of_card({kernel: LAYERS})).engaged, "another is chosen"


def test_code_for_a_backend_leaves_the_rest_of_the_process_as_it_was(
    same_default: None,
) -> None:
    """Else other pipelines of a program, as one that it compares with, have that backend too."""
    pipe, before = tiny("flux"), default_backend()
    lines = Dispatched("_native_math").diffusers_lines
    code = "\n".join(lines).replace("pipe.unet", "pipe.transformer")
    exec(code, {"pipe": pipe})
    assert chosen_backends(pipe.transformer) == ["_native_math"]
    assert default_backend() == before


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.slow
def test_flex_attention_draws_the_same_and_counts_once_it_is_compiled(
    same_default: None,
) -> None:
    plain = Applied("flux", {"caching": WholeSteps()}).images()
    applied = Applied("flux", {"attention": Dispatched("flex")})
    images, finding, trace = applied.traced()
    assert far(images, plain) < 1e-3
    assert not trace.fused_attention
    assert not finding.engaged, "without a compiler it writes all scores"
    [proof] = applied.assembly.proofs.values()
    compiled = {"Torch-Compiled Region: 1/0": LAYERS}
    assert proof(of_card({}, compiled)).engaged
    assert not proof(of_card({}, compiled | {"aten::logsumexp": 1})).engaged
    operator = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert not proof(of_card({}, compiled | {operator: 1})).engaged


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["z_image", "qwen_image", "chroma"])
@pytest.mark.slow
def test_flex_attention_masks_what_the_others_mask(name: str) -> None:
    """Two prompts of different lengths: one of them is filled up, and nothing may attend to that."""
    context = context_of(tiny(name))
    two = replace(context, workload=replace(context.workload, batch_size=2))
    assert Dispatched("flex").obstacles(two) == []
    assert not Dispatched("flex").fixed_for(two.model)
    # Z-Image fills texts up to 32 tokens or a multiple of them by itself.
    prompts = "a red circle", "a blue house " * 12
    plain = Applied(name, {"caching": WholeSteps()})
    applied = Applied(name, {"attention": Dispatched("flex")})
    images = applied.images(prompts, num_inference_steps=1)
    assert far(images, plain.images(prompts, num_inference_steps=1)) < 1e-3


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, *_: Any
) -> torch.Tensor:
    """Does what xFormers' kernel does: adds a bias to the scores."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)


def _attended_in_turn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any
) -> torch.Tensor:
    """Does what FlashAttention does with sequences of different lengths, which lie one after another."""
    ends = [rest[f"cu_seqlens_{kind}"].tolist() for kind in "qk"]
    parts = []
    for number in range(len(ends[0]) - 1):
        own, keys = (slice(each[number], each[number + 1]) for each in ends)
        parts.append(_attended(q[None, own], k[None, keys], v[None, keys], None)[0])
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("backend", "mask", "right"),
    [
        ("flex", [0, 0, 1, 1], True),
        ("xformers", [1, 1, 0, 0], False),
        ("flash_varlen", [1, 1, 0, 0], True),
        ("flash_varlen", [0, 0, 1, 1], False),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_backends_mask_other_keys_without_an_error(
    monkeypatch: pytest.MonkeyPatch, backend: str, mask: list[int], right: bool
) -> None:
    """Z-Image has its mask at the end, and Qwen-Image that of the text before the image. Fails once diffusers is right."""
    kernels = SimpleNamespace(memory_efficient_attention=_attended)
    monkeypatch.setattr(attention_dispatch, "xops", kernels, raising=False)
    monkeypatch.setattr(
        attention_dispatch, "flash_attn_varlen_func", _attended_in_turn, raising=False
    )
    query, key, value = torch.randn(3, 2, 16, 4, 8)
    keys = torch.tensor([mask, [1] * 4], dtype=torch.bool).repeat_interleave(4, dim=1)
    images = [
        dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=keys[:, None, None, :],
            backend=AttentionBackendName(name),
        )
        for name in ("native", backend)
    ]
    assert (float((images[0] - images[1]).abs().max()) < 1e-4) == right


@pytest.mark.parametrize(
    ("backend", "name", "refused"),
    [
        ("xformers", "z_image", True),
        ("xformers", "qwen_image", True),
        ("xformers", "flux", False),
        ("flash_varlen", "z_image", False),
        ("flash_varlen", "qwen_image", True),
        ("sage_varlen", "qwen_image", True),
        ("flash_varlen_hub", "qwen_image", False),
        ("_native_flash", "qwen_image", False),
    ],
)
def test_a_backend_that_masks_other_keys_is_refused_in_a_program(
    backend: str, name: str, refused: bool
) -> None:
    """Its calls may be of several prompts, and no error would tell; one that takes no mask raises its own error."""
    kind = HubKernel if backend.endswith("_hub") else Dispatched
    reasons = kind(backend).obstacles(context_of(tiny(name)))
    assert any("takes no mask" in reason for reason in reasons) == refused


def test_a_kernel_of_the_hub_runs_once_its_repository_is_named() -> None:
    context = context_of(tiny("flux"))
    repository = "kernels-community/flash-attn3"
    [reason] = HubKernel().lacking(context)
    assert f"attention.kernel={repository}" in reason
    [reason] = HubKernel(kernel="someone/flash").lacking(context)
    assert repository in reason
    assert HubKernel(kernel=repository).lacking(context) == []
