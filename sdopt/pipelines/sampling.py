"""How a model wants to be sampled: its own scheduler, the marks in its file, and whether a chosen scheduler keeps them.

A model was trained with certain levels of noise, to predict noise or velocity. A scheduler that does not know them
draws other images, and nothing fails.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError, with_type
from sdopt.pipelines.catalog import once_per_state
from sdopt.pipelines.family import Family
from sdopt.pipelines.parts import quiet
from sdopt.pipelines.weights import Header
from sdopt.schema import Scheduler

if TYPE_CHECKING:
    import torch

_LEVELS = ("beta_start", "beta_end", "beta_schedule")
"""Arguments of the schedulers whose noise levels follow from betas, as those of Stable Diffusion do."""

_TRAINED: Mapping[str, tuple[Any, ...]] = {
    "prediction_type": (None, "epsilon"),
    "rescale_betas_zero_snr": (None, False),
    "trained_betas": (None,),
    "timestep_spacing": (None,),
    "use_flow_sigmas": (None, False),
    "timestep_type": (None, "discrete"),
}
"""Keys of a model's own scheduler that a chosen one must have too, unless their value is one of these."""

_TRAINED_STEPS = 1000
"""Timesteps that a model of diffusers has, unless its scheduler says another number."""

_OF_TRAINING = {
    "num_train_timesteps": _TRAINED_STEPS,
    "timestep_type": "discrete",
    **dict.fromkeys((*_LEVELS, "trained_betas")),
}
"""Keys that say at which levels of noise a model was trained, and what those mean that do not say it."""

_OPTIONS = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
}
"""Schedulers to choose instead, by their names in the group."""

_COMMON = (*_OPTIONS.values(), "DPMSolverMultistepScheduler", "TCDScheduler")
"""Schedulers that every diffusers has: to find one without options right, it need not be imported."""

_PREDICTIONS = ("epsilon", "v_prediction", "sample")

_EDM = ("edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min")
"""Tensors that mark a model with the noise levels of Karras et al. (2022), as Playground v2.5 and CosXL are."""


def scheduler_class(scheduler: Scheduler) -> Any:
    """Returns the scheduler's class. Raises UsageError if diffusers has no scheduler of that name."""
    name = scheduler.class_name
    if (cls := _scheduler_named(name)) is None:
        import diffusers

        # In place of a class whose packages are not installed, diffusers has one that names them.
        packages = getattr(getattr(diffusers, name, None), "_backends", ())
        if lacking := " ".join(
            package for package in packages if find_spec(package) is None
        ):
            raise UsageError(
                f"scheduler.class_name={name}: needs {lacking}: pip install {lacking}"
            )
        schedulers = [
            other
            for other in dir(diffusers)
            if other.endswith("Scheduler") and _scheduler_named(other)
        ]
        near = difflib.get_close_matches(name, schedulers, n=5) or schedulers
        raise UsageError(
            f"scheduler.class_name={name}: unknown scheduler; diffusers has: {', '.join(near)}"
        )
    return cls


def _scheduler_named(name: object) -> Any:
    import diffusers

    cls = getattr(diffusers, str(name), None)
    return (
        cls
        if isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin)
        else None
    )


def scheduler_like(
    own: Any, scheduler: Scheduler, marks: Mapping[str, Any] | None = None
) -> Any:
    """Returns the chosen scheduler with a model's own configuration, as far as no mark or option overrides it."""
    cls = scheduler_class(scheduler)
    if scheduler.timesteps is not None:
        cls = _spaced(cls, scheduler.timesteps)
    return cls.from_config(
        own.config, **scheduler_settings(own.config, scheduler, marks or {})
    )


