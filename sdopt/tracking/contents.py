"""Derives what runs in MLflow hold of a study and its variants: tags, parameters, metrics, files and pictures."""

import getpass
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML has none

from sdopt.errors import command_line
from sdopt.quality.metrics import is_imported
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import inside, to_json
from sdopt.record.images import is_replaced
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.sweeps import measuring, own_overrides, shared_overrides
from sdopt.record.verdicts import Verdict
from sdopt.report.catalog import markdown_table
from sdopt.report.columns import tracked_metrics, tracked_tags, values_of
from sdopt.report.sentences.answer import described
from sdopt.report.summary import Summary
from sdopt.report.sweep import Sweep
from sdopt.report.verdicts import verdict_markdown
from sdopt.statistics.disturbance import count_rounds
from sdopt.statistics.figures import floor_range
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP, with_shape
from sdopt.statistics.row_figures import IMAGES_PER_CALL, PASSED
from sdopt.statistics.rows import PSNR, Row
from sdopt.tracking.client import (
    NOTE,
    ROLE,
    STUDY,
    VARIANT,
    TrackedRun,
)

_TAG_LIMIT = 5000
"""Characters of a tag, and so of a note, that a server takes: the newest take more."""

_NO_KEY = re.compile(r"[^A-Za-z0-9 _-]+")
"""What the key of an image in MLflow cannot hold."""

_PARAMETER = re.compile(r"[\w./-]+")
"""What the name of a parameter may hold: no `@` of a package."""


def time_of(moment: str) -> int:
    """Returns a recorded time in milliseconds since 1970, as MLflow needs it."""
    return int(1000 * datetime.fromisoformat(moment).timestamp())


def note_of(text: str) -> str:
    """Returns a note, cut to the length that MLflow accepts."""
    if len(text) <= _TAG_LIMIT:
        return text
    return (
        text[: _TAG_LIMIT - 60].rsplit("\n", 1)[0]
        + "\n\n… cut here: the tables among the artifacts are whole."
    )


def common_tags(result: StudyResult, config: RecordedConfig) -> dict[str, str]:
    """Returns the common tags of a study's run and its variants' runs: work, machine, software and user."""
    environment = result.environment
    tags = dict(result.config.tracking.own_tags)
    tags |= {STUDY: result.id, "study": result.name}
    tags |= study_parameters(result, config)
    # Nobody tells on which device, and with which versions, images came about that were made elsewhere.
    if not result.is_imported:
        tags["device"] = environment.device["name"]
        for name in ("torch", "diffusers"):
            if name in environment.packages:
                tags[name] = environment.packages[name]
    tags["sdopt"] = environment.sdopt_version
    tags |= origin_tags(environment.command)
    if environment.sdopt_commit:
        tags["mlflow.source.git.commit"] = environment.sdopt_commit
    return {name: str(value)[:_TAG_LIMIT] for name, value in tags.items()}


def origin_tags(command: Sequence[str]) -> dict[str, str]:
    """Returns the tags by which MLflow shows who has run which command."""
    return {
        "mlflow.user": _user(),
        "mlflow.source.name": source_of(command)[:_TAG_LIMIT],
        "mlflow.source.type": "LOCAL",
    }


def source_of(command: Sequence[str]) -> str:
    """Returns a command as a shell takes it, without where its results went, which a reader of the run knows."""
    return command_line(*measuring(command[1:]))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return "unknown"


def study_tags(summary: Summary) -> dict[str, str]:
    """Returns the tags of a study's run; its note begins with the answer."""
    result = summary.result
    environment = result.environment
    commit = environment.sdopt_commit or "none"
    tags = common_tags(result, result.config) | {
        ROLE: "study",
        "sdopt.design": result.design,
        "sdopt.status": result.status,
        "sdopt.commit": f"{commit}+dirty" if environment.sdopt_dirty else commit,
        "sdopt.sessions": str(len(result.sessions)),
    }
    counts = count_rounds(result)
    if counts:
        disturbed = f"{counts.timed} timed, {counts.disturbed} disturbed"
        tags["sdopt.disturbed"] = str(bool(counts.undecided)).lower()
        tags["sdopt.rounds"] = disturbed
    floors = floor_range(result)
    if floors:
        ends = dict.fromkeys(f"{end:.4f}" for end in floors)
        tags["sdopt.floor"] = " to ".join(ends)
    return tags | judged_tags(summary)


def judged_tags(summary: Summary) -> dict[str, str]:
    """Returns the tags of a study's run that change when a gate judges later."""
    result = summary.result
    texts = [markdown_table(summary)]
    tags = {"answer": summary.sentence[:_TAG_LIMIT]}
    if result.config.tracking.note:
        texts.insert(0, f"{result.config.tracking.note}\n")
    if result.judgements:
        texts.append(verdict_markdown(summary))
        tags["gate.name"] = result.gate
    return {NOTE: note_of("\n".join(texts)), **tags}


