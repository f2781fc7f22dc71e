"""Reads what `sdopt serve` is asked for: how it serves, apart from what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sdopt.config.groups import optimization_options
from sdopt.config.overrides import group_of, key_of
from sdopt.config.own import own_config
from sdopt.errors import UsageError
from sdopt.schema import Serving

BATCHES = "workload.batch_size=[1,2,4,8]"
"""The batch sizes of a server where nobody names others."""

_SECTIONS = ("model", "scheduler", "hardware", "task")

_KEYS = (
    *(f"workload.{key}" for key in ("batch_size", "guidance_scale", "negative_prompt", "size", "steps")),
    "protocol.timeout_s",
)
"""Keys of other sections that a server reads."""


@dataclass(frozen=True)
class ServeCommand:
    """The file as a whole."""

    serving: Serving


def serving_config(overrides: Sequence[str]) -> tuple[Serving, list[str]]:
    """Returns `conf/serve.yaml` with the overrides of a command line applied, and the overrides of what is served.

    Raises:
        UsageError: an override names no key, is out of its range, or would have no effect on a server.
    """
    # `engine=ray` alone is what one types.
    overrides = [f"serving.{override}" if override.startswith("engine=") else override for override in overrides]
    own = [override for override in overrides if group_of(key_of(override)) == "serving"]
    others = [override for override in overrides if override not in own]
    serving = own_config("serve", ServeCommand, own).serving
    problems = list(without_effect(others))
    if serving.engine == "local":
        given = [override for override in own if key_of(override) in ("serving.replicas", "serving.most_replicas")]
        problems += [f"{override}: has no effect on one machine; choose engine=ray" for override in given]
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
    known = {"patch", *_SECTIONS, *(group for group, _ in optimization_options()), *more}
    for override in overrides:
        key = key_of(override)
        section = group_of(key)
        if key in (*_KEYS, *more) or section in known or override.startswith("+"):
            continue
        keys = [name for name in (*_KEYS, *more) if name.startswith(f"{section}.")]
        choice = f"; of this section it reads {', '.join(keys)}" if keys else ""
        yield f"{override}: has no effect on a server; leave it out{choice}"
