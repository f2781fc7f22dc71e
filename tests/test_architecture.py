"""The floors of `sdopt/`: a room imports only rooms below it, lazy imports and those for type checkers included."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

_TABLE = (
    (ROOT / "sdopt" / "README.md")
    .read_text()
    .split("\n| room | what it does |\n|---|---|\n")[1]
    .split("\n\n")[0]
)
_ROOMS = [
    room
    for row in _TABLE.splitlines()
    for room in re.findall(r"`([\w/]+?)(?:/|\.py)`", row.split("|")[1])
]
FLOORS = [*_ROOMS[:3], "sdopt", *_ROOMS[3:]]
"""The rooms as `sdopt/README.md` lists them, top floor first; `sdopt` is the package's own `__init__.py`."""

FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("sdopt", "runners")
    for path in (ROOT / folder).rglob("*.py")
)


def room_of(module: str) -> str:
    """The room of a dotted module name: the part below `sdopt`, or `runners`."""
    parts = module.split(".")
    if parts[:2] == ["sdopt", "apps"]:
        return "/".join(parts[1:3])
    return parts[1] if parts[0] == "sdopt" and len(parts) > 1 else parts[0]


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import, wherever it stands in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = (
                module_of(path).split(".")
                if path.name == "__init__.py"
                else module_of(path).split(".")[:-1]
            )
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from sdopt import x` imports the room x where there is one, else a name of the package itself.
            rooms = [
                f"{module}.{alias.name}"
                for alias in node.names
                if alias.name in FLOORS and module == "sdopt"
            ]
            yield from ((node.lineno, name) for name in rooms or [module])


@cache
def imports_in(path: Path) -> tuple[tuple[int, str], ...]:
    """The imports of a file of the checkout, which is read once."""
    return tuple(imports_of(path, (ROOT / path).read_text()))


def violations(path: Path) -> list[str]:
    room = room_of(module_of(path))
    if room not in FLOORS:
        return [
            f"{path}: the room '{room}' has no floor; add it to the table in sdopt/README.md above all that it imports"
        ]
    found = []
    for line, module in imports_in(path):
        other = room_of(module)
        if module.partition(".")[0] not in ("sdopt", "runners") or other == room:
            continue
        if other not in FLOORS or FLOORS.index(other) <= FLOORS.index(room):
            found.append(
                f"{path}:{line}: {room} imports {module}; a room imports only rooms below it"
            )
    return found


def named_for_applications() -> set[str]:
    """The modules of the core that `sdopt/apps/README.md` names."""
    table = (
        (ROOT / "sdopt" / "apps" / "README.md")
        .read_text()
        .split("\n| room | modules |\n|---|---|\n")[1]
    )
    named = set()
    for row in table.splitlines():
        room, modules = (cell.strip() for cell in row.strip("|").split("|"))
        for module in modules.split(", "):
            named.add(
                f"sdopt.{room}" if module == "itself" else f"sdopt.{room}.{module}"
            )
    return {name.replace("`", "") for name in named}


def test_applications_import_only_what_is_named_for_them() -> None:
    used = set()
    for path in (path for path in FILES if path.parts[:2] == ("sdopt", "apps")):
        modules = {module for _, module in imports_in(path)}
        used |= {
            module
            for module in modules
            if module.startswith("sdopt.") and not module.startswith("sdopt.apps.")
        }
    assert used == named_for_applications()


def test_a_room_imports_only_rooms_below_it() -> None:
    found = [violation for path in FILES for violation in violations(path)]
    assert not found, "\n".join(found)


def test_every_room_of_the_table_is_there() -> None:
    assert FLOORS[:4] == ["runners", "__main__", "cli", "sdopt"]
    assert {room_of(module_of(path)) for path in FILES} == set(FLOORS)
    assert len(FLOORS) == len(set(FLOORS))


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The circles of modules that import each other, each once."""
    found: list[list[str]] = []
    done: set[str] = set()

    def follow(module: str, way: list[str]) -> None:
        if module in way:
            found.append(way[way.index(module) :])
        elif module not in done:
            for other in sorted(arrows[module]):
                follow(other, [*way, module])
            done.add(module)

    for module in sorted(arrows):
        follow(module, [])
    return found


def test_no_module_is_imported_by_what_it_imports() -> None:
    """Whoever reads one of them would have to read the other first; a package's `__init__` may offer its modules."""
    files = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    arrows = {
        module: {imported for _, imported in imports_in(path) if imported in files}
        for module, path in files.items()
    }
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert not circles(arrows)
