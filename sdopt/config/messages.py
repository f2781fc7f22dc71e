"""Turns Hydra's errors into a line that names the key and the way out."""

import difflib
import re
from contextlib import ExitStack
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from sdopt.config.paths import CONF, CONFIG_NAME


def explain(error: Exception) -> str:
    """What Hydra says, without the paths that it searched; of a key that is unknown, what was perhaps meant."""
    said = str(error).partition("Config search path")[0].strip()
    unknown = re.match(r"Could not override '([^']+)'", said)
    if unknown is None:
        return said
    near = difflib.get_close_matches(unknown[1], _known_keys(), n=2)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    added = f"what is not among the defaults, as a group of your own, takes a +, as in +{unknown[1]}=…"
    return f"{unknown[1]}: there is no such key; {advice}`sdopt run --help` lists all; {added}"


def _known_keys() -> list[str]:
    """Every group and every key of the plain configuration, in full."""
    with ExitStack() as stack:
        if not GlobalHydra.instance().is_initialized():
            stack.enter_context(initialize_config_dir(version_base="1.3", config_dir=str(CONF)))
        plain = OmegaConf.to_container(compose(CONFIG_NAME), resolve=False)
    # Groups of which nothing is chosen, as `experiment`, are in no configuration.
    keys = [folder.name for folder in CONF.iterdir() if folder.is_dir()]
    nodes: list[tuple[str, Any]] = [("", plain)]
    while nodes:
        prefix, node = nodes.pop()
        if isinstance(node, dict):
            nodes += [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items()]
        if prefix:
            keys.append(prefix)
    return list(dict.fromkeys(keys))


def in_one_line(error: Exception) -> str:
    """`explain`, with the choices that Hydra lists on the same line."""
    return " ".join(explain(error).replace("\n\t", ", ").replace(":, ", ": ").split())
