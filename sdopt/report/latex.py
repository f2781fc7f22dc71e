"""Writes a table for a paper: LaTeX with booktabs."""

import re

from sdopt.report.blocks import Cell, Table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "×": r"$\times$",
    "−": "$-$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
}
"""Characters that LaTeX reads as commands, or whose fonts lack them."""


def latex(table: Table) -> str:
    """Returns a table as a `tabular`: a figure with its interval, as in `1.06 [1.03, 1.08]`."""
    columns = "".join("r" if heading in table.numbers else "l" for heading in table.headings)
    lines = [[_escaped(heading) for heading in table.headings], *([_cell(cell) for cell in row] for row in table.cells)]
    head, *body = (" & ".join(line) + r" \\" for line in lines)
    parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*parts, r"\end{tabular}"]) + "\n"


def _cell(cell: Cell) -> str:
    # The column's heading says that it is a ratio.
    return _escaped(re.sub(r"(?<=\d)×", "", str(cell)) if cell.detail.startswith("[") else str(cell))


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
