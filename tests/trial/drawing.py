"""Draws the images of sabotaged and honest options without timing them, from the prompts and noise of a study.

A variant of a study has three processes and dozens of timed calls; an option that only changes images needs a few calls
in batches. The images are drawn as in a study, by the worker's own code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sdopt.hardware.device import Device
from sdopt.optimizations.base import Optimization
from sdopt.results.configuration import RecordedConfig
from sdopt.results.scores import ImageRecord
from sdopt.variant import Variant
from sdopt.worker.calls import call_apart
from sdopt.worker.draws import draw_of, drawing_batch
from sdopt.worker.forkserver import StartContext
from sdopt.worker.host import PipelineHost


@dataclass(frozen=True)
class Drawing:
    """One pass over the prompts.

    Attributes:
        name: the drawing's name, from which the name of its folder is made.
        options: the options to apply to the pipeline, by axis.
        seed: added to the seed of the study.
    """

    name: str
    options: Mapping[str, Optimization]
    seed: int = 0


def draw(
    context: StartContext,
    config: RecordedConfig,
    device: Device,
    prompts: Sequence[str],
    drawings: Sequence[Drawing],
    folder: Path,
    note: Callable[[str], None] = lambda name: None,
) -> dict[str, list[ImageRecord]]:
    """Draws the images of all drawings one after the other, in one process.

    Args:
        context: starts the process.
        config: model, scheduler, task and workload.
        device: the device to draw on.
        prompts: the prompts of each drawing.
        drawings: what to draw.
        folder: the folder in which each drawing gets a folder; paths of the records are relative to it.
        note: called with the name of each drawing before it starts.

    Raises:
        ChildDiedError: the process ended without a result.
    """
    return call_apart(context, _drawn, config, device, tuple(prompts), tuple(drawings), folder, note=note)


def _drawn(
    config: RecordedConfig,
    device: Device,
    prompts: tuple[str, ...],
    drawings: tuple[Drawing, ...],
    folder: Path,
    note: Callable[[str], None],
) -> dict[str, list[ImageRecord]]:
    found = {}
    for drawing in drawings:
        note(drawing.name)
        workload = replace(config.workload, seed=config.workload.seed + drawing.seed)
        variant = Variant(
            drawing.name,
            choices=dict.fromkeys(drawing.options, drawing.name),
            overrides=(),
            model=config.model,
            task=config.task,
            scheduler=config.scheduler,
            workload=workload,
            protocol=config.protocol,
            hardware=config.hardware,
            optimizations=drawing.options,
            prompts=prompts[:1],
            pictured=prompts,
        )
        host = PipelineHost(variant, device)
        host.prepare()
        plan, subfolder = (
            draw_of(variant, drawing_batch([variant], config.quality.batch_size, judged=False)),
            folder_of(drawing.name),
        )
        records = [record for batch in range(plan.calls) for record in host.generate(batch, plan, folder / subfolder)]
        found[drawing.name] = [replace(record, path=f"{subfolder}/{record.path}") for record in records]
    return found


def folder_of(name: str) -> str:
    """Returns the name of a drawing's folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
