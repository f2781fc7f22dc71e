"""Files that were unfolded stay so: one idea a line, and no comprehension within another."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

UNFOLDED = (
    "sdopt/gate",
    "sdopt/hardware",
    "sdopt/measure",
    "sdopt/record",
    "sdopt/report",
    "sdopt/search",
    "sdopt/statistics",
    "sdopt/study",
    "sdopt/tracking",
    "sdopt/worker",
)
"""Rooms of which every file is unfolded."""

LIMIT = 9.0
"""Syntax nodes for each line of code: plain code of one idea a line has 6 to 8."""

ARITHMETIC = {
    "sdopt/gate/differences.py",
    "sdopt/report/charts/labels.py",
    "sdopt/report/comparing.py",
    "sdopt/report/contact_sheet.py",
    "sdopt/search/plot.py",
    "sdopt/statistics/disturbance.py",
    "sdopt/statistics/effects.py",
    "sdopt/statistics/pairs.py",
    "sdopt/study/fingerprint.py",
}
"""Files of formulas and comparisons, whose short lines have more nodes; their limit is 11."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _files() -> list[str]:
    paths: list[Path] = []
    for name in UNFOLDED:
        paths += (ROOT / name).rglob("*.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


FILES = _files()


def lines_of_code(source: str) -> int:
    """Returns how many lines hold code: no blank ones, comments and docstrings."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    count = 0
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in prose:
            count += 1
    return count


def density(source: str) -> float:
    """Returns the syntax nodes for each line of code."""
    nodes = sum(1 for _ in ast.walk(ast.parse(source)))
    return nodes / max(1, lines_of_code(source))


def nested(source: str) -> list[int]:
    """Returns the lines of comprehensions that loop twice, or hold another one."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, COMPREHENSIONS):
            inner = [
                part
                for part in ast.walk(node)
                if part is not node and isinstance(part, COMPREHENSIONS)
            ]
            if inner or len(node.generators) > 1:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("file", FILES)
def test_an_unfolded_file_has_one_idea_a_line(file: str) -> None:
    source = (ROOT / file).read_text()
    limit = 11.0 if file in ARITHMETIC else LIMIT
    assert density(source) <= limit, (
        f"{file}: {density(source):.1f} syntax nodes for each line of code"
    )
    assert not nested(source), (
        f"{file}: a comprehension within another, or with two loops"
    )


def test_exceptions_are_files() -> None:
    assert set(FILES) >= ARITHMETIC


def test_what_is_folded_is_seen() -> None:
    folded = '"""Prose."""\n\nnames = {b: [c for c in b if c.a.b.c.d and c.a.b.c.e and c.a.b.c.f] for b in a}\n'
    unfolded = (
        '"""Prose."""\n\n# Why.\nnames = {}\nfor b in a:\n    names[b] = inner(b)\n'
    )
    assert lines_of_code(folded) == 1
    assert nested(folded) == [3]
    assert density(folded) > LIMIT > density(unfolded)
    assert not nested(unfolded)
