"""The store that results are logged to: what can be checked at once, and the process in which MLflow runs.

MLflow runs in a process of its own, which starts with the first request and ends with the command. `tracking.client`
has what runs there.
"""

import atexit
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlparse

from sdopt.apart import start_apart
from sdopt.config.groups import default_options
from sdopt.config.sections import SECTION_NAMES, WORK_SECTIONS
from sdopt.errors import (
    HIDDEN,
    UsageError,
    command_line,
    print_problems,
    without_passwords,
)
from sdopt.schema import Tracking
from sdopt.tracking.client import (
    BEGUN,
    OWN_TAGS,
    VIEW,
    Logged,
    RefusedError,
    TrackingError,
    check,
    file_of,
    is_server,
    pages,
)

T = TypeVar("T")

_CHECK_S = 20.0
"""A server that hangs delays a study by no more than this."""


_PATIENCE_S = 10.0
"""After so long a command says that it waits for another process."""

_QUEUE = 10
"""Deadlines of other processes that one waits for."""

_GRACE_S = 5.0
"""Time after the deadline for what fails then, to say why and to delete what it has begun."""


class _Process:
    """The process in which MLflow runs; a request starts it if need be."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[bytes], Connection, IO[bytes]] | None = (
            None
        )
        """The process, the pipe to it, and what it said."""
        self._ready = False

    def start(self) -> Connection:
        """Starts the process unless it runs; it imports MLflow while this one goes on."""
        if self._running is None or self._running[0].poll() is not None:
            self.end()
            said = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
            process, channel = start_apart(
                "sdopt.tracking.client", "serve", stdout=subprocess.DEVNULL, stderr=said
            )
            self._running, self._ready = (process, channel, said), False
        return self._running[1]

    def ask(
        self, tracking: Tracking, deadline_s: float, *request: object
    ) -> tuple[Any, list[str], Exception | None]:
        """Returns the answer to a request, what else there is to say, and the error. Raises TrackingError."""
        channel = self.start()
        answer = None
        try:
            if not self._ready:
                channel.recv()
                self._ready = True
            channel.send(
                (Path.cwd(), tracking, deadline_s, *request)
            )  # relative paths of files begin there
            # Until it begins, it waits for other processes, which have a deadline of their own.
            if not channel.poll(_PATIENCE_S):
                print_problems(
                    [f"{tracking.uri}: waiting for another process that writes it"]
                )
                if not channel.poll(_QUEUE * deadline_s):
                    raise TrackingError(
                        "another process holds it, which was perhaps stopped: let that one go on or end"
                    )
            begun = channel.recv()
            if begun == BEGUN and not channel.poll(deadline_s + _GRACE_S):
                # Logging later has the same limit: what is slower than that would never be logged.
                own = deadline_s == tracking.deadline_s
                way_out = "; tracking.deadline_s=… gives it longer" if own else ""
                raise TrackingError(
                    f"no complete answer within {deadline_s:g} s{way_out}"
                )
            answer = channel.recv() if begun == BEGUN else begun
        except (EOFError, OSError) as error:
            raise TrackingError(
                f"the process that runs MLflow has ended{self._last_words()}"
            ) from error
        finally:
            if (
                answer is None
            ):  # also after Ctrl-C: a later request must not get this one's answer
                self.end()
        return answer  # type: ignore[no-any-return]

    def _last_words(self) -> str:
        if self._running is None:
            return ""
        self._running[2].seek(0)
        lines = self._running[2].read().decode(errors="replace").split("\n")
        return next(
            (f": {line.strip()[:300]}" for line in reversed(lines) if line.strip()), ""
        )

    def end(self) -> None:
        """Ends the process; the next request starts another."""
        if self._running is not None:
            process, channel, said = self._running
            channel.close()
            process.kill()
            process.wait()
            said.close()
            self._running = None


_process = _Process()
atexit.register(_process.end)


def ask(
    function: Callable[..., T],
    tracking: Tracking,
    *arguments: object,
    deadline_s: float | None = None,
) -> T:
    """Calls `function(client, tracking, *arguments)` of `tracking.client` where MLflow runs.

    Relative paths begin at the present working folder; without `deadline_s`, it has `tracking.deadline_s` seconds.

    Raises:
        UsageError: MLflow is not installed; or what the function raises.
        TrackingError: the store cannot be reached, refuses, or was too slow.
    """
    require_mlflow()
    _require_usable(tracking)
    limit = tracking.deadline_s if deadline_s is None else deadline_s
    try:
        answer, notes, error = _process.ask(
            _located(tracking), limit, function, arguments
        )
    except TrackingError as failed:
        answer, notes, error = None, [], failed
    print_problems(notes)
    if isinstance(error, TrackingError):
        raise type(error)(f"{tracking.uri}: {error}")
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]


def start_ahead(tracking: Tracking) -> None:
    """Lets MLflow be imported, which takes seconds, while this process does something else."""
    if tracking.kind == "mlflow" and find_spec("mlflow") is not None:
        _process.start()


def end_process() -> None:
    """Ends the process of MLflow, before something is measured beside it, and where a caller's program goes on."""
    _process.end()


