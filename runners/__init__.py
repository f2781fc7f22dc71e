"""One thin file per command: `sdopt <command>` and `python -m runners.<command>` do the same.

A command parses, calls one function of `sdopt`, and prints.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sdopt.errors import SdoptError, UnavailableError, UsageError
from sdopt.guard import end_with_code, exit_code_of, explained, interrupts_deferred
from sdopt.schema import Tracking
from sdopt.worker.forkserver import prepare_environment

if TYPE_CHECKING:
    from pydantic import BaseModel

    from sdopt.tracking.finding import Found

__all__ = [
    "Arguments",
    "ENDED",
    "end_with_code",
    "exit_code_of",
    "answers",
    "composable",
    "found_in",
    "has_judged",
    "indented",
    "interrupts_deferred",
    "only_json",
    "printed",
]

ENDED = (0, 1, 3)
"""The exit codes of a completed study: passed, regression, or not all measured or judged. Any other code means a usage
error or a signal, after which a command that ran the study stops."""


class Arguments(argparse.ArgumentParser):
    """A parser that refuses a flag which is given twice, where argparse takes the last value without a word.

    Args:
        text: makes the text of `--help`, only if that is asked for; None leaves it to argparse.
    """

    def __init__(
        self, *args: Any, text: Callable[[], str] | None = None, **kwargs: Any
    ) -> None:
        self._flags: list[str] = []
        self._text = text
        super().__init__(*args, **kwargs)
        self.register("action", None, _Once)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Adds an argument as argparse does."""
        self._flags += [name for name in args if name.startswith("--")]
        if kwargs.get("nargs") == "*" and not args[0].startswith("-"):
            kwargs.setdefault("default", [])  # else argparse calls it required
        if kwargs.get("type") is Path:
            kwargs["type"] = _path
        return super().add_argument(*args, **kwargs)

    def format_help(self) -> str:
        """Returns the text of `--help`."""
        return f"{self._text()}\n" if self._text else super().format_help()

    def parsed(self, argv: Sequence[str]) -> argparse.Namespace:
        """Reads a command line, with flags anywhere, before libraries are imported that read the environment."""
        prepare_environment()
        may_be_empty: set[str] = set()
        for action in self._actions:
            if action.default == "":
                may_be_empty.update(action.option_strings)
        for before, word in zip(["", *argv], argv, strict=False):
            flag, sign, value = (
                word.partition("=") if word.startswith("--") else (before, "=", word)
            )
            if (
                sign and not value and flag not in may_be_empty
            ):  # a path would be that of the working folder
                what = flag if flag.startswith("-") else "an argument"
                self.error(f"{what} is empty, as of a variable that is not set")
        return self.parse_intermixed_args(argv)

    def error(self, message: str) -> NoReturn:
        """Ends with the message, and with the flags that an unknown one resembles."""
        wrong = [
            word.partition("=")[0] for word in message.split() if word.startswith("--")
        ]
        near = []
        for word in wrong:
            near += get_close_matches(word, self._flags, 1)
        advice = (
            f"; did you mean {' or '.join(near)}?"
            if near and message.startswith("unrecognized")
            else ""
        )
        super().error(f"{message}{advice}")

    def add_json(self) -> None:
        """Adds `--json`: see `only_json`."""
        self.add_argument(
            "--json",
            action="store_true",
            help="print the answer as one JSON object, and nothing else",
        )

    def add_config_dir(self) -> None:
        """Adds `--config-dir`, a folder of the user's own groups; it must be there."""
        from sdopt.config.paths import own_folder

        self.add_argument(
            "--config-dir",
            type=own_folder,
            metavar="FOLDER",
            help="a folder with groups of your own",
        )


