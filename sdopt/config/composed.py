"""Composes a command line once: what it asks for, and where it writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sdopt.config.command import CommandLine, run_hydra
from sdopt.config.composer import HydraComposer
from sdopt.config.compositions import Compositions, composition_errors
from sdopt.config.groups import default_options, require_overrides
from sdopt.config.overrides import key_of, listed, parsed_override, quoted
from sdopt.config.paths import CONF, CONFIG_NAME
from sdopt.errors import UsageError


@dataclass(frozen=True)
class Command:
    """A command line that Hydra has composed.

    Attributes:
        line: the command line.
        sweep: whether it asks for a sweep, by `-m` or by `hydra.mode`.
        folder: the folder of the run or of the sweep.
        dry: whether it only asks for its plan.
        composer: composes the variants of a single run; None for a sweep, whose jobs have one each.
    """

    line: CommandLine
    sweep: bool
    folder: Path
    dry: bool
    composer: HydraComposer | None

    @classmethod
    def of(cls, line: CommandLine) -> "Command":
        """Composes a command line.

        Raises:
            UsageError: Hydra cannot compose it, or the configuration of a single run is not valid.
        """
        require_overrides(line.overrides)
        _require_once(line.task)
        path, rest = _searchpath(line)
        # A sweep's folder depends on no more than one of its jobs.
        single = [first for override in line.overrides if (first := _first(override)) is not None]
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            compositions = Compositions(path)
            with composition_errors():
                cfg = compose(CONFIG_NAME, [*path, *_without(single, "hydra.searchpath")], return_hydra_config=True)
                sweep = line.multirun or cfg.hydra.mode == RunMode.MULTIRUN
                folder = Path(cfg.hydra.sweep.dir if sweep else cfg.hydra.run.dir).expanduser()
                _require_job(cfg.hydra, sweep)
            _require_place(line, sweep)
            if sweep:
                _require_options(line, compositions)
                return cls(line, True, folder, bool(cfg.get("dry_run")), None)
            composed = (cfg, cfg.hydra) if single == list(line.overrides) else None
            composer = HydraComposer(line.task, [*path, *rest], composed)
        return cls(line, False, folder, composer.current.dry_run, composer)

    def run(self, job: Callable[[DictConfig], Any], folder: Path) -> None:
        """Runs a job by Hydra: once, or in a sweep once per combination.

        Args:
            job: what a launcher can send to another process.
            folder: where Hydra records the command, and makes the folders of jobs.

        Raises:
            Exception: whatever Hydra or a launcher raises, and a job that does not keep its errors to itself.
        """
        # A launcher's process may begin in another folder: for each job the sweep's folder is this one.
        key, folder = ("hydra.sweep.dir", folder.absolute()) if self.sweep else ("hydra.run.dir", folder)
        overrides = [*_without(self.line.overrides, key), f"{key}={quoted(str(folder))}"]
        flags = ["-m"] if self.line.multirun else []
        flags += ["--config-dir", str(self.line.config_dir)] if self.line.config_dir else []
        run_hydra([*flags, *overrides], job)


def _require_once(overrides: Sequence[str]) -> None:
    """Raises UsageError if options of a group that combine are given apart: Hydra takes the last."""
    for group in [group for group, default in default_options().items() if isinstance(default, list)]:
        given = dict.fromkeys(override for override in overrides if key_of(override) == group and "=" in override)
        if len(given) > 1:
            options = ",".join(override.partition("=")[2].strip("[]") for override in given)
            raise UsageError(f"{' '.join(given)}: only the last would be used; {group}=[{options}] combines them")


def _searchpath(line: CommandLine) -> tuple[list[str], list[str]]:
    """Returns the override of the search path with the folder of `--config-dir`, and Hydra's other overrides."""
    given = [override for override in line.hydra if key_of(override) == "hydra.searchpath"]
    paths: Any = parsed_override(given[-1]).value() if given else []
    if not isinstance(paths, list):
        raise UsageError(f"{given[-1]}: must be a list, as in hydra.searchpath=[file:///folder]")
    if line.config_dir:
        paths = [f"file://{line.config_dir.absolute()}", *paths]
    path = [f"hydra.searchpath=[{','.join(quoted(str(path)) for path in paths)}]"] if paths else []
    return path, [override for override in line.hydra if override not in given]


def _first(override: str) -> str | None:
    """Returns the override for the first of the values that it sweeps; None if they cannot be told."""
    if not parsed_override(override).is_sweep_override():
        return override
    values = listed(override)
    return f"{override.partition('=')[0]}={values[0]}" if values else None


def _require_options(line: CommandLine, compositions: Compositions) -> None:
    """Raises UsageError if a sweep names an option that does not exist, before its other jobs are measured."""
    for override in line.task:
        values, key = listed(override), override.partition("=")[0]
        if values and compositions.options(key_of(override)):
            for value in values:
                if value != "[]" and compositions.axes(f"{key}={value}") is None:
                    compositions.of([f"{key}={value}"])


def _without(overrides: Sequence[str], key: str) -> list[str]:
    return [override for override in overrides if key_of(override) != key]


def _require_place(line: CommandLine, sweep: bool) -> None:
    """Raises UsageError if a command line names the folder of a sweep for a single run, or the other way round."""
    mine, other = ("hydra.sweep.dir", "hydra.run.dir") if sweep else ("hydra.run.dir", "hydra.sweep.dir")
    if given := [override for override in line.hydra if key_of(override) == other]:
        what = "a sweep" if sweep else "a single run"
        raise UsageError(f"{given[-1]}: has no effect on {what}: {mine}={given[-1].partition('=')[2]} names its folder")


def _require_job(hydra: DictConfig, sweep: bool) -> None:
    """Raises UsageError for settings of Hydra that would have no effect, or put files where nobody looks for them."""
    if hydra.job.chdir:
        raise UsageError(
            "hydra.job.chdir=true: a study runs in the folder in which it is started, so that its paths and its "
            "database are the same for all; leave it out (results are in the folder of hydra.run.dir anyway)"
        )
    launched = sweep and not str(hydra.launcher._target_).endswith(".BasicLauncher")
    if hydra.job.env_set and not launched:
        raise UsageError(
            f"hydra.job.env_set: processes that measure start before Hydra sets {', '.join(hydra.job.env_set)}: set it "
            "where you start the command"
        )
    subdir = Path(str(OmegaConf.to_container(hydra.sweep, resolve=False)["subdir"]))  # type: ignore[call-overload, index]
    if subdir.is_absolute() or ".." in subdir.parts:
        raise UsageError(f"hydra.sweep.subdir={subdir}: must be a folder below hydra.sweep.dir")
