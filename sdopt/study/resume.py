"""Resumes or extends a study: checks that it is the same one, sets variants back to pending, says what they lack."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.record.choices import written_value
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import parse_result, to_json
from sdopt.record.records import (
    Budget,
    Environment,
    Status,
    StudyResult,
    VariantResult,
)
from sdopt.schema import THRESHOLDS
from sdopt.scratch import CACHES
from sdopt.statistics.pairs import paired_rounds
from sdopt.study.designs import CONTROL, Plan
from sdopt.study.fingerprint import of_prompts

_THRESHOLDS = [f"protocol.{name}" for name in THRESHOLDS]
"""Keys of which `sdopt gate` records other values."""

_CHANGEABLE = ("tracking", "dry_run", "hardware.exclusive", *_THRESHOLDS)

_GROWING = ("protocol.rounds", "protocol.replicates", "quality.prompt_count")

EXTENSIONS = (*_GROWING, "protocol.precision", "protocol.budget_s")
"""Keys that may change besides `resume`: measurements stay, and more of the same are added."""

_OF_THE_MOMENT = (
    *("command", "host", "warnings", "device.warning", "device.memory_free_gib"),
    *("gpu.processes", "gpu.persistence_mode", "gpu.compute_mode"),
    *(
        f"variables.{name}" for name in CACHES
    ),  # a cluster gives each job a folder of its own
)

_OWN_CODE = ("code", "sdopt_version", "sdopt_commit", "sdopt_dirty")


def merge_resumed(
    previous: StudyResult,
    fresh: StudyResult,
    plan: Plan,
    folder: Path,
    retry_failed: bool,
) -> StudyResult:
    """Returns the previous result, ready to be completed or extended.

    Drops the verdicts of a gate if anything will be measured: they were on other data. `fresh` is the same study as
    composed and planned now; it may ask for more of the same (`EXTENSIONS`).

    Raises:
        UsageError: it is not the same study, with every difference; or no comparison is possible.
    """
    fresh = parse_result(to_json(fresh))
    differing = list(_differences(previous, fresh, plan))
    if differing:
        why = f"resume={folder}: cannot continue the study"
        raise UsageError([f"{why}: {difference}" for difference in differing])
    grown = _grown(previous.config, fresh.config)
    if shrunk := list(_shrunk(previous.config, fresh.config, grown)):
        raise UsageError([f"resume={folder}: {problem}" for problem in shrunk])
    if grown:
        _extend(previous, fresh, "quality.prompt_count" in grown)
    for row in previous.variants:
        if row.status is Status.INTERRUPTED or (retry_failed and row.to_retry):
            _reopen(row, row.silent)
    pending = any(row.status is Status.PENDING for row in previous.variants)
    if pending:
        # The looks that these verdicts took stay spent.
        previous.gate = ""
        previous.judgements = []
    if pending or fresh.config.gate.judges:
        previous.config = _with_keys(previous.config, fresh.config, _THRESHOLDS)
    baseline = previous.baseline_variant
    if baseline.status.failure and pending:
        raise UsageError(
            f"resume={folder}: the baseline was not measured (status {baseline.status}: {baseline.reason}), so "
            "there is nothing to compare with; add retry_failed=true to measure it again"
        )
    previous.config = replace(previous.config, tracking=fresh.config.tracking)
    return previous


def is_elsewhere(previous: StudyResult, fresh: StudyResult) -> bool:
    """Returns whether two results are of different machines; the same card counts as one, whatever its host's name."""
    was = previous.environment
    now = fresh.environment
    # Earlier results name no host.
    if was.host in ("", now.host):
        return False
    card = was.device.get("attributes", {}).get("uuid")
    return card is None or card != now.device.get("attributes", {}).get("uuid")


def _grown(was: RecordedConfig, now: RecordedConfig) -> list[str]:
    """Returns which of the keys that may change have changed."""
    before = was.flat()
    after = now.flat()
    return [key for key in EXTENSIONS if before[key] != after[key]]


def _shrunk(
    was: RecordedConfig,
    now: RecordedConfig,
    grown: Sequence[str],
) -> Iterator[str]:
    """Yields the changes that would remove something from a study, or add something that it cannot have."""
    before = was.flat()
    after = now.flat()
    for key in _GROWING:
        if key in grown and (after[key] or 0) < (before[key] or 0):
            yield f"{key}={after[key]}: a study can only be extended, and this one has {before[key]}"
    if "quality.prompt_count" in grown and not was.quality.metrics:
        yield "quality.prompt_count: cannot change in a study with quality.metrics=false"
    if was.protocol.precision is not None:
        # The pilot's deviation fixed the number of processes: with other rounds or another pilot it would differ.
        if now.protocol.precision is None:
            yield (
                "protocol.precision=null: cannot be unset, because this study added processes for a precision, and its "
                "intervals account for that"
            )
        for key in ("protocol.rounds", "protocol.replicates"):
            if key in grown:
                yield (
                    f"{key}: cannot change in a study with protocol.precision; "
                    "change protocol.precision or protocol.budget_s"
                )