def scheduler_settings(
    own: Mapping[str, Any], scheduler: Scheduler, marks: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what overrides the configuration `own` of a model's scheduler in that of the chosen one."""
    shift = shift_of(own, scheduler_class(scheduler))
    return {**unclipped(own, scheduler), **shift, **marks, **scheduler.options}


def is_flow(config: Mapping[str, Any]) -> bool:
    """Returns whether a scheduler of this configuration samples a flow from noise to image, not levels of noise."""
    named = str(config.get("_class_name")).startswith(_FLOW)
    return (
        named
        or bool(config.get("use_flow_sigmas"))
        or config.get("prediction_type") == "flow_prediction"
    )


_FLOW = "FlowMatch"
"""How the names of diffusers' schedulers begin that sample nothing but flows."""


def shift_of(own: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """Returns the shift of a flow's sigmas as the argument of another class, since the two name it differently."""
    shift = own.get("shift") or own.get("flow_shift")
    name = "shift" if "shift" in _arguments(cls) else "flow_shift"
    return {name: shift} if is_flow(own) and shift and name in _arguments(cls) else {}


def unclipped(own: Mapping[str, Any], scheduler: Scheduler) -> dict[str, Any]:
    """Returns what keeps a chosen scheduler from clipping, where the model's own configuration does not say so.

    DDIM would by default, and latents of Stable Diffusion go beyond -1 and 1. Its pipelines of diffusers clip none then,
    and leave the value among those that another scheduler does not take over.
    """
    unsaid = "clip_sample" not in own or "clip_sample" in own.get(_UNSAID, ())
    clips = "clip_sample" in _arguments(scheduler_class(scheduler))
    return {"clip_sample": False} if clips and unsaid else {}


_UNSAID = "_use_default_values"
"""The key of a loaded scheduler's configuration that names what the model's file does not say."""


def _spaced(cls: Any, timesteps: Sequence[int]) -> Any:
    """Returns a scheduler's class that takes its timesteps from `spread`.

    A class, because schedulers are copied: a method set on an object would go on to change the original.
    """

    class Spaced(cls):  # type: ignore[misc]
        def set_timesteps(
            self, num_inference_steps: int, device: Any = None, **_others: Any
        ) -> None:
            super().set_timesteps(
                timesteps=spread(timesteps, num_inference_steps, self), device=device
            )

    Spaced.__name__ = cls.__name__
    return Spaced


def spread(timesteps: Sequence[int], steps: int, scheduler: Any) -> list[int]:
    """Returns `steps` timesteps between given ones, evenly in the logarithm of the noise level; or these themselves.

    As the authors of Align Your Steps do it (Sabour et al. 2024, section 4).
    """
    import numpy as np

    alphas = scheduler.alphas_cumprod.double().numpy()
    levels = np.log((1 - alphas) / alphas)
    places = np.linspace(0, len(timesteps) - 1, steps)
    levels_wanted = np.interp(
        places, np.arange(len(timesteps)), levels[list(timesteps)]
    )
    return [
        round(timestep)
        for timestep in np.interp(
            levels_wanted, levels, np.arange(len(levels))
        ).tolist()
    ]


def require_options(scheduler: Scheduler) -> None:
    """Raises UsageError for options and timesteps that the scheduler does not take: diffusers would ignore them."""
    if (
        scheduler.class_name in _COMMON
        and not scheduler.options
        and scheduler.timesteps is None
    ):
        return
    cls = scheduler_class(scheduler)
    arguments, name = _arguments(cls), scheduler.class_name
    has = ", ".join(option for option in arguments if option != "self")
    unknown = [option for option in scheduler.options if option not in arguments]
    problems = [
        f"scheduler.options.{option}: unknown option; {name} has: {has}"
        for option in unknown
    ]
    for key in scheduler.options.keys() & arguments.keys():
        value, usual = scheduler.options[key], arguments[key].default
        # Python takes any text for true, also the text no.
        if isinstance(value, str) and isinstance(usual, bool | int | float):
            kind = "true or false" if isinstance(usual, bool) else "a number"
            problems.append(f"scheduler.options.{key}={value}: must be {kind}")
    if (spaced := scheduler.timesteps) is not None:
        if "timesteps" not in inspect.signature(cls.set_timesteps).parameters:
            problems.append(
                f"scheduler.timesteps: {name} takes none; choose scheduler=ays, or dpmpp_2m or euler"
            )
        if (
            len(spaced) < 2
            or any(low >= high for high, low in pairwise(spaced))
            or min(spaced) < 0
            or max(spaced) > 999
        ):
            problems.append(
                f"scheduler.timesteps={spaced}: must be two or more, falling, from 999 to 0"
            )
    if problems:
        raise UsageError(problems)


def marks_in(file: Path) -> dict[str, Any]:
    """Returns what a single file says of how its model was trained, as keys of a scheduler's configuration.

    Tensors named `v_pred` and `ztsnr` are marks, and so are metadata by the standards of Stability AI and of kohya, and
    a configuration beside the file that has its name. A prediction type that sdopt does not know is returned as it is
    written.
    """
    return dict(_marks(file))


@once_per_state
def _marks(file: Path) -> dict[str, Any]:
    header = Header.of(file, f"model.path={file}")
    names, metadata = header.types, header.metadata
    kinds = {
        {
            "v": "v_prediction",
            "velocity": "v_prediction",
            "eps": "epsilon",
            "noise": "epsilon",
        }.get(kind, kind)
        for key in ("modelspec.prediction_type", "modelspec.predict_key")
        if (kind := metadata.get(key, "").strip().lower())
    }
    if not kinds and metadata.get("modelspec.architecture", "").endswith("-v"):
        kinds.add("v_prediction")
    if (
        "v_pred" in names
        or _says_yes(metadata, "ss_v_parameterization")
        or _velocity_beside(file)
    ):
        kinds.add("v_prediction")
    marks: dict[str, Any] = (
        {"prediction_type": " and ".join(sorted(kinds))} if kinds else {}
    )
    if "ztsnr" in names or _says_yes(metadata, "ss_zero_terminal_snr"):
        marks["rescale_betas_zero_snr"] = True
    if edm := next((name for name in _EDM if name in names), None):
        marks["_class_name"] = f"EDM ({edm})"
    return marks


def _velocity_beside(file: Path) -> bool:
    """Returns whether a configuration of the same name, which other programs read with a file, says velocity."""
    beside = file.with_suffix(".yaml")
    said = (
        beside.read_text(encoding="utf-8", errors="replace") if beside.is_file() else ""
    )
    return (
        re.search(
            r"^\s*parameterization:\s*['\"]?v['\"]?\s*(#.*)?$", said, re.MULTILINE
        )
        is not None
    )


def _says_yes(metadata: Mapping[str, str], key: str) -> bool:
    return metadata.get(key, "").strip().lower() in ("true", "1")


_USUAL_STEPS = 20
"""So many can be sampled by every scheduler that suits a model."""


def unsuited(
    own: Mapping[str, Any], scheduler: Scheduler, steps: int = _USUAL_STEPS
) -> list[str]:
    """Returns why a scheduler cannot sample a model as the model's own scheduler says; [] if it can."""
    key = _key(own, scheduler, steps)
    if key not in _found:
        _found[key] = _mismatches(own, scheduler) or _rehearsed(own, scheduler, steps)
    return list(_found[key])


Question = tuple[Mapping[str, Any], Scheduler, int]
"""The arguments of `unsuited`."""

_found: dict[str, list[str]] = {}
"""What `unsuited` has found, by its arguments."""


def _key(own: Mapping[str, Any], scheduler: Scheduler, steps: int) -> str:
    return json.dumps([dict(own), asdict(scheduler), steps], default=str)


def unanswered(questions: Iterable[Question]) -> list[Question]:
    """Returns those questions to which `unsuited` does not know the answer yet."""
    return [question for question in questions if _key(*question) not in _found]


def answers_to(questions: Iterable[Question]) -> dict[str, list[str]]:
    """Returns what `unsuited` finds, for `remember` in another process, which need not import diffusers then."""
    answers = {}
    for question in questions:
        config, scheduler, steps = question
        answers[_key(*question)] = unsuited(*question)
        if steps == 1:
            answers[f"first of {_key(*question)}"] = late_start(
                config, scheduler, steps
            )
    return answers


def remember(answers: Mapping[str, list[str]]) -> None:
    """Takes in what `answers_to` found in another process."""
    _found.update(answers)


def _mismatches(own: Mapping[str, Any], scheduler: Scheduler) -> list[str]:
    at = f"scheduler.class_name={scheduler.class_name}"
    of_model, name = _scheduler_named(own.get("_class_name")), own.get("_class_name")
    if str(name).startswith("EDM ("):
        why = f"has other noise levels than the model, which is marked as {name}, and a single file does not say which"
        return [
            f"{at}: {why}: save it as a folder with its own scheduler, and give model=FOLDER"
        ]
    if name is not None and of_model is None:
        return [
            f"{at}: the model's own scheduler is {name}, which diffusers does not have: nothing says how to sample it"
        ]
    if idle := _idle_shifts(own, scheduler):
        return idle
    if is_flow(own) and scheduler.class_name.startswith(_FLOW):
        return []
    return (_flow_mismatches if str(name).startswith(_FLOW) else _level_mismatches)(
        own, scheduler, at
    )


_FIXED_SHIFT = ("shift", "flow_shift")
"""Keys of a shift that is the same for all sizes of images."""

_SHIFT_BY_SIZE = (
    *("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
    "time_shift_type",
)
"""Keys of a shift that follows from the size of the image."""


def _idle_shifts(own: Mapping[str, Any], scheduler: Scheduler) -> list[str]:
    """Returns why options of a flow's shift would leave all images as they are; [] if they would not."""
    config = {**own, **scheduler.options}
    if not is_flow({**config, "_class_name": scheduler.class_name}):
        return []
    by_size = bool(config.get("use_dynamic_shifting"))
    idle = _FIXED_SHIFT if by_size else _SHIFT_BY_SIZE
    kind = "one that follows from the image's size" if by_size else "a fixed one"
    reasons = []
    for key in idle:
        value = scheduler.options.get(key)
        if value is None or value == own.get(key):
            continue
        reasons.append(
            f"scheduler.options.{key}={value}: has no effect, since the shift is {kind}: "
            f"leave it out, or set +scheduler.options.use_dynamic_shifting={str(not by_size).lower()} too"
        )
    return reasons


def unread_by(
    family: Family, own: Mapping[str, Any], scheduler: Scheduler
) -> list[str]:
    """Returns which options of a scheduler change no image, since the calls of a family compute the shift without them."""
    reasons = []
    for key in family.unread:
        value = scheduler.options.get(key)
        if value is not None and value != own.get(key):
            reasons.append(
                f"scheduler.options.{key}={value}: has no effect: {family.title} has a shift of its own: leave it out"
            )
    return reasons


_DRAWING = {
    "stochastic_sampling": (_FLOW, (True,), "false"),
    "algorithm_type": (
        "DPMSolver",
        ("sde-dpmsolver", "sde-dpmsolver++"),
        "dpmsolver++",
    ),
}
"""Keys of schedulers: how the names of these begin, the values with which each step draws noise, and one without."""


def unseeded(family: Family, own: Mapping[str, Any], scheduler: Scheduler) -> list[str]:
    """Returns why no seed would decide the noise of a scheduler's steps: diffusers' call gives it no generator."""
    if family.seeds_steps:
        return []
    config = {**own, **scheduler.options}
    reasons = []
    for key, (begin, values, instead) in _DRAWING.items():
        if scheduler.class_name.startswith(begin) and config.get(key) in values:
            reasons.append(
                f"scheduler.options.{key}={config[key]}: steps draw noise without a seed, and no image twice, since "
                f"diffusers' {family.pipeline} gives them no generator: set it to {instead}"
            )
    return reasons


def _flow_mismatches(
    own: Mapping[str, Any], scheduler: Scheduler, at: str
) -> list[str]:
    """Returns why a scheduler cannot sample a flow; [] if it can."""
    config = {**own, **scheduler.options}
    takes = "use_flow_sigmas" in _arguments(scheduler_class(scheduler))
    if not takes or not is_flow({**config, "_class_name": scheduler.class_name}):
        why = f"has levels of noise, and the model's own {own['_class_name']} samples a flow: images would be nonsense"
        return [f"{at}: {why}: choose scheduler=flow_euler"]
    settings = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    reasons = []
    for key, value in settings.items():
        if config.get(key) == value:
            continue
        why = f"the model's own {own['_class_name']} samples a flow, and here {key} is {config.get(key)}"
        way = f"set +scheduler.options.{key}={str(value).lower()}"
        reasons.append(f"{at}: {why}: images would be nonsense: {way}")
    return reasons


def _level_mismatches(
    own: Mapping[str, Any], scheduler: Scheduler, at: str
) -> list[str]:
    """Returns why a scheduler cannot have the levels of noise of a model, or sample what it predicts; [] if it can."""
    chosen, options = scheduler_class(scheduler), scheduler.options
    arguments, name = _arguments(chosen), own.get("_class_name")
    reasons: list[str] = []
    if (of_model := _scheduler_named(name)) not in (None, chosen):
        if not _has_levels(of_model):
            return [
                f"{at}: has other noise levels than the model's own {name}: choose scheduler.class_name={name}"
            ]
        if not _has_levels(chosen):
            return [
                f"{at}: cannot have the noise levels of the model's own {name}: choose scheduler=ddim, euler or unipc"
            ]
    for key, usual in _TRAINED.items():
        value = own.get(key)
        if key not in options and key not in arguments and value not in usual:
            names = [
                option
                for option, class_name in _OPTIONS.items()
                if key in _arguments(_scheduler_named(class_name))
            ]
            instead = (
                f"scheduler={' or '.join(names)}"
                if names
                else f"scheduler.class_name={name}"
            )
            reasons.append(
                f"{at}: has no {key}, and the model was made for {key}={value}: choose {instead}"
            )
    predicts = own.get("prediction_type", "epsilon")
    flows = predicts == "flow_prediction" and "use_flow_sigmas" in arguments
    if (
        not reasons
        and "prediction_type" not in options
        and predicts not in _PREDICTIONS
        and not flows
    ):
        reasons.append(
            f"{at}: cannot sample prediction_type={predicts}, as the model says of itself; to contradict it, give "
            "+scheduler.options.prediction_type=epsilon or v_prediction"
        )
    return reasons


def _rehearsed(own: Mapping[str, Any], scheduler: Scheduler, steps: int) -> list[str]:
    """Samples a few numbers without a model; returns why that fails.

    Schedulers accept configurations for which they have no step, such as a prediction type.
    """
    import torch

    try:
        with quiet(), torch.no_grad():
            latents, again = (_sampled(own, scheduler, steps) for _ in range(2))
        if not latents.isfinite().all():
            why = "its numbers are not finite"
        elif latents.equal(again):
            return []
        else:
            why = f"scheduler.class_name={scheduler.class_name}: draws noise without a seed, and no image twice"
            seeded = "noise_sampler_seed" in _arguments(scheduler_class(scheduler))
            way = (
                "give +scheduler.options.noise_sampler_seed=0"
                if seeded
                else "choose scheduler=ddim, euler or unipc"
            )
            return [f"{why}: {way}"]
    except Exception as error:  # each scheduler raises its own
        why = with_type(error)
    if scheduler.options and not _rehearsed(own, replace(scheduler, options={}), steps):
        words = " ".join(
            f"scheduler.options.{key}={value}"
            for key, value in scheduler.options.items()
        )
        return [f"{words}: {scheduler.class_name} cannot sample with it ({why})"]
    if steps > _USUAL_STEPS and not _rehearsed(own, scheduler, _USUAL_STEPS):
        return [
            f"workload.steps={steps}: {scheduler.class_name} cannot sample in so many ({why}): set fewer"
        ]
    predicts = scheduler.options.get(
        "prediction_type", own.get("prediction_type", "epsilon")
    )
    what = f"cannot sample prediction_type={predicts} in workload.steps={steps} ({why})"
    return [
        f"scheduler.class_name={scheduler.class_name}: {what}: choose scheduler=ddim, euler or unipc"
    ]


def draws_noise(own: Mapping[str, Any], scheduler: Scheduler, steps: int) -> bool:
    """Returns whether a scheduler draws noise in its steps, from the generator of the call."""
    import torch

    with quiet(), torch.no_grad():
        latents, others = (_sampled(own, scheduler, steps, seed) for seed in range(2))
    return not latents.equal(others)


def _sampled(
    own: Mapping[str, Any], scheduler: Scheduler, steps: int, seed: int = 0
) -> torch.Tensor:
    """Returns what a scheduler makes of a few numbers, with the noise of a seed, if the scheduler takes it."""
    import torch

    instance = scheduler_like(SimpleNamespace(config=own), scheduler)
    mu = (
        {"mu": 1.0} if instance.config.get("use_dynamic_shifting") else {}
    )  # of the number of tokens, in a pipeline
    instance.set_timesteps(steps, **mu)
    _require_falling(instance.timesteps, steps)
    if _counts_from_training(instance):
        _require_within(
            instance.timesteps, own.get("num_train_timesteps", _TRAINED_STEPS)
        )
    latents = torch.full(
        (1, 4, 8, 8), float(getattr(instance, "init_noise_sigma", 1.0))
    )
    scaled = getattr(instance, "scale_model_input", None)  # a flow scales nothing
    takes = inspect.signature(instance.step).parameters
    noise = (
        {"generator": torch.Generator().manual_seed(seed)}
        if "generator" in takes
        else {}
    )
    for timestep in instance.timesteps:
        output = torch.ones_like(scaled(latents, timestep) if scaled else latents)
        latents = instance.step(output, timestep, latents, **noise)[0]
    return latents


def _require_falling(timesteps: torch.Tensor, steps: int) -> None:
    """Raises ValueError for timesteps of which no image follows: of more steps than a model has, rounding may leave 0."""
    first, last = float(timesteps[0]), float(timesteps[-1])
    if first < last:
        raise ValueError("its timesteps rise: it makes noise of an image")
    if steps > 1 and first == last:
        raise ValueError(f"all its timesteps are {first:g}: it removes no noise")


def _counts_from_training(made: Any) -> bool:
    """Returns whether a scheduler's timesteps are those of a model's training; EDM's are logarithms of noise levels."""
    flows = type(made).__name__.startswith(_FLOW)
    counted = flows or _has_levels(type(made))
    return counted and made.config.get("timestep_type") != "continuous"


def _require_within(timesteps: torch.Tensor, trained: int) -> None:
    """Raises ValueError for timesteps that a model was not trained with: it answers, and the image is another."""
    for outside in (float(timesteps.min()), float(timesteps.max())):
        if outside < 0 or outside > trained + 1:
            raise ValueError(f"it goes on to timestep {outside:g}, which no model has")


def late_start(own: Mapping[str, Any], scheduler: Scheduler, steps: int) -> list[str]:
    """Returns a remark if a single step begins where a model expects hardly any noise, so that images stay noise.

    Most schedulers space one step so, unless `timestep_spacing` is `trailing`.
    """
    if steps > 1:
        return []
    key = f"first of {_key(own, scheduler, steps)}"
    if key not in _found:
        _found[key] = _late(own, scheduler)
    return list(_found[key])


def _late(own: Mapping[str, Any], scheduler: Scheduler) -> list[str]:
    if _mismatches(own, scheduler) or not _has_levels(scheduler_class(scheduler)):
        return []
    try:
        with quiet():
            instance = scheduler_like(SimpleNamespace(config=own), scheduler)
            instance.set_timesteps(1)
    except Exception:  # each scheduler raises its own, as `unsuited` says
        return []
    first, whole = (
        float(instance.timesteps[0]),
        int(instance.config.num_train_timesteps),
    )
    if first > whole / 2:
        return []
    begins = f"{scheduler.class_name} begins one step at timestep {first:g} of {whole}"
    way = "+scheduler.options.timestep_spacing=trailing begins at the last one"
    return [f"workload.steps=1: {begins}, so that images stay noise; {way}"]


def misnamed(name: str, own: Mapping[str, Any], scheduler: Scheduler) -> list[str]:
    """Returns a problem if a model's name says that it predicts velocity, and its configuration or file does not.

    Conversions of such models often lose it, and their images are noise. Only a user can say which of the two is right.
    """
    if (
        own.get("prediction_type") == "v_prediction"
        or "prediction_type" in scheduler.options
    ):
        return []
    if (said := _SAYS_VELOCITY.search(name)) is None:
        return []
    why = f"the name {name} says {said[0]}, and nothing else of the model says so"
    return [
        f"scheduler.options.prediction_type: {why}: give +scheduler.options.prediction_type=v_prediction or epsilon"
    ]


_SAYS_VELOCITY = re.compile(
    r"v[-_. ]?pred(?=v\d|(?-i:[^a-z])|$)|v[-_. ]?prediction|v[-_. ]param|velocity",
    re.IGNORECASE,
)


def remarks(
    own: Mapping[str, Any], marks: Mapping[str, Any], scheduler: Scheduler
) -> list[str]:
    """Returns what a user should know of how a model is sampled: the marks in its file, a scheduler for few steps."""
    lines = []
    if overridden := {
        key: value for key, value in marks.items() if key not in scheduler.options
    }:
        said = ", ".join(
            f"{key}={str(value).lower()}" for key, value in overridden.items()
        )
        lines.append(
            f"is marked to be sampled with {said}; +scheduler.options.… overrides it"
        )
    for key, usual in _OF_TRAINING.items():
        trained = own.get(key, usual)
        chosen = scheduler.options.get(key, trained)
        unsaid = trained is None and key in _LEVELS
        if chosen != trained and not unsaid:
            lines.append(
                f"was trained with {key}={trained}: with scheduler.options.{key}={chosen} it is asked at other levels "
                "of noise, and images may be nonsense"
            )
    name = str(own.get("_class_name"))
    few = ("LCMScheduler", "TCDScheduler", "FlowMatchLCMScheduler")
    if name in few and scheduler.class_name != name:
        lines.append(
            f"its own scheduler is {name}, for a model distilled to a few steps, and {scheduler.class_name} takes its "
            f"place; scheduler.class_name={name} keeps it"
        )
    return lines


def few_steps(
    name: str, steps: int, guidance: float, embedded: bool = False
) -> str | None:
    """Returns what speaks against steps and guidance, if a model's or a LoRA's name says that it takes few steps.

    Nothing else tells a distilled model from others, and in 25 guided steps it draws burnt images, and no error. A
    scale that is `embedded`, an input of the denoiser, stays as it was: in FLUX.1 [dev] with a LoRA for few steps, 3.5.
    """
    if (said := _FEW_STEPS.search(name)) is None:
        return None
    much = [f"workload.steps={steps}"] if steps > _MOST_STEPS else []
    guided = guidance > _MOST_GUIDANCE and not embedded
    if guided and "cfg" not in name.lower():
        much.append(f"workload.guidance_scale={guidance:g}")
    if not much:
        return None
    usual = "such models are distilled to 1 to 8 steps"
    if not embedded:
        usual += " with a guidance scale of 0 to 2"
    return f"the name {name} says {said[0]}, and here is {' and '.join(much)}: {usual}"


TURBO = r"(?<!(?<![a-z])de)(?<!(?<![a-z])de[-_ ])turbo"
"""The word, but not where a name says that a model is distilled no more, as Z-Image-De-Turbo does."""

_ENDS = r"(?=(?i:[-_. ]?(?:no)?vae)|(?:\.[A-Za-z]\w*)?$|[-_.](?i:v?\d|fp16|bf16|fp8|pruned|cfg|baked))"
"""What follows the kind of a model in a name: its VAE, a version, a type of numbers, the suffix of the file."""

_FEW_STEPS = re.compile(
    rf"(?i:{TURBO}|lightning|lcm[-_ ]?lora|hyper[-_ ]?(?:sd|xl|flux|\d)|(?<![a-z])(?:flash|rapid)(?![a-z]))"
    r"|(?i:schnell|(?<![a-z])sprint(?![a-z])|(?<!\d)(?:[1-9]|1[0-6])[-_ ]?steps?(?![a-z]))"
    r"|(?<![A-Za-z])(?i:lcm|dmd2?|tcd|pcm|zit)(?![a-z])"
    r"|(?<=[a-z])(?:LCM|DMD2?|TCD|PCM)(?![a-z])"
    rf"|(?:(?<![A-Za-z])(?i:hyper)|(?<=[a-z\d])Hyper){_ENDS}"
    r"|(?i:perflow|(?<![a-z])nitro(?![a-z])|qwen[-_ ]?image[-_ ]distill)"
)
"""How distilled models and LoRAs are named, also within a word: `sdxlTurbo`, `dreamshaper_8LCM`."""

_MOST_STEPS, _MOST_GUIDANCE = 12, 3.0


def _arguments(cls: Any) -> Mapping[str, Any]:
    return inspect.signature(cls.__init__).parameters


def _has_levels(cls: Any) -> bool:
    return all(name in _arguments(cls) for name in _LEVELS)
