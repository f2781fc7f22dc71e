"""Measured ablations of Stable Diffusion optimizations."""

__version__ = "0.1.0"
