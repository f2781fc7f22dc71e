"""Ways to degrade pictures: the CLIP learns words for some, and its card tests it on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter


def noisy(picture: np.ndarray, sigma: float, random: np.random.Generator) -> np.ndarray:
    """Adds Gaussian noise whose deviation is a share of the whole range."""
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
    """Turns every hue by so many degrees."""
    hue, saturation, value = Image.fromarray(picture).convert("HSV").split()
    hue = hue.point([(level + round(degrees / 360 * 256)) % 256 for level in range(256)])
    return np.asarray(Image.merge("HSV", (hue, saturation, value)).convert("RGB"))


@dataclass(frozen=True)
class Degradation:
    """A way to degrade a picture by a given amount.

    Attributes:
        name: for tables.
        unit: an amount in words, with a place for it.
        spoil: makes a picture from a picture, uint8 (height, width, 3), an amount and a source of noise.
        tried: amounts that the card tests, the mildest first.
        word: what a caption calls such a picture; empty if training never shows one.
        range: of amounts in training, drawn evenly on a logarithmic scale.
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
    # Not shown in training: the CLIP's training on noise and blur must carry over.
    Degradation("down-up sampling", "{:g} px", resampled, (48, 32, 24, 16)),
    Degradation("colours turned", "{:g}°", turned, (20, 45, 90, 180), "false colours", (15, 345)),
)

LEARNT = tuple(way for way in DEGRADATIONS if way.word)
