"""Turns Hydra's errors into one line that names the key and what to do."""

import difflib
import re
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from sdopt.config.paths import CONF, CONFIG_NAME
from sdopt.errors import command_line


def explain(error: Exception) -> str:
    """Returns Hydra's message without the paths that it searched; for an unknown key, names similar ones."""
    message = str(error).partition("Config search path")[0].strip()
    unknown = re.match(r"Could not override '([^']+)'", message)
    if grouped := re.match(r"(?:In '.*': Could not override '|Multiple values for )(?:experiment/)?(\w+)", message):
        own = f"write `- override /{grouped[1]}: …` in its defaults list"
        return f"{grouped[1]}: begin the file with `# @package _global_`, and {own}"
    if unknown is None and (option := re.match(r"In '[^']*': Could not find '([^']+)/([^'/]+)'", message)):
        known = re.findall(r"^\t(\S+)$", message, re.MULTILINE)
        near = difflib.get_close_matches(option[2], known, n=2)
        advice = f"did you mean {' or '.join(near)}? " if near else ""
        choices = f"the options are {', '.join(known)}" if known else "there is no such group"
        if plugin := re.fullmatch(r"hydra/(launcher|sweeper)", option[1]):
            name = option[2].partition("_")[0]
            choices += f"; others are plugins, as in pip install hydra-{name}-{plugin[1]}"
        choices += "; or a path, or owner/name on the hub" if option[1] == "model" else ""
        return f"{option[1]}={option[2]}: unknown option; {advice}{choices}{_own_file(option[1], option[2])}"
    if unknown is None:
        return message
    if designs := _designs_with(unknown[1]):
        chosen = " or ".join(f"study={design}" for design in designs)
        more = "; beside experiment=…, which has its own, +study.variants.NAME=[…] adds one"
        own = more if unknown[1] == "study.variants" else ""
        return f"{unknown[1]}: the chosen study has no such key; choose {chosen} as well{own}"
    known = [key for key in _known_keys() if not key.endswith("._target_")]
    same = [key for key in known if key.rpartition(".")[2] == unknown[1]]
    if near := same or difflib.get_close_matches(unknown[1], known, n=2):
        return f"{unknown[1]}: unknown key; did you mean {' or '.join(near)}? `sdopt run --help` lists all"
    added = f"a key or group that is not in the defaults list needs a +, as in +{unknown[1]}=…"
    return f"{unknown[1]}: unknown key; `sdopt run --help` lists all; {added}"


def _own_file(group: str, option: str) -> str:
    """Returns how the option's file in a folder here is found, if there is one; else ""."""
    for file in sorted(Path().glob(f"*/{escape(group)}/{escape(option)}.y*ml")):
        folder = command_line("run", "--config-dir", str(file)[: -len(f"/{group}/{file.name}")])
        return f"; {file} is one with `{folder} …`" if file.suffix == ".yaml" else f"; {file} must be named .yaml"
    return ""


def _designs_with(key: str) -> list[str]:
    """Returns the study designs that have a key of `study`."""
    group, _, name = key.partition(".")
    files = sorted((CONF / "study").glob("*.yaml")) if group == "study" else []
    return [file.stem for file in files if name in OmegaConf.load(file)]


def _known_keys() -> list[str]:
    """Returns every group and every key of the default configuration, in full."""
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
    """Returns `explain(error)` as one line, with the choices that Hydra lists below each other."""
    return " ".join(explain(error).replace("\n\t", ", ").replace(":, ", ": ").split())
