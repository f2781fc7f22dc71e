"""Tells what sdopt's own images were made from: by the record of the run in whose folder they lie."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdopt.apps.exchange.metadata import Origin
from sdopt.apps.exchange.settings import settings_of
from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.record.images import is_replaced
from sdopt.record.records import StudyResult, VariantResult


def origins_in(folder: Path) -> dict[str, Origin]:
    """Returns by file name what a run's record says of the images in a folder; {} if it is no folder of a run."""
    run = folder.resolve().parent.parent
    if not (run / "result.json").is_file():
        return {}
    try:
        result = read_result(run)
    except UsageError:  # damaged, or another program's: it says nothing
        return {}
    owners = [(variant, variant.images) for variant in result.variants]
    # What shows how far two baselines differ is the baseline's.
    owners += [(result.baseline_variant, images) for images in result.redrawn.values()]
    origins: dict[str, Origin] = {}
    for variant, images in owners:
        said = settings_of(settings_of_variant(result, variant))
        for record in images:
            file = run / record.path
            if file.parent == folder.resolve() and not is_replaced(run, record):
                origins[file.name] = Origin(
                    "sdopt", record.prompt, record.negative, record.seed, said
                )
    return origins


def settings_of_variant(result: StudyResult, variant: VariantResult) -> dict[str, Any]:
    """Returns what images of two runs must have in common, by the names that `sdopt judge` reads.

    Of images that other programs made, nothing is known.
    """
    if result.is_imported:
        return {}
    config = variant.config
    task, scheduler = config.task, config.scheduler
    size = config.shapes[0].size
    settings = {
        "model": config.model.source,
        "steps": config.workload.steps,
        "guidance_scale": config.workload.guidance(config.model),
        "sampler": scheduler.class_name,
        "size": f"{size}x{size}",
        "task": task.kind,
    }
    digest = variant.inputs.get("model", "")
    if _DIGEST.fullmatch(digest):
        settings["model_hash"] = digest
    if task.kind != "txt2img":
        settings["strength"] = task.strength
    further = dict(scheduler.options)
    for name in _SCHEDULES:
        if further.pop(f"use_{name}_sigmas", False):
            settings["schedule_type"] = name
    more = {
        "scheduler_options": further,
        "timesteps": scheduler.timesteps,
        "input_files": {
            name: variant.inputs[name] for name in _FILES if name in variant.inputs
        },
        "max_sequence_length": config.model.max_sequence_length,
    }
    settings |= {name: json.dumps(value) for name, value in more.items() if value}
    if lora := _lora_of(config.options.get("lora")):
        settings["lora"] = lora
    return settings


_DIGEST = re.compile(r"[0-9a-f]{16}")

_FILES = ("image", "mask", "latents")
"""Inputs of a variant that are files of the user's own, by their digests."""

_SCHEDULES = ("karras", "exponential", "beta")


def _lora_of(option: Any) -> str:
    """Returns the file and the weight of a LoRA, from an option as it was recorded; "" without one."""
    if not isinstance(option, Mapping) or not {"path", "weight_name"} <= option.keys():
        return ""
    file = option["weight_name"] or option["path"] or "packaged"
    return f"{Path(str(file)).as_posix()}:{option.get('scale', 1.0)}"
