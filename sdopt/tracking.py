"""MLflow as a projection of `result.json`: the only module that knows MLflow, which it needs only when used.

A study is a parent run whose note is the result table; each variant is a child run. Everything can be logged again
from the file; what is there already is not logged twice.
"""

import hashlib
import logging
import os
import re
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from PIL import Image

from sdopt.errors import UsageError
from sdopt.locks import alone
from sdopt.measure.metrics import metrics_of
from sdopt.report.table import markdown_table
from sdopt.results import StudyResult, VariantResult, to_json
from sdopt.schema import Tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient

_NOTE_LIMIT = 8000
_PARAM_LIMIT = 6000
_BATCH = 100
_RUNS_VIEW = "workflowType=machine_learning&compareRunsMode=CHART"
_STUDY, _DIGEST, _SWEEP = "sdopt.study_id", "sdopt.digest", "sdopt.sweep"
_SHORT = 12  # digits of a study's id where many are listed
_ATTEMPTS = 4


class TrackingError(Exception):
    """The tracker could not take a result, which is safe in its file."""


def require_mlflow() -> None:
    """Raises UsageError where mlflow is not installed: better before a measurement than after it."""
    if find_spec("mlflow") is None:
        raise UsageError("tracking.kind=mlflow: mlflow is not installed; pip install mlflow, or choose tracking=none")


def require_store(tracking: Tracking) -> str | None:
    """Looks, in moments and without MLflow, whether a store could take a result.

    Returns:
        a warning where a server does not answer: it may be there again when the study has ended.

    Raises:
        UsageError: a local database cannot be written.
    """
    address = urlparse(tracking.uri)
    if address.scheme == "sqlite":
        path = Path(tracking.uri.removeprefix("sqlite:///")).absolute()
        problem = _why_unwritable(path)
        if problem:
            raise UsageError(
                f"tracking.uri={tracking.uri}: {problem}; choose another with tracking.uri=…, or tracking=none"
            )
    elif address.hostname:
        port = address.port or {"http": 80, "https": 443}.get(address.scheme, 5432)
        try:
            socket.create_connection((address.hostname, port), timeout=3).close()
        except OSError as error:
            reason = error.strerror or str(error)
            return f"tracking.uri={tracking.uri}: {reason}; measuring all the same, `sdopt sync` can log it later"
    return None


def _why_unwritable(path: Path) -> str | None:
    if not path.exists():
        parent = next(parent for parent in path.parents if parent.exists())
        return None if parent.is_dir() and os.access(parent, os.W_OK) else f"{parent} cannot be written"
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):  # its journal lies beside it
        return "it cannot be written"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=1)) as database:
            database.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        # Another writer is no problem: MLflow waits for it.
        return None if error.sqlite_errorcode == sqlite3.SQLITE_BUSY else str(error)
    return None


def log_study(result: StudyResult, folder: Path, tracking: Tracking) -> tuple[str, bool]:
    """Logs a finished study with all its variants, once; returns the id of its parent run, and whether it is new.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """
    return _logging(tracking, result.id, lambda client: _log_study(client, result, folder, tracking))


def _log_study(client: "MlflowClient", result: StudyResult, folder: Path, tracking: Tracking) -> tuple[str, bool]:
    experiment = _experiment(client, result.name, tracking)
    found = _logged(client, experiment, result)
    if found is not None:
        return found, False
    # What is there is half logged, or of a time when the study was not finished.
    _drop_all_but(client, experiment, result, ())
    parent = _log_parent(client, experiment, result, folder, tracking.images)
    # The UI lists the latest run first: so the baseline comes last.
    children = [
        _log_variant(client, experiment, parent, result, variant, folder, tracking)
        for variant in reversed(result.variants)
    ]
    # A run whose making was not confirmed, because the server died of it, was made twice.
    _drop_all_but(client, experiment, result, (parent, *children))
    client.set_terminated(parent, "FINISHED" if result.status == "finished" else "KILLED")
    client.set_tag(parent, _DIGEST, _digest(result))
    return parent, True


def download_result(run: str, tracking: Tracking) -> Path:
    """Fetches the `result.json` that a study's run, or that of one of its variants, has among its artifacts.

    Raises:
        UsageError: there is no such run, or it is none of a study.
        TrackingError: the server cannot be reached.
    """
    client = _client(tracking)
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_run(run)
        parent = found.data.tags.get("mlflow.parentRunId") if found.data.tags.get("sdopt.role") != "study" else None
        names = [item.path for item in client.list_artifacts(parent or run)]
        if "result.json" not in names:
            raise UsageError(f"{run}: this MLflow run at {tracking.uri} has no result.json; name a study's run")
        return Path(client.download_artifacts(parent or run, "result.json", tempfile.mkdtemp(prefix="sdopt-")))
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise UsageError(f"{run}: neither a file or folder, nor a run at {tracking.uri}") from error
        raise TrackingError(f"{tracking.uri}: {str(error).splitlines()[0]}") from error


