"""Chooses the captions that are packaged with the model, by purpose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sdopt.training.captions import on_background
from sdopt.training.data import BACKGROUNDS, Dataset

TRAINING_PROMPTS = 200
"""Number of training captions in the file."""

GATE_PROMPTS = 240
"""Number of captions in the file that combine known words in an unseen way."""

SHEET_PER_GROUP = 3
"""Number of captions on the contact sheet from each of emojibase's eight groups."""


def choose_prompts(dataset: Dataset, seed: int) -> dict[str, list[str]]:
    """Chooses plain captions (without a style word) by purpose.

    Returns:
        `gate`: unseen captions of known words: a training name on its unseen background. `held_out`: all names that
        training never saw, in random order. `training`: a random sample of training names with a flat drawing.
        `contact_sheet`: three captions of training names from each group, in the order of the groups: the first on
        white, the second on a background seen in training, the third on its unseen background.
    """
    random = np.random.default_rng([seed, 3])
    held_out = dataset.labels(held_out=True)
    training = dataset.labels(held_out=False, style="flat")
    backgrounds = {record.label: record.unseen_background for record in dataset.records}
    sheet: list[str] = []
    by_group: dict[int, list[str]] = {}
    for record in dataset.records:
        if not record.held_out and record.style == "flat":
            by_group.setdefault(record.group, []).append(record.label)
    for group in sorted(by_group):
        labels = [by_group[group][i] for i in random.permutation(len(by_group[group]))[:SHEET_PER_GROUP]]
        # The colour after the unseen one was seen in training.
        names = list(BACKGROUNDS)
        seen = [names[(names.index(backgrounds[label]) + 1) % len(names)] for label in labels]
        behind = [None, seen[1], backgrounds[labels[2]]]
        sheet += [on_background(label, colour) for label, colour in zip(labels, behind, strict=True)]
    gate = [training[i] for i in random.permutation(len(training))[:GATE_PROMPTS]]
    return {
        "gate": [on_background(label, backgrounds[label]) for label in gate],
        "held_out": [held_out[i] for i in random.permutation(len(held_out))],
        "training": [training[i] for i in random.permutation(len(training))[:TRAINING_PROMPTS]],
        "contact_sheet": sheet,
    }


def write_prompts(prompts: dict[str, list[str]], file: Path) -> None:
    """Writes captions as JSON, one per line for readable diffs."""
    file.write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n")


def read_prompts(file: Path) -> dict[str, list[str]]:
    """Reads a file written by `write_prompts`."""
    prompts: dict[str, list[str]] = json.loads(file.read_text())
    return prompts
