"""Reads prompts from a file: text, a table or JSON. What could be meant in two ways is refused with the reason."""

import csv
import io
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = (".json", ".jsonl", ".ndjson")

TABLES = (".csv", ".tsv", *JSON)
"""Suffixes of files with columns, or with keys."""

PROMPT_COLUMNS = ("prompt", "prompts", "positive prompt", "caption", "captions", "text", "texts")
"""Names of a column of prompts, in the order in which they are looked up, ignoring case; `_` and `-` are spaces."""

_NEGATIVE_COLUMNS = ("negative prompt", "negative prompts", "negative", "negatives", "neg prompt", "neg")


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
        unused: names of columns, keys or parameters that are not used.
        comments: places of lines that begin with `# `.
        empty: places of rows that hold something, but no prompt.
    """

    prompts: tuple[Prompt, ...]
    unused: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


def read_prompts(path: Path, column: str | None) -> PromptFile:
    """Reads a file, by its suffix: .csv, .tsv, .json, .jsonl or .ndjson; any other as text, with a prompt per line.

    Args:
        path: a file in UTF-8.
        column: the column of prompts; None is the first of `PROMPT_COLUMNS`.

    Raises:
        NoColumn: it has no such column.
        Unreadable: its content is of another kind, damaged, or ambiguous.
        OSError: it cannot be read.
    """
    suffix = path.suffix.lower()
    text = _decoded(path.read_bytes(), suffix)
    try:
        if suffix in JSON:
            return _of_rows(*_json_rows(text, column), column)
        if suffix in TABLES:
            return _of_table(text, "\t" if suffix == ".tsv" else ",", column)
        return _of_text(text)
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except (ValueError, csv.Error) as error:
        raise Unreadable(f"cannot be read as {suffix[1:]} file ({error})") from error


_OTHERS = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip or Excel",
    b"PAR1": "Parquet",
    b"%PDF": "PDF",
    b"\xd0\xcf\x11\xe0": "old Excel",
    b"SQLite format 3\0": "SQLite",
}
"""How files begin that hold no text."""

_OTHER_TEXTS = (".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".rtf", ".parquet", ".xlsx", ".xls", ".ods", ".gz")
"""Suffixes of files whose lines are no prompts."""

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def _decoded(content: bytes, suffix: str) -> str:
    kind = next((kind for start, kind in _OTHERS.items() if content.startswith(start)), None)
    if kind is not None or suffix in _OTHER_TEXTS:
        what = f"a {kind} file" if kind else f"a {suffix} file"
        raise Unreadable(f"is {what}; convert it to .txt, {', '.join(TABLES)}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\n|\r", content[: error.start])) + 1
        other = "; it is UTF-16" if content.startswith(_UTF_16) else ""
        reason = f"line {line} is not valid UTF-8 (byte {content[error.start]:#04x}{other})"
        raise Unreadable(f"cannot be read as text ({reason}); save it as UTF-8") from error


def _lines(text: str) -> list[tuple[int, str]]:
    return list(enumerate(re.split(r"\r\n|\n|\r", text), 1))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().lower()


# ---- tables ---------------------------------------------------------------------------------------------------------

_Row = tuple[str, dict[str, Any]]
"""The place of a row, and its cells by column."""


def _of_rows(
    rows: Sequence[_Row], columns: Sequence[str], column: str | None, comments: Sequence[str] = ()
) -> PromptFile:
    if not rows:
        return PromptFile((), comments=tuple(comments))
    chosen, negative = _column_of(columns, column), _named(columns, _NEGATIVE_COLUMNS)
    negative = None if negative == chosen else negative
    prompts, empty = [], []
    for place, row in rows:
        texts = {name: row.get(name) for name in (chosen, negative) if name is not None}
        if negative is not None and texts[negative] is None:
            texts[negative] = ""
        for name, text in texts.items():
            if not isinstance(text, str):
                raise Unreadable(f"{place} has no text in its column '{name}'")
        if not _stripped(texts[chosen]):
            empty += [place] if any(row.values()) else []
            continue
        prompts.append(Prompt(_stripped(texts[chosen]), place, _stripped(texts[negative]) if negative else None))
    unused = tuple(name or "(unnamed)" for name in columns if name not in (chosen, negative))
    return PromptFile(tuple(prompts), unused, tuple(comments), tuple(empty))


def _stripped(text: Any) -> str:
    return str(text).strip("\ufeff").strip()


def _column_of(columns: Sequence[str], wanted: str | None) -> str:
    """Returns the column of prompts."""
    there = f"the columns are {', '.join(map(_shown, columns))}"
    if wanted is not None:
        if wanted not in columns:
            raise NoColumn(there)
        return wanted
    found = _named(columns, PROMPT_COLUMNS)
    if found is None:
        usual = "prompt or caption or text"
        way_out = "choose one with workload.prompt_column=…, or begin the file with a line that names the columns"
        raise Unreadable(f"no column named {usual}; {there}; {way_out}")
    return found


def _shown(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


_LONGEST_NAME = 40


def _named(columns: Sequence[str], usual: Sequence[str]) -> str | None:
    """Returns the column with the first of some names that is there; None if there is none."""
    for name in usual:
        if len(found := [column for column in columns if _plain(column) == name]) > 1:
            raise Unreadable(f"has {len(found)} columns named {name}; rename those that are not meant")
        if found:
            return found[0]
    return None


_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


def _of_table(text: str, usual: str, column: str | None) -> PromptFile:
    lines = _lines(text)
    # Excel understands, and some programs write, a first line that names the delimiter.
    named = re.fullmatch(r'"?sep=(.)"?', lines[0][1])
    skipped = 1 if named else 0
    while skipped < len(lines) and lines[skipped][1].startswith("# "):
        skipped += 1
    body = re.sub(rf"\A(?:[^\r\n]*(?:\r\n|\n|\r)){{{skipped}}}", "", text)
    likely = [named[1]] if named else [usual, *(other for other in _DELIMITERS if other != usual)]
    headers = {delimiter: _header(body, delimiter) for delimiter in likely}
    fitting = [delimiter for delimiter, cells in headers.items() if _has_prompts(cells, column)]
    delimiter = fitting[0] if fitting else likely[0]
    columns = headers[delimiter]
    rows: list[_Row] = []
    for number, cells in _tab_rows(body, len(columns)) if delimiter == "\t" else _rows(body, delimiter):
        place = f"line {number + skipped}"
        if len(cells) > len(columns) and any(cells[len(columns) :]):
            way_out = "a prompt that holds the separator needs quotes around it"
            raise Unreadable(
                f"{place} has more fields than the header (separated by {_DELIMITERS.get(delimiter, delimiter)}); "
                f"{way_out}"
            )
        if len(cells) < len(columns):
            raise Unreadable(
                f"{place} has fewer fields ({len(cells)}) than the header ({len(columns)}); a line break within a "
                "field needs quotes around it"
            )
        if [cell.strip() for cell in cells] == columns:
            raise Unreadable(f"{place} repeats the header; remove it")
        rows.append((place, dict(zip(columns, cells, strict=False))))
    if len(set(columns)) < len(columns) and rows:
        twice = next(name for name in columns if columns.count(name) > 1)
        raise Unreadable(f"has two columns named {_shown(twice)}; rename one")
    comments = [f"line {number}" for number, line in lines[:skipped] if line.startswith("# ")]
    return _of_rows(rows, columns, column, comments)


def _has_prompts(columns: Sequence[str], wanted: str | None) -> bool:
    return wanted in columns if wanted is not None else any(_plain(name) in PROMPT_COLUMNS for name in columns)


def _header(body: str, delimiter: str) -> list[str]:
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=delimiter, skipinitialspace=True)
    return [name.strip() for name in next((row for row in reader if row), [])]


def _rows(body: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows below the header, each with the number of its first line."""
    # Strict: a misplaced quote would turn the rest of the file into one prompt.
    reader = csv.reader(
        io.StringIO(body, newline=""), delimiter=delimiter, strict=True, skipinitialspace=delimiter != "\t"
    )
    seen, begun = False, 1
    try:
        for cells in reader:
            if seen and cells:
                yield begun, cells
            seen, begun = seen or bool(cells), reader.line_num + 1
    except csv.Error as error:
        raise Unreadable(f"cannot be read as a table (line {begun}: {error})") from error


