"""Renders icons of an Iconify set to pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

IMAGE_SIZE = 64
"""Width and height of every picture, in pixels."""


def svg(icon_set: dict[str, Any], name: str) -> str | None:
    """Returns the SVG text of an icon, with aliases, flips and rotations applied; None if the set lacks the icon.

    Source: the Iconify JSON format (https://iconify.design/docs/types/iconify-json.html).
    """
    flip_x = flip_y = False
    turns = 0
    while name not in icon_set["icons"]:
        alias = icon_set.get("aliases", {}).get(name)
        if alias is None:
            return None
        flip_x ^= alias.get("hFlip", False)
        flip_y ^= alias.get("vFlip", False)
        turns += alias.get("rotate", 0)
        name = alias["parent"]
    icon = icon_set["icons"][name]
    left, top = (icon.get(key, icon_set.get(key, 0)) for key in ("left", "top"))
    width, height = (icon.get(key, icon_set.get(key, 16)) for key in ("width", "height"))
    transform = (
        f"translate({left + width / 2} {top + height / 2}) rotate({90 * turns}) "
        f"scale({-1 if flip_x else 1} {-1 if flip_y else 1}) translate({-left - width / 2} {-top - height / 2})"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}"><g transform="{transform}">{icon["body"]}</g></svg>'
    )


def render(markup: str) -> np.ndarray:
    """Renders SVG text to uint8 (64, 64, 4): the RGB of the drawing on white, and its alpha.

    The drawing is rendered at four times the size and averaged: resvg's own antialiasing leaves hairlines between
    touching shapes, which the autoencoder would learn.
    """
    import resvg_py
    from PIL import Image

    size = 4 * IMAGE_SIZE
    png = bytes(resvg_py.svg_to_bytes(svg_string=markup, width=size, height=size, skip_system_fonts=True))
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    page = Image.new("RGBA", (size, size))
    # Centre drawings that are narrower than Iconify's square artboard.
    page.alpha_composite(picture, ((size - picture.width) // 2, (size - picture.height) // 2))
    white = Image.new("RGBA", (size, size), "white")
    white.alpha_composite(page)
    # Average colours on white, since transparent pixels have no colour.
    layers = [*white.convert("RGB").split(), page.getchannel("A")]
    small = [np.asarray(layer.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)) for layer in layers]
    return np.stack(small, axis=-1)
