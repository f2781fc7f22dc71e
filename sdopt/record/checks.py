"""Checks a result that was read for impossible values: it may be damaged, edited by hand, or not to be trusted."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import StudyResult
from sdopt.record.samples import Measurement
from sdopt.schema import out_of_range, wrong_label, wrong_name


def problems_of(result: StudyResult) -> Iterator[str]:
    """Yields the impossible values of a result, one line each, with their path."""
    if wrong := wrong_name(result.name):
        yield f"name={result.name!r}: {wrong}"
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", result.id):
        yield f"id={result.id!r}: not the id of a study"
    if not {"name", "type"} <= result.environment.device.keys():
        yield "environment.device: lacks the name or the type of the device"
    for key, moment in (("started", result.started), ("finished", result.finished)):
        if moment is not None and not _is_moment(moment):
            yield f"{key}={moment!r}: not a date with a time"
    yield from _config_problems(result.config, "config")
    yield from _variant_problems(result)
    yield from _reference_problems(result)
    yield from _path_problems(result)


def _variant_problems(result: StudyResult) -> Iterator[str]:
    if not result.variants:
        yield "variants: must not be empty"
    seen = set()
    for index, row in enumerate(result.variants):
        if wrong := wrong_label(row.name):
            yield f"variants.{index}.name={row.name!r}: {wrong}"
        if row.name in seen:
            yield f"variants.{index}.name={row.name}: another variant has this name"
        seen.add(row.name)
        yield from _config_problems(row.config, f"variants.{index}.config")
        if len(result.shapes) > 1 and row.config.shapes != result.shapes:
            yield f"variants.{index}.config.workload: has other shapes than the study"
        for number, measurement in enumerate(row.measurements):
            if wrong := _wrong_process(measurement, len(row.config.shapes), len(result.sessions)):
                yield f"variants.{index}.measurements.{number}.{wrong}"


def _wrong_process(measurement: Measurement, shapes: int, sessions: int) -> str | None:
    """Returns what is wrong with the samples of a process, at any shape."""
    if len(measurement.shapes) != shapes:
        return "shapes: needs one entry for each shape of the workload"
    if not 0 <= measurement.session < max(sessions, 1):
        return "session: no session has this number"
    return None


def _is_moment(text: str) -> bool:
    """Returns whether a text is a date that a tracker can be given."""
    try:
        datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return False
    return True


def _reference_problems(result: StudyResult) -> Iterator[str]:
    """Yields the references to variants that do not exist."""
    names = {row.name for row in result.variants}
    if result.variants and result.baseline not in names:
        yield f"baseline={result.baseline}: no variant has this name"
    for index, edge in enumerate(result.comparisons):
        if len(edge.shapes) != len(result.shapes):
            yield f"comparisons.{index}.shapes: needs one entry for each shape of the workload"
        for side in ("candidate", "reference"):
            if (name := getattr(edge, side)) not in names:
                yield f"comparisons.{index}.{side}={name}: no variant has this name"


def _path_problems(result: StudyResult) -> Iterator[str]:
    """Yields the paths of images that do not stay within the run's folder; `inside` also looks at links."""
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


def _config_problems(config: RecordedConfig, path: str) -> Iterator[str]:
    """Yields what is wrong with a configuration; a model's name is also that of its folder in sdopt."""
    if wrong := wrong_name(config.model.name):
        yield f"{path}.model.name={config.model.name!r}: {wrong}"
    yield from _values_out_of_range(config, path)


def _values_out_of_range(section: Any, path: str) -> Iterator[str]:
    """Yields the keys of a dataclass, and of dataclasses in it, whose values are outside their declared ranges."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _values_out_of_range(value, f"{path}.{field.name}")
        elif value is None and field.type is Any and field.default is not None:
            yield f"{path}.{field.name}: must not be null"
        elif wrong := out_of_range(value, field.metadata):
            yield f"{path}.{field.name}={value}: {wrong}"