def _tab_rows(body: str, width: int) -> list[tuple[int, list[str]]]:
    """Returns the rows of a table with tabs. Some files quote as .csv files do (MLPerf's captions), others never do."""
    lines = [(number, line) for number, line in _lines(body) if line.strip()][1:]
    plain = [(number, [_unquoted(cell) for cell in line.split("\t")]) for number, line in lines]
    if '"' not in body:
        return plain
    try:
        quoted = list(_rows(body, "\t"))
    except Unreadable:
        return plain
    whole = [all(len(cells) == width for _, cells in rows) for rows in (plain, quoted)]
    if plain == quoted or whole == [True, False]:
        return plain
    if whole == [True, True]:
        number = next(first[0] for first, second in zip(plain, quoted, strict=False) if first != second)
        raise Unreadable(
            f"line {number} begins with a quote that ends in a later line: is the line break part of the field, or is "
            "each line a row? Save the file as .csv"
        )
    return quoted


def _unquoted(field: str) -> str:
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _json_rows(text: str, column: str | None) -> tuple[list[_Row], list[str]]:
    """Returns the rows of a JSON document, or of a document per line, and all their keys."""
    lines = [(number, line) for number, line in _lines(text) if line.strip()]
    try:
        content = _loads(text)
    except json.JSONDecodeError:
        if not lines:
            return [], []
        if len(lines) == 1 or not _is_json(lines[0][1], (str, dict, list)):
            raise
        items = [(f"line {number}", _loads(line, f"line {number}: ")) for number, line in lines]
        ignored: list[str] = []
    else:
        items, ignored = _items(content, column, f"line {lines[0][0]}" if len(lines) == 1 else "the object")
    rows: list[_Row] = []
    wanted = column or PROMPT_COLUMNS[0]
    for place, item in items:
        if not isinstance(item, str | dict):
            raise Unreadable(f"{place} is not a JSON object or a text")
        if isinstance(item, str) and column is not None:
            raise NoColumn(f"{place} is a text, and has no keys")
        rows.append((place, {wanted: item} if isinstance(item, str) else item))
    columns = dict.fromkeys(str(key) for _, row in rows for key in row)
    return rows, [*columns, *ignored]


