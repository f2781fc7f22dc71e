"""Loads the pipeline of a variant that was measured."""

import json
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.assembly import Assembly
from sdopt.config.composer import composer_of
from sdopt.config.models import own_functions
from sdopt.config.overrides import group_of, key_of, merge_overrides
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.probe import probe_device
from sdopt.library.state import (
    Optimized,
    as_prompts,
    keep,
    named_as_chosen,
    require_prompts,
)
from sdopt.measure.generators import kept_generators
from sdopt.pipelines.loading import call_arguments, guidance_of
from sdopt.record.records import VariantResult
from sdopt.report.outcome import Outcome, load_result
from sdopt.schema import Tracking
from sdopt.study.fingerprint import changed_inputs, of_model
from sdopt.tracking.runs import download_run
from sdopt.tracking.store import end_process
from sdopt.variant import Variant

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


@kept_generators()
def load(
    result: str | Path | Outcome,
    variant: str | None = None,
    *,
    prompts: Iterable[str] | None = (),
    device: "str | torch.device | None" = None,
    tracking_uri: str | None = None,
    config_dir: str | Path | None = None,
) -> "DiffusionPipeline":
    """Returns the pipeline of a variant that was measured, with its options applied.

    Its calls take the measured number of steps and of images per prompt, size, guidance scale, strength and
    `workload.negative_prompt` unless they are given others. PyTorch's number of threads is the whole program's, and
    stays as it is: on a CPU, `torch.set_num_threads` with the measured `hardware.threads` gives the measured speed. A
    package of `compiler=aot` is valid only for the number of threads with which it was compiled.

    Warns (UserWarning) if files or settings of the variant are others than those measured.

    Args:
        result: what `sdopt.run` returned, a run's folder, its `result.json`, or the id of an MLflow run of the study or
            of a variant.
        variant: the variant's name, as tables show it; may be left out where there is one besides the baseline, and for
            the id of a variant's run.
        prompts: all prompts of the calls to come, for `memory=precomputed_embeddings`, and their negative prompts.
        device: `cpu`, `cuda` or `cuda:N`; None is what was measured.
        tracking_uri: where MLflow keeps the run; None is sdopt's default.
        config_dir: a folder with groups of your own, where the study used one.

    Raises:
        UsageError: there is no such result or variant, its files are missing, or it calls functions of one's own.
        ConflictError: the variant cannot run on this machine.
    """
    prompts = as_prompts(prompts)
    planned = measured(
        result, variant, tracking_uri=tracking_uri, config_dir=config_dir
    )
    probed = probe_device(planned.hardware.device if device is None else str(device))
    if problems := planned.conflicts(probed):
        raise ConflictError(problems)
    require_prompts(named_as_chosen(planned.optimizations, planned.choices), prompts)
    assembly = Assembly.load(planned, probed.torch_name)
    usual = _defaults(planned)
    if prompts:
        assembly.prepare_inputs([*prompts, *filter(None, [usual["negative_prompt"]])])
    ctx = planned.context(probed)
    keep(assembly.pipe, Optimized(assembly, ctx, None, prompts, usual))
    return assembly.pipe


def measured(
    result: str | Path | Outcome,
    variant: str | None = None,
    changes: Sequence[str] = (),
    *,
    tracking_uri: str | None = None,
    config_dir: str | Path | None = None,
) -> Variant:
    """Composes a variant that was measured, with `changes` that win over the recorded overrides; see `load`."""
    study, named = _result(result, tracking_uri)
    row = study.variant(_named(study, variant or named))
    _require_no_code(row.name, own_functions(row.overrides))
    overrides = merge_overrides(row.overrides, changes)
    with composer_of(
        overrides, None if config_dir is None else Path(config_dir)
    ) as composer:
        planned = composer.variant(row.name)
    _require_no_code(row.name, planned.functions)
    changed = {group_of(key_of(change)) for change in changes}
    if "model" not in changed:
        _warn_of_other_files(row, planned, changed <= _SAME_FILES)
        _warn_of_other_settings(row, planned, changed)
    return planned


