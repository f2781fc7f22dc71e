"""Plans what options do to a pipeline: composes and checks them, and fetches their files; nothing is changed yet."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdopt.assembly import Assembly
from sdopt.config.composer import composer_of
from sdopt.config.groups import optimization_options, override_of
from sdopt.config.overrides import group_of, key_of
from sdopt.config.sections import SECTION_NAMES
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.probe import probe_device
from sdopt.library.state import named_as_chosen, require_prompts
from sdopt.options.assumptions import as_loaded
from sdopt.options.base import Context, Optimization, loading_arguments
from sdopt.options.layout import Layout
from sdopt.options.lora import Loaded
from sdopt.options.memory import LayerwiseCasting, TinyVae
from sdopt.options.precision import FLOATS, FixedVae, FullVae, Precision
from sdopt.pipelines.catalog import PACKAGED
from sdopt.pipelines.factory import configs_of
from sdopt.pipelines.families import factor_of, side_of
from sdopt.pipelines.family import class_of
from sdopt.pipelines.loading import LoadedModel, family_of
from sdopt.pipelines.loras import lora_layers
from sdopt.pipelines.parts import casting_hook, denoiser_of, networks_of
from sdopt.pipelines.sampling import scheduler_like, unread_by, unseeded, unsuited
from sdopt.pipelines.tasks import task_of
from sdopt.record.choices import as_choice
from sdopt.schema import Scheduler, Workload

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def plan_for(
    pipe: "DiffusionPipeline",
    groups: Mapping[str, str | Sequence[str]],
    overrides: Sequence[str],
    prompts: Sequence[str],
    folder: Path | None,
) -> tuple[Assembly, Context, dict[str, Any]]:
    """Returns what `optimize` does to a pipeline; its arguments are described there, and the errors that it raises.

    Returns:
        the options, to be applied to the pipeline; what their conflicts were decided from; and the components, by name,
        that take the place of the pipeline's own.
    """
    _require_applicable(groups, overrides, folder)
    if reasons := list(as_loaded(pipe, networks_of(pipe))):
        raise ConflictError(reasons)
    words = [
        *(override_of(group, _as_value(chosen)) for group, chosen in groups.items()),
        *overrides,
    ]
    with composer_of(words, folder) as composer:
        variant = composer.variant("pipeline", words)
    options = {
        axis: option for axis, option in variant.applied if group_of(axis) in groups
    }
    model = _model_of(pipe)
    scheduler = (
        scheduler_like(pipe.scheduler, variant.scheduler)
        if "scheduler" in groups
        else pipe.scheduler
    )
    named = named_as_chosen(options, variant.choices)
    require_prompts(named, prompts)
    problems = []
    if "scheduler" in groups:
        problems += [
            *variant.undistilled(),
            *unsuited(model.configs["scheduler"], variant.scheduler),
            *unread_by(family_of(model), model.configs["scheduler"], variant.scheduler),
            *unseeded(family_of(model), model.configs["scheduler"], variant.scheduler),
        ]
    problems += _vaes_to_name(options, model, variant.choices, overrides)
    ctx = _context(pipe, options, model, scheduler)
    for name, option in named.items():
        problems += [f"{name}: {reason}" for reason in option.broken(pipe)]
    _require(ctx, named, problems)
    for option in options.values():
        option.files(model, fetch=True)
    # What a file from the hub holds is known only now.
    _require(ctx, named, [])
    dtype: torch.dtype | None = loading_arguments(options.values()).get("dtype")
    others = dtype or denoiser_of(pipe).dtype
    parts = {"scheduler": scheduler}
    for option in options.values():
        parts |= option.parts_for(pipe, model, others)
    return Assembly(pipe, options, choices=variant.choices), ctx, parts


def _require_applicable(
    groups: Mapping[str, Any], overrides: Sequence[str], folder: Path | None
) -> None:
    """Raises UsageError for overrides that a pipeline would ignore: other sections, and keys of groups not named."""
    applicable = {group for group, _ in optimization_options(folder)} | {"scheduler"}
    problems = []
    for word in (
        *(f"{group}={_as_value(chosen)}" for group, chosen in groups.items()),
        *overrides,
    ):
        key = key_of(word)
        group = group_of(key)
        if group in SECTION_NAMES and group != "scheduler":
            elsewhere = "give steps, size, guidance and images to its calls, or measure with sdopt.run"
            problems.append(
                f"{word}: a pipeline takes only options and a scheduler; {elsewhere}"
            )
        elif group in applicable and group not in groups:
            chosen = word.partition("=")[2] if key == group else "…"
            problems.append(
                f'{word}: no option of {group} is named: add {group}="{chosen}"'
            )
        elif group not in applicable:
            problems.append(
                f"{word}: no key of an option; sdopt.optimize takes {', '.join(sorted(applicable))}"
            )
    if problems:
        raise UsageError(problems)


def _as_value(chosen: object) -> str:
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        return str(chosen)
    return f"[{','.join(map(str, chosen))}]"


def _model_of(pipe: "DiffusionPipeline") -> LoadedModel:
    """Describes the model of a loaded pipeline: its origin and the configurations of its parts."""
    name = str(getattr(pipe, "name_or_path", "") or "")
    networks, configs = networks_of(pipe), configs_of(pipe)
    side = side_of(denoiser_of(pipe).config) or 64
    described = LoadedModel(
        "pipeline",
        "path",
        size=side * factor_of(configs.get("vae", {})),
        class_name=class_of(pipe),
        configs=configs,
        networks=networks,
    )
    origin = Path(name).resolve()
    if name and origin.is_dir() and origin.parent == PACKAGED.resolve():
        return replace(described, name=origin.name, weights="packaged")
    if name and Path(name).exists():
        return replace(described, path=name)
    return (
        replace(described, weights="hub", hub_id=name)
        if name.count("/") == 1
        else described
    )


def _vaes_to_name(
    options: Mapping[str, Optimization],
    model: LoadedModel,
    choices: Mapping[str, str],
    overrides: Sequence[str],
) -> list[str]:
    """Returns a conflict for each option that needs the VAE for the model, if the pipeline's origin is unknown."""
    if model.is_known:
        return []
    keys = {key_of(word) for word in overrides}
    conflicts = []
    for axis, option in options.items():
        named = keys & {f"{axis}.hub_id", f"{axis}.path"}
        if isinstance(option, TinyVae | FixedVae) and not named:
            conflicts.append(
                f"{as_choice(axis, choices[axis])}: this pipeline does not say of which model it is: name a VAE that "
                f'fits, with "{axis}.hub_id=owner/name" or "{axis}.path=…"'
            )
    return conflicts


