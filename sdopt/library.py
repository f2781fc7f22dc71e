"""Applies options to a program's own pipeline, proves them and takes them back; loads measured variants."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdopt.assembly import Assembly
from sdopt.config.composer import composer_of
from sdopt.config.groups import optimization_options, override_of
from sdopt.config.overrides import group_of, key_of
from sdopt.config.parse import SECTIONS
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.probe import probe_device
from sdopt.measure.trace import trace_call
from sdopt.optimizations.base import Context, Optimization
from sdopt.optimizations.layout import Layout
from sdopt.optimizations.lora import Loaded, lora_layers
from sdopt.optimizations.memory import TinyVae
from sdopt.optimizations.precision import FLOATS, FixedVae, FullVae, Precision
from sdopt.pipelines.loading import LoadedModel, scheduler_like
from sdopt.pipelines.parts import denoiser_of, device_of, networks_of, place
from sdopt.pipelines.snapshot import Snapshot
from sdopt.pipelines.tasks import task_of
from sdopt.reference import MODEL
from sdopt.report.outcome import Outcome, load_result
from sdopt.results.choices import as_choice
from sdopt.results.records import Evidence
from sdopt.schema import Scheduler, Tracking, Workload
from sdopt.tracking.runs import download_run
from sdopt.variant import Variant

if TYPE_CHECKING:
    import pandas as pd
    from diffusers import DiffusionPipeline

_OPTIMIZED = "_sdopt_optimized"
"""Attribute of a pipeline that holds the state of `optimize`, so that both are freed together."""

_PROMPT = "a photograph of a lighthouse"
"""The prompt of a traced call that names none."""

_COPIED = (
    "this pipeline is a copy of one that options were applied to, and still uses the original's modules: copy the "
    "pipeline before calling sdopt.optimize"
)


@dataclass(frozen=True)
class Report:
    """The evidence for each option that was applied to a pipeline, from the trace of a call."""

    evidence: tuple[Evidence, ...]

    @property
    def engaged(self) -> bool:
        """Whether every option took effect."""
        return all(found.engaged for found in self.evidence)

    def table(self) -> "pd.DataFrame":
        """Returns a row per option: its axis, its name, whether it took effect, and what shows it."""
        import pandas as pd

        columns = ["axis", "option", "engaged", "summary"]
        return pd.DataFrame([asdict(found) for found in self.evidence], columns=[*columns, "facts"])[columns]

    def __str__(self) -> str:
        """Returns a line for each option."""
        return "\n".join(
            f"{as_choice(found.axis, found.option)}: {'' if found.engaged else 'NO EFFECT: '}{found.summary}"
            for found in self.evidence
        )


@dataclass
class _Optimized:
    """The options that were applied to a pipeline, and the state before; None if it was loaded with them."""

    assembly: Assembly
    choices: dict[str, str]
    ctx: Context
    cls: type
    """The pipeline's class, whose call takes what a user gives."""
    before: Snapshot | None
    prompts: tuple[str, ...] = ()
    """The prompts of all calls, as far as they were given in advance."""
    usual: dict[str, Any] = field(default_factory=dict)
    """Default arguments of a call."""

    def prompts_that_show(self, images_per_prompt: int) -> list[str]:
        """Returns the prompts of a call in which every option can take effect: two if one would be too few."""

        def idle(batch_size: int) -> int:
            workload = replace(self.ctx.workload, batch_size=batch_size, images_per_prompt=images_per_prompt)
            ctx = replace(self.ctx, workload=workload)
            return sum(bool(option.ineffective(ctx)) for option in self.assembly.options.values())

        return list(islice(cycle(self.prompts or [_PROMPT]), 2 if idle(2) < idle(1) else 1))

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        """Leaves None in a copy of the pipeline: its hooks, closures and compiled code are those of the original."""