def require_mlflow() -> None:
    """Raises UsageError if mlflow is not installed; call it before measuring."""
    if find_spec("mlflow") is None:
        raise UsageError(
            "tracking.kind=mlflow: mlflow is not installed; pip install mlflow, or choose tracking=none"
        )


def require_store(tracking: Tracking, experiment: str) -> str | None:
    """Checks, before anything is measured, whether a store will take the result of an experiment.

    Returns a warning, if a server does not answer now: it may when the study has ended; or if MLflow's own variables
    name another store or experiment, which are not read. Raises UsageError if only the user can change what is in the way.
    """
    if tracking.kind == "none":
        return None
    require_mlflow()
    _require_usable(tracking)
    file = file_of(tracking)
    try:
        if file is not None and not file.exists():
            _require_folder(file.absolute(), tracking)
        else:
            ask(
                check,
                tracking,
                experiment,
                deadline_s=min(_CHECK_S, tracking.deadline_s),
            )
    except RefusedError as error:
        raise UsageError(
            f"tracking.uri={error}; or log nothing, with tracking=none"
        ) from error
    except TrackingError as error:
        return f"tracking.uri={error}; measuring continues, and `sdopt sync` can log the result later"
    finally:
        end_process()
    warnings = [elsewhere(tracking)]
    for variable in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        named = os.environ.get(variable, experiment)
        if named != experiment:
            warnings.append(
                f"{variable}={named}: is not read, and results go to the experiment {experiment!r}"
            )
    return "; ".join(filter(None, warnings)) or None


def store_of(named: Tracking, recorded: Tracking) -> Tracking:
    """Returns the store of a finished result: what a command names, or else where the result was to be logged."""
    usual = Tracking()
    if (named.kind, named.uri) != (usual.kind, usual.uri):
        return named
    if named.deadline_s == usual.deadline_s:
        return recorded
    return replace(recorded, deadline_s=named.deadline_s)


def elsewhere(tracking: Tracking) -> str | None:
    """Returns a warning if MLflow's own variable names another store than that to which results go."""
    named = os.environ.get("MLFLOW_TRACKING_URI", tracking.uri)
    if tracking.uri != Tracking().uri or named == tracking.uri:
        return None
    return f"MLFLOW_TRACKING_URI={named}: is not read, and results go to {tracking.uri}; tracking.uri={named} uses it"


