"""Reads a workload's prompts."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.schema import Model, Workload

_GENERAL = Path(__file__).parent / "general_prompts.txt"


def resolve_prompts(workload: Workload, model: Model) -> tuple[str, ...]:
    """Returns a workload's `prompt_count` prompts from `prompt_start` on; without a file, prompts that suit the model.

    Raises:
        UsageError: the file cannot be read, or holds no prompt from there on.
    """
    source, column = workload.prompts, workload.prompt_column
    if column is not None and (not isinstance(source, str) or Path(source).suffix.lower() not in _TABLES):
        raise UsageError(
            f"workload.prompt_column={column}: workload.prompts={source} has no columns; "
            f"name a file that ends in {', '.join(_TABLES)}"
        )
    if isinstance(source, Sequence) and not isinstance(source, str):
        prompts = [(f"number {number}", str(prompt)) for number, prompt in enumerate(source, 1)]
    elif source == "packaged":
        own = json.loads((PACKAGED / "prompts.json").read_text())["gate"]
        general = _GENERAL.read_text(encoding="utf-8").splitlines()
        prompts = [("", prompt) for prompt in (own if (PACKAGED / model.name).is_dir() else general)]
    else:
        lines = _from_file(str(source), column)
        prompts = [(f"line {number}", text.strip()) for number, text in lines if text.strip()]
    if not prompts:
        raise UsageError(f"workload.prompts={source}: holds no prompt")
    chosen = prompts[workload.prompt_start :][: workload.prompt_count]
    if not chosen:
        raise UsageError(
            f"workload.prompt_start={workload.prompt_start}: must be smaller than the number of prompts, {len(prompts)}"
        )
    for position, prompt in chosen:
        if wrong := _wrong_prompt(prompt):
            named = source if isinstance(source, str) else "[…]"
            raise UsageError(f"workload.prompts={named}: {position} {wrong}")
    return tuple(prompt for _, prompt in chosen)


def _wrong_prompt(prompt: str) -> str | None:
    """Returns why a text cannot be a prompt; None if it can."""
    # Tables, logs and trackers show prompts, and an escape sequence could control the terminal.
    if odd := _CONTROL.search(prompt):
        return f"holds the control character U+{ord(odd[0]):04X}; remove it"
    if len(prompt) > _LONGEST:
        return f"has {len(prompt)} characters, and a prompt may have {_LONGEST}; a text encoder reads some 77 words"
    return None


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

_LONGEST = 10_000

_TABLES = (".csv", ".tsv", ".jsonl")

_COLUMNS = ("prompt", "caption", "text")
"""Names of a column of prompts, in the order in which they are looked up, ignoring case."""


def _from_file(source: str, column: str | None) -> list[tuple[int, str]]:
    """Reads prompts with their line numbers from a table (by its suffix), or from text with one prompt per line."""
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if path.exists() and not path.is_file():
        raise UsageError(f"workload.prompts={source}: not a file; it is read more than once, which a pipe cannot be")
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if suffix == ".jsonl":
                rows = [(number, json.loads(line)) for number, line in enumerate(stream, 1) if line.strip()]
            elif suffix == ".csv":
                # Strict: a misplaced quote would turn the rest of the file into one prompt.
                table = csv.DictReader(stream, strict=True)
                rows = [(table.line_num, row) for row in table]
            elif suffix == ".tsv":
                table = csv.DictReader(stream, dialect="excel-tab", quoting=csv.QUOTE_NONE)
                rows = [(table.line_num, {k: _unquoted(v) for k, v in row.items()}) for row in table]
            else:
                return list(enumerate(re.split(r"\r\n|\n|\r", stream.read()), 1))
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        what = f"{suffix[1:]} file" if suffix in _TABLES else "text"
        raise UsageError(
            f"workload.prompts={source}: cannot be read as {what} ({_reason(error)}); "
            "give 'packaged', a list of prompts, or a file with one prompt per line or a column of them"
        ) from error
    odd = [number for number, row in rows if not isinstance(row, dict)]
    if odd:
        raise UsageError(
            f"workload.prompts={source}: line {odd[0]} is not a JSON object; each line must hold one, as in {{…}}"
        )
    longer = next((number for number, row in rows if None in row), None)
    if longer is not None:
        raise UsageError(
            f"workload.prompts={source}: line {longer} has more fields than the header; "
            "a prompt that holds the separator needs quotes around it"
        )
    chosen = _column_of(source, column, rows[0][1]) if rows else ""
    for number, row in rows:
        if not isinstance(row.get(chosen), str):
            raise UsageError(f"workload.prompts={source}: line {number} has no text in its column '{chosen}'")
    return [(number, row[chosen]) for number, row in rows]


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"line {line} is not valid UTF-8 (byte {error.object[error.start]:#04x})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _unquoted(field: Any) -> Any:
    """Removes the quotes of a .tsv field. Some files quote as .csv does (MLPerf's captions), others never do."""
    quoted = isinstance(field, str) and re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


def _column_of(source: str, wanted: str | None, row: dict[str, Any]) -> str:
    columns = [str(name) for name in row]
    if wanted in columns:
        return str(wanted)
    there = f"the columns are {', '.join(columns)}"
    if wanted is not None:
        raise UsageError(f"workload.prompt_column={wanted}: not in {source}; {there}")
    guesses = [name for usual in _COLUMNS for name in columns if name.strip().lower() == usual]
    if not guesses:
        raise UsageError(
            f"workload.prompts={source}: no column named {' or '.join(_COLUMNS)}; {there}; "
            "choose one with workload.prompt_column=…"
        )
    return guesses[0]