_SAME_FILES = {"workload", "hardware", "protocol"}
"""Sections that may change, and leave a variant's files as they were."""

_FILES = {
    "model": "the model's files",
    "parts": "the files of its options",
    "options": "the code of its own options",
}
"""What a variant is loaded from, by the name of its digest."""


def _warn_of_other_files(
    row: VariantResult, planned: Variant, same_options: bool
) -> None:
    """Warns of files that are others than those measured, as of a model that was trained again under its old name.

    Where the caller has not the `same_options`, their files are meant to be others.
    """
    changed = changed_inputs(planned, row.inputs, of_model)
    for name, what in _FILES.items():
        if name in changed and (same_options or name == "model"):
            text = f"variant={row.name}: not {what} that were measured: images and times may be others"
            warnings.warn(text, UserWarning, stacklevel=3)


_OF_MEASURING = {
    *("protocol", "quality", "gate", "hardware"),
    *("tracking", "study", "objective", "dry_run"),
}
"""Sections and keys that say how a variant is measured, and not what it is."""


def _warn_of_other_settings(
    row: VariantResult, planned: Variant, changed: Collection[str]
) -> None:
    """Warns of settings that the recorded words no longer mean, as after a file of one's own options was edited.

    Those in sections that the caller has `changed` are meant to be others. A key that only one side has is of another
    version of sdopt, and so is where the class of an option lies.
    """
    was, now = row.config.flat(), planned.config.flat()
    apart = []
    for key in was.keys() & now.keys():
        if group_of(key) in _OF_MEASURING.union(changed) or key.endswith("_target_"):
            continue
        if _as_recorded(was[key]) != _as_recorded(now[key]):
            apart.append(f"{key} was {was[key]} and is {now[key]}")
    if apart:
        text = f"variant={row.name}: not the settings that were measured: {'; '.join(sorted(apart))}"
        warnings.warn(text, UserWarning, stacklevel=3)


def _as_recorded(value: Any) -> str:
    """Returns a value as a result's file has it, in which a tuple is a list."""
    return json.dumps(value, default=str)


def _require_no_code(variant: str, functions: Sequence[str]) -> None:
    if functions:
        raise UsageError(
            f"variant={variant}: runs code, {', '.join(functions)}; a result never decides what runs: load another "
            "variant, or call the function yourself, and sdopt.optimize(pipe, …) for the other options"
        )


def _result(
    source: str | Path | Outcome, tracking_uri: str | None
) -> tuple[Outcome, str | None]:
    """Returns a result, and the variant that its MLflow run is of, if it is named by such a run."""
    if isinstance(source, Outcome):
        return source, None
    if Path(source).exists():
        return load_result(source), None
    if Path(source).suffix or len(Path(source).parts) > 1:
        raise UsageError(f"{source}: no such folder")
    tracking = Tracking() if tracking_uri is None else Tracking(uri=tracking_uri)
    try:
        study, variant = download_run(str(source), tracking)
    finally:
        end_process()
    return Outcome.of(study), variant


def _named(result: Outcome, name: str | None) -> str:
    names = [row.name for row in result.variants if row.role != "control"]
    candidates = [candidate for candidate in names if candidate != result.baseline]
    if name is None and len(candidates) == 1:
        return candidates[0]
    if name not in names:
        problem = (
            "variant: name"
            if name is None
            else f"variant={name}: not in the study; choose"
        )
        raise UsageError(f"{problem} one of {', '.join(names)}")
    return name


def _defaults(variant: Variant) -> dict[str, Any]:
    """Returns the arguments of a call that was measured, but for its prompts and its noise."""
    guidance, scale = guidance_of(variant.model), variant.guidance_scale
    negative = variant.workload.negative_prompt
    if negative is None and guidance.needs_negative and guidance.guides(scale):
        negative = ""  # without any, the pipeline would not be guided
    return {
        "num_inference_steps": variant.workload.steps,
        "num_images_per_prompt": variant.workload.images_per_prompt,
        "strength": variant.task.strength,
        guidance.argument: scale,
        "negative_prompt": negative,
        "height": variant.size,
        "width": variant.size,
        **call_arguments(variant.model),
    }
