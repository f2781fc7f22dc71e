"""The typed configuration of `sdopt load-test`; `conf/load_test.yaml` holds its values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from sdopt.apps.serving.config import Serving, serving_config, without_effect
from sdopt.apps.traffic.figures import early_stopping, wanted_share
from sdopt.apps.traffic.twin import KINDS, unit_trace
from sdopt.config.compositions import composition_of
from sdopt.config.overrides import group_of, key_of
from sdopt.config.own import own_config
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.record.choices import quoted, written_value
from sdopt.schema import Configured, Fraction, PositiveShare, Seed, wrong_name

_PROMPTS = ("workload.prompts", "workload.prompt_column", "workload.prompt_count")

_OF_STUDIES = ("study", "tracking", *_PROMPTS, "experiment", "dry_run")
"""Further sections and keys of `sdopt run` that a load test reads."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig(Configured):
    """What is sent, at which rates, and what counts as in time."""

    title: str
    """Name of the MLflow experiment, and first part of the folder's name."""
    policies: list[str] = field(default_factory=list)
    """Policies of batching that are compared beside `serving`, each with every variant; the baseline has the first."""
    arrivals: str
    """`poisson`, `constant`, or a file with a time in seconds per line, whose gaps are scaled to each rate."""
    requests: Annotated[int, Field(ge=10, le=1_000_000)]
    """Requests at each rate. A 95th percentile needs 59, a 99th 459."""
    duration_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Seconds that requests come at each rate at least; where `requests` take less, more are sent."""
    replicates: Annotated[int, Field(ge=1, le=100)]
    """Repetitions, each with fresh processes and a fresh trace, which is the same for all rows; intervals need 3."""
    limit_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Seconds from the scheduled arrival within which an image is wanted, for all rows; null is three times a single
    call of the baseline."""
    attainment: Fraction
    """Share of the requests that are to get their image within the limit."""
    early_stopping: bool = False
    """Whether so few may be late that the share is attained with 99 % confidence, as MLPerf decides it."""
    rates: list[float] | None = None
    """Requests a second, for all rows; null takes `ladder`."""
    ladder: list[float] = field(default_factory=list)
    """Rates of a row, as multiples of the highest one that a simulation of its queue predicts. Where they do not
    bracket the highest one, up to six further ones are sent, each 1.3 times further."""
    seed: Seed
    """Seed of the traces, and of the images."""
    lag_ms: Annotated[float, Field(gt=0, le=60_000)]
    """A window counts for nothing if more than 1 % of its requests were sent later than this."""
    interference: PositiveShare | None = 0.05
    """A window is sent again, twice at most, if other work took more than this share of the processor time that the
    worker asked for. If it always does, the least disturbed one counts, and the result says so. Null repeats none."""
    url: str | None = None
    """A server with the same interface that is measured instead, as in `http://127.0.0.1:8000`; also the whole address
    of its images, as in `https://host/some/prefix/images/generations?api-version=1`."""
    model: str | None = None
    """With `url`: the name of the model, where the server wants one in each request."""
    key: str | None = None
    """With `url`: the environment variable that has the server's key, which is sent as `Authorization: Bearer …`, and
    neither shown nor written."""
    headers: dict[str, str] | None = None
    """With `url`: further headers, as in `{api-key: $AZURE_KEY}`; `$NAME` is the value of that environment variable."""
    fields: dict[str, Any] | None = None
    """With `url`: fields of each request, as in `{size: 512x512}`; null leaves one out, as in `{seed: null}`. In one
    that is named like a secret, `$NAME` is the value of that environment variable, as in `{api_key: $MY_KEY}`."""
    folder: str
    """Folder of all load tests."""

    def count(self, rate: float) -> int:
        """Returns how many requests are sent at a rate."""
        return max(self.requests, math.ceil((self.duration_s or 0) * rate) + 1)

    def sending_s(self, rates: Sequence[float]) -> float:
        """Returns the seconds of sending to one row at some rates, in all replicates."""
        return self.replicates * sum(self.count(rate) / rate for rate in rates)


@dataclass(frozen=True)
class LoadCommand:
    """The file as a whole."""

    load: LoadConfig
    serving: Serving