def _reopen(row: VariantResult, replicates: Collection[int]) -> None:
    """Sets a variant back to pending, and those of its processes that are of these replicates to incomplete."""
    row.status = Status.PENDING
    row.reason = ""
    for measurement in row.measurements:
        if measurement.replicate in replicates:
            measurement.complete = False


def _measure_the_spared(row: VariantResult, budget: Budget | None) -> None:
    """Marks the processes of which a budget left out evidence or stages as incomplete."""
    left_out_stages = budget is not None and not budget.stages
    for measurement in row.measurements:
        without_stages = left_out_stages and measurement.replicate == 0
        if measurement.spared or without_stages:
            measurement.spared = False
            measurement.complete = False


def _extend(previous: StudyResult, fresh: StudyResult, more_prompts: bool) -> None:
    """Applies the extended configuration, and marks all measured variants as incomplete."""
    budget = previous.budget
    previous.budget = None
    more_prompts |= budget is not None and budget.prompts is not None
    previous.environment.command = _extended_command(previous, fresh)
    for old, new in zip(previous.variants, fresh.variants, strict=True):
        old.config = _with_keys(old.config, new.config, EXTENSIONS)
        old.inputs = new.inputs
        old.command = ""  # it composes the study as it was
        if not old.status.measured or old.status is Status.SLOWER:
            continue
        # All images are drawn again, not only the new ones: a short last batch is filled up from the first prompts.
        _reopen(old, (0,) if more_prompts else ())
        _measure_the_spared(old, budget)
        if more_prompts:
            old.images = []
            old.kept_images = []
            old.quality = {}
            old.trips = old.trips_at_shapes
    previous.config = _with_keys(previous.config, fresh.config, EXTENSIONS)
    # The number of processes that a precision needs is known only after measuring, so the study is not finished yet.
    previous.status = "running"
    if more_prompts:
        previous.redrawn = {}
        previous.floors = {}
        for comparison in previous.comparisons:
            comparison.quality = {}
    if previous.precision is not None:
        previous.precision.needed = {}
        previous.precision.stopped = ""


def _extended_command(previous: StudyResult, fresh: StudyResult) -> list[str]:
    """Returns the command that measures the extended study at once: that of its beginning, with the keys that grew."""
    grown = _grown(previous.config, fresh.config)
    words = []
    for word in previous.environment.command:
        key, _, _ = word.lstrip("+").partition("=")
        if key not in grown:
            words.append(word)
    after = fresh.config.flat()
    return [*words, *(f"{key}={written_value(after[key])}" for key in grown)]


def _with_keys(
    was: RecordedConfig,
    now: RecordedConfig,
    keys: Sequence[str],
) -> RecordedConfig:
    """Returns a configuration with the values that another has for some keys."""
    for key in keys:
        section, name = key.split(".")
        value = getattr(getattr(now, section), name)
        changed = replace(getattr(was, section), **{name: value})
        was = replace(was, **{section: changed})
    return was


def _differences(
    previous: StudyResult,
    fresh: StudyResult,
    plan: Plan,
) -> Iterator[str]:
    """Yields the differences that make samples of two studies incomparable."""
    if is_elsewhere(previous, fresh):
        hosts = f"it was measured on {previous.environment.host}, but this is {fresh.environment.host}"
        yield f"{hosts}: all variants of a study must be measured on one machine"
    yield from other_surroundings(previous.environment, fresh.environment)
    if previous.environment.code != fresh.environment.code:
        # Another version of sdopt records other keys: each would differ, though the user changed none of them.
        commit = (previous.environment.sdopt_commit or "")[:9]
        yield (
            f"it was measured by another sdopt ({previous.environment.sdopt_version} {commit}), "
            "and cannot be continued with this one: start a new study (a search: --again), or resume it with that version"
        )
        return
    changeable = (*_CHANGEABLE, *EXTENSIONS)
    changed = list(_between(asdict(previous.config), asdict(fresh.config), changeable))
    yield from changed
    was = [(row.name, row.role) for row in previous.variants]
    now = [(row.name, row.role) for row in fresh.variants]
    if was != now:
        names_before = ", ".join(name for name, _ in was)
        names_now = ", ".join(name for name, _ in now)
        yield f"its variants were {names_before}, now {names_now}"
        return
    variants = {variant.name: variant for variant in plan.variants}
    variants[CONTROL] = plan.baseline
    for old, new in zip(previous.variants, fresh.variants, strict=True):
        if not changed:
            configs = (asdict(old.config), asdict(new.config))
            for difference in _between(*configs, changeable):
                yield f"{old.name}: {difference}"
        # With more prompts, the first ones must be those drawn before.
        inputs = dict(new.inputs)
        if "prompts" in old.inputs:
            count = previous.config.quality.prompt_count
            inputs["prompts"] = of_prompts(variants[old.name], count)
        for difference in _between(old.inputs, inputs):
            yield f"{old.name}: the contents of its {difference}"
    if _edges(previous) != _edges(fresh):
        yield "the comparisons between its variants are others"


