"""A command line of `sdopt run`: what it resumes, what it composes, where it writes, and what Hydra records of it."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import ValueType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # OmegaConf raises it

from sdopt.config.command import CommandLine, run_hydra
from sdopt.config.compositions import Compositions, composition_errors
from sdopt.config.groups import default_options, require_overrides
from sdopt.config.models import named_again, own_functions
from sdopt.config.overrides import (
    group_of,
    key_of,
    listed,
    merge_overrides,
    parsed_override,
    written_key,
)
from sdopt.config.paths import CONF, CONFIG_NAME
from sdopt.config.sections import COMMAND_KEYS
from sdopt.errors import UsageError, with_type, without_passwords
from sdopt.record.choices import quoted

if TYPE_CHECKING:
    from sdopt.config.composer import HydraComposer

_OWN_CODE = ("patch", "model", "model.factory")
"""Keys that name functions of a user's files."""

_OF_SWEEPS = re.compile(r"hydra[./](sweep|sweeper|launcher)\b")
"""Hydra's own keys that it reads for a sweep alone."""


@dataclass(frozen=True)
class Command:
    """A command line that Hydra has composed.

    Attributes:
        line: the command line.
        folder: the folder of the run or of the sweep.
        dry: whether it only asks for its plan.
        composer: composes the variants of a single run; None for a sweep, whose jobs have one each.
    """

    line: CommandLine
    folder: Path
    dry: bool
    composer: "HydraComposer | None"

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
        single = [
            first
            for override in line.overrides
            if (first := _first(override)) is not None
        ]
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            compositions = Compositions(path)
            with composition_errors():
                cfg = compose(
                    CONFIG_NAME,
                    [*path, *_without(single, "hydra.searchpath")],
                    return_hydra_config=True,
                )
                sweep = line.multirun or cfg.hydra.mode == RunMode.MULTIRUN
                folder = Path(
                    cfg.hydra.sweep.dir if sweep else cfg.hydra.run.dir
                ).expanduser()
                _require_job(cfg.hydra, sweep, line)
            _require_place(line, sweep)
            if sweep:
                _require_of_sweep(cfg.hydra, line, path)
                _require_kept(line.task)
                _require_options(line, compositions)
                return cls(line, folder, bool(cfg.get("dry_run")), None)
            from sdopt.config.composer import (
                HydraComposer,
            )  # a line that Hydra refuses has ended by now

            composed = (cfg, cfg.hydra) if single == list(line.overrides) else None
            composer = HydraComposer(line.task, [*path, *rest], composed)
        return cls(line, folder, composer.current.dry_run, composer)

    def require_gate(self) -> None:
        """Raises UsageError if keys of a gate are given, and no gate is chosen: nothing would be judged."""
        measuring = ("gate.replicates", "gate.prompt_count")
        of_gate = [
            override
            for override in self.line.task
            if (key := key_of(override)).startswith("gate.") and key not in measuring
        ]
        if (
            of_gate
            and self.composer is not None
            and not self.composer.current.gate.judges
        ):
            raise UsageError(
                f"{' '.join(of_gate)}: no gate is chosen, so that nothing would be judged; add gate=default"
            )

    @property
    def sweep(self) -> bool:
        """Whether it asks for a sweep, by `-m` or by `hydra.mode`."""
        return self.composer is None

    @property
    def resumes(self) -> bool:
        """Whether it continues what its folder holds."""
        if self.composer is not None:
            return bool(self.composer.current.resume)
        named = [
            override for override in self.line.task if key_of(override) == "resume"
        ]
        return bool(named) and parsed_override(named[-1]).value() is not None

    @property
    def place(self) -> str:
        """The key that names its folder."""
        return "hydra.sweep.dir" if self.sweep else "hydra.run.dir"

    def run(self, job: Callable[[DictConfig], Any], folder: Path) -> None:
        """Runs a job by Hydra: once, or in a sweep once per combination.

        Args:
            job: what a launcher can send to another process.
            folder: where Hydra records the command, and makes the folders of jobs.

        Raises:
            Exception: whatever Hydra or a launcher raises, and a job that does not keep its errors to itself.
        """
        # A launcher's process may begin in another folder: for each job the sweep's folder is this one.
        folder = folder.absolute() if self.sweep else folder
        overrides = [
            *_without(self.line.overrides, self.place),
            f"{self.place}={quoted(str(folder))}",
        ]
        flags = ["-m"] if self.line.multirun else []
        flags += (
            ["--config-dir", str(self.line.config_dir)] if self.line.config_dir else []
        )
        run_hydra([*flags, *overrides], job)


