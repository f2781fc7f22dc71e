"""Fetches, builds and checks the models of variants before a study measures them or a server serves them."""

import json
from collections.abc import Collection, Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from sdopt.assembly import left_out_by
from sdopt.config.composer import HydraComposer
from sdopt.errors import ConflictError, UsageError, print_problems
from sdopt.hardware.device import Device
from sdopt.hardware.faults import faults_of
from sdopt.pipelines import sampling
from sdopt.pipelines.catalog import architecture_folder, path_of
from sdopt.pipelines.components import require_parts
from sdopt.pipelines.factory import describe, remember
from sdopt.pipelines.families import (
    foreign_vae,
    settings_of_folder,
    titles_of_folder,
    twin_of_folder,
)
from sdopt.pipelines.family import family_named
from sdopt.pipelines.fetching import fetch_models
from sdopt.pipelines.loading import (
    family_of,
    folder_of,
    guidance_of,
    part_config,
    pipeline_of,
    sampling_remarks,
)
from sdopt.pipelines.sampling import answers_to, unanswered
from sdopt.pipelines.sampling import remember as remember_sampling
from sdopt.pipelines.stored import transformer_in
from sdopt.pipelines.transformer_files import (
    is_transformer,
    source_of,
    uncompared_vae,
)
from sdopt.pipelines.twins import (
    another_twin,
    assumed,
    other_work,
    still_distilled,
    titles_of,
)
from sdopt.quality.available import PUBLISHED, fetch_features, is_in_cache
from sdopt.record.files import short_digest, write_cached
from sdopt.schema import Model
from sdopt.scratch import cache_folder
from sdopt.variant import Variant
from sdopt.worker.child import in_process
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine


def awaits_clip(composer: HydraComposer) -> bool:
    """Returns whether the images of a model on the hub would be scored by a published CLIP, which is not here yet."""
    return (
        composer.chooses_features
        and composer.current.model.weights == "hub"
        and not is_in_cache(PUBLISHED)
    )


def fetch_clip(composer: HydraComposer) -> None:
    """Downloads the CLIP that a study awaits, and composes again; where it cannot be had, says so and goes on."""
    try:
        fetch_features(PUBLISHED)
    except UsageError as error:
        print_problems(f"no CLIP score: {problem}" for problem in error.problems)
    else:
        composer.refresh()


def fetch(variants: Sequence[Variant], context: StartContext) -> None:
    """Downloads or builds the models of variants, and downloads what their options read. Raises UsageError."""
    for model, task in dict.fromkeys(
        (v.model, v.task) for v in variants if v.model.factory is not None
    ):
        mine = [variant for variant in variants if variant.model == model]
        left_out = partial(left_out_by, mine)
        described = in_process(
            context, describe, model, task, left_out, what=model.origin
        )
        remember(model, described)
        if described.size not in (None, model.size) and any(
            variant.workload.size is None for variant in mine
        ):
            raise UsageError(
                f"{model.origin}: its images have {described.size}×{described.size} pixels, and model.size={model.size}: "
                f"add model.size={described.size}, or choose another size by workload.size"
            )
    fetch_models(variant.model for variant in variants)
    for variant in variants:
        variant.files(fetch=True)


def make_ready(
    variants: Sequence[Variant], device: Device, context: StartContext
) -> None:
    """Fetches and checks the models of variants that are to run on a device.

    Raises:
        UsageError: a model cannot be fetched or built.
        ConflictError: what a model on the hub, or a LoRA, cannot do, which is known once it is here.
    """
    fetch(variants, context)
    check_models(variants, ("path", "hub"), context)
    conflicts = chain.from_iterable(variant.conflicts(device) for variant in variants)
    if problems := [*dict.fromkeys(conflicts)]:
        raise ConflictError(problems)


def check_models(
    variants: Sequence[Variant], weights: Collection[str], context: StartContext
) -> None:
    """Checks that models whose weights are of some origins can be built, since options read their configuration.

    Raises:
        UsageError: a model cannot be built; with the remarks on it, which are not printed any more.
    """
    for model in dict.fromkeys(
        variant.model for variant in variants if source_of(variant.model) in weights
    ):
        try:
            in_process(context, require_parts, model, what=f"model={model.name}")
        except UsageError as error:
            scheduler = next(
                variant.scheduler for variant in variants if variant.model == model
            )
            raise UsageError(
                [*error.problems, *sampling_remarks(model, scheduler)]
            ) from error


