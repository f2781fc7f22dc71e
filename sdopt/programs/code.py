"""Pieces of a program, and how they are put together."""

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any


class Unwritable(Exception):  # noqa: N818 (a finding, not a mistake)
    """No program outside of sdopt does what was measured; as a string, the reason."""


@dataclass(frozen=True)
class Piece:
    """A piece of a program.

    Attributes:
        imports: lines that import, each at most once in a program.
        lines: the statements.
        arguments: of the pipeline's call.
        around: context managers around that call.
    """

    imports: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    around: tuple[str, ...] = ()

    def __add__(self, other: "Piece") -> "Piece":
        imports = dict.fromkeys((*self.imports, *other.imports))
        return Piece(
            tuple(imports),
            self.lines + other.lines,
            self.arguments + other.arguments,
            self.around + other.around,
        )


def call_of(piece: Piece) -> list[str]:
    """Returns the lines that call `pipe`, and leave the first image of the call as `image`."""
    arguments = ", ".join(piece.arguments)
    call = f"image = pipe({arguments}).images[0]"
    if not piece.around:
        return [call]
    around = ", ".join(piece.around)
    return [f"with {around}:", f"    {call}"]


def literal(value: Any) -> str:
    """Returns a value as Python code; a text in double quotes, unless it holds some."""
    if isinstance(value, list):
        items = map(literal, value)
        return f"[{', '.join(items)}]"
    if not isinstance(value, str):
        return repr(value)
    plain = repr(value)
    if '"' in plain or "\\" in plain:
        return plain
    return f'"{value}"'


_NAME = re.compile(r"[A-Za-z_]\w*")
"""How a module is named that can be imported by a line of Python."""


def function_code(function: str, use: str) -> Piece:
    """Returns code that uses a function of a file, `file.py:function`, which may import what lies beside it.

    Args:
        function: with the whole path of its file.
        use: the statement, with `{}` for the function's name.
    """
    file, _, name = function.rpartition(":")
    path = Path(file)
    folder = literal(str(path.parent))
    beside = f"sys.path.append({folder})"
    statement = use.format(name)
    if _NAME.fullmatch(path.stem) and not _is_taken(path):
        lines = (beside, f"from {path.stem} import {name}", statement)
        return Piece(("import sys",), lines)
    loaded = f"{name} = runpy.run_path({literal(file)})[{literal(name)}]"
    return Piece(("import runpy", "import sys"), (beside, loaded, statement))


def _is_taken(file: Path) -> bool:
    """Returns whether another module, or a word of Python's, has the name of a file."""
    if file.stem in sys.stdlib_module_names or iskeyword(file.stem):
        return True
    try:
        module = find_spec(file.stem)
    except (ImportError, ValueError):
        return True
    return module is not None and module.origin != str(file)
