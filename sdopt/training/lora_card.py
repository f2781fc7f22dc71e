"""Writes the card of the LoRAs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdopt.training.sheet import GUIDANCE, STEPS
from sdopt.training.styles import STYLES


def write_lora_card(file: Path, figures: dict[str, dict[str, Any]]) -> None:
    """Writes the card of the LoRAs in the folder of `file`, from each style's figures (see `read_figures`)."""
    rows, training, comparison, sources = [], [], [], []
    for style in STYLES:
        seen = figures[style.name]
        size = file.with_name(f"{style.name}.safetensors").stat().st_size
        rows.append(
            f"| `{style.name}.safetensors` | {size / 1e3:.0f} kB | {style.title}: {style.look} "
            f"| `{style.package.name}` {style.package.version} | {style.package.holder} | {style.package.licence} |"
        )
        training.append(
            f"- `{style.name}`: {seen['pictures']:,} drawings, {seen['held_out']} more held out; {seen['steps']:,} "
            f"steps of {seen['batch_size']} latents in {seen['seconds'] / 60:.0f} minutes on {seen['hardware']}."
        )
        sources.append(
            f"- {style.title} (`{style.package.name}`), Copyright {style.package.holder}, {style.package.licence}, "
            f"{style.address}"
        )
        for split, title in (("training", "trained on"), ("held_out", "held out")):
            part = seen["comparison"][split]
            comparison.append(
                f"| `{style.name}` | {title} | {part['concepts']} | {part['before']:.1f} → {part['after']:.1f} "
                f"| {part['nearer_before']:.0%} → {part['nearer_after']:.0%} "
                f"| {part['probe_before']:.0%} → {part['probe_after']:.0%} "
                f"| {part['probe_drawings']:.0%} against {part['probe_flat_drawings']:.0%} |"
            )
    rank = figures[STYLES[0].name]["rank"]
    newline = "\n"
    file.write_text(
        f"""\
# Two style LoRAs for emoji

Low-rank updates (rank {rank}, alpha {rank}, half precision) of the transformer blocks in the denoiser of `../emoji`. \
Each turns its plain captions into another style, one that the model's training never showed. The caption has no word \
for it: the LoRA is the style.

```python
pipeline.load_lora_weights("sdopt/reference/loras", weight_name="{STYLES[0].name}.safetensors", adapter_name="style")
pipeline("police officer").images[0]
# Same rank, same layers: the other one can take its place without new modules.
pipeline.load_lora_weights(
    "sdopt/reference/loras", weight_name="{STYLES[1].name}.safetensors", adapter_name="style", hotswap=True
)
```

| file | size | style | drawings from | made by | licence |
|---|---:|---|---|---|---|
{newline.join(rows)}

## Training

`sdopt train-reference stage=loras` repeats it. The archive is checked against its SHA-512 digest, and the drawings are
matched to the concepts that the denoiser was trained on. Some of those concepts were held out from the LoRA. Only the
updates train; the denoiser and the text encoder stay as they are.

{newline.join(training)}

## Does it change the style?

Pictures ({STEPS} DDIM steps, guidance {GUIDANCE:g}) without the LoRA → with it, from the same noise, in latents of \
the model's own autoencoder:

- *distance*: mean Euclidean distance to the style's own drawing of the concept;
- *nearer*: share of pictures nearer to that drawing than to the flat one;
- *probe*: share that a linear probe takes for the style's, whatever they show. It was fitted to drawings of the \
concepts trained on, in this style and in the flat one; beside it, what it says of the drawings themselves, the \
style's against the flat ones.

| LoRA | concepts | tried | distance | nearer | probe | probe of drawings |
|---|---|---:|---:|---:|---:|---:|
{newline.join(comparison)}

What holds on held-out concepts is the style; what holds only on those trained on is drawings learnt by heart.

## Attribution

The drawings that these weights were trained on, and so in part the pictures that they make, derive from:

{newline.join(sources)}
- their packaging as Iconify JSON, https://github.com/iconify/icon-sets
"""
    )