def log_sweep(studies: Sequence[StudyResult], folder: Path, table: str, tracking: Tracking) -> tuple[str, bool]:
    """A run above the studies of a sweep, once, whose note is the table of them all; its id, and whether it is new.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """
    return _logging(tracking, studies[0].id, lambda client: _log_sweep(client, studies, folder, table, tracking))


def _log_sweep(
    client: "MlflowClient", studies: Sequence[StudyResult], folder: Path, table: str, tracking: Tracking
) -> tuple[str, bool]:
    experiment = _experiment(client, studies[0].name, tracking)
    # Of the sweep's studies, and not of its folder, which may have been copied from another machine; a sweep that was
    # resumed has some of them in common with what was logged of it before.
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
        tags = {"mlflow.note.content": _note(table), "sdopt.role": "sweep", _SWEEP: ids}
        run = str(client.create_run(experiment, run_name=f"sweep {folder.name}", tags=tags).info.run_id)
        client.log_text(run, table, "sweep.md")
    for study in studies:
        found = _logged(client, experiment, study)
        if found is not None:
            client.set_tag(found, "mlflow.parentRunId", run)
    for other in there:
        if other != run:
            client.delete_run(other)
    client.set_terminated(run)
    client.set_tag(run, _DIGEST, digest)
    return run, not whole


def _logging(tracking: Tracking, study: str, work: Callable[["MlflowClient"], tuple[str, bool]]) -> tuple[str, bool]:
    """Does what logs to a store, one process at a time, and again where the database was locked by someone else.

    Work that was done in part is found and replaced when it is done again.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """
    # A server takes many at once, and only the same study not twice; a database may still have to get its schema.
    with alone(study if _is_server(tracking) else f"{Path.cwd()} {tracking.uri}"):
        client = _client(tracking)
        from mlflow.exceptions import MlflowException

        for attempt in range(_ATTEMPTS):
            try:
                return work(client)
            except (MlflowException, OSError) as error:
                if "database is locked" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise TrackingError(f"{tracking.uri}: {str(error).splitlines()[0]}") from error
                time.sleep(2**attempt)
    raise AssertionError("unreachable")


def _is_server(tracking: Tracking) -> bool:
    return urlparse(tracking.uri).scheme in ("http", "https", "databricks")


def ui_pages(tracking: Tracking) -> dict[str, str]:
    """The page of each study in MLflow's UI, in its view of runs, charts and images, relative to the site.

    Raises:
        TrackingError: the store cannot be opened.
    """
    from mlflow.exceptions import MlflowException

    client = _client(tracking)
    try:
        experiments = client.search_experiments()
    except MlflowException as error:
        raise TrackingError(f"{tracking.uri}: {str(error).splitlines()[0]}") from error
    return {
        experiment.name: f"#/experiments/{experiment.experiment_id}/runs?{_RUNS_VIEW}"
        for experiment in experiments
        if experiment.name != "Default"
    }


