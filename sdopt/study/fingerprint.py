"""Digests the inputs of a study beyond its configuration: weights, prompts, and the code of options.

The digests show whether a study to resume is the same, or only has the same configuration.
"""

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from sdopt.about import PACKAGE
from sdopt.errors import UsageError
from sdopt.pipelines.catalog import state_of
from sdopt.pipelines.factory import built
from sdopt.pipelines.loading import folder_of
from sdopt.pipelines.tasks import files_of
from sdopt.pipelines.transformer_files import is_transformer
from sdopt.schema import Model
from sdopt.variant import Variant

_WEIGHTS_AND_SETTINGS = (".safetensors", ".json", ".txt", ".model", ".jinja")

_PROMPTS = "prompts"

NOT_FETCHED = "not fetched"
"""Stands for the digest of a model that is not here."""

_BLOCK = 4 * 2**20
"""Bytes that are read at a time, and the size of files that are digested whole."""

_ROW = 4096


def inputs_of(variant: Variant, model: Callable[[Model], str]) -> dict[str, str]:
    """Returns digests of a variant's inputs, by input; that of its model by `of_model` or a cached version of it.

    `code()` covers the code of sdopt's own options.
    """
    options = map(type, variant.optimizations.values())
    functions = [function.rpartition(":")[0] for function in variant.functions]
    files = {"options": own_files(options, list(map(Path, functions)))}
    for name, path in files_of(variant.task, variant.model).items():
        files[name] = [path]
    with suppress(UsageError):  # of files that were not fetched: it is only planned
        files["parts"] = variant.files(fetch=False)
    if variant.workload.latents is not None:
        files["latents"] = [Path(variant.workload.latents).expanduser()]
    inputs = {"model": model(variant.model), _PROMPTS: of_prompts(variant)}
    for name, paths in files.items():
        if paths:
            inputs[name] = _digest(_content(path, state_of(path)) for path in paths)
    return inputs


def changed_inputs(
    variant: Variant,
    recorded: Mapping[str, str],
    model: Callable[[Model], str],
) -> dict[str, tuple[str, str]]:
    """Returns which of the files behind a variant's recorded inputs are others now, each with both digests.

    What was not fetched at one of the two times is left out, and so are prompts, which are read once.
    """
    changed = {}
    for name, digest in inputs_of(variant, model).items():
        was = recorded.get(name, digest)
        if name == _PROMPTS or NOT_FETCHED in (digest, was):
            continue
        if digest != was:
            changed[name] = (was, digest)
    return changed


@cache
def code() -> str:
    """Returns a digest of sdopt's own source files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return _digest(file.read_bytes() for file in files)


def of_prompts(variant: Variant, count: int | None = None) -> str:
    """Returns a digest of prompts: those of the timed calls, then those that are drawn, then the negative ones.

    `count` is how many are drawn; None stands for all.
    """
    drawn = variant.pictured[:count]
    negatives = variant.negatives[: max(len(variant.prompts), len(drawn))]
    prompts = (*variant.prompts, *drawn, *negatives)
    return _digest(prompt.encode() for prompt in prompts)


def of_model(model: Model) -> str:
    """Returns a digest of the names and contents of a model's files, to the last number: one layer may differ."""
    if model.factory is not None:
        described = built(model)
        if described is None:
            return "not built"
        return described.digest
    given = Path(model.path).expanduser() if model.path else None
    try:
        sources = [given if given and given.is_file() else folder_of(model)]
        if is_transformer(model):
            sources.append(folder_of(model))
            parts = filter(None, (model.parts or {}).values())
            sources += [Path(part).expanduser() for part in parts]
    except UsageError:
        return NOT_FETCHED  # a variant that is only planned, or cannot run here, needs no weights
    if model.tokenizer:
        sources.append(Path(model.tokenizer).expanduser())
    files: list[Path] = []
    for source in sources:
        files += [source] if source.is_file() else _read_from(source)
    if given:
        beside = given.with_suffix(".yaml")  # which may say what the file predicts
        files += [beside] if beside.is_file() else []
    states = [(path, state_of(path)) for path in files]
    return _digest_of(tuple(states))