def _require_folder(file: Path, tracking: Tracking) -> None:
    """Raises RefusedError if a database that is made when there is a result cannot be made in its folder."""
    parent = next(parent for parent in file.parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RefusedError(
            f"{tracking.uri}: {parent} cannot be written: choose another"
        )


def _require_address(tracking: Tracking) -> None:
    """Raises UsageError if `tracking.uri` names no place in which a result is found again."""
    file, problem = file_of(tracking), ""
    if f":{HIDDEN}@" in tracking.uri or f"={HIDDEN}" in tracking.uri:
        problem = "its password is not recorded, and not printed: put it in"
    if (
        not tracking.uri.strip()
        or (file is not None and file.name in ("", ":memory:"))
        or tracking.uri == "sqlite://"
    ):
        problem = "names no database, as sqlite:///outputs/mlflow.db does, and no server, as http://localhost:5000 does"
    if problem:
        raise UsageError(f"tracking.uri={tracking.uri}: {problem}")


def _require_usable(tracking: Tracking) -> None:
    """Raises UsageError for an address that names no store, for what it would ignore, and for tags of sdopt's own."""
    _require_address(tracking)
    if is_server(tracking) and tracking.artifacts not in (None, Tracking().artifacts):
        raise UsageError(
            f"tracking.artifacts={tracking.artifacts}: a tracking server keeps artifacts where it was started to; "
            "leave it out"
        )
    for name in tracking.tags or {}:
        if name.startswith("sdopt.") or name in _own_tags():
            raise UsageError(
                f"tracking.tags: {name} is sdopt's own; choose another name"
            )


def _own_tags() -> set[str]:
    """Returns the tags that runs get from their results: their verdicts, what was measured, and a choice on each axis."""
    axes = set(WORK_SECTIONS)
    for group, option in default_options().items():
        if isinstance(option, str) and group not in SECTION_NAMES:
            axes.add(group)
    return {*OWN_TAGS, *axes}


def _located(tracking: Tracking) -> Tracking:
    """Returns a store whose relative paths are absolute, for the process of MLflow, which began anywhere."""
    file, artifacts = file_of(tracking), tracking.artifacts
    if file is not None:
        head, _, options = tracking.uri.partition("?")
        uri = f"{head.partition(':///')[0]}:///{file.resolve()}" + (
            f"?{options}" if options else ""
        )
        tracking = replace(tracking, uri=uri)
    if artifacts is not None and "://" not in artifacts:
        tracking = replace(
            tracking, artifacts=str(Path(artifacts).expanduser().resolve())
        )
    return tracking


def store_exists(tracking: Tracking) -> bool:
    """Returns whether a store may hold runs: not if its local database is missing, or MLflow is not installed."""
    file = file_of(tracking)
    return find_spec("mlflow") is not None and (file is None or file.is_file())


def sync_command(folder: Path, tracking: Tracking) -> str:
    """Returns the command that logs a result later to the same store."""
    usual = Tracking()
    names = ("uri", "artifacts", "images", "deadline_s")
    values = []
    for name in names:
        value = getattr(tracking, name)
        if value != getattr(usual, name):
            values.append(f"tracking.{name}={'null' if value is None else value}")
    return command_line("sync", folder, *values)


def sync_here(folder: Path, tracking: Tracking) -> str:
    """Returns the command that logs a result to the usual store of this folder; "" where that is the study's own."""
    usual = Tracking().uri
    return (
        ""
        if tracking.uri == usual
        else command_line("sync", folder, f"tracking.uri={usual}")
    )


def shown_by(tracking: Tracking, logged: Logged) -> str:
    """Returns how to view a run: the address of its leaderboard on a tracking server, or the command that opens it."""
    if urlparse(tracking.uri).scheme in ("http", "https"):
        return without_passwords(
            f"{tracking.uri.rstrip('/')}/{_page(logged.experiment)}"
        )
    store = [] if tracking.uri == Tracking().uri else [f"tracking.uri={tracking.uri}"]
    return command_line("ui", *store)


def _page(experiment: str) -> str:
    view = (
        f"workflowType=machine_learning&compareRunsMode=TABLE&viewStateShareKey={VIEW}"
    )
    return f"#/experiments/{experiment}/runs?{view}"


def ui_pages(tracking: Tracking) -> dict[str, str]:
    """Returns the page of each study in MLflow's UI, relative to the site. Raises TrackingError as `ask` does."""
    return {
        name: _page(experiment) for name, experiment in ask(pages, tracking).items()
    }
