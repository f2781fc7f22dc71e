"""Which models fit into which cards, and with which options: `python -m tests.apps.foresight.fits` counts it anew.

What it writes beside itself is the table of the page on `sdopt plan`, which `python -m tests.pages` fills in.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdopt.apps.foresight.advice import Needed, what_fits
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.report.blocks import Table
from sdopt.statistics.words import gib_text

COUNTED = Path(__file__).with_suffix(".json")

MODELS = (
    "flux_dev",
    "flux2_klein_4b",
    "flux2_klein_9b",
    "z_image_turbo",
    "qwen_image",
    "sd35_large",
    "sd35_medium",
)

CARDS = {
    "rtx2060": 6,
    "rtx3050_6gb": 6,
    "rtx4060": 8,
    "rtx3060": 12,
    "rtx4060_ti": 16,
    "rtx4090": 24,
}
"""A card of each memory in GB, as it is sold; the first one has no bfloat16."""

Row = dict[str, Any]


def counted(model: str) -> list[Row]:
    """Returns how a model fits into each of the cards."""
    sheets, known, rows = data_sheets(), Needed(), list[Row]()
    with composer_of([f"model={model}"]) as composer:
        shape = composer.variant(None).shapes[0]
        for card in CARDS:
            ways = what_fits(composer, sheets[card], shape, known)
            rows.append({"model": model, "card": card} | asdict(ways))
    return rows


def read(file: Path = COUNTED) -> list[Row]:
    """Returns what was counted."""
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def table(rows: list[Row]) -> Table:
    """Returns the rows as a table."""
    cells = []
    for row in rows:
        card = f"{row['card']} ({CARDS[row['card']]} GB)"
        cells.append([row["model"], card, _cell(row["whole"]), _cell(row["packed"])])
    headings = ["model", "card", "with all weights as they are"]
    return Table([*headings, "with fewer weights or bits"], cells)


def _cell(way: Row | None) -> str:
    if way is None:
        return ""
    needs = gib_text(way["likely"])
    if way["host"]:
        needs += f"; host {gib_text(way['host'])}"
    if way["close"]:
        needs += "; nearly all of the card"
    return f"`{' '.join(way['choices'])}` ({needs})"


def main() -> int:
    """Counts all models anew."""
    rows = [row for model in MODELS for row in counted(model)]
    COUNTED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
