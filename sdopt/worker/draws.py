"""Which images a worker draws, and from which noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdopt.variant import Variant

_OTHER_NOISE = 1_000_000
"""Added to the seed where the noise shall be another."""

_LARGEST_BATCH, _BATCH_PIXELS = 12, 2**16
"""On two cores a batch of 12 images of 64×64 pixels draws 5.5 times as many a second as single calls do."""

_ALONE, _MANY = 3, 6
"""So many calls with prompts of a quality pass are timed while no other process works, if it has `_MANY` or more; else
one."""

LATENTS = "latents.safetensors"
"""Beside the images: `latents`, the final ones, float32 (n, channels, height, width), in the order of the images."""


@dataclass(frozen=True)
class Draw:
    """A pass over prompts: image j of prompt i starts from the noise of `seed + i · images_per_prompt + j`."""

    prompts: tuple[str, ...]
    batch_size: int
    """Prompts in one call."""
    seed: int
    size: int
    """Height and width of the images, in pixels."""
    threads: int | None = None
    """Of the CPU; None leaves them as they are."""

    @property
    def calls(self) -> int:
        """How many calls of the pipeline it takes."""
        return -(-len(self.prompts) // self.batch_size)

    @property
    def timed_again(self) -> int:
        """How many of them are made once more from other noise, alone and with all threads, to be timed."""
        return min(self.calls, _ALONE if self.calls >= _MANY else 1)


def timed_draw(variant: Variant, place: int = 0) -> Draw:
    """Returns the draw that timed calls at the shape in that place are of, each another batch.

    It is the quality pass's own, as far as that goes. So each timed call has its drawn counterpart, and as few of them
    as possible have the same prompts. Latents from a file need only be as many as the workload has prompts.
    """
    shape = variant.shapes[place]
    more = len(variant.pictured) > len(variant.prompts) and variant.workload.latents is None
    prompts = variant.pictured if more else variant.prompts
    return Draw(prompts, shape.batch_size, variant.workload.seed, shape.size)


def drawing_batch(variants: Sequence[Variant], wanted: int | None, judged: bool) -> int | None:
    """Returns how many prompts of the quality pass all variants draw in one call; None leaves that to each workload.

    One call for several small images takes little longer than one for a single image. The batch is the same for all
    variants, because another batch computes in another order; where a variant compiled or captured its own, or
    computes in 8 bits, all keep that of their workload. Where a gate judges, images are drawn as the timed calls draw
    them: what goes wrong in every eighth call must not hide in two large ones.

    Args:
        variants: of one study, those that run.
        wanted: `quality.batch_size`.
        judged: whether the study has a gate.
    """
    if wanted is not None:
        return wanted
    if judged:
        return None
    shapes = {variant.shapes[0] for variant in variants}
    fixed = any(option.fixed_batch for variant in variants for option in variant.optimizations.values())
    if fixed or len(shapes) > 1:
        return None
    [main] = shapes
    return max(main.batch_size, min(_LARGEST_BATCH, _BATCH_PIXELS // main.size**2))


def draw_of(variant: Variant, batch_size: int | None = None, threads: int | None = None) -> Draw:
    """Returns the draw of the images of a variant, in batches of its main shape's size unless another is given."""
    main = variant.shapes[0]
    return Draw(variant.pictured, batch_size or main.batch_size, variant.workload.seed, main.size, threads)


def floor_draws(draw: Draw, variant: Variant, prompts: int, threads: int) -> dict[str, list[Draw]]:
    """Returns how the baseline is drawn once more for each floor: the preferred way first.

    `sampling` starts from other noise. `numerical` has another batch size and number of threads, which changes the
    order of sums and nothing else; it comes last, because a larger batch may find no memory.

    Args:
        draw: how its images were drawn.
        variant: the baseline.
        prompts: how many.
        threads: that its calls are timed with.
    """
    first = replace(draw, prompts=draw.prompts[:prompts])
    # The timed calls' batch, where images are drawn in another: the floor then tells what that change makes.
    timed = variant.shapes[0].batch_size
    batches = (timed,) if timed != first.batch_size else (4, 2) if timed == 1 else (1,)
    others = max(1, threads // 2) if draw.threads in (None, threads) else threads
    draws = {"numerical": [replace(first, batch_size=size, threads=others) for size in batches]}
    if variant.workload.latents is not None:
        return draws
    return {"sampling": [replace(first, seed=first.seed + _OTHER_NOISE)]} | draws
