"""The console script, and its completion in shells. Imports little: every worker process imports it again."""

import atexit
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from difflib import get_close_matches
from io import StringIO
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.guard import end_with_code

COMMANDS = {
    "optimize": "find what makes one model faster on this machine: a file, a folder or owner/name",
    "run": "measure a study: variants against a baseline, in one run",
    "search": "find the fastest combination of options that passes the gate, within limits",
    "show": "print a finished result again: tables, verdicts and the answer",
    "compare": "show two finished results side by side, and what differs between them",
    "gate": "judge a finished result, or compare it with an earlier one",
    "serve": "serve a pipeline over HTTP as it was measured, in batches formed on the fly",
    "load-test": "compare variants and policies of batching under load: which carries the most requests in time",
    "judge": "compare images, and times, that any program made with those of a baseline",
    "score": "give out the images of a result, or take in scores that other programs computed",
    "report": "write a finished result as one page: the answer, tables, plots and images",
    "calibrate": "measure the spread of a model's images, from which gates take their margins",
    "skill": "print the page that tells an agent how to measure a change honestly",
    "ui": "open the MLflow UI on localhost",
    "sync": "log results to MLflow unless they are there already",
    "plan": "predict seconds and memory on a card that you do not have, with intervals",
    "doctor": "describe this machine: its hardware, its peak speed, and which options run on it",
    "gpu-suite": "run all that needs a GPU within a time budget: machine, noise, tests, every option, every preset",
    "benchmark-overhead": "measure the time that sdopt adds to the calls of the pipeline",
    "train-reference": "train the packaged reference model",
    "evaluate-reference": "evaluate the packaged reference model: all figures in one table",
}

_OF_RESULTS = ("show", "compare", "gate", "report", "sync")
"""Commands that take finished results."""

_MOST = 20
"""Results that are offered."""

_ANSWERS = {"fish": "\n"}
"""What a shell wants between its choices, where that is not a space."""

