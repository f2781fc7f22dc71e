"""Defines which images a worker draws, and from which noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from safetensors.numpy import save_file

from sdopt.record.images import digest_of
from sdopt.record.scores import ImageRecord
from sdopt.variant import Variant
from sdopt.worker.protocol import SampledImage

_OTHER_NOISE = 1_000_000
"""Added to the seed to get different noise."""

LARGEST_BATCH, _BATCH_PIXELS = 12, 2**16
"""Limits of the default batch, in images and in pixels: on two cores, calls of 12 images of 64×64 pixels draw 5.5 times
as many images a second as single calls do."""

LATENTS = "latents.safetensors"
"""File beside the images with the tensor `latents`: the final latents, float32 (n, channels, height, width), in the
order of the images. While a pass is not whole, each image has such a file of its own: `latents_file`."""


def latents_file(image: Path) -> Path:
    """Returns the file with the final latents of one image, of float32 (channels, height, width)."""
    return image.with_suffix(".safetensors")


@dataclass(frozen=True)
class Draw:
    """A pass over prompts: image j of prompt i starts from the noise of `seed + i · images_per_prompt + j`."""

    prompts: tuple[str, ...]
    batch_size: int
    """Prompts in one call."""
    seed: int
    size: int
    """Height and width of the images, in pixels."""
    negatives: tuple[str, ...] = ()
    """The negative prompt of each prompt; () gives none."""
    threads: int | None = None
    """Number of CPU threads; None leaves it unchanged."""
    others: frozenset[int] = frozenset()
    """Positions of prompts that are not drawn: their images are there."""

    @property
    def positions(self) -> list[int]:
        """The positions of the prompts that are drawn."""
        return [
            position
            for position in range(len(self.prompts))
            if position not in self.others
        ]

    @property
    def calls(self) -> int:
        """How many calls of the pipeline the draw takes."""
        return -(-len(self.positions) // self.batch_size)

    def stored(self, image: SampledImage, images: int, folder: Path) -> ImageRecord:
        """Stores one of the `images` of a prompt losslessly in a folder, beside its latents.

        Returns its record, whose path is the name of its file. Raises OSError or SafetensorError.
        """
        position = image.prompt_index
        record = ImageRecord(
            self.prompts[position],
            position,
            image.image_index,
            self.seed + position * images + image.image_index,
            f"{position:04d}_{image.image_index:02d}.png",
            image.finite,
            self.negatives[position] if self.negatives else "",
        )
        file = folder / record.path
        Image.fromarray(image.pixels).save(file)
        if image.latents is not None:
            save_file({"latents": image.latents}, latents_file(file))
        return replace(record, digest=digest_of(file))


def timed_draw(variant: Variant, shape_index: int = 0) -> Draw:
    """Returns the draw whose batches the timed calls at a shape use, one batch per call.

    It is the draw of the quality pass, as far as that has enough prompts. So each timed call has a drawn counterpart,
    and as few calls as possible share prompts. A file of latents needs no more than the workload has prompts.
    """
    shape = variant.shapes[shape_index]
    more = (
        len(variant.pictured) > len(variant.prompts)
        and variant.workload.latents is None
    )
    prompts = variant.pictured if more else variant.prompts
    return Draw(
        prompts, shape.batch_size, variant.workload.seed, shape.size, variant.negatives
    )


def drawing_batch(
    variants: Sequence[Variant],
    wanted: int | None,
    judged: bool,
    largest: int = LARGEST_BATCH,
) -> int | None:
    """Returns how many prompts of the quality pass all variants draw in one call; None uses each workload's batch.

    One call for several small images takes little longer than one for a single image. All variants use the same batch
    size, because another batch size computes in another order. If a variant compiles or captures a graph for its batch,
    or computes in 8 bits, all keep the batch of their workload. If a gate judges, too: an error in every eighth call
    must not be hidden by making only two large calls. `wanted` is `quality.batch_size`, `largest` the most images.
    """
    if any(variant.mixes_masks for variant in variants):
        return None
    if wanted is not None:
        return wanted
    if judged or any(variant.depends_on_batch for variant in variants):
        return None
    shapes = {variant.shapes[0] for variant in variants}
    if len(shapes) > 1:
        return None
    for variant in variants:
        options = variant.optimizations.values()
        if any(option.fixed_for(variant.model) for option in options):
            return None
    [main] = shapes
    return max(main.batch_size, min(largest, _BATCH_PIXELS // main.size**2))


def draw_of(
    variant: Variant, batch_size: int | None = None, threads: int | None = None
) -> Draw:
    """Returns the draw of a variant's images, in batches of its main shape's batch size unless another is given."""
    main = variant.shapes[0]
    batch = batch_size or main.batch_size
    return Draw(
        variant.pictured,
        batch,
        variant.workload.seed,
        main.size,
        variant.negatives,
        threads,
    )


def floor_draws(
    draw: Draw, variant: Variant, prompts: int, threads: int
) -> dict[str, list[Draw]]:
    """Returns, for each floor, the ways to draw the baseline again, the preferred one first.

    `sampling` starts from other noise. `numerical` uses another batch size and number of threads, which changes only
    the order of sums; it comes last, because a larger batch may run out of memory. `threads` are those of timed calls.
    Where images depend on the batch, the number of threads alone is another.
    """
    first = replace(draw, prompts=draw.prompts[:prompts])
    # If images are drawn in another batch than timed calls use, the floor uses the latter, to measure that change.
    timed = variant.shapes[0].batch_size
    batches = (timed,) if timed != first.batch_size else (4, 2) if timed == 1 else (1,)
    others = max(1, threads // 2) if draw.threads in (None, threads) else threads
    if variant.depends_on_batch:
        batches = (first.batch_size,)
        if others == (draw.threads or threads):
            others += 1
    draws = {
        "numerical": [
            replace(first, batch_size=size, threads=others) for size in batches
        ]
    }
    if variant.workload.latents is not None:
        return draws
    return {"sampling": [replace(first, seed=first.seed + _OTHER_NOISE)]} | draws