@lru_cache(maxsize=64)
def _digest_of(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    """Returns a digest of the names and contents of files that are in these states."""
    contents: list[bytes] = []
    for path, state in files:
        contents += [path.name.encode(), _content(path, state)]
    return _digest(contents)


def _read_from(folder: Path) -> list[Path]:
    """Returns the files that a pipeline is loaded from: its index and its components, but no documentation.

    A component may be a link to the folder of another pipeline, into which `rglob` does not look.
    """
    files = [*folder.glob("model_index.json")]
    for path in folder.glob("*/*"):
        if path.suffix in _WEIGHTS_AND_SETTINGS:
            files.append(path)
    return sorted(files)


@lru_cache(maxsize=256)
def _content(path: Path, _state: tuple[int, ...]) -> bytes:
    """Returns a file's bytes; of a large one the sum and the parity of each 4 KiB as words of 8 bytes, and the rest.

    A cryptographic digest of gigabytes would take several times as long.
    """
    size = path.stat().st_size
    if size <= _BLOCK:
        return path.read_bytes()
    parts = [str(size).encode()]
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            rows = len(block) // _ROW
            words = np.frombuffer(block, "<u8", rows * _ROW // 8)
            words = words.reshape(rows, _ROW // 8)
            parts += [
                words.sum(1, "<u8").tobytes(),
                np.bitwise_xor.reduce(words, 1).tobytes(),
                block[words.nbytes :],
            ]
    content = b"".join(parts)
    return hashlib.sha256(content).digest()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def own_files(options: Iterable[type], functions: Sequence[Path] = ()) -> list[Path]:
    """Returns the files of classes that come neither with sdopt nor with a library, and of all that these import.

    Includes the files of their base classes. Follows every import statement, whether it runs or not; misses modules
    that are imported by a name computed at run time. `functions` are files that are run by their paths, and may import
    what lies beside them.
    """
    files: dict[Path, None] = {}
    classes = chain.from_iterable(option.__mro__ for option in options)
    waiting = [cls.__module__ for cls in classes]
    for file in filter(Path.is_file, functions):
        files[file] = None
        waiting += _imported(file.stem, file)
    folders = [file.parent for file in files]
    while waiting:
        name = waiting.pop()
        source = _file_of(name) or _beside(name, folders)
        if source is None or source in files or not _own(source):
            continue
        files[source] = None
        waiting += _imported(name, source)
    return sorted(files)


def _beside(name: str, folders: Sequence[Path]) -> Path | None:
    """Returns the source file of a module that lies in one of some folders; None if none has it."""
    for folder in folders:
        path = folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def _own(file: Path) -> bool:
    """Returns whether a file belongs neither to sdopt, nor to Python, nor to a library that is installed."""
    resolved = file.resolve()
    folders = [PACKAGE]
    for kind in ("stdlib", "platstdlib"):
        folders.append(Path(sysconfig.get_path(kind)))
    if any(resolved.is_relative_to(folder.resolve()) for folder in folders):
        return False
    # By name, because an environment may take libraries from the folder of another one.
    libraries = {"site-packages", "dist-packages"}
    return libraries.isdisjoint(resolved.parts)


def _file_of(name: str) -> Path | None:
    """Returns the source file of a module; None if it has none, or does not exist."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        loaded = spec.origin if spec else None
    if not loaded or not loaded.endswith(".py"):
        return None
    file = Path(loaded)
    if file.is_file():
        return file
    return None


def _imported(name: str, file: Path) -> Iterator[str]:
    """Yields the names of the modules that a module may import, and of the packages that these are in."""
    package = name
    if file.name != "__init__.py":
        package, _, _ = name.rpartition(".")
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            outer: list[str] = []
            if node.level:
                parts = package.split(".")
                outer = parts[: len(parts) - node.level + 1]
            if node.module:
                outer.append(node.module)
            base = ".".join(outer)
            # A name imported from a package may be a submodule.
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for imported in names:
            parts = imported.split(".")
            for length in range(1, len(parts) + 1):
                yield ".".join(parts[:length])