_HELP = """\
usage: sdopt <command> [options]

Measured ablations of Stable Diffusion optimizations: speed, memory and images, against a baseline in the same run.

commands:
{commands}

examples:
  sdopt run experiment=quickstart                            five optimizations on the packaged model, in minutes
  sdopt run precision=bf16 attention=math                    one combination against the baseline
  sdopt run -m precision=fp32,bf16 attention=math,vanilla    a sweep: every combination, each against the baseline
  sdopt run ... dry_run=true                                 what would be measured, compared and skipped
  sdopt run --help                                           the groups, their options and every key

shell completion: eval "$(sdopt -sc install=bash)"; zsh: the same after `autoload bashcompinit && bashcompinit`;
fish: sdopt -sc install=fish | source

Exit codes: 0 done; 1 a regression; 2 usage, configuration or conflict; 3 something could not be measured or judged."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    if argv is None:
        _require_utf8()
    return end_with_code(_run)(sys.argv[1:] if argv is None else argv)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(
            _HELP.format(
                commands="\n".join(
                    f"  {name:<18} {text}" for name, text in COMMANDS.items()
                )
            )
        )
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from sdopt.about import __version__

        print(f"sdopt {__version__}")
        return 0
    if arguments[0] in ("-sc", "--shell-completion") or (
        arguments[0] in COMMANDS
        and arguments[1:2]
        and arguments[1].partition("=")[0] in ("-sc", "--shell-completion")
    ):
        return _complete(
            arguments[-1].removeprefix("-sc=").removeprefix("--shell-completion=")
        )
    if arguments[0] not in COMMANDS:
        near = get_close_matches(arguments[0], COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else "`sdopt --help` lists all"
        print(f"sdopt: unknown command '{arguments[0]}'; {meant}", file=sys.stderr)
        return 2
    _require_working_folder()
    # An interpreter that ends looks for garbage among all objects of PyTorch's modules, which takes a second.
    atexit.register(gc.freeze)
    from sdopt.worker.forkserver import end_resource_tracker, silence_talkative

    # Before the fork server is started, so that it runs after that has ended: both hold the tracker's pipe.
    atexit.register(end_resource_tracker)

    silence_talkative()
    # A wheel carries the runners inside the package; a checkout has them at the top.
    package = Path(__file__).parent
    inside = (package / "runners").is_dir()
    if not inside and str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))
    runner = importlib.import_module(
        f"{'sdopt.' if inside else ''}runners.{arguments[0].replace('-', '_')}"
    )
    # This command is guarded already: what it raises need not pass a second guard.
    return int(inspect.unwrap(runner.main)(arguments[1:]))


def _require_utf8() -> None:
    """Starts again in UTF-8 mode where Python would read arguments and name files in ASCII.

    It takes that mode for LC_ALL=C by itself, unless PYTHONUTF8=0 and PYTHONCOERCECLOCALE=0 are set, too.
    """
    if sys.getfilesystemencoding() == "ascii" and not sys.flags.ignore_environment:
        os.environ["PYTHONUTF8"] = "1"  # for the processes that it starts, too
        os.execv(sys.executable, sys.orig_argv)


def _require_working_folder() -> None:
    """Undoes what `python -m` does: a file there named `queue.py` would replace Python's own module.

    Raises:
        UsageError: the working folder was removed, or cannot be entered.
    """
    try:
        here, checkout = Path.cwd(), Path(__file__).parents[1]
    except OSError as error:
        raise UsageError(
            f"the working folder cannot be used ({error.strerror}): it was removed, or is closed to this user; change "
            "to another folder"
        ) from error
    if sys.path[0] in ("", str(here)) and here != checkout:
        sys.path.append(sys.path.pop(0))


def _complete(request: str) -> int:
    """Answers what a shell's completion asks for: Hydra's own, for commands that stand before the overrides.

    Args:
        request: `install=bash` prints the script that a shell evaluates; `query=bash` prints the choices for the
            command line that the script left in `COMP_LINE`. Hydra knows bash, zsh and fish.

    Returns:
        the exit code.
    """
    kind, _, shell = request.partition("=")
    if kind != "query":
        return _completed_by_hydra(request)
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    partial = "" if line.endswith(" ") or not words else words[-1]
    before = words[1:] if not partial else words[1:-1]
    if not before:
        print(
            _ANSWERS.get(shell, " ").join(
                name for name in COMMANDS if name.startswith(partial)
            )
        )
        return 0
    offered = _offered(before, partial)
    if offered is not None:
        print(
            _ANSWERS.get(shell, " ").join(
                choice for choice in offered if choice.startswith(partial)
            )
        )
        return 0
    # Hydra expects overrides after the program's name.
    os.environ["COMP_LINE"] = line.replace(f" {before[0]}", "", 1)
    if before[0] == "optimize":  # after a model's name, and flags
        os.environ["COMP_LINE"] = " ".join(
            [words[0], *(word for word in before[1:] if "=" in word), partial]
        )
    return _completed_by_hydra(request, before[0])


def _offered(before: Sequence[str], partial: str) -> list[str] | None:
    """Returns what a shell offers after some words without asking Hydra; None where Hydra has to be asked."""
    if before[0] not in COMMANDS:
        return []
    if before[0] in _OF_RESULTS and "=" not in partial:
        # The newest first; where there is none, the shell lists files.
        records = [*Path("outputs").glob("*/*/*/result.json")]
        if before[0] == "show":
            records += Path("outputs").glob("*/*/*/load.json")
        words = sorted(records, key=lambda path: path.parent.name, reverse=True)
        return [
            str(path.parent) for path in words if str(path.parent).startswith(partial)
        ][:_MOST]
    if before[0] == "ui":  # it has no study to configure
        from sdopt.schema import Tracking

        return ["--port", *(f"tracking.{key.name}=" for key in fields(Tracking))]
    if before == ["optimize"]:
        return []  # a file: the shell lists them
    return None


def _completed_by_hydra(request: str, command: str = "run") -> int:
    from sdopt.config.command import run_hydra
    from sdopt.config.paths import config_name_of

    with redirect_stdout(StringIO()) as out:
        run_hydra(
            ["-sc", request], program="sdopt", config_name=config_name_of(command)
        )
    sys.stdout.write(out.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
