"""Logs studies, variants and sweeps as MLflow runs, from `result.json`; `projection` derives what the runs hold.

A study is a parent run whose note is the result table; each variant is a child run. Everything can be logged again
from the file; what is there already is not logged twice.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.analysis.measures import with_shape
from sdopt.errors import UnavailableError, UsageError
from sdopt.report.catalog import REPORTS
from sdopt.report.page.files import HTML, MARKDOWN
from sdopt.report.page.gallery import has_images
from sdopt.results.files import parse_result, to_json
from sdopt.results.folders import inside
from sdopt.results.images import open_image
from sdopt.results.records import StudyResult, VariantResult
from sdopt.schema import Tracking
from sdopt.scratch import scratch_folder
from sdopt.tracking.projection import (
    NOTE,
    STUDY,
    VARIANT,
    config_yaml,
    judged_tags,
    logged_metrics,
    newest_note,
    note_of,
    run_name,
    study_parameters,
    study_tags,
    time_of,
    variant_parameters,
    variant_tags,
    verdict_tags,
)
from sdopt.tracking.store import (
    TrackingError,
    cause_of,
    connect,
    find_experiment,
    set_experiment_tag,
    store_exists,
    with_store,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_PARAM_LIMIT = 6000

_BATCH = 100

_DIGEST, _SWEEP = "sdopt.digest", "sdopt.sweep"

_SHORT = 12  # digits of a study's id in lists


def log_study(result: StudyResult, folder: Path, tracking: Tracking) -> tuple[str, bool]:
    """Logs a finished study with all its variants, once; returns the id of its parent run, and whether it is new.

    Raises:
        UsageError: the result names files that are not in its folder; nothing was logged.
        TrackingError: the server cannot be reached or refuses.
    """
    if tracking.images:
        for report in (report for report in REPORTS if report.is_picture):
            inside(folder, report.file)
        for record in (record for variant in result.variants for record in variant.images):
            inside(folder, record.path)
    return with_store(tracking, result.id, lambda client: _log_study(client, result, folder, tracking))


def _log_study(client: "MlflowClient", result: StudyResult, folder: Path, tracking: Tracking) -> tuple[str, bool]:
    experiment = find_experiment(client, result.name, tracking)
    found = logged_run(client, experiment, result)
    if found is not None:
        return found, False
    # The run found is incomplete, or older than the end of the study.
    _drop_all_but(client, experiment, result, ())
    parent = _log_parent(client, experiment, result, folder, tracking.images)
    children = [
        _log_variant(client, experiment, parent, result, variant, folder, tracking) for variant in result.variants
    ]
    # A run exists twice if the server died before it confirmed the first one.
    _drop_all_but(client, experiment, result, (parent, *children))
    ended = time_of(result.finished, result.started)
    client.set_terminated(parent, "FINISHED" if result.status == "finished" else "KILLED", ended)
    client.set_tag(parent, _DIGEST, _digest(result))
    set_experiment_tag(client, experiment, NOTE, newest_note(result, run_name(result, folder.name)))
    return parent, True


def update_verdicts(result: StudyResult, folder: Path, tracking: Tracking) -> str | None:
    """Updates the runs of a logged study with a gate's later verdicts.

    Returns:
        the id of the study's run; None if it was not logged there.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """
    if tracking.kind == "none" or not store_exists(tracking):
        return None
    found, _ = with_store(tracking, result.id, lambda client: _update_verdicts(client, result, folder, tracking))
    return found or None


def _update_verdicts(client: "MlflowClient", result: StudyResult, folder: Path, tracking: Tracking) -> tuple[str, bool]:
    experiment = client.get_experiment_by_name(result.name)
    if experiment is None:
        return "", False
    parent = ""
    variants = {variant.name: variant for variant in result.variants}
    for run in client.search_runs([experiment.experiment_id], f"tags.`{STUDY}` = '{result.id}'"):
        run_id = str(run.info.run_id)
        if run.data.tags.get("sdopt.role") == "study":
            parent, tags = run_id, judged_tags(result)
            _log_reports(client, run_id, result, folder, images=False)
            client.log_text(run_id, to_json(result).decode(), "result.json")
        else:
            variant = variants.get(_variant_of(run))
            if variant is None:
                continue
            tags = verdict_tags(result, variant)
            if (passed := logged_metrics(result, variant).get("gate/passed")) is not None:
                client.log_metric(run_id, "gate/passed", passed)
        for name, value in tags.items():
            client.set_tag(run_id, name, value)
    if parent:
        # The logged file must equal this result, else a later sync would log it a second time.
        client.set_tag(parent, _DIGEST, _digest(result))
    return parent, False


def _variant_of(run: "Run") -> str:
    """Returns the name of the variant whose run this is; runs of earlier versions have no tag of it."""
    return str(run.data.tags.get(VARIANT, run.info.run_name))


def download_result(run: str, tracking: Tracking) -> StudyResult:
    """Reads the `result.json` that a study's run, or that of one of its variants, has among its artifacts.

    Raises:
        UsageError: there is no such run, it is not a study's run, or its result cannot be read.
        TrackingError: the server cannot be reached.
    """
    return download_run(run, tracking)[0]


