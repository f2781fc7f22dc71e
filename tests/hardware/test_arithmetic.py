"""Whether products and convolutions are rounded to TF32 is seen in what they compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdopt.hardware.arithmetic import convolutions_are_rounded, products_are_rounded, tf32

CPU = torch.device("cpu")


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
        assert not convolutions_are_rounded(CPU)
    assert not products_are_rounded(CPU)


@pytest.mark.usefixtures("rounding")
def test_rounded_convolutions_are_seen() -> None:
    with tf32(allowed=True):
        assert convolutions_are_rounded(CPU)
    with tf32(allowed=False):
        assert not convolutions_are_rounded(CPU)
