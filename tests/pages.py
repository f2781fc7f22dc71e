"""Writes figures of records into Markdown pages, so that none on a page is typed by hand: `python -m tests.pages`.

The rulings of judged records are written anew, too, in the words that sdopt has for them today.

A block begins with `<!-- sdopt:table FOLDER -->` and ends with `<!-- sdopt:end -->`; FOLDER holds a record and is
relative to the page. What stands between the marks is replaced. Other kinds are `sdopt:answer`, `sdopt:plot`,
`sdopt:tradeoff`, `sdopt:load` for a load test, `sdopt:fits` for what was counted of cards, and `sdopt:tests` for the
tests of gates, of no record. A folder that is not there yet is said to be not measured.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from sdopt.apps.loadtest.record import LoadRecord
from sdopt.apps.loadtest.report import page_table
from sdopt.record.files import read_result
from sdopt.report.blocks import Notes
from sdopt.report.header import header_of
from sdopt.report.markdown import escaped, markdown, written
from sdopt.report.summary import summary_of
from sdopt.report.tables import ranking
from sdopt.report.verdicts import verdict_markdown
from sdopt.schema import TESTS
from sdopt.statistics.words import has_intervals, intervals_text, sampling_text
from tests.apps.foresight import fits

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "sdopt/STUDIES.md",
    "sdopt/gate/README.md",
    "sdopt/apps/serving/README.md",
    "sdopt/apps/foresight/README.md",
)

NOT_MEASURED = "Not measured yet."

_BLOCK = re.compile(r"(?s)(<!-- sdopt:(?!end)(\S+) (\S+) -->)\n.*?(<!-- sdopt:end -->)")


def table(folder: Path) -> str:
    """Returns the ranking of a study, and what was measured and how."""
    result = read_result(folder)
    images = max((len(variant.images) for variant in result.variants), default=0)
    how = ", ".join(
        filter(
            None,
            [
                sampling_text(result),
                f"{images} images",
                f"gate={result.gate or 'none'}",
            ],
        )
    )
    return written(
        [ranking(summary_of(result)), Notes([" · ".join(header_of(result)), f"{how}."])]
    )


def _answer(folder: Path) -> str:
    return f"> {escaped(summary_of(read_result(folder)).sentence)}"


def _plot(folder: Path) -> str:
    result = read_result(folder)
    intervals = f", with {intervals_text(result)}" if has_intervals(result) else ""
    return f"![{result.name}: speed-up of each variant{intervals}]({{folder}}/plot.png)"


def _tradeoff(folder: Path) -> str:
    name = read_result(folder).name
    return f"![{name}: speed-up of each variant against the likeness of its images]({{folder}}/tradeoff.png)"


def _load(folder: Path) -> str:
    return page_table(LoadRecord.read(folder))


def _fits(folder: Path) -> str:
    return written([fits.table(fits.read(folder / fits.COUNTED.name))])


def _tests(_folder: Path) -> str:
    """Returns the tests of a gate's rules, and what each takes."""
    rows = []
    for name, test in TESTS.items():
        keys = [f"`{key}`" for key in test.needs]
        if test.takes:
            keys.append(f"one of {', '.join(f'`{key}`' for key in test.takes)}")
        rows.append((f"`{name}`", test.passes, " and ".join(keys)))
    return markdown(("`test`", "passes if", "takes"), rows)


KINDS: dict[str, Callable[[Path], str]] = {
    "table": table,
    "answer": _answer,
    "plot": _plot,
    "tradeoff": _tradeoff,
    "load": _load,
    "fits": _fits,
    "tests": _tests,
}


def filled(page: Path) -> str:
    """Returns the text of a page with each of its blocks written anew. Raises KeyError for an unknown kind."""

    def block(match: re.Match[str]) -> str:
        begin, kind, folder, end = match.groups()
        write, record = KINDS[kind], page.parent / folder
        content = write(record) if record.is_dir() else NOT_MEASURED
        content = content.replace("{folder}", folder)
        return f"{begin}\n\n{content.strip()}\n\n{end}"

    text, count = _BLOCK.subn(block, page.read_text(encoding="utf-8"))
    assert count, f"{page}: has no block"
    return text


RULINGS = tuple(
    str(file.relative_to(ROOT))
    for file in sorted((ROOT / "outputs" / "records").rglob("verdicts.md"))
)
"""The rulings of judged records, which are written whole."""


def current(name: str) -> str:
    """Returns the text of a page, or of the rulings of a record, as it is to be."""
    page = ROOT / name
    if name in RULINGS:
        return verdict_markdown(summary_of(read_result(page.parent)))
    return filled(page)


def main() -> int:
    """Writes all pages, or with `--check` says which ones are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit with 2 if a page is out of date",
    )
    check = parser.parse_args().check
    stale = {}
    for name in (*PAGES, *RULINGS):
        text = current(name)
        if text != (ROOT / name).read_text(encoding="utf-8"):
            stale[name] = text
    if check:
        print(
            f"out of date: {', '.join(stale)}; run `python -m tests.pages`"
            if stale
            else "the pages are up to date"
        )
        return 2 if stale else 0
    for name, text in stale.items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"{name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
