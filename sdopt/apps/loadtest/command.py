"""Runs the load test of a command line: composes its rows, measures them, and writes and logs what was found."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from sdopt.apps.loadtest.config import LoadConfig, load_config
from sdopt.apps.loadtest.record import LoadRecord, LoadRow, answer_of, blocks_of
from sdopt.apps.loadtest.run import LoadTest, ServedRow
from sdopt.apps.loadtest.target import Target, target_of
from sdopt.apps.serving.config import BATCHES, Serving
from sdopt.apps.serving.engine import unservable
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.config.overrides import key_of
from sdopt.config.tracking import tracking_of
from sdopt.errors import ConflictError, command_line, print_problems, without_passwords
from sdopt.forecast import foreseen
from sdopt.locks import reserve
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.preparation import check_models, fetch, remarks_on_variants
from sdopt.report.columns import tracked_metrics, tracked_tags
from sdopt.report.markdown import written
from sdopt.schema import Tracking
from sdopt.scratch import scratch_folder
from sdopt.study.plan import require_same_task
from sdopt.tracking import client
from sdopt.tracking.client import NOTE, ROLE, TrackedRun
from sdopt.tracking.contents import note_of
from sdopt.tracking.store import ask, require_store
from sdopt.variant import Variant
from sdopt.worker.forkserver import StartContext
from sdopt.worker.machine import Machine, find_machine
from sdopt.worker.process import WorkerProcess

_LOAD = "sdopt.load"

_LEADERBOARD = [
    *(f"metrics.`load/{name}`" for name in ("max_rate_per_s", "p99_s", "goodput")),
    "params.`policy`",
]
"""The columns of a load test's page in MLflow, by the highest rate."""


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
    folder = Path(load.folder) / load.title / began
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
    running = [
        variant
        for (variant, _), reasons in zip(rows, refused, strict=True)
        if not reasons
    ]
    variants = [
        variant
        for number, variant in enumerate(running)
        if variant not in running[:number]
    ]
    fetch(variants, context)
    check_models(variants, ("path", "hub"), context)
    # What a model on the hub, or a LoRA, cannot do is known once it is here.
    late: dict[str, None] = {}
    for variant in variants:
        late |= dict.fromkeys(variant.conflicts(machine.device))
    if late:
        raise ConflictError([*late])
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
            candidates.append(ServedRow(row, variant, policy, start))
        record.rows = [candidate.row for candidate in candidates]
        LoadTest(load, record, machine.device, say).run(candidates)


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
        _LOAD: identity,
        **{name: str(value) for name, value in (tracking.tags or {}).items()},
    }
    below = []
    for each in record.figures:
        # A chart of runs has no sign for a bound, so that only the rate, which the answer explains, is logged for one.
        ratio = each.ratio if each.ratio_bound == "=" else None
        metrics = {"cost_per_1000": each.cost(record.price_per_hour)}
        for name, found in (("max_rate_per_s", each.most), ("ratio", ratio)):
            metrics |= (
                {
                    name: found.estimate,
                    f"{name}_low": found.low,
                    f"{name}_high": found.high,
                }
                if found
                else {}
            )
        for key in (
            "p50_s",
            "p95_s",
            "p99_s",
            "goodput",
            "batch",
            "queue_s",
            "compute_s",
            "image_j",
        ):
            metrics[key] = each.mean(each.typical, key)
        known = tracked_metrics(each.row.columns)
        known |= {
            f"load/{name}": float(value)
            for name, value in metrics.items()
            if value is not None
        }
        tags = {**tracked_tags(each.row.columns), **common, ROLE: "load row"}
        below.append(
            TrackedRun(
                each.row.name,
                tags,
                parameters={"policy": each.row.policy},
                metrics=known,
            )
        )
    files = {path.name: path for path in sorted(folder.iterdir())}
    parameters = {
        f"load.{key}": without_passwords(str(value))
        for key, value in asdict(load).items()
    }
    answer = answer_of(record)
    tags = {**common, ROLE: "load test", "answer": answer, NOTE: note_of(text)}
    run = TrackedRun(
        f"{record.name} {record.began}",
        tags,
        parameters=parameters,
        files=files,
        below=below,
        leaderboard=_LEADERBOARD,
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
