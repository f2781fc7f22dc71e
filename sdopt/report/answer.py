"""What every report of a study begins with, as blocks: the answer, the ranking, how to use it, how far to trust it."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group

from sdopt.errors import command_line
from sdopt.record.records import Status
from sdopt.record.verdicts import Verdict
from sdopt.report.blocks import Block, Code, Notes, Prose
from sdopt.report.header import header_of
from sdopt.report.notes import caveats_of, notes_of
from sdopt.report.program import said_of
from sdopt.report.summary import Summary
from sdopt.report.tables import effects_table, quality_table, ranking, shapes_table
from sdopt.report.terminal import shown
from sdopt.statistics.changes import traced_active
from sdopt.statistics.reproduction import published_of
from sdopt.statistics.rows import Row
from sdopt.statistics.words import shortened

_REASONS = 6
"""Number of variants of which a terminal says at once why they are not recommended."""


def answer_blocks(summary: Summary) -> list[Block]:
    """Returns the answer, the ranking, why variants are not recommended, and how to use the best one."""
    notes = Notes([*_reasons(summary.candidates), *summary.notes])
    return [
        Prose(summary.sentence, strong=True),
        ranking(summary),
        notes,
        *use_of(summary),
    ]


def _reasons(rows: Iterable[Row]) -> list[str]:
    """Returns why variants are not recommended; those with the same reason share a line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.because:
            names.setdefault(shortened(row.because), []).append(row.name)
    return [f"{'; '.join(same)}: {reason}" for reason, same in names.items()]


def use_of(summary: Summary) -> list[Block]:
    """Returns how to use the best variant, and how to measure it again; nothing without one."""
    best = summary.best
    if best is None or summary.result.is_imported:
        return []
    blocks: list[Block] = []
    if best.lines:
        purpose = f"To use {best.name} in a pipeline `pipe` of diffusers"
        blocks.append(Code(purpose, best.lines, "python"))
    blocks.append(Notes([said_of(best.variant.program)]))
    if best.command:
        blocks.append(Code("To measure it again", [best.command], "bash"))
    return blocks


def answer_shown(summary: Summary, width: int, folder: Path | None = None) -> Group:
    """Returns what a terminal shows of a study: the answer in its first line, and what bears on it.

    With the run's folder, the last line names the command that shows the rest.
    """
    lines = [
        row
        for row in summary.candidates
        if row.status is not Status.OK
        or row.decision not in (None, Verdict.PASS)
        or row.variant.trips
    ]
    reasons = _reasons(lines)
    more = len(reasons) - _REASONS
    if more > 0:
        reasons[_REASONS:] = [f"{more} more have reasons like these"]
    first, *others = [*caveats_of(summary)] or [""]
    trust = [f"{first} {_verified(summary)}".strip(), *others, *summary.notes]
    timed = any(row.speedup for row in summary.rows)
    tables = (effects_table(summary), None if timed else quality_table(summary))
    if published_of(summary.result):
        trust.append("published.md compares with the article's figures.")
    if folder:
        command = command_line("show", "--all", folder)
        trust.append(f"`{command}` has all figures and reasons.")
    return shown(
        [
            Prose(summary.sentence, strong=True),
            Prose(""),
            ranking(summary),
            *filter(None, tables),
            Notes(reasons),
            *use_of(summary),
            Prose("How far to trust it:"),
            Notes([*filter(None, trust)]),
        ],
        width,
    )


def _verified(summary: Summary) -> str:
    """Returns of how many variants a trace has shown every option that they add; "" of a single one, and of none."""
    baseline = summary.result.baseline_variant
    ran = [row.variant for row in summary.candidates if row.status is Status.OK]
    active = sum(traced_active(variant, baseline) for variant in ran)
    if len(ran) < 2 or not active:
        return ""
    share = f"All {active}" if active == len(ran) else f"{active} of {len(ran)}"
    return f"{share} were verified active in a trace of a call."


def table_blocks(summary: Summary) -> list[Block]:
    """Returns what `table.md` and the note of a run in MLflow hold: the answer, all other tables, and all notes."""
    tables = (
        shapes_table(summary),
        effects_table(summary),
        quality_table(summary, headline=False),
    )
    return [
        *answer_blocks(summary),
        Prose(" · ".join(header_of(summary.result))),
        *filter(None, tables),
        Notes([*notes_of(summary)]),
    ]
