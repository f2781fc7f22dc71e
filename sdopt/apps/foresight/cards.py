"""Tells for which cards a plan is asked, however they are named, and what is to be said of those names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sdopt.apps.foresight.cpu import (
    known_machine,
    measure_machine,
    sheet_of_cpu,
    threads_of,
)
from sdopt.apps.foresight.names import (
    cards_named,
    generation_assumed,
    nearest_cards,
    of_other_memory,
    other_forms,
    other_memory_kind,
    parsed_name,
    remarks_on_name,
    sold_memory,
    why_out_of_scope,
)
from sdopt.config.composer import HydraComposer
from sdopt.config.groups import data_sheets
from sdopt.config.overrides import key_of
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.schema import Sheet

_CPU = "cpu"

_GROUP = "hardware"

NO_CARD = (
    "no card is named: choose one, as in hardware=rtx4090, or several, as in 'plan.hardware=[t4,l4,rtx4090]'; "
    "hardware=cpu is this machine"
)


Asked = tuple[list[str], list[str]]
"""The cards that a plan is for, as options of the group `hardware`, and what is to be said of their names.

There is no option where the configuration has the card.
"""


def asked_for(names: Sequence[str]) -> Asked:
    """Returns the cards that names mean. A name that means none is said, and leaves the others.

    Raises:
        UsageError: no name means a card.
    """
    sheets = data_sheets()
    cards: dict[str, None] = {}
    notes = []
    problems = []
    for name in names:
        options = [_CPU] if name == _CPU else cards_named(name, sheets)
        if not options:
            problems.append(why_unknown(name))
            continue
        cards |= dict.fromkeys(options)
        if len(options) > 1:
            listed = _with_memory(options, sheets)
            notes.append(f"{name} is the name of several cards: {listed}")
        elif sheet := sheets.get(options[0]):
            assumed = generation_assumed(name, sheet)
            taken = f"{name} is taken for the {sheet.name}: {assumed}"
            notes.append(taken if assumed else "")
        notes += [f"{name}: {remark}" for remark in remarks_on_name(name)]
    if not cards:
        raise UsageError(problems)
    notes += [f"left out: {problem}" for problem in problems]
    for option in cards:
        if sheet := sheets.get(option):
            notes.append(_note_on_forms(option, cards, sheets))
            notes.append(other_memory_kind(option, sheet))
    return [*cards], list(filter(None, notes))


def _with_memory(options: Iterable[str], sheets: Mapping[str, Sheet]) -> str:
    return ", ".join(f"{card} ({sold_memory(sheets[card])} GB)" for card in options)


def _note_on_forms(
    option: str, asked: Collection[str], sheets: Mapping[str, Sheet]
) -> str:
    """Returns which cards are of the same model and have another memory or form; "" without one."""
    others = [other for other in other_forms(option, sheets) if other not in asked]
    if not others:
        return ""
    card = f"{sheets[option].name} of {sold_memory(sheets[option])} GB"
    listed = _with_memory(others, sheets)
    return f"{option} is the {card}; others of this model are {listed}"


def why_unknown(name: str) -> str:
    """Returns why a name means no card, and which ones may be meant."""
    why = why_out_of_scope(name)
    if why:
        return f"{name}: {why}"
    near = nearest_cards(name, data_sheets())
    meant = f"; the nearest are {', '.join(near)}" if near else ""
    changed = "hardware=rtx4090 hardware.sheet.memory_gib=7.6"
    if option := of_other_memory(name, data_sheets()):
        gib = _SEEN * (parsed_name(name).memory or 0)
        changed = f"hardware={option} hardware.sheet.memory_gib={gib:.1f}"
        meant = f" of this memory; the same card is {option}"
    return (
        f"{name}: no data sheet{meant}. `sdopt run --help` lists all cards; one of your own is a nearest card with "
        f"figures changed, as in {changed}"
    )


_SEEN = 0.98
"""Share of the memory that a card is sold with which a program sees."""


def with_known_card(
    overrides: Sequence[str], config_dir: Path | None
) -> tuple[list[str], Asked]:
    """Returns overrides whose card is an option of `hardware`, and the cards that its name means.

    Raises:
        UsageError: the name means no card.
    """
    chosen = [override for override in overrides if key_of(override) == _GROUP]
    name = chosen[-1].partition("=")[2].strip("'\" ") if chosen else ""
    if (
        not name
        or name in options_of(_GROUP, config_dir)
        or "/" in name
        or name.endswith(".yaml")
    ):
        return list(overrides), ([], [])
    changed = any(
        key_of(override).startswith("hardware.sheet") for override in overrides
    )
    if changed and name in data_sheets():
        return list(overrides), ([], [])
    asked = asked_for([name])
    card = dict.fromkeys(chosen, f"{_GROUP}={asked[0][0]}")
    return [card.get(override, override) for override in overrides], asked


def sheets_for(
    composer: HydraComposer, cards: Collection[str], overrides: Sequence[str]
) -> dict[str, Sheet]:
    """Returns the data sheets of the cards to plan for, by option of `hardware`."""
    sheets, hardware = data_sheets(), composer.current.hardware
    if _CPU in cards or (hardware.sheet is None and hardware.device == _CPU):
        threads = threads_of(hardware)
        if known_machine(threads) is None:
            # What this process has measured already was beside other work.
            measure_machine.cache_clear()
        measure_machine(threads)  # again, since other work may have slowed it before
    if cards:
        if _CPU in cards:
            sheets = {**sheets, _CPU: sheet_of_cpu(hardware)}
        return {name: sheets[name] for name in cards}
    if hardware.sheet is None and hardware.device == _CPU:
        return {_CPU: sheet_of_cpu(hardware)}
    if hardware.sheet is None:
        raise UsageError(NO_CARD)
    chosen = next(
        (str(o).partition("=")[2] for o in reversed(overrides) if key_of(o) == _GROUP),
        "",
    )
    # A preset chooses without a word on the command line.
    return {chosen or _option_of(hardware.sheet, sheets): hardware.sheet}


def _option_of(sheet: Sheet, sheets: Mapping[str, Sheet]) -> str:
    return next((name for name, other in sheets.items() if other == sheet), sheet.name)