def optimize(
    pipe: "DiffusionPipeline",
    *overrides: str,
    prompts: Sequence[str] = (),
    config_dir: str | Path | None = None,
    **groups: str | Sequence[str],
) -> "DiffusionPipeline":
    """Applies options to a pipeline in place, as a study applies them; its calls then run with what the options add.

    >>> pipe = sdopt.optimize(pipe, precision="bf16", attention="flash", memory=["vae_slicing"])

    Args:
        pipe: a Stable Diffusion pipeline of diffusers, on its device.
        overrides: keys of the options as on the command line, for example `"compiler.mode=max-autotune"`.
        prompts: all prompts of the calls to come, for `memory=precomputed_embeddings`.
        config_dir: a folder with groups of your own, as `--config-dir` names it.
        groups: the option of each group, or the options of a group that combine, as in `conf/README.md`; and
            the scheduler.

    Returns:
        The same pipeline. `prove` says whether the options took effect, and `undo` takes them back. For `undo`, the
        parts that options replace or remove stay in memory; a pipeline from `load` keeps none.

    Raises:
        UsageError: there is no such option or key, it cannot apply to a pipeline, a file of it is missing and cannot be
            downloaded, or options were applied to this pipeline before; nothing was changed.
        ConflictError: an option cannot run on this device, with this model or beside the others; nothing was changed.
        UnavailableError: an option cannot be applied here, for example because a compiler's cache cannot be written;
            the pipeline is as it was before. Where weights were changed already, a note on the error says so.
    """
    if hasattr(pipe, _OPTIMIZED):
        _optimized(pipe)  # says if it is a copy
        raise UsageError("this pipeline already has options applied; undo them first with sdopt.undo(pipe)")
    if not groups:
        raise UsageError('name an option, as in sdopt.optimize(pipe, precision="bf16")')
    folder = None if config_dir is None else Path(config_dir)
    _require_applicable(groups, overrides, folder)
    named = [override_of(group, _as_value(chosen)) for group, chosen in groups.items()]
    with composer_of([*named, *overrides], folder) as composer:
        variant = composer.variant("pipeline", [*named, *overrides])
    options = {axis: option for axis, option in variant.applied if group_of(axis) in groups}
    model = _model_of(pipe)
    scheduler = scheduler_like(pipe.scheduler, variant.scheduler) if "scheduler" in groups else pipe.scheduler
    _require_prompts(options, variant.choices, prompts)
    problems = variant.undistilled() if "scheduler" in groups else []
    problems += _vaes_to_name(options, model, variant.choices, overrides)
    ctx = _context(pipe, options, model, scheduler)
    _require(ctx, options, variant.choices, problems)
    for option in options.values():
        option.files(model, fetch=True)
    # What a file from the hub holds is known only now.
    _require(ctx, options, variant.choices, [])
    parts = _parts(pipe, options, model)
    cls, before = type(pipe), Snapshot.of(pipe)
    assembly = Assembly(pipe, options)
    try:
        pipe.scheduler = scheduler
        _apply_at_loading(pipe, options, parts)
        assembly.apply()
        if prompts:
            assembly.prepare_inputs(prompts)
    except Exception as error:
        begun = dict(islice(options.items(), len(assembly.proofs) + 1))
        if _lost(begun, variant.choices, before):
            error.add_note("The pipeline has been changed and cannot be restored: load it again.")
        else:
            before.restore(pipe)
        raise
    setattr(pipe, _OPTIMIZED, _Optimized(assembly, dict(variant.choices), ctx, cls, before, tuple(prompts)))
    _wrap_calls(pipe, assembly, {})
    return pipe


def load(
    result: str | Path,
    variant: str | None = None,
    *,
    prompts: Sequence[str] = (),
    device: str | None = None,
    tracking_uri: str | None = None,
    config_dir: str | Path | None = None,
) -> "DiffusionPipeline":
    """Returns the pipeline of a variant that was measured, with its options applied.

    Its calls take the measured number of steps and of images per prompt, size, guidance scale and strength unless they
    are given others. PyTorch's number of threads is the whole program's, and stays as it is: on a CPU,
    `torch.set_num_threads` with the measured `hardware.threads` gives the measured speed. A package of `compiler=aot`
    is valid only for the number of threads with which it was compiled.

    Args:
        result: a run's folder, its `result.json`, or the id of an MLflow run of the study or of a variant.
        variant: the variant's name, as tables show it; may be left out where there is one besides the baseline, and for
            the id of a variant's run.
        prompts: all prompts of the calls to come, for `memory=precomputed_embeddings`.
        device: `cpu`, `cuda` or `cuda:N`; None is what was measured.
        tracking_uri: where MLflow keeps the run; None is sdopt's default.
        config_dir: a folder with groups of your own, where the study used one.

    Raises:
        UsageError: there is no such result or variant, or its files are missing.
        ConflictError: the variant cannot run on this machine.
    """
    found, named = _result(result, tracking_uri)
    row = found.variant(_named(found, variant or named))
    with composer_of(row.overrides, None if config_dir is None else Path(config_dir)) as composer:
        planned = composer.variant(row.name, row.overrides)
    probed = probe_device(device or row.config.hardware.device)
    if problems := planned.conflicts(probed):
        raise ConflictError(problems)
    _require_prompts(planned.optimizations, planned.choices, prompts)
    assembly = Assembly.load(planned, probed.torch_name)
    if prompts:
        assembly.prepare_inputs(prompts)
    usual = _defaults(planned)
    ctx = planned.context(probed)
    optimized = _Optimized(assembly, dict(planned.choices), ctx, type(assembly.pipe), None, tuple(prompts), usual)
    setattr(assembly.pipe, _OPTIMIZED, optimized)
    _wrap_calls(assembly.pipe, assembly, usual)
    return assembly.pipe


