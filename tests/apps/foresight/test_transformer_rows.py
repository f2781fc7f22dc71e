"""Rows of published figures of transformers, as people write them: model, guidance, precision, storage, software."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sdopt.apps.foresight.fitting import is_possible
from sdopt.apps.foresight.latency import Case, Costs
from sdopt.apps.foresight.published import Figure, read_figures
from sdopt.apps.foresight.transformer_rows import (
    architecture_of,
    is_transformer,
    moves_layers,
    storage_of_row,
    why_untimed,
)
from sdopt.config.groups import data_sheets
from tests.apps.foresight.test_published import truth

USUAL = {
    "source": "me:x",
    "gpu": "H100",
    "model": "FLUX.1 dev",
    "width": 1024,
    "height": 1024,
    "steps": 28,
    "precision": "bf16",
    "backend": "diffusers eager",
}

Row = dict[str, str]


@pytest.fixture
def figure(tmp_path: Path) -> Callable[..., Figure]:
    def made(**changes: object) -> Figure:
        [found], _ = read_figures(truth(tmp_path, USUAL | changes))
        return found

    return made


def row_of(**changes: str) -> Row:
    empty = dict.fromkeys(("source", "model", "precision", "backend", "note"), "")
    return empty | {"model": "FLUX.1 dev", "precision": "bf16"} | changes


@pytest.mark.parametrize(
    ("written", "architecture"),
    [
        ("FLUX.1 [dev]", "flux_dev"),
        ("black-forest-labs/FLUX.1-dev", "flux_dev"),
        ("FLUX.1-Krea-dev", "flux_dev"),
        ("flux_schnell", "flux_schnell"),
        ("FLUX.2-dev", "flux2_dev"),
        ("FLUX.2 [klein] 4B", "flux2_klein_4b"),
        ("FLUX.2-klein-base-9B", "flux2_klein_9b"),
        ("Z-Image-Turbo", "z_image_turbo"),
        ("Tongyi-MAI/Z-Image", "z_image"),
        ("Qwen-Image-2512", "qwen_image"),
        ("SD3.5-Large-Turbo", "sd35_large"),
        ("stabilityai/stable-diffusion-3.5-large", "sd35_large"),
        ("stable-diffusion-3.5-medium", "sd35_medium"),
        ("Stable Diffusion v3 Medium", "sd3_medium"),
        ("PixArt-Σ", "pixart_sigma"),
        ("Sana_1600M_1024px", "sana_1600m"),
        ("Sana 0.6B", "sana_600m"),
        ("Lumina-Image-2.0", "lumina2"),
        ("Chroma1-HD", "chroma"),
        ("FLUX.1-Kontext-dev", None),
        ("FLUX.1 Fill", None),
        ("flux.1-lite-8B", None),
        ("Qwen-Image-Edit-2511", None),
        ("Qwen-Image-2.0", None),
        ("PixArt-α", None),
        ("SANA-1.5 4.8B", None),
        ("SANA-Sprint 1.6B", None),
        ("Lumina-Next-T2I", None),
        ("HunyuanDiT v1.2", None),
        ("HiDream-I1", None),
    ],
)
def test_a_model_is_told_from_its_relatives(
    written: str, architecture: str | None
) -> None:
    assert is_transformer(written)
    assert architecture_of(written) == architecture


@pytest.mark.parametrize(
    ("model", "note", "calls", "samples"),
    [
        ("FLUX.1 dev", "guidance 3.5", 1, 1),
        ("FLUX.1 dev", "true CFG 4", 2, 1),
        ("FLUX.2-klein-4B", "", 1, 1),
        ("FLUX.2-klein-base-4B", "", 2, 1),
        ("SD 3.5 medium", "guidance 4.5", 1, 2),
        ("SD 3.5 medium", "guidance 1.5", 1, 2),
        ("SD 3.5 medium", "guidance scale: 1.0", 1, 1),
        ("Qwen-Image", "true_cfg_scale=1.0", 1, 1),
        ("Qwen-Image", "no CFG", 1, 1),
        ("Qwen-Image", "true CFG 4.0", 2, 1),
    ],
)
def test_guidance_is_read_with_its_scale(
    figure: Callable[..., Figure], model: str, note: str, calls: int, samples: int
) -> None:
    work = figure(model=model, note=note).work
    assert (work.calls, work.samples) == (calls, samples)


@pytest.mark.parametrize(
    ("precision", "kind", "stored", "form"),
    [
        ("fp8", "bf16", True, "fp8"),
        ("bf16, float8wo", "bf16", True, "fp8"),
        ("fp8 weight-only", "bf16", True, "fp8"),
        ("float8dq_e4m3_row", "fp8", False, "fp8"),
        ("w8a8 fp8", "fp8", False, "fp8"),
        ("GGUF Q8_0", "bf16", True, "q8"),
        ("bf16, nf4 weights", "bf16", False, "nf4"),
    ],
)
def test_precision_may_be_told_without_the_type_beside_it(
    figure: Callable[..., Figure], precision: str, kind: str, stored: bool, form: str
) -> None:
    found = figure(precision=precision)
    assert (found.software.precision, found.software.stored) == (kind, stored)
    assert found.work.storage.denoiser == form


def test_what_says_that_it_does_not_compile_does_not(
    figure: Callable[..., Figure],
) -> None:
    assert not figure(backend="diffusers, no torch.compile").software.compiled
    assert not figure(backend="not compiled").software.compiled
    assert figure(backend="torch==2.7, torch.compile").software.compiled
    assert figure(backend="torch==2.7, torch.compile").software.torch == (2, 7)


@pytest.mark.parametrize(
    "row",
    [
        row_of(precision="int8 dynamic"),
        row_of(precision="GGUF Q4_K_S"),
        row_of(precision="svdquant int4"),
        row_of(precision="bf16, int8 (bitsandbytes)"),
        row_of(backend="flash-attn 3"),
        row_of(backend="SageAttention 2"),
        row_of(backend="enable_sequential_cpu_offload"),
        row_of(backend="stable-diffusion.cpp"),
        row_of(note="LoRA of rank 16"),
    ],
)
def test_times_without_figures_to_learn_from_are_refused(row: Row) -> None:
    assert why_untimed(row)


def test_offloads_are_told_apart() -> None:
    assert storage_of_row(row_of(backend="enable_model_cpu_offload")).offload == "model"
    assert storage_of_row(row_of(note="CPU offload")).offload == "model"
    assert storage_of_row(row_of(note="no offload")).offload == ""
    sequential = row_of(backend="enable_sequential_cpu_offload")
    assert storage_of_row(sequential).offload == ""
    assert moves_layers(sequential)
    assert moves_layers(row_of(backend="group_offload, stream"))


def test_text_encoders_may_have_a_form_of_their_own_or_be_elsewhere() -> None:
    whole = storage_of_row(row_of(precision="bf16, fp8 weights"))
    assert (whole.denoiser, whole.texts) == ("fp8", "")
    own = storage_of_row(row_of(precision="bf16, int8 weights", note="T5 in nf4"))
    assert (own.denoiser, own.texts) == ("int8", "nf4")
    third = storage_of_row(row_of(model="SD 3.5 large", note="T5 in 8 bits"))
    assert (third.texts, third.quantized_texts) == ("int8", (3,))
    assert storage_of_row(row_of(note="without T5")).without == ("text_encoder_3",)
    remote = storage_of_row(row_of(model="FLUX.2 dev", note="remote text encoder"))
    assert "text_encoder" in remote.without
    file = row_of(precision="GGUF Q4_1", note="T5 quantized as the transformer")
    assert storage_of_row(file).texts == ""


@pytest.mark.parametrize(
    ("precision", "backend", "scaled"),
    [
        ("bf16, int8 weight-only", "diffusers eager, torchao", True),
        ("bf16, int8 weight-only", "diffusers, compile, torchao", False),
        ("bf16, float8 weight-only", "diffusers eager, torchao", False),
        ("fp16, qfloat8 weights", "eager, optimum-quanto", True),
        ("bf16", "diffusers eager", False),
    ],
)
def test_outputs_are_scaled_where_weights_are_not(
    figure: Callable[..., Figure], precision: str, backend: str, scaled: bool
) -> None:
    made = figure(precision=precision, backend=backend)
    assert made.software.rescaled == scaled


def test_what_a_card_cannot_do_in_that_time_is_no_figure(
    figure: Callable[..., Figure],
) -> None:
    """SD 3 on an A100 was published with 0.585 s, for which twice its peak rate would be needed."""
    case = Case(
        data_sheets()["a100_80"],
        figure().software,
        Costs(products=12e12, attention=8e12),
        Costs(),
        20,
        1,
    )
    wrong, right = (
        figure(gpu="A100 80GB", steps=20, value=value) for value in (0.585, 2.0)
    )
    assert not is_possible(wrong, case)
    assert is_possible(right, case)