def study_metrics(summary: Summary) -> dict[str, float]:
    """Returns the few metrics of a study's run: how many options pay, effects on speed, and the figures of the best one.

    They have names of their own, so that the study is no second row and no second bar beside its winner.
    """
    candidates = summary.candidates
    metrics = {
        "options/tried": float(sum(row.status not in _UNTRIED for row in candidates)),
        "options/recommended": float(sum(row.recommended for row in candidates)),
    }
    if any(row.decision for row in candidates):
        metrics["options/passed"] = float(
            sum(row.decision is Verdict.PASS for row in candidates)
        )
    for effect in summary.result.effects:
        if effect.speedup is not None:
            options = " and ".join(effect.options)
            name = f"effect/{_NO_KEY.sub(' ', options)}"
            metrics[name] = effect.speedup.estimate
    best = summary.best  # what has a speed-up stands before what has none
    if best is not None and best.speedup is not None:
        for name in OF_THE_BEST:
            figure = name.removeprefix("best/")
            if figure in best.flat:
                metrics[name] = best.flat[figure]
    return metrics


_COUNTS = "options/"
"""How the names of metrics begin that studies of a sweep add up."""

_UNTRIED = (Status.SKIPPED, Status.PENDING, Status.INTERRUPTED)

OF_THE_BEST = (
    f"best/{SPEEDUP.name}",
    f"best/{MEMORY_RATIO.name}",
    f"best/quality/{PSNR}",
)
"""Metrics of a study's run that are figures of the option that it recommends."""


_RUN_STATUS = {
    Status.OK: "FINISHED",
    Status.NOT_ENGAGED: "FINISHED",
    Status.SLOWER: "FINISHED",
    Status.INTERRUPTED: "KILLED",
    Status.PENDING: "KILLED",
}
"""What MLflow says of a variant's run by how the variant ended; of all other ends, that it failed."""


def variant_run(
    summary: Summary, variant: VariantResult, folder: Path, images: bool
) -> TrackedRun:
    """Returns the run of a variant; of its images only those of the first prompts, to look at.

    Raises UsageError if the result names an image that is not in its folder.
    """
    result = summary.result
    files = (
        [(record, inside(folder, record.path)) for record in variant.images]
        if images
        else []
    )
    shown = (
        variant.config.workload.prompt_count * variant.config.workload.images_per_prompt
    )
    pictures = [
        (
            f"{record.prompt_index:02d} {_NO_KEY.sub(' ', record.prompt).strip()[:60]}",
            record.image_index,
            file,
        )
        for record, file in files[:shown]
        # A record may be kept without its images.
        if file.is_file() and not is_replaced(folder, record)
    ]
    evidence = list(_evidence(result, variant))
    # MLflow lists the latest run first, and variants are measured side by side: the baseline comes first.
    rank = len(result.variants) - [row.name for row in result.variants].index(
        variant.name
    )
    swept = swept_parameters(result, folder) if variant in result.candidates else {}
    return TrackedRun(
        name=variant.name,
        tags=variant_tags(summary, variant),
        status=_RUN_STATUS.get(variant.status, "FAILED"),
        started=time_of(result.started) + rank,
        ended=time_of(result.finished or result.started),
        parameters={**swept, **variant_parameters(result, variant)},
        metrics=logged_metrics(summary, variant),
        files={"evidence.json": json.dumps({"evidence": evidence}, indent=2).encode()}
        if evidence
        else {},
        pictures=pictures,
    )


def _evidence(result: StudyResult, variant: VariantResult) -> Iterator[dict[str, Any]]:
    """Yields what each process has shown at each shape."""
    several = len(result.shapes) > 1
    for shape_index, shape in enumerate(result.shapes):
        for measurement in variant.at(shape_index).measurements:
            process: dict[str, Any] = {
                "replicate": measurement.replicate,
                "session": measurement.session,
            }
            if several:
                process["shape"] = shape.name
            for item in measurement.main.evidence:
                evidence = {
                    "axis": item.axis,
                    "option": item.option,
                    "engaged": item.engaged,
                }
                yield {**process, **evidence, **item.facts}


def variant_tags(summary: Summary, variant: VariantResult) -> dict[str, str]:
    """Returns the tags of a variant's run."""
    return {
        **verdict_tags(summary, variant),  # MLflow's columns are in this order
        **common_tags(summary.result, variant.config),
        **variant.choices,
        ROLE: variant.role,
        VARIANT: variant.name,
        "status": str(variant.status),
        "contract": variant.contract,
    }


