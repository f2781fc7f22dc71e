"""Makes options of a user's own files: `model=PATH`, a file, folder or repository, and `patch=FILE.py:FUNCTION`.

Hydra finds the option in its ConfigStore, under the path, so that a sweep, a variant, a preset or a search chooses it
as it does any other.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from sdopt.config.overrides import group_of, listed, parsed_override, written_key
from sdopt.config.paths import CONF, options_of, whole_path
from sdopt.errors import UsageError
from sdopt.pipelines.family import Family
from sdopt.pipelines.functions import FUNCTION, absolute
from sdopt.pipelines.twins import settings_of_author, titles_of
from sdopt.record.choices import quoted

_KEYS = ("model", "model.path")

_FUNCTION = re.compile(r"[^'\"=:,+\[\]{}]+\.py:\w+")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_ANY_FOLDER = "folder"
"""The option whose keys a folder, or a repository of no published model, starts from."""


def with_own_options(
    overrides: Sequence[str],
    models: Collection[str],
) -> list[str]:
    """Returns overrides that choose a user's own models and functions as options, which are there from now on.

    Raises UsageError as `with_own_models` does.
    """
    return [_of_functions(override) for override in with_own_models(overrides, models)]


def with_own_models(
    overrides: Sequence[str],
    options: Collection[str],
) -> list[str]:
    """Returns overrides that choose a user's own model as an option of the group `model`, which is there from now on.

    `model.path=PATH` alone means `model=PATH`; beside a published model it means weights of that architecture.

    Args:
        overrides: those of a command line or of a variant.
        options: the options of the group `model`, which are never paths.

    Raises:
        UsageError: a value names neither an option nor something that is there, or a file is damaged.
    """
    by_key: dict[str, list[str]] = {key: [] for key in _KEYS}
    for override in overrides:
        if (key := written_key(override)) in by_key:
            by_key[key].append(override)
    if not any(by_key.values()):
        return list(overrides)
    models = by_key["model"][-1:]
    chosen = _values(models[0]) if models else []
    paths = by_key["model.path"][-1:]
    base = _value_of("model.base", overrides)
    others = [override for override in overrides if written_key(override) not in _KEYS]
    if paths and set(chosen) <= {_ANY_FOLDER}:
        values = _values(paths[0])
        if any(map(_is_there, values)):
            names = [_option(value, (), None, base) for value in values]
            return [f"model={','.join(names)}", *others]
    if not set(chosen) <= set(options):
        revision = _value_of("model.revision", overrides)
        if revision is not None and "," in revision:  # each job of a sweep has its own
            revision = None
        names = [_option(value, options, revision, base) for value in chosen]
        models = [f"model={','.join(names)}"]
    if paths and "model.weights" not in map(written_key, overrides):
        paths = [*paths, "model.weights=path"]
    return [*models, *others, *paths]


def _value_of(key: str, overrides: Iterable[str]) -> str | None:
    """Returns the value that overrides give a key at last; None if they do not, or give it null."""
    value = "null"
    for override in overrides:
        if written_key(override) == key:
            _, _, text = override.partition("=")
            value = text.strip("'\"")
    return None if value == "null" else value


def _of_functions(override: str) -> str:
    """Returns an override in which `patch=FILE.py:FUNCTION`, or a list of them, is an option that is there from now on.

    With commas and without brackets, as in a sweep, each is an option. Other overrides are returned as they are.
    """
    if written_key(override) != "patch" or ".py:" not in override:
        return override
    value = override.partition("=")[2].strip()
    texts = value.strip("[]").split(",")
    parts = [text.strip().strip("'\"") for text in texts]
    options = [[part] for part in parts]
    if value.startswith("["):
        options = [parts]
    names = []
    for functions in options:
        node = _keys("function", "patch") | {"functions": functions}
        name = _registered("patch", "+".join(functions), node)
        names.append(quoted(name))
    return f"patch={','.join(names)}"


def own_functions(overrides: Iterable[str]) -> list[str]:
    """Returns the functions of files that overrides name, also those of variants, each with its whole path, once."""
    named: dict[str, None] = {}
    for override in overrides:
        for function in _FUNCTION.findall(override):
            named[absolute(function.strip())] = None
    return list(named)


def named_again(overrides: Sequence[str]) -> list[str]:
    """Returns what names the functions of overrides once more beside `resume`, so that no folder decides what runs."""
    of_models = [word for word in overrides if group_of(written_key(word)) == "model"]
    builders = own_functions(of_models)
    words = []
    for function in own_functions(overrides):
        key = "model" if function in builders else "patch"
        words.append(f"{key}={function}")
    return words


def _values(override: str) -> list[str]:
    """Returns the text of a value, or of each that a sweep lists; a path need not be quoted as Hydra wants it."""
    raw = override.partition("=")[2]
    if _is_there(raw):
        return [raw]
    try:
        parsed = parsed_override(override)
    except UsageError:
        return [raw]
    if (values := listed(override)) is not None:
        return [re.sub(r"^(['\"])(.*)\1$", r"\2", value) for value in values]
    if parsed.is_sweep_override():
        return []
    value = parsed.value()
    return [value] if isinstance(value, str) else []


def _is_there(value: str) -> bool:
    try:
        return bool(value) and Path(value).expanduser().exists()
    # Longer than a path can be, or below the home of nobody.
    except (OSError, RuntimeError):
        return False


_OF_WEIGHTS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


def _option(
    value: str,
    options: Collection[str],
    revision: str | None,
    base: str | None,
) -> str:
    """Registers the option of a value, unless it is one of `options`; returns its name as Hydra's grammar takes it.

    The settings of a repository are those of the `revision`, which may be the only one that holds a pipeline; those of
    a file with a transformer are those of its `base`.
    """
    if value in options:
        return value
    if FUNCTION.fullmatch(value):
        node = _keys("factory") | {"factory": value}
        return quoted(_registered("model", value, node))
    if _is_there(value):
        path = whole_path(value)
        node = _at_path(path, base)
        return quoted(_registered("model", str(path), node))
    if _HUB_ID.fullmatch(value) and not value.endswith((".safetensors", ".ckpt")):
        node = _on_hub(value, revision)
        return quoted(_registered("model", value, node))
    if "/" in value or Path(value).suffix in _OF_WEIGHTS:
        raise UsageError(
            f"model={value}: there is no such file or folder; the named models are {', '.join(options)}"
        )
    return value  # Hydra says which options there are


def _registered(group: str, name: str, node: dict[str, Any]) -> str:
    """Registers an option with its keys; what it chooses in other groups, it does as `defaults`."""
    folder, _, last = f"{group}/{name.lstrip('/')}".rpartition("/")
    if defaults := node.pop("defaults", None):
        node = {"defaults": defaults, group: node}
        ConfigStore.instance().store(last, node, group=folder, package="_global_")
    else:
        ConfigStore.instance().store(last, node, group=folder)
    return name


_SAMPLED = ("steps", "guidance_scale", "distilled")
"""Keys of a model that tell how it is sampled."""


def _sampled_as(name: str | None, titles: Sequence[str]) -> dict[str, Any]:
    """Returns those keys of a model that has the tensors of one that comes with sdopt; {} without one.

    Args:
        name: the one that comes with sdopt.
        titles: what its author calls the model.
    """
    if name is None:
        return {}
    keys = _keys(name)
    sampled = {key: keys[key] for key in _SAMPLED}
    return sampled | settings_of_author(titles, name)


def _at_path(path: Path, base: str | None) -> dict[str, Any]:
    from sdopt.pipelines.families import (
        family_of,
        family_of_folder,
        in_float32,
        settings_of_folder,
        titles_of_folder,
        twin_of_folder,
    )

    here = {"weights": "path", "path": str(path)}
    if path.is_dir():
        twin = twin_of_folder(path)
        settings = settings_of_folder(path)
        settings |= _sampled_as(twin, titles_of_folder(path))
        defaults = _defaults(family_of_folder(path), twin, in_float32(path))
        return _keys(_ANY_FOLDER) | settings | here | defaults
    if base is not None:
        local = whole_path(base) if _is_there(base) else None
        node = _on_hub(base, None) if local is None else _at_path(local, None)
        # A folder of the published model is named as any other one is.
        twin = None if local is None else twin_of_folder(local)
        return node | settings_of_author(titles_of(path), twin or node["name"]) | here
    family = family_of(path) if path.suffix in (".safetensors", ".gguf") else None
    keys = _keys(family or _ANY_FOLDER) | here
    if family is not None:
        keys |= settings_of_author(titles_of(path), family)
    # The other parts of a transformer are those of the published model.
    return keys if "defaults" in keys else keys | {"hub_id": None}


def _on_hub(repository: str, revision: str | None) -> dict[str, Any]:
    published = {_keys(option)["hub_id"]: option for option in options_of("model")}
    if repository in published:
        return _keys(published[repository])
    from sdopt.pipelines.families import family_in, published_twin, settings_of
    from sdopt.pipelines.hub import hub_configs

    there = {"weights": "hub", "hub_id": repository, "path": None}
    *configs, scheduler = hub_configs(repository, revision)
    twin = published_twin(configs[0], configs[1], scheduler, [repository])
    return (
        _keys(_ANY_FOLDER)
        | settings_of(*configs)
        | _sampled_as(twin, [repository])
        | there
        | _defaults(family_in(configs[0]), twin, in_float32=False)
    )


_BFLOAT16 = {"override /precision": "bf16"}


def _defaults(family: Family, twin: str | None, in_float32: bool) -> dict[str, Any]:
    """Returns what a model's option chooses in other groups, unless the user does: a flow's scheduler, and a type.

    The type of a transformer is that of the model that comes with sdopt and has it, its `twin`; without one, that of
    its family, unless the weights are stored in float32.
    """
    in_bfloat16 = family.dtype == "bfloat16" and not in_float32
    if twin is not None:
        in_bfloat16 = _BFLOAT16 in _keys(twin).get("defaults", ())
    chosen = []
    if in_bfloat16:
        chosen.append(_BFLOAT16)
    if family.sampling == "flow":
        chosen.append({"override /scheduler": "flow_euler"})
    return {"defaults": chosen} if chosen else {}


def _keys(option: str, group: str = "model") -> dict[str, Any]:
    """Returns the keys of a packaged option, with their values."""
    file = CONF / group / f"{option}.yaml"
    node: Any = OmegaConf.to_container(OmegaConf.load(file))
    keys = dict(node.get(group, node))
    if "defaults" in node:
        keys["defaults"] = node["defaults"]
    return keys
