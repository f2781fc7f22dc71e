"""Shows what a study would measure, compare and skip."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sdopt.record.choices import listed
from sdopt.record.records import StudyResult
from sdopt.statistics.words import gib_text
from sdopt.study.designs import difference
from sdopt.study.forecast import Forecast


def show_plan(result: StudyResult, expected: Forecast, console: Console) -> None:
    """Prints the variants of a plan, conflicts of those that cannot run, the comparisons, and the expected effort."""
    environment = result.environment
    # A planned device comes from a data sheet, which names no driver; a real one has a driver.
    planned = environment.sheet is not None and environment.device["driver"] is None
    where = f" on {environment.device['name']}, by its data sheet" if planned else ""
    table = Table(title=escape(f"{result.name}: what would be measured{where}"), title_justify="left")
    for heading in ("variant", "choices beyond the defaults", "contract", "would run?"):
        table.add_column(heading)
    baseline = result.variant(result.baseline).choices
    for row in result.variants:
        chosen = listed(difference(row.choices, baseline))
        table.add_row(escape(row.name), escape(chosen), row.contract, "no" if row.reason else "yes")
    console.print(table)
    if len(result.shapes) > 1:
        console.print(f"each process is timed at {'; '.join(map(str, result.shapes))}", highlight=False, soft_wrap=True)
    for row in result.variants:
        if row.reason:
            console.print(f"  {row.name}: no: {row.reason}", markup=False, highlight=False, soft_wrap=True)
    edges = Table(title="what would be compared", title_justify="left")
    for heading in ("candidate", "against", "measures"):
        edges.add_column(heading)
    for edge in result.comparisons:
        measures = "how far two equal variants differ" if result.variant(edge.candidate).is_control else edge.credit
        edges.add_row(*map(escape, (edge.candidate, edge.reference, measures)))
    console.print(edges)
    for line in expectations(expected):
        console.print(line, markup=False, highlight=False)


def expectations(expected: Forecast) -> list[str]:
    """Returns the expected effort of a study, a line for each kind."""
    time = "unknown" if expected.seconds is None else f"about {_duration(expected.seconds)}"
    memory = "unknown" if expected.memory_gib is None else f"about {gib_text(expected.memory_gib)} per process"
    lines = [
        f"calls of the pipeline: about {expected.calls}, by {expected.processes} processes",
        f"time: {time}; memory: {memory} ({expected.based_on})",
    ]
    for repository, size in expected.downloads.items():
        size_text = "unknown, the hub cannot be asked" if size is None else f"up to {size / 2**30:.2f} GiB"
        lines.append(f"download of {repository}: {'nothing, it is in the cache' if size == 0 else size_text}")
    return lines


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
