"""Paths of the packaged models and of what comes with them; `sdopt.training` makes them."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parent / "emoji"
"""A diffusers pipeline folder with a model card."""

PROMPTS = MODEL.with_name("prompts.json")
"""Captions by purpose; see `sdopt.training.prompts.choose_prompts`."""

CLIP = MODEL.with_name("clip")
"""A small `CLIPModel` folder with its tokenizer, image processor and card."""

TINY_AUTOENCODER = MODEL.with_name("tiny_autoencoder")
"""A folder for `AutoencoderTiny.from_pretrained`: the model's own stand-in for TAESD."""

LORAS = MODEL.with_name("loras")
"""Two style LoRAs for the model, of the same rank and layers; see the card in it."""
