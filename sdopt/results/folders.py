"""Keeps in a job's folder why the job has no result."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sdopt.results.files import write_atomically
from sdopt.results.records import Status


@dataclass(frozen=True)
class JobError:
    """Why a job has no result, as it is kept in its folder's `error.json`."""

    exit_code: int
    problems: list[str]
    status: Status = Status.FAILED


def write_error(error: JobError, folder: Path) -> None:
    """Raises OSError where the folder cannot be written."""
    write_atomically(folder / "error.json", json.dumps(asdict(error), indent=1).encode())


def read_error(folder: Path) -> JobError | None:
    """Why the job of a folder has no result; None where it does not say."""
    file = folder / "error.json"
    return JobError(**json.loads(file.read_text())) if file.is_file() else None