def _path(text: str) -> Path:
    """Returns a path: shells leave `--output=~/mine` as it is, which would be a folder named ~."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 (Path's own fails for a user without a home)


class _Once(argparse.Action):
    given = False

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if option_string is not None and self.given:
            parser.error(f"{option_string} {values}: this flag can be given once only")
        self.given = option_string is not None
        setattr(namespace, self.dest, values)


@contextmanager
def only_json(wanted: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Sends what a command prints to standard error, also what its processes print, except one JSON object at the end.

    Yields a function that keeps the object. An error that ends the command becomes an object with `problems`, an
    interrupt one with an exit code alone.

    Raises:
        UnavailableError: the object could not be written, as on a full disk.
    """
    found: dict[str, Any] = {}
    if not wanted:
        yield found.update
        return
    out = sys.stdout
    out.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield found.update
    except Exception as error:
        known = (
            error
            if isinstance(error, SdoptError)
            else UnavailableError(explained(error))
        )
        found |= {"exit_code": known.exit_code, "problems": known.problems}
        raise
    except KeyboardInterrupt as interrupt:
        found["exit_code"] = exit_code_of(interrupt)
        raise
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        # Without an answer, a command has shown a plan.
        text = json.dumps({"exit_code": 0} | found, allow_nan=False)
        print(text, file=out, flush=True)
    lost = getattr(out, "lost", None)  # of a stream that lets the command go on
    if lost is not None:
        raise UnavailableError(
            f"standard output: {lost.strerror}; the answer is not written"
        )


def printed() -> "type[BaseModel]":
    """Returns the form of what commands print with `--json`: its schema is what `sdopt skill --schema` prints."""
    from pydantic import Field, create_model

    from sdopt.report.answer_json import Answer
    from sdopt.search.record import SearchRecord

    fields: dict[str, Any] = {
        "exit_code": (int, ...),
        "studies": (
            list[Answer],
            Field([], description="of a result, or of each job of a sweep"),
        ),
        "problems": (
            list[str],
            Field(
                [], description="why the command ended, or which results are damaged"
            ),
        ),
        "verdicts": (
            Any,
            Field(
                None,
                description="of sdopt gate, as verdicts.json; of a sweep a list, as `studies`",
            ),
        ),
        "search": (
            SearchRecord | None,
            Field(
                None, description="of sdopt search; its judged study is in `studies`"
            ),
        ),
    }
    return create_model("Printed", __config__={"extra": "forbid"}, **fields)


def answers(found: "Found | None", code: int) -> dict[str, Any]:
    """Returns the answer of each study of a result or a sweep, and the exit code of the command."""
    from sdopt.report.answer_json import answer_of, to_json
    from sdopt.report.summary import summary_of

    studies = []
    for result, folder in found.studies if found else ():
        studies.append(to_json(answer_of(summary_of(result), folder)))
    return {
        "exit_code": code,
        "studies": studies,
        **({"problems": found.damaged} if found and found.damaged else {}),
    }


def judged_in(name: str) -> str:
    """Returns where the study is that judged, of a search's folder; any other name as it is.

    Raises:
        UsageError: the search has judged nothing.
    """
    from sdopt.search.record import FINAL, RECORD

    folder = Path(name)
    if not (folder / RECORD).is_file():
        return name
    if not has_judged(folder):
        raise UsageError(f"{name}: a search that has not judged any option")
    return str(folder / FINAL)


def has_judged(search: Path) -> bool:
    """Whether a search has judged an option: its study is there."""
    from sdopt.search.record import FINAL

    return (search / FINAL / "result.json").is_file()


def found_in(folder: Path | None) -> "Found | None":
    """Returns what a command has written to a folder; None if it has measured nothing."""
    from sdopt.tracking.finding import find_results

    try:
        return (
            None if folder is None else find_results(str(folder), Tracking(kind="none"))
        )
    except UsageError:
        return None


def composable(
    overrides: Sequence[str], config_dir: Path | None, own: Iterable[str] = ()
) -> list[str]:
    """Returns overrides with a user's own models as options, once Hydra composes them without the keys of `own`.

    It is asked before libraries are imported that measure, so that a typo is told at once.

    Raises:
        UsageError: Hydra cannot compose them.
    """
    from sdopt.config.compositions import composition_of
    from sdopt.config.models import with_own_models
    from sdopt.config.overrides import written_key
    from sdopt.config.paths import options_of

    overrides = with_own_models(overrides, options_of("model", config_dir))
    begins = tuple(own)
    rest = [word for word in overrides if not written_key(word).startswith(begins)]
    composition_of(rest, config_dir)
    return overrides


def indented(lines: Iterable[str]) -> str:
    """Joins lines, indented as in a help text."""
    return "\n".join(f"  {line}" for line in lines)
