"""Checks a result that was read, perhaps from somebody else: what it names must exist, and stay within its folder."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from sdopt.record.records import StudyResult
from sdopt.schema import wrong_name


def problems_of(result: StudyResult) -> Iterator[str]:
    """Yields what is wrong with the names and the paths of a result, one line each."""
    if wrong := wrong_name(result.name):
        yield f"name={result.name!r}: {wrong}"
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", result.id):
        yield f"id={result.id!r}: not the id of a study"
    names = [row.name for row in result.variants]
    sides = [name for edge in result.comparisons for name in (edge.candidate, edge.reference)]
    yield from (f"{name}: no variant has this name" for name in (result.baseline, *sides) if name not in names)
    images = [record.path for row in result.variants for record in row.images]
    images += [record.path for records in result.redrawn.values() for record in records]
    trips = [trip.path for row in result.variants for trip in row.trips if trip.path]
    for path in dict.fromkeys([*images, *trips]):
        if not stays_within(path):
            yield f"images: {path!r}: not a file of the run's folder"


def stays_within(path: str) -> bool:
    """Returns whether a relative path, as text, stays within the folder that it starts from."""
    parts = PurePosixPath(path)
    return path.isprintable() and bool(parts.parts) and not parts.is_absolute() and ".." not in parts.parts