def _client(tracking: Tracking) -> "MlflowClient":
    require_mlflow()
    # A dead server is reported after seconds, not after the minutes of MLflow's own patience.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    if tracking.uri.startswith("sqlite:///"):
        try:
            Path(tracking.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrackingError(f"{tracking.uri}: {error}") from error
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    for name, level in (("alembic", "WARNING"), ("mlflow", "WARNING"), ("mlflow.store.db.utils", "CRITICAL")):
        logging.getLogger(name).setLevel(level)
    try:
        return MlflowClient(tracking_uri=tracking.uri)
    except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:  # a database needs its driver
        raise TrackingError(f"{tracking.uri}: {str(error).splitlines()[0]}") from error


def _experiment(client: "MlflowClient", name: str, tracking: Tracking) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        # Without a location a local store writes to ./mlruns, wherever that is.
        local = tracking.artifacts and not _is_server(tracking)
        artifacts = Path(str(tracking.artifacts)).resolve() / name if local else None
        try:
            # The tag opens the UI in its view of runs, metrics and images rather than that of language models.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            return str(client.create_experiment(name, artifacts.as_uri() if artifacts else None, tags))
        except MlflowException:
            # Another process made it in the meantime.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _logged(client: "MlflowClient", experiment: str, result: StudyResult) -> str | None:
    """The parent run of this very result, logged as a whole."""
    query = f"tags.`{_STUDY}` = '{result.id}' and tags.`{_DIGEST}` = '{_digest(result)}'"
    runs = client.search_runs([experiment], query)
    return str(runs[0].info.run_id) if runs else None


def _digest(result: StudyResult) -> str:
    return hashlib.sha256(to_json(result)).hexdigest()[:16]


def _drop_all_but(client: "MlflowClient", experiment: str, result: StudyResult, runs: Sequence[str]) -> None:
    for run in client.search_runs([experiment], f"tags.`{_STUDY}` = '{result.id}'"):
        if run.info.run_id not in runs:
            client.delete_run(run.info.run_id)


def _log_parent(client: "MlflowClient", experiment: str, result: StudyResult, folder: Path, images: bool) -> str:
    table = markdown_table(result)
    environment = result.environment
    tags = {
        _STUDY: result.id,
        "sdopt.role": "study",
        "sdopt.design": result.design,
        "sdopt.status": result.status,
        "sdopt.commit": (environment.sdopt_commit or "none") + ("+dirty" if environment.sdopt_dirty else ""),
        "sdopt.sittings": str(len(result.sittings)),
        "sdopt.disturbed": str(any(sitting.disturbed_by for sitting in result.sittings)).lower(),
        "device": str(environment.device["name"]),
        "mlflow.note.content": _note(table),
    }
    run = client.create_run(experiment, run_name=f"{result.name} {folder.name}", tags=tags).info.run_id
    _log_params(client, run, {f"package.{name}": version for name, version in environment.packages.items()})
    _log_params(client, run, _flat(result.config))
    if result.floor is not None:
        client.log_metric(run, "floor/ratio", result.floor)
    client.log_text(run, table, "table.md")
    # Not the file, which may be an older one where the disk is full.
    client.log_text(run, to_json(result).decode(), "result.json")
    for name in ("plot", "comparison", "broken"):
        if images and (folder / f"{name}.png").is_file():
            with Image.open(folder / f"{name}.png") as image:
                client.log_image(run, image.convert("RGB"), key=name)
    return str(run)


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

    tags = {
        _STUDY: result.id,
        "mlflow.parentRunId": parent,
        "sdopt.role": variant.role,
        "status": str(variant.status),
        "contract": variant.contract,
        **variant.choices,
    }
    verdicts = [f"{j.verdict} against {j.reference}" for j in result.judgements if j.candidate == variant.name]
    if verdicts:
        tags |= {"verdict": "; ".join(verdicts), "gate": result.gate}
    if variant.reason:
        tags["mlflow.note.content"] = _note(variant.reason)
    run = client.create_run(experiment, run_name=variant.name, tags=tags).info.run_id
    # Only what tells the variants apart: the UI prints all parameters of a run above each of its images.
    common = [_flat(other.config).items() for other in result.variants]
    own = {key: value for key, value in _flat(variant.config).items() if any((key, value) not in c for c in common)}
    _log_params(
        client, run, variant.choices | {k: v for k, v in own.items() if k.partition(".")[0] not in variant.choices}
    )
    now = client.get_run(run).info.start_time
    metrics = [Metric(name, value, now, 0) for name, value in metrics_of(result, variant).items()]
    for replicate, samples in variant.samples.items():
        name = "latency/round_s" + (f"/process_{replicate}" if len(variant.samples) > 1 else "")
        metrics += [Metric(name, seconds, now, step) for step, seconds in enumerate(samples, 1)]
    for start in range(0, len(metrics), _BATCH):
        client.log_batch(run, metrics=metrics[start : start + _BATCH])
    if tracking.images:
        # To look at; the quality pass draws many more, which the run's folder keeps.
        workload = variant.config["workload"]
        for record in variant.images[: workload["prompt_count"] * workload["images_per_prompt"]]:
            key = f"{record.prompt_index:02d} {_image_key(record.prompt)}"
            with Image.open(folder / record.path) as image:
                client.log_image(run, image.convert("RGB"), key=key, step=record.image_index)
    evidence = [
        {
            "replicate": m.replicate,
            "sitting": m.sitting,
            "axis": e.axis,
            "option": e.option,
            "engaged": e.engaged,
            **e.facts,
        }
        for m in variant.measurements
        for e in m.evidence
    ]
    if evidence:
        client.log_dict(run, {"evidence": evidence}, "evidence.json")
    client.set_terminated(run, "FINISHED" if variant.status.measured else "FAILED")
    return str(run)


def _log_params(client: "MlflowClient", run: str, values: dict[str, Any]) -> None:
    from mlflow.entities import Param

    params = [Param(name, str(value)[:_PARAM_LIMIT]) for name, value in values.items()]
    for start in range(0, len(params), _BATCH):
        client.log_batch(run, params=params[start : start + _BATCH])


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    # The study's own keys are the same in all its variants, and in result.json.
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key == "study":
            continue
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _note(text: str) -> str:
    if len(text) <= _NOTE_LIMIT:
        return text
    return text[: _NOTE_LIMIT - 60].rsplit("\n", 1)[0] + "\n\n… cut here: table.md among the artifacts is whole."


def _image_key(prompt: str) -> str:
    return re.sub(r"[^A-Za-z0-9 _-]+", " ", prompt).strip()[:60]
