"""Reads the properties of a Hydra job that sdopt needs: its folder, and how to run it again."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # OmegaConf raises it

from sdopt.config.models import own_functions
from sdopt.config.overrides import group_of, key_of, merge_overrides, parsed_override, quoted, written_key
from sdopt.config.parse import COMMAND_KEYS
from sdopt.errors import UsageError, without_passwords
from sdopt.record.files import read_result
from sdopt.study.resume import EXTENSIONS

_OWN_CODE = ("patch", "model", "model.factory")
"""Keys that name functions of a user's files."""


def with_resumed(argv: Sequence[str]) -> list[str]:
    """Expands `resume=<folder>` into the command line that was recorded in the folder of a run or a sweep.

    A command line without `resume` is returned as it is. Overrides of tracking, `retry_failed` and the keys that extend
    a study win over the recorded ones.

    Raises:
        UsageError: another override is given with `resume`, or the folder holds no recorded command line.
    """
    named = [a for a in argv if a.lstrip("+").startswith("resume=") and a.lstrip("+") != "resume=null"]
    if not named:
        if any(argument.lstrip("+") == "retry_failed=true" for argument in argv):
            raise UsageError(
                "retry_failed=true: works only on a study that is resumed; name its folder with resume=<folder>"
            )
        return list(argv)
    folder = _folder_of(named[0].partition("=")[2])
    beside = [argument for argument in argv if argument != named[0]]
    kept = [
        argument
        for argument in beside
        if group_of(written_key(argument)) in ("tracking", "retry_failed") or written_key(argument) in EXTENSIONS
    ]
    own_code = [argument for argument in beside if own_functions([argument]) and written_key(argument) in _OWN_CODE]
    passed = (*kept, *own_code, "-m", "--multirun")
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
    task, hydra, added = _recorded(source, folder)
    _require_named(task, own_code)
    folder_key = "hydra.sweep.dir" if sweep.is_file() else "hydra.run.dir"
    ours = ("hydra.mode", "hydra.sweep.dir", "hydra.run.dir", *COMMAND_KEYS)
    return [
        *(["-m"] if sweep.is_file() else []),
        *(part for path in added for part in ("--config-dir", path)),
        *(override for override in merge_overrides(_as_measured(task, folder), kept) if key_of(override) not in ours),
        *(override for override in hydra if key_of(override) not in ours),
        *(override for override in kept if key_of(override) in ours),
        f"{folder_key}={quoted(str(folder))}",
        f"resume={quoted(str(folder))}",
    ]


def _require_named(recorded: Sequence[str], given: Sequence[str]) -> None:
    """Checks that the command names each function of one's own that a recorded command would run again.

    Raises:
        UsageError: a folder, which may come from anybody, would decide which code runs.
    """
    said = own_functions(given)
    if lacking := [function for function in own_functions(recorded) if function not in said]:
        factories = own_functions(override for override in recorded if group_of(key_of(override)) == "model")
        key = "model" if lacking[0] in factories else "patch"
        raise UsageError(
            f"resume: the study runs code, {', '.join(lacking)}; name it once more beside resume, as in "
            f"{key}={lacking[0]}, so that a folder never decides what runs"
        )


def _folder_of(value: str) -> Path:
    """Returns the folder that `resume` names: a path as it is if there is one, whatever characters it has."""
    folder = Path(value).expanduser()
    if not folder.exists():
        with suppress(UsageError):
            folder = Path(str(parsed_override(f"resume={value}").value())).expanduser()
    return folder


def _recorded(source: Path, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Reads the overrides of a command, those of Hydra's own keys, and the folders that it added.

    Raises:
        UsageError: the file is missing, or was not written by Hydra.
    """
    name = source.relative_to(folder)
    if not source.is_file():
        raise UsageError(
            f"resume={folder}: has no {name}, which records what was run there; name the folder of a run or of a sweep"
        )
    try:
        recorded: Any = OmegaConf.to_container(OmegaConf.load(source), resolve=False)
        overrides, sources = recorded["hydra"]["overrides"], recorded["hydra"]["runtime"]["config_sources"]
        task, hydra = (
            [str(override) for override in overrides["task"]],
            [str(override) for override in overrides["hydra"]],
        )
        return task, hydra, [str(item["path"]) for item in sources if item["provider"] == "command-line"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
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
    config = read_result(folder).config.flat()
    recorded = {key: "null" if config[key] is None else config[key] for key in EXTENSIONS}
    return [f"{key}={recorded[key]}" if (key := key_of(o)) in recorded else o for o in overrides]


def job_folder() -> Path:
    """Returns the folder that Hydra made for the running job."""
    return Path(HydraConfig.get().runtime.output_dir)


def hide_passwords() -> None:
    """Takes the passwords of addresses out of what Hydra has recorded of the running job, and of its sweep."""
    recorded = [*(job_folder() / ".hydra").glob("*.yaml"), Path(HydraConfig.get().sweep.dir) / "multirun.yaml"]
    for file in recorded:
        with suppress(FileNotFoundError):
            text = file.read_text(encoding="utf-8")
            if (hidden := without_passwords(text)) != text:
                beside = file.with_name(f"{file.name}.{os.getpid()}")  # jobs may do so at once
                beside.write_text(hidden, encoding="utf-8")
                beside.replace(file)
