"""Connects to the MLflow store; MLflow is imported only when it is used."""

import json
import logging
import os
import shlex
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from sdopt.errors import UnavailableError, UsageError
from sdopt.locks import exclusive
from sdopt.schema import Tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient


_VIEW = "sdopt"
"""The name of the shared view, in an experiment's tag and in a link to its page."""

_RUNS_VIEW = f"workflowType=machine_learning&compareRunsMode=TABLE&viewStateShareKey={_VIEW}"

_COLUMNS = (
    *("metrics.`memory_ratio`", "metrics.`quality/psnr_db`", "metrics.`speedup`"),
    *("tags.`answer`", "tags.`model`", "tags.`steps`", "tags.`device`"),
)
"""Columns of the leaderboard, beside the name of a run."""

_ATTEMPTS = 4

_PASSING = ("database is locked", "OperationalError) table", "DuplicateTable")
"""Errors of a database while another user's process writes it or creates its schema: locks cover only one user."""

_ALREADY_THERE = ("UniqueViolation", "IntegrityError")
"""Errors of a database to which another process added the same row first: of PostgreSQL, of SQLite and MySQL."""


class TrackingError(UnavailableError):
    """The tracker could not store a result; the result is safe in its file."""


def cause_of(error: Exception) -> str:
    """Returns the line of an error that names the cause, which SQLAlchemy puts after other lines."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("(raised as a result of")]
    return lines[0] if lines else type(error).__name__


def require_mlflow() -> None:
    """Raises UsageError if mlflow is not installed; call it before measuring."""
    if find_spec("mlflow") is None:
        raise UsageError("tracking.kind=mlflow: mlflow is not installed; pip install mlflow, or choose tracking=none")


def import_in_background(tracking: Tracking) -> None:
    """Imports MLflow, which takes seconds, in a thread of its own: for a process that waits for another one."""
    if tracking.kind == "mlflow" and find_spec("mlflow") is not None:
        threading.Thread(target=import_module, args=("mlflow",), daemon=True).start()


def require_store(tracking: Tracking) -> str | None:
    """Checks quickly, without importing MLflow, whether a store can take a result.

    Returns:
        a warning if a server does not answer: it may answer again when the study has ended.

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
            advice = "measuring continues without it, and `sdopt sync` can log the result later"
            return f"tracking.uri={tracking.uri}: {reason}; {advice}"
    return None


def _why_unwritable(path: Path) -> str | None:
    if not path.exists():
        parent = next(parent for parent in path.parents if parent.exists())
        return None if parent.is_dir() and os.access(parent, os.W_OK) else f"{parent} cannot be written"
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):  # SQLite writes its journal beside it
        return "it cannot be written"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=1)) as database:
            database.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        # Another writer is no problem: MLflow waits for it.
        return None if error.sqlite_errorcode == sqlite3.SQLITE_BUSY else str(error)
    return None


def with_store(tracking: Tracking, study: str, work: Callable[["MlflowClient"], tuple[str, bool]]) -> tuple[str, bool]:
    """Runs a function that logs to a store, one process at a time; runs it again if another user locked the database.

    The function must find and replace partial work of its earlier run.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """
    require_mlflow()
    # Import all of MLflow before a part of it. Otherwise the thread of `import_in_background`, which imports all, would
    # wait for that part while this thread waits for the whole, and Python ends such a deadlock with a partial module.
    import mlflow  # noqa: F401
    from mlflow.exceptions import MlflowException

    # A server accepts many studies at once, but must not get one twice; a database may still need its schema.
    with exclusive(study if is_server(tracking) else _store_name(tracking)):
        for attempt in range(_ATTEMPTS):
            try:
                return work(connect(tracking))
            except (MlflowException, OSError, TrackingError) as error:
                if attempt == _ATTEMPTS - 1 or not any(words in str(error) for words in _PASSING):
                    if isinstance(error, TrackingError):
                        raise
                    raise TrackingError(f"{tracking.uri}: {cause_of(error)}") from error
                time.sleep(2**attempt)
    raise AssertionError("unreachable")


