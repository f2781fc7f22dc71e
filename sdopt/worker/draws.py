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
        return -(-len(self.prompts) // self.batch_size)


def timed_draw(variant: Variant) -> Draw:
    """The prompts that are timed; the first batch is what every timed call draws."""
    return Draw(variant.prompts, variant.workload.batch_size, variant.workload.seed)


def draw_of(variant: Variant) -> Draw:
    """The images of a variant: as its workload says."""
    return Draw(variant.pictured, variant.workload.batch_size, variant.workload.seed)


def floor_draws(variant: Variant, prompts: int, threads: int) -> dict[str, Draw]:
    """The baseline once more, of so many prompts: computed in another order, and from other noise.

    `numerical` has another batch size and number of threads, which changes the order of sums and nothing else.
    """
    first = replace(draw_of(variant), prompts=variant.pictured[:prompts])
    other = 4 if first.batch_size == 1 else 1
    draws = {"numerical": replace(first, batch_size=other, threads=max(1, threads // 2))}
    if variant.workload.latents is None:
        draws["sampling"] = replace(first, seed=first.seed + _OTHER_NOISE)
    return draws
