"""Lets images of timed calls count, so that the quality pass generates only the other ones, and a sample of them again.

A timed call makes the images that the quality pass would: of the same prompts, from the same noise. They count where
nothing else depends on the pass: a gate judges its calls, too, and a pass in larger batches takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePath

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sdopt.record.images import is_there
from sdopt.record.records import VariantResult
from sdopt.record.scores import ImageRecord
from sdopt.study.session import Session, VariantProcess
from sdopt.variant import Variant
from sdopt.worker.draws import LATENTS, Draw, draw_of, latents_file
from sdopt.worker.protocol import SampledImage

Place = tuple[int, int]
"""The position of a prompt, and of an image among those of the prompt."""

FEWEST_PROMPTS = 8
"""Prompts that the quality pass generates at least, by which the rules on its calls can judge later."""

_MOST_BYTES = 2**29
"""Memory for images until all rounds are timed; further ones are generated again."""


@dataclass
class TimedImages:
    """The images of a session's timed calls."""

    session: Session
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
        """Writes the images that count: of those that each variant has, without the sample that is generated again."""
        drawing = [
            process
            for process in self.session.processes
            if process.active and not process.row.is_control
        ]
        if not self.wanted or any(
            process.row.images or process.row.kept_images for process in drawing
        ):
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
            prompts_of_it = common & {prompt for prompt, _ in process.pictures}
            sample |= {min(prompts_of_it)} if prompts_of_it else set()
        prompts = min((len(process.variant.pictured) for process in drawing), default=0)
        again = max(0, FEWEST_PROMPTS - (prompts - len(common - sample)))
        sample |= set(sorted(common - sample)[:again])
        variants = {process.row.name: process for process in drawing}.values()
        try:
            for process in variants:
                self._write(process.row, process.variant, common - sample)
        except (OSError, SafetensorError):
            # The disk is full: each variant draws all of them.
            for process in variants:
                process.row.kept_images = []

    def _write(self, row: VariantResult, variant: Variant, prompts: Set[int]) -> None:
        """Writes a variant's images of some prompts, and their latents, as the pass does with those that it draws."""
        study, draw = self.session.study, draw_of(variant)
        name = study.slug(row)
        folder = study.folder / "images" / name
        folder.mkdir(parents=True, exist_ok=True)
        places: set[Place] = set()
        for process in self.session.processes:
            for place, image in process.pictures.items():
                if process.row is not row or place[0] not in prompts or place in places:
                    continue
                places.add(place)
                record = draw.stored(image, variant.workload.images_per_prompt, folder)
                record.path = f"images/{name}/{record.path}"
                record.process = process.measurement.replicate
                row.kept_images.append(record)


def kept_of(row: VariantResult, draw: Draw, folder: Path) -> list[ImageRecord]:
    """Returns the images of a variant that need not be drawn, because they are in the run's folder.

    Of what an earlier session drew, whole calls at the end are drawn again, so that the rules on the calls of a pass
    have enough of one process.
    """
    records = [
        record
        for record in row.kept_images
        if record.prompt_index < len(draw.prompts) and is_there(folder, record)
    ]
    timed = {record.prompt_index for record in records if record.process is not None}
    drawn = {record.prompt_index for record in records} - timed
    calls = replace(draw, others=frozenset(timed)).calls
    if calls >= FEWEST_PROMPTS:
        most = (calls - FEWEST_PROMPTS) * draw.batch_size
        drawn = set(sorted(drawn)[:most])
    return [record for record in records if record.prompt_index in timed | drawn]


def join_latents(folder: Path, records: Sequence[ImageRecord]) -> None:
    """Puts the latents of a pass's images into one file, in the order of `records`; there is none where some lack."""
    files = [latents_file(folder / PurePath(record.path).name) for record in records]
    if not files or not all(file.is_file() for file in files):
        return
    latents = [load_file(file)["latents"] for file in files]
    with suppress(OSError, SafetensorError):  # where the disk is full, they stay apart
        save_file({"latents": np.stack(latents)}, folder / LATENTS)
        for file in files:
            file.unlink()


def place_of(record: ImageRecord) -> Place:
    """Returns where an image stands in a pass."""
    return record.prompt_index, record.image_index