def _require_once(overrides: Sequence[str]) -> None:
    """Raises UsageError if options of a group that combine are given apart: Hydra takes the last."""
    for group in [
        group
        for group, default in default_options().items()
        if isinstance(default, list)
    ]:
        chosen = [
            override
            for override in overrides
            if key_of(override) == group and not override.startswith("~")
        ]
        options_by_override = {
            override: options
            for override in chosen
            if (options := override.partition("=")[2].strip("[]"))
        }
        if len(options_by_override) > 1:
            options = ",".join(options_by_override.values())
            raise UsageError(
                f"{' '.join(options_by_override)}: only the last would be used; {group}=[{options}] combines them"
            )


def _require_kept(overrides: Sequence[str]) -> None:
    """Raises UsageError if mappings of one key are given apart: a run merges them, a sweep takes the last."""
    mappings: dict[str, list[str]] = {}
    for override in overrides:
        if isinstance(parsed_override(override).value(), dict):
            mappings.setdefault(key_of(override), []).append(override)
    for key, words in mappings.items():
        if len(words) > 1:
            raise UsageError(
                f"{' '.join(words)}: in a sweep only the last would be used; give all keys of {key} at once"
            )


def _searchpath(line: CommandLine) -> tuple[list[str], list[str]]:
    """Returns the override of the search path with the folder of `--config-dir`, and Hydra's other overrides."""
    named = [
        override for override in line.hydra if key_of(override) == "hydra.searchpath"
    ]
    paths: Any = parsed_override(named[-1]).value() if named else []
    if not isinstance(paths, list):
        raise UsageError(
            f"{named[-1]}: must be a list, as in hydra.searchpath=[file:///folder]"
        )
    if line.config_dir:
        paths = [f"file://{line.config_dir.absolute()}", *paths]
    path = (
        [f"hydra.searchpath=[{','.join(quoted(str(path)) for path in paths)}]"]
        if paths
        else []
    )
    return path, [override for override in line.hydra if override not in named]


def _first(override: str) -> str | None:
    """Returns the override for the first of the values that it sweeps; None if they cannot be told."""
    if not parsed_override(override).is_sweep_override():
        return override
    values = listed(override)
    return f"{override.partition('=')[0]}={values[0]}" if values else None


def _require_options(line: CommandLine, compositions: Compositions) -> None:
    """Raises UsageError if a sweep names an option that does not exist, or none, before its other jobs are measured."""
    for override in line.task:
        values, key, parsed = (
            listed(override),
            override.partition("=")[0],
            parsed_override(override),
        )
        if parsed.value_type == ValueType.GLOB_CHOICE_SWEEP:
            some = parsed.value().filter(compositions.options(key_of(override)))  # type: ignore[union-attr]
        else:
            some = (
                values is not None
                or not parsed.is_discrete_sweep()
                or any(True for _ in parsed.sweep_iterator())
            )
        if not some:
            raise UsageError(f"{override}: names nothing, so that there is no job")
        if values and compositions.options(key_of(override)):
            for value in values:
                if value != "[]" and compositions.axes(f"{key}={value}") is None:
                    compositions.of([f"{key}={value}"])


def _without(overrides: Sequence[str], key: str) -> list[str]:
    return [override for override in overrides if key_of(override) != key]


def _require_place(line: CommandLine, sweep: bool) -> None:
    """Raises UsageError if a command line sets for a single run what a sweep alone reads, or the other way round."""
    mine, other = "hydra.run.dir", "hydra.sweep.dir"
    if sweep:
        mine, other = other, mine
    for override in line.hydra:
        key = key_of(override)
        if key == other:
            raise UsageError(
                f"{override}: has no effect here; {mine}=… names the folder"
            )
        if not sweep and _OF_SWEEPS.match(key):
            raise UsageError(f"{override}: has no effect on a single study; add -m")


