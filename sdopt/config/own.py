"""Composes the configuration of a command that has a file of its own in `conf/`, beside that of `sdopt run`."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sdopt.config.compositions import composition_errors
from sdopt.config.groups import optimization_options
from sdopt.config.overrides import group_of, key_of
from sdopt.config.paths import CONF, config_name_of
from sdopt.config.typed import typed
from sdopt.errors import UsageError
from sdopt.schema import Serving

T = TypeVar("T")

BATCHES = "workload.batch_size=[1,2,4,8]"
"""The batch sizes of a server where nobody names others."""

_SERVED = (
    *("model", "scheduler", "hardware", "task", "patch", "protocol.timeout_s"),
    *(
        f"workload.{key}"
        for key in ("batch_size", "guidance_scale", "negative_prompt", "size", "steps")
    ),
)
"""Sections, and keys of others, that a server reads beside the options."""


def own_config(
    command: str, kind: type[T], overrides: Sequence[str], section: str = ""
) -> T:
    """Returns the file of a command, or a section of it, with overrides applied, typed and within its ranges.

    The file of `train-reference` is `conf/train_reference.yaml`; `kind` is its dataclass, or that of the section.

    Raises:
        UsageError: an override names no key, or a value is of another type or out of its range; all such values are
            reported together.
    """
    with (
        composition_errors(),
        initialize_config_dir(version_base="1.3", config_dir=str(CONF)),
    ):
        values: Any = OmegaConf.to_container(
            compose(config_name_of(command), list(overrides)), resolve=True
        )
    problems: list[str] = []
    config: T = typed(section, values[section] if section else values, kind, problems)
    if problems:
        raise UsageError(problems)
    return config


def serving_config(overrides: Sequence[str]) -> tuple[Serving, list[str]]:
    """Returns `conf/serve.yaml` with the overrides of a command line applied, and the overrides of what is served.

    Raises:
        UsageError: an override names no key, is out of its range, or would have no effect on a server.
    """
    # `engine=ray` alone is what one types.
    overrides = [
        f"serving.{override}" if override.startswith("engine=") else override
        for override in overrides
    ]
    own = [
        override for override in overrides if group_of(key_of(override)) == "serving"
    ]
    others = [override for override in overrides if override not in own]
    serving = own_config("serve", Serving, own, "serving")
    problems = list(without_effect(others))
    if serving.engine == "local":
        given = [
            override
            for override in own
            if key_of(override) in ("serving.replicas", "serving.most_replicas")
        ]
        problems += [
            f"{override}: has no effect on one machine; choose engine=ray"
            for override in given
        ]
    elif serving.port == 0:
        problems.append("serving.port=0: Ray's proxies need a port that is named")
    if problems:
        raise UsageError(problems)
    return serving, others


def without_effect(overrides: Sequence[str], more: Sequence[str] = ()) -> Iterator[str]:
    """Yields a line for each override that nothing which is served depends on.

    Args:
        overrides: those of what is served.
        more: further sections and keys that a command reads.
    """
    known = {*_SERVED, *more, *(group for group, _ in optimization_options())}
    for override in overrides:
        key = key_of(override)
        section = group_of(key)
        if not (key in known or section in known or override.startswith("+")):
            keys = [
                name for name in (*_SERVED, *more) if name.startswith(f"{section}.")
            ]
            choice = f"; of this section it reads {', '.join(keys)}" if keys else ""
            meant = f"serving.{key.rpartition('.')[2]}"
            if meant in (f"serving.{field.name}" for field in fields(Serving)):
                choice = f"; did you mean {meant}?"
            yield f"{override}: has no effect on a server; leave it out{choice}"
