"""Runs the load test of a command line: composes its rows, measures them, and writes and logs what was found."""

import hashlib
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from functools import partial
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path
from typing import Any

from sdopt.about import __version__
from sdopt.apps.loadtest.config import LoadConfig, load_config
from sdopt.apps.loadtest.record import LoadRecord, LoadRow, RowFigures, shared_rate
from sdopt.apps.loadtest.report import answer_of, blocks_of, rate_text
from sdopt.apps.loadtest.run import LoadTest, ServedRow
from sdopt.apps.loadtest.target import Target, target_of
from sdopt.apps.serving.config import BATCHES, Serving
from sdopt.apps.serving.engine import unservable
from sdopt.apps.traffic.figures import Window
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.config.overrides import key_of
from sdopt.config.tracking import tracking_of
from sdopt.errors import ConflictError, command_line, print_problems, without_passwords
from sdopt.forecast import foreseen
from sdopt.locks import reserve
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.preparation import make_ready, remarks_on_variants
from sdopt.report.columns import tracked_metrics, tracked_tags
from sdopt.report.markdown import written
from sdopt.schema import Tracking
from sdopt.scratch import scratch_folder
from sdopt.study.plan import require_same_task, unused_options
from sdopt.tracking import client
from sdopt.tracking.client import NOTE, ROLE, TrackedRun
from sdopt.tracking.contents import (
    note_of,
    origin_tags,
    shared_tags,
    work_parameters,
)
from sdopt.tracking.store import ask, require_store
from sdopt.variant import Variant
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine, find_machine
from sdopt.worker.process import WorkerProcess

_LOAD = "sdopt.load"

_AT_THE_RATE = (
    *("p50_s", "p95_s", "p99_s", "goodput"),
    *("batch", "queue_s", "compute_s", "image_j"),
)
"""Figures that rows have at a rate."""


def _leaderboard(figures: str) -> list[str]:
    """Returns the columns of a load test's page in MLflow, by the highest rate; `figures` is what names begin with."""
    return [
        *("metrics.`load/max_rate_per_s`", "tags.`max_rate`"),
        *(f"metrics.`{figures}{name}`" for name in ("p99_s", "goodput")),
        *("params.`rate_per_s`", "params.`variant`", "params.`policy`"),
        *(
            f"tags.`{name}`"
            for name in ("model", "size", "steps", "lora_file", "device")
        ),
    ]


def run(
    argv: Sequence[str],
    config_dir: Path | None,
    context: StartContext,
    say: Callable[[str], None],
) -> LoadRecord:
    """Measures what a command line asks for, and writes and logs it.

    Raises:
        UsageError: the command line cannot be composed, or a row cannot be served here.
        UnavailableError: the baseline could not be measured.
    """
    load, policies, others = load_config(argv, config_dir)
    began = f"{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S-%f}"
    folder = Path(load.folder).expanduser() / load.title / began
    record = LoadRecord(
        load.title, [], began, command_line("load-test", *argv), load.requests, load.attainment, load.limit_s or 0.0,
        load.arrivals, None, early_stopping=load.early_stopping,
        interference=load.interference,
    )  # fmt: skip
    if load.url is not None:
        tracking = tracking_of(
            [override for override in others if key_of(override).startswith("tracking")]
        )
        measure: Callable[[], None] = partial(
            _measure_url, load, target_of(load, load.url), others, record, say
        )
    else:
        preset = any(key_of(override) == "experiment" for override in others)
        with composer_of(
            others if preset else [BATCHES, *others], config_dir
        ) as composer:
            chosen, plan = composer.current, composer.current.study.plan(composer)
            print_problems(
                unused_options(chosen.study, plan, composer.chosen(), composer.changed)
            )
        require_same_task(plan)
        tracking, record.price_per_hour = (
            chosen.tracking,
            chosen.hardware.price_per_hour,
        )
        machine, context = find_machine(context, plan.baseline.hardware, data_sheets)
        rows = list(product(plan.variants, policies.values()))
        refused = [
            unservable(variant, policy, machine.device) for variant, policy in rows
        ]
        candidates = [
            reasons
            for (variant, _), reasons in zip(rows, refused, strict=True)
            if variant != plan.baseline
        ]
        # As in a study: some may be left out, but neither the baseline nor all others.
        if refused[0] or (candidates and all(candidates)):
            raise ConflictError(list(dict.fromkeys(chain.from_iterable(refused))))
        call_s = None
        if load.rates is None:
            call_s, _, _ = foreseen([plan.baseline], machine, context)
        for line in _planned(load, rows, refused, call_s):
            say(line)
        if chosen.dry_run:
            return record
        measure = partial(_measure, load, rows, refused, record, machine, context, say)
    if warning := require_store(tracking, load.title):
        print_problems([warning])
    folder.mkdir(parents=True)
    try:
        measure()
    finally:
        if any(row.replicates for row in record.rows):
            _conclude(record, folder, tracking, load)
            say(f"load test: {folder}")
    return record


