"""How an image looks apart from what it shows: its brightness, its contrast, its fine structure.

Features that are trained to recognise things are built to overlook these, and distances in them hardly move where all
images become a little noisier, softer or paler. Measured per image and compared pair by pair, a shift that all images
share stands out, however small: it has nearly no spread.
"""

import numpy as np
from scipy.ndimage import convolve

_LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
"""Of linear light (ITU-R BT.709)."""

_FINE = np.array([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]])
"""The difference of two Laplacians: blind to planes and straight edges (Immerkær 1996)."""


def brightness(images: np.ndarray) -> np.ndarray:
    """Mean luminance of uint8 images (n, height, width, 3), coded as in the file: float64 (n,) from 0 to 1."""
    return _luminance(images).mean(axis=(1, 2))


def contrast(images: np.ndarray) -> np.ndarray:
    """Root mean square contrast: the standard deviation of the luminance, float64 (n,) from 0 to 0.5."""
    return _luminance(images).std(axis=(1, 2))


def fine_detail(images: np.ndarray) -> np.ndarray:
    """Fine structure, float64 (n,): what Immerkær's estimator takes for the deviation of noise, from 0 to 1.

    √(π/2) / 6 times the mean absolute response to its mask. Noise and ringing raise it, blur lowers it.
    """
    responses = np.stack([convolve(image, _FINE, mode="nearest") for image in _luminance(images)])
    return np.sqrt(np.pi / 2) / 6 * np.abs(responses).mean(axis=(1, 2))


def _luminance(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float64) @ _LUMINANCE / 255
