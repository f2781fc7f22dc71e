"""Writes tables of results into a Markdown page, between marks, so that no figure on the page is typed by hand.

A block begins with `<!-- sdopt:table FOLDER -->` and ends with `<!-- sdopt:end -->`; the other kinds are `sdopt:answer`
and `sdopt:plot`, and those of higher rooms. FOLDER holds a result and is relative to the page. What stands between the
marks is replaced.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.report.blocks import Notes
from sdopt.report.header import header_of
from sdopt.report.markdown import escaped, written
from sdopt.report.tables import ranking
from sdopt.statistics.summary import Summary, summary_of
from sdopt.statistics.words import has_intervals, intervals_text, sampling_text

_END = "<!-- sdopt:end -->"
_BLOCK = re.compile(r"^(<!-- sdopt:(?!end )(\S+)(?: (\S+))? -->)$.*?(?=^<!-- sdopt:|\Z)", re.MULTILINE | re.DOTALL)
"""The mark that begins a block, with what follows up to the next mark."""


def embed(page: Path, more: Mapping[str, Callable[[Path], str]]) -> str:
    """Returns the text of a page with each of its blocks written anew.

    Args:
        page: the page.
        more: further kinds of blocks, each with the function that writes it from a folder, and raises UsageError.

    Raises:
        UsageError: the page cannot be read or has no block, a block has no end or an unknown kind, or its result
            cannot be read.
    """
    try:
        whole = page.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{page}: cannot be read as text: {error}") from error
    text = whole.replace("\r\n", "\n")

    def block(found: re.Match[str]) -> str:
        begin, kind, folder = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        where = f"{page}:{line}: {begin}"
        if not text.startswith(_END, found.end()):
            raise UsageError(f"{where} has no {_END} after it")
        if kind not in {*KINDS, *more} or folder is None:
            known = " or ".join(f"<!-- sdopt:{name} FOLDER -->" for name in (*KINDS, *more))
            raise UsageError(f"{where} is not {known}")
        source = page.parent / folder
        content = more[kind](source) if kind in more else KINDS[kind](summary_of(read_result(source)), folder)
        return f"{begin}\n\n{content.strip()}\n\n"

    embedded, count = _BLOCK.subn(block, text)
    if not count:
        raise UsageError(f"{page}: has no block; begin one with <!-- sdopt:table FOLDER --> and end it with {_END}")
    return embedded.replace("\n", "\r\n") if "\r\n" in whole else embedded


def _table(summary: Summary, folder: str) -> str:
    """Returns the ranking of a study, and what was measured and how."""
    result = summary.result
    images = f"{max((len(variant.images) for variant in result.variants), default=0)} images"
    how = ", ".join(filter(None, [sampling_text(result), images, f"gate={result.gate or 'none'}"]))
    return written([ranking(summary), Notes([" · ".join(header_of(result)), f"{how}."])])


def _plot(summary: Summary, folder: str) -> str:
    """Returns a link to the picture that `sdopt run` left beside its result."""
    result = summary.result
    intervals = f", with {intervals_text(result)}" if has_intervals(result) else ""
    return f"![{result.name}: speed-up of each variant{intervals}]({folder}/plot.png)"


KINDS: Mapping[str, Callable[[Summary, str], str]] = {
    "table": _table,
    "answer": lambda summary, _: f"> {escaped(summary.sentence)}",
    "plot": _plot,
}
"""Kinds of blocks, each with the function that writes it."""