def load_config(
    overrides: Sequence[str], config_dir: Path | None = None
) -> tuple[LoadConfig, dict[str, Serving], list[str]]:
    """Returns `conf/load_test.yaml` with the section of a preset and the overrides of a command line applied.

    Returns:
        the load, the policies by name, and the overrides of what is served.

    Raises:
        UsageError: an override names no key, is out of its range, or would have no effect.
    """
    overrides = [_url_typed(override) for override in overrides]
    own = [
        override
        for override in overrides
        if group_of(key_of(override)) in ("load", "serving")
    ]
    others = [override for override in overrides if override not in own]
    problems = list(without_effect(others, _OF_STUDIES))
    preset = (
        composition_of(others, config_dir).values.get("load") or {}
        if any(key_of(override) == "experiment" for override in others)
        else {}
    )
    found = own_config(
        "load-test",
        LoadCommand,
        [f"load.{key}={written_value(preset[key])}" for key in preset] + own,
    )
    load = found.load
    problems += _wrong(load)
    serving_keys = [
        override for override in own if group_of(key_of(override)) == "serving"
    ]
    if load.url is not None:
        sent = [
            o
            for o in others
            if key_of(o) in _PROMPTS or group_of(key_of(o)) == "tracking"
        ]
        served = [o for o in [*others, *serving_keys] if o not in sent]
        problems += [f"{o}: has no effect with load.url; leave it out" for o in served]
    limits = [
        o
        for o in serving_keys
        if key_of(o).partition(".")[2] not in ("", "max_batch", "window_ms")
    ]
    problems += [
        f"{override}: has no effect on a load test; leave it out" for override in limits
    ]
    if problems:
        raise UsageError(problems)
    policies: dict[str, Serving] = {}
    for serving in [
        *(serving_config([f"serving={name}"])[0] for name in load.policies),
        found.serving,
    ]:
        # What waits too long misses the limit anyway.
        unbounded = replace(serving, port=0, queue=100_000, deadline_s=86_400.0)
        policies.setdefault(serving.policy, unbounded)
    return load, policies, [*others, "~load"] if preset else others


def _url_typed(override: str) -> str:
    """Returns `url=ADDRESS`, as one types it, in Hydra's form: addresses may have signs that Hydra would read."""
    key, _, address = override.partition("=")
    if key not in ("url", "load.url") or address[:1] in ("'", '"'):
        return override
    return f"load.url={quoted(address)}"


def _wrong(load: LoadConfig) -> list[str]:
    problems = []
    if wrong := wrong_name(load.title):
        problems.append(f"load.title={load.title}: {wrong}")
    known = options_of("serving")
    problems += [
        f"load.policies: unknown policy '{name}'; choose from {', '.join(known)}"
        for name in load.policies
        if name not in known
    ]
    for key, values in (("rates", load.rates), ("ladder", load.ladder)):
        if values is not None and (
            not values or not all(0 < value <= 1e6 for value in values)
        ):
            problems.append(f"load.{key}={values}: needs rates above 0, as in [1,2,4]")
    problems += _wrong_windows(load)
    problems += _wrong_server(load)
    return problems


def _wrong_windows(load: LoadConfig) -> list[str]:
    problems = []
    if load.early_stopping and wanted_share(load.attainment, load.requests, True) > 1:
        fewest = early_stopping(0, load.attainment)
        problems.append(
            f"load.requests={load.requests}: load.early_stopping needs {fewest} at least"
        )
    if load.duration_s is not None and load.arrivals not in KINDS:
        problems.append(
            f"load.duration_s={load.duration_s:g}: has no effect on recorded arrivals; name load.requests"
        )
    try:
        unit_trace(load.arrivals, load.requests, load.seed)
    except UsageError as error:
        problems += error.problems
    return problems


def _wrong_server(load: LoadConfig) -> Iterator[str]:
    """Yields what is wrong with the keys of a server that is only known by its address."""
    if load.url is None:
        given = {
            "model": load.model,
            "key": load.key,
            "headers": load.headers,
            "fields": load.fields,
        }
        yield from (
            f"load.{key}: has no effect without load.url"
            for key, value in given.items()
            if value is not None
        )
        return
    if load.rates is None:
        yield "load.rates: must be given with load.url, as in load.rates=[1,2,4]"
    if load.limit_s is None:
        yield "load.limit_s: must be given with load.url, as in load.limit_s=2"
    if not load.url.startswith(("http://", "https://")):
        yield f"load.url={load.url}: must begin with http:// or https://"
    try:
        urlsplit(load.url)
    except ValueError as error:
        yield f"load.url={load.url}: {error}"
    if "prompt" in (load.fields or {}):
        yield "load.fields.prompt: workload.prompts has the prompts; leave it out"
    if (load.fields or {}).get("n") not in (None, 1):
        yield "load.fields.n: figures are of requests for one image each; leave it out"
