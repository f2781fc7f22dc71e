"""Writes the card of the CLIP."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sdopt.training.architecture import count_parameters
from sdopt.training.card import NOTICE
from sdopt.training.clip_evaluation import METRICS, REFERENCE_PICTURES, Degraded, monotonicity, read_clip_evaluation
from sdopt.training.degradations import LEARNT
from sdopt.training.packages import DRAWINGS, EMOJIBASE
from sdopt.training.retrieval import Retrieval
from sdopt.training.sheet import GUIDANCE
from sdopt.training.tokenizer import LENGTH, VOCABULARY

MANY_CAPTIONS = 100
"""Minimum number of captions for reporting the top ten."""

TITLES = {"clip_score": "CLIP score", "fid": "FID", "kid": "KID", "cmmd": "CMMD"}

CLIP_LIMITS = """\
- It knows emoji and nothing else, at 64×64 pixels. Its CLIP score, FID, KID and CMMD are figures of their own, not to \
be compared with those over OpenAI's CLIP or Inception, nor across versions of this CLIP: what carries over is how \
they move between variants that were scored by the same weights.
- It saw most of the drawings that the generator learnt, including the concepts held out from the generator. It can \
score captions that the generator never saw, but it is not independent of the generator's data.
- Fine detail decides little: relatives such as `man running` and `woman running` are close together.
- The FID of a small set of pictures is much too high; compare equal numbers, and read KID or CMMD first.
"""


def write_clip_card(folder: Path) -> None:
    """Writes `README.md` for the CLIP in `folder` from its weights, `recipe.json` and `evaluation.json`."""
    recipe, evaluation = (
        json.loads((folder / "recipe.json").read_text()),
        read_clip_evaluation(folder / "evaluation.json"),
    )
    weights = folder / "model.safetensors"
    data, figures, verdicts = recipe["data"], recipe["clip"], monotonicity(evaluation.rows)
    sources = "\n".join(
        f"| `{d.style}` | `{d.package.name}` {d.package.version} | {d.package.holder} | {d.package.licence} "
        f"| {data['pictures'].get(d.style, 0):,} |"
        for d in DRAWINGS
    )
    retrievals = "\n".join(
        _retrieval_row(text, found)
        for text, found in (
            ("kept from training, on white", evaluation.held_out),
            ("of training, on white", evaluation.seen),
            ("kept from training, on each of the backgrounds", evaluation.background),
        )
    )
    text = f"""\
# emoji CLIP: which caption belongs to which picture

A CLIP of {count_parameters(weights) / 1e6:.2f} million \
parameters ({weights.stat().st_size / 1e6:.1f} MB in half precision) for emoji at 64×64 pixels, trained from scratch. \
It gives sdopt a CLIP score, and features for FID, KID and CMMD, on any machine, offline and in seconds. It loads as \
a `CLIPModel`; pictures of other sizes are resized.

```python
from transformers import CLIPModel, CLIPProcessor

model = CLIPModel.from_pretrained("sdopt/reference/clip")
processor = CLIPProcessor.from_pretrained("sdopt/reference/clip")
inputs = processor(text=["police officer", "red apple"], images=[picture], padding=True, return_tensors="pt")
model(**inputs).logits_per_image
```

The file holds float16. Without a `dtype` the model loads in float32.

The image encoder has 4 layers, 128 wide, over 8×8 patches; the text encoder has 3 layers, 96 wide, over at most \
{LENGTH} tokens of the generator's own byte-level BPE ({VOCABULARY:,} entries); both end in 128 numbers.

## Data

{sum(data["pictures"].values()):,} drawings of {data["concepts"]:,} concepts, the generator's held-out ones included. \
Of {figures["held_out_share"]:.0%} of the concepts that are drawn in several styles one drawing, chosen by seed, was \
kept from training: {figures["held_out_pictures"]} drawings of known things in a style not seen of them.

| style | source | made by | licence | pictures |
|---|---|---|---|---:|
{sources}

Captions: names and tags of `{EMOJIBASE.name}` {EMOJIBASE.version} ({EMOJIBASE.holder}, {EMOJIBASE.licence}), mostly \
without the style, so that a plain name fits all drawings of a thing. {figures["background_share"]:.0%} of the \
pictures stand on one of ten colours, which their captions name.

## Training

`sdopt train-reference stage=clip` repeats it. {_trainings(recipe)}

