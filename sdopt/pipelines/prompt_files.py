"""Reads prompts from a file: text, a table or JSON. What could be meant in two ways is refused with the reason."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sdopt.errors import some_of
from sdopt.text_files import NotUtf8Error, decoded

JSON = (".json", ".jsonl", ".ndjson")

TABLES = (".csv", ".tsv", *JSON)
"""Suffixes of files with columns, or with keys."""

_PROMPT_COLUMNS = (
    "prompt",
    "prompts",
    "positive prompt",
    "caption",
    "captions",
    "text",
    "texts",
)
"""Names of a column of prompts, in the order in which they are looked up, ignoring case; `_` and `-` are spaces."""

_NEGATIVE_COLUMNS = (
    "negative prompt",
    "negative prompts",
    "negative",
    "negatives",
    "neg prompt",
    "neg",
)

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}

_OTHERS = (
    ".yaml",
    ".yml",
    ".toml",
    ".xml",
    ".html",
    ".htm",
    ".rtf",
    ".parquet",
    ".xlsx",
    ".xls",
    ".ods",
    ".gz",
)
"""Suffixes of files whose lines are no prompts."""


class Unreadable(Exception):  # noqa: N818 (a reason, which becomes part of a UsageError)
    """Why a file is no list of prompts."""


class NoColumn(Unreadable):
    """The file has no column of the name that the user gave; the text lists those that it has."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and where it is in its file; `negative` is None if the file has no negative prompts."""

    text: str
    place: str
    negative: str | None = None


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, and what else it holds.

    Attributes:
        prompts: those that are not empty.
        unused: names of columns or keys that are not used.
        comments: places of lines that begin with `# `.
        empty: places of rows that hold something, but no prompt.
    """

    prompts: tuple[Prompt, ...]
    unused: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


_Row = tuple[str, dict[str, Any]]
"""The place of a row, and its cells by column."""


def read_prompts(path: Path, column: str | None) -> PromptFile:
    """Reads a file, by its suffix: .csv, .tsv, .json, .jsonl or .ndjson; any other as text, with a prompt per line.

    Raises:
        NoColumn: it has no such column.
        Unreadable: its content is of another kind, damaged, or ambiguous.
        OSError: it cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix in _OTHERS:
        raise Unreadable(f"is a {suffix} file; convert it to .txt, {', '.join(TABLES)}")
    try:
        text = decoded(path.read_bytes())
    except NotUtf8Error as error:
        raise Unreadable(str(error)) from error
    try:
        if suffix not in TABLES:
            return _of_text(text)
        return _of_rows(
            _json_rows(text, column)
            if suffix in JSON
            else _table_rows(text, suffix, column),
            column,
            blank=suffix not in JSON,
        )
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except (ValueError, csv.Error) as error:
        raise Unreadable(f"cannot be read as {suffix[1:]} file ({error})") from error


def _lines(text: str) -> list[tuple[int, str]]:
    return list(enumerate(re.split(r"\r\n|\n|\r", text), 1))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().lower()


