"""Applies options to a program's own pipeline, proves them and takes them back; loads measured variants."""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdopt.assembly import Assembly
from sdopt.config.composer import composer_of
from sdopt.config.groups import override_of
from sdopt.errors import ConflictError, UsageError
from sdopt.hardware.probe import probe_device
from sdopt.measure.trace import trace_call
from sdopt.optimizations.base import Context, Optimization, Stage
from sdopt.pipelines.parts import denoiser_of, device_of, networks_of, place, unwrapped
from sdopt.report.outcome import Outcome, load_result
from sdopt.results.choices import as_choice
from sdopt.results.records import Evidence
from sdopt.schema import Model, Tracking, Workload
from sdopt.tracking.runs import download_result
from sdopt.variant import Variant

if TYPE_CHECKING:
    import pandas as pd
    from diffusers import DiffusionPipeline

_OPTIMIZED: "weakref.WeakKeyDictionary[DiffusionPipeline, _Optimized]" = weakref.WeakKeyDictionary()
"""The pipelines that options were applied to, for as long as they live."""


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
    """The options that were applied to a pipeline, and the state before."""

    assembly: Assembly
    choices: dict[str, str]
    before: "_State"


def optimize(
    pipe: "DiffusionPipeline",
    *overrides: str,
    prompts: Sequence[str] = (),
    config_dir: str | Path | None = None,
    **groups: str | Sequence[str],
) -> "DiffusionPipeline":
    """Applies options to a pipeline in place, as a study applies them; its calls then run with all that they need.

    >>> pipe = sdopt.optimize(pipe, precision="bf16", attention="flash", memory=["vae_slicing"])

    Args:
        pipe: a Stable Diffusion pipeline of diffusers, on its device.
        overrides: keys of the options as on the command line, for example `"compiler.mode=max-autotune"`.
        prompts: all prompts of the calls to come, for `memory=precomputed_embeddings`.
        config_dir: a folder with groups of your own, as `--config-dir` names it.
        groups: the option of each group, or the options of a group that combine, as in `conf/README.md`.

    Returns:
        The same pipeline. `prove` says whether the options took effect, and `undo` takes them back.

    Raises:
        UsageError: there is no such option or key, or options were applied to this pipeline before.
        ConflictError: an option cannot run on this device, with this model or beside the others; nothing was changed.
    """
    if pipe in _OPTIMIZED:
        raise UsageError("this pipeline already has options applied; undo them first with sdopt.undo(pipe)")
    if not groups:
        raise UsageError('name an option, as in sdopt.optimize(pipe, precision="bf16")')
    named = [override_of(group, _as_value(chosen)) for group, chosen in groups.items()]
    folder = None if config_dir is None else Path(config_dir)
    with composer_of([*named, *overrides], folder) as composer:
        variant = composer.variant("pipeline", [*named, *overrides])
    options = {axis: option for axis, option in variant.applied if axis.partition(".")[0] in groups}
    model = _model_of(pipe)
    _require_prompts(options, variant.choices, prompts)
    _require(options, pipe, model, variant.choices)
    optimized = _Optimized(Assembly(pipe, {}), dict(variant.choices), _State.of(pipe))
    _apply_at_loading(pipe, options, model)
    optimized.assembly = Assembly.of(pipe, options)
    if prompts:
        optimized.assembly.prepare_inputs(prompts)
    _OPTIMIZED[pipe] = optimized
    _wrap_calls(pipe, optimized.assembly, {})
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

    Its calls take the measured number of steps, size and guidance scale unless they are given others.

    Args:
        result: a run's folder, its `result.json`, or the id of an MLflow run of the study or of a variant.
        variant: the variant's name, as tables show it; may be left out where there is one besides the baseline.
        prompts: all prompts of the calls to come, for `memory=precomputed_embeddings`.
        device: `cpu`, `cuda` or `cuda:N`; None is what was measured.
        tracking_uri: where MLflow keeps the run; None is sdopt's default.
        config_dir: a folder with groups of your own, where the study used one.

    Raises:
        UsageError: there is no such result or variant, or its files are missing.
        ConflictError: the variant cannot run on this machine.
    """
    found = _result(result, tracking_uri)
    row = found.variant(_named(found, variant))
    with composer_of(row.overrides, None if config_dir is None else Path(config_dir)) as composer:
        planned = composer.variant(row.name, row.overrides)
    probed = probe_device(device or row.config.hardware.device)
    if problems := planned.conflicts(probed):
        raise ConflictError(problems)
    _require_prompts(planned.optimizations, planned.choices, prompts)
    assembly = Assembly.load(planned, probed.torch_name)
    before = _State.of(assembly.pipe)
    if prompts:
        assembly.prepare_inputs(prompts)
    _OPTIMIZED[assembly.pipe] = _Optimized(assembly, dict(planned.choices), before)
    _wrap_calls(assembly.pipe, assembly, _defaults(planned))
    return assembly.pipe


def prove(
    pipe: "DiffusionPipeline", prompt: str | Sequence[str] = "a photograph of a lighthouse", **call: Any
) -> Report:
    """Traces a short call of an optimized pipeline, and says of each option whether it took effect.

    Args:
        pipe: a pipeline from `optimize` or `load`.
        prompt: of the traced call; several at once where an option works on batches.
        call: further arguments of the call; as few steps as show every option are run unless
            `num_inference_steps` is given.

    Raises:
        UsageError: no options were applied to this pipeline.
    """
    optimized = _optimized(pipe)
    usual = inspect.signature(optimized.before.cls.__call__).parameters.get("strength")
    strength = call.get("strength", usual.default if usual else 1.0)
    steps = optimized.assembly.traced_steps(strength)
    arguments = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "num_inference_steps": steps, **call}
    if any(option.stage is Stage.COMPILE for option in optimized.assembly.options.values()):
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
    """Takes back, in place, the options that were applied to a pipeline.

    Returns:
        The same pipeline, as it was before.

    Raises:
        UsageError: no options were applied to it; or they changed what cannot be restored, as weights that were
            rounded, fused or offloaded: then nothing is taken back, and the pipeline has to be loaded anew.
    """
    optimized = _optimized(pipe)
    lost = optimized.before.lost(pipe)
    for axis, option in optimized.assembly.options.items():
        if option.loads_on_host:
            lost.append(f"{as_choice(axis, optimized.choices[axis])} has moved the weights of the pipeline")
    if lost:
        raise UsageError([f"cannot be undone: {problem}; load the pipeline again" for problem in lost])
    optimized.before.restore(pipe)
    del _OPTIMIZED[pipe]
    return pipe


# ---------------------------------------------------------------------------------------------------- before a change


@dataclass
class _State:
    """The state of a pipeline that `undo` restores, and marks that show that it cannot."""

    cls: type
    parts: dict[str, Any]
    modules: list[tuple[torch.nn.Module, type, dict[str, Any]]]
    """The modules of its networks, each with its class and with attributes of its own that options replace: methods,
    hooks of diffusers, flags of slicing and tiling."""
    processors: dict[str, Any]
    """The denoiser's attention processors, by layer."""
    weights: dict[str, tuple[torch.dtype, int, tuple[int, ...]]]
    """By network and name: type, number of changes in place, and the size."""

    @classmethod
    def of(cls, pipe: "DiffusionPipeline") -> "_State":
        networks = networks_of(pipe)
        return cls(
            type(pipe),
            dict(pipe.components),
            [(module, type(module), _own(module)) for network in networks.values() for module in network.modules()],
            dict(getattr(denoiser_of(pipe), "attn_processors", {})),
            dict(_weights(networks)),
        )

    def lost(self, pipe: "DiffusionPipeline") -> list[str]:
        """Returns a line for each network whose weights have changed."""
        networks = {name: unwrapped(part) for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}
        now = dict(_weights(networks))
        changed = {
            key.partition(".")[0] for key in self.weights.keys() | now.keys() if self.weights.get(key) != now.get(key)
        }
        return [f"the weights of {name} were changed" for name in sorted(changed)]

    def restore(self, pipe: "DiffusionPipeline") -> None:
        """Puts back parts, methods, flags and attention processors, and the usual memory format."""
        pipe.__class__ = self.cls
        for name, part in self.parts.items():
            setattr(pipe, name, part)
        for module, kind, attributes in self.modules:
            module.__class__ = kind
            for key in _own(module).keys() - attributes.keys():
                del module.__dict__[key]
            module.__dict__.update(attributes)
        for name in networks_of(pipe):
            self.parts[name].to(memory_format=torch.contiguous_format)
        if self.processors:
            denoiser_of(pipe).set_attn_processor(dict(self.processors))


