"""Runs Hydra on a command line, and records the folder of the run or the sweep."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from sdopt.config.overrides import quoted
from sdopt.config.paths import CONF, CONFIG_NAME
from sdopt.errors import UsageError
from sdopt.schema import wrong_name

INFORMATIVE = (
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--package"),
    *("--shell-completion", "-sc"),
)
"""Flags with which Hydra prints something and runs no job."""

_OTHER_CONFIGURATION = ("--config-name", "-cn", "--config-path", "-cp")


@dataclass
class Folders:
    """Where one command writes; both are None until Hydra has composed its first job."""

    run: Path | None = None
    sweep: Path | None = None
    occupied: bool = False
    """Whether a job refused its folder because another process writes it: its files do not belong to this command."""
    lost: bool = False
    """Whether a launcher lost a job of a sweep, for example because its machine went down."""
    error: Exception | None = None
    """What ended the job of a single run."""
    dry: bool = False
    """Whether a job only showed its plan: then its folders are removed."""
    brief: bool = False
    """Whether the command reads results itself, so that studies show and write no tables and no reports."""
    ready: Callable[[], None] = lambda: None
    """Called before the command prints for the first time, to end the display of its start."""

    @property
    def jobs(self) -> list[Path]:
        """The folders that jobs have so far."""
        if self.run is not None:
            return [self.run]
        return [path for path in self.sweep.iterdir() if path.is_dir()] if self.sweep and self.sweep.is_dir() else []

    def remove_plans(self) -> None:
        """Removes the folders of a dry run, if they hold nothing but what Hydra wrote there."""
        folder = self.run or self.sweep
        if folder is None:
            return
        files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        if any(".hydra" not in file.parts and file.name != "multirun.yaml" for file in files):
            return
        shutil.rmtree(folder, ignore_errors=True)
        self.run = self.sweep = None
        for parent in folder.absolute().parents:
            if parent == Path.cwd() or Path.cwd() not in parent.parents:
                break
            with suppress(OSError):  # other runs lie there
                parent.rmdir()


_current: ContextVar[Folders | None] = ContextVar("folders", default=None)


def current_folders() -> Folders | None:
    """Returns the folders of the command that runs in this process, or None in the process of a launcher."""
    return _current.get()


class RememberFolder(Callback):
    """Notes the folder of the run or the sweep. Hydra calls it in the process of the command, with any launcher."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Notes the folder of a single run."""
        if (folders := current_folders()) is not None:
            with suppress(OmegaConfBaseException):  # Hydra says so when it makes the folder
                folders.run = Path(config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Notes the folder of a sweep."""
        if (folders := current_folders()) is not None:
            folders.dry = bool(config.get("dry_run"))
            with suppress(OmegaConfBaseException):
                folders.sweep = Path(config.hydra.sweep.dir)
                # A launcher's process may begin in another folder: for each job the sweep's folder is this one.
                with read_write(config), open_dict(config):
                    config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(str(folders.sweep.absolute()))}")
            folders.ready()  # jobs may print from other processes


def _folder_named(study: str) -> str:
    """Returns the name of a study if it can name a folder. Hydra makes that before sdopt sees the configuration."""
    if wrong := wrong_name(study):
        raise UsageError(f"study.name={study}: {wrong}")
    return study


OmegaConf.register_new_resolver("sdopt.folder", _folder_named, replace=True)


def is_informative(argv: Sequence[str]) -> bool:
    """Returns whether a command line only asks Hydra to print something."""
    return any(argument.partition("=")[0] in INFORMATIVE for argument in argv)


def enter_working_folder() -> None:
    """Changes to the folder of the command, so that relative paths and modules resolve in a launcher's process too."""
    if current_folders() is None:
        with suppress(OSError):  # a machine without that folder may not need it
            os.chdir(HydraConfig.get().runtime.cwd)
    add_working_folder()


def add_working_folder() -> None:
    """Lets `_target_` name modules of the working folder; appends it to `sys.path`, so that none shadows a library."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def run_hydra(
    job: Callable[[DictConfig], Any],
    argv: Sequence[str],
    folders: Folders,
    program: str = "sdopt run",
    config_name: str = CONFIG_NAME,
) -> None:
    """Composes what a command line asks for, and runs the job with it: once, or in a sweep once per combination.

    Args:
        job: a function at the top of a module, so that a launcher can send it to another process.
        argv: overrides and Hydra's flags.
        folders: receives the folders of the command.
        program: the name of the command in `--help`.
        config_name: the primary configuration in `conf/`.

    Raises:
        UsageError: Hydra refuses the command line.
        Exception: whatever a job or a launcher raises.
    """
    for argument in argv:
        if (name := argument.partition("=")[0]) in _OTHER_CONFIGURATION:
            raise UsageError(
                f"{name}: sdopt composes its own configuration; add groups with --config-dir, and presets with "
                "experiment=…"
            )
    add_working_folder()
    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)
    token = _current.set(folders)
    try:
        with _arguments([program, *argv]), _errors_raised():
            main()
    except SystemExit as error:
        # argparse has printed its message.
        if error.code:
            raise UsageError([]) from error
    finally:
        _current.reset(token)


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Replaces `sys.argv` within the block, because Hydra reads the command line from there."""
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Makes Hydra raise errors that it would otherwise print, partly as a traceback, before it exits with code 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
