"""What sdopt asks of MLflow, in a process of its own: the only module that imports it; `store` starts the process.

So MLflow's settings, loggers and environment never meet those of the caller, and a deadline ends even a client that
retries by itself. What a function had begun when it failed is deleted, and else replaced when the same is logged again.
"""

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlparse

from sdopt.errors import SdoptError, UnavailableError, UsageError
from sdopt.locks import exclusive
from sdopt.measure.garbage import no_garbage
from sdopt.record.images import open_image
from sdopt.schema import Tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

ROLE, STUDY, VARIANT = "sdopt.role", "sdopt.study_id", "sdopt.variant"
"""Tags: what a run stands for, and of which study and variant it is. MLflow's UI can rename a run."""

NOTE, PARENT, DIGEST = "mlflow.note.content", "mlflow.parentRunId", "sdopt.digest"
"""Tags of a run's note, of the run above it, and, set last, of what a complete run holds."""

OWN_TAGS = (
    *(NOTE, PARENT, "mlflow.runName", "mlflow.user"),
    *("mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit"),
    *("study", "model", "size", "steps", "batch", "lora_file", "device"),
    *("torch", "diffusers", "sdopt", "status", "contract"),
    *("answer", "speed", "images", "gate", "because", "gate.name"),
)
"""Tags that runs get from their results, beside those of the axes and those that begin with `sdopt.`."""

VIEW = "sdopt"
"""The name of the shared view, in an experiment's tag and in a link to its page."""