def _context(
    pipe: "DiffusionPipeline",
    options: Mapping[str, Optimization],
    model: LoadedModel,
    scheduler: Any,
) -> Context:
    """Returns what the conflicts of options are decided from: these options, and the pipeline as it is."""
    described = Scheduler(type(scheduler).__name__, dict(scheduler.config))
    chosen = {**_as_it_is(pipe), **options}
    return Context(
        probe_device(str(pipe.device)),
        model,
        Workload(),
        chosen,
        described,
        task_of(model.class_name),
    )


def _as_it_is(pipe: "DiffusionPipeline") -> dict[str, Optimization]:
    """Returns the options, by axis, that describe what a program did to its pipeline without sdopt."""
    options: dict[str, Optimization] = {}
    denoiser = denoiser_of(pipe)
    weights = str(denoiser.dtype).removeprefix("torch.")
    if weights in FLOATS:
        apart = (
            weights != "float32"
            and getattr(pipe, "vae", None) is not None
            and pipe.vae.dtype == torch.float32
        )
        options["precision"] = FullVae(weights) if apart else Precision(weights)
    if lora_layers(denoiser):
        options["lora"] = Loaded()
    if any(casting_hook(layer) is not None for layer in denoiser.modules()):
        options["memory.layerwise_casting"] = LayerwiseCasting()
    kernels = (
        layer.weight
        for layer in denoiser.modules()
        if isinstance(layer, torch.nn.Conv2d)
    )
    if any(not kernel.is_contiguous() for kernel in kernels):
        options["layout"] = Layout("channels_last")
    return options


def _require(
    ctx: Context, named: Mapping[str, Optimization], problems: Sequence[str]
) -> None:
    """Raises ConflictError for options that cannot run on this pipeline, before it is changed."""
    conflicts: list[str] = []
    for name, option in named.items():
        conflicts += [f"{name}: {reason}" for reason in option.obstacles(ctx)]
        if option.load_kwargs().keys() - {"dtype"}:
            conflicts.append(
                f"{name}: it changes how weights are loaded; use sdopt.load"
            )
    if problems or conflicts:
        raise ConflictError([*dict.fromkeys([*problems, *conflicts])])
