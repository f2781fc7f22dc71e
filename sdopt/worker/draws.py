"""Which images a worker draws, and from which noise."""

from dataclasses import dataclass, replace

from sdopt.variant import Variant

_OTHER_NOISE = 1_000_000
"""Added to the seed where the noise shall be another."""

LATENTS = "latents.safetensors"
"""Beside the images: `latents`, the final ones, float32 (n, channels, height, width), in the order of the images."""


@dataclass(frozen=True)
class Draw:
    """A pass over prompts: image j of prompt i starts from the noise of `seed + i · images_per_prompt + j`."""

    prompts: tuple[str, ...]
    batch_size: int
    """Prompts in one call."""
    seed: int
    threads: int | None = None
    """Of the CPU; None leaves them as they are."""

    @property
    def calls(self) -> int:
        """How many calls of the pipeline it takes."""
        return -(-len(self.prompts) // self.batch_size)


def timed_draw(variant: Variant) -> Draw:
    """Returns the draw of the prompts that are timed; every timed call draws its first batch."""
    return Draw(variant.prompts, variant.workload.batch_size, variant.workload.seed)


def draw_of(variant: Variant) -> Draw:
    """Returns the draw of the images of a variant, as its workload says."""
    return Draw(variant.pictured, variant.workload.batch_size, variant.workload.seed)


def floor_draws(variant: Variant, prompts: int, threads: int) -> dict[str, list[Draw]]:
    """Returns how the baseline is drawn once more for each floor, of so many prompts: the preferred way first.

    `sampling` starts from other noise. `numerical` has another batch size and number of threads, which changes the
    order of sums and nothing else; it comes last, because a larger batch may find no memory.
    """
    first = replace(draw_of(variant), prompts=variant.pictured[:prompts])
    batches = (4, 2) if first.batch_size == 1 else (1,)
    draws = {"numerical": [replace(first, batch_size=size, threads=max(1, threads // 2)) for size in batches]}
    if variant.workload.latents is not None:
        return draws
    return {"sampling": [replace(first, seed=first.seed + _OTHER_NOISE)]} | draws
