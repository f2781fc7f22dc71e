"""Reads a command line as Hydra does, and runs Hydra with it. Imports nothing heavy."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.utils import env_override
from omegaconf import DictConfig, OmegaConf

from sdopt.config.card_options import offer_cards
from sdopt.config.models import with_own_options
from sdopt.config.overrides import parsed_override
from sdopt.config.paths import (
    CONF,
    CONFIG_NAME,
    options_of,
    own_folder,
    study_named,
)
from sdopt.config.sources import read_marked_files
from sdopt.errors import UsageError
from sdopt.schema import wrong_name

_INFORMATIVE = (
    "help",
    "hydra_help",
    "version",
    "cfg",
    "info",
    "package",
    "resolve",
    "shell_completion",
)
"""Flags with which Hydra prints something and runs no job."""

_REFUSED = ("config_name", "config_path", "experimental_rerun")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    """Returns a parser of Hydra's flags, which may stand anywhere among the overrides."""
    parser = _Parser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    for flags in (
        *(
            ("--help", "-h"),
            ("--hydra-help",),
            ("--version",),
            ("--resolve",),
            ("--run", "-r"),
            ("--multirun", "-m"),
        ),
        ("--shell-completion", "-sc"),
    ):
        parser.add_argument(*flags, action="store_true")
    for flags in (
        ("--cfg", "-c"),
        ("--package", "-p"),
        ("--config-path", "-cp"),
        ("--config-name", "-cn"),
    ):
        parser.add_argument(*flags)
    parser.add_argument("--config-dir", "-cd", action="append")
    parser.add_argument("--experimental-rerun")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser


@dataclass(frozen=True)
class CommandLine:
    """What a command line asks for.

    Attributes:
        overrides: in their order, those of Hydra's own keys among them.
        config_dir: a folder of the user's own groups.
        multirun: whether `-m` is among the flags.
        informative: whether Hydra only prints something.
    """

    overrides: tuple[str, ...]
    config_dir: Path | None
    multirun: bool
    informative: bool

    @classmethod
    def of(cls, argv: Sequence[str]) -> "CommandLine":
        """Reads a command line. Raises UsageError if a flag does not exist, or is not for sdopt."""
        flags = _parser().parse_intermixed_args(list(argv))
        for flag in _REFUSED:
            if getattr(flags, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')}: sdopt composes its own configuration; add groups with --config-dir, "
                    "and presets with experiment=…"
                )
        if flags.config_dir and len(flags.config_dir) > 1:
            further = f"hydra.searchpath=[file://{Path(flags.config_dir[1]).expanduser().absolute()}]"
            raise UsageError(
                f"--config-dir {flags.config_dir[1]}: only one folder can be given; add it with {further}"
            )
        if flags.package and not flags.cfg:  # else nothing is measured or shown
            raise UsageError(
                f"--package {flags.package}: names what --cfg shows: add --cfg job, or leave it out"
            )
        folder = own_folder(flags.config_dir[0]) if flags.config_dir else None
        informative = any(getattr(flags, flag) for flag in _INFORMATIVE)
        overrides = with_own_options(flags.overrides, options_of("model", folder))
        return cls(tuple(overrides), folder, flags.multirun, informative)

    @property
    def task(self) -> list[str]:
        """The overrides without those of Hydra's own keys."""
        return [
            override
            for override in self.overrides
            if not parsed_override(override).is_hydra_override()
        ]

    @property
    def hydra(self) -> list[str]:
        """The overrides of Hydra's own keys."""
        task = self.task
        return [override for override in self.overrides if override not in task]


def _folder_named(study: Any, experiment: Any = None) -> str:
    """Returns the name of a study if it can name a folder. Hydra makes that before sdopt sees the configuration."""
    study = study_named(study, experiment)
    name = (
        "" if study is None else str(study)
    )  # a number, as of a run in CI, is a name too
    if wrong := wrong_name(name):
        raise UsageError(f"study.name={name}: {wrong}")
    return name


OmegaConf.register_new_resolver("sdopt.folder", _folder_named, replace=True)
offer_cards()
read_marked_files()


def add_working_folder() -> None:
    """Lets `_target_` name modules of the working folder; appends it to `sys.path`, so that none shadows a library."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def no_job(_cfg: DictConfig) -> None:
    """Does nothing: what only prints something runs no job."""


def run_hydra(
    argv: Sequence[str],
    job: Callable[[DictConfig], Any] = no_job,
    program: str = "sdopt run",
    config_name: str = CONFIG_NAME,
) -> None:
    """Runs Hydra with a command line: overrides, and Hydra's flags.

    Raises:
        UsageError: Hydra refuses the command line.
        Exception: whatever a job or a launcher raises.
    """
    main = hydra.main(
        version_base="1.3", config_path=str(CONF), config_name=config_name
    )(job)
    try:
        # Hydra raises errors that it would otherwise print, partly as a traceback, before it exits with code 1.
        full_error = env_override({"HYDRA_FULL_ERROR": "1"})
        with _arguments([program, *argv]), full_error, _unchecked_help():
            main()
    except SystemExit as error:
        # Hydra or argparse has printed its message.
        if error.code:
            raise UsageError([]) from error


@contextmanager
def _unchecked_help() -> Iterator[None]:
    """Spares Hydra's own parser the check of help strings that argparse makes from Python 3.14 on.

    In Hydra 1.3 the help of `--shell-completion` is an object, which becomes a string only when it is shown.
    """
    parser: Any = argparse.ArgumentParser
    check = getattr(parser, "_check_help", None)
    parser._check_help = lambda _parser, _action: None
    try:
        yield
    finally:
        parser._check_help = check


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Replaces `sys.argv` within the block, because Hydra reads the command line from there."""
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before
