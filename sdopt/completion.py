"""Shell completion: Hydra's own, for a console script whose commands stand before the overrides."""

import os
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

_OF_RESULTS = ("show", "compare", "gate", "report", "sync")
"""Commands that take finished results."""

_MOST = 20
"""Results that are offered."""

_ANSWERS = {"fish": "\n"}
"""What a shell wants between its choices, where that is not a space."""


def complete(request: str, commands: Collection[str]) -> int:
    """Answers what a shell's completion asks for; returns the exit code.

    Args:
        request: `install=bash` prints the script that a shell evaluates; `query=bash` prints the choices for the
            command line that the script left in `COMP_LINE`. Hydra knows bash, zsh and fish.
        commands: the words that may stand before the overrides.
    """
    kind, _, shell = request.partition("=")
    if kind != "query":
        return _hydra(request)
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    partial = "" if line.endswith(" ") or not words else words[-1]
    before = words[1:] if not partial else words[1:-1]
    if not before:
        print(_ANSWERS.get(shell, " ").join(name for name in commands if name.startswith(partial)))
        return 0
    if before[0] not in commands:
        return 0
    if before[0] in _OF_RESULTS and "=" not in partial:
        # The newest first; where there is none, the shell lists files.
        found = sorted(Path("outputs").glob("*/*/*/result.json"), key=lambda path: path.parent.name, reverse=True)
        folders = [str(path.parent) for path in found if str(path.parent).startswith(partial)]
        print(_ANSWERS.get(shell, " ").join(folders[:_MOST]))
        return 0
    if before[0] == "optimize" and len(before) == 1:
        return 0  # a file: the shell lists them
    # Hydra expects overrides after the program's name.
    os.environ["COMP_LINE"] = line.replace(f" {before[0]}", "", 1)
    if before[0] == "optimize":  # after a model's name, and flags
        os.environ["COMP_LINE"] = " ".join([words[0], *(word for word in before[1:] if "=" in word), partial])
    return _hydra(request, before[0].replace("-", "_"))


def _hydra(request: str, command: str = "") -> int:
    from sdopt.config.command import run_hydra
    from sdopt.config.paths import CONF, CONFIG_NAME

    own = command if command and (CONF / f"{command}.yaml").is_file() else CONFIG_NAME
    with redirect_stdout(StringIO()) as out:
        run_hydra(["-sc", request], program="sdopt", config_name=own)
    sys.stdout.write(out.getvalue())
    return 0
