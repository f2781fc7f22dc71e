"""Measures the appearance of an image apart from its content: brightness, contrast, fine structure, colours.

Features that are trained to recognise objects ignore these, and distances in them hardly change if all images become
a little noisier, softer or paler. Appearance is measured per image and compared pair by pair. So even a small shift is
visible if all images share it, because it has nearly no spread.
"""

import math

import numpy as np
from scipy.ndimage import convolve

_LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
"""Weights of linear red, green and blue in the luminance (ITU-R BT.709)."""

_FINE = np.array([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]])
"""Difference of two Laplacians, which is 0 on planes and straight edges (Immerkær 1996)."""


def brightness(images: np.ndarray) -> np.ndarray:
    """Returns the mean luminance of uint8 images (n, height, width, 3), gamma-coded: float64 (n,) from 0 to 1."""
    means: np.ndarray = _luminance(images).mean(axis=(1, 2))
    return means


def contrast(images: np.ndarray) -> np.ndarray:
    """Returns the root mean square contrast: the standard deviation of the luminance, float64 (n,) from 0 to 0.5."""
    deviations: np.ndarray = _luminance(images).std(axis=(1, 2))
    return deviations


def fine_detail(images: np.ndarray) -> np.ndarray:
    """Returns the amount of fine structure, float64 (n,): Immerkær's estimate of the noise deviation, from 0 to 1.

    It is √(π/2) / 6 times the mean absolute response to Immerkær's mask. Noise and ringing raise it, blur lowers it.
    """
    responses = np.stack([convolve(image, _FINE, mode="nearest") for image in _luminance(images)])
    means: np.ndarray = np.abs(responses).mean(axis=(1, 2))
    return means * (math.sqrt(math.pi / 2) / 6)


def palette(images: np.ndarray) -> np.ndarray:
    """Returns the colours of uint8 images (n, height, width, 3) in five figures each: float64 (n, 5).

    They are the means of red, green and blue, gamma-coded from 0 to 1, and the standard deviations of the two opponent
    colours, red − green and yellow − blue (Hasler and Süsstrunk 2003). A cast moves the means, a loss of colour the
    deviations, also of an image whose colours balance.
    """
    colours = images.astype(np.float64) / 255
    red, green, blue = np.moveaxis(colours, -1, 0)
    opponents = np.stack([red - green, (red + green) / 2 - blue])
    return np.column_stack([colours.mean(axis=(1, 2)), opponents.std(axis=(2, 3)).T])


def _luminance(images: np.ndarray) -> np.ndarray:
    luminance: np.ndarray = images.astype(np.float64) @ _LUMINANCE / 255
    return luminance
