"""Handles the files of a run's folder: checks where they lie, and keeps why a job has no result."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sdopt.errors import UsageError
from sdopt.record.checks import stays_within
from sdopt.record.files import write_atomically
from sdopt.record.records import Status


def inside(folder: Path, path: str) -> Path:
    """Returns a file of a run's or a sweep's folder: one that a result names, or a report.

    Raises:
        UsageError: the path leads out of the folder, by itself or by a symbolic link.
    """
    if not stays_within(path) or not (folder / path).resolve().is_relative_to(folder.resolve()):
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
    write_atomically(folder / "error.json", json.dumps(asdict(error), indent=1).encode())


def read_error(folder: Path) -> JobError | None:
    """Returns why the job of a folder has no result; None without an `error.json`.

    Raises:
        UsageError: its `error.json` cannot be read; one line says why.
    """
    file = folder / "error.json"
    if not file.is_file():
        return None
    try:
        return _ADAPTER.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise UsageError(f"{file}: not a valid error.json: {where}{first['msg']}") from error
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from error


_ADAPTER = TypeAdapter(JobError)
