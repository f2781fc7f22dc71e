"""What generated files say of the records in `outputs/records`: who adds a record writes them anew.

`.ci/run` makes the whole of `conf/MATRIX.md` to compare it; what of it follows from records alone is looked up here.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import product

from sdopt.apps.suite.outcomes import Standing
from sdopt.config.groups import data_sheets
from sdopt.search.expectation import RECORDED
from tests.matrix import Key, label_of, shown_in
from tests.reference import MATRIX_PAGE, columns, expected_speedups, records

WRITE = "run python -m tests.reference"

Stated = dict[tuple[Key, str], tuple[str, str]]
"""The state of an option with a model and a task, and the note that says why, by the device."""


def stated() -> Stated:
    """Returns what the page says, by the names that records give to devices."""
    sheets = data_sheets()
    devices = [label_of(d.type, d.name, sheets) for d in columns().values()]
    page = MATRIX_PAGE.read_text()
    notes = dict(re.findall(r"^(\d+)\. (.+)$", page, re.MULTILINE))
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if "| `" in line[:3]]
    all_models = named(row[1] for row in rows)
    all_tasks = named(row[2] for row in rows)
    said: Stated = {}
    for choice, models, tasks, *states in rows:
        group, _, option = choice.strip("`").partition("=")
        for model, task in product(
            named([models]) or all_models, named([tasks]) or all_tasks
        ):
            for device, state in zip(devices, states, strict=True):
                word, _, number = state.rstrip(")").partition(" (")
                key = (group, option, model, task)
                said[key, device] = word, notes.get(number, "")
    return said


def named(cells: Iterable[str]) -> set[str]:
    """Returns the models, or the tasks, that some cells name; none for `all`."""
    return set(", ".join(cells).split(", ")) - {"all"}


def shown() -> Iterator[tuple[tuple[Key, str], Standing, str]]:
    """Yields what records show: the option, its model and task, and the device; the standing, and why."""
    for key, by_device in shown_in(records(), data_sheets()).items():
        for device, outcome in by_device.items():
            yield (key, device), outcome.standing, outcome.why


def test_the_matrix_says_what_records_show() -> None:
    said = stated()
    for place, standing, why in shown():
        # Of models and cards that the page has no place for, it says nothing.
        if place not in said or said[place][0] == Standing.IMPOSSIBLE:
            continue
        word, note = said[place]
        assert word == standing, f"{MATRIX_PAGE}: {place} is {standing}: {WRITE}"
        if standing is not Standing.TOOK_EFFECT:
            assert note == why, f"{MATRIX_PAGE}: {place}: {WRITE}"


def test_the_matrix_says_nothing_that_no_record_shows() -> None:
    known = {place for place, _, _ in shown()}
    for place, (word, _) in stated().items():
        if word not in (Standing.NOT_MEASURED, Standing.IMPOSSIBLE):
            assert place in known, f"{MATRIX_PAGE}: {place} is {word}: {WRITE}"


def test_the_recorded_speedups_are_those_of_the_records() -> None:
    assert RECORDED.read_text() == expected_speedups(), WRITE
