"""Finds the source files that a user's own option depends on: its classes, and the modules that those import."""

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import sdopt

_PACKAGE = Path(sdopt.__file__).parent


def own_files(options: Iterable[type]) -> list[Path]:
    """Returns the files of classes that come neither with sdopt nor with a library, and of all that these import.

    Includes the files of their base classes. Follows every import statement, whether it runs or not; misses modules
    that are imported by a name computed at run time.

    Args:
        options: the classes of the options.
    """
    found: dict[Path, None] = {}
    waiting = [base.__module__ for option in options for base in option.__mro__]
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if file is None or file in found or not _own(file):
            continue
        found[file] = None
        waiting += _imported(name, file)
    return sorted(found)


def _own(file: Path) -> bool:
    """Returns whether a file belongs neither to sdopt, nor to Python, nor to a library that is installed."""
    standard = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")}
    resolved = file.resolve()
    if any(resolved.is_relative_to(folder.resolve()) for folder in (_PACKAGE, *map(Path, standard))):
        return False
    # By name, because an environment may take libraries from the folder of another one.
    return not {"site-packages", "dist-packages"} & {*resolved.parts}


def _file_of(name: str) -> Path | None:
    """Returns the source file of a module; None if it has none, or does not exist."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        loaded = spec.origin if spec else None
    return Path(loaded) if loaded and loaded.endswith(".py") and Path(loaded).is_file() else None


def _imported(name: str, file: Path) -> Iterator[str]:
    """Yields the names of the modules that a module may import, and of the packages that these are in."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*outer, *([node.module] if node.module else [])])
            # A name imported from a package may be a submodule.
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for found in names:
            parts = found.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
