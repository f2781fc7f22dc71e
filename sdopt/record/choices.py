"""Defines how a result, and a list of overrides, write the options that a variant chose.

An *axis* is where one option sits in the configuration: `precision`, or `memory.vae_slicing` in a group whose options
combine. Two options of one axis exclude each other; two options of a group that sit on different axes combine.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "none"
"""The option of an axis on which nothing is chosen."""

PATCH = "patch"
"""The axis of functions of one's own that change the pipeline."""


PLAIN = {
    "task": "txt2img",
    "precision": "fp32",
    "lora": NONE,
    "caching": NONE,
    "attention": "default",
    "compiler": "eager",
    "layout": "contiguous",
    "grad_mode": "no_grad",
    PATCH: NONE,
    "scheduler": "ddim",
}
"""The default option of each group, as in `conf/config.yaml`."""


def is_plain(axis: str, option: str) -> bool:
    """Returns whether an option is the default of its axis, and none of its keys was changed."""
    return option == PLAIN.get(axis, NONE)


def as_choice(axis: str, option: str) -> str:
    """Returns a choice as on a command line: `precision=bf16`, `memory=vae_slicing`.

    On an axis within a group, nothing chosen is written with the axis in full: `memory.vae_slicing=none`.
    """
    return (
        f"{axis}={option}" if option == NONE else f"{axis.partition('.')[0]}={option}"
    )


def as_override(option: str) -> str:
    """Returns `precision:bf16` as `precision=bf16`: Hydra's grammar takes no bare `=` within a list."""
    return option if "=" in option else option.replace(":", "=", 1)


def option_name(option: str) -> str:
    """Returns an option without the keys that it lists: `deepcache` for `deepcache(interval=2)`."""
    return option.partition("(")[0]


def listed(choices: Mapping[str, str]) -> str:
    """Returns choices by axis as one line: `precision=bf16, memory=vae_slicing`."""
    named = without_folders(choices)
    return ", ".join(as_choice(axis, option) for axis, option in named.items())


def without_folders(choices: Mapping[str, str]) -> dict[str, str]:
    """Returns choices by axis with functions of one's own as `file.py:function`, wherever the files lie."""
    named = dict(choices)
    if PATCH in named:
        functions = named[PATCH].split("+")
        named[PATCH] = "+".join(function.rpartition("/")[2] for function in functions)
    return named


def difference(
    choices: Mapping[str, str], reference: Mapping[str, str]
) -> dict[str, str]:
    """Returns the choices by axis that are not those of the reference; an axis that only it has is `none`."""
    axes = [*choices, *(axis for axis in reference if axis not in choices)]
    return {
        axis: choices.get(axis, NONE)
        for axis in axes
        if choices.get(axis) != reference.get(axis)
    }


def quoted(value: str) -> str:
    """Quotes a string so that Hydra's grammar accepts it, whatever characters it has."""
    # There, a backslash is itself, unless others or none stand between it and a quote.
    escaped = re.sub(
        r"(\\*)('|\Z)", lambda found: 2 * found[1] + (found[2] and "\\'"), value
    )
    return f"'{escaped}'"


def written_value(value: Any) -> str:
    """Returns a value as an override has it after the `=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        plain = (
            re.fullmatch(r"[A-Za-z_][\w.-]*", value, re.ASCII)
            and value.lower() not in _OTHER_THAN_TEXT
        )
        return value if plain else quoted(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(written_value, value))}]"
    return repr(value)


_OTHER_THAN_TEXT = ("null", "true", "false", "nan", "inf")
"""Words that Hydra takes for something else than text."""
