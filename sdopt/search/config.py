"""The typed configuration of `sdopt search`; `conf/search.yaml` holds its values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sdopt.config.groups import optimization_options
from sdopt.config.overrides import group_of, key_of
from sdopt.config.own import own_config
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.quality.metrics import FAMILIES
from sdopt.schema import (
    Amount,
    Configured,
    Fraction,
    OneOf,
    Seed,
    UpToMillion,
    wrong_name,
)

OBJECTIVES = ("latency", "memory", "distance")

DISTANCES = [
    family.name
    for family in FAMILIES
    if family.needs_pair and family.higher_is_better is False
]
"""Metrics of pairs of images that are better when smaller."""

_OWN = ("study", "experiment", "resume", "retry_failed", "objective")
"""Keys of `sdopt run` that a search sets itself."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Configured):
    """The variables, the objectives and the budget of a search."""

    title: str
    """Name of the MLflow experiment, and first part of the folder's name. Another name begins another search."""
    groups: list[str] = field(default_factory=list)
    """Groups whose options are tried, as in `[precision,layout,caching]`."""
    options: dict[str, list[str]] | None = None
    """The options to try, by group, as in `{compiler: [eager,inductor]}`; by default all options that can run here."""
    keys: dict[str, list[Any]] | None = None
    """Values to try for keys, wherever they apply, as in `{caching.interval: [2,3,5], workload.steps: [15,25]}`."""
    objectives: Annotated[list[Annotated[str, OneOf(OBJECTIVES)]], Field(min_length=1)]
    """Quantities to minimise: `latency`, `memory` (the peak of a process) or `distance` (from the baseline's images).
    With several objectives, the search looks for the Pareto front: combinations that no other one beats in all."""
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """A limit for the peak memory of a process."""
    latency_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """A limit for the time of a call."""
    distance: Annotated[str, OneOf(DISTANCES)]
    """The metric that measures the distance to the baseline's images: a paired metric that is better when smaller."""
    distance_limit: Amount | None = None
    """A limit for that distance, in the unit of the metric."""
    budget_s: Annotated[float, Field(gt=0, le=31_536_000)]
    """Time that this call takes, in seconds, unless everything is tried earlier. Each option is tried alone first; then
    combinations are screened, and raced if needed, while enough time is left to judge. What cannot be judged in that
    time stays undecided, and the same call with more time goes on."""
    trials: UpToMillion | None = None
    """Maximum number of combinations to measure; null measures as many as exist and the budget allows."""
    side_by_side: Annotated[int, Field(ge=1, le=100)]
    """Candidates that are measured beside one baseline, in one study."""
    error: Fraction
    """The chance, over all races together, that the best candidate is dropped in one of them; with several objectives,
    that any candidate of the front is."""
    races: Annotated[int, Field(ge=0, le=100)]
    """Races among the candidates that screening cannot tell from the best one."""
    finalists: Annotated[int, Field(ge=1, le=100)]
    """Candidates that the gate judges, on prompts, noise and processes that the search has not seen."""
    skip_spoiled: bool = True
    """Skips a combination if a part of it was ruled out for its images, such as `caching=deepcache,layout=…` after
    `caching=deepcache`: errors of approximations add up. An addition that draws another image by design (a scheduler,
    a LoRA, `workload.steps`) may repair the images, so such a combination is screened anyway."""
    seed: Seed
    """Seed of the proposals."""
    folder: str
    """Folder of all searches; each search has its own subfolder."""
    storage: str
    """Optuna's storage of trials, a database as SQLAlchemy names it."""
    screen: list[str] = field(default_factory=list)
    """Overrides of the studies that screen, as in `[protocol.rounds:2,quality.prompt_count:4]`."""
    race: list[str] = field(default_factory=list)
    """Overrides of the studies that race, likewise."""


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits overrides into those of the search itself and those of its studies."""
    of_search = [
        override for override in overrides if override.lstrip("+").startswith("search.")
    ]
    return of_search, [override for override in overrides if override not in of_search]


def search_config(
    overrides: Sequence[str], config_dir: Path | None = None
) -> SearchConfig:
    """Returns `conf/search.yaml` with the overrides of a command line applied, typed and within its ranges.

    Raises:
        UsageError: an override names no key, a value is of another type or out of its range, a group or an option does
            not exist, or a key of the study is one that a search sets itself.
    """
    of_search, others = split(overrides)
    config = own_config("search", SearchConfig, of_search, "search")
    problems = [
        f"{override}: not possible in a search, which makes its own studies; leave it out"
        for override in others
        if group_of(key_of(override)) in _OWN
    ]
    problems += _wrong_space(config, config_dir)
    if wrong := wrong_name(config.title):
        problems.append(f"search.title={config.title}: {wrong}")
    if problems:
        raise UsageError(problems)
    return config


def search_file() -> SearchConfig:
    """Returns `conf/search.yaml` as it is."""
    return own_config("search", SearchConfig, [], "search")


def _wrong_space(config: SearchConfig, config_dir: Path | None) -> list[str]:
    groups = sorted(
        {group for group, _ in optimization_options(config_dir)} | {"scheduler"}
    )
    problems = [
        f"search.groups: unknown group '{group}'; choose from {', '.join(groups)}"
        for group in config.groups
        if group not in groups
    ]
    for group, options in (config.options or {}).items():
        if group not in config.groups:
            problems.append(f"search.options: '{group}' is not among search.groups")
            continue
        known = options_of(group, config_dir)
        problems += [
            f"search.options: {group} has no option '{option}'; choose from {', '.join(known)}"
            for option in options
            if option not in known
        ]
    for key, values in (config.keys or {}).items():
        if "." not in key:
            problems.append(
                f"search.keys: '{key}' is not a key; to vary a group, add it to search.groups"
            )
        if len(values) < 1 or any(isinstance(value, list | dict) for value in values):
            problems.append(f"search.keys: {key} needs a list of values, as in [2,3,5]")
    if not config.groups and not config.keys:
        problems.append(f"search.groups: name the groups to search, as in search.groups=[precision,layout]; "
                        f"the groups are {', '.join(groups)}")  # fmt: skip
    return problems
