"""Reads and merges Hydra overrides."""

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from sdopt.errors import UsageError


def without_plus(argument: str) -> str:
    return argument.lstrip("+")


def quoted(value: str) -> str:
    """A string as Hydra's grammar takes it, whatever is in it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def merge_overrides(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Overrides followed by more; where those replace a group, what was said of its keys goes with it."""
    replaced = [key for key in map(key_of, more) if "." not in key]
    kept = [o for o in overrides if not any(key_of(o) == key or key_of(o).startswith(key + ".") for key in replaced)]
    return [*kept, *more]


def key_of(override: str) -> str:
    """`compiler` of `compiler=inductor` and of `+compiler=mine`; `compiler.mode` of `compiler.mode=default`."""
    try:
        return str(OverridesParser.create().parse_override(override).key_or_group)
    except HydraException as error:
        raise UsageError(f"{override}: not an override ({str(error).splitlines()[0]}); write key=value") from error


def group_of(key: str) -> str:
    return key.partition(".")[0].partition("/")[0]
