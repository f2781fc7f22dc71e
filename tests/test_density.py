"""One idea a line, by what the code says and not by how it is wrapped: parts that are too large, or large on average."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LARGEST = 50
"""Syntax nodes of one part. Of those of pytest, click, Starlette, Optuna and Accelerate, one in 1,000 to 2,200 is larger."""

MEAN = 15.0
"""Syntax nodes of a file's parts on average; those packages have 7 to 8, sdopt 9.4."""

ENTRIES, PARTS = 3, 20
"""A list of so many entries is read entry by entry; a file of so many parts has a mean that says something."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
BODIES = (ast.stmt, ast.excepthandler, ast.match_case)
"""What stands on lines of its own below a statement."""


def _files() -> list[str]:
    paths = [
        path for room in ("sdopt", "runners") for path in (ROOT / room).rglob("*.py")
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


FILES = _files()


def _entries(node: ast.AST) -> list[list[ast.AST]]:
    """Returns the nodes of each entry of a display, or of each argument of a call."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [[value] if key is None else [key, value] for key, value in pairs]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [[item] for item in node.elts]
    if isinstance(node, ast.Call):
        return [[argument] for argument in [*node.args, *node.keywords]]
    return []


def _sizes(nodes: list[ast.AST]) -> Iterator[int]:
    """Yields the size of one part, and that of each entry of the long lists in it."""
    size = 0
    rest = [*nodes]
    while rest:
        node = rest.pop()
        size += 1
        entries = _entries(node)
        apart: set[int] = set()
        if len(entries) >= ENTRIES:
            for entry in entries:
                yield from _sizes(entry)
                apart.update(map(id, entry))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, BODIES) and id(child) not in apart:
                rest.append(child)
    yield size


def _is_prose(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _inside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields statements of functions, and what else has statements below it; no definitions and no prose."""
    rest = [(tree, False)]
    while rest:
        node, inside = rest.pop()
        heading = isinstance(node, DEFINITIONS)
        if inside and not heading and not _is_prose(node):
            yield node
        inside = inside or isinstance(node, FUNCTIONS)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, BODIES):
                rest.append((child, inside))


def parts(tree: ast.AST) -> list[tuple[int, int]]:
    """Returns the syntax nodes and the line of each part of the functions: a statement, or an entry of a long list.

    A statement counts without those below it. Parameters, fields and tables of a module do not count: they are lists.
    """
    found = []
    for node in _inside_functions(tree):
        line = getattr(node, "lineno", 0)
        found += [(size, line) for size in _sizes([node])]
    return found


def nested(tree: ast.AST) -> list[int]:
    """Returns the lines of comprehensions that loop twice, or hold another one."""
    lines = []
    for node in ast.walk(tree):
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
def test_one_idea_a_line(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    found = parts(tree)
    too_large = [f"{file}:{line} ({size})" for size, line in found if size > LARGEST]
    assert not too_large, f"more than {LARGEST} syntax nodes: {', '.join(too_large)}"
    if len(found) >= PARTS:
        mean = sum(size for size, _ in found) / len(found)
        assert mean <= MEAN, f"{file}: {mean:.1f} syntax nodes a part"
    assert not nested(tree), f"{file}: a comprehension within another"


FOLDED = '''
def names(a):
    """Prose."""
    return {b: [c for c in b if c.a.b.c.d and c.a.b.c.e and c.a.b.c.f and c.g.h.i] for b in a}
'''

UNFOLDED_CODE = '''
def names(a):
    """Prose."""
    found = {}
    for b in a:
        found[b] = inner(b)
    return found
'''

WRAPPED = '''
def names(
    a,
):
    """Prose."""
    return {
        b: [
            c
            for c in b
            if c.a.b.c.d and c.a.b.c.e and c.a.b.c.f and c.g.h.i
        ]
        for b in a
    }
'''


def test_what_is_folded_is_seen_however_it_is_wrapped() -> None:
    [(size, line)] = parts(ast.parse(FOLDED))
    assert size > LARGEST
    assert line == 4
    assert nested(ast.parse(FOLDED)) == [4]
    assert [size for size, _ in parts(ast.parse(WRAPPED))] == [size]
    assert max(size for size, _ in parts(ast.parse(UNFOLDED_CODE))) < MEAN
    assert not nested(ast.parse(UNFOLDED_CODE))


def test_entries_of_a_list_are_read_one_by_one() -> None:
    call = f"def f():\n    return made({', '.join(f'k{n}=a.b.c({n})' for n in range(9))})\n"
    sizes = [size for size, _ in parts(ast.parse(call))]
    assert len(sizes) == 10
    assert max(sizes) < MEAN
