"""Models on the Hugging Face Hub: the parent process fetches them once; the workers read the local cache."""

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError, one_line
from sdopt.pipelines.catalog import (
    NOT_RUN,
    parts_of,
    read_json,
    require_kind,
    text_to_image,
)
from sdopt.pipelines.family import family_named
from sdopt.pipelines.parts import TEXT_ENCODERS
from sdopt.pipelines.transformer_files import (
    base_of,
    parts_apart,
)
from sdopt.pipelines.weights import SENTENCEPIECES, require_variant, variants_among
from sdopt.schema import Model

NETWORK_WEIGHTS = "diffusion_pytorch_model.safetensors"
"""The file with the weights of one diffusers network; its configuration lies beside it."""


def fetch_base(model: Model) -> None:
    """Downloads what a transformer in a file has not: the pipeline of its base, without the networks in files.

    Raises UsageError as `hub_folder` does.
    """
    base = base_of(model)
    if base.weights == "hub":
        # Which networks lie in files is known when the index is here; the transformer always does.
        index = hub_folder(base, fetch=True, without=ANY_NETWORK)
        hub_folder(base, fetch=True, without=parts_apart(model, index))
        base_folder(model)  # all of it is there now


ANY_NETWORK = ("transformer", "vae", *TEXT_ENCODERS)
"""All networks of a pipeline: without their weights, its configurations and tokenizers remain."""


def base_folder(model: Model) -> Path:
    """Returns the local folder of the pipeline that a transformer in a file belongs to.

    Raises:
        UsageError: it is not there.
    """
    base = base_of(model)
    if base.weights != "hub":
        return Path(str(base.path))
    index = hub_folder(base, fetch=False, without=ANY_NETWORK)
    return hub_folder(base, fetch=False, without=parts_apart(model, index))


def hub_folder(model: Model, fetch: bool, without: Collection[str] = ()) -> Path:
    """Returns the local copy of a repository, with the files that its pipeline needs and no others.

    Without `fetch`, only the local cache is read. Of the parts `without` weights, the configurations are.

    Raises:
        UsageError: the repository or revision does not exist, is gated, is not in the cache and cannot be reached, or
            is no pipeline of safetensors files that sdopt runs.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, at = str(model.hub_id), model.origin
    with _of_the_hub(at):
        file = hf_hub_download(
            repository,
            "model_index.json",
            revision=model.revision,
            local_files_only=not fetch,
        )
        index = read_json(Path(file))
        require_kind(index, at)
        names = _names(repository, model.revision) if fetch else []
        of_parts = {
            part: there
            for part, there in _variants(index, names).items()
            if part not in without
        }
        if names and (
            lacking := [part for part, there in of_parts.items() if not there]
        ):
            raise UsageError(
                f"{at}: has no safetensors files of {' and '.join(lacking)}, and sdopt loads no pickled weights: "
                "choose a revision that has them, as model.revision=refs/pr/1, or another repository of the same model"
            )
        if names:
            require_variant(of_parts, model.variant, at)
        patterns = _files(index, model.variant, names, without)
        folder = Path(
            snapshot_download(
                repository,
                revision=model.revision,
                allow_patterns=patterns,
                local_files_only=not fetch,
            )
        )
        # Of a repository that was looked at, or fetched in another variant, some files are there.
        there = [
            str(path.relative_to(folder))
            for path in folder.glob("*/*")
            if path.exists()
        ]
        needed = [
            variants_there
            for part, variants_there in _variants(index, there).items()
            if part not in without
        ]
        if not fetch and not all(
            {model.variant, None} & variants for variants in needed
        ):
            raise LocalEntryNotFoundError(str(folder))
        return folder


def _variants(
    index: Mapping[str, object], names: Sequence[str]
) -> dict[str, set[str | None]]:
    """Returns the variants in which files of these names hold the weights of each network of a pipeline."""
    family = family_named(text_to_image(index.get("_class_name")))
    by_part = {}
    for part in parts_of(index):
        if part in family.networks and part in index:
            files = (name.removeprefix(f"{part}/") for name in names)
            by_part[part] = variants_among(files, family.library_of(part))
    return by_part


def hub_configs(
    repository: str, revision: str | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns a repository's `model_index.json` and the configurations of its denoiser, VAE and scheduler.

    They are fetched if needed.

    Raises:
        UsageError: the repository is not a pipeline, or it is not in the cache and cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    at = f"model={repository} (no folder here)"
    with _of_the_hub(at):
        index = read_json(
            Path(hf_hub_download(repository, "model_index.json", revision=revision))
        )
        denoiser = family_named(require_kind(index, at)).denoiser
        files = [
            hf_hub_download(repository, name, revision=revision)
            for name in (
                f"{denoiser}/config.json",
                "vae/config.json",
                "scheduler/scheduler_config.json",
            )
        ]
        first, second, third = (read_json(Path(file)) for file in files)
        return index, first, second, third


def download_bytes(model: Model) -> int | None:
    """Returns the most that `fetch_models` would download of a model; None if the hub cannot be reached."""
    from huggingface_hub import HfApi

    repository = str(model.hub_id)
    with suppress(UsageError):
        hub_folder(model, fetch=False)
        return 0
    try:
        with _of_the_hub(model.origin):
            info = HfApi().model_info(
                repository, revision=model.revision, files_metadata=True, timeout=10
            )
    except UsageError:
        return None
    siblings = info.siblings or []
    # The pipeline's index is not there yet: every folder counts as one of its parts.
    parts: dict[str, object] = {
        file.rfilename.partition("/")[0]: ["diffusers", ""]
        for file in siblings
        if "/" in file.rfilename
    }
    patterns = _files(parts, model.variant, [file.rfilename for file in siblings])
    total = 0
    for file in siblings:
        if any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in patterns):
            total += file.size or 0
    return total


def hub_network(repository: str, key: str, fetch: bool) -> Path:
    """Returns the local copy of a repository with one diffusers network, such as a VAE.

    `key` is the option whose `hub_id` names it. Without `fetch`, only the local cache is read.

    Raises:
        UsageError: the repository does not exist, is gated, or is not in the cache and cannot be reached.
    """
    names, at = (NETWORK_WEIGHTS, "config.json"), f"{key}.hub_id={repository}"
    return fetch_files(repository, names, at, fetch)[0].parent


def fetch_files(
    repository: str, names: Sequence[str], at: str, fetch: bool = True
) -> list[Path]:
    """Returns the local copies of files of a repository.

    Messages begin `at` the key that names it. Without `fetch`, only the cache is read.

    Raises:
        UsageError: the repository does not exist, is gated, lacks a file, or cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    with _of_the_hub(at):
        return [
            Path(hf_hub_download(repository, name, local_files_only=not fetch))
            for name in names
        ]