def _planned(
    load: LoadConfig,
    rows: Sequence[tuple[Variant, Serving]],
    refused: Sequence[Sequence[str]],
    call_s: float | None,
) -> Iterator[str]:
    """Yields what is served and what cannot be, a line for each row, and how much is sent.

    Where rates are found first, they are told by the seconds `call_s` that are expected of the baseline's call.
    """
    for (variant, policy), reasons in zip(rows, refused, strict=True):
        verdict = (
            f"cannot be served here: {'; '.join(reasons)}" if reasons else "is served"
        )
        yield f"{variant.name}, {policy.policy}: {verdict}"
    served = sum(not reasons for reasons in refused)
    windows = load.replicates * len(load.rates or load.ladder) * served
    lasting = f", {load.duration_s:g} s or longer" if load.duration_s else ""
    further = (
        ""
        if load.rates
        else "; further ones, where these do not bracket a row's highest rate"
    )
    yield f"{windows} windows, each of {load.requests} requests or more{lasting}{further}"
    if load.rates is not None:
        yield _sending(load, served, load.rates)
    elif call_s is not None:
        rates = [share / call_s for share in load.ladder]
        yield (
            f"{_sending(load, served, rates)}, if a row carries one image in {call_s:.3g} s, a call of the baseline by "
            "`sdopt plan`"
        )


def _sending(load: LoadConfig, rows: int, rates: Sequence[float]) -> str:
    """Returns how long requests are sent to some rows at some rates."""
    minutes = math.ceil(rows * load.sending_s(rates) / 60)
    return f"requests are sent for about {minutes} min in all"


def _measure(
    load: LoadConfig,
    rows: Sequence[tuple[Variant, Serving]],
    refused: Sequence[Sequence[str]],
    record: LoadRecord,
    machine: Machine,
    context: StartContext,
    say: Callable[[str], None],
) -> None:
    variants: list[Variant] = []
    for (variant, _), reasons in zip(rows, refused, strict=True):
        if not reasons and variant not in variants:
            variants.append(variant)
    make_ready(variants, machine.device, context)
    first = variants[0]
    most = max(shape.batch_size for shape in first.shapes)
    work = (
        f"{first.model.title} {first.size}×{first.size}, {first.workload.steps} steps"
    )
    record.header = [f"{work}, batches of up to {most}, on {machine.device.name}"]
    print_problems([*machine.warnings, *remarks_on_variants(variants, machine)])
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder("load"))
        if holder := stack.enter_context(reserve(machine.device, "sdopt load-test")):
            print_problems(
                [
                    f"{holder} measures on {machine.device.name}, and disturbs this load test"
                ]
            )
        candidates = []
        for number, (variant, policy) in enumerate(rows):
            name = f"{variant.name}, {policy.policy}"
            log, timeout_s = scratch / f"{number}.log", variant.protocol.timeout_s
            start = partial(
                WorkerProcess, context, machine.device, timeout_s, variant, log, scratch
            )
            row = LoadRow(
                name, variant.name, policy.policy, reason="; ".join(refused[number])
            )
            row.chosen, row.unlike = _work_beside(variant, rows[0][0])
            row.tags = _tags_of(variant, machine)
            candidates.append(ServedRow(row, variant, policy, start))
        record.rows = [candidate.row for candidate in candidates]
        LoadTest(load, record, machine.device, say).run(candidates)


def _tags_of(variant: Variant, machine: Machine) -> dict[str, str]:
    """Returns the work, the choices, the machine and the versions of a row, by the names that a study's runs have."""
    versions = {name: version(name) for name in ("torch", "diffusers")}
    work = work_parameters(variant.config)
    return {
        **{name: str(value) for name, value in work.items()},
        **variant.choices,
        "device": machine.device.name,
        **versions,
        "sdopt": __version__,
    }


def _work_beside(variant: Variant, baseline: Variant) -> tuple[list[str], list[str]]:
    """Returns in words what a row does otherwise than the baseline: by choice, and what makes it another work."""
    mine, others = variant.config, baseline.config
    chosen = mine.chosen_beside(others)
    unlike = mine.incomparable_work(others)
    if any(key.startswith("model.") for key in unlike):
        unlike = {
            key: values
            for key, values in unlike.items()
            if not key.startswith("model.")
        }
        unlike["model"] = (variant.model.source, baseline.model.source)
        chosen.pop("model", None)
    return _in_words(chosen), _in_words(unlike)


