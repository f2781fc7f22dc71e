"""Pieces of a program, and how they are put together."""

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Unwritable(Exception):  # noqa: N818 (a finding, not a mistake)
    """No program outside of sdopt does what was measured; as a string, the reason."""


@dataclass(frozen=True)
class Code:
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

    def __add__(self, other: "Code") -> "Code":
        return Code(
            tuple(dict.fromkeys((*self.imports, *other.imports))),
            self.lines + other.lines,
            self.arguments + other.arguments,
            self.around + other.around,
        )


def call_of(pipe: str, code: Code) -> list[str]:
    """Returns the lines that call a pipeline, and leave the first image of the call."""
    call = f"image = {pipe}({', '.join(code.arguments)}).images[0]"
    return [f"with {', '.join(code.around)}:", f"    {call}"] if code.around else [call]


def literal(value: Any) -> str:
    """Returns a value as Python code; a text in double quotes, unless it holds some."""
    if isinstance(value, str):
        shown = repr(value)
        return shown if '"' in shown or "\\" in shown else f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return repr(value)


def function_code(function: str, use: str) -> Code:
    """Returns code that uses a function of a file, `file.py:function`, which may import what lies beside it."""
    file, _, name = function.rpartition(":")
    place = Path(file)
    beside = f"sys.path.append({literal(str(place.parent))})"
    if re.fullmatch(r"[A-Za-z_]\w*", place.stem) and not _is_taken(place):
        return Code(("import sys",), (beside, f"from {place.stem} import {name}", use.format(name)))
    # Its name is no name of Python's, or that of a package.
    lines = (beside, f"{name} = runpy.run_path({literal(file)})[{literal(name)}]", use.format(name))
    return Code(("import runpy", "import sys"), lines)


def _is_taken(file: Path) -> bool:
    """Returns whether another module has the name of a file."""
    if file.stem in sys.stdlib_module_names:
        return True
    try:
        found = find_spec(file.stem)
    except (ImportError, ValueError):
        return True
    return found is not None and found.origin != str(file)