def _store_name(tracking: Tracking) -> str:
    """Returns an absolute name of a store that is not a server."""
    file = tracking.uri.removeprefix("sqlite:///")
    return tracking.uri if urlparse(file).scheme else str(Path(file).resolve())


def store_exists(tracking: Tracking) -> bool:
    """Returns whether a store may hold runs: not if its local database is missing, or MLflow is not installed."""
    if find_spec("mlflow") is None:
        return False
    file = tracking.uri.removeprefix("sqlite:///")
    return file == tracking.uri or Path(file).is_file()


def is_server(tracking: Tracking) -> bool:
    """Returns whether a tracking server keeps the runs, rather than a local database."""
    return urlparse(tracking.uri).scheme in ("http", "https", "databricks")


def shown_by(tracking: Tracking, run: str) -> str:
    """Returns how to view a run: the address of its leaderboard on a tracking server, or the command that opens it."""
    store = [] if tracking.uri == Tracking().uri else [f"tracking.uri={tracking.uri}"]
    command = shlex.join(["sdopt", "ui", *store])
    if urlparse(tracking.uri).scheme not in ("http", "https"):
        return command
    from mlflow.exceptions import MlflowException

    try:
        experiment = connect(tracking).get_run(run).info.experiment_id
    except (MlflowException, TrackingError):
        return command
    return f"{tracking.uri.rstrip('/')}/{_page(experiment)}"


def _page(experiment: str) -> str:
    return f"#/experiments/{experiment}/runs?{_RUNS_VIEW}"


def ui_pages(tracking: Tracking) -> dict[str, str]:
    """Returns the page of each study in MLflow's UI, as a leaderboard, relative to the site.

    Raises:
        TrackingError: the store cannot be opened.
    """
    from mlflow.exceptions import MlflowException

    client = connect(tracking)
    try:
        experiments = client.search_experiments()
    except MlflowException as error:
        raise TrackingError(f"{tracking.uri}: {cause_of(error)}") from error
    return {
        experiment.name: _page(experiment.experiment_id) for experiment in experiments if experiment.name != "Default"
    }


def connect(tracking: Tracking) -> "MlflowClient":
    """Opens the store. Raises TrackingError if it cannot be opened."""
    require_mlflow()
    # A server that does not answer is reported after seconds, not after the minutes of MLflow's own retries.
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
        raise TrackingError(f"{tracking.uri}: {cause_of(error)}") from error


def find_experiment(client: "MlflowClient", name: str, tracking: Tracking) -> str:
    """Returns the id of the experiment of a name; creates it if there is none."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        # Without a location a local store writes to ./mlruns, wherever that is.
        local = tracking.artifacts and not is_server(tracking)
        artifacts = Path(str(tracking.artifacts)).resolve() / name if local else None
        try:
            tags = _experiment_tags()
            return str(client.create_experiment(name, artifacts.as_uri() if artifacts else None, tags))
        except MlflowException:
            # Another process made it in the meantime.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    for key, value in _experiment_tags().items():
        if found.tags.get(key) != value:  # made by an earlier version, or by hand
            set_experiment_tag(client, str(found.experiment_id), key, value)
    return str(found.experiment_id)


def set_experiment_tag(client: "MlflowClient", experiment: str, key: str, value: str) -> None:
    """Sets a tag of an experiment, which processes that log different studies may do at the same time.

    MLflow looks for the tag first, and then adds or changes it: if two processes find none, the second one fails.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.set_experiment_tag(experiment, key, value)
    except MlflowException as error:
        if not any(words in str(error) for words in _ALREADY_THERE):
            raise
        client.set_experiment_tag(experiment, key, value)


def _experiment_tags() -> dict[str, str]:
    """Returns tags that make MLflow's UI show an experiment as a leaderboard of runs, rather than traces of agents."""
    view = {"selectedColumns": _COLUMNS, "orderByKey": "metrics.`speedup`", "orderByAsc": False}
    return {"mlflow.experimentKind": "custom_model_development", f"mlflow.sharedViewState.{_VIEW}": json.dumps(view)}