def download_run(run: str, tracking: Tracking) -> tuple[StudyResult, str | None]:
    """Reads a study like `download_result`; returns it and the variant whose run this is, None for the study's own."""
    client = connect(tracking)
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_run(run)
        parent = found.data.tags.get("mlflow.parentRunId") if found.data.tags.get("sdopt.role") != "study" else None
        names = [item.path for item in client.list_artifacts(parent or run)]
        if "result.json" not in names:
            raise UsageError(f"{run}: this MLflow run at {tracking.uri} has no result.json; name a study's run")
        with scratch_folder("download") as folder:
            content = Path(client.download_artifacts(parent or run, "result.json", str(folder))).read_bytes()
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise UsageError(f"{run}: neither a file or folder, nor a run at {tracking.uri}") from error
        raise TrackingError(f"{tracking.uri}: {cause_of(error)}") from error
    try:
        return parse_result(content), _variant_of(found) if parent else None
    except UsageError as error:
        raise UsageError([f"{run}: its result.json: {problem}" for problem in error.problems]) from error


def log_sweep(studies: Sequence[StudyResult], folder: Path, table: str, tracking: Tracking) -> tuple[str, bool]:
    """Logs a run above a sweep's studies, once, with their table as its note; returns its id, and whether it is new.

    Its artifacts are the table, and the report if the folder has one.

    Raises:
        UsageError: the report is a link that leads out of the folder; nothing was logged.
        TrackingError: the server cannot be reached or refuses.
    """
    pages = [inside(folder, name) for name in (HTML, MARKDOWN)]
    return with_store(
        tracking, studies[0].id, lambda client: _log_sweep(client, studies, folder.name, pages, table, tracking)
    )


def _log_sweep(
    client: "MlflowClient",
    studies: Sequence[StudyResult],
    name: str,
    pages: Sequence[Path],
    table: str,
    tracking: Tracking,
) -> tuple[str, bool]:
    experiment = find_experiment(client, studies[0].name, tracking)
    # Made from the sweep's studies, not from its folder, which may be a copy from another machine; a resumed sweep
    # shares some studies with its earlier run.
    there = {
        run.info.run_id: run
        for study in studies
        for run in client.search_runs([experiment], f"tags.`{_SWEEP}` LIKE '%{study.id[:_SHORT]}%'")
    }
    ids = " ".join(sorted(study.id[:_SHORT] for study in studies))
    digest = hashlib.sha256((ids + table).encode()).hexdigest()[:16]
    whole = [run_id for run_id, run in there.items() if run.data.tags.get(_DIGEST) == digest]
    if whole:
        run = whole[0]
    else:
        tags = {NOTE: note_of(table), "sdopt.role": "sweep", _SWEEP: ids}
        run = str(client.create_run(experiment, run_name=f"sweep {name}", tags=tags).info.run_id)
        client.log_text(run, table, "sweep.md")
        for file in pages:
            if file.is_file():
                client.log_artifact(run, str(file))
    for study in studies:
        found = logged_run(client, experiment, study)
        if found is not None:
            client.set_tag(found, "mlflow.parentRunId", run)
    for other in there:
        if other != run:
            client.delete_run(other)
    client.set_terminated(run)
    client.set_tag(run, _DIGEST, digest)
    return run, not whole


def log_report(
    studies: Sequence[StudyResult], files: Sequence[Path], tracking: Tracking, *, swept: bool, replace: bool
) -> str | None:
    """Adds files to the artifacts of a study that is logged, or of the sweep of several.

    Args:
        studies: one study, or those of a sweep.
        files: files to add at the top level of the artifacts.
        tracking: the store.
        swept: whether the run above the studies of a sweep gets them.
        replace: whether they take the place of artifacts of the same name.

    Returns:
        The id of the run, or None if none is logged.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """

    def add(client: "MlflowClient") -> tuple[str, bool]:
        run = _run_of(client, studies[0], swept)
        there = {item.path for item in client.list_artifacts(run)} if run and not replace else set()
        for file in files:
            if run and file.name not in there:
                client.log_artifact(run, str(file))
        return run, False

    return with_store(tracking, studies[0].id, add)[0] or None


def _run_of(client: "MlflowClient", study: StudyResult, swept: bool) -> str:
    """Returns the run of a study, or the run above the studies of its sweep; "" if there is none."""
    experiment = client.get_experiment_by_name(study.name)
    if experiment is None:
        return ""
    role = "sweep" if swept else "study"
    mine = f"tags.`{_SWEEP}` LIKE '%{study.id[:_SHORT]}%'" if swept else f"tags.`{STUDY}` = '{study.id}'"
    runs = client.search_runs([experiment.experiment_id], f"{mine} and tags.`sdopt.role` = '{role}'")
    return str(runs[0].info.run_id) if runs else ""


