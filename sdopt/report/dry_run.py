"""Shows what a study would measure, compare and skip."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sdopt.results.choices import listed
from sdopt.results.records import StudyResult
from sdopt.study.designs import difference


def show_plan(result: StudyResult, console: Console) -> None:
    """Prints the variants of a plan, what keeps a variant from running, and the comparisons."""
    environment = result.environment
    # A plan is only ever made with a sheet of the device that is meant; a real one has a driver.
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
    for heading in ("candidate", "against", "credits"):
        edges.add_column(heading)
    for edge in result.comparisons:
        edges.add_row(*map(escape, (edge.candidate, edge.reference, edge.credit)))
    console.print(edges)
