"""The transformer's training: its teacher, and the noise levels that it sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sdopt.apps.training.networks import build_scheduler
from sdopt.apps.training.transformer import Teacher, build_transformer, shifted_levels


class Oracle(nn.Module):
    """A denoiser that knows the picture and the noise, and says v at the timestep that it is asked for."""

    def __init__(self, clean: Tensor, noise: Tensor) -> None:
        super().__init__()
        self.clean, self.noise = clean, noise
        self.alphas = build_scheduler().alphas_cumprod.double().numpy()

    def forward(self, noisy: Tensor, timesteps: Tensor, _states: Any) -> Any:
        alphas = np.interp(timesteps.numpy(), np.arange(len(self.alphas)), self.alphas)
        signal, sigma = (
            torch.from_numpy(part).float().sqrt()[:, None, None, None]
            for part in (alphas, 1 - alphas)
        )
        assert torch.allclose(
            noisy, signal * self.clean + sigma * self.noise, atol=2e-3
        )
        return SimpleNamespace(sample=signal * self.noise - sigma * self.clean)


def test_the_teacher_says_the_velocity_of_the_flow_at_every_level() -> None:
    clean, noise = torch.randn(
        2, 6, 8, 8, 8, generator=torch.Generator().manual_seed(0)
    )
    pipeline: Any = SimpleNamespace(
        unet=Oracle(clean, noise), scheduler=build_scheduler()
    )
    levels = np.array([0.05, 0.2, 0.4, 0.6, 0.8, 0.93], np.float32)
    shares = torch.from_numpy(levels)[:, None, None, None]
    velocity = Teacher(pipeline, torch.device("cpu")).velocity(
        (1 - shares) * clean + shares * noise, levels, torch.empty(0)
    )
    assert torch.allclose(velocity, noise - clean, atol=1e-2)


def test_noise_levels_are_spread_evenly_and_shifted_towards_noise() -> None:
    even = np.sort(shifted_levels(100, 1.0, np.random.default_rng(0)))
    assert np.abs(even - (np.arange(100) + 0.5) / 100).max() < 0.01
    shifted = shifted_levels(1000, 2.0, np.random.default_rng(0))
    assert np.median(shifted) == pytest.approx(2 / 3, abs=0.01)
    assert 0 <= shifted.min() < shifted.max() <= 1


def test_the_transformer_is_as_large_as_its_card_says() -> None:
    assert (
        sum(weight.numel() for weight in build_transformer().parameters()) == 6_262_560
    )