def logged_run(client: "MlflowClient", experiment: str, result: StudyResult) -> str | None:
    """Returns the parent run of exactly this result, if it was logged completely."""
    query = f"tags.`{STUDY}` = '{result.id}' and tags.`{_DIGEST}` = '{_digest(result)}'"
    runs = client.search_runs([experiment], query)
    return str(runs[0].info.run_id) if runs else None


def _digest(result: StudyResult) -> str:
    return hashlib.sha256(to_json(result)).hexdigest()[:16]


def _drop_all_but(client: "MlflowClient", experiment: str, result: StudyResult, runs: Sequence[str]) -> None:
    for run in client.search_runs([experiment], f"tags.`{STUDY}` = '{result.id}'"):
        if run.info.run_id not in runs:
            client.delete_run(run.info.run_id)


def _log_parent(client: "MlflowClient", experiment: str, result: StudyResult, folder: Path, images: bool) -> str:
    started = time_of(result.started, result.started)
    name = run_name(result, folder.name)
    run = client.create_run(experiment, started, study_tags(result), name).info.run_id
    log_params(client, run, study_parameters(result.config))
    # Not from the files, which may be outdated if the disk is full.
    client.log_text(run, to_json(result).decode(), "result.json")
    client.log_text(run, config_yaml(result), "config.yaml")
    _log_reports(client, run, result, folder, images)
    return str(run)


def _log_reports(client: "MlflowClient", run: str, result: StudyResult, folder: Path, images: bool) -> None:
    for report in REPORTS:
        if not report.is_picture:
            if report.file == HTML and not images and not has_images(result, folder):
                continue  # keep the logged report, which has the images
            try:
                content = report.render(result, folder)
            except UnavailableError:  # as `write_reports` has said
                continue
            if content is not None:
                client.log_text(run, content.decode(), report.file)
        elif images and (folder / report.file).is_file():
            picture = open_image(inside(folder, report.file))
            client.log_image(run, picture.convert("RGB"), key=report.file.removesuffix(".png"))


def _log_variant(
    client: "MlflowClient",
    experiment: str,
    parent: str,
    result: StudyResult,
    variant: VariantResult,
    folder: Path,
    tracking: Tracking,
) -> str:
    from mlflow.entities import Metric

    started = time_of(result.started, result.started)
    # MLflow lists the latest run first, and variants are measured side by side: the baseline comes first.
    rank = len(result.variants) - [row.name for row in result.variants].index(variant.name)
    tags = variant_tags(result, variant) | {"mlflow.parentRunId": parent}
    run = client.create_run(experiment, started + rank, tags, variant.name).info.run_id
    log_params(client, run, variant_parameters(result, variant))
    ended = time_of(result.finished, result.started)
    metrics = [Metric(name, value, ended, 0) for name, value in logged_metrics(result, variant).items()]
    several = len(result.shapes) > 1
    # If there is one shape, a variant's may differ from the study's.
    shapes = result.shapes if several else variant.config.shapes[:1]
    views = [(shape, variant.at(shape_index)) for shape_index, shape in enumerate(shapes)]
    for shape, at in views:
        name = with_shape("latency/round_s", shape.name if several else "")
        for replicate, samples in at.samples.items():
            own = name + (f"/process_{replicate}" if len(at.samples) > 1 else "")
            metrics += [Metric(own, seconds, ended, step) for step, seconds in enumerate(samples, 1)]
    for start in range(0, len(metrics), _BATCH):
        client.log_batch(run, metrics=metrics[start : start + _BATCH])
    if tracking.images:
        # Only the images of the first prompts, to look at; the run's folder has all images of the quality pass.
        workload = variant.config.workload
        for record in variant.images[: workload.prompt_count * workload.images_per_prompt]:
            if not (folder / record.path).is_file():
                continue  # a record that is kept without its images
            key = f"{record.prompt_index:02d} {_image_key(record.prompt)}"
            image = open_image(inside(folder, record.path))
            client.log_image(run, image.convert("RGB"), key=key, step=record.image_index)
    evidence = [
        {
            "replicate": m.replicate,
            "session": m.session,
            **({"shape": shape.name} if several else {}),
            "axis": e.axis,
            "option": e.option,
            "engaged": e.engaged,
            **e.facts,
        }
        for shape, at in views
        for m in at.measurements
        for e in m.evidence
    ]
    if evidence:
        client.log_dict(run, {"evidence": evidence}, "evidence.json")
    client.set_terminated(run, "FINISHED" if variant.status.measured else "FAILED", ended)
    return str(run)


def log_params(client: "MlflowClient", run: str, values: dict[str, Any]) -> None:
    """Logs the parameters of a run, cut to the length that MLflow accepts."""
    from mlflow.entities import Param

    params = [Param(name, str(value)[:_PARAM_LIMIT]) for name, value in values.items()]
    for start in range(0, len(params), _BATCH):
        client.log_batch(run, params=params[start : start + _BATCH])


def _image_key(prompt: str) -> str:
    return re.sub(r"[^A-Za-z0-9 _-]+", " ", prompt).strip()[:60]
