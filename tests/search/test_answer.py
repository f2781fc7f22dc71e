"""What a search says of each candidate: its figures, and what it costs before its first image."""

import json
from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from sdopt.record.comparisons import BreakEven
from sdopt.report.blocks import Chart
from sdopt.report.page.html import html_page
from sdopt.report.terminal import shown
from sdopt.search.plot import search_plot
from sdopt.search.record import Entry, Fate, SearchRecord
from sdopt.search.report import blocks_of, markdown_of, page_of

EAGER = Entry("layout=channels_last", ["layout=channels_last"], Fate.PASSED, "", 1.1, 1.0, 0.9, 0.5, 0.0, 3)
COMPILED = replace(
    EAGER,
    name="compiler=inductor",
    fate=Fate.WINNER,
    start=BreakEven(32.0, 31.2, 1.0, 310.0),
    recompiles=2.0,
)


def record(*entries: Entry) -> SearchRecord:
    return SearchRecord("search", "folder", "", [], ["latency"], "mse", "Nothing.", list(entries), {}, [], [])


def terminal(found: SearchRecord) -> str:
    written = StringIO()
    Console(file=written, width=80).print(shown(blocks_of(found, brief=True), 80))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def test_the_start_has_a_column_where_it_says_something() -> None:
    assert "| start |" not in markdown_of(record(EAGER))
    assert "| +31.2 s, repaid after 310 images; 2 compiled again later |" in markdown_of(record(COMPILED, EAGER))
    assert " +31.2 s\n" in terminal(record(COMPILED)), "without when it is repaid"
    assert "again later" in terminal(record(replace(COMPILED, start=None)))


@pytest.mark.parametrize("start", [None, BreakEven(32.0, 31.2, 1.0, 310.0)])
def test_a_name_breaks_between_its_options_in_a_narrow_terminal(start: BreakEven | None) -> None:
    options = ["precision=bf16", "layout=channels_last", "caching=guidance_interval"]
    many = replace(EAGER, name=", ".join(options), fate=Fate.NOT_PASSED, low=0.95, high=1.25, start=start)
    lines = terminal(record(many)).splitlines()
    assert max(map(len, lines)) <= 80
    for option in options:
        assert any(option in line for line in lines[:8])
    assert any("1.25]" in line for line in lines[:8])


def test_what_it_costs_is_kept_as_figures() -> None:
    assert '"images": 310.0' in json.dumps(asdict(record(COMPILED)))


def test_the_front_is_joined_in_a_plot_of_its_objectives() -> None:
    fast = replace(EAGER, name="fast", speedup=1.5, memory_gib=1.0, on_front=True)
    small = replace(EAGER, name="small", memory_gib=0.2, on_front=True)
    drawn = search_plot(replace(record(fast, small), objectives=["latency", "memory"]))
    assert drawn is not None
    assert b"fast" in html_page(page_of(record(fast, small), [Chart([("", drawn)])]))
    assert drawn != search_plot(replace(record(replace(fast, on_front=False), small), objectives=["latency", "memory"]))