_SETTINGS = {
    # A server may ask to wait for an hour, and a POST that is redirected arrives as a GET.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables, unless the user has set them: retries end long before the deadline, and so say why."""

_FORCED = {"MLFLOW_ENABLE_ASYNC_LOGGING": "false"}
"""Environment variables whatever the user has set: else a run is said to be logged that a thread still writes."""

_NOTED = "sdopt.noted"
"""Tag of an experiment: the note that was written last, to know it from one of the user's."""

_LEFT_OUT = "sdopt.left_out"
"""Tag: the artifacts that a server did not take because of their size."""

_PARAM_LIMIT, _METRICS, _PARAMS, _ALL = (
    500,
    800,
    100,
    50_000,
)  # as also servers of 2023 take them

BEGUN = "begun"
"""What the process says when the deadline of a request begins."""

notes: list[str] = []
"""What a request has to say to the user besides its answer."""


class TrackingError(UnavailableError):
    """The tracker could not store a result; the result is safe in its file."""


class RefusedError(TrackingError):
    """The tracker will not store a result until the user changes something: waiting does not help."""


def _leaderboard() -> Sequence[str]:
    from sdopt.report.columns import leaderboard  # imports scipy, which takes a second

    return leaderboard()


@dataclass(frozen=True)
class TrackedRun:
    """What a run of MLflow shall hold, and the runs below it."""

    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    status: str = "FINISHED"
    """`FINISHED`, `KILLED` or `FAILED`, once it is complete."""
    started: int | None = None
    """In milliseconds since 1970, as `ended`; None is now. MLflow lists the latest run first."""
    ended: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """The content, or the file, of each artifact, by its path."""
    pictures: Sequence[tuple[str, int | None, Path]] = ()
    """Images, each with the key and the step under which MLflow shows it."""
    below: Sequence["TrackedRun"] = ()
    leaderboard: Sequence[str] = field(default_factory=_leaderboard)
    """The columns of the experiment's page."""


class Logged(NamedTuple):
    """A run in the store: its id, that of its experiment, and whether it is new there."""

    run: str
    experiment: str
    new: bool


def late(cause: str, deadline_s: float) -> TrackingError:
    """Returns the error of a request whose deadline has passed."""
    return TrackingError(f"{cause} within {deadline_s:g} s")


def serve(channel: Connection) -> None:
    """Answers the requests that come through a pipe until it is closed: the main function of the process."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.update(_FORCED)
    os.environ.pop(
        "MLFLOW_ACTIVE_MODEL_ID", None
    )  # metrics would belong to that model of another program
    with no_garbage():
        import mlflow
        import mlflow.store.tracking.sqlalchemy_store  # what a database needs, before the first request
        import sqlalchemy.orm

        sqlalchemy.orm.configure_mappers()

    for logger in ("alembic", "mlflow", "mlflow.store.db.utils"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    channel.send(mlflow.__version__)
    with suppress(EOFError, OSError):  # the command has ended
        while True:
            folder, tracking, deadline_s, function, arguments = channel.recv()
            with suppress(OSError):  # it was removed
                os.chdir(folder)
            notes.clear()
            answer, problem = None, None
            try:
                answer = perform(
                    tracking,
                    deadline_s,
                    lambda: channel.send(BEGUN),
                    function,
                    *arguments,
                )
            except SdoptError as error:
                problem = error
            channel.send((answer, notes, problem))


def perform(
    tracking: Tracking,
    deadline_s: float,
    begun: Callable[[], None],
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Calls `function(client, tracking, *arguments)`; until a deadline, tries again what passes, as of a locked file.

    `begun` is called once no other process writes the same database. Who asks ends a call that outlasts the deadline.

    Raises:
        RefusedError: the user has to change something.
        TrackingError: the store cannot be reached, or was too slow.
    """
    from mlflow import MlflowClient

    # A database is written by one process at a time, also if containers share no other folder than its own.
    file = file_of(tracking)
    if file is not None:
        with suppress(OSError):  # said where it is opened
            file.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(Path(f"{file}.lock")) if file else nullcontext():
        begun()
        end, pause = time.monotonic() + deadline_s, 0.5
        while True:
            try:
                _require_database(tracking)
                return function(
                    MlflowClient(tracking_uri=address_of(tracking)),
                    tracking,
                    *arguments,
                )
            except SdoptError:
                raise
            except Exception as error:
                if not any(words in str(error) for words in _PASSING):
                    raise _explained(error, tracking) from error
                if time.monotonic() + pause > end:
                    raise late(cause_of(error), deadline_s) from error
            time.sleep(pause)
            pause *= 2


def _require_database(tracking: Tracking) -> None:
    """Asks a database for its tables before MLflow does, which tries for minutes. Raises what SQLAlchemy raises."""
    if is_server(tracking) or "://" not in tracking.uri:
        return
    from sqlalchemy import create_engine, inspect

    file = file_of(tracking)
    if file is not None and not file.exists():
        return  # MLflow makes it
    engine = create_engine(address_of(tracking))
    try:
        tables = inspect(engine).get_table_names()
    finally:
        engine.dispose()
    if tables and not {"experiments", "alembic_version"} & set(tables):
        raise RefusedError(
            f"it holds other tables ({', '.join(tables[:3])}), not MLflow's: choose another"
        )


def file_of(tracking: Tracking) -> Path | None:
    """Returns the file of a SQLite database; None for another store."""
    scheme, _, path = tracking.uri.partition(":///")
    if scheme.partition("+")[0] != "sqlite":
        return None
    return Path(path.partition("?")[0]).expanduser()


def address_of(tracking: Tracking) -> str:
    """Returns the address of a store as SQLAlchemy reads it, which takes a path such as `a%2Fb` for `a/b`."""
    file = file_of(tracking)
    if file is None:
        return tracking.uri
    from sqlalchemy.engine import URL

    head, _, options = tracking.uri.partition("?")
    url = URL.create(
        head.partition(":///")[0], database=str(file), query=dict(parse_qsl(options))
    )
    return url.render_as_string()


def is_server(tracking: Tracking) -> bool:
    """Returns whether a tracking server keeps the runs, rather than a database."""
    return tracking.uri == "databricks" or urlparse(tracking.uri).scheme in (
        "http",
        "https",
        "databricks",
    )


# Errors ---------------------------------------------------------------------------------------------------------------

_PASSING = (
    *("database is locked", "OperationalError) table", "DuplicateTable"),
    *("UniqueViolation", "UNIQUE constraint", "UNIQUE KEY", "Duplicate entry"),
)
"""Errors of a database while another process writes it, creates its schema, or adds the same row first, such as an
experiment or a tag of it: MLflow looks whether there is one, and then adds it."""

_REFUSING = re.compile(
    r"status (?!408|429)[34]\d\d|UNAUTHENTICATED|PERMISSION_DENIED|ENDPOINT_NOT_FOUND"
    r"|CERTIFICATE_VERIFY_FAILED|SSLError|ProxyError|credentials|[Dd]atabricks auth"
    r"|valid JSON|<html"
)
"""What a server, or what answers in its place, says until the user changes something."""

_UNREACHED = re.compile(
    r"service not known|NameResolution|nodename nor|failure in name|[Rr]efused"
    r"|reset by peer|aborted|[Tt]imeout|timed out|[Nn]o route|unreachable"
    r"|could not connect|closed the connection|No space left|disk is full|quota"
)
"""What is said of a database that may be there later."""


def cause_of(error: BaseException) -> str:
    """Returns the line of an error that names the cause, which SQLAlchemy puts after other lines."""
    lines = [
        line
        for line in str(error).splitlines()
        if line and not line.startswith("(raised as a result of")
    ]
    return lines[0].strip()[:400] if lines else type(error).__name__


def _status(error: Exception) -> str:
    """Returns the HTTP status that an error tells of; "" if none."""
    match = re.search(
        r"error code (\d{3})|too many (\d{3}) error|(\d{3}) (?:Client|Server) Error",
        str(error),
    )
    return next(filter(None, match.groups()), "") if match else ""


def _explained(error: Exception, tracking: Tracking) -> TrackingError:
    """Returns an error of MLflow or of a database in its own words, refused where waiting does not help."""
    cause = cause_of(error)
    if is_server(tracking):
        refused = bool(_REFUSING.search(f"status {_status(error)} {error}"))
    else:
        refused = not _UNREACHED.search(str(error))
    return RefusedError(cause) if refused else TrackingError(cause)


# What is asked --------------------------------------------------------------------------------------------------------


def check(client: "MlflowClient", tracking: Tracking, experiment: str) -> None:
    """Raises what would keep a result from being logged to an experiment: call it before measuring."""
    name = _name_here(client, tracking, experiment)
    place = client.get_experiment_by_name(name)
    if place is None:
        client.search_experiments(max_results=1)
        return
    if place.lifecycle_stage != "active":
        raise RefusedError(
            f"the experiment {name!r} is deleted: restore it, or log to one of another name (study.name=…)"
        )
    _require_near(place, tracking)


def put(
    client: "MlflowClient",
    tracking: Tracking,
    experiment: str,
    run: TrackedRun,
    mine: Sequence[str],
    digest: str,
    adopted: Sequence[str] = (),
    note: str | None = None,
) -> Logged:
    """Logs a run and those below it, once, and deletes earlier ones of the same.

    The queries `mine` find the same run and those below it, also in an experiment that was renamed; a run that has the
    `digest` is complete, and stays as it is. `adopted` are queries for runs of others that are put below it, `note` is
    the experiment's.

    Raises:
        UsageError: what is logged ended later than `run`.
    """
    # Two processes that log one run at once would each find none: a server, unlike a file, has no lock.
    with exclusive("\n".join((address_of(tracking), *mine))):
        earlier = _found(client, mine, experiment)
        gone = _gone_places(client, tracking, earlier)
        here = [one for one in earlier if one.info.experiment_id not in gone]
        home = (
            str(here[0].info.experiment_id)
            if here
            else _experiment(client, tracking, experiment, run.leaderboard)
        )
        _require_near(client.get_experiment(home), tracking)
        run_id = next(
            (
                str(one.info.run_id)
                for one in here
                if one.data.tags.get(DIGEST) == digest
            ),
            None,
        )
        new = run_id is None
        if run_id is None:
            _require_none_later(here, run.ended)
            if note is not None:
                _describe(client, home, note)
            run_id = _created(client, home, run, digest)
        for one in earlier:
            if run_id not in (one.info.run_id, one.data.tags.get(PARENT)):
                client.delete_run(one.info.run_id)
        for other in _found(client, adopted, experiment):
            client.set_tag(other.info.run_id, PARENT, run_id)
        return Logged(run_id, home, new)


def _require_none_later(logged: Sequence["Run"], ended: int | None) -> None:
    """Raises UsageError if what is logged ended later: it went on after the copy that would take its place."""
    if ended is None:
        return
    for run in logged:
        if DIGEST in run.data.tags and (run.info.end_time or 0) > ended:
            raise UsageError(
                f"an earlier state of what run {run.info.run_id} has: it stays; log the folder that went on, or delete "
                "that run first"
            )


def _created(client: "MlflowClient", home: str, run: TrackedRun, digest: str) -> str:
    """Creates a run, whole or not at all."""
    created: list[str] = []
    try:
        run_id = _create(client, home, run, None, created)
        client.set_tag(run_id, DIGEST, digest)
    except Exception:
        with suppress(Exception):  # as far as the store answers
            for begun in created:
                client.delete_run(begun)
        raise
    return run_id


def amend(
    client: "MlflowClient",
    tracking: Tracking,
    experiment: str,
    mine: Sequence[str],
    changes: Mapping[str, TrackedRun],
    replace: bool = True,
) -> str:
    """Adds to the runs that queries find: metrics, artifacts, then tags; returns the id of the run above all, or "".

    `changes` are what each run gets, by the name of its variant, and by "" the run above all. An artifact takes the
    place of one of the same name, or does not (`replace`).
    """
    above = ""
    runs = _found(client, mine, experiment)
    gone = _gone_places(client, tracking, runs)
    for logged in sorted(runs, key=lambda run: not _variant_of(run)):
        run = str(logged.info.run_id)
        above = above if _variant_of(logged) else run
        change = changes.get(_variant_of(logged))
        if change is None:
            continue
        there = set() if replace else {item.path for item in client.list_artifacts(run)}
        files = {name: file for name, file in change.files.items() if name not in there}
        if files and logged.info.experiment_id in gone:
            raise RefusedError(
                "its artifacts are in a folder where this project no longer is; `sdopt sync` logs the result anew"
            )
        _fill(client, run, TrackedRun(files=files, metrics=change.metrics))
        for (
            name,
            value,
        ) in (
            change.tags.items()
        ):  # the digest, which says that all is there, comes last
            client.set_tag(run, name, value)
    return above


def holds(
    client: "MlflowClient",
    tracking: Tracking,
    experiment: str,
    mine: Sequence[str],
    metrics: Mapping[str, Sequence[str]],
) -> bool:
    """Returns whether a run that queries find has one of some metrics, which are by variant as `amend`'s changes."""
    for run in _found(client, mine, experiment):
        named = metrics.get(_variant_of(run), ())
        if not run.data.metrics.keys().isdisjoint(named):
            return True
    return False


def _variant_of(run: "Run") -> str:
    """Returns the name of a run's variant; "" for the run above all, of a study or a sweep."""
    tags = run.data.tags
    return "" if tags.get(ROLE) in ("study", "sweep") else str(tags[VARIANT])


def read(
    client: "MlflowClient", tracking: Tracking, run: str
) -> tuple[bytes, str | None]:
    """Returns the `result.json` of a study's run or of one of its variants, and the name of that variant.

    Raises UsageError if there is no such run, or no result among its artifacts.
    """
    from mlflow.exceptions import MlflowException

    try:
        logged = client.get_run(run)
    except MlflowException as error:
        if error.error_code in (
            "RESOURCE_DOES_NOT_EXIST",
            "INVALID_PARAMETER_VALUE",
        ):  # such as a name with blanks
            raise unknown(run, f"at {tracking.uri}") from error
        raise
    top = (
        run
        if logged.data.tags.get(ROLE) == "study"
        else logged.data.tags.get(PARENT, run)
    )
    if "result.json" not in [item.path for item in client.list_artifacts(top)]:
        raise UsageError(
            f"{run}: this MLflow run at {tracking.uri} has no result.json in {logged.info.artifact_uri}; name a study's "
            "run, or a result's folder"
        )
    with tempfile.TemporaryDirectory() as below:
        content = Path(
            client.download_artifacts(top, "result.json", below)
        ).read_bytes()
    return content, logged.data.tags.get(VARIANT) if top != run else None


def unknown(run: str, where: str) -> UsageError:
    """Returns the error of what is no run of a store, with the one that MLflow's own variable names, if it is set."""
    other = os.environ.get("MLFLOW_TRACKING_URI") or "…"
    return UsageError(
        f"{run}: neither a file or folder, nor the id of a run {where}; name another store with tracking.uri={other}"
    )


def pages(client: "MlflowClient", tracking: Tracking) -> dict[str, str]:
    """Returns the ids of the experiments by their names."""
    experiments = client.search_experiments()
    return {
        place.name: str(place.experiment_id)
        for place in experiments
        if place.name != "Default"
    }


# How it is done -------------------------------------------------------------------------------------------------------


def _experiment(
    client: "MlflowClient", tracking: Tracking, name: str, columns: Sequence[str]
) -> str:
    """Returns the id of the experiment of a name; creates it if there is none."""
    tags = _experiment_tags(columns)
    here = _name_here(client, tracking, name)
    if here != name:
        notes.append(
            f"the experiment {name!r} has its artifacts in a folder where this project no longer is: logged to {here!r}"
        )
    place = client.get_experiment_by_name(here)
    if place is None:
        return str(client.create_experiment(here, place_of(tracking, here), tags))
    for key, value in tags.items():
        if place.tags.get(key) != value:  # made by an earlier version, or by hand
            client.set_experiment_tag(place.experiment_id, key, value)
    return str(place.experiment_id)


def _describe(client: "MlflowClient", experiment: str, note: str) -> None:
    """Sets the note of an experiment, unless somebody has written another since; earlier versions did not mark theirs."""
    tags = client.get_experiment(experiment).tags
    there = tags.get(NOTE, "")
    ours = tags.get(_NOTED, there if there.startswith("**") else "")
    if there in ("", ours):
        client.set_experiment_tag(experiment, _NOTED, note)
        client.set_experiment_tag(experiment, NOTE, note)


def _name_here(client: "MlflowClient", tracking: Tracking, name: str) -> str:
    """Returns a name of an experiment, with a number where the artifacts of the one before are no longer here."""
    for number in count(1):
        numbered = f"{name} {number}" if number > 1 else name
        place = client.get_experiment_by_name(numbered)
        if place is None or not _is_elsewhere(place, tracking):
            return numbered
    raise AssertionError("experiments are counted without end")


def _experiment_tags(columns: Sequence[str]) -> dict[str, str]:
    """Returns tags that make MLflow's UI show an experiment as a leaderboard of runs, rather than traces of agents.

    The runs are sorted by the first metric among the columns; each of these metrics has a chart.
    """
    metrics = [column for column in columns if column.startswith("metrics.")]
    view = {
        "selectedColumns": list(columns),
        "orderByKey": metrics[0],
        "orderByAsc": False,
        # Charts of all other metrics follow in sections of their own.
        "compareRunSections": [
            {"uuid": VIEW, "name": "the answer", "display": True, "isReordered": True}
        ],
        "compareRunCharts": [_bars(metric.split("`")[1]) for metric in metrics],
        "isAccordionReordered": True,
    }
    return {
        "mlflow.experimentKind": "custom_model_development",
        f"mlflow.sharedViewState.{VIEW}": json.dumps(view),
    }


def _bars(metric: str) -> dict[str, Any]:
    """Returns a chart of MLflow's UI with a bar for each run."""
    place = {
        "uuid": f"{VIEW}-{metric}",
        "metricSectionId": VIEW,
        "isGenerated": False,
        "deleted": False,
    }
    return {"type": "BAR", "metricKey": metric, "runsCountToCompare": 20, **place}


def _found(
    client: "MlflowClient", queries: Sequence[str], experiment: str
) -> list["Run"]:
    """Returns the runs that queries find, in the experiment of a name and in all that sdopt has made."""
    if not queries:
        return []
    named = client.get_experiment_by_name(experiment)
    ours = client.search_experiments(
        filter_string=f"tags.`mlflow.sharedViewState.{VIEW}` LIKE '%'"
    )
    places = set()
    for place in (*ours, named):
        if place is not None and place.lifecycle_stage == "active":
            places.add(place.experiment_id)
    if not places:
        return []
    runs: dict[str, Run] = {}
    for query in queries:
        for run in client.search_runs(sorted(places), query, max_results=_ALL):
            runs[run.info.run_id] = run
    return list(runs.values())


def _create(
    client: "MlflowClient",
    experiment: str,
    run: TrackedRun,
    above: str | None,
    created: list[str],
) -> str:
    """Creates a run and those below it; notes their ids as they come."""
    tags = {**run.tags, **({PARENT: above} if above else {})}
    run_id = str(client.create_run(experiment, run.started, tags, run.name).info.run_id)
    created.append(run_id)
    # Until all of it is there, it has failed: if the store or this process dies, no run is left running.
    client.set_terminated(run_id, "FAILED")
    _fill(client, run_id, run)
    for one in run.below:
        _create(client, experiment, one, run_id, created)
    client.set_terminated(run_id, run.status, run.ended)
    return run_id


def _fill(client: "MlflowClient", run: str, content: TrackedRun) -> None:
    """Adds parameters, metrics and artifacts. What is too large for a server is left out, and named in a tag."""
    from mlflow.entities import Metric, Param

    now = int(1000 * time.time()) if content.ended is None else content.ended
    params = [
        Param(name, str(value)[:_PARAM_LIMIT])
        for name, value in content.parameters.items()
    ]
    metrics = [Metric(name, value, now, 0) for name, value in content.metrics.items()]
    for start in range(0, len(params), _PARAMS):
        client.log_batch(run, params=params[start : start + _PARAMS])
    for start in range(0, len(metrics), _METRICS):
        client.log_batch(run, metrics=metrics[start : start + _METRICS])
    left_out = [
        name
        for name, data in content.files.items()
        if not _sent(_upload, client, run, name, data)
    ]
    for key, step, file in content.pictures:
        image = open_image(file).convert("RGB")
        if not _sent(client.log_image, run, image, key=key, step=step):
            left_out.append(key)
    if left_out:
        names = ", ".join(left_out)
        client.set_tag(run, _LEFT_OUT, names[:5000])
        notes.append(
            f"left out, because the server or its proxy does not allow files of that size (413): {names}; the rest is "
            "logged. Allow more (client_max_body_size in nginx); `sdopt report` then adds the page"
        )


def _upload(client: "MlflowClient", run: str, path: str, content: bytes | Path) -> None:
    """Logs what a file holds, or bytes of any kind, as an artifact under a path."""
    folder, _, name = path.rpartition("/")
    if isinstance(content, Path):
        client.log_artifact(run, str(content), folder or None)
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / name
        file.write_bytes(content)
        client.log_artifact(run, str(file), folder or None)


def _sent(send: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Returns whether something was sent, or refused because of its size."""
    try:
        send(*arguments, **named)
    except Exception as error:
        if _status(error) != "413":
            raise
        return False
    return True


# Where artifacts lie --------------------------------------------------------------------------------------------------


def place_of(tracking: Tracking, experiment: str) -> str | None:
    """Returns where a store that is not a server keeps an experiment's artifacts; None leaves it to MLflow."""
    if tracking.artifacts is None or is_server(tracking):
        return None
    if "://" in tracking.artifacts:
        return f"{tracking.artifacts.rstrip('/')}/{experiment}"
    return (Path(tracking.artifacts).absolute() / experiment).as_uri()


def _gone_places(
    client: "MlflowClient", tracking: Tracking, runs: Sequence["Run"]
) -> set[str]:
    """Returns the ids of those experiments of some runs whose artifacts are no longer here, as `_is_elsewhere`."""
    places = {run.info.experiment_id for run in runs}
    return {
        place
        for place in places
        if _is_elsewhere(client.get_experiment(place), tracking)
    }


def _is_elsewhere(experiment: Any, tracking: Tracking) -> bool:
    """Returns whether an experiment's files would be written to where a project was before it was moved or copied.

    MLflow keeps the whole path of the folder that an experiment began with, and makes it anew.
    """
    folder = path_of(str(experiment.artifact_location))
    if file_of(tracking) is None or folder is None:
        return False
    here = path_of(place_of(tracking, str(experiment.name)))
    if folder == here:
        return False
    if not folder.parent.exists():
        return True
    return here is not None and _is_copied(folder, here, tracking)


def _is_copied(folder: Path, here: Path, tracking: Tracking) -> bool:
    """Returns whether a folder of artifacts is the same one of another project, from which this one was copied."""
    usual = Tracking()
    store = file_of(usual) or Path()
    place = Path(usual.artifacts or "").resolve()
    if file_of(tracking) != store.resolve() or here.parent != place:
        return False
    if folder.parts[-_DEPTH:] != here.parts[-_DEPTH:]:
        return False
    # A folder may be mounted at two places.
    return not (here.parent.exists() and folder.parent.samefile(here.parent))


_DEPTH = 3
"""Folders of an experiment's artifacts within a project: `outputs/mlartifacts/NAME`."""


def path_of(location: str | None) -> Path | None:
    """Returns the folder that an address of artifacts means; None if it is none of this machine."""
    if location is None:
        return None
    address = urlparse(location)
    if address.scheme not in ("", "file"):
        return None
    return Path(unquote(address.path) if address.scheme else location)


def _require_near(experiment: Any, tracking: Tracking) -> None:
    """Raises RefusedError if artifacts would lie elsewhere than `tracking.artifacts` says, or than a server's users look."""
    location = str(experiment.artifact_location)
    folder = path_of(location)
    asked = place_of(tracking, str(experiment.name))
    usual = Path(Tracking().artifacts or "").resolve()
    if asked is None or Path(tracking.artifacts or "") == usual:
        asked = location
    if location.rpartition("/")[0] != asked.rpartition("/")[0]:
        raise RefusedError(
            f"the experiment {experiment.name!r} has its artifacts in {folder or location}, so that "
            f"tracking.artifacts={tracking.artifacts} would have no effect: leave that out, or log to an experiment of "
            "another name (study.name=…)"
        )
    here = (None, "localhost", "127.0.0.1", "::1")
    if (
        folder is not None
        and urlparse(tracking.uri).hostname not in here
        and not folder.parent.exists()
    ):
        raise RefusedError(
            f"its artifacts are in a folder that this machine does not have, {folder}: log to a server that was "
            "started with --artifacts-destination=…, to an experiment that was made since (study.name=…)"
        )
