"""Functions of a user's own files, as `my_file.py:function`: found without running them, and loaded.

They are code: nothing but a command line, a preset or a program names them, never a result that is read.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError, with_type

FUNCTION = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
"""How a function of a file is named."""


def absolute(function: str) -> str:
    """Returns a function with the whole path of its file, which a worker finds from any folder."""
    match = FUNCTION.fullmatch(function)
    if match is None:
        return function
    path, name = match.groups()
    return f"{Path(path).expanduser().absolute()}:{name}"


def defined(function: str, key: str) -> tuple[Path, str]:
    """Returns the file and the name of a function, which the file must define at its top.

    Raises:
        UsageError: it is written otherwise, or is not there.
    """
    match = FUNCTION.fullmatch(function)
    if match is None:
        raise UsageError(f"{key}={function}: must be file.py:function")
    path, name = match.groups()
    file = Path(path).expanduser().absolute()
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        wrong = f"{file} cannot be read ({with_type(error)})"
        raise UsageError(f"{key}={function}: {wrong}") from error
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name not in functions:
        raise UsageError(f"{key}={function}: {file} defines no function {name}")
    return file, name


def loaded(function: str, key: str) -> Callable[..., Any]:
    """Runs the file of a function, which may import what lies beside it; returns the function.

    Raises UsageError as `defined` does.
    """
    file, name = defined(function, key)
    # Not the file's own name, which may be that of a package.
    spec = importlib.util.spec_from_file_location(f"sdopt_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look up types that are written as text.
    sys.modules[module.__name__] = module
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    target: Callable[..., Any] = getattr(module, name)
    return target
