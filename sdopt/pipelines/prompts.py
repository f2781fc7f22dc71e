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
    """Returns a workload's first `prompt_count` prompts; by default those that suit the model.

    Raises:
        UsageError: the file cannot be read or holds no prompt.
    """
    source, column = workload.prompts, workload.prompt_column
    if column is not None and (not isinstance(source, str) or Path(source).suffix.lower() not in _TABLES):
        raise UsageError(
            f"workload.prompt_column={column}: workload.prompts={source} has no columns; "
            f"name a file that ends in {', '.join(_TABLES)}"
        )
    if isinstance(source, Sequence) and not isinstance(source, str):
        prompts = [str(prompt) for prompt in source]
    elif source == "packaged" and not (PACKAGED / model.name).is_dir():
        prompts = _GENERAL.read_text(encoding="utf-8").splitlines()
    elif source == "packaged":
        prompts = json.loads((PACKAGED / "prompts.json").read_text())["gate"]
    else:
        prompts = _from_file(str(source), column)
    if not prompts:
        raise UsageError(f"workload.prompts={source}: holds no prompt")
    return tuple(prompts[: workload.prompt_count])


_TABLES = (".csv", ".tsv", ".jsonl")

_COLUMNS = ("prompt", "caption", "text")
"""Names of a column of prompts, in the order in which they are looked up, ignoring case."""


def _from_file(source: str, column: str | None) -> list[str]:
    """Reads the prompts of a table, by its suffix, or of text with one prompt per line. Skips empty ones."""
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if suffix == ".jsonl":
                rows = [(number, json.loads(line)) for number, line in enumerate(stream, 1) if line.strip()]
            elif suffix == ".csv":
                # Strict: a misplaced quote would make one prompt of the rest of the file.
                table = csv.DictReader(stream, strict=True)
                rows = [(table.line_num, row) for row in table]
            elif suffix == ".tsv":
                table = csv.DictReader(stream, dialect="excel-tab", quoting=csv.QUOTE_NONE)
                rows = [(table.line_num, {k: _unquoted(v) for k, v in row.items()}) for row in table]
            else:
                return [line.strip() for line in stream.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        what = f"{suffix[1:]} file" if suffix in _TABLES else "text"
        raise UsageError(
            f"workload.prompts={source}: cannot be read as {what} ({error}); "
            "give 'packaged', a list of prompts, or a file with one prompt per line or a column of them"
        ) from error
    odd = [number for number, row in rows if not isinstance(row, dict)]
    if odd:
        raise UsageError(
            f"workload.prompts={source}: line {odd[0]} is not a JSON object; each line must hold one, as in {{…}}"
        )
    chosen = _column_of(source, column, rows[0][1]) if rows else ""
    prompts = [(number, row.get(chosen)) for number, row in rows]
    for number, prompt in prompts:
        if not isinstance(prompt, str):
            raise UsageError(f"workload.prompts={source}: line {number} has no text in its column '{chosen}'")
    return [str(prompt).strip() for _, prompt in prompts if str(prompt).strip()]


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