def prove(pipe: "DiffusionPipeline", prompt: str | Sequence[str] | None = None, **call: Any) -> Report:
    """Traces a short call of an optimized pipeline, and says of each option whether it took effect.

    Args:
        pipe: a pipeline from `optimize` or `load`.
        prompt: of the traced call, one or several; None is a prompt that works with every option, twice where an option
            needs a batch.
        call: further arguments of the call; the default of `num_inference_steps` is the smallest number of steps that
            can show every option.

    Raises:
        UsageError: no options were applied to this pipeline.
    """
    optimized = _optimized(pipe)
    own = inspect.signature(optimized.cls.__call__).parameters.get("strength")
    strength = call.get("strength", optimized.usual.get("strength", own.default) if own else 1.0)
    steps = optimized.assembly.traced_steps(strength)
    if prompt is None:
        each = call.get("num_images_per_prompt", optimized.usual.get("num_images_per_prompt", 1))
        prompt = optimized.prompts_that_show(each)
    arguments = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "num_inference_steps": steps, **call}
    if any(option.compiles for option in optimized.assembly.options.values()):
        # An option compiles in the first call, a part of which still runs uncompiled. Inductor records CUDA graphs only
        # when a module runs for the second time (`CUDAGraphTreeManager._run`).
        for _ in range(2):
            pipe(**arguments)
    trace = trace_call(pipe, lambda: pipe(**arguments), device_of(pipe).type == "cuda")
    findings = optimized.assembly.findings(trace)
    return Report(
        tuple(
            Evidence(axis, optimized.choices[axis], finding.engaged, finding.summary, finding.facts)
            for axis, finding in findings.items()
        )
    )


def undo(pipe: "DiffusionPipeline") -> "DiffusionPipeline":
    """Takes back, in place, the options that were applied to a pipeline, and what else was changed in it since.

    Returns:
        The same pipeline, as it was before.

    Raises:
        UsageError: no options were applied to it; it is a copy of a pipeline that has some; they came with `load`; or
            they changed what cannot be restored, as weights that were rounded, fused or offloaded: then nothing is
            taken back, and the pipeline has to be loaded anew.
    """
    optimized = _optimized(pipe)
    if optimized.before is None:
        raise UsageError("cannot be undone: sdopt.load applied the options at loading; load the baseline instead")
    if lost := _lost(optimized.assembly.options, optimized.choices, optimized.before):
        raise UsageError([f"cannot be undone: {problem}; load the pipeline again" for problem in lost])
    optimized.before.restore(pipe)
    delattr(pipe, _OPTIMIZED)
    return pipe


def _lost(options: Mapping[str, Optimization], choices: Mapping[str, str], before: Snapshot) -> list[str]:
    """Returns why a pipeline cannot be put back into the state before its options were applied."""
    moving = [as_choice(axis, choices[axis]) for axis, option in options.items() if option.loads_on_host]
    return [f"{option} has moved the weights of the pipeline" for option in moving] or before.lost()


# ------------------------------------------------------------------------------------------------------- applying


