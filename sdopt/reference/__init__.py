"""The packaged reference model (`emoji/`) and everything that made it."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parent / "emoji"
"""A diffusers pipeline folder with a model card."""

PROMPTS = MODEL.with_name("prompts.json")
"""Captions by purpose; see `sdopt.reference.prompts.choose_prompts`."""
