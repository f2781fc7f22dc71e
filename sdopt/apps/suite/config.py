"""The typed configuration of `sdopt gpu-suite`; `conf/gpu_suite.yaml` holds its values and its parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field

from sdopt.apps.suite.record import SUFFIX
from sdopt.config.own import own_config
from sdopt.errors import UsageError
from sdopt.record.choices import as_override
from sdopt.schema import Configured, OneOf, wrong_name

KINDS = ("doctor", "tests", "noise", "options", "study")

_STUDIES = ("options", "study")
"""Kinds that `intervals` measures once more."""

INTERVALS = "_intervals"
"""Suffix of the name of a part that measures once more, with several processes."""


@dataclass(frozen=True, kw_only=True)
class Part(Configured):
    """One part of the suite, which runs in a process of its own."""

    name: str = ""
    """Its key in `parts`, and its folder."""
    kind: Annotated[str, OneOf(KINDS)]
    """`doctor` describes the machine and its ceilings; `tests` runs the tests that need a GPU; `noise` is a study of
    identical variants; `options` a study of each option of some groups; `study` any other study."""
    limit_s: Annotated[float, Field(gt=0, le=86_400)]
    """Time limit of the part, in seconds; measurements made by then are kept."""
    least_s: Annotated[float, Field(ge=0, le=86_400)] = 20.0
    """The part does not begin with less time left than this, in seconds."""
    overrides: list[str] = field(default_factory=list)
    """Overrides of the part's study."""
    first: list[str] = field(default_factory=list)
    """Overrides of options or a study without `intervals`, which win over its own: two steps, for example, are enough
    for evidence."""
    options: list[str] = field(default_factory=list)
    """For `options`: what is tried, each option alone: whole groups or single options, as in `[layout,attention:math]`.
    """
    settings: dict[str, list[str]] = field(default_factory=dict)
    """For `options`: overrides to try an option with, as in `{memory=vae_tiling: [memory.vae_tiling.tile_size=32]}`."""
    settled: list[str] = field(default_factory=list)
    """For `options`: options to leave out, as in `[compiler=tensorrt]`."""
    cuda: bool = False
    """Whether the part needs CUDA, and is left out on a CPU."""


@dataclass(frozen=True, kw_only=True)
class SuiteConfig(Configured):
    """The settings of one call of the suite."""

    budget_s: Annotated[float, Field(gt=0, le=604_800)]
    """Time that this call may take, in seconds. Parts that do not fit are listed as not run; a later call runs them."""
    device: Literal["cuda", "cpu"]
    """`cuda` is the first CUDA device. On the CPU, every study runs with the packaged model, as a trial."""
    folder: str
    """Folder of the results, with a subfolder for each device; a later call reads there which parts are done."""
    archive: str | None = None
    """A file ending in `.tar.xz` that gets all results of the device, without images, after each part; if the device's
    folder is missing, it is made from this file. One archive is of one device."""
    only: list[str] = field(default_factory=list)
    """Parts to run; an empty list runs all, in their order."""
    retry: bool
    """Runs parts again that failed, were ended at their limit, or in which something failed: of a study only what is
    missing, unless it cannot be resumed, as after a change of sdopt's code."""
    common: list[str] = field(default_factory=list)
    """Overrides of every study."""
    first: list[str] = field(default_factory=list)
    """Overrides of every study of options or of a preset without `intervals`."""
    intervals: bool
    """Measures studies and options once more, as parts of their own whose names end in `_intervals`: with `precise` in
    place of `first`, and only options that passed, if they were tried before."""
    intervals_s: Annotated[float, Field(gt=0, le=86_400)]
    """Time limit of each such part, in seconds."""
    precise: list[str] = field(default_factory=list)
    """Overrides of every such part: three processes of each variant give intervals."""
    on_cpu: list[str] = field(default_factory=list)
    """Overrides of every study on a CPU, which win over its own."""

    parts: dict[str, Part] = field(default_factory=dict)
    """All parts by name, in order of value."""

    @property
    def chosen(self) -> list[Part]:
        """The parts that this call is to run."""
        chosen = [
            part
            for part in self.parts.values()
            if not self.only or part.name in self.only
        ]
        if not self.intervals:
            return chosen
        return [
            replace(part, name=part.name + INTERVALS, limit_s=self.intervals_s)
            for part in chosen
            if part.kind in _STUDIES
        ]


def suite_config(overrides: Sequence[str]) -> SuiteConfig:
    """Returns `conf/gpu_suite.yaml` with overrides applied, typed and within its ranges.

    Raises:
        UsageError: an override names no key, or a value is of another type or out of its range; all such values are
            reported together.
    """
    config = own_config("gpu-suite", SuiteConfig, overrides)
    parts = {
        key: _with_equals_signs(replace(part, name=key))
        for key, part in config.parts.items()
    }
    problems = [f"parts.{key}: {wrong}" for key in parts if (wrong := wrong_name(key))]
    problems += chain.from_iterable(map(_idle_keys, parts.values()))
    if config.archive is not None and not config.archive.endswith(SUFFIX):
        problems.append(f"archive={config.archive}: must end in {SUFFIX}")
    if unknown := [name for name in config.only if name not in parts]:
        known = ", ".join(parts)
        problems += [
            f"only: unknown part '{name}'; choose from {known}" for name in unknown
        ]
    elif config.intervals and all(
        parts[name].kind not in _STUDIES for name in config.only or parts
    ):
        problems.append(
            f"intervals=true: none of only={config.only} is a study or options"
        )
    if problems:
        raise UsageError(problems)
    return replace(config, parts=parts)


def _with_equals_signs(part: Part) -> Part:
    """Returns a part whose lists, which may be written as `precision:bf16`, hold overrides as on a command line."""
    given = (part.overrides, part.first, part.options, part.settled)
    overrides, first, options, settled = (
        [*map(as_override, written)] for written in given
    )
    return replace(
        part, overrides=overrides, first=first, options=options, settled=settled
    )


def _idle_keys(part: Part) -> list[str]:
    """Names the keys of a part that its kind ignores, and the keys that it needs but lacks."""
    takers = {
        "overrides": ("noise", "options", "study"),
        "first": ("options", "study"),
        "options": ("options",),
        "settings": ("options",),
        "settled": ("options",),
    }
    idle = [
        key
        for key, kinds in takers.items()
        if getattr(part, key) and part.kind not in kinds
    ]
    wrong = [
        f"parts.{part.name}.{key}: has no effect with kind={part.kind}; leave it out"
        for key in idle
    ]
    if part.kind == "options" and not part.options:
        wrong.append(
            f"parts.{part.name}.options: must name the groups or options that are tried"
        )
    return wrong
