"""Ceilings: a product that a library lacks leaves the others alone, a GPU is warmed up first. TF32 is seen in sums."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sdopt.doctor import tables
from sdopt.hardware import ceilings
from sdopt.hardware.ceilings import (
    COPY,
    Ceiling,
    convolutions_are_rounded,
    measure_ceilings,
    products_are_rounded,
    tf32,
)
from tests.fixtures import CPU

SMALL = replace(CPU, memory_free_gib=0.001)
"""So little memory that every matrix stays small."""


def test_a_product_that_fails_is_reported_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasLtMatmul")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    found = {ceiling.kind: ceiling for ceiling in measure_ceilings(SMALL)}
    assert list(found) == ["fp32", "fp16", "bf16", "int8", COPY]
    assert found["int8"].failure == "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"
    assert [kind for kind, ceiling in found.items() if ceiling.samples_s] == ["fp32", "fp16", "bf16", COPY]


def test_the_second_matrix_of_eight_bits_is_read_column_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuBLAS multiplies no two row-major matrices of int8."""
    seen = []
    monkeypatch.setattr(torch, "_int_mm", lambda left, right: seen.append((left.stride(), right.stride())))
    ceilings._multiply(CPU, "int8", 64)()
    assert seen == [((64, 1), (1, 64))]


def test_a_gpu_works_for_a_second_before_samples_of_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock: the first products take ten times as long as the later ones."""
    now, calls = 0.0, 0

    def multiply() -> None:
        nonlocal now, calls
        calls += 1
        now += 0.002 if now < 0.5 else 0.0002

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("sdopt.hardware.ceilings.time.perf_counter", lambda: now)
    found = ceilings._sample(replace(CPU, type="cuda"), Ceiling("fp16", 1, 1.0), multiply)
    assert found.samples_s == pytest.approx([0.0002] * ceilings.SAMPLES)
    assert now >= 1.0 + ceilings.SAMPLES * 0.1


def test_what_failed_stands_below_the_table_and_in_no_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from sdopt.doctor.diagnosis import Diagnosis

    measured = [Ceiling("fp32", 64, 1e9, [0.001]), Ceiling(COPY, 2**20, 2.0**21, [0.001])]
    failed = Ceiling("int8", 0, 0.0, failure="RuntimeError: no such product")
    diagnosis = Diagnosis(CPU, CPU, [], False, "spawn", {}, {}, {}, {}, None, [], [*measured, failed])
    console = Console(width=100, record=True)
    console.print(tables._ceilings_table(diagnosis))
    assert "int8: not measured: RuntimeError: no such product" in console.export_text()
    assert "int8" not in tables.sheet_yaml(diagnosis)


def to_tf32(value: torch.Tensor) -> torch.Tensor:
    """Keeps 10 of 23 bits of mantissa, as tensor cores do."""
    return (value.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose convolutions are rounded where the settings allow it, as an A100's are."""
    conv2d: Callable[..., Any] = torch.conv2d

    def rounded(images: torch.Tensor, weights: torch.Tensor, *more: Any) -> Any:
        return conv2d(to_tf32(images) if torch.backends.cudnn.allow_tf32 else images, weights, *more)

    monkeypatch.setattr(torch, "conv2d", rounded)


def test_a_cpu_rounds_neither() -> None:
    with tf32(allowed=True):
        assert not convolutions_are_rounded(torch.device("cpu"))
    assert not products_are_rounded(torch.device("cpu"))


@pytest.mark.usefixtures("rounding")
def test_rounded_convolutions_are_seen() -> None:
    with tf32(allowed=True):
        assert convolutions_are_rounded(torch.device("cpu"))
    with tf32(allowed=False):
        assert not convolutions_are_rounded(torch.device("cpu"))
