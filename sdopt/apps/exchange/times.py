"""Reads the times of calls beside images, and holds two tables of them against each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median

from sdopt.apps.exchange.pictures import ImportedRow, columns_of, read_table
from sdopt.apps.exchange.settings import (
    OF_CALLS,
    number_or_word,
    plain_key,
    settings_of,
)
from sdopt.errors import UsageError
from sdopt.record.samples import Call, Measurement, Memory, ShapeSamples

TIMES = "times.csv"

_Key = tuple[int, object, int]
"""What a row is the time of: its replicate, its image, and its number among equal ones."""


@dataclass(frozen=True)
class TimesTable:
    """The times of the calls of a folder; without rows if nobody gives any."""

    file: Path
    rows: list[ImportedRow] = field(default_factory=list)

    def tells(self, name: str) -> bool:
        """Returns whether each call has a number of this name."""
        numbers = [row.number(name) for row in self.rows]
        return bool(numbers) and None not in numbers

    @property
    def images(self) -> int | None:
        """How many images each call made, 1 where nobody tells; None if not all made as many."""
        counts = set(map(_images_of, self.rows))
        return counts.pop() if len(counts) == 1 else None

    @property
    def tells_images(self) -> bool:
        """Whether it says how many images calls made."""
        columns = map(plain_key, columns_of(self.rows))
        return not _AMOUNTS.isdisjoint(columns)

    @property
    def replicates(self) -> dict[int, list[ImportedRow]]:
        """The calls of each process."""
        by_process: dict[int, list[ImportedRow]] = {}
        for row in self.rows:
            replicate = row.whole("replicate") or 0
            by_process.setdefault(replicate, []).append(row)
        return by_process

    @property
    def keys(self) -> list[_Key]:
        """What each row is the time of."""
        keys: list[_Key] = []
        counts: dict[tuple[int, object], int] = {}
        for row in self.rows:
            image = row.text("file")
            shows: object = (row.text("prompt"), row.whole("seed"))
            if image:
                shows = Path(image).stem
            key = (row.whole("replicate") or 0, shows)
            number = counts.get(key, 0)
            keys.append((*key, number))
            counts[key] = number + 1
        return keys


_WARM_UP = frozenset(("warmup", "iswarmup", "coldstart", "iscold"))
"""Columns that tell which calls are of a process that is not warm yet."""

_NO = ("", "0", "false", "no", "none", "nan")


def times_in(folder: Path) -> TimesTable:
    """Returns the times beside a folder's images, without those of calls that warm up.

    Raises:
        UsageError: the table cannot be read; or its first calls are those of warming up by their times, and no column
            says whether they count.
    """
    file = folder / TIMES
    rows = read_table(file) if file.is_file() else []
    if _WARM_UP.isdisjoint(map(plain_key, columns_of(rows))):
        table = TimesTable(file, rows)
        _require_warm(table)
        return table
    return TimesTable(file, [row for row in rows if not _warms_up(row)])


def _warms_up(row: ImportedRow) -> bool:
    words = set()
    for name, value in row.values.items():
        if plain_key(name) in _WARM_UP:
            words.add(number_or_word(value))
    return not words.issubset(_NO)


_ENOUGH, _SLOW = 4, 2.0
"""Calls of a process whose first one may be told from the others; and how many times the slowest of those it takes."""


def _require_warm(table: TimesTable) -> None:
    """Raises UsageError if the first call of each process takes far longer than any later one, as with a compiler."""
    shares = []
    for rows in table.replicates.values():
        first, *later = [_positive(row, "seconds") for row in rows]
        if len(later) >= _ENOUGH - 1:
            shares.append(first / max(later))
    if shares and min(shares) >= _SLOW:
        raise UsageError(
            f"{table.file}: the first call of each process takes {median(shares):.2g} times as long as any later one, "
            "as calls do that warm up or compile: leave it out of the table of each folder; or add a column warmup, "
            "with 1 for calls that do not count and 0 for those that do"
        )


_WHOLE = ("images", "imagespercall", "numimages", "n")

_FACTORS = ("batch", "batchsize", "imagesperprompt", "numimagesperprompt")

_AMOUNTS = frozenset((*_WHOLE, *_FACTORS))
"""Columns of a table of times that tell how many images a call made, or whose product does: one, where nothing is said."""


def _images_of(row: ImportedRow) -> int:
    counts: dict[str, int] = {}
    for name in row.values:
        plain = plain_key(name)
        count = row.whole(name) if plain in _AMOUNTS else None
        if count:
            counts.setdefault(plain, count)
    for name in _WHOLE:
        if name in counts:
            return counts[name]
    return prod(counts.values())


_OF_TIMES = _AMOUNTS | OF_CALLS | {
    "device", "devicememorygib", "gpu", "card", "host", "hostname", "machine", "cpu", "threads", "driver", "cuda",
    "torch", "pytorch", "width", "height", "gpus", "numgpus", "gpucount", "concurrency",
    "powerlimit", "powerlimitw",
}  # fmt: skip
"""Columns of a table of times that tell where calls ran, with which arguments, and how many images each made."""


def unlike_times(
    first: Sequence[ImportedRow],
    rows: Sequence[ImportedRow],
    meant: Sequence[str],
) -> list[str]:
    """Returns in words in which columns on machines, batches and settings two tables of times differ."""
    allowed = set(map(plain_key, meant))
    words = []
    for name in columns_of([*first, *rows]):
        plain = plain_key(name)
        settings = settings_of({name: "1"})
        if plain not in _OF_TIMES and not settings:
            continue
        if plain in allowed or not settings.keys().isdisjoint(meant):
            continue
        mine = _values_of(first, name)
        theirs = _values_of(rows, name)
        if plain in _AMOUNTS:
            mine = mine or _one_image(first, theirs)
            theirs = theirs or _one_image(rows, mine)
        if mine and theirs and mine != theirs:
            baseline = f"(baseline {_listed(mine)})"
            words.append(f"{TIMES}: {name} {_listed(theirs)} {baseline}")
    return words


def untold_images(
    tables: tuple[TimesTable, TimesTable],
    batches: tuple[int, int],
) -> list[str]:
    """Returns in words that nobody knows of how many images times are, beside images that say how many a call made.

    Args:
        tables: of the baseline, and of another folder.
        batches: images of a call that their images tell.
    """
    mine, theirs = batches
    if mine == theirs:
        return []
    for table in tables:
        if not table.rows or table.tells_images:
            return []
    return [
        f"{TIMES}: seconds of calls of {theirs} images (baseline {mine}), or of one image, as a column images would say"
    ]


def names_of_columns(rows: Sequence[ImportedRow]) -> Iterator[str]:
    """Yields the names of columns on machines and batches, which may differ on purpose."""
    for name in columns_of(rows):
        if plain_key(name) in _OF_TIMES:
            yield name


def _one_image(rows: Sequence[ImportedRow], told: Sequence[str]) -> list[str]:
    """Returns how many images calls made whose table says nothing of it, beside one that tells one number; or []."""
    if not rows or len(told) != 1:
        return []
    columns = map(plain_key, columns_of(rows))
    return ["1"] if _AMOUNTS.isdisjoint(columns) else []


def _values_of(rows: Sequence[ImportedRow], name: str) -> list[str]:
    """Returns the different values of a column, of which numbers are alike however they are written."""
    values = set()
    for row in rows:
        value = row.values.get(name)
        if value not in (None, ""):
            values.add(number_or_word(value))
    return sorted(values)


def _listed(values: Sequence[str]) -> str:
    """Returns the first ones of some values in words."""
    further = ["…"] if len(values) > 3 else []
    return " and ".join([*values[:3], *further])


def measurements_of(table: TimesTable, first: TimesTable) -> list[Measurement]:
    """Returns the calls of a folder's table, a process for each replicate; calls of the same image are paired.

    Raises:
        UsageError: the first table has other calls.
    """
    order = {key: number for number, key in enumerate(first.keys)}
    by_process: dict[int, dict[int, ImportedRow]] = {}
    for number, (key, row) in enumerate(zip(table.keys, table.rows, strict=True)):
        if order and key not in order:
            raise UsageError(
                f"{row.place}: {first.file} has no such call; give both the same calls"
            )
        replicate, _, _ = key
        rows = by_process.setdefault(replicate, {})
        rows[order.get(key, number)] = row
    if by_process and order and len(table.rows) != len(order):
        raise UsageError(
            f"{table.file}: has {len(table.rows)} calls, and {first.file} {len(order)}; give both the same calls"
        )
    measurements = []
    for replicate, rows in sorted(by_process.items()):
        samples = _samples_of([row for _, row in sorted(rows.items())])
        process = Measurement(replicate=replicate, shapes=[samples], complete=True)
        measurements.append(process)
    return measurements


def _samples_of(rows: Sequence[ImportedRow]) -> ShapeSamples:
    """Returns the calls of a process in this order, and the most memory that one of them held."""
    calls = []
    peaks_gib = []
    for number, row in enumerate(rows):
        calls.append(Call(_positive(row, "seconds"), number))
        gib = row.number("memory_gib")
        if gib is not None:
            peaks_gib.append(gib)
    memory = Memory(0.0, max(peaks_gib)) if peaks_gib else None
    return ShapeSamples(calls=calls, memory=memory)


def _positive(row: ImportedRow, name: str) -> float:
    value = row.number(name)
    if value is None or value <= 0:
        number = "missing" if value is None else value
        raise UsageError(f"{row.place}: {name} is {number}; it must be above 0")
    return value
