"""The typed configuration of `sdopt search`; `conf/search.yaml` holds its values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdopt.config.groups import optimization_options, options_of
from sdopt.config.overrides import group_of, key_of
from sdopt.config.own import own_config
from sdopt.errors import UsageError
from sdopt.quality.metrics import FAMILIES
from sdopt.schema import SEEDS, bounded, wrong_name

OBJECTIVES = ("latency", "memory", "distance")

_OWN = ("study", "experiment", "resume", "retry_failed", "objective")
"""Keys of `sdopt run` that a search settles itself."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What a search varies, what it looks for, and what it may spend."""

    title: str
    """Of the MLflow experiment, and the first part of the folder's name. Another name begins another search."""
    groups: list[str] = field(default_factory=list)
    """Groups whose options are tried, as in `[precision,layout,caching]`."""
    options: dict[str, list[str]] | None = None
    """Of a group, the options to try, as in `{compiler: [eager,inductor]}`; by default all that can run here."""
    keys: dict[str, list[Any]] | None = None
    """Values of a key, tried wherever it applies, as in `{caching.interval: [2,3,5], workload.steps: [15,25]}`."""
    objectives: list[str] = bounded(choices=OBJECTIVES)  # noqa: RUF009 (returns a field)
    """What shall be small: `latency`, `memory` (the peak of a process) or `distance` (of the images to the
    baseline's). Of several, the search looks for the combinations than which none is better in all."""
    memory_gib: float | None = bounded(None, gt=0, le=1e6)
    """A limit for the peak memory of a process."""
    latency_s: float | None = bounded(None, gt=0, le=1e6)
    """A limit for the time of a call."""
    distance: str
    """The metric that is the distance of the images, of those that compare with the baseline and are better when
    small."""
    distance_limit: float | None = bounded(None, ge=0, le=1e9)
    """A limit for that distance, in the unit of the metric."""
    budget_s: float = bounded(gt=0, le=31_536_000)
    """Time that this call may take, in seconds: no further candidates are screened once what is left is needed to race
    and to judge, and no race begins that would leave too little to judge. The judging is done whatever it takes."""
    trials: int | None = bounded(None, ge=1, le=1_000_000)
    """Combinations to measure at most; null is as many as the budget allows, or as there are."""
    side_by_side: int = bounded(ge=1, le=100)
    """Candidates that are measured beside one baseline, in one study."""
    error: float = bounded(gt=0, lt=1)
    """The chance, over all races together, that the best candidate is dropped in one of them; with several objectives,
    that any candidate of the front is."""
    races: int = bounded(ge=0, le=100)
    """Races among the candidates that screening cannot tell from the best one."""
    finalists: int = bounded(ge=1, le=100)
    """Candidates that the gate judges, on prompts, noise and processes that the search has not seen."""
    skip_spoiled: bool = True
    """Not to screen a combination of which a part was ruled out for its images, as in `caching=deepcache,layout=…`
    where `caching=deepcache` was: approximations add up. What draws another image by intent, as a scheduler, a LoRA or
    `workload.steps` do, may mend the rest, and is screened all the same."""
    seed: int = bounded(**SEEDS)
    """Seed of the proposals."""
    folder: str
    """Where searches lie, each in a folder of its own."""
    storage: str
    """Optuna's storage of trials, a database as SQLAlchemy names it."""
    screen: list[str] = field(default_factory=list)
    """Overrides of the studies that screen, as in `[protocol.rounds:2,quality.prompt_count:4]`."""
    race: list[str] = field(default_factory=list)
    """Overrides of the studies that race, likewise."""


@dataclass(frozen=True)
class SearchCommand:
    """The file as a whole."""

    search: SearchConfig


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides of the search itself, and those of the studies that it makes."""
    own = [override for override in overrides if override.lstrip("+").startswith("search.")]
    return own, [override for override in overrides if override not in own]


def search_config(overrides: Sequence[str], config_dir: Path | None = None) -> SearchConfig:
    """Returns `conf/search.yaml` with the overrides of a command line applied, typed and within its ranges.

    Args:
        overrides: of the search and of its studies.
        config_dir: a folder with groups of the user's own.

    Raises:
        UsageError: an override names no key, a value is of another type or out of its range, a group or an option does
            not exist, or a key of the study is one that a search settles itself.
    """
    own, others = split(overrides)
    config = own_config("search", SearchCommand, own).search
    problems = [
        f"{override}: a search makes studies of its own; leave it out"
        for override in others
        if group_of(key_of(override)) in _OWN
    ]
    problems += [*_wrong_space(config, config_dir), *_wrong_objectives(config)]
    if wrong := wrong_name(config.title):
        problems.append(f"search.title={config.title}: {wrong}")
    if problems:
        raise UsageError(problems)
    return config


def search_file() -> SearchConfig:
    """Returns `conf/search.yaml` as it is."""
    return own_config("search", SearchCommand, []).search


def _wrong_space(config: SearchConfig, config_dir: Path | None) -> list[str]:
    groups = sorted({group for group, _ in optimization_options(config_dir)} | {"scheduler"})
    problems = [
        f"search.groups: there is no group '{group}' of options; there are {', '.join(groups)}"
        for group in config.groups
        if group not in groups
    ]
    for group, options in (config.options or {}).items():
        if group not in config.groups:
            problems.append(f"search.options: '{group}' is not among search.groups")
            continue
        known = options_of(group, config_dir)
        problems += [
            f"search.options: {group} has no option '{option}'; there are {', '.join(known)}"
            for option in options
            if option not in known
        ]
    for key, values in (config.keys or {}).items():
        if "." not in key:
            problems.append(f"search.keys: '{key}' is no key; groups stand in search.groups")
        if len(values) < 1 or any(isinstance(value, list | dict) for value in values):
            problems.append(f"search.keys: {key} takes a list of values, as in [2,3,5]")
    if not config.groups and not config.keys:
        problems.append(f"search.groups: name the groups to search, as in search.groups=[precision,layout]; "
                        f"there are {', '.join(groups)}")  # fmt: skip
    return problems


def _wrong_objectives(config: SearchConfig) -> list[str]:
    problems = []
    if not config.objectives or len(set(config.objectives)) < len(config.objectives):
        problems.append(f"search.objectives: name one or several of {', '.join(OBJECTIVES)}, each once")
    fitting = [family.name for family in FAMILIES if family.needs_pair and family.higher_is_better is False]
    if config.distance not in fitting:
        problems.append(f"search.distance={config.distance}: choose one of {', '.join(fitting)}")
    return problems
