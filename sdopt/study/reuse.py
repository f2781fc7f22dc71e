"""Lets images of timed calls count, so that the quality pass generates only the other ones, and a sample of them again.

A timed call makes the images that the quality pass would: of the same prompts, from the same noise. They count where
nothing else depends on the pass: a gate judges its calls, too, and a pass in larger batches takes less time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

from sdopt.record.images import digest_of
from sdopt.record.records import VariantResult
from sdopt.record.scores import ImageRecord
from sdopt.worker.draws import LATENTS, Draw, draw_of
from sdopt.worker.protocol import SampledImage

if TYPE_CHECKING:
    from sdopt.study.session import Session, VariantProcess

Place = tuple[int, int]
"""The position of a prompt, and of an image among those of the prompt."""

FEWEST_PROMPTS = 8
"""Prompts that the quality pass generates at least, by which the rules on its calls can judge later."""

_MOST_BYTES = 2**29
"""Memory for images until all rounds are timed; further ones are generated again."""


@dataclass
class TimedImages:
    """The images of a session's timed calls.

    Attributes:
        positions: of the prompts whose images count, once all rounds are timed (`settle`); the same for all variants.
    """

    session: Session
    positions: frozenset[int] = frozenset()
    _bytes: int = field(default=0, repr=False)

    @property
    def wanted(self) -> bool:
        """Whether timed calls are to return their images."""
        metrics, judges = (
            self.session.study.quality.metrics,
            self.session.result.config.gate.judges,
        )
        return (
            bool(metrics)
            and not judges
            and self.session.interleaved
            and self._drawn_as_timed
        )

    @cached_property
    def _drawn_as_timed(self) -> bool:
        """Whether the quality pass makes calls of as many prompts as the timed calls do."""
        batch = self.session.study.drawing_batch
        variants = [process.variant for process in self.session.processes]
        return all(
            draw_of(variant, batch).batch_size == variant.shapes[0].batch_size
            for variant in variants
        )

    def keep(self, process: VariantProcess, images: Sequence[SampledImage]) -> bool:
        """Keeps the images of a timed call, if there are any, and memory for them; returns whether it did."""
        self._bytes += sum(image.pixels.nbytes for image in images)
        if not images or self._bytes > _MOST_BYTES:
            return False
        process.pictures |= {
            (image.prompt_index, image.image_index): image for image in images
        }
        return True

    def settle(self) -> None:
        """Decides which images count: those that each variant has, without the sample that is generated again."""
        drawing = [
            process
            for process in self.session.processes
            if process.active and not process.row.is_control
        ]
        if not self.wanted or any(process.row.images for process in drawing):
            return
        covered: dict[str, set[int]] = {}
        for process in drawing:
            covered.setdefault(process.row.name, set()).update(
                prompt for prompt, _ in process.pictures
            )
        common = set.intersection(*covered.values()) if covered else set()
        # One of each process: that its timed calls make what the pass does is shown for it, too.
        sample: set[int] = set()
        for process in drawing:
            own = common & {prompt for prompt, _ in process.pictures}
            sample |= {min(own)} if own else set()
        prompts = min((len(process.variant.pictured) for process in drawing), default=0)
        again = max(0, FEWEST_PROMPTS - (prompts - len(common - sample)))
        sample |= set(sorted(common - sample)[:again])
        self.positions = frozenset(common - sample)

    def ahead(self, prompts: int) -> int:
        """Returns how many of so many prompts the pass leaves out, as far as that is decided."""
        return sum(position < prompts for position in self.positions)

    def left_out(self, draw: Draw) -> Draw:
        """Returns a draw without the prompts whose images count."""
        return replace(
            draw, others=frozenset(p for p in self.positions if p < len(draw.prompts))
        )

    def added(
        self,
        process: VariantProcess,
        draw: Draw,
        folder: Path,
        drawn: Sequence[ImageRecord],
    ) -> list[ImageRecord]:
        """Writes the images that count, and their latents, beside those that the pass has drawn for a variant.

        Returns:
            the records of both, in the order of prompts and images.
        """
        records, count = [*drawn], process.variant.workload.images_per_prompt
        latents = {}
        for place, (replicate, image) in self._pictures(
            process.row, draw.others
        ).items():
            record = replace(
                draw.record_of(*place, count, image.finite), process=replicate
            )
            file = folder / record.path
            Image.fromarray(image.pixels).save(file)
            records.append(replace(record, digest=digest_of(file)))
            latents[place] = image.latents
        if latents and (folder / LATENTS).is_file():
            _join_latents(folder / LATENTS, drawn, latents)
        return sorted(records, key=_place)

    def _pictures(
        self, row: VariantResult, prompts: Collection[int]
    ) -> dict[Place, tuple[int, SampledImage]]:
        """Returns a variant's images of some prompts, each with the process that it is of."""
        found: dict[Place, tuple[int, SampledImage]] = {}
        for process in self.session.processes:
            if process.row is not row:
                continue
            for place, image in process.pictures.items():
                if place[0] in prompts:
                    found.setdefault(place, (process.measurement.replicate, image))
        return found


def _place(record: ImageRecord) -> Place:
    return record.prompt_index, record.image_index


def _join_latents(
    file: Path,
    drawn: Sequence[ImageRecord],
    timed: Mapping[Place, np.ndarray | None],
) -> None:
    """Adds latents to a file that has those of `drawn`, in the order of prompts and images."""
    rows = dict(zip(map(_place, drawn), load_file(file)["latents"], strict=True))
    rows |= {place: latents for place, latents in timed.items() if latents is not None}
    save_file({"latents": np.stack([rows[place] for place in sorted(rows)])}, file)