def _shown(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def _all_shown(names: Sequence[str]) -> str:
    return some_of(list(map(_shown, names)), _MOST_NAMES)


_LONGEST_NAME, _MOST_NAMES = 40, 12


# ---- tables and JSON ------------------------------------------------------------------------------------------------


def _of_rows(rows: Sequence[_Row], column: str | None, blank: bool) -> PromptFile:
    """Returns the prompts of rows; `blank` says whether rows of nothing at all mean nothing, as in a spreadsheet."""
    columns = list(dict.fromkeys(chain.from_iterable(row for _, row in rows)))
    if not columns:
        return PromptFile(())
    chosen, negative = _column_of(columns, column), _named(columns, _NEGATIVE_COLUMNS)
    negative = None if negative == chosen else negative
    prompts, empty = [], []
    for place, row in rows:
        text, negative_text = (
            row.get(chosen),
            (row.get(negative) or "") if negative else None,
        )
        for name, value in ((chosen, text), (negative, negative_text or "")):
            if not isinstance(value, str):
                raise Unreadable(f"{place} has no text in its column '{name}'")
        if not _stripped(text):
            empty += [place] if any(row.values()) or not blank else []
            continue
        prompts.append(
            Prompt(
                _stripped(text),
                place,
                None if negative_text is None else _stripped(negative_text),
            )
        )
    unused = tuple(
        name or "(unnamed)" for name in columns if name not in (chosen, negative)
    )
    return PromptFile(tuple(prompts), unused, empty=tuple(empty))


def _stripped(text: Any) -> str:
    return str(text).strip("\ufeff").strip()


def _column_of(columns: Sequence[str], wanted: str | None) -> str:
    """Returns the column of prompts."""
    there = f"the columns are {_all_shown(columns)}"
    if wanted is not None:
        if wanted not in columns:
            raise NoColumn(there)
        return wanted
    named = _named(columns, _PROMPT_COLUMNS)
    if named is None:
        usual = "prompt or caption or text"
        way_out = "choose one with workload.prompt_column=…, or begin the file with a line that names the columns"
        raise Unreadable(f"no column named {usual}; {there}; {way_out}")
    return named


def _named(columns: Sequence[str], usual: Sequence[str]) -> str | None:
    """Returns the column with the first of some names that is there; None if there is none."""
    for name in usual:
        if (
            len(matching := [column for column in columns if _plain(column) == name])
            > 1
        ):
            raise Unreadable(
                f"has {len(matching)} columns named {name}; rename those that are not meant"
            )
        if matching:
            return matching[0]
    return None


def _table_rows(text: str, suffix: str, column: str | None) -> list[_Row]:
    usual = "\t" if suffix == ".tsv" else ","
    headers = {mark: _header(text, mark) for mark in (usual, *_DELIMITERS)}
    named = {column} if column is not None else {*_PROMPT_COLUMNS}
    of = str if column is not None else _plain
    delimiter = next(
        (mark for mark, cells in headers.items() if named & {*map(of, cells)}), usual
    )
    columns = headers[delimiter]
    if not columns:
        return []
    _column_of(
        columns, column
    )  # before its rows, which are not a table's if it has none
    # Spreadsheets save empty columns, too.
    if twice := next(
        (name for name in columns if name and columns.count(name) > 1), None
    ):
        raise Unreadable(f"has two columns named {_shown(twice)}; rename one")
    rows: list[_Row] = []
    for number, cells in (
        _tab_rows(text, len(columns)) if delimiter == "\t" else _rows(text, delimiter)
    ):
        place = f"line {number}"
        if any(cells[len(columns) :]):
            raise Unreadable(
                f"{place} has more fields than the header (separated by {_DELIMITERS[delimiter]}); a prompt that holds "
                "the separator needs quotes around it"
            )
        if len(cells) < len(columns):
            raise Unreadable(
                f"{place} has fewer fields ({len(cells)}) than the header ({len(columns)}); a line break within a "
                "field needs quotes around it"
            )
        rows.append((place, dict(zip(columns, cells, strict=False))))
    return rows


def _header(text: str, delimiter: str) -> list[str]:
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True
    )
    first: list[str] = next(filter(None, reader), [])
    return [name.strip() for name in first]


