"""Reads and writes the files of a run's folder: `result.json`, whole or not at all, and why a job has no result."""

import hashlib
import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from sdopt.errors import (
    ENDINGS,
    UsageError,
    command_line,
    one_line,
    without_passwords,
)
from sdopt.record.records import SCHEMA_VERSION, Status, StudyResult
from sdopt.schema import wrong_name

_ADAPTER = TypeAdapter(StudyResult)


def write_result(result: StudyResult, folder: Path) -> None:
    """Writes `result.json` atomically, so that a reader sees the old or the new one. Raises OSError."""
    write_atomically(folder / "result.json", to_json(result))


def write_at_last(result: StudyResult, folder: Path) -> None:
    """Writes `result.json`; if that fails, writes it to another folder, so that no measurement is lost.

    Raises:
        OSError: the run's folder cannot be written; the message says where the result is, and what to do.
    """
    try:
        write_result(result, folder)
    except OSError as error:
        path = folder / "result.json"
        refuges = [Path(tempfile.gettempdir())]
        with suppress(
            RuntimeError
        ):  # an unknown user, as in containers, may have no home
            refuges.append(Path.home())
        for refuge in refuges:
            saved = refuge / f"sdopt-{result.id}-result.json"
            try:
                write_atomically(saved, to_json(result))
            except OSError:
                continue
            advice = f"the result is in {saved}: make room and move it here"
            break
        else:
            again = command_line("run", f"resume={folder}")
            advice = f"what was measured since its last write is lost: make room and run `{again}`"
        raise OSError(error.errno, f"{error.strerror}; {advice}", str(path)) from error


def to_json(result: StudyResult) -> bytes:
    """Returns the content of `result.json`, without passwords; the same for a result that was read from it."""
    # pydantic would take an exception raised there for an error of its own.
    with _signals_held():
        content = _ADAPTER.dump_json(result, indent=1)
        # The patterns end at white space, and so within a line, which holds one text.
        return (
            without_passwords(content.decode()).encode()
            if b"://" in content
            else content
        )


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delays Ctrl-C and similar signals until the block has ended."""
    held: list[tuple[int, FrameType | None]] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *ENDINGS):
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda *given: held.append(given))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for caught, frame in held:
        handlers[signal.Signals(caught)](caught, frame)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one step. Raises OSError if the folder cannot be written or the disk is full."""
    # A signal between making the temporary file and the block that removes it would leave the file behind.
    with _signals_held():
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=path.name, suffix=".tmp"
        )
        try:
            with os.fdopen(handle, "wb") as stream:
                # Temporary files are private to their owner; the final file gets the usual permissions.
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(handle, 0o666 & ~mask)
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_cached(path: Path, content: bytes) -> None:
    """Writes a file that a later command reads instead of finding it out anew; a home that cannot be written is passed."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def read_result(path: Path) -> StudyResult:
    """Reads a `result.json`, or the one in a run's folder.

    Raises:
        UsageError: there is none, it cannot be read, or its values are impossible; one line says why.
    """
    path = path / "result.json" if path.is_dir() else path
    try:
        return parse_result(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); name a run's folder or its result.json"
        ) from error
    except UsageError as error:
        problems = [POINTER] if is_pointer(path) else error.problems
        raise UsageError([f"{path}: {problem}" for problem in problems]) from error


POINTER = "is a pointer of Git LFS; run `git lfs pull` where it lies"


def short_digest(content: bytes) -> str:
    """Returns 16 hexadecimal digits that tell a content from every other one."""
    return hashlib.sha256(content).hexdigest()[:16]


def is_pointer(file: Path) -> bool:
    """Returns whether a file stands for another, which git fetches only where its extension for large files is."""
    start = b"version https://git-lfs"
    try:
        with file.open("rb") as stream:
            return stream.read(len(start)) == start
    except OSError:
        return False


def parse_result(content: bytes) -> StudyResult:
    """Reads what `to_json` wrote. Every result is read here, wherever it comes from.

    Raises:
        UsageError: it is not a result, another version of the schema wrote it, or its values are impossible.
    """
    try:
        document = from_json(content)
        _require_schema(document)
        result = _ADAPTER.validate_python(document)
    except ValidationError as error:
        raise UsageError(
            f"not a result of schema version {SCHEMA_VERSION}: {first_problem(error)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a result: {error}") from error
    for problem in problems_of(result):
        raise UsageError(f"damaged, or changed by hand: {problem}")
    return result


def first_problem(error: ValidationError) -> str:
    """Returns what is wrong with a file first, and where in it, as in `variants.0.name: Field required`."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def _require_schema(document: Any) -> None:
    """Raises UsageError if a document says that another version of the schema wrote it."""
    version = SCHEMA_VERSION
    if isinstance(document, dict):
        version = document.get("schema_version", version)
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"has schema version {version}, and this sdopt reads {SCHEMA_VERSION}: "
            f"{_writer_of(document)} reads it; or measure it again"
        )


