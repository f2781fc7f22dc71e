"""Digests the inputs of a study beyond its configuration: weights, prompts, and the code of options.

The digests show whether a study to resume is the same, or only has the same configuration.
"""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

import sdopt
from sdopt.errors import UsageError
from sdopt.pipelines.factory import built
from sdopt.pipelines.loading import folder_of
from sdopt.pipelines.tasks import files_of
from sdopt.pipelines.weights import state_of
from sdopt.schema import Model
from sdopt.study.sources import own_files
from sdopt.variant import Variant

_PACKAGE = Path(sdopt.__file__).parent

_WEIGHTS_AND_SETTINGS = (".safetensors", ".json", ".txt", ".model")

_BLOCK, _ROW = 4 * 2**20, 4096


def inputs_of(variant: Variant, model: Callable[[Model], str]) -> dict[str, str]:
    """Returns digests of a variant's inputs, by input. `code()` covers the code of sdopt's own options.

    Args:
        variant: the variant.
        model: `of_model`, or a cached version of it.
    """
    own = own_files(type(option) for option in variant.optimizations.values())
    own += [file for function in variant.functions if (file := Path(function.rpartition(":")[0])).is_file()]
    files = {"options": own} | {name: [path] for name, path in files_of(variant.task, variant.model).items()}
    with suppress(UsageError):  # a variant is only planned if its files were not fetched
        files["parts"] = variant.files(fetch=False)
    if variant.workload.latents is not None:
        files["latents"] = [Path(variant.workload.latents).expanduser()]
    return {
        "model": model(variant.model),
        "prompts": of_prompts([*variant.prompts, *variant.pictured, *variant.negatives]),
        **{name: _digest(_content(path, state_of(path)) for path in paths) for name, paths in files.items() if paths},
    }


@cache
def code() -> str:
    """Returns a digest of sdopt's own source files."""
    return _digest(path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py")))


def of_prompts(prompts: Iterable[str]) -> str:
    """Returns a digest of prompts: those of the timed calls, then those that are drawn, then the negative ones."""
    return _digest(prompt.encode() for prompt in prompts)


def of_model(model: Model) -> str:
    """Returns a digest of the names and contents of a model's files, to the last number: one layer may differ."""
    if model.factory is not None:
        described = built(model)
        return "not built" if described is None else described.digest
    given = Path(model.path).expanduser() if model.path else None
    try:
        sources = [given if given and given.is_file() else folder_of(model)]
    except UsageError:
        return "not fetched"  # a variant that is only planned, or cannot run here, needs no weights
    sources += [Path(model.tokenizer).expanduser()] if model.tokenizer else []
    files = [file for source in sources for file in ([source] if source.is_file() else _read_from(source))]
    return _digest(part for path in files for part in (path.name.encode(), _content(path, state_of(path))))


def _read_from(folder: Path) -> list[Path]:
    """Returns the files that a pipeline is loaded from: its index and its components, but no documentation."""
    files = (path for path in folder.rglob("*") if path.suffix in _WEIGHTS_AND_SETTINGS)
    return sorted(path for path in files if path.parent != folder or path.name == "model_index.json")


@lru_cache(maxsize=256)
def _content(path: Path, _state: tuple[int, ...]) -> bytes:
    """Returns a file's bytes; of a large one the sum and the parity of each 4 KiB as words of 8 bytes, and the rest.

    A cryptographic digest of gigabytes would take several times as long.
    """
    size = path.stat().st_size
    if size <= _BLOCK:
        return path.read_bytes()
    found = [str(size).encode()]
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            words = np.frombuffer(block, "<u8", len(block) // _ROW * _ROW // 8).reshape(-1, _ROW // 8)
            found += [words.sum(1, "<u8").tobytes(), np.bitwise_xor.reduce(words, 1).tobytes(), block[words.nbytes :]]
    return hashlib.sha256(b"".join(found)).digest()


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]