def _rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows below the header, each with the number of its first line."""
    # Strict: a misplaced quote would turn the rest of the file into one prompt.
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        strict=True,
        skipinitialspace=delimiter != "\t",
    )
    seen, begun = False, 1
    try:
        for cells in reader:
            if seen and cells:
                yield begun, cells
            seen, begun = seen or bool(cells), reader.line_num + 1
    except csv.Error as error:
        raise Unreadable(
            f"cannot be read as a table (line {begun}: {error})"
        ) from error


def _tab_rows(text: str, width: int) -> list[tuple[int, list[str]]]:
    """Returns the rows of a table with tabs. Some files quote as .csv files do (MLPerf's captions), others never do."""
    lines = [(number, line) for number, line in _lines(text) if line.strip()][1:]
    plain = [(number, list(map(_unquoted, line.split("\t")))) for number, line in lines]
    try:
        quoted = list(_rows(text, "\t"))
    except Unreadable:
        return plain
    plain_is_whole = all(len(cells) == width for _, cells in plain)
    quoted_is_whole = all(len(cells) == width for _, cells in quoted)
    if plain == quoted or (plain_is_whole and not quoted_is_whole):
        return plain
    if plain_is_whole:
        number = next(
            first[0]
            for first, second in zip(plain, quoted, strict=False)
            if first != second
        )
        raise Unreadable(
            f"line {number} begins with a quote that ends in a later line: is the line break part of the field, or is "
            "each line a row? Save the file as .csv"
        )
    return quoted


def _unquoted(field: str) -> str:
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


def _json_rows(text: str, column: str | None) -> list[_Row]:
    """Returns the rows of a JSON document, which is a list or has one under a usual name, or of a document per line."""
    lines = [(number, line) for number, line in _lines(text) if line.strip()]
    beside: dict[str, Any] = {}
    if not lines:
        return []
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        if len(lines) == 1 or not _is_json(lines[0][1], (str, dict, list)):
            raise
        items = [(f"line {number}", _loads(line, number)) for number, line in lines]
    else:
        if isinstance(content, dict) and any(
            isinstance(value, list) for value in content.values()
        ):
            chosen = column or _named([*content], _PROMPT_COLUMNS)
            if chosen is None or not isinstance(content.get(chosen), str):
                content, beside = _list_in(content)
        listed = isinstance(content, list)
        items = (
            [(f"item {n}", item) for n, item in enumerate(content, 1)]
            if listed
            else [(f"line {lines[0][0]}", content)]
        )
    rows: list[_Row] = []
    for place, item in items:
        if not isinstance(item, str | dict):
            raise Unreadable(f"{place} is not a JSON object or a text")
        if isinstance(item, str) and column is not None:
            raise NoColumn(f"{place} is a text, and has no keys")
        row = {_PROMPT_COLUMNS[0]: item} if isinstance(item, str) else item
        rows.append((place, _beside(row, beside)))
    return rows


def _beside(row: dict[str, Any], all_rows: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with what counts for all; its own negative prompt comes first, also under another name."""
    mine, common = (_named([*keys], _NEGATIVE_COLUMNS) for keys in (row, all_rows))
    if mine is not None and common is not None:
        row = {common if name == mine else name: row[name] for name in row}
    return all_rows | row


def _list_in(content: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the one list of prompts in a JSON object, and what is beside it: a negative prompt counts for all."""
    chosen = _named(list(content), _PROMPT_COLUMNS)
    beside = {name: value for name, value in content.items() if name != chosen}
    lists = [name for name, value in beside.items() if isinstance(value, list)]
    unclear = (
        _named(list(beside), _PROMPT_COLUMNS) is not None
        or _named(lists, _NEGATIVE_COLUMNS) is not None
    )
    if chosen is None or not isinstance(content[chosen], list) or unclear:
        raise Unreadable(
            f"is an object with the keys {_all_shown([*content])}; write a list of objects, as in "
            '[{"prompt": "…", "negative_prompt": "…"}]'
        )
    return list(content[chosen]), beside


def _loads(line: str, number: int) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Unreadable(
            f"cannot be read as JSON (line {number}: {error.msg}, column {error.colno})"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object, of which Python would keep the last of two values with one key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Unreadable(
            f"has an object with two keys named {_shown(twice)}; rename one"
        )
    return values


def _is_json(text: str, kinds: tuple[type, ...] = (dict, list)) -> bool:
    try:
        return isinstance(json.loads(text), kinds)
    except ValueError:
        return False


# ---- text -----------------------------------------------------------------------------------------------------------

_ELSEWHERE = "give a .csv file, with a column for negative prompts if there are some"

_NO_PROMPTS = {
    r"#[^\s#]|//": "begins as a comment or as a tag: write '# ' for a comment; else give a .csv file",
    r"(?:positive |negative)?[ _]?prompts?\s*[=:]|(?:captions|- \w+)\s*:(?:\s|$)|neg(?:ative)?\s*:|Steps: \d+\b": (
        f"looks like a setting; {_ELSEWHERE}"
    ),
    r"\[\s*(['\"]|$)": "begins a list; save it as .json, with double quotes and no comma before the last bracket",
    r"version https://git-lfs": "is a pointer of Git LFS; fetch the file itself with git lfs pull",
    r"/imagine\b": f"is a command of another program; {_ELSEWHERE}",
    r"(?:.*\s)?--[A-Za-z][\w-]*(?:[\s=]|$)": f"holds an option, which sdopt does not read; {_ELSEWHERE}",
    r"\{\\rtf|<!doctype|<html|<\?xml": "is RTF, HTML or XML; save it as plain text",
}
"""What lines begin with that are those of another kind of file or of a program's own syntax, and the way out."""

_BESIDE_PROMPTS = {
    "id",
    "image id",
    "image",
    "file name",
    "url",
    "label",
    "category",
    "seed",
    *_NEGATIVE_COLUMNS,
}

_NAME_WORDS = 3
"""The most words of a column's name, if a line is to be taken for a header."""


def _of_text(text: str) -> PromptFile:
    """Reads a prompt per line; empty lines, and those that begin with `# `, are none."""
    lines = [(number, line.strip("\ufeff").strip()) for number, line in _lines(text)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        return PromptFile(())
    if _is_json(lines[0][1]) or (lines[0][1][0] in "[{" and _is_json(text)):
        raise Unreadable("is JSON; name it .json or .jsonl")
    _require_no_header(*lines[0], len(lines))
    comments = [number for number, line in lines if re.match(r"#+(\s|$)", line)]
    prompts = [(number, line) for number, line in lines if number not in comments]
    for number, line in prompts:
        for pattern, reason in _NO_PROMPTS.items():
            if re.match(pattern, line, re.IGNORECASE):
                raise Unreadable(f"line {number} ({_shown(line)}) {reason}")
    return PromptFile(
        tuple(Prompt(line, f"line {number}") for number, line in prompts),
        comments=tuple(f"line {number}" for number in comments),
    )


def _require_no_header(number: int, first: str, lines: int) -> None:
    for delimiter in _DELIMITERS:
        cells = {_plain(cell.strip('"')) for cell in first.split(delimiter)}
        # Tags may hold the word `text`: then all cells, or another one, must be such as only a header has.
        header = cells & {*_PROMPT_COLUMNS[:3]} or (
            cells & {*_PROMPT_COLUMNS}
            and (cells & _BESIDE_PROMPTS or cells <= {*_PROMPT_COLUMNS})
        )
        if (
            lines > 1
            and header
            and all(len(cell.split()) <= _NAME_WORDS for cell in cells)
        ):
            raise Unreadable(
                f"line {number} looks like the header of a table ({first}); name it .csv or .tsv"
            )
