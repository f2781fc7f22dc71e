"""The folder `conf/`: its groups, options and data sheets."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from sdopt.config.parse import SECTIONS
from sdopt.config.paths import CONF
from sdopt.config.typed import build_typed
from sdopt.errors import UsageError
from sdopt.schema import Sheet


def optimization_options(config_dir: Path | None = None) -> Iterator[tuple[str, str]]:
    """Each option of each group that is neither a section of its own nor a preset: (group, option)."""
    for folder in [CONF, *([config_dir] if config_dir else [])]:
        for path in sorted(folder.glob("*/*.yaml")):
            if path.parent.name not in (*SECTIONS, "experiment"):
                yield path.parent.name, path.stem


@cache
def data_sheets() -> Mapping[str, Sheet]:
    """The packaged data sheets, by option of the group `hardware`. Raises UsageError where a file is wrong."""
    problems: list[str] = []
    nodes = {path.stem: OmegaConf.load(path) for path in sorted((CONF / "hardware").glob("*.yaml"))}
    sheets = {
        option: build_typed(f"{option}.sheet", node.sheet, Sheet, problems)
        for option, node in nodes.items()
        if "sheet" in node and node.sheet is not None
    }
    if problems:
        raise UsageError(problems)
    return sheets


def reject_null_groups(overrides: Sequence[str]) -> None:
    """Raises UsageError where a group is set to null, on which Hydra would only end with a traceback."""
    for override in overrides:
        key, _, value = override.partition("=")
        if value == "null" and (CONF / key).is_dir() and key != "experiment":
            options = ", ".join(sorted(path.stem for path in (CONF / key).glob("*.yaml")))
            raise UsageError(f"{key}=null: a group is chosen, not emptied; choose one of {options}")
