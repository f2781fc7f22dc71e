"""Writes how to apply an option that a study measured: the command that measures it again, and code for a program."""

import shlex
from collections.abc import Collection, Iterator
from dataclasses import fields

from sdopt.record.choices import difference, option_name
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import VariantResult
from sdopt.schema import Model, Workload

_ELSEWHERE = ("study", "experiment", "tracking", "hydra", "dry_run", "resume", "retry_failed", "objective")
"""Keys that do not affect the variant."""

PLAIN = {
    "task": "txt2img",
    "precision": "fp32",
    "lora": "none",
    "caching": "none",
    "attention": "default",
    "compiler": "eager",
    "layout": "contiguous",
    "grad_mode": "no_grad",
    "patch": "none",
    "scheduler": "ddim",
}
"""The default option of each group, as in `conf/config.yaml`."""

_IMPORTS = ("import ", "from ")

_WITHIN = "with "
"""Start of a line that wraps each call of the pipeline."""

SPREAD = "from sdopt.pipelines.sampling import spread"
"""Imports what sets timesteps between those that a scheduler names, for another number of steps."""


def command_of(variant: VariantResult, baseline: VariantResult) -> str:
    """Returns the `sdopt run` command that compares a variant with the baseline of its study."""
    words = []
    for override in variant.overrides:
        key = _key(override)
        if override == f"{key}={PLAIN.get(key)}" and override in baseline.overrides:
            continue  # a design repeats it
        if key.partition(".")[0] not in _ELSEWHERE or key == "study.baseline":
            words.append(override)
    if any(_key(override) == "experiment" for override in variant.overrides):
        words = [*_as_experiment_has(variant, set(map(_key, words))), *words]
    words = [*baseline_words(baseline), *words]
    last = {_key(word): word for word in words}
    return shlex.join(["sdopt", "run", *last.values()])


def baseline_words(baseline: VariantResult) -> list[str]:
    """Returns the override of a baseline that has optimizations of its own; [] for a plain one."""
    optimized = [f"{axis}:{option}" for axis, option in _chosen(baseline) if axis in baseline.promises]
    return [f"study.baseline=[{','.join(optimized)}]"] if optimized else []


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _as_experiment_has(variant: VariantResult, named: set[str]) -> Iterator[str]:
    """Yields a preset's settings as overrides, without options of the variant's groups in `named`.

    The preset itself would measure all its variants.
    """
    config, model = variant.config, variant.config.model
    source = model.source if model.weights in ("path", "factory") else model.name
    if source != Model().name:
        yield f"model={source}"
    yield from (f"{axis}={option}" for axis, option in _chosen(variant) if axis not in named)
    for field in fields(Workload):
        value = getattr(config.workload, field.name)
        if value == getattr(Workload(), field.name):
            continue
        if isinstance(value, int | float):
            yield f"workload.{field.name}={value}"
        elif field.name in ("size", "batch_size"):  # lists, if the study has several shapes
            yield f"workload.{field.name}=[{','.join(map(str, value))}]"


def _chosen(variant: VariantResult) -> list[tuple[str, str]]:
    """Returns the groups whose option is not the default, each with its option."""
    found = [(axis, option_name(option)) for axis, option in variant.choices.items()]
    return [(axis, option) for axis, option in found if option != PLAIN.get(axis, option)]


def lines_of(variant: VariantResult, reference: VariantResult) -> list[str]:
    """Returns code that turns on, for a diffusers pipeline `pipe`, the options that a variant adds to its reference.

    The code is diffusers' own for options that have such code, and `sdopt.optimize` for the others.
    """
    imports, changes, contexts = code_of(variant, difference(variant.choices, reference.choices))
    scheduler = _scheduler(variant.config, reference.config)
    call = _call(variant.config, reference.config)
    if "spread(" in call:
        imports = [*imports, SPREAD]
    if contexts:
        changes += [f"{_WITHIN}{', '.join(contexts)}:", f"    image = {call or 'pipe(prompt)'}.images[0]"]
    elif call:
        changes.append(f"image = {call}.images[0]")
    return [*dict.fromkeys([*scheduler[:1], *imports]), *scheduler[1:], *changes]


def code_of(variant: VariantResult, axes: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns code that turns on the options of some axes for a pipeline `pipe`.

    Returns:
        the lines that import, those that change the pipeline, and the context managers that wrap each call.
    """
    applied = {axis: lines for axis, lines in variant.snippets.items() if axis in axes}
    found = [line for lines in applied.values() for line in lines]
    imports = [line for line in found if line.startswith(_IMPORTS)]
    changes = [line for line in found if not line.startswith((*_IMPORTS, _WITHIN))]
    if by_sdopt := [axis for axis, lines in applied.items() if not lines]:
        imports.append("import sdopt")
        changes.append(_optimize(variant, by_sdopt))
    contexts = [line.removeprefix(_WITHIN).removesuffix(":") for line in found if line.startswith(_WITHIN)]
    return list(dict.fromkeys(imports)), changes, contexts


def _scheduler(mine: RecordedConfig, other: RecordedConfig) -> list[str]:
    if mine.scheduler == other.scheduler:
        return []
    name, options = mine.scheduler.class_name, mine.scheduler.options
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    return [f"from diffusers import {name}", f"pipe.scheduler = {name}.from_config(pipe.scheduler.config{given})"]


def steps_argument(config: RecordedConfig) -> str:
    """Returns the argument of the pipeline's call that sets its steps; what calls `spread` needs the line `SPREAD`."""
    steps, spaced = config.workload.steps, config.scheduler.timesteps
    if spaced is None:
        return f"num_inference_steps={steps}"
    return f"timesteps={spaced if len(spaced) == steps else f'spread({spaced}, {steps}, pipe.scheduler)'}"


def _call(my_config: RecordedConfig, other_config: RecordedConfig) -> str:
    """Returns the call of the pipeline with the arguments in which two variants differ; "" if they do not differ."""
    mine, other = my_config.workload, other_config.workload
    names = {"height": "size", "width": "size"}
    names |= {key: key for key in ("guidance_scale", "negative_prompt")}
    differ = {name: getattr(mine, key) for name, key in names.items() if getattr(mine, key) != getattr(other, key)}
    steps = steps_argument(my_config)
    given = [steps] if steps != steps_argument(other_config) else []
    given += [f"{name}={value!r}" for name, value in differ.items() if isinstance(value, int | float | str)]
    return f"pipe(prompt, {', '.join(given)})" if given else ""


def _optimize(variant: VariantResult, axes: list[str]) -> str:
    """Returns one call of `optimize` for all options, because it accepts a pipeline only once."""
    groups: dict[str, str | list[str]] = {}
    for axis in axes:
        group, _, combines = axis.partition(".")
        option = option_name(variant.choices[axis])
        groups[group] = [*groups.get(group, []), option] if combines else option
    keys = [repr(word) for word in variant.overrides if _key(word).startswith(tuple(f"{axis}." for axis in axes))]
    named = [f"{group}={chosen!r}" for group, chosen in groups.items()]
    return f"sdopt.optimize({', '.join(['pipe', *keys, *named])})".replace("'", '"')