def _loads(text: str, where: str = "") -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name in found if [key for key, _ in pairs].count(name) > 1)
            raise Unreadable(f"{where}names the key '{twice}' twice in one object")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        if where:
            raise Unreadable(f"cannot be read as JSON ({where}{error.msg}, column {error.colno})") from error
        raise


def _is_json(text: str, kinds: tuple[type, ...] = (dict, list)) -> bool:
    try:
        return isinstance(json.loads(text), kinds)
    except ValueError:
        return False


def _items(content: Any, column: str | None, whole: str) -> tuple[list[tuple[str, Any]], list[str]]:
    """Returns the prompts in a JSON document, with their places, and the keys that are not used.

    It is a list; an object with a list of prompts under a usual name, or with one list of objects; or a single prompt,
    whose place is `whole`.
    """
    if isinstance(content, list):
        return [(f"item {number}", item) for number, item in enumerate(content, 1)], []
    if not isinstance(content, dict):
        raise Unreadable("holds a single value, and no list of prompts")
    lists = [name for name, value in content.items() if isinstance(value, list)]
    chosen = column if column in lists else _named(lists, PROMPT_COLUMNS)
    if chosen is None:
        rows = [name for name in lists if content[name] and all(isinstance(row, dict) for row in content[name])]
        if not lists or (_has_prompts(list(content), column) and not rows):
            return [(whole, content)] if content else [], []
        if len(rows) != 1:
            raise Unreadable(f"has no key named prompts; the keys with lists are {', '.join(map(_shown, lists))}")
        chosen = rows[0]
    texts, negative = content[chosen], _named(list(content), _NEGATIVE_COLUMNS)
    ignored = [name for name in content if name not in (chosen, negative)]
    given = content.get(negative) if negative else None
    if isinstance(given, list) and len(given) != len(texts):
        raise Unreadable(f"has {len(texts)} prompts and {len(given)} negative prompts")
    items: list[tuple[str, Any]] = []
    for number, text in enumerate(texts, 1):
        item = text
        if isinstance(text, str):
            item = {column or PROMPT_COLUMNS[0]: text}
        if negative and isinstance(item, dict):
            own = given[number - 1] if isinstance(given, list) else given
            item = {_NEGATIVE_COLUMNS[0]: own} | item
        items.append((f"item {number}", item))
    return items, ignored