def _writer_of(document: dict[str, Any]) -> str:
    """Returns the version of sdopt that wrote a document of another schema, as far as it says so."""
    environment = document.get("environment")
    if not isinstance(environment, dict) or not environment.get("sdopt_version"):
        return "the sdopt that wrote it"
    commit = environment.get("sdopt_commit")
    at_commit = f" (commit {str(commit)[:12]})" if commit else ""
    return f"sdopt {environment['sdopt_version']}{at_commit} wrote it and"


def problems_of(result: StudyResult) -> Iterator[str]:
    """Yields what is wrong with the names, sessions, shapes and paths of a result, one line each."""
    if wrong := wrong_name(result.name):
        yield f"name={result.name!r}: {wrong}"
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", result.id):
        yield f"id={result.id!r}: not the id of a study"
    names = [row.name for row in result.variants]
    sides = [(edge.candidate, edge.reference) for edge in result.comparisons]
    for name in (result.baseline, *chain.from_iterable(sides)):
        if name not in names:
            yield f"{name}: no variant has this name"
    measured = result.measurements
    sessions = {measurement.session for measurement in measured}
    unknown = (
        sorted(sessions - {*range(len(result.sessions))}) if result.sessions else []
    )
    for number in unknown:
        yield f"sessions: processes are of session {number}, which is not there"
    served = [len(measurement.shapes) for measurement in measured]
    served += [len(comparison.shapes) for comparison in result.comparisons]
    if served and min(served) < len(result.shapes):
        yield f"shapes: the study has {len(result.shapes)}, and a process or a comparison only {min(served)}"
    redrawn = chain.from_iterable(result.redrawn.values())
    trips = chain.from_iterable(row.trips for row in result.variants)
    images = [*result.drawn_images, *redrawn]
    named = [image.path for image in images]
    named += [trip.path for trip in trips if trip.path]
    for path in dict.fromkeys(named):
        if not stays_within(path):
            yield f"images: {path!r}: not a file of the run's folder"


def stays_within(path: str) -> bool:
    """Returns whether a relative path, as text, stays within the folder that it starts from."""
    parts = PurePosixPath(path)
    return (
        path.isprintable()
        and bool(parts.parts)
        and not parts.is_absolute()
        and ".." not in parts.parts
    )


def inside(folder: Path, path: str) -> Path:
    """Returns a file of a run's or a sweep's folder: one that a result names, or a report.

    Raises:
        UsageError: the path leads out of the folder, by itself or by a symbolic link.
    """
    if not stays_within(path) or not (folder / path).resolve().is_relative_to(
        folder.resolve()
    ):
        raise UsageError(f"{folder}: {path!r} is not a file of that folder")
    return folder / path


@dataclass(frozen=True)
class JobError:
    """The reason why a job has no result, as kept in its folder's `error.json`."""

    exit_code: int
    problems: list[str]
    status: Status = Status.FAILED


def write_error(error: JobError, folder: Path) -> None:
    """Writes `error.json`. Raises OSError if the folder cannot be written."""
    write_atomically(
        folder / "error.json", json.dumps(asdict(error), indent=1).encode()
    )


def read_error(folder: Path) -> JobError | None:
    """Returns why the job of a folder has no result; None without an `error.json`.

    Raises:
        UsageError: its `error.json` cannot be read; one line says why.
    """
    file = folder / "error.json"
    if not file.is_file():
        return None
    try:
        return TypeAdapter(JobError).validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise UsageError(f"{file}: cannot be read ({one_line(error)})") from error