def _require_applicable(groups: Mapping[str, Any], overrides: Sequence[str], folder: Path | None) -> None:
    """Raises UsageError for overrides that a pipeline would ignore: other sections, and keys of groups not named."""
    applicable = {group for group, _ in optimization_options(folder)} | {"scheduler"}
    problems = []
    for word in (*(f"{group}={_as_value(chosen)}" for group, chosen in groups.items()), *overrides):
        key = key_of(word)
        group = group_of(key)
        if group in SECTIONS and group != "scheduler":
            elsewhere = "give steps, size, guidance and images to its calls, or measure with sdopt.run"
            problems.append(f"{word}: a pipeline takes only options and a scheduler; {elsewhere}")
        elif group in applicable and group not in groups:
            chosen = word.partition("=")[2] if key == group else "…"
            problems.append(f'{word}: no option of {group} is named: add {group}="{chosen}"')
        elif group not in applicable:
            problems.append(f"{word}: no key of an option; sdopt.optimize takes {', '.join(sorted(applicable))}")
    if problems:
        raise UsageError(problems)


def _as_value(chosen: str | Sequence[str]) -> str:
    return chosen if isinstance(chosen, str) else f"[{','.join(chosen)}]"


def _model_of(pipe: "DiffusionPipeline") -> LoadedModel:
    """Describes the model of a loaded pipeline: its origin and the configurations of its parts."""
    name = str(getattr(pipe, "name_or_path", "") or "")
    size = int(denoiser_of(pipe).config.get("sample_size", 64)) * int(getattr(pipe, "vae_scale_factor", 8))
    parts = {**networks_of(pipe), "scheduler": pipe.scheduler}
    by_diffusers: Any = {key: part for key, part in parts.items() if hasattr(part, "to_json_string")}
    configs = {key: json.loads(part.to_json_string()) for key, part in by_diffusers.items()}
    described = LoadedModel("pipeline", "path", size=size, class_name=type(pipe).__name__, configs=configs)
    if name and Path(name).resolve() == MODEL.resolve():
        return replace(described, name=MODEL.name, weights="packaged")
    if name and Path(name).exists():
        return replace(described, path=name)
    return replace(described, weights="hub", hub_id=name) if name.count("/") == 1 else described


def _vaes_to_name(
    options: Mapping[str, Optimization], model: LoadedModel, choices: Mapping[str, str], overrides: Sequence[str]
) -> list[str]:
    """Returns a conflict for each option that needs the VAE for the model, if the pipeline's origin is unknown."""
    keys = {key_of(word) for word in overrides}
    return [
        f"{as_choice(axis, choices[axis])}: this pipeline does not say of which model it is: name a VAE that fits, "
        f'with "{axis}.hub_id=owner/name" or "{axis}.path=…"'
        for axis, option in options.items()
        if isinstance(option, TinyVae | FixedVae)
        and not model.is_known
        and not keys & {f"{axis}.hub_id", f"{axis}.path"}
    ]


def _context(
    pipe: "DiffusionPipeline", options: Mapping[str, Optimization], model: LoadedModel, scheduler: Any
) -> Context:
    """Returns what the conflicts of options are decided from: these options, and the pipeline as it is."""
    described = Scheduler(type(scheduler).__name__, dict(scheduler.config))
    chosen = {**_as_it_is(pipe), **options}
    return Context(probe_device(str(pipe.device)), model, Workload(), chosen, described, task_of(model.class_name))


def _as_it_is(pipe: "DiffusionPipeline") -> dict[str, Optimization]:
    """Returns the options, by axis, that describe what a program did to its pipeline without sdopt."""
    found: dict[str, Optimization] = {}
    denoiser = denoiser_of(pipe)
    weights = str(denoiser.dtype).removeprefix("torch.")
    if weights in FLOATS:
        apart = weights != "float32" and getattr(pipe, "vae", None) is not None and pipe.vae.dtype == torch.float32
        found["precision"] = FullVae(weights) if apart else Precision(weights)
    if lora_layers(denoiser):
        found["lora"] = Loaded()
    kernels = (layer.weight for layer in denoiser.modules() if isinstance(layer, torch.nn.Conv2d))
    if any(not kernel.is_contiguous() for kernel in kernels):
        found["layout"] = Layout("channels_last")
    return found


def _require(
    ctx: Context, options: Mapping[str, Optimization], choices: Mapping[str, str], problems: Sequence[str]
) -> None:
    """Raises ConflictError for options that cannot run on this pipeline, before it is changed."""
    names = {axis: as_choice(axis, choices[axis]) for axis in options}
    found = [
        f"{names[axis]}: {reason}"
        for axis, option in options.items()
        for reason in [*option.lacking(ctx), *option.conflicts(ctx)]
    ]
    for axis, option in options.items():
        if option.load_kwargs().keys() - {"dtype"}:
            found.append(f"{names[axis]}: it changes how weights are loaded; use sdopt.load")
    if problems or found:
        raise ConflictError([*problems, *found])