def _require_of_sweep(
    hydra: DictConfig, line: CommandLine, path: Sequence[str]
) -> None:
    """Raises UsageError if what a sweep varies chooses how it runs: Hydra reads that for each job, and then it is late."""
    choices, params = hydra.runtime.choices, hydra.sweeper.get("params")
    named = [key_of(override) for override in line.hydra]
    late = [
        group
        for group in ("hydra/launcher", "hydra/sweeper")
        if choices[group] != "basic" and group not in named
    ]
    if not late and not params:
        return
    shared = [
        override
        for override in _without(line.overrides, "hydra.searchpath")
        if not parsed_override(override).is_sweep_override()
    ]
    with composition_errors():
        whole = compose(CONFIG_NAME, [*path, *shared], return_hydra_config=True)
    for group in late:
        if whole.hydra.runtime.choices[group] != choices[group]:
            raise UsageError(
                f"{group}={choices[group]}: is chosen by what the sweep varies, which has no effect on the sweep; name "
                "it on the command line"
            )
    if params != whole.hydra.sweeper.get("params"):
        raise UsageError(
            "hydra.sweeper.params: is set by what the sweep varies, which has no effect on the sweep; sweep over each "
            "with a command of its own"
        )


def _require_job(hydra: DictConfig, sweep: bool, line: CommandLine) -> None:
    """Raises UsageError for settings of Hydra that would have no effect, or put files where nobody looks for them."""
    if hydra.job.chdir:
        raise UsageError(
            "hydra.job.chdir=true: a study runs in the folder in which it is started, so that its paths and its "
            "database are the same for all; leave it out (results are in the folder of hydra.run.dir anyway)"
        )
    if not sweep and hydra.sweeper.get("params"):
        raise UsageError(
            "hydra.sweeper.params: is set by a file, and has no effect on a single study; add -m"
        )
    launched = sweep and not str(hydra.launcher._target_).endswith(".BasicLauncher")
    if hydra.job.env_set and not launched:
        raise UsageError(
            f"hydra.job.env_set: processes that measure start before Hydra sets {', '.join(hydra.job.env_set)}: set it "
            "where you start the command"
        )
    subdir = Path(str(OmegaConf.to_container(hydra.sweep, resolve=False)["subdir"]))  # type: ignore[call-overload, index]
    if subdir.is_absolute() or ".." in subdir.parts:
        raise UsageError(
            f"hydra.sweep.subdir={subdir}: must be a folder below hydra.sweep.dir"
        )
    if (
        sweep
        and "${" not in str(subdir)
        and any(parsed_override(override).is_sweep_override() for override in line.task)
    ):
        by_number = "hydra.sweep.subdir='${hydra.job.num}'"
        raise UsageError(
            f"hydra.sweep.subdir={subdir}: each job needs a folder of its own, as in {by_number}"
        )


def with_resumed(argv: Sequence[str]) -> list[str]:
    """Expands `resume=<folder>` into the command line that was recorded in the folder of a run or a sweep.

    A command line without `resume` is returned as it is. Overrides of tracking, `retry_failed` and the keys that extend
    a study win over the recorded ones.

    Raises:
        UsageError: another override is given with `resume`, or the folder holds no recorded command line.
    """
    named = [
        a
        for a in argv
        if a.lstrip("+").startswith("resume=") and a.lstrip("+") != "resume=null"
    ]
    if not named:
        if any(
            argument.lstrip("+").lower() == "retry_failed=true" for argument in argv
        ):
            raise UsageError(
                "retry_failed=true: works only on a study that is resumed; name its folder with resume=<folder>"
            )
        return list(argv)
    from sdopt.study.resume import EXTENSIONS

    folder = _folder_of(named[0].partition("=")[2])
    beside = [argument for argument in argv if argument != named[0]]
    extending = [
        argument
        for argument in beside
        if group_of(written_key(argument)) in ("tracking", "retry_failed")
        or written_key(argument) in EXTENSIONS
    ]
    own_code = [
        argument
        for argument in beside
        if own_functions([argument]) and written_key(argument) in _OWN_CODE
    ]
    passed = (*extending, *own_code, "-m", "--multirun")
    refused = [argument for argument in beside if argument not in passed]
    if refused:
        raise UsageError(
            [
                f"{argument}: cannot be changed together with resume, which continues the study of its folder; only "
                f"tracking, retry_failed and the keys that extend a study can be given ({', '.join(EXTENSIONS)})"
                for argument in refused
            ]
        )
    sweep = folder / "multirun.yaml"
    source = sweep if sweep.is_file() else folder / ".hydra" / "hydra.yaml"
    task, hydra, added = recorded_command(source, folder)
    _require_named(task, own_code)
    keys = {written_key(argument) for argument in extending}
    if "tracking=none" in task and "tracking.uri" in keys and "tracking" not in keys:
        extending.insert(0, "tracking=mlflow")  # who names a store now wants it used
    folder_key = "hydra.sweep.dir" if sweep.is_file() else "hydra.run.dir"
    ours = ("hydra.mode", "hydra.sweep.dir", "hydra.run.dir", *COMMAND_KEYS)
    return [
        *(["-m"] if sweep.is_file() else []),
        *chain.from_iterable(("--config-dir", path) for path in added),
        *(
            override
            for override in merge_overrides(_as_measured(task, folder), extending)
            if key_of(override) not in ours
        ),
        *(override for override in hydra if key_of(override) not in ours),
        *(override for override in extending if key_of(override) in ours),
        f"{folder_key}={quoted(str(folder))}",
        f"resume={quoted(str(folder))}",
    ]


