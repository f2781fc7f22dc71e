"""Reads and writes `result.json`, whole or not at all."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from sdopt.errors import ENDINGS, UsageError, command_line, without_passwords
from sdopt.record.checks import problems_of
from sdopt.record.records import SCHEMA_VERSION, StudyResult

_ADAPTER = TypeAdapter(StudyResult)


def write_result(result: StudyResult, folder: Path) -> Path:
    """Writes `result.json` atomically, so that a reader sees the old or the new one. Raises OSError."""
    path = folder / "result.json"
    write_atomically(path, to_json(result))
    return path


def write_at_last(result: StudyResult, folder: Path) -> None:
    """Writes `result.json`; if that fails, writes it to another folder, so that no measurement is lost.

    Raises:
        OSError: the run's folder cannot be written; the message says where the result is, and what to do.
    """
    try:
        write_result(result, folder)
    except OSError as error:
        path = folder / "result.json"
        for refuge in _refuges():
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


def _refuges() -> Iterator[Path]:
    """Yields folders for a result whose own folder cannot be written."""
    yield Path(tempfile.gettempdir())
    with suppress(RuntimeError):  # an unknown user, as in containers, may have no home
        yield Path.home()


def to_json(result: StudyResult) -> bytes:
    """Returns the content of `result.json`, without passwords; the same for a result that was read from it."""
    # pydantic would take an exception raised there for an error of its own.
    with _signals_held():
        content = _ADAPTER.dump_json(result, indent=1)
        # The patterns end at white space, and so within a line, which holds one text.
        return without_passwords(content.decode()).encode() if b"://" in content else content


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
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
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
        raise UsageError([f"{path}: {problem}" for problem in error.problems]) from error


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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"not a result of schema version {SCHEMA_VERSION}: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a result: {error}") from error
    for problem in problems_of(result):
        raise UsageError(f"damaged, or changed by hand: {problem}")
    return result


def _require_schema(document: Any) -> None:
    """Raises UsageError if a document says that another version of the schema wrote it."""
    version = document.get("schema_version", SCHEMA_VERSION) if isinstance(document, dict) else SCHEMA_VERSION
    if version == SCHEMA_VERSION:
        return
    environment = document.get("environment")
    wrote = environment.get("sdopt_version") if isinstance(environment, dict) else None
    raise UsageError(
        f"has schema version {version}, and this sdopt reads {SCHEMA_VERSION}: read it with the sdopt that wrote it "
        f"({wrote}), or measure again"
    )