def _require_prompts(options: Mapping[str, Optimization], choices: Mapping[str, str], prompts: Sequence[str]) -> None:
    """Raises ConflictError if an option needs the prompts in advance, and none are given."""
    if not prompts:
        problems = [
            f"{as_choice(axis, choices[axis])}: name the prompts of all calls with prompts=[…]"
            for axis, option in options.items()
            if option.prepares_inputs
        ]
        if problems:
            raise ConflictError(problems)


def _dtype(options: Mapping[str, Optimization]) -> "torch.dtype | None":
    """Returns the type of weights that an option requests at loading; None if none does."""
    return next((kwargs["dtype"] for option in options.values() if "dtype" in (kwargs := option.load_kwargs())), None)


def _parts(pipe: "DiffusionPipeline", options: Mapping[str, Optimization], model: LoadedModel) -> dict[str, Any]:
    """Returns the parts that replace a pipeline's own, which is not changed yet."""
    dtype = _dtype(options) or denoiser_of(pipe).dtype
    return {name: part for option in options.values() for name, part in option.parts_for(pipe, model, dtype).items()}


def _apply_at_loading(pipe: "DiffusionPipeline", options: Mapping[str, Optimization], parts: dict[str, Any]) -> None:
    """Changes what options ask for at loading: the type of the weights, and parts that replace the model's own."""
    # Options ask where the pipeline computes, and the device of offloaded weights does not show that.
    place(pipe, str(pipe.device), on_host=False)
    if (dtype := _dtype(options)) is not None:
        pipe.to(dtype=dtype)
    for name, part in parts.items():
        setattr(pipe, name, part.to(device_of(pipe)) if isinstance(part, torch.nn.Module) else part)


def _wrap_calls(pipe: "DiffusionPipeline", assembly: Assembly, defaults: dict[str, Any]) -> None:
    """Makes each call of a pipeline run with the context managers and the arguments that its options add."""
    cls: Any = type(pipe)
    call = cls.__call__
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    # Image-to-image has no size, and text-to-image no strength.
    usual = {name: value for name, value in defaults.items() if name in names}

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 (it is one)
        given = dict(zip(names, args, strict=False)) | kwargs
        if getattr(self, _OPTIMIZED, None) is None:
            raise UsageError(_COPIED)
        with assembly.entered():
            return call(self, **assembly.changed(usual | assembly.call_kwargs | given))

    # diffusers writes the class's name into a folder that is saved, and looks it up in its own module.
    pipe.__class__ = type(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})


def _optimized(pipe: "DiffusionPipeline") -> _Optimized:
    if not hasattr(pipe, _OPTIMIZED):
        raise UsageError("no options were applied to this pipeline with sdopt.optimize or sdopt.load")
    found: _Optimized | None = getattr(pipe, _OPTIMIZED)
    if found is None:
        raise UsageError(_COPIED)
    return found


# -------------------------------------------------------------------------------------------------------- loading


def _result(source: str | Path, tracking_uri: str | None) -> tuple[Outcome, str | None]:
    """Returns a result, and the variant that its MLflow run is of, if it is named by such a run."""
    if Path(source).exists():
        return load_result(source), None
    if Path(source).suffix or len(Path(source).parts) > 1:
        raise UsageError(f"{source}: no such folder")
    tracking = Tracking() if tracking_uri is None else Tracking(uri=tracking_uri)
    study, variant = download_run(str(source), tracking)
    return Outcome.of(study), variant


def _named(result: Outcome, name: str | None) -> str:
    names = [row.name for row in result.variants if row.role != "control"]
    candidates = [found for found in names if found != result.baseline]
    if name is None and len(candidates) == 1:
        return candidates[0]
    if name not in names:
        problem = "variant: name" if name is None else f"variant={name}: not in the study; choose"
        raise UsageError(f"{problem} one of {', '.join(names)}")
    return name


def _defaults(variant: Variant) -> dict[str, Any]:
    return {
        "num_inference_steps": variant.workload.steps,
        "num_images_per_prompt": variant.workload.images_per_prompt,
        "strength": variant.task.strength,
        "guidance_scale": variant.guidance_scale,
        "height": variant.size,
        "width": variant.size,
    }