def check_sampling(variants: Sequence[Variant], context: StartContext) -> None:
    """Lets a process that has diffusers find out whether schedulers suit their models: this one need not import it."""
    configs = (
        (part_config(variant.model, "scheduler"), variant) for variant in variants
    )
    asked = unanswered(
        (dict(config), variant_of_it.scheduler, variant_of_it.workload.steps)
        for config, variant_of_it in configs
        if config
    )
    if not asked:
        return
    file = _answers_file()
    kept = _kept_answers(file)
    remember_sampling(kept)
    if asked := unanswered(asked):
        answers = in_process(context, answers_to, asked, what="the scheduler")
        remember_sampling(answers)
        write_cached(file, json.dumps(kept | answers).encode())


def _kept_answers(file: Path) -> dict[str, list[str]]:
    """Returns what earlier commands found of schedulers; {} if that cannot be read."""
    try:
        answers: dict[str, list[str]] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return answers


def _answers_file() -> Path:
    """Returns where answers are kept that the same libraries and the same code gave."""
    versions = " ".join(version(name) for name in ("diffusers", "torch"))
    code = Path(sampling.__file__).read_bytes()
    digest = short_digest(versions.encode() + code)
    return cache_folder() / "sdopt" / "sampling" / f"{digest}.json"


def card_remarks(variants: Sequence[Variant], machine: Machine) -> list[str]:
    """Returns known faults of the card in the number types of the variants, each once."""
    types = set(chain.from_iterable(variant.number_types for variant in variants))
    if not machine.device.is_cuda:
        return []
    return [
        f"{machine.device.name}: {fault}"
        for fault in faults_of(machine.device.name, machine.sheet, types)
    ]


def remarks_on_variants(variants: Sequence[Variant], machine: Machine) -> list[str]:
    """Returns what spoils images and nothing says: faults of the card, and how models are sampled; each once."""
    lines = dict.fromkeys(card_remarks(variants, machine))
    for variant in variants:
        steps = variant.workload.steps
        lines |= dict.fromkeys(
            sampling_remarks(variant.model, variant.scheduler, steps)
        )
        lines |= dict.fromkeys(remarks_on_model(variant))
    return list(lines)


def remarks_on_model(variant: Variant) -> list[str]:
    """Returns what speaks for other steps or guidance than a variant has, and for another VAE in its model."""
    lines = variant.overdone()
    model = variant.model
    titles, name = _titles(model)
    if line := assumed(titles, name):
        lines.append(f"model={model.name}: {line}")
    if line := _of_another_size(variant):
        lines.append(line)
    vae = part_config(model, "vae")
    if vae and (line := foreign_vae(pipeline_of(model), vae)):
        lines.append(f"{model.origin}: {line}")
    if vae and model.parts and (line := uncompared_vae(model, folder_of(model))):
        lines.append(line)
    if line := _beside_another(model):
        lines.append(f"model.base={model.base}: is not that of {model.path}: {line}")
    return lines


_OF_OPTION = ("folder", 512)
"""The name and the size of the option `model=folder`, where nothing else was found or said."""


def _of_another_size(variant: Variant) -> str | None:
    """Returns a line if images have another size than a folder says: only `model=PATH` finds that, and no preset."""
    model = variant.model
    if (model.name, model.size) != _OF_OPTION or variant.workload.size:
        return None
    size = settings_of_folder(path_of(model)).get("size", model.size)
    if size == model.size:
        return None
    return f"model.size={model.size}: {model.path} says {size}, which model=PATH on the command line finds"


def _beside_another(model: Model) -> str | None:
    """Returns a line if a transformer in a file says that it is sampled otherwise than the pipeline of its base."""
    if model.base is None or not is_transformer(model):
        return None
    base, file = Path(model.base).expanduser(), path_of(model)
    kind = transformer_in(file)
    if kind is None:
        return None
    guided = guidance_of(model) == family_named(kind).guidance
    if guided and (line := still_distilled(file, kind)):
        return line
    name = model.name if architecture_folder(model) else None
    if base.is_dir():
        name = twin_of_folder(base.absolute())
    if name is None:
        return None
    return other_work(file, kind, name) or another_twin(file, name)


def _titles(model: Model) -> tuple[list[str], str]:
    """Returns what the author calls a transformer, in a file or a folder, and the published model that it is taken for."""
    if is_transformer(model):
        return titles_of(path_of(model)), model.name
    if model.weights != "path" or model.path is None:
        return [model.origin], ""
    folder = path_of(model).absolute()
    # A pipeline says by itself whether guidance was distilled into its weights.
    says = family_of(model).distilled_if is not None
    twin = None if says else twin_of_folder(folder)
    return titles_of_folder(folder), twin or ""