# ---- text -----------------------------------------------------------------------------------------------------------

_NEGATIVE = re.compile(r"(?:negative(?:[ _]prompts?)?|neg(?:[ _]prompt)?)\s*:\s*", re.IGNORECASE)
_PROMPT = re.compile(r"(?:positive |positive_)?prompt\s*:\s*", re.IGNORECASE)
_STEPS = re.compile(r"Steps: \d+\b")


def _of_text(text: str) -> PromptFile:
    """Reads a prompt per line, or blocks as AUTOMATIC1111's web UI writes them; lines that begin with `# ` are none."""
    lines = [(number, line.strip("\ufeff").strip()) for number, line in _lines(text)]
    _require_text([(number, line) for number, line in lines if line])
    comments = [number for number, line in lines if re.match(r"#+(\s|$)", line)]
    lines = [(number, "" if number in set(comments) else line) for number, line in lines]
    named = tuple(f"line {number}" for number in comments)
    if any(pattern.match(line) for _, line in lines for pattern in (_NEGATIVE, _PROMPT, _STEPS)):
        # A comment between two lines does not part them, as an empty line does.
        found, unused = _of_blocks([(number, line) for number, line in lines if number not in set(comments)])
        return PromptFile(tuple(found), unused, named)
    prompts: list[Prompt] = []
    options: dict[str, None] = {}
    for number, line in lines:
        if line.startswith("--"):
            prompt, other = _of_options(number, line)
            prompts.append(prompt)
            options |= dict.fromkeys(other)
        elif line:
            prompts.append(Prompt(line, f"line {number}"))
    return PromptFile(tuple(prompts), tuple(options), named)


def _require_text(lines: Sequence[tuple[int, str]]) -> None:
    """Raises Unreadable if lines look like those of another kind of file, or of a program's own syntax."""
    if not lines:
        return
    number, first = lines[0]
    if re.match(r"\{\\rtf|<!doctype|<html|<\?xml", first, re.IGNORECASE):
        raise Unreadable("is RTF, HTML or XML; save it as plain text")
    if _is_json(first) or (first[0] in "[{" and _is_json("\n".join(line for _, line in lines))):
        raise Unreadable("is JSON; name it .json or .jsonl")
    for delimiter in _DELIMITERS:
        cells = {_plain(cell.strip('"')) for cell in first.split(delimiter)}
        # Tags may hold the word `text`: then another cell must be one that only a header has.
        header = cells & {*PROMPT_COLUMNS[:3]} or (cells & {*PROMPT_COLUMNS} and cells & _BESIDE_PROMPTS)
        if len(lines) > 1 and header and all(len(cell.split()) <= _NAME_WORDS for cell in cells):
            raise Unreadable(f"line {number} looks like the header of a table ({first}); name it .csv or .tsv")
    for number, line in lines:
        if re.match(r"#[^\s#]|//", line):
            raise Unreadable(f"line {number} begins with '{line[:2]}': write '# ' for a comment; else give a .csv file")
        if re.match(r"(?:negative[ _]?)?prompts?\s*=|(?:prompts|captions|- \w+)\s*:(?:\s|$)", line, re.IGNORECASE):
            raise Unreadable(f"line {number} looks like a setting ({line[:_LONGEST_NAME]}); leave the prompts alone")
        if not line.startswith("--") and (option := re.search(r"\s(--[A-Za-z][\w-]*)(?=[\s=]|$)", line)):
            raise Unreadable(
                f"line {number} holds the option {option[1]}, which sdopt does not read; give a .csv file, with a "
                "column for negative prompts if there are some"
            )