def verdict_tags(summary: Summary, variant: VariantResult) -> dict[str, str]:
    """Returns the tags of a variant's run with its verdicts, and what it gains on top of other variants."""
    row = summary.row(variant.name)
    note = {NOTE: note_of(described_in_note(summary, variant))}
    if row is None or row.is_baseline:
        return note
    words = tracked_tags(values_of(row))
    why = "recommended" if row.recommended else "a trade"
    words["because"] = row.because or why
    if row.decision:
        words["gate.name"] = summary.result.gate
    return note | {name: word[:_TAG_LIMIT] for name, word in words.items()}


def described_in_note(summary: Summary, variant: VariantResult) -> str:
    """Returns the description of a variant's run: what was found of it, why, and how to measure it again."""
    row = summary.row(variant.name)
    lines = [variant.reason]
    if variant.is_control:
        is_measured = bool(variant.samples or variant.images)
        chance = "What the two differ by is chance: no option is credited with less."
        lines.insert(
            0, f"The baseline once more. {chance if is_measured else ''}".strip()
        )
    elif row is None or row.is_baseline:
        lines.insert(0, "The baseline, with which the others are compared.")
    else:
        said = f"**{described(row, summary.row(summary.result.baseline))}**"
        lines = [said, "" if variant.reason in row.because else variant.reason]
        because = "" if row.because in said else row.because
        lines.append(": ".join(filter(None, (str(row.decision or ""), because))))
        if row.command:
            lines.append(f"Measure it again: `{row.command}`")
    return "\n\n".join(filter(None, lines))


def study_parameters(result: StudyResult, config: RecordedConfig) -> dict[str, Any]:
    """Returns only a few parameters, because MLflow prints all of them above each image; `config.yaml` has the rest.

    Images and times that came as files tell none.
    """
    return {} if result.is_imported else work_parameters(config)


def work_parameters(config: RecordedConfig) -> dict[str, Any]:
    """Returns the model, the LoRA and the work of a configuration, by which runs are found."""
    sizes = dict.fromkeys(shape.size for shape in config.shapes)
    batches = dict.fromkeys(shape.batch_size for shape in config.shapes)
    return {
        "model": config.model.title,
        "size": ", ".join(map(str, sizes)),
        "steps": config.workload.steps,
        "batch": ", ".join(map(str, batches)),
        **({"lora_file": config.lora} if config.lora else {}),
    }


def swept_parameters(result: StudyResult, folder: Path) -> dict[str, str]:
    """Returns what a job of a sweep alone has, by key: what MLflow draws the axes of parallel coordinates from."""
    parameters = {}
    for override in _own_overrides(result, folder):
        key, _, value = override.partition("=")
        key = key.lstrip("+")
        if _PARAMETER.fullmatch(key):
            parameters[key] = value
    return parameters


def sweep_parameters(sweep: Sweep) -> dict[str, str]:
    """Returns the parameters of a sweep's studies, each with the values that they have."""
    values: dict[str, dict[str, None]] = {}
    for job, study in sweep.studies.items():
        of_study = {
            **swept_parameters(study, sweep.folder / job),
            **study_parameters(study, study.config),
        }
        for name, value in of_study.items():
            values.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(each) for name, each in values.items()}


