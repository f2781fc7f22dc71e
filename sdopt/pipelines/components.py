"""Builds the parts of a model without their weights, to find their errors before a worker starts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import part_class
from sdopt.pipelines.checks import weight_files
from sdopt.pipelines.loading import folder_of
from sdopt.pipelines.tokenizer import lacking_vocabulary
from sdopt.schema import Model


def require_parts(model: Model) -> None:
    """Checks that each part of a pipeline's folder can be built from its configuration, and that its weights fit it.

    Call it in a process that may import the model's libraries.

    Raises:
        UsageError: a line for each faulty part, with the file and the reason.
    """
    folder = folder_of(model)
    if model.weights == "path" and folder != Path(str(model.path)).expanduser():
        return  # a single file, whose configurations come with sdopt
    at = f"model.hub_id={model.hub_id}" if model.weights == "hub" else f"model.path={folder}"
    problems = [f"{at}: {problem}" for problem in _problems(folder, model, at)]
    if problems:
        raise UsageError(problems)


def count_weights(model: Model) -> int:
    """Returns the number of parameters of a model's networks, built without their weights: like `require_parts`.

    Raises:
        UsageError: the model's files are not there.
    """
    from sdopt.pipelines.random_weights import empty_network

    folder = folder_of(model)
    networks = (empty_network(folder / name, *parts) for name, parts in _parts(folder) if not _is_no_network(name))
    return sum(weight.numel() for network in networks for weight in network.parameters())


def _parts(folder: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the names of the parts that sdopt loads, each with its library and its class."""
    for name, value in json.loads((folder / "model_index.json").read_text()).items():
        if isinstance(value, list) and None not in value and name not in ("safety_checker", "feature_extractor"):
            library, class_name = value
            yield name, (library, class_name)


def _is_no_network(name: str) -> bool:
    return name == "scheduler" or name.startswith("tokenizer")


def _problems(folder: Path, model: Model, at: str) -> Iterator[str]:
    for name, (library, class_name) in _parts(folder):
        try:
            cls = part_class(library, class_name)
            if name.startswith("tokenizer"):
                if lacking := lacking_vocabulary(folder / name):
                    yield f"{name}/ {lacking}"
                    continue
                cls.from_pretrained(folder / name, local_files_only=True)
            elif name == "scheduler":
                cls.from_pretrained(folder / name, local_files_only=True)
            else:
                yield from _misfits(folder / name, library, class_name, model, at)
        except UsageError as error:
            yield from (problem.removeprefix(f"{at}: ") for problem in error.problems)
        except Exception as error:  # raised by a constructor for a configuration that it does not support
            reason = " ".join(str(error).split())[:200]
            yield f"{name}/: no {class_name} can be made of its configuration ({type(error).__name__}: {reason})"


def _misfits(folder: Path, library: str, class_name: str, model: Model, at: str) -> Iterator[str]:
    """Yields the reasons why the weights of a network do not fit its configuration."""
    from sdopt.pipelines.random_weights import empty_network

    network: Any = empty_network(folder, library, class_name)
    wanted = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: shape for file in weight_files(folder, model.variant, at).values() for name, shape in file.items()}
    # The library renames some tensors at loading, so tensors with other names are not checked here.
    common = wanted.keys() & found.keys()
    wrong = [name for name in wanted if name in common and wanted[name] != found[name]]
    if wrong:
        yield (
            f"{folder.name}/: {len(wrong)} tensors are of other shapes than its config.json says, such as {wrong[0]}: "
            f"{found[wrong[0]]}, not {wanted[wrong[0]]}"
        )
    elif library == "diffusers" and not common:
        yield f"{folder.name}/: holds weights of another network: none of their names belongs to a {class_name}"
