"""Degrades pictures in several ways: the CLIP learns words for some, and its card tests all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter


def noisy(picture: np.ndarray, sigma: float, random: np.random.Generator) -> np.ndarray:
    """Adds Gaussian noise with a standard deviation of `sigma`, as a share of the value range."""
    noise = 255 * sigma * random.standard_normal(picture.shape, dtype=np.float32)
    pixels: np.ndarray = (picture + noise).clip(0, 255).round().astype(np.uint8)
    return pixels


def blurred(picture: np.ndarray, sigma: float, random: np.random.Generator) -> np.ndarray:
    """Applies a Gaussian blur of `sigma` pixels."""
    return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(sigma)))


def resampled(picture: np.ndarray, size: float, random: np.random.Generator) -> np.ndarray:
    """Scales a picture down to `size` pixels and up again."""
    cubic, small, image = Image.Resampling.BICUBIC, round(size), Image.fromarray(picture)
    return np.asarray(image.resize((small, small), cubic).resize(image.size, cubic))


def turned(picture: np.ndarray, degrees: float, random: np.random.Generator) -> np.ndarray:
    """Rotates all hues by `degrees`."""
    hue, saturation, value = Image.fromarray(picture).convert("HSV").split()
    hue = hue.point([(level + round(degrees / 360 * 256)) % 256 for level in range(256)])
    return np.asarray(Image.merge("HSV", (hue, saturation, value)).convert("RGB"))


@dataclass(frozen=True)
class Degradation:
    """A way to degrade a picture by a given amount.

    Attributes:
        name: the name in tables.
        unit: a format string for an amount.
        spoil: returns a degraded picture from a picture, uint8 (height, width, 3), an amount and a random generator.
        tried: amounts that the card tests, in increasing order of degradation.
        word: the word for such a picture in captions; empty if training does not use the degradation.
        range: the range of amounts in training, sampled uniformly on a logarithmic scale.
    """

    name: str
    unit: str
    spoil: Callable[[np.ndarray, float, np.random.Generator], np.ndarray]
    tried: tuple[float, ...]
    word: str = ""
    range: tuple[float, float] = (1.0, 1.0)

    def draw(self, random: np.random.Generator) -> float:
        """Draws an amount for training."""
        low, high = self.range
        return float(low * (high / low) ** random.random())


DEGRADATIONS = (
    Degradation("noise", "σ = {:g}", noisy, (0.02, 0.05, 0.1, 0.2), "noisy", (0.015, 0.3)),
    Degradation("blur", "σ = {:g} px", blurred, (0.5, 1.0, 1.5, 2.0), "blurred", (0.4, 3.0)),
    # Not used in training: tests whether training on noise and blur generalizes.
    Degradation("down-up sampling", "{:g} px", resampled, (48, 32, 24, 16)),
    Degradation("colours turned", "{:g}°", turned, (20, 45, 90, 180), "false colours", (15, 345)),
)

LEARNT = tuple(way for way in DEGRADATIONS if way.word)
