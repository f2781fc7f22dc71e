"""Diffusion pipelines: which models there are, whether their files are whole, and how they are loaded."""