def commit_of(path: Path) -> str | None:
    """Returns the commit of a repository that a local copy of a file or a folder is of; None if it is no such copy."""
    folders = path.parts
    if _SNAPSHOTS not in folders[:-1]:
        return None
    return folders[folders.index(_SNAPSHOTS) + 1]


_SNAPSHOTS = "snapshots"
"""The folder of the hub's cache that has the copies of a repository, by commit."""


@contextmanager
def _of_the_hub(at: str) -> Iterator[None]:
    """Turns errors of `huggingface_hub` within the block into a UsageError in its words, `at` the key of a repository."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,  # of its HTTP client, which depends on its version
        LocalEntryNotFoundError,
    )

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"{at}: not complete in the local cache ({HF_HUB_CACHE}), and not fetched here (the hub cannot be reached, "
            "or only the cache is read)"
        ) from error
    except (HTTPError, OSError, ValueError) as error:  # what all others derive from
        raise UsageError(f"{at}: {one_line(error) or type(error).__name__}") from error


def _names(repository: str, revision: str | None) -> list[str]:
    """Returns the names of a repository's files; [] if the hub cannot be asked, so that nothing can be fetched."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    with suppress(HTTPError, OSError, ValueError):
        return HfApi().list_repo_files(repository, revision=revision)
    return []


def _files(
    index: dict[str, object],
    variant: str | None,
    names: Sequence[str],
    without: Collection[str] = (),
) -> list[str]:
    """Returns patterns of a pipeline's files: configurations, vocabularies, and safetensors weights.

    Of a part that has no files of the `variant`, those without one are read; `names` are those of all files, if known.
    The weights of the parts `without` are left out.
    """
    patterns = ["model_index.json"]
    for name, value in index.items():
        if isinstance(value, list) and value[0] is not None and name not in NOT_RUN:
            patterns += [f"{name}/*.json", f"{name}/*.txt", f"{name}/*.jinja"]
            patterns += [f"{name}/{file}" for file in SENTENCEPIECES]
            if name in without:
                continue
            of_variant = _weights(name, f".{variant}") if variant else []
            there = not names or any(
                fnmatch.filter(names, pattern) for pattern in of_variant
            )
            patterns += of_variant if of_variant and there else _weights(name, "")
    return patterns


def _weights(part: str, infix: str) -> list[str]:
    stems = [f"{part}/{stem}" for stem in ("model", "diffusion_pytorch_model")]
    shards = "-?????-of-?????"
    forms = (infix, f"{infix}{shards}", f"{shards}{infix}")
    files = product(stems, dict.fromkeys(forms))
    return [f"{stem}{form}.safetensors" for stem, form in files]