def shared_tags(tags_of_runs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the tags that all runs have."""
    shared = dict(tags_of_runs[0])
    for tags in tags_of_runs:
        shared = {name: tag for name, tag in shared.items() if tags.get(name) == tag}
    return shared


def sweep_tags(sweep: Sweep) -> dict[str, str]:
    """Returns the tags of a sweep's run: its answer, what all its studies have, and what they are of."""
    studies = list(sweep.studies.values())
    tags = shared_tags([common_tags(study, study.config) for study in studies])
    of_studies = sweep_parameters(sweep)
    for study in studies:
        for name in study_parameters(study, study.config):
            tags[name] = of_studies[name]
    tags.pop(STUDY, None)
    with suppress(LookupError):
        command = ["sdopt", "run", "-m", *shared_overrides(sweep.folder)]
        tags["mlflow.source.name"] = source_of(command)
    tags["answer"] = sweep.sentence
    return {name: value[:_TAG_LIMIT] for name, value in tags.items()}


def sweep_metrics(sweep: Sweep) -> dict[str, float]:
    """Returns how many options of all studies pay, and the figures of the best one."""
    metrics: dict[str, float] = {}
    for summary in sweep.summaries.values():
        for name, value in study_metrics(summary).items():
            if name.startswith(_COUNTS):
                metrics[name] = metrics.get(name, 0) + value
    if sweep.best is not None:
        job, _ = sweep.best
        of_the_best = study_metrics(sweep.summaries[job.number])
        for name in OF_THE_BEST:
            if name in of_the_best:
                metrics[name] = of_the_best[name]
    return metrics


def variant_parameters(result: StudyResult, variant: VariantResult) -> dict[str, Any]:
    """Returns the choices and keys in which variants of the study differ, with this variant's values."""
    parameters: dict[str, Any] = {}
    for axis, option in variant.choices.items():
        chosen = {other.choices.get(axis) for other in result.variants}
        if chosen != {option}:
            parameters[axis] = option
    named = tuple(f"{axis}." for axis in variant.choices)
    configs = [_flat(other.config).items() for other in result.variants]
    for key, value in _flat(variant.config).items():
        shared = all((key, value) in config for config in configs)
        if not shared and not f"{key}.".startswith(named):
            parameters[key] = value
    return parameters


def _flat(config: RecordedConfig) -> dict[str, Any]:
    """Returns a configuration by full names, without the study's own keys, which are the same in all its variants."""
    return {
        key: value
        for key, value in config.flat().items()
        if key.partition(".")[0] != "study"
    }


def config_yaml(result: StudyResult) -> str:
    """Returns the whole configuration of a study as YAML, with the versions of the software."""
    document = json.loads(to_json(result))
    sections = document["config"] | {"packages": document["environment"]["packages"]}
    return str(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True))


_FIGURES = (
    *(f"{SPEEDUP.name}_low", f"{SPEEDUP.name}_high"),
    *("latency/image_s", IMAGES_PER_CALL, "latency/cold_start_s", "energy/per_image_j"),
)
"""The figures of a variant that are metrics in MLflow beside the tracked `COLUMNS`; `table.csv` and `result.json` have
all. MLflow draws a chart of each metric."""


def logged_metrics(summary: Summary, variant: VariantResult) -> dict[str, float]:
    """Returns the few figures of a variant that its run has as metrics, the speed-up with its bounds."""
    row = summary.row(variant.name) or summary.first[variant.name]
    if variant.status is Status.INTERRUPTED:
        metrics = _partial_metrics(row)
    else:
        metrics = _whole_metrics(row)
    if not variant.is_control:
        return metrics
    # It is no option, so it has no bar beside those of options.
    return {f"repeated/{name}": value for name, value in metrics.items()}


def _whole_metrics(row: Row) -> dict[str, float]:
    metrics = tracked_metrics(values_of(row))
    for name in (*_FIGURES, *_image_figures(row)):
        if name in row.flat:
            metrics[name] = row.flat[name]
    if row.decision in (Verdict.PASS, Verdict.FAIL):
        metrics[PASSED] = float(row.decision is Verdict.PASS)
    if row.status.measured:
        if row.peak_gib is not None:
            metrics["memory_gib"] = row.peak_gib
        for at in row.further:
            for name, ratio in at.over_baseline.items():
                if ratio.measure.claim:
                    named = with_shape(name, at.shape.name)
                    metrics[named] = ratio.interval.estimate
    return metrics


def _partial_metrics(row: Row) -> dict[str, float]:
    """Returns what an interrupted study has timed of a variant, by names that rank it beside no complete one."""
    metrics = {}
    for name in (SPEEDUP.name, "latency/p50_s", MEMORY_RATIO.name):
        if name in row.figures:
            metrics[f"partial/{name}"] = row.figures[name]
    return metrics


def _image_figures(row: Row) -> Iterator[str]:
    """Yields the metric of images that is read first, and those that somebody took the trouble to bring."""
    metric, _ = row.distance
    if metric and not row.variant.is_control:
        yield f"quality/{metric}"
    for name in row.variant.quality:
        if is_imported(name):
            yield f"quality/{name}"


def run_name(result: StudyResult, folder: Path) -> str:
    """Returns the name of a study's run; in a sweep, the job's number, what it measured, and what it alone has.

    The run of a variant has the variant's name.
    """
    if not folder.name.isdecimal():
        return f"{result.name} {folder.name}"
    names = [row.name for row in result.candidates] or [result.baseline]
    # Whatever the order of the command: a variant's name has that of the options.
    said = ", ".join(names).split(", ")
    words = [word for word in _own_overrides(result, folder) if word not in said]
    return f"{folder.name}: {', '.join([*names, *words])}"


def _own_overrides(result: StudyResult, folder: Path) -> list[str]:
    """Returns the overrides that a job of a sweep has and the command has not: one for each value that it sweeps."""
    try:
        return own_overrides(folder.parent, result.environment.command[2:])
    except LookupError:
        return []
