"""Reads the tables that go in and out: `.csv` with a line of names, or `.jsonl` with an object on each line."""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One row of a table; names of columns are in lower case.

    Every method takes several names of a column, of which the first one that the table has counts.
    """

    place: str
    values: dict[str, Any]

    def text(self, *names: str) -> str | None:
        """Returns a text; None where the table has none."""
        found = next((self.values[name] for name in names if self.values.get(name) not in (None, "")), None)
        return None if found is None else str(found)

    def need(self, *names: str) -> str:
        """Returns a text that each row must have. Raises UsageError if it is missing."""
        found = self.text(*names)
        if found is None:
            columns = ", ".join(self.values) or "none"
            raise UsageError(f"{self.place}: no {names[0]}; columns: {columns}")
        return found

    def number(self, *names: str) -> float | None:
        """Returns a finite number; None where the table has none. Raises UsageError if it is something else."""
        found = self.text(*names)
        if found is None:
            return None
        try:
            value = float(found)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UsageError(f"{self.place}: {names[0]} is '{found}', which is not a number")
        return value

    def whole(self, *names: str) -> int | None:
        """Returns a whole number, of any length as seeds are; None where the table has none. Raises UsageError."""
        found = self.text(*names)
        try:
            return None if found is None else int(found)
        except ValueError:
            raise UsageError(f"{self.place}: {names[0]} is '{found}', which is not a whole number") from None


def read_table(file: Path) -> list[Row]:
    """Returns the rows of a table. Raises UsageError if it cannot be read, is empty, or a row has too many values."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"{file}: cannot be read ({reason})") from error
    rows = list(_json_rows(file, text) if file.suffix.lower() == ".jsonl" else _csv_rows(file, text))
    if not rows:
        raise UsageError(f"{file}: has no rows")
    return rows


def _csv_rows(file: Path, text: str) -> list[Row]:
    reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UsageError(f"{file}:{reader.line_num}: {error}") from error
    for line, row in rows:
        if None in row or None in row.values():
            raise UsageError(f"{file}:{line}: has not as many values as there are names; quote values with commas")
    return [Row(f"{file}:{line}", {name.strip().lower(): value for name, value in row.items()}) for line, row in rows]


def _json_rows(file: Path, text: str) -> list[Row]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file}:{number}: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{file}:{number}: is not an object")
        found.append(Row(f"{file}:{number}", {str(name).strip().lower(): value for name, value in row.items()}))
    return found