_BESIDE_PROMPTS = {"id", "image id", "image", "file name", "url", "label", "category", "seed", *_NEGATIVE_COLUMNS}

_NAME_WORDS = 3
"""The most words of a column's name, if a line is to be taken for a header."""


def _of_options(number: int, line: str) -> tuple[Prompt, list[str]]:
    """Reads a line of options, such as `--prompt "a cat" --negative_prompt "blurry" --steps 20`."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise Unreadable(f"line {number}: {error}") from error
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            if name in found:
                raise Unreadable(f"line {number} has the option --{name} twice")
            found[name] = value
        elif found[name]:
            raise Unreadable(f"line {number}: '{word}' follows the value of --{name}; put quotes around the whole text")
        else:
            found[name] = word
    prompt, negative = _named(list(found), PROMPT_COLUMNS[:1]), _named(list(found), _NEGATIVE_COLUMNS)
    if prompt is None or not found[prompt].strip():
        raise Unreadable(f"line {number} has options, but no --prompt")
    own = found[negative].strip() if negative else None
    return Prompt(found[prompt].strip(), f"line {number}", own), [
        name for name in found if name not in (prompt, negative)
    ]


@dataclass
class _Block:
    """Lines of one prompt: of its text, of its negative prompt, and of its parameters."""

    begun: int
    text: list[str]
    negative: list[str] | None = None
    parameters: str | None = None


def _of_blocks(lines: Sequence[tuple[int, str]]) -> tuple[list[Prompt], tuple[str, ...]]:
    """Reads blocks of a prompt, `Negative prompt: …` and `Steps: …`, parted by empty lines or by their last line."""
    blocks = _blocks(lines)
    complete = any(block.parameters for block in blocks)
    for block in blocks:
        several = max(len(block.text), len(block.negative or ())) > 1
        if several and block.parameters is None:
            way_out = "put an empty line between prompts"
            raise Unreadable(f"the lines from line {block.begun} on may be one prompt or several; {way_out}")
        if complete and block.parameters is None and block.negative is None:
            raise Unreadable(f"line {block.begun} is neither followed by 'Negative prompt: …' nor by 'Steps: …'")
        if not "".join(block.text).strip():
            raise Unreadable(f"line {block.begun} has no prompt before it")
    names = [name for block in blocks for name in re.findall(r"(?:^|, )(\w[\w ]*): ", block.parameters or "")]
    negatives = [None if block.negative is None else "\n".join(block.negative).strip() for block in blocks]
    prompts = [
        Prompt("\n".join(block.text).strip(), f"line {block.begun}", negative)
        for block, negative in zip(blocks, negatives, strict=True)
    ]
    return prompts, tuple(dict.fromkeys(names))


def _blocks(lines: Sequence[tuple[int, str]]) -> list[_Block]:
    blocks: list[_Block] = []
    block: _Block | None = None
    for number, line in lines:
        if not line:
            block = None
            continue
        label, negative = _PROMPT.match(line), _NEGATIVE.match(line)
        if block is None or label:
            block = _Block(number, [])
            blocks.append(block)
        if negative:
            if block.negative is not None:
                second = f"line {number} is a second negative prompt of the prompt of line {block.begun}"
                raise Unreadable(f"{second}; put an empty line between prompts")
            block.negative = [line[negative.end() :]]
        elif _STEPS.match(line):
            block.parameters, block = line, None
        else:
            (block.text if block.negative is None else block.negative).append(line[label.end() :] if label else line)
    return blocks
