"""How the tiny autoencoder is measured, on untrained networks."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sdopt.training.architecture import build_autoencoder, build_tiny_autoencoder
from sdopt.training.data import Dataset
from sdopt.training.tiny_evaluation import compare_on_latents, compare_on_pictures, compare_speed, count_operations


def test_it_decodes_with_a_third_of_the_operations_at_most() -> None:
    tiny, full = count_operations()
    assert 0 < tiny <= full / 3


def test_its_speed_is_a_ratio_with_the_spread_of_its_rounds() -> None:
    found = compare_speed(build_tiny_autoencoder(), build_autoencoder(), torch.zeros(1, 8, 8, 8), rounds=6)
    assert 0 < found.low <= found.mean <= found.high


def test_it_is_compared_with_its_teacher_in_the_denoisers_scale(dataset: Dataset) -> None:
    torch.manual_seed(0)
    teacher = build_autoencoder().eval()
    tiny = build_tiny_autoencoder().eval()
    latents = torch.randn(3, 8, 8, 8)
    teacher.register_to_config(scaling_factor=2.0)
    with torch.no_grad():
        expected = teacher.decode(latents / 2).sample.clamp(-1, 1)
    # Off by 0.2 everywhere, and towards grey, for pictures are cut to [-1, 1].
    shifted = expected - 0.2 * torch.where(expected > 0, 1.0, -1.0)
    tiny.decode = lambda scaled: SimpleNamespace(sample=shifted)
    assert abs(compare_on_latents(tiny, teacher, latents) - 20.0) < 1e-3
    assert set(compare_on_pictures(build_tiny_autoencoder(), teacher, dataset)) == {
        "held_out_psnr_db",
        "encoder_psnr_db",
        "teacher_psnr_db",
        "latent_error",
    }