def _in_words(differing: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{key} {old} → {new}" for key, (new, old) in differing.items()]


def _measure_url(
    load: LoadConfig,
    target: Target,
    overrides: Sequence[str],
    record: LoadRecord,
    say: Callable[[str], None],
) -> None:
    with composer_of(
        [
            override
            for override in overrides
            if not key_of(override).startswith("tracking")
        ]
    ) as composer:
        workload, model = composer.current.workload, composer.current.model
    prompts = resolve_prompts(workload, model)
    say(_sending(load, 1, load.rates or ()))
    shown = without_passwords(load.url or target.address)
    # Each window begins with the first prompt.
    most = max(load.count(rate) for rate in load.rates or (1,))
    record.header = [f"the server at {shown}, with {min(most, len(prompts))} prompts"]
    row = LoadRow(shown, shown, "its own")
    record.rows = [row]
    LoadTest(load, record, None, say).run_url(row, target, prompts)


def _conclude(
    record: LoadRecord, folder: Path, tracking: Tracking, load: LoadConfig
) -> None:
    """Writes and logs what was found."""
    record.write(folder)
    text = written(blocks_of(record))
    (folder / "load.md").write_text(text, encoding="utf-8")
    try:
        from sdopt.apps.loadtest.charts import (
            draw,
        )  # a machine that only measures may lack the library of charts

        draw(record, folder)
    except ModuleNotFoundError as error:
        print_problems([f"not drawn: {error}; the figures are in {folder / 'load.md'}"])
    if tracking.kind == "mlflow":
        try:
            _log(record, folder, tracking, load, text)
        except client.TrackingError as error:
            print_problems([f"not logged to {error}"])


def _log(
    record: LoadRecord, folder: Path, tracking: Tracking, load: LoadConfig, text: str
) -> None:
    """Logs a load test: a run above one for each row. Raises TrackingError."""
    identity = hashlib.sha256(f"{folder.absolute()}".encode()).hexdigest()[:16]
    common = {
        **tracking.own_tags,
        **origin_tags(shlex.split(record.command)),
        _LOAD: identity,
    }
    rate = shared_rate(record.figures)
    named = "load/" if rate is not None else "load/at_own_rate/"
    below = [_row_run(each, record, common, rate, named) for each in record.figures]
    files = {path.name: path for path in sorted(folder.iterdir())}
    parameters = {
        f"load.{key}": without_passwords(str(value))
        for key, value in asdict(load).items()
    }
    parameters["load.limit_s"] = f"{record.limit_s:.4g}"
    answer = answer_of(record)
    windows = record.windows
    tags = {
        **common,
        **shared_tags([row.tags for row in record.rows]),
        **_disturbed_tags(record, windows),
        ROLE: "load test",
        "answer": answer,
        NOTE: note_of(text),
    }
    run = TrackedRun(
        f"{record.name} {record.began}",
        tags,
        parameters=parameters,
        files=files,
        below=below,
        leaderboard=_leaderboard(named),
    )
    digest = hashlib.sha256((folder / "load.json").read_bytes()).hexdigest()[:16]
    mine = [f"tags.`{_LOAD}` = '{identity}'"]
    ask(
        client.put,
        tracking,
        record.name,
        run,
        mine,
        digest,
        (),
        note_of(f"**{record.name}:** {answer}"),
    )


def _row_run(
    figures: RowFigures,
    record: LoadRecord,
    common: Mapping[str, str],
    rate: float | None,
    named: str,
) -> TrackedRun:
    """Returns the run of a row, with figures at a rate that all rows have, or at its own; a chart compares them.

    A chart has no sign for a bound: a tag tells it.
    """
    row = figures.row
    at = figures.typical if rate is None else rate
    metrics = tracked_metrics(row.columns)
    for key in _AT_THE_RATE:
        value = figures.mean(at, key)
        if value is not None:
            metrics[f"{named}{key}"] = value
    highest = figures.most if figures.bound == "=" else None
    ratio = figures.ratio if figures.ratio_bound == "=" else None
    cost = figures.cost(record.price_per_hour)
    if highest and cost is not None:
        metrics["load/cost_per_1000"] = cost
    for name, found in (("max_rate_per_s", highest), ("ratio", ratio)):
        if found is None:
            continue
        metrics[f"load/{name}"] = found.estimate
        if found.low is not None and found.high is not None:
            metrics[f"load/{name}_low"] = found.low
            metrics[f"load/{name}_high"] = found.high
    tags = {
        **common,
        **row.tags,
        **tracked_tags(row.columns),
        **_disturbed_tags(record, row.windows),
        ROLE: "load row",
        "max_rate": rate_text(figures),
    }
    parameters = {"variant": row.variant, "policy": row.policy, "rate_per_s": f"{at:g}"}
    return TrackedRun(row.name, tags, parameters=parameters, metrics=metrics)


def _disturbed_tags(record: LoadRecord, windows: Sequence[Window]) -> dict[str, str]:
    """Returns tags that say whether other work disturbed windows, as those of a study say it of rounds."""
    if all(window.disturbed is None for window in windows):
        return {}
    disturbed = record.disturbed(windows)
    upto = f" by up to {100 * max(disturbed):.0f} %" if disturbed else ""
    return {
        "sdopt.disturbed": str(bool(disturbed)).lower(),
        "sdopt.windows": f"{len(windows)} sent, {len(disturbed)} disturbed{upto}",
    }