def _require_named(recorded: Sequence[str], given: Sequence[str]) -> None:
    """Checks that the command names each function of one's own that a recorded command would run again.

    Raises:
        UsageError: a folder, which may come from anybody, would decide which code runs.
    """
    said = own_functions(given)
    if lacking := [
        function for function in own_functions(recorded) if function not in said
    ]:
        again = " ".join(named_again(recorded))
        raise UsageError(
            f"resume: the study runs code, {', '.join(lacking)}; name it once more beside resume, as in {again}, so that "
            "a folder never decides what runs"
        )


def _folder_of(value: str) -> Path:
    """Returns the folder that `resume` names: a path as it is if there is one, whatever characters it has."""
    folder = Path(value).expanduser()
    if not folder.exists():
        with suppress(UsageError):
            named = parsed_override(f"resume={value}").value()
            folder = Path(named).expanduser() if isinstance(named, str) else folder
    return folder


def recorded_command(
    source: Path, folder: Path
) -> tuple[list[str], list[str], list[str]]:
    """Reads the overrides of a command, those of Hydra's own keys, and the folders that it added.

    Raises:
        UsageError: the file is missing, or was not written by Hydra.
    """
    name = source.relative_to(folder)
    if not source.is_file():
        way = f"name the folder of a run or of a sweep{'' if folder.exists() else ', which is there'}"
        if (folder / "result.json").is_file():
            way = "hydra.output_subdir=null leaves it out, and so does a copy without hidden files (upload-artifact)"
        raise UsageError(
            f"resume={folder}: has no {name}, which records what was run there; {way}"
        )
    try:
        recorded: Any = OmegaConf.to_container(OmegaConf.load(source), resolve=False)
        overrides, sources = (
            recorded["hydra"]["overrides"],
            recorded["hydra"]["runtime"]["config_sources"],
        )
        task, hydra = (
            [str(override) for override in overrides["task"]],
            [str(override) for override in overrides["hydra"]],
        )
        return (
            task,
            hydra,
            [
                str(item["path"])
                for item in sources
                if item["provider"] == "command-line"
            ],
        )
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        RecursionError,
        YAMLError,
        OmegaConfBaseException,
    ) as error:
        reason = with_type(error)
        raise UsageError(
            f"resume={folder}: {name}, which records what was run there, is damaged ({reason}); "
            "run the command again in another folder"
        ) from error


def _as_measured(overrides: Sequence[str], folder: Path) -> list[str]:
    """Returns the overrides of a run, with the values that its result has for the keys that extend a study.

    Hydra records a command line before sdopt has accepted the extension, so the recorded values may be wrong.
    """
    if not (folder / "result.json").is_file():
        return list(overrides)
    from sdopt.record.files import read_result
    from sdopt.study.resume import EXTENSIONS

    config = read_result(folder).config.flat()
    measured = []
    for override in overrides:
        key = key_of(override)
        if key in EXTENSIONS:
            value = "null" if config[key] is None else config[key]
            override = f"{key}={value}"  # noqa: PLW2901
        measured.append(override)
    return measured


def job_folder() -> Path:
    """Returns the folder that Hydra made for the running job."""
    return Path(HydraConfig.get().runtime.output_dir)


def hide_passwords() -> None:
    """Takes the passwords of addresses out of what Hydra has recorded of the running job, and of its sweep."""
    record = job_folder() / (HydraConfig.get().output_subdir or ".hydra")
    recorded = [
        *record.glob("*.yaml"),
        Path(HydraConfig.get().sweep.dir) / "multirun.yaml",
    ]
    for file in recorded:
        with suppress(FileNotFoundError):
            text = file.read_text(encoding="utf-8")
            if (hidden := without_passwords(text)) != text:
                beside = file.with_name(
                    f"{file.name}.{os.getpid()}"
                )  # jobs may do so at once
                beside.write_text(hidden, encoding="utf-8")
                beside.replace(file)