Symmetric InfoNCE with a learnt temperature; each picture was also compared with {figures["extra_captions"]} further \
captions, half of them of the same things on other backgrounds; a text that fits two pictures counted against \
neither. \
Drawings were turned, scaled, shifted and tinted a little, and mirrored where that changes no meaning. \
{figures["spoilt_share"]:.0%} of them were degraded, and their captions said so ({_learnt()}), so that a plain caption \
does not fit a degraded picture. Each step hid {figures["hidden_patches"]:.0%} of the \
patches. AdamW, cosine schedule, averaged weights; last training loss \
{figures["loss"]:.3f}. No other network took part in it.

## Caption retrieval

Ties count as 0.5. Captions are the plain names of all concepts; for backgrounds, those of the right concept on \
white and on each colour.

| pictures | tried | captions | right one is first | … is among the first ten |
|---|---:|---:|---:|---:|
{retrievals}

## Sensitivity to degradations

Each metric should change monotonically as pictures get worse: the CLIP score down, the distances up. Training \
included {_named()}, named in the captions; it did not include the other degradations. The first five \
degrade the {figures["held_out_pictures"]} drawings kept from training, and their distances are to \
{min(REFERENCE_PICTURES, figures["pictures"]):,} drawings of training. The last one draws captions of `prompts.json` \
(`training` and `gate`) with the packaged generator by DDIM, guidance {GUIDANCE:g}; its distances are to the flat \
drawings of the same captions. Wrong captions change no picture, so they have no distance. `evaluation.json` holds \
the same figures.

{degradation_table(evaluation.rows)}

Monotonic at every row of the table: {_verdict(verdicts)}

## Limits

{CLIP_LIMITS}
## Attribution

{NOTICE}"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def degradation_table(rows: Iterable[Degraded]) -> str:
    """Returns the results of `degradations` as a Markdown table."""
    lines = [f"| degradation | extent | {' | '.join(TITLES[m] for m in METRICS)} |", "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        digits = {"clip_score": 2, "fid": 3, "kid": 4, "cmmd": 3}
        values = [getattr(row, metric) for metric in METRICS]
        shown = ["" if v is None else f"{v:.{digits[m]}f}" for m, v in zip(METRICS, values, strict=True)]
        lines.append(f"| {row.way} | {row.extent} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _learnt() -> str:
    return ", ".join(f"`{way.word}`" for way in LEARNT)


def _named() -> str:
    return ", ".join(way.name for way in LEARNT)


def _trainings(recipe: dict[str, Any]) -> str:
    """Describes all trainings that led to the weights, the last one first."""
    figures = recipe["clip"]
    said = (
        f"{figures['steps']:,} steps of {figures['batch_size']} pictures, each of another concept, in "
        f"{figures['seconds'] / 60:.0f} minutes of wall time on {figures['hardware']}, beside other work."
        f"{_earlier(figures)}"
    )
    if "started_from" not in recipe:
        return said
    before = _trainings(recipe["started_from"])
    return f"{said} It started from the weights of an earlier training (`clip.start_from=`): {before}"


def _earlier(figures: dict[str, Any]) -> str:
    """Describes earlier settings of the training that differ from the final settings."""
    return "".join(
        f" Up to step {settings['until_step']:,} the settings were others: "
        + ", ".join(f"`{key}` {'unused' if v is None else v}" for key, v in settings.items() if key != "until_step")
        + "."
        for settings in figures["earlier"]
    )


def _verdict(verdicts: dict[str, dict[str, bool | None]]) -> str:
    """Describes which series are not monotonic."""
    fine = sum(verdict is True for of_way in verdicts.values() for verdict in of_way.values())
    tried = sum(verdict is not None for of_way in verdicts.values() for verdict in of_way.values())
    wrong = [
        f"{TITLES[metric]} under {way}"
        for way, of_way in verdicts.items()
        for metric, verdict in of_way.items()
        if verdict is False
    ]
    return f"{fine} of {tried} series. " + (f"Not monotonic: {'; '.join(wrong)}." if wrong else "None fails.")


def _retrieval_row(text: str, found: Retrieval) -> str:
    # The top ten of eleven captions is meaningless.
    top10 = f"{found.top10:.1%}" if found.captions > MANY_CAPTIONS else ""
    return f"| {text} | {found.pictures:,} | {found.captions:,} | {found.top1:.1%} | {top10} |"