def _own(module: torch.nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, without those that every module has."""
    return {key: value for key, value in vars(module).items() if key not in _MODULE}


_MODULE = set(vars(torch.nn.Module()))


def _weights(networks: dict[str, Any]) -> Iterator[tuple[str, tuple[torch.dtype, int, tuple[int, ...]]]]:
    for name, network in networks.items():
        for key, weight in network.named_parameters():
            yield f"{name}.{key}", (weight.dtype, weight._version, tuple(weight.shape))


# ------------------------------------------------------------------------------------------------------- applying


def _as_value(chosen: str | Sequence[str]) -> str:
    return chosen if isinstance(chosen, str) else f"[{','.join(chosen)}]"


def _model_of(pipe: "DiffusionPipeline") -> Model:
    """Returns the model section that a pipeline would be loaded with; options ask it for configurations."""
    name = str(getattr(pipe, "name_or_path", "") or "")
    size = int(denoiser_of(pipe).config.get("sample_size", 64)) * int(getattr(pipe, "vae_scale_factor", 8))
    if Path(name).is_dir():
        return Model(name="pipeline", weights="path", path=name, size=size)
    if name.count("/") == 1 and not Path(name).exists():
        return Model(name="pipeline", weights="hub", hub_id=name, size=size)
    # The pipeline is from a single file, or built by hand: only its architecture is known.
    return Model(name="sdxl" if "XL" in type(pipe).__name__ else "sd15", weights="random", size=size)


def _require(options: dict[str, Optimization], pipe: "DiffusionPipeline", model: Model, choices: Any) -> None:
    """Raises ConflictError for options that cannot run on this pipeline, before it is changed."""
    ctx = Context(probe_device(str(pipe.device)), model, Workload(), options)
    names = {axis: as_choice(axis, choices[axis]) for axis in options}
    problems = [f"{names[axis]}: {reason}" for axis, option in options.items() for reason in option.conflicts(ctx)]
    for axis, option in options.items():
        if option.load_kwargs().keys() - {"dtype"}:
            problems.append(f"{names[axis]}: it changes how weights are loaded; use sdopt.load")
    if problems:
        raise ConflictError(problems)


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


def _apply_at_loading(pipe: "DiffusionPipeline", options: dict[str, Optimization], model: Model) -> None:
    """Changes what options ask for at loading: the type of the weights, and parts that replace the model's own."""
    # Options ask where the pipeline computes, and the device of offloaded weights does not show that.
    place(pipe, str(pipe.device), on_host=False)
    for option in options.values():
        dtype = option.load_kwargs().get("dtype")
        if dtype is not None:
            pipe.to(dtype=dtype)
        for name, part in option.parts(model, dtype or denoiser_of(pipe).dtype).items():
            setattr(pipe, name, part.to(device_of(pipe)) if isinstance(part, torch.nn.Module) else part)


def _wrap_calls(pipe: "DiffusionPipeline", assembly: Assembly, defaults: dict[str, Any]) -> None:
    """Makes each call of a pipeline run with the context managers and the arguments that its options add."""
    cls: Any = type(pipe)
    call = cls.__call__
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    usual = {name: value for name, value in defaults.items() if name in names}  # image-to-image has no size

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 (it is one)
        given = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(given.get("prompt"), str):
            given["prompt"] = [given["prompt"]]  # options that change the inputs take a list
        with assembly.entered():
            return call(self, **assembly.changed(usual | assembly.call_kwargs | given))

    # diffusers writes the class's name into a folder that is saved, and looks it up in its own module.
    pipe.__class__ = type(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})


def _optimized(pipe: "DiffusionPipeline") -> _Optimized:
    found = _OPTIMIZED.get(pipe)
    if found is None:
        raise UsageError("no options were applied to this pipeline with sdopt.optimize or sdopt.load")
    return found


# -------------------------------------------------------------------------------------------------------- loading


def _result(source: str | Path, tracking_uri: str | None) -> Outcome:
    if Path(source).exists():
        return load_result(source)
    if Path(source).suffix or len(Path(source).parts) > 1:
        raise UsageError(f"{source}: no such folder")
    tracking = Tracking() if tracking_uri is None else Tracking(uri=tracking_uri)
    return Outcome.of(download_result(str(source), tracking))


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
        "guidance_scale": variant.guidance_scale,
        "height": variant.size,
        "width": variant.size,
    }
