"""Paths of the packaged models and their companion files, which `sdopt.apps.training` creates."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parent / "emoji"
"""A diffusers pipeline folder with a model card."""

TRANSFORMER = MODEL.with_name("emoji_dit")
"""A diffusers pipeline folder with a transformer that draws the same, and its card."""

PROMPTS = MODEL.with_name("prompts.json")
"""Captions by purpose; see `sdopt.apps.training.captions.choose_prompts`."""

CLIP = MODEL.with_name("clip")
"""A small `CLIPModel` folder with its tokenizer, image processor and card."""

TINY_AUTOENCODER = MODEL.with_name("tiny_autoencoder")
"""A folder for `AutoencoderTiny.from_pretrained`: the packaged model's equivalent of TAESD."""

VOCABULARY = MODEL.with_name("vocabulary")
"""The vocabulary of CLIP (Radford et al. 2021) in the form of two files, which all published models of Stable Diffusion
share. MIT License, Copyright (c) 2021 OpenAI; see NOTICE."""

LORAS = MODEL.with_name("loras")
"""A folder with two style LoRAs of equal rank and layers for the model, and their card."""