def _edges(result: StudyResult) -> list[tuple[str, str, str]]:
    return [
        (edge.candidate, edge.reference, edge.credit) for edge in result.comparisons
    ]


def other_surroundings(was: Environment, now: Environment) -> Iterator[str]:
    """Yields what differs of software, machine and settings, so that samples are not of the same; sdopt's code apart."""
    yield from _between(vars(was), vars(now), (*_OF_THE_MOMENT, *_OWN_CODE))


_NEARLY = {"device.memory_total_gib": 0.01, "gpu.power_limit_w": 0.05}
"""What may differ by this share: a kernel reports other memory after each boot, and laptops shift power by a little."""


def _between(
    was: Any,
    now: Any,
    ignored: tuple[str, ...] = (),
    key: str = "",
) -> Iterator[str]:
    """Yields `key: was …, now …` for each leaf that differs."""
    if key in ignored:
        return
    if isinstance(was, dict) and isinstance(now, dict):
        for name in {**was, **now}:
            below = f"{key}.{name}" if key else str(name)
            yield from _between(was.get(name), now.get(name), ignored, below)
    elif key in _NEARLY and None not in (was, now):
        if not math.isclose(was, now, rel_tol=_NEARLY[key]):
            yield f"{key}: was {was:.1f}, now {now:.1f}"
    elif was != now:
        yield f"{key}: was {was}, now {now}"


@dataclass(frozen=True)
class Missing:
    """What a study still has to measure; for a new study, everything."""

    rounds: int
    timed: frozenset[tuple[str, int]]
    """Variants, each with a replicate, to time for `rounds` rounds: both sides of every comparison that lacks rounds,
    and the baselines."""
    unfinished: frozenset[tuple[str, int]]
    """Variants, each with a replicate, without evidence, stages and images."""

    @property
    def processes(self) -> frozenset[tuple[str, int]]:
        """All processes that take part in the next session."""
        return self.timed | self.unfinished

    @property
    def variants(self) -> frozenset[str]:
        """The names of the variants that take part in the next session."""
        return frozenset(name for name, _ in self.processes)


def missing_of(result: StudyResult) -> Missing:
    """Returns what a study still has to measure. A variant that failed is a result, and not missing."""
    pending = {row.name for row in result.variants if row.status is Status.PENDING}
    lacking = _lacking_rounds(result, pending)
    processes: set[tuple[str, int]] = set()
    complete: set[tuple[str, int]] = set()
    for row in result.variants:
        replicates = set(range(result.replicates_of(row.name)))
        for measurement in row.measurements:
            replicates.add(measurement.replicate)
            if measurement.complete:
                complete.add((row.name, measurement.replicate))
        if row.name in pending:
            processes.update((row.name, replicate) for replicate in replicates)
    return Missing(
        max(lacking.values(), default=0),
        frozenset(lacking),
        frozenset(processes - complete),
    )


def _lacking_rounds(
    result: StudyResult,
    pending: set[str],
) -> dict[tuple[str, int], int]:
    """Returns how many rounds each process lacks, by variant and replicate: both sides of a comparison that lacks some.

    The baselines of the replicates that lack rounds are among them, with 0 of their own: processes of different
    sessions are not comparable, so each session has a baseline and a floor.
    """
    rounds = result.config.protocol.rounds
    settled: dict[str, int] = {}
    if result.budget is not None:
        rounds = result.budget.rounds or rounds
        settled = result.budget.settled
    usable = {row.name for row in result.variants if row.is_in_the_race}
    pairs = [(edge.candidate, edge.reference) for edge in result.comparisons]
    pairs += [(name, result.baseline) for name in pending - {result.baseline}]
    lacking: dict[tuple[str, int], int] = {}
    for pair in pairs:
        if not usable.issuperset(pair) or pending.isdisjoint(pair):
            continue
        candidate, _ = pair
        for replicate in range(result.replicates_of(candidate)):
            lacks = settled.get(candidate, rounds) - _rounds_of(result, pair, replicate)
            if lacks > 0:
                for name in pair:
                    process = name, replicate
                    lacking[process] = max(lacks, lacking.get(process, 0))
    baselines = {result.baseline}
    if result.control:
        baselines.add(result.control.name)
    baselines &= usable
    for replicate in {replicate for _, replicate in lacking}:
        for name in baselines:
            lacking.setdefault((name, replicate), 0)
    return lacking


def _rounds_of(result: StudyResult, pair: tuple[str, str], replicate: int) -> int:
    """Returns how many rounds the processes of a pair of variants share, at the shape with the fewest."""
    candidate, reference = map(result.variant, pair)
    return min(
        paired_rounds(candidate.at(number), reference.at(number), replicate)
        for number in range(len(result.shapes))
    )
