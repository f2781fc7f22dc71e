"""Diffusion pipelines: lists the known models, checks their files, and loads them."""
