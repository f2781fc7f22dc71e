"""Writes tables of results into a Markdown page, between marks, so that no figure on the page is typed by hand.

A block begins with `<!-- sdopt:table FOLDER -->` and ends with `<!-- sdopt:end -->`; the other kinds are `sdopt:answer`
and `sdopt:plot`. FOLDER holds a result and is relative to the page. What stands between the marks is replaced.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from sdopt.analysis.answer import answer_of
from sdopt.analysis.figures import figures_of
from sdopt.errors import UsageError
from sdopt.report.header import header_of
from sdopt.report.markdown import markdown
from sdopt.report.quality import metric_text, quality_columns, quality_heading
from sdopt.report.rows import row_of, speedup_headings
from sdopt.report.words import compared, has_intervals, intervals_text, sampling_text
from sdopt.results.files import read_result
from sdopt.results.records import StudyResult

_BEGIN = re.compile(r"^<!-- sdopt:(\S+)(?: (\S+))? -->$", re.MULTILINE)
_END = "<!-- sdopt:end -->"


def embed(page: Path) -> str:
    """Returns the text of a page with each of its blocks written anew.

    Raises:
        UsageError: the page cannot be read or has no block, a block has no end or an unknown kind, or its result
            cannot be read.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{page}: cannot be read as text: {error}") from error
    parts, reached = [], 0
    for begin in _BEGIN.finditer(text):
        if begin.group() == _END:
            continue
        line, where = text.count("\n", 0, begin.start()) + 1, begin.group()
        end = text.find(_END, begin.end())
        following = _BEGIN.search(text, begin.end())
        if end < 0 or following is None or following.start() != end:
            raise UsageError(f"{page}:{line}: {where} has no {_END} after it")
        kind, folder = begin.groups()
        if kind not in KINDS or folder is None:
            known = " or ".join(f"<!-- sdopt:{name} FOLDER -->" for name in KINDS)
            raise UsageError(f"{page}:{line}: {where} is not {known}")
        content = KINDS[kind](read_result(page.parent / folder), folder)
        parts += [text[reached : begin.end()], f"\n\n{content.strip()}\n\n"]
        reached = end
    if not parts:
        raise UsageError(f"{page}: has no block; begin one with <!-- sdopt:table FOLDER --> and end it with {_END}")
    return "".join([*parts, text[reached:]])


def _table(result: StudyResult, folder: str) -> str:
    """Returns the header of a study, and a row for each comparison: time, memory, first quality scores, and verdict."""
    answer, rows = answer_of(result), [(figures, row_of(result, figures)) for figures in figures_of(result)]
    metrics = [name for name in quality_columns(result) if name.startswith(("psnr_db", "clip_score"))]
    speedups = speedup_headings([row for _, row in rows])
    cells = []
    for figures, row in rows:
        verdict = answer.on(figures)
        verdict_text = f"**{verdict.worth}**, {verdict.images}" if verdict else str(row.status)
        scores = [metric_text(figures, name) for name in metrics]
        times = [row.speedups.get(heading, "") for heading in speedups]
        cells.append([compared(result, figures), row.latency, *times, row.memory, *scores, verdict_text])
    headings = ["variant", "latency", *speedups, "memory", *map(quality_heading, metrics), "verdict"]
    images = f"{max((len(variant.images) for variant in result.variants), default=0)} images"
    how = ", ".join(filter(None, [sampling_text(result), images, f"gate={result.gate or 'none'}"]))
    return markdown(headings, cells, [" · ".join(header_of(result)), f"{how}."])


def _answer(result: StudyResult, folder: str) -> str:
    return f"> {answer_of(result).sentence}"


def _plot(result: StudyResult, folder: str) -> str:
    """Returns a link to the picture that `sdopt run` left beside its result."""
    intervals = f", with {intervals_text(result)}" if has_intervals(result) else ""
    return f"![{result.name}: speed-up of each variant{intervals}]({folder}/plot.png)"


KINDS: Mapping[str, Callable[[StudyResult, str], str]] = {"table": _table, "answer": _answer, "plot": _plot}
"""Kinds of blocks, each with the function that writes it."""
